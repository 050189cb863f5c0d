"""Which requests a run consists of, and when: all of a plan, made before the clock starts, whatever its length.

Requests come in *chains*: a session's turns in order, or a single request. They are drawn
(``scripts/load_tester/workload/session_sampling.py``) or those of a trace (``scripts/load_tester/workload/traces.py``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import ConfigError
from scripts.load_tester.config import LoadOptions
from scripts.load_tester.workload.plan import Planned
from scripts.load_tester.workload.request_classes import Kind, kinds_of
from scripts.load_tester.workload.schedule import MAX_REQUESTS, Floats, arrivals
from scripts.load_tester.workload.session_sampling import ARRIVALS, DRAWS, JITTER, TENANT, Chain, Sessions, rng_of
from scripts.load_tester.workload.traces import Replay, read_trace, replayed


@dataclass
class Plan:
    """All of a run.

    Attributes:
        chains: with ``at`` of first turns set, in order, as often as they are asked for; a closed loop over a time has
            no end.
        num_chains: None if endless.
        is_open: whether the first turns have instants.
        seconds: length of the schedule: no first turn comes later; None if nobody knows.
        notes: what to tell the user about it.
        kinds: the classes, by name.
        is_checked: whether arrivals follow ``--arrival`` (not those of a trace).
        num_requests: all turns of all chains; None if endless.
    """

    chains: Iterable[Chain]
    num_chains: int | None
    is_open: bool
    seconds: float | None
    notes: list[str]
    kinds: dict[str, Kind]
    is_checked: bool = True
    num_requests: int | None = None


def make_plan(config: LoadOptions) -> Plan:
    """Everything that the configuration asks for.

    Raises:
        ConfigError: a trace or a mix cannot be.
    """
    kinds = kinds_of(config)
    if config.trace:
        return _trace_plan(config, kinds)
    at, num_chains, length = _instants(config, None)
    chains = Sessions(config.seed, kinds, config.tenants, count=num_chains, at=at)
    return Plan(chains, num_chains, at is not None, length, [], kinds, num_requests=chains.num_requests)


def _instants(config: LoadOptions, available: int | None) -> tuple[Floats | None, int | None, float | None]:
    """When chains begin (None in a closed loop), how many there are (None for no end), and the schedule's length.

    Args:
        available: so many can be had; None if any number can be.
    """
    num_requests, duration_s = config.num_requests, config.duration_s
    if num_requests is None and duration_s is None and available is None:
        profile_s = 0.0 if config.concurrency else config.profile.seconds
        num_requests, duration_s = (None, profile_s) if profile_s else (60, None)
    most = min((limit for limit in (num_requests, available) if limit is not None), default=None)
    if most is not None and most > MAX_REQUESTS:
        raise ConfigError(f"--num-requests: {MAX_REQUESTS:,} are the most that can be planned")
    if config.concurrency:
        return None, most, duration_s
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
    return at, len(at), length


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
        names = rng_of(config.seed, DRAWS, TENANT).integers(0, config.tenants, len(plan))
        for planned, number in zip(plan, names.tolist(), strict=True):
            planned.tenant = planned.tenant or f"tenant-{number}"
    if not trace.has_times and (config.trace_window or config.trace_jitter or config.time_scale != 1):
        raise ConfigError("--trace-window, --trace-jitter and --time-scale need a trace with timestamps")
    if trace.has_times and config.arrival != "poisson":
        raise ConfigError("--arrival would do nothing: this trace brings its own instants")
    if config.concurrency or not trace.has_times:
        return _retimed(config, plan, trace.notes, kinds)
    if not plan:
        raise ConfigError("no request of the trace comes within --duration")
    return Plan([[one] for one in plan], len(plan), True, plan[-1].at, trace.notes, kinds, False, len(plan))


def _retimed(config: LoadOptions, plan: list[Planned], notes: list[str], kinds: dict[str, Kind]) -> Plan:
    """Requests without a clock of their own, or whose clock does not count."""
    at, num_chains, length = _instants(config, len(plan))
    chains = [[one] for one in plan[:num_chains]]
    for (one,), instant in zip(chains, at.tolist() if at is not None else (), strict=False):
        one.at = instant
    return Plan(chains, len(chains), at is not None, length, notes, kinds, num_requests=len(chains))
