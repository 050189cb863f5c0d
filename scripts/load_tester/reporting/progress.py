"""Live progress of a run on a terminal, drawn with rich."""

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scripts.load_tester.client.ipc import Progress
from scripts.load_tester.client.server_info import ServerInfo
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.run import run_load
from scripts.load_tester.workload.plan import Plan

if TYPE_CHECKING:
    from rich.panel import Panel

KEPT = 400
STEPS = " ▁▂▃▄▅▆▇█"
NUM_STEPS = 40
WIDTH = 30


def run_with_progress(config: LoadtestConfig, server: ServerInfo | None = None, salt: int = 0) -> Report:
    """``run_load`` with a live view, if standard error is a terminal and ``rich`` is installed."""
    if not config.live or not sys.stderr.isatty():
        return run_load(config, server=server, salt=salt)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return run_load(config, server=server, salt=salt)
    view = ProgressView()
    load = f"{config.concurrency} concurrent" if config.concurrency else config.rate or ""
    title = f"loadtest  {config.url}  {load}"
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def on_progress(progress: Sequence[Progress], plan: Plan) -> None:
            live.update(panel(view.text(progress, plan), title))

        return run_load(config, on_progress=on_progress, server=server, salt=salt)


def panel(text: str, title: str) -> "Panel":
    """Text in a frame, cut off at the edge of the terminal; brackets in it are not markup."""
    from rich.panel import Panel
    from rich.text import Text

    content = Text(text, no_wrap=True, overflow="ellipsis")
    return Panel(content, title=Text(title.strip()), subtitle=Text("Ctrl-C ends it"), expand=False)


class ProgressView:
    """Lines of the live view, from the states of all client processes."""

    def __init__(self) -> None:
        self._first_s: deque[float] = deque(maxlen=KEPT)
        self._levels: dict[str, deque[float]] = {name: deque(maxlen=NUM_STEPS) for name in ("first", "gap", "rate")}
        self._before = (0.0, 0)
        self._pieces_per_s = 0.0

    def text(self, progress: Sequence[Progress], plan: Plan) -> str:
        """Progress, counts, recent latencies and rate, each with a sparkline of its history."""
        new = [first_s for one in progress for first_s in one.first_s]
        gaps = [gap_s for one in progress for gap_s in one.gaps_s]
        self._first_s.extend(new)
        at = max(one.at for one in progress)
        self._note(at, sum(one.num_pieces for one in progress), new, gaps)
        for one in progress:  # so that values do not count twice if another process reports first
            one.first_s.clear()
        done, failed = sum(one.num_done for one in progress), sum(one.num_failed for one in progress)
        share = min(1.0, max(0.0, at / plan.seconds)) if plan.seconds else done / (plan.num_requests or 1)
        bar = "█" * round(WIDTH * min(1.0, share)) + "░" * (WIDTH - round(WIDTH * min(1.0, share)))
        end = f" of {plan.seconds:.1f}" if plan.seconds else ""
        in_flight = sum(one.num_in_flight for one in progress)
        return "\n".join(
            (
                f"{bar} {at:.1f}{end} s",
                f"requests     {done:,} done, {failed:,} failed, {in_flight:,} in flight",
                f"first token  {_quantiles(self._first_s)}  {self._curve('first')}",
                f"last gap     {_quantiles(gaps)}  {self._curve('gap')}",
                f"pieces/s     {self._pieces_per_s:,.0f}".ljust(38) + f"  {self._curve('rate')}",
            )
        )

    def _note(self, at: float, pieces: int, first_s: Sequence[float], gaps_s: Sequence[float]) -> None:
        before_at, before = self._before
        if at > before_at:
            self._pieces_per_s = max(0, pieces - before) / (at - before_at)
            self._levels["rate"].append(self._pieces_per_s)
            self._before = (at, pieces)
        for name, values in (("first", first_s), ("gap", gaps_s)):
            if values:
                self._levels[name].append(float(np.median(values)))

    def _curve(self, name: str) -> str:
        values = self._levels[name]
        most = max(values, default=0.0)
        return "".join(STEPS[round(8 * value / most)] if most else " " for value in values)


def _quantiles(values: Sequence[float] | deque[float]) -> str:
    if not values:
        return "-".ljust(25)
    p50, p99 = np.quantile(list(values), (0.5, 0.99)) * 1e3
    return f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms".ljust(25)
