"""Checks whether a run is valid: the load went out as intended, and the client kept up.

An invalid run makes the command exit with a non-zero status, whatever its latencies.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.client.client_pool import LoadResult
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.formats import counted
from scripts.load_tester.workload.schedule import unit_arrivals

MIN_FOR_TEST = 20
P_VALUE = 1e-4
RATE_TOLERANCE = 0.02
MAX_CPU = 0.9
MIN_WALL_S = 1.0  # shorter runs consist mostly of the start of the process
MAX_LAG_S = 0.05
MAX_RESOLUTION_S = 0.001  # gaps shorter than a send cannot keep their distribution


def arrival_check(
    records: Sequence[RequestRecord], config: LoadtestConfig, is_checked: bool, is_open: bool = True
) -> dict[str, Any]:
    """Compare the instants at which requests went out with the intended ones.

    Args:
        records: all requests of the run. In an open loop gaps and rates are those of first turns, whose instants are
            drawn; the lateness is of all requests.
        is_checked: whether instants follow ``--arrival``; those of a trace do not.

    Returns:
        ``achieved_rate`` and ``intended_rate`` (per second), ``cv`` of the gaps and ``cv_expected`` (in operational
        time, where the rate is 1), ``ks_p`` (Poisson and gamma arrivals; the median lateness is the resolution of the
        gaps), ``astray_s`` (constant and burst arrivals), ``distinct_gaps`` (share of distinct gaps), ``lateness``
        (released minus intended, seconds).
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
        # In a burst all gaps are 0 but one, which is as long as the burst is large.
        bursty = math.sqrt(config.burst_size - 1)
        found["cv_expected"] = {"poisson": 1.0, "gamma": config.cv, "constant": 0.0, "burst": bursty}[config.arrival]
        resolution = (
            min(found["lateness"]["p50"], MAX_RESOLUTION_S) * len(gaps) / max(float(released[-1] - released[0]), 1e-9)
        )
        if config.arrival == "poisson":
            found["ks_p"] = stats.ks_p(gaps, stats.exponential_cdf, resolution)
        elif config.arrival == "gamma":
            shape = 1 / config.cv**2
            found["ks_p"] = stats.ks_p(gaps, lambda values: stats.gamma_cdf(values, shape), resolution)
        else:
            found["astray_s"] = _astray_s(released, config)
    return found


def _astray_s(released: stats.Floats, config: LoadtestConfig) -> float:
    """Seconds between requests and the exact instants of constant or burst arrivals, 99th percentile.

    These instants follow from the options alone, so this also checks the plan.
    """
    unit = unit_arrivals(config.arrival, len(released), np.random.default_rng(0), burst_size=config.burst_size)
    return float(np.quantile(np.abs(released - config.profile.to_seconds(unit)), 0.99))


def _is_missed(arrivals: dict[str, Any], config: LoadtestConfig) -> bool:
    """Whether the rate is off by more than 2 %, and by more than one late request at an end of a short run explains."""
    intended, achieved = arrivals["intended_rate"], arrivals["achieved_rate"]
    moved_s = (arrivals["count"] - 1) * abs(1 / achieved - 1 / intended)
    return abs(achieved / intended - 1) > RATE_TOLERANCE and bool(moved_s > min(config.lateness_s, MAX_LAG_S))


def _rate(instants: stats.Floats) -> float | None:
    span = float(instants[-1] - instants[0]) if len(instants) > 1 else 0.0
    return (len(instants) - 1) / span if span > 0 else None


def client_load(result: LoadResult, parse_cpu_s: float, num_events: int) -> dict[str, Any]:
    """Cost of the client: CPU seconds, loop lag in seconds, CPU milliseconds per event with output."""
    lags = [lag for finished in result.finished for lag in finished.lags]
    cpu_s = [finished.cpu_s for finished in result.finished]
    total_s = sum(cpu_s) + result.feed_cpu_s + parse_cpu_s
    return {
        "processes": len(result.finished),
        "cpu_s": {"clients": sum(cpu_s), "feed": result.feed_cpu_s, "parse": parse_cpu_s},
        "busiest": max((one.cpu_s / max(one.wall_s, MIN_WALL_S) for one in result.finished), default=0.0),
        "cpu_ms_per_event": total_s * 1e3 / num_events if num_events else None,
        "lag_p50_s": float(np.quantile(lags, 0.5)) if lags else 0.0,
        "lag_p99_s": float(np.quantile(lags, 0.99)) if lags else 0.0,
        "connections": sum(finished.num_connections for finished in result.finished),
    }


def verdict(
    records: Sequence[RequestRecord],
    arrivals: dict[str, Any],
    client: dict[str, Any],
    config: LoadtestConfig,
    missing: int,
) -> list[str]:
    """Why the run is invalid, as sentences; empty if it is valid."""
    reasons = []
    if not records:
        return ["no request was measured"]
    if missing:
        reasons.append(f"{counted(missing, 'scheduled request')} never went out")
    late = arrivals["lateness"]["p99"]
    if late > config.lateness_s:
        limit = config.lateness_s * 1e3
        reasons.append(f"1 % of requests went out more than {late * 1e3:.1f} ms late (limit {limit:g} ms)")
    if without := sum(record.error == "no_socket" for record in records):
        reasons.append(
            f"the client had no files or ports for {counted(without, 'connection')}: raise ulimit -Hn, or widen "
            "net.ipv4.ip_local_port_range"
        )
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
        reasons.append(f"a client process used {client['busiest']:.0%} of a core: raise --clients")
    if client["lag_p99_s"] > MAX_LAG_S:
        lag = client["lag_p99_s"] * 1e3
        reasons.append(f"the client's event loop was up to {lag:.0f} ms late (p99): time stamps are uncertain")
    return reasons
