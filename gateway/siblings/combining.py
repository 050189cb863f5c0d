"""Answers that concern all gateways of a group: which these are, and how one is made of those of all. Pure.

The first answer is that of the gateway that the client has reached. JSON is combined by the fields that
``gateway.http.openapi.answers`` describes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec

from common.errors import ErrorCode

_decode, _encode = msgspec.json.decode, msgspec.json.encode
#: Makes one answer of several; the number is of the most rows that the client wants.
Combine = Callable[[Sequence[bytes], int], bytes]
Row = dict[str, Any]

#: Series that come from the nodes' heartbeats, which all gateways get.
SHARED_SERIES = "baton_node"


def _sum(name: str, bodies: Sequence[bytes], limit: int) -> bytes:
    answers = [_decode(body) for body in bodies]
    return _encode({**answers[0], name: sum(answer[name] for answer in answers)})


def _requests(bodies: Sequence[bytes], limit: int) -> bytes:
    rows = [row for body in bodies for row in _decode(body)["requests"]]
    return _encode({"requests": sorted(rows, key=lambda row: -row["started_at"])[:limit]})


def _decisions(bodies: Sequence[bytes], limit: int) -> bytes:
    answers = [_decode(body) for body in bodies]
    rows = [row for answer in answers for row in answer["decisions"]]
    return _encode({**answers[0], "decisions": sorted(rows, key=lambda row: -row["ago_s"])[-limit:]})


def _workers(bodies: Sequence[bytes], limit: int) -> bytes:
    """The nodes as the first gateway knows them, with the requests of all."""
    first, *others = (_decode(body) for body in bodies)
    for answer in others:
        for name in ("num_in_flight", "num_waiting"):
            first[name] += answer[name]
        num_requests = {row["incarnation"]: row["num_requests"] for row in answer["workers"]}
        for row in first["workers"]:
            row["num_requests"] += num_requests.get(row["incarnation"], 0)
    return _encode(first)


def _flushed(bodies: Sequence[bytes], limit: int) -> bytes:
    first, *others = (_decode(body) for body in bodies)
    for answer in others:
        num_pages = {row["name"]: row["num_pages"] for row in answer["nodes"]}
        for row in first["nodes"]:
            row["num_pages"] += num_pages.get(row["name"], 0)
        first["num_pages"] += answer["num_pages"]
    return _encode(first)


def _own(bodies: Sequence[bytes], limit: int) -> bytes:
    """The answer of the gateway that was asked, where the others do the same and would say the same."""
    return bodies[0]


# ---- the live page ---------------------------------------------------------------------------------------------------


def _live(bodies: Sequence[bytes], limit: int) -> bytes:
    """Rates and counts are sums, and percentiles those of the slowest gateway."""
    answers = [_decode(body) for body in bodies]
    series = [answer["samples"][::-1] for answer in answers]  # the newest first, since the others may be younger
    samples = [_row([row for row in rows if row], _SAMPLE) for rows in zip_longest(*series)][::-1]
    queues = _grouped([row for answer in answers for row in answer["queues"]], ("model", "priority_class"), _QUEUE)
    errors = _grouped([row for answer in answers for row in answer["errors"]], ("code",), _ERROR)
    errors.sort(key=lambda row: (-row["last_minute"], -row["total"], row["code"]))
    return _encode({**answers[0], "samples": samples, "queues": queues, "errors": errors})


def _largest(values: Sequence[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _rounded_sum(values: Sequence[Any]) -> Any:
    return round(sum(values), 3)


Rule = Callable[[Sequence[Any]], Any]
_SAMPLE: Mapping[str, Rule] = {
    **dict.fromkeys(("requests_per_s", "tokens_per_s", "errors_per_s", "running", "waiting"), _rounded_sum),
    **dict.fromkeys(("ttft_p50_s", "ttft_p99_s", "inter_token_p50_s", "inter_token_p99_s"), _largest),
}
_QUEUE: Mapping[str, Rule] = {"waiting": sum, "oldest_wait_s": _largest}
_ERROR: Mapping[str, Rule] = {"total": sum, "last_minute": sum}


def _row(rows: Sequence[Row], rules: Mapping[str, Rule]) -> Row:
    return rows[0] | {name: rule([row[name] for row in rows]) for name, rule in rules.items()}


def _grouped(rows: Sequence[Row], keys: tuple[str, ...], rules: Mapping[str, Rule]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [_row(group, rules) for group in groups.values()]


# ---- metrics ---------------------------------------------------------------------------------------------------------


def combine_metrics(pages: Mapping[int, str]) -> str:
    """One page of Prometheus' format from those of several gateways, by index; the series of each get its label.

    The series of nodes are taken from the first page alone.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for number, (index, page) in enumerate(pages.items()):
        name = ""
        for line in page.split("\n"):  # a label may have other ends of lines
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                head, _ = families.setdefault(name, ([], []))
                if len(head) < 2:  # its help and its type
                    head.append(line)
            elif line and not name.startswith(SHARED_SERIES):
                families[name][1].append(_labelled(line, index))
            elif line and not number:
                families[name][1].append(line)
    return "".join(f"{line}\n" for head, samples in families.values() for line in (*head, *samples))


def _labelled(sample: str, index: int) -> str:
    name, mark, rest = sample.partition("{")
    if mark:
        return f'{name}{{gateway="{index}",{rest}'
    name, _, rest = sample.partition(" ")
    return f'{name}{{gateway="{index}"}} {rest}'


# ---- which answers ---------------------------------------------------------------------------------------------------

COMBINED: Mapping[tuple[str, str], Combine] = {
    ("POST", "/abort_request"): partial(_sum, "aborted"),
    ("POST", "/flush_cache"): _flushed,
    ("POST", "/v1/load_lora_adapter"): _own,
    ("POST", "/v1/unload_lora_adapter"): _own,
    ("GET", "/server_info"): partial(_sum, "num_in_flight"),
    ("GET", "/v1/live"): _live,
    ("GET", "/v1/requests"): _requests,
    ("GET", "/v1/workers"): _workers,
    ("GET", "/v1/workers/gateway/decisions"): _decisions,
}
METRICS = "/metrics"
#: One gateway alone has what these are about. It is asked for once this one has said that it does not.
_OWNED = re.compile(r"/v1/requests/.+/(timeline|priority)|/v1/responses/.+", re.DOTALL)
_MISSES = (ErrorCode.NOT_FOUND, ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND)


def is_owned(path: str) -> bool:
    return _OWNED.fullmatch(path) is not None


def is_miss(status: int, body: bytes) -> bool:
    """Whether a gateway answers that it does not have what was asked for."""
    return status in (400, 404) and any(f'"{code}"'.encode() in body for code in _MISSES)
