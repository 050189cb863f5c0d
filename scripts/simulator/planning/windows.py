"""Windows of a load: stretches of a trace, or seeds of a drawn load, that are simulated one by one."""

import math
from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache

from common.errors import ConfigError
from scripts.load_tester.workload.traces import Trace, read_trace
from scripts.simulator.config import SimulateConfig

#: Share of a window, in requests of a trace or in time, that is sent and not counted: queues and caches fill.
WARMUP_SHARE = 0.2


def windows_of(config: SimulateConfig, *, num_windows: int, num_requests: int) -> list[SimulateConfig]:
    """Configurations of the windows; requests are spread evenly over windows and these evenly over the trace.

    Raises ConfigError: the load has no rate or no requests.
    """
    config = config.without_plan()
    each = max(1, num_requests // num_windows)
    trace = trace_of(config)
    if trace is None:
        return [_drawn(config, number, each) for number in range(num_windows)]
    rows = trace.within(config.window)
    if not rows or (trace.has_times and rows[0].at == rows[-1].at):
        raise ConfigError("--trace needs requests at different instants: check it, and --trace-window")
    each = min(each, max(1, len(rows) // num_windows))
    last = len(rows) - each
    firsts = sorted({last * number // max(1, num_windows - 1) for number in range(num_windows)})
    if not trace.has_times:
        low = math.ceil(config.window[0])
        return [
            replace(_drawn(config, number, each), trace_window=f"{low + first}:{low + first + each}")
            for number, first in enumerate(firsts)
        ]
    instants = [row.at or 0.0 for row in rows]
    gap = (instants[-1] - instants[0]) / (len(instants) - 1)
    scale = config.time_scale
    if config.rate is not None:
        scale = 1 / gap / _rate(config)
    found = []
    for number, first in enumerate(firsts):
        begin = instants[first]
        end = next((at for at in instants[first + each :] if at > begin), min(instants[-1] + gap, config.window[1]))
        num_uncounted = int(WARMUP_SHARE * (bisect_left(instants, end) - first))
        uncounted, counted = instants[max(first, first + num_uncounted - 1)], instants[first + num_uncounted]
        warmup_s = ((uncounted + counted) / 2 - begin) * scale
        found.append(
            replace(
                config,
                trace_window=f"{begin!r}:{end!r}",
                time_scale=scale,
                rate=None,
                num_requests=None,
                seed=config.seed + number,
                warmup=f"{warmup_s:.6f}",
            )
        )
    return found


def seconds_of(window: SimulateConfig, num_sessions: int) -> float:
    """The time in which this many sessions begin: until the next one that the window does not have."""
    if window.rate is not None:
        return num_sessions / _rate(window)
    begin, end = window.window
    return (end - begin) * window.time_scale


def trace_of(config: SimulateConfig) -> Trace | None:
    """The trace of ``--trace``, which each process reads once for all windows; None without one."""
    return None if config.trace is None else _read_once(config.trace, config.trace_unit)


_read_once = lru_cache(maxsize=1)(read_trace)


def _drawn(config: SimulateConfig, number: int, each: int) -> SimulateConfig:
    """A window whose requests come at drawn instants."""
    rate = _rate(config)
    return replace(
        config, rate=f"{rate!r}", num_requests=each, duration=None, seed=config.seed + number,
        warmup=f"{WARMUP_SHARE * each / rate:.6f}",
    )  # fmt: skip


def _rate(config: SimulateConfig) -> float:
    if config.concurrency:
        raise ConfigError("--plan needs an open loop: leave --concurrency out, and give --trace or --rate")
    try:
        return float(config.rate or "1")
    except ValueError:
        raise ConfigError(f"--rate with --plan must be one number, not {config.rate!r}") from None


def scaled(window: SimulateConfig, factor: float) -> SimulateConfig:
    """The same window with ``factor`` times as many requests per second."""
    if factor == 1.0:
        return window
    warmup = f"{window.warmup_s / factor:.6f}"
    if window.rate is None:  # a stretch of a trace, at its own pace
        return replace(window, time_scale=window.time_scale / factor, warmup=warmup)
    return replace(window, rate=f"{float(window.rate) * factor!r}", warmup=warmup)
