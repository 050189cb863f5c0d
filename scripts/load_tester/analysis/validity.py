"""Whether a run can be believed: did the load arrive as it was meant to, and did the client keep up?

A run that fails here is marked invalid and the command exits non-zero, whatever its latencies look like.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.records import Record
from scripts.load_tester.client.client_pool import Outcome
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.schedule import unit_arrivals

MIN_FOR_TEST = 20
P_VALUE = 1e-4
RATE_TOLERANCE = 0.02
MAX_CPU = 0.9
MIN_WALL_S = 1.0  # of a process that had next to nothing to do, the start is all of it
MAX_LAG_S = 0.05
MAX_RESOLUTION_S = 0.001  # gaps shorter than a send takes cannot keep their distribution


def arrival_check(
    records: Sequence[Record], config: LoadtestConfig, is_checked: bool, is_open: bool = True
) -> dict[str, Any]:
    """How requests really went out, against how they should have.

    Args:
        records: all of the run; of an open loop the gaps and rates are those of first turns, whose instants are drawn,
            and the lateness is everybody's.
        is_checked: whether instants follow ``--arrival``; a trace's are only compared with the trace.

    Returns:
        ``achieved_rate`` and ``intended_rate`` (per second), ``cv`` of the gaps and ``cv_expected`` (in operational
        time, where the rate is 1), ``ks_p`` (None where the distribution has no spread to test; gaps count as known to
        the median lateness), ``astray_s`` (only of constant and burst arrivals), ``distinct_gaps`` (share of gaps that
        differ from each other), ``lateness`` (released minus intended, seconds).
    """
    firsts = [record for record in records if record.turn == 0 or not is_open]
    released = np.sort(np.array([record.released_s for record in firsts if record.released_s >= 0]))
    intended = np.sort(np.array([record.intended_s for record in firsts]))
    lateness = np.array([record.released_s - record.intended_s for record in records if record.released_s >= 0])
    found: dict[str, Any] = {
        "count": len(released),
        "intended_rate": _rate(intended),
        "achieved_rate": _rate(released),
        "lateness": {
            "p50": float(np.quantile(lateness, 0.5)) if len(lateness) else 0.0,
            "p99": float(np.quantile(lateness, 0.99)) if len(lateness) else 0.0,
            "max": float(lateness.max()) if len(lateness) else 0.0,
        },
        "cv": None,
        "cv_expected": None,
        "ks_p": None,
        "distinct_gaps": None,
        "astray_s": None,
    }
    if len(released) < 3:
        return found
    found["distinct_gaps"] = len(np.unique(np.round(np.diff(released), 6))) / (len(released) - 1)
    gaps = np.diff(config.profile.to_operational(released) if is_checked else released)
    found["cv"] = float(gaps.std() / gaps.mean()) if gaps.mean() > 0 else None
    if is_checked:
        # In a burst all gaps but one are 0, and that one is as long as the burst is large.
        bursty = math.sqrt(config.burst_size - 1)
        found["cv_expected"] = {"poisson": 1.0, "gamma": config.cv, "constant": 0.0, "burst": bursty}[config.arrival]
        resolution = (
            min(found["lateness"]["p50"], MAX_RESOLUTION_S) * len(gaps) / max(float(released[-1] - released[0]), 1e-9)
        )
        if config.arrival == "poisson":
            found["ks_p"] = stats.ks_test(gaps, stats.exponential_cdf, resolution)[1]
        elif config.arrival == "gamma":
            shape = 1 / config.cv**2
            found["ks_p"] = stats.ks_test(gaps, lambda values: stats.gamma_cdf(values, shape), resolution)[1]
        else:
            found["astray_s"] = _astray_s(released, config)
    return found


def _astray_s(released: stats.Floats, config: LoadtestConfig) -> float:
    """How far from the instants of constant or burst arrivals requests went out, 1 % of them farther: seconds. Those
    follow from the options alone, so that what was planned is checked with what was done.
    """
    unit = unit_arrivals(config.arrival, len(released), np.random.default_rng(0), burst_size=config.burst_size)
    return float(np.quantile(np.abs(released - config.profile.to_seconds(unit)), 0.99))


def _is_missed(arrivals: dict[str, Any], config: LoadtestConfig) -> bool:
    """Whether the rate was: by more than 2 %, and by more than one late request at an end of a short run explains."""
    intended, achieved = arrivals["intended_rate"], arrivals["achieved_rate"]
    moved_s = (arrivals["count"] - 1) * abs(1 / achieved - 1 / intended)
    return abs(achieved / intended - 1) > RATE_TOLERANCE and bool(moved_s > min(config.lateness_s, MAX_LAG_S))


def _rate(instants: stats.Floats) -> float | None:
    span = float(instants[-1] - instants[0]) if len(instants) > 1 else 0.0
    return (len(instants) - 1) / span if span > 0 else None


def client_load(outcome: Outcome, parse_cpu_s: float, num_events: int) -> dict[str, Any]:
    """What the client itself cost: CPU seconds, loop lag in seconds, CPU milliseconds per event with output."""
    lags = [lag for finished in outcome.finished for lag in finished.lags]
    cpu_s = [finished.cpu_s for finished in outcome.finished]
    total_s = sum(cpu_s) + outcome.feed_cpu_s + parse_cpu_s
    return {
        "processes": len(outcome.finished),
        "receives_in": outcome.receives_in,
        "cpu_s": {"clients": sum(cpu_s), "feed": outcome.feed_cpu_s, "parse": parse_cpu_s},
        "busiest": max((one.cpu_s / max(one.wall_s, MIN_WALL_S) for one in outcome.finished), default=0.0),
        "cpu_ms_per_event": total_s * 1e3 / num_events if num_events else None,
        "lag_p50_s": float(np.quantile(lags, 0.5)) if lags else 0.0,
        "lag_p99_s": float(np.quantile(lags, 0.99)) if lags else 0.0,
        "connections": sum(finished.num_connections for finished in outcome.finished),
    }


def verdict(
    records: Sequence[Record], arrivals: dict[str, Any], client: dict[str, Any], config: LoadtestConfig, missing: int
) -> list[str]:
    """Why the run cannot be believed, as sentences; empty if it can."""
    reasons = []
    if not records:
        return ["no request was measured"]
    if missing:
        reasons.append(f"{missing} scheduled requests were never sent")
    late = arrivals["lateness"]["p99"]
    if late > config.lateness_s:
        limit = config.lateness_s * 1e3
        reasons.append(f"1 % of requests went out more than {late * 1e3:.1f} ms late (limit {limit:g})")
    intended, achieved = arrivals["intended_rate"], arrivals["achieved_rate"]
    if intended and achieved and arrivals["count"] >= MIN_FOR_TEST and _is_missed(arrivals, config):
        reasons.append(f"requests went out at {achieved:.4g}/s instead of {intended:.4g}/s")
    if arrivals["ks_p"] is not None and arrivals["count"] >= MIN_FOR_TEST and arrivals["ks_p"] < P_VALUE:
        reasons.append(
            f"the gaps between requests are not those of {config.arrival} arrivals (p = {arrivals['ks_p']:.1e})"
        )
    astray = arrivals["astray_s"]
    if astray is not None and astray > max(config.lateness_s, late):
        reasons.append(
            f"requests went out up to {astray * 1e3:.1f} ms away from {config.arrival} arrivals at that rate"
        )
    if client["busiest"] > MAX_CPU:
        reasons.append(f"a client process used {client['busiest']:.0%} of a core: give it --clients")
    if client["lag_p99_s"] > MAX_LAG_S:
        lag = client["lag_p99_s"] * 1e3
        reasons.append(f"the client's loop was up to {lag:.0f} ms late (p99): stamps are uncertain")
    return reasons
