"""What is seen while a run goes on: a few lines that change (rich), or nothing where nobody watches."""

import sys
from collections import deque
from collections.abc import Sequence

import numpy as np

from scripts.load.config import LoadtestConfig
from scripts.load.probe import Server
from scripts.load.report import Report
from scripts.load.run import run_load
from scripts.load.wire import Tick
from scripts.load.workload import Plan

KEPT = 400


def watched(config: LoadtestConfig, server: Server | None = None, salt: int = 0) -> Report:
    """``run_load`` with a live view, if standard error is a terminal and ``rich`` is there."""
    if not config.live or not sys.stderr.isatty():
        return run_load(config, server=server, salt=salt)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return run_load(config, server=server, salt=salt)
    view = View(config)
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def on_tick(ticks: Sequence[Tick], plan: Plan) -> None:
            live.update(view.text(ticks, plan))

        return run_load(config, on_tick=on_tick, server=server, salt=salt)


class View:
    """The lines of a live view, from the states of all client processes."""

    def __init__(self, config: LoadtestConfig) -> None:
        self._config = config
        self._first_s: deque[float] = deque(maxlen=KEPT)
        self._before = (0.0, 0)

    def text(self, ticks: Sequence[Tick], plan: Plan) -> str:
        """How far, how fast, how slow lately."""
        for tick in ticks:
            self._first_s.extend(tick.first_s)
            tick.first_s.clear()
        at = max(tick.at for tick in ticks)
        done, failed = sum(tick.num_done for tick in ticks), sum(tick.num_failed for tick in ticks)
        pieces = sum(tick.num_pieces for tick in ticks)
        share = min(1.0, max(0.0, at / plan.seconds)) if plan.seconds else done / max(1, plan.num_chains or 1)
        bar = "█" * round(30 * min(1.0, share)) + "░" * (30 - round(30 * min(1.0, share)))
        first = np.quantile(self._first_s, (0.5, 0.99)) * 1e3 if self._first_s else (float("nan"), float("nan"))
        return (
            f"{bar} {at:6.1f} s   {done:,} done, {failed:,} failed, {sum(t.num_in_flight for t in ticks):,} under way, "
            f"{pieces:,} pieces\n"
            f"last {len(self._first_s)}: first byte p50 {first[0]:,.1f} ms, p99 {first[1]:,.1f} ms   (Ctrl-C ends it)"
        )
