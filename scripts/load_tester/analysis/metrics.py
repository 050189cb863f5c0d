"""Computes figures from records: latencies, rates, goodput, errors, fairness, caching, tokens.

Headline latencies count from the *intended* instant, so that a stall of server or client does not hide the delay of
later requests (Tene's "coordinated omission"); latencies from the send stand beside them. A failed request has no
latency and counts as a miss.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.workload.planned_request import PlannedRequest
from scripts.load_tester.workload.request_classes import RequestClass

Figures = dict[str, Any]


def latencies(records: Sequence[RequestRecord], rng: np.random.Generator) -> Figures:
    """Summaries in seconds over successful requests.

    ``ttft``, ``e2e``: from the intended instant; ``ttft_sent``, ``e2e_sent``: from the send. ``itl``: gaps between
    successive events with output. ``tpot``: per request, time after the first event over tokens after it.
    ``first_gap``: between first and second event alone, where disaggregation shows.
    """
    good = [record for record in records if record.is_ok and record.stamps_s]
    gaps = [np.array(record.gaps_s) for record in good]
    every_gap = np.concatenate(gaps) if gaps else np.array([])
    itl = stats.summary(every_gap, rng)
    if len(every_gap):
        itl |= stats.clustered_intervals(gaps, rng)
    return {
        "ttft": stats.summary([record.ttft_s for record in good], rng),
        "ttft_sent": stats.summary([record.stamps_s[0] - record.released_s for record in good], rng),
        "itl": itl,
        "tpot": stats.summary([tpot for record in good if (tpot := record.tpot_s) is not None], rng),
        "first_gap": stats.summary([gap[0] for gap in gaps if len(gap)], rng),
        "e2e": stats.summary([record.e2e_s for record in good], rng),
        "e2e_sent": stats.summary([record.stamps_s[-1] - record.released_s for record in good], rng),
    }


def throughput(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> Figures:
    """Rates inside a window, ends included: everything received in it counts.

    Args:
        records: all requests of the run, measured or not.
    """
    length = max(end_s - begin_s, 1e-9)
    out = 0.0
    requests = tokens_in = events = 0
    for record in records:
        inside = [n for at, n in zip(record.stamps_s, record.counts, strict=True) if begin_s <= at <= end_s]
        out += record.tokens_per_count * sum(inside)
        events += len(inside)
        if record.is_ok and begin_s <= record.stamps_s[-1] <= end_s:
            requests += 1
        if record.stamps_s and begin_s <= record.stamps_s[0] <= end_s:
            tokens_in += record.num_input if record.usage_prompt is None else record.usage_prompt
    return {
        "window_s": [begin_s, end_s],
        "requests_per_s": requests / length,
        "output_tokens_per_s": out / length,
        "input_tokens_per_s": tokens_in / length,
        "events_per_s": events / length,
    }


# ---- service levels -------------------------------------------------------------------------------------------------


def misses(record: RequestRecord, limits: dict[str, float]) -> list[str]:
    """Limits that a request breaks; ``failed`` without output, ``deadline`` if it missed its own."""
    if not record.is_ok or not record.stamps_s:
        return ["failed"]
    broken = []
    gaps = record.gaps_s
    for name, limit in limits.items():
        value: float | None
        if name == "itl":
            value = limited_gap(gaps) if gaps else None
        else:
            value = {"ttft": record.ttft_s, "e2e": record.e2e_s, "tpot": record.tpot_s}[name]
        if value is not None and value > limit:
            broken.append(name)
    if record.deadline_ms is not None and record.e2e_s * 1e3 > record.deadline_ms:
        broken.append("deadline")
    return broken


def limited_gap(gaps: Sequence[float]) -> float:
    """What ``--slo-itl`` limits: the smallest gap that 99 % of the gaps do not exceed, without interpolation."""
    return sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1]


def slo_limits(
    request: RequestRecord | PlannedRequest, slos: dict[str, float], classes: dict[str, RequestClass]
) -> dict[str, float]:
    """Limits of a request: its own override those of its class, and these the run's."""
    request_class = classes.get(request.class_name)
    return slos | dict(request_class.slos if request_class else ()) | dict(request.slos)


def service(records: Sequence[RequestRecord], slos: dict[str, float], classes: dict[str, RequestClass]) -> Figures:
    """Attainment; without any limit every successful request is good.

    ``num_free`` is the equivalent number of independent requests. ``alone_good`` and ``alone_count`` are of requests
    without any other in flight: the share that a lower rate could reach.

    Args:
        records: measured requests.
    """
    broken = [misses(record, slo_limits(record, slos, classes)) for record in records]
    good = sum(not names for names in broken)
    alone = _alone(records)
    in_time = sorted(range(len(records)), key=lambda place: records[place].intended_s)
    num_free = len(records) / stats.correlation_time(np.array([float(not broken[place]) for place in in_time]))
    low, high = stats.proportion_interval(good * num_free / max(1, len(records)), num_free)
    return {
        "limits_s": slos,
        "good": good,
        "count": len(records),
        "attainment": good / len(records) if records else 0.0,
        "attainment_ci": [low, high],
        "num_free": num_free,
        "alone_good": sum(not names and is_alone for names, is_alone in zip(broken, alone, strict=True)),
        "alone_count": sum(alone),
        "misses": dict(Counter(name for names in broken for name in names)),
    }


def goodput(
    records: Sequence[RequestRecord],
    slos: dict[str, float],
    classes: dict[str, RequestClass],
    begin_s: float,
    end_s: float,
) -> float:
    """Good requests per second inside a window, which are among the requests of ``throughput``: those that end in it.

    Args:
        records: all requests of the run, measured or not.
    """
    ended = [record for record in records if record.stamps_s and begin_s <= record.stamps_s[-1] <= end_s]
    good = sum(not misses(record, slo_limits(record, slos, classes)) for record in ended)
    return good / max(end_s - begin_s, 1e-9)


def _alone(records: Sequence[RequestRecord]) -> list[bool]:
    """Whether each request was in flight without any other."""
    order = sorted(range(len(records)), key=lambda place: records[place].intended_s)
    alone = [True] * len(records)
    latest, latest_s = -1, -math.inf
    for place in order:
        if records[place].intended_s < latest_s:
            alone[place] = alone[latest] = False
        if records[place].ended_s > latest_s:
            latest, latest_s = place, records[place].ended_s
    return alone


# ---- other questions ------------------------------------------------------------------------------------------------


#: Explanations of failures that come without words from the server.
EXPLANATIONS = {
    "connect": "no connection could be opened",
    "no_socket": "this machine had no more files or ports for a connection",
    "dropped": "the connection was closed before the end of the response",
    "timeout": "no end within --timeout",
    "halted": "the run was stopped",
    "bad_http": "not HTTP",
}


def errors(records: Sequence[RequestRecord]) -> Figures:
    """Failures by kind, each with an example of the server's words, or an explanation."""
    failed = [record for record in records if not record.is_ok]
    kinds = Counter(record.error for record in failed)
    said = {record.error: record.message for record in reversed(failed) if record.message}
    examples = {record.error: EXPLANATIONS[record.error] for record in failed if record.error in EXPLANATIONS} | said
    return {
        "count": len(failed),
        "share": len(failed) / len(records) if records else 0.0,
        "kinds": dict(kinds.most_common()),
        "examples": examples,
    }


def groups(
    records: Sequence[RequestRecord],
    field: str,
    slos: dict[str, float],
    classes: dict[str, RequestClass],
    rng: np.random.Generator,
) -> Figures:
    """Main figures of each class or tenant, if there are several."""
    by_name: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_name.setdefault(getattr(record, field), []).append(record)
    if len(by_name) < 2:
        return {}
    found = {}
    for name, own in sorted(by_name.items()):
        good = [record for record in own if record.is_ok and record.stamps_s]
        found[name or "(none)"] = {
            "count": len(own),
            "failed": len(own) - len(good),
            "output_tokens": sum(record.num_output for record in good),
            "attainment": service(own, slos, classes)["attainment"],
            "ttft": stats.summary([record.ttft_s for record in good], rng),
            "e2e": stats.summary([record.e2e_s for record in good], rng),
        }
    return found


def fairness(
    tenants: Figures, records: Sequence[RequestRecord], every: Sequence[RequestRecord], begin_s: float, end_s: float
) -> Figures:
    """How evenly tenants are served.

    ``service_jain``: Jain's index over the share of its requested output that each tenant got. ``ttft_ratio``: worst
    over best median time to first token, where a failure takes forever; None if the worst median is infinite.
    ``unserved``: tenants with more than half of their requests failed. A tenant that asks for little fairly gets
    little, so tokens are compared only where tenants compete (Sheng et al., VTC, OSDI'24): ``backlogged_s`` counts the
    seconds in which at least two tenants had a request waiting throughout, ``tokens_per_s`` is what each of them got in
    these (prompts, at the first token, and output), ``backlogged_jain`` is Jain's index over that.

    Args:
        records: measured requests.
        every: all requests of the run, since those of the warm-up may be served after it.
        begin_s, end_s: the measured part; seconds outside of it do not count.
    """
    if not tenants:
        return {}
    asked: Counter[str] = Counter()
    for record in records:
        asked[record.tenant or "(none)"] += record.num_output_asked
    shares = [figures["output_tokens"] / max(1, asked[name]) for name, figures in tenants.items()]
    medians = _medians_with_failures(records)
    worst, best = max(medians.values()), min(medians.values())
    seconds, rates = _served_while_backlogged(every, begin_s, end_s)
    return {
        "tenants": len(tenants),
        "service_jain": stats.jain_index(shares),
        "ttft_ratio": worst / best if best > 0 and math.isfinite(worst) else None,
        "unserved": [name for name, median in medians.items() if math.isinf(median)],
        "backlogged_s": seconds,
        "tokens_per_s": rates,
        "backlogged_jain": stats.jain_index(list(rates.values())) if rates else None,
    }


def _medians_with_failures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Median time to first token of each tenant; infinite if more than half of its requests failed."""
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record.tenant or "(none)", []).append(record.ttft_s if record.is_ok else math.inf)
    medians = {name: statistics.median(values) for name, values in sorted(times.items())}
    return {name: m if math.isfinite(m) else statistics.median_low(times[name]) for name, m in medians.items()}


def _served_while_backlogged(
    records: Sequence[RequestRecord], begin_s: float, end_s: float
) -> tuple[int, dict[str, float]]:
    """Seconds in which several tenants waited throughout, and the tokens/s that each of them got."""
    waiting: dict[int, set[str]] = {}
    served: defaultdict[tuple[int, str], float] = defaultdict(float)
    for record in records:
        name = record.tenant or "(none)"
        first_s = record.stamps_s[0] if record.stamps_s else record.ended_s
        for second in range(math.ceil(max(record.intended_s, begin_s)), math.floor(min(first_s, end_s))):
            waiting.setdefault(second, set()).add(name)
        if record.stamps_s:
            served[math.floor(first_s), name] += record.num_input
        for at, count in zip(record.stamps_s, record.counts, strict=True):
            served[math.floor(at), name] += record.tokens_per_count * count
    contested = {second: names for second, names in waiting.items() if len(names) > 1}
    totals: dict[str, list[float]] = {}
    for second, names in contested.items():
        for name in names:
            totals.setdefault(name, []).append(served[second, name])
    return len(contested), {name: sum(some) / len(some) for name, some in sorted(totals.items())}


def caching(records: Sequence[RequestRecord]) -> Figures:
    """Prompt tokens found cached, against the most that a cache could hold from this run alone.

    Counts requests with the server's usage, if there are any. ``known_before_share`` is the share of prompt tokens that
    were cached beyond that: the server had them before the run, so its latencies are not those of new prompts. Tokens
    that the server counts beyond those sent do not count: they are of its chat template, which all prompts share, or of
    words with several tokens.
    """
    said = [record for record in records if record.usage_cached is not None and record.usage_prompt]
    compared = said or records
    asked = sum(record.num_input for record in compared)
    ideal = sum(record.ideal_cached for record in compared)
    found: Figures = {
        "prompt_tokens": asked,
        "ideal_tokens": ideal,
        "ideal_share": ideal / asked if asked else 0.0,
        "achieved_tokens": None,
        "achieved_share": None,
        "known_before_share": None,
    }
    if said:
        cached = sum(record.usage_cached or 0 for record in said)
        prompts = sum(record.usage_prompt or 0 for record in said)
        added = [max(0, (record.usage_prompt or 0) - record.num_input) for record in said]
        beyond = sum(
            max(0, (record.usage_cached or 0) - record.ideal_cached - more)
            for record, more in zip(said, added, strict=True)
        )
        found["achieved_tokens"] = cached
        found["achieved_share"] = cached / prompts
        found["known_before_share"] = beyond / prompts
    return found


def tokens(records: Sequence[RequestRecord]) -> Figures:
    """Compare the server's usage with what was sent and counted."""
    good = [record for record in records if record.is_ok]
    said = [record for record in good if record.usage_output is not None]
    exact = [record for record in said if record.has_counts]
    of_prompts = [record for record in good if record.usage_prompt is not None]
    known = [record for record in good if record.has_counts or record.usage_output is not None]
    return {
        # Both of requests whose prompts the server counted.
        "input_asked": sum(record.num_input for record in of_prompts),
        "input_said": sum(record.usage_prompt or 0 for record in of_prompts),
        "output_asked": sum(record.num_output_asked for record in good),
        "output_said": sum(record.usage_output or 0 for record in said),
        "output_counted": sum(record.num_counted for record in good),
        "without_usage": len(good) - len(said),
        "counted_exactly": len(exact),
        # Usage below the number of events is an error; where tokens were counted, any difference is.
        "usage_mismatches": sum(record.usage_output != record.num_counted for record in exact)
        + sum((record.usage_output or 0) < record.num_counted for record in said if not record.has_counts),
        "other_length_than_asked": sum(record.num_output != record.num_output_asked for record in known),
        "uncounted": len(good) - len(known),
    }


def stages(records: Sequence[RequestRecord], rng: np.random.Generator) -> Figures:
    """Summaries of the stages timed by the server, by name, in seconds."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.timings.items():
            found.setdefault(name, []).append(value)
    return {name: stats.summary(values, rng) for name, values in found.items()}
