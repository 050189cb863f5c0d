"""Which requests a run consists of: classes, lengths, groups with a shared prefix, sessions; or a trace.

Requests are made in *chains*: a session's turns in order, or a single request. They are drawn in batches of a fixed
size, each from its own stream of the seed, so that a run may be longer without its beginning changing.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.errors import ConfigError
from scripts.load.config import LoadOptions, seconds
from scripts.load.lengths import Lengths, parse_lengths
from scripts.load.plan import ANSWER, GROUP, TURN, UNIQUE, Piece, Planned, key
from scripts.load.schedule import arrivals
from scripts.load.traces import Replay, read_trace, replayed

Chain = list[Planned]
BATCH = 256
MAX_EARLY = 10_000  # chains made before the clock starts, in about half a second
ARRIVALS, DRAWS, JITTER = range(3)  # streams of the seed


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


@dataclass
class Plan:
    """All of a run.

    Attributes:
        chains: with ``at`` of first turns set, in order; a closed loop over a time has no end.
        num_chains: None if endless.
        is_open: whether the first turns have instants.
        seconds: length of the schedule: no first turn comes later; None if nobody knows.
        notes: what to tell the user about it.
        kinds: the classes, by name.
        is_checked: whether arrivals follow ``--arrival`` (not those of a trace).
    """

    chains: Iterator[Chain] | list[Chain]
    num_chains: int | None
    is_open: bool
    seconds: float | None
    notes: list[str]
    kinds: dict[str, Kind]
    is_checked: bool = True


def rng_of(seed: int, *stream: int) -> np.random.Generator:
    """A generator of its own for each purpose."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def make_plan(config: LoadOptions) -> Plan:
    """Everything that the configuration asks for.

    Raises:
        ConfigError: a trace or a mix cannot be.
    """
    kinds = kinds_of(config)
    if config.trace:
        return _trace_plan(config, kinds)
    return _timed(config, drawn_chains(config, kinds), None, [], kinds)


def _timed(
    config: LoadOptions, chains: Iterator[Chain], num_chains: int | None, notes: list[str], kinds: dict[str, Kind]
) -> Plan:
    """Give chains instants (open loop), or bound their number (closed loop)."""
    num_requests, duration_s = config.num_requests, config.duration_s
    if num_requests is None and duration_s is None and num_chains is None:
        profile_s = 0.0 if config.concurrency else config.profile.seconds
        num_requests, duration_s = (None, profile_s) if profile_s else (60, None)
    limits = [limit for limit in (num_requests, num_chains) if limit is not None]
    most = min(limits) if limits else None
    if config.concurrency:
        if most is not None:
            return Plan(_early(itertools.islice(chains, most)), most, False, duration_s, notes, kinds)
        return Plan(chains, None, False, duration_s, notes, kinds)
    at = arrivals(
        config.profile,
        config.arrival,
        rng_of(config.seed, ARRIVALS),
        num_requests=most,
        duration_s=duration_s,
        cv=config.cv,
        burst_size=config.burst_size,
    )
    if not len(at):
        raise ConfigError("no request arrives: raise --rate or --duration")
    length = duration_s if duration_s is not None and most is None else float(at[-1])
    return Plan(_early(_at_instants(chains, at.tolist())), len(at), True, length, notes, kinds)


def _at_instants(chains: Iterator[Chain], instants: list[float]) -> Iterator[Chain]:
    for instant in instants:
        chain = next(chains)
        chain[0].at = instant
        yield chain


def _early(chains: Iterator[Chain]) -> Iterator[Chain]:
    """Make what can be made soon; of a huge plan the rest while it runs, out of the same streams of the seed."""
    made = list(itertools.islice(chains, MAX_EARLY))
    return itertools.chain(made, chains)


def _trace_plan(config: LoadOptions, kinds: dict[str, Kind]) -> Plan:
    assert config.trace is not None
    trace = read_trace(config.trace, config.trace_unit)
    replay = Replay(
        window=config.window,
        time_scale=None if config.rate else config.time_scale,
        mean_rate=float(config.rate or 1),
        has_jitter=config.trace_jitter,
        length_scale=config.length_scale,
        max_input=config.max_input_len,
        max_output=config.max_output_len,
        max_requests=config.num_requests,
        duration_s=math.inf if config.concurrency else config.duration_s or math.inf,
    )
    plan = replayed(trace, replay, rng_of(config.seed, JITTER))
    if config.tenants:
        names = rng_of(config.seed, DRAWS).integers(0, config.tenants, len(plan))
        for planned, number in zip(plan, names.tolist(), strict=True):
            planned.tenant = planned.tenant or f"tenant-{number}"
    if not trace.has_times and (config.trace_window or config.trace_jitter or config.time_scale != 1):
        raise ConfigError("--trace-window, --trace-jitter and --time-scale need a trace with timestamps")
    if trace.has_times and config.arrival != "poisson":
        raise ConfigError("--arrival would do nothing: this trace brings its own instants")
    if config.concurrency or not trace.has_times:
        return _timed(config, ([planned] for planned in plan), len(plan), trace.notes, kinds)
    if not plan:
        raise ConfigError("no request of the trace comes within --duration")
    return Plan([[one] for one in plan], len(plan), True, plan[-1].at, trace.notes, kinds, is_checked=False)


# ---- drawn requests -------------------------------------------------------------------------------------------------


def drawn_chains(config: LoadOptions, kinds: dict[str, Kind]) -> Iterator[Chain]:
    """Endlessly many."""
    index = session = 0
    for batch in itertools.count():
        rng = rng_of(config.seed, DRAWS, batch)
        for number, kind in enumerate(_choose(list(kinds.values()), rng)):
            chain = _chain(kind, index, session, config.tenants, rng)
            if len(chain) == 1:
                chain[0].session = -1
            index += len(chain)
            session += 1
            yield chain
            assert number < BATCH


def _choose(kinds: list[Kind], rng: np.random.Generator) -> list[Kind]:
    shares = np.array([kind.share for kind in kinds])
    return [kinds[number] for number in rng.choice(len(kinds), BATCH, p=shares / shares.sum()).tolist()]


def _chain(kind: Kind, index: int, session: int, tenants: int, rng: np.random.Generator) -> Chain:
    num_turns = int(kind.turns.draw(rng, 1)[0])
    inputs = kind.input_len.draw(rng, num_turns).tolist()
    outputs = kind.output_len.draw(rng, num_turns).tolist()
    thinks = rng.exponential(kind.think_s, num_turns).tolist() if kind.think_s else [0.0] * num_turns
    group = int(rng.integers(0, kind.prefix_groups)) if kind.prefix_len else -1
    tenant = kind.tenant or (f"tenant-{rng.integers(0, tenants)}" if tenants else "")
    pieces: list[Piece] = []
    if kind.prefix_len:
        pieces.append((key(GROUP, _name_number(kind.name) + group), kind.prefix_len))
    chain = []
    for turn in range(num_turns):
        number = index + turn
        pieces.append((key(UNIQUE if num_turns == 1 else TURN, number), inputs[turn]))
        chain.append(
            Planned(
                number,
                0.0,
                tuple(pieces),
                outputs[turn],
                kind.name,
                tenant,
                session=session,
                turn=turn,
                turns_left=num_turns - turn - 1,
                think_s=thinks[turn] if turn else -1.0,
                group=group,
                priority=kind.priority,
                deadline_ms=kind.deadline_ms,
                priority_class=kind.priority_class,
            )
        )
        pieces.append((key(ANSWER, number), outputs[turn]))
    return chain


def _name_number(name: str) -> int:
    """Keeps the groups of different classes apart, the same in every process."""
    number = 0
    for character in name.encode():
        number = (number * 257 + character) % 999_983
    return number << 24


# ---- classes --------------------------------------------------------------------------------------------------------


def kinds_of(config: LoadOptions) -> dict[str, Kind]:
    """The classes of ``--mix``, or the one that the other options make.

    Raises:
        ConfigError: names class and key.
    """
    plain = Kind(
        "",
        parse_lengths(config.input_len, "--input-len"),
        parse_lengths(config.output_len, "--output-len"),
        parse_lengths(config.turns, "--turns"),
        seconds(config.think, "--think") or 0.0,
        config.prefix_len,
        config.prefix_groups,
    )
    if not config.mix:
        return {"": plain}
    kinds: dict[str, Kind] = {}
    for words in filter(None, (part.strip() for part in config.mix.split(";"))):
        name, _, rest = words.partition(":")
        if not name or name in kinds:
            raise ConfigError(f"--mix: every class needs a name of its own, {words!r} has none")
        kind = replace(plain, name=name)
        for pair in filter(None, rest.split(",")):
            kind = _with(kind, pair)
        kinds[name] = kind
    if not kinds:
        raise ConfigError("--mix names no class")
    return kinds


def _with(kind: Kind, pair: str) -> Kind:
    name, _, value = pair.strip().partition("=")
    flag = f"--mix, class {kind.name}, {name}"
    try:
        if name in ("slo-ttft", "slo-itl", "slo-tpot", "slo-e2e"):
            return replace(kind, slos=(*kind.slos, (name[4:], seconds(value, flag) or 0.0)))
        if name in ("input", "output"):
            lengths: dict[str, Any] = {f"{name}_len": parse_lengths(value, flag)}
            return replace(kind, **lengths)
        if name == "turns":
            return replace(kind, turns=parse_lengths(value, flag))
        if name == "share" and 0 < float(value) < math.inf:
            return replace(kind, share=float(value))
        if name in ("think", "deadline"):
            found = seconds(value, flag) or 0.0
            return replace(kind, think_s=found) if name == "think" else replace(kind, deadline_ms=found * 1e3)
        if name in ("prefix", "groups", "priority"):
            names = {"prefix": "prefix_len", "groups": "prefix_groups", "priority": "priority"}
            number: dict[str, Any] = {names[name]: int(value)}
            if name == "priority" or int(value) >= (name == "groups"):
                return replace(kind, **number)
        if name in ("tenant", "class") and value:
            return replace(kind, tenant=value) if name == "tenant" else replace(kind, priority_class=value)
    except ValueError:
        pass
    raise ConfigError(
        f"{flag}={value}: cannot be. Known are share, input, output, turns, think, prefix, groups, priority, class, "
        "deadline, tenant, slo-ttft, slo-itl, slo-tpot and slo-e2e"
    )
