"""Classes of requests: what ``--mix`` names, or the one that the other options make."""

import math
from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError
from scripts.load_tester.config import LoadOptions, seconds
from scripts.load_tester.workload.lengths import MAX_LENGTH, MAX_TURNS, Lengths, parse_lengths
from scripts.load_tester.workload.plan import MAX_GROUPS, MAX_PRIORITY


@dataclass(frozen=True)
class Kind:
    """A class of requests. ``share`` is its weight among the classes; ``slos`` override the run's, in seconds."""

    name: str
    input_len: Lengths
    output_len: Lengths
    turns: Lengths
    think_s: float
    prefix_len: int
    prefix_groups: int
    share: float = 1.0
    priority: int | None = None
    deadline_ms: float | None = None
    priority_class: str = ""
    tenant: str = ""
    slos: tuple[tuple[str, float], ...] = ()


def mean_load(kinds: dict[str, Kind]) -> tuple[float, float]:
    """Requests of a session, and output tokens of all of them, on average over sessions."""
    total = sum(kind.share for kind in kinds.values())
    turns = {name: kind.share / total * kind.turns.mean for name, kind in kinds.items()}
    return sum(turns.values()), sum(turns[name] * kind.output_len.mean for name, kind in kinds.items())


def kinds_of(config: LoadOptions) -> dict[str, Kind]:
    """The classes of ``--mix``, or the one that the other options make.

    Raises:
        ConfigError: names class and key.
    """
    plain = Kind(
        "",
        parse_lengths(config.input_len, "--input-len"),
        parse_lengths(config.output_len, "--output-len"),
        parse_lengths(config.turns, "--turns", MAX_TURNS),
        seconds(config.think, "--think") or 0.0,
        config.prefix_len,
        config.prefix_groups,
    )
    if not config.mix:
        return {"": plain}
    kinds: dict[str, Kind] = {}
    for words in filter(None, (part.strip() for part in config.mix.split(";"))):
        name, _, rest = words.partition(":")
        name = name.strip()
        if not name or name in kinds:
            raise ConfigError(f"--mix: every class needs a name of its own, {words!r} has none")
        kind = replace(plain, name=name)
        for pair in filter(None, rest.split(",")):
            kind = _with(kind, pair)
        kinds[name] = kind
    if not kinds:
        raise ConfigError("--mix names no class")
    return kinds


#: Keys with whole numbers: field, least and most.
_WHOLE = {
    "prefix": ("prefix_len", 0, MAX_LENGTH),
    "groups": ("prefix_groups", 1, MAX_GROUPS),
    "priority": ("priority", -MAX_PRIORITY, MAX_PRIORITY),
}


def _with(kind: Kind, pair: str) -> Kind:
    name, _, value = pair.strip().partition("=")
    flag = f"--mix, class {kind.name}, {name}"
    try:
        if name in ("slo-ttft", "slo-itl", "slo-tpot", "slo-e2e") and (limit := seconds(value, flag)):
            return replace(kind, slos=(*kind.slos, (name[4:], limit)))
        if name in ("input", "output"):
            lengths: dict[str, Any] = {f"{name}_len": parse_lengths(value, flag)}
            return replace(kind, **lengths)
        if name == "turns":
            return replace(kind, turns=parse_lengths(value, flag, MAX_TURNS))
        if name == "share" and 0 < float(value) < math.inf:
            return replace(kind, share=float(value))
        if name == "think":
            return replace(kind, think_s=seconds(value, flag) or 0.0)
        if name == "deadline" and (deadline_s := seconds(value, flag)):
            return replace(kind, deadline_ms=deadline_s * 1e3)
        if name in ("prefix", "groups", "priority"):
            field, least, most = _WHOLE[name]
            number: dict[str, Any] = {field: int(value)}
            if least <= int(value) <= most:
                return replace(kind, **number)
        if name in ("tenant", "class") and value:
            return replace(kind, tenant=value) if name == "tenant" else replace(kind, priority_class=value)
    except ValueError:
        pass
    raise ConfigError(
        f"{flag}={value}: cannot be. Known are share, input, output, turns, think, prefix, groups, priority, class, "
        "deadline, tenant, slo-ttft, slo-itl, slo-tpot and slo-e2e"
    )
