"""Makes the plan of a run before the clock starts: all requests with their instants.

Requests come in sessions of one or more turns, either drawn (``session_sampling``) or from a trace (``traces``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from common.errors import ConfigError
from scripts.load_tester.config import LoadOptions
from scripts.load_tester.workload.planned_request import PlannedRequest
from scripts.load_tester.workload.request_classes import RequestClass, request_classes_of
from scripts.load_tester.workload.schedule import MAX_REQUESTS, Floats, arrivals
from scripts.load_tester.workload.session_sampling import (
    ARRIVALS,
    JITTER,
    SAMPLING,
    TENANT,
    SampledSessions,
    Session,
    make_rng,
)
from scripts.load_tester.workload.traces import ReplayOptions, Trace, read_trace, replay_trace


class NoArrivals(ConfigError):
    """No request arrives within ``--duration``."""


@dataclass
class Plan:
    """All requests of a run.

    Attributes:
        sessions: in order, with ``at`` of first turns set; every iteration yields the same. Endless for a closed loop
            with only a duration.
        num_sessions: None if endless.
        is_open: whether first turns have instants.
        seconds: length of the schedule, after which no session begins: ``--duration`` if that ends it, else until the
            last instant; None if unknown.
        is_checked: whether arrivals follow ``--arrival``; those of a trace do not.
        num_requests: turns of all sessions; None if endless.
        num_wanted: sessions without ``--duration``; None if endless.
    """

    sessions: Iterable[Session]
    num_sessions: int | None
    is_open: bool
    seconds: float | None
    notes: list[str]
    classes: dict[str, RequestClass]
    is_checked: bool = True
    num_requests: int | None = None
    num_wanted: int | None = None


def make_plan(config: LoadOptions, trace: Trace | None = None) -> Plan:
    """Make the plan of a configuration. Raises ConfigError: the trace or the mix is invalid.

    Args:
        trace: the file of ``--trace`` if it has been read already.
    """
    classes = request_classes_of(config)
    if config.trace:
        return _trace_plan(config, trace or read_trace(config.trace, config.trace_unit), classes)
    at, num_sessions, length = _instants(config, None)
    sessions = SampledSessions(config.seed, classes, config.tenants, count=num_sessions, at=at)
    return Plan(
        sessions, num_sessions, at is not None, length, [], classes,
        num_requests=sessions.num_requests, num_wanted=config.num_requests,
    )  # fmt: skip


def _instants(config: LoadOptions, available: int | None) -> tuple[Floats | None, int | None, float | None]:
    """Instants of sessions (None in a closed loop), their number (None if endless), and the length of the schedule.

    Args:
        available: number of sessions in the trace; None without a trace.
    """
    num_requests, duration_s = config.num_requests, config.duration_s
    if num_requests is None and duration_s is None and available is None:
        profile_s = 0.0 if config.concurrency else config.profile.seconds
        num_requests, duration_s = (None, profile_s) if profile_s else (60, None)
    most = min((limit for limit in (num_requests, available) if limit is not None), default=None)
    if most is not None and most > MAX_REQUESTS:
        raise ConfigError(f"--num-requests must be at most {MAX_REQUESTS:,}")
    if config.concurrency:
        return None, most, duration_s
    at = arrivals(
        config.profile,
        config.arrival,
        make_rng(config.seed, ARRIVALS),
        num_requests=most,
        duration_s=duration_s,
        cv=config.cv,
        burst_size=config.burst_size,
    )
    if not len(at):
        raise NoArrivals("no request arrives within --duration: raise --rate or --duration")
    is_cut = duration_s is not None and (most is None or len(at) < most)
    return at, len(at), duration_s if is_cut else float(at[-1])


def _trace_plan(config: LoadOptions, trace: Trace, classes: dict[str, RequestClass]) -> Plan:
    trace = replace(trace, notes=[*trace.notes])  # those of this replay follow
    replay = ReplayOptions(
        window=config.window,
        time_scale=None if config.rate else config.time_scale,
        mean_rate=float(config.rate or 1),
        has_jitter=config.trace_jitter,
        length_scale=config.length_scale,
        output_scale=config.output_scale,
        max_input=config.max_input_len,
        max_output=config.max_output_len,
        max_requests=config.num_requests,
        duration_s=math.inf if config.concurrency else config.duration_s or math.inf,
    )
    # A closed loop does not follow the trace's instants, which the notes of a replay describe.
    replayed = replace(trace, notes=[]) if config.concurrency else trace
    plan = replay_trace(replayed, replay, make_rng(config.seed, JITTER))
    if config.tenants:
        names = make_rng(config.seed, SAMPLING, TENANT).integers(0, config.tenants, len(plan))
        for planned, number in zip(plan, names.tolist(), strict=True):
            planned.tenant = planned.tenant or f"tenant-{number}"
    needs_times = config.trace_jitter or config.time_scale != 1 or config.trace_unit != "auto"
    if needs_times and not trace.has_times:
        raise ConfigError("--trace-unit, --trace-jitter and --time-scale need a trace with timestamps")
    if trace.has_times and config.arrival != "poisson":
        raise ConfigError("--arrival has no effect: this trace has its own instants; leave it out")
    if config.concurrency or not trace.has_times:
        return _retimed(config, plan, trace.notes, classes)
    if not plan:
        raise NoArrivals("no request of the trace comes within --duration")
    in_window = len(trace.within(config.window))
    wanted = min(in_window, config.num_requests or in_window)
    length = config.duration_s if len(plan) < wanted else plan[-1].at
    return Plan(
        [[one] for one in plan], len(plan), True, length, trace.notes, classes, False,
        num_requests=len(plan), num_wanted=wanted,
    )  # fmt: skip


def _retimed(
    config: LoadOptions, plan: list[PlannedRequest], notes: list[str], classes: dict[str, RequestClass]
) -> Plan:
    """Give requests drawn instants, where the trace has none or the loop is closed."""
    at, num_sessions, length = _instants(config, len(plan))
    sessions = [[one] for one in plan[:num_sessions]]
    for (one,), instant in zip(sessions, at.tolist() if at is not None else (), strict=False):
        one.at = instant
    return Plan(
        sessions, len(sessions), at is not None, length, notes, classes,
        num_requests=len(sessions), num_wanted=len(plan),
    )  # fmt: skip
