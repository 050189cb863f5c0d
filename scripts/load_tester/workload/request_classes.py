"""Classes of requests: those of ``--mix``, or the single one of the other options."""

import math
from dataclasses import dataclass, replace
from typing import Any

from common.config.scheduling import MAX_PRIORITY
from common.errors import ConfigError
from scripts.load_tester.config import LoadOptions, parse_seconds
from scripts.load_tester.workload.lengths import MAX_LENGTH, MAX_TURNS, LengthDistribution, parse_lengths
from scripts.load_tester.workload.planned_request import MAX_GROUPS


@dataclass(frozen=True)
class RequestClass:
    """A class of requests; ``share`` is its weight, and ``slos``, in seconds, override those of the run."""

    name: str
    input_len: LengthDistribution
    output_len: LengthDistribution
    turns: LengthDistribution
    think_s: float
    prefix_len: int
    prefix_groups: int
    share: float = 1.0
    priority: int | None = None
    deadline_ms: float | None = None
    priority_class: str = ""
    tenant: str = ""
    slos: tuple[tuple[str, float], ...] = ()


def mean_load(classes: dict[str, RequestClass]) -> tuple[float, float]:
    """Mean number of requests, and of output tokens, of a session."""
    total = sum(request_class.share for request_class in classes.values())
    turns = {name: request_class.share / total * request_class.turns.mean for name, request_class in classes.items()}
    return sum(turns.values()), sum(
        turns[name] * request_class.output_len.mean for name, request_class in classes.items()
    )


def request_classes_of(config: LoadOptions) -> dict[str, RequestClass]:
    """The classes of ``--mix``, or the single one of the other options, by name.

    Raises ConfigError: names class and key.
    """
    plain = RequestClass(
        "",
        parse_lengths(config.input_len, "--input-len"),
        parse_lengths(config.output_len, "--output-len"),
        parse_lengths(config.turns, "--turns", MAX_TURNS),
        parse_seconds(config.think, "--think") or 0.0,
        config.prefix_len,
        config.prefix_groups,
    )
    if not config.mix:
        return {"": plain}
    classes: dict[str, RequestClass] = {}
    for words in filter(None, (part.strip() for part in config.mix.split(";"))):
        name, _, rest = words.partition(":")
        name = name.strip()
        if not name or name in classes:
            raise ConfigError(f"--mix: every class needs its own name: {words!r} has none")
        request_class = replace(plain, name=name)
        for pair in filter(None, rest.split(",")):
            request_class = _with(request_class, pair)
        classes[name] = request_class
    if not classes:
        raise ConfigError("--mix must name at least one class")
    return classes


#: Keys with integer values: field, minimum and maximum.
_WHOLE = {
    "prefix": ("prefix_len", 0, MAX_LENGTH),
    "groups": ("prefix_groups", 1, MAX_GROUPS),
    "priority": ("priority", -MAX_PRIORITY, MAX_PRIORITY),
}


def _with(request_class: RequestClass, pair: str) -> RequestClass:
    name, _, value = pair.strip().partition("=")
    flag = f"--mix, class {request_class.name}, {name}"
    try:
        if name in ("slo-ttft", "slo-itl", "slo-tpot", "slo-e2e") and (limit := parse_seconds(value, flag)):
            return replace(request_class, slos=(*request_class.slos, (name[4:], limit)))
        if name in ("input", "output"):
            lengths: dict[str, Any] = {f"{name}_len": parse_lengths(value, flag)}
            return replace(request_class, **lengths)
        if name == "turns":
            return replace(request_class, turns=parse_lengths(value, flag, MAX_TURNS))
        if name == "share" and 0 < float(value) < math.inf:
            return replace(request_class, share=float(value))
        if name == "think":
            return replace(request_class, think_s=parse_seconds(value, flag) or 0.0)
        if name == "deadline" and (deadline_s := parse_seconds(value, flag)):
            return replace(request_class, deadline_ms=deadline_s * 1e3)
        if name in ("prefix", "groups", "priority"):
            field, least, most = _WHOLE[name]
            number: dict[str, Any] = {field: int(value)}
            if least <= int(value) <= most:
                return replace(request_class, **number)
        if name in ("tenant", "class") and value:
            return (
                replace(request_class, tenant=value)
                if name == "tenant"
                else replace(request_class, priority_class=value)
            )
    except ValueError:
        pass
    raise ConfigError(
        f"{flag}={value} is not valid. Known are share, input, output, turns, think, prefix, groups, priority, class, "
        "deadline, tenant, slo-ttft, slo-itl, slo-tpot and slo-e2e"
    )
