"""What is seen while a run goes on: a few lines that change (rich), or nothing where nobody watches."""

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scripts.load_tester.client.ipc import Tick
from scripts.load_tester.client.server_info import Server
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.files import Report
from scripts.load_tester.run import run_load
from scripts.load_tester.workload.workload import Plan

if TYPE_CHECKING:
    from rich.panel import Panel

KEPT = 400
STEPS = " ▁▂▃▄▅▆▇█"
NUM_STEPS = 40
WIDTH = 30


def watched(config: LoadtestConfig, server: Server | None = None, salt: int = 0) -> Report:
    """``run_load`` with a live view, if standard error is a terminal and ``rich`` is there."""
    if not config.live or not sys.stderr.isatty():
        return run_load(config, server=server, salt=salt)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return run_load(config, server=server, salt=salt)
    view = View()
    title = f"loadtest  {config.url}  {f'{config.concurrency} at once' if config.concurrency else config.rate or ''}"
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def on_tick(ticks: Sequence[Tick], plan: Plan) -> None:
            live.update(panel(view.text(ticks, plan), title))

        return run_load(config, on_tick=on_tick, server=server, salt=salt)


def panel(words: str, title: str) -> "Panel":
    """Words in a frame, cut off where the terminal ends; nothing in them is markup (an address may have brackets)."""
    from rich.panel import Panel
    from rich.text import Text

    content = Text(words, no_wrap=True, overflow="ellipsis")
    return Panel(content, title=Text(title.strip()), subtitle=Text("Ctrl-C ends it"), expand=False)


class View:
    """The lines of a live view, from the states of all client processes."""

    def __init__(self) -> None:
        self._first_s: deque[float] = deque(maxlen=KEPT)
        self._levels: dict[str, deque[float]] = {name: deque(maxlen=NUM_STEPS) for name in ("first", "gap", "rate")}
        self._before = (0.0, 0)
        self._pieces_per_s = 0.0

    def text(self, ticks: Sequence[Tick], plan: Plan) -> str:
        """How far, how fast, how slow lately, and how that has been changing."""
        new = [first_s for tick in ticks for first_s in tick.first_s]
        gaps = [gap_s for tick in ticks for gap_s in tick.gaps_s]
        self._first_s.extend(new)
        at = max(tick.at for tick in ticks)
        self._note(at, sum(tick.num_pieces for tick in ticks), new, gaps)
        for tick in ticks:  # a process may be asked again before it has told anything new
            tick.first_s.clear()
        done, failed = sum(tick.num_done for tick in ticks), sum(tick.num_failed for tick in ticks)
        share = min(1.0, max(0.0, at / plan.seconds)) if plan.seconds else done / (plan.num_requests or 1)
        bar = "█" * round(WIDTH * min(1.0, share)) + "░" * (WIDTH - round(WIDTH * min(1.0, share)))
        end = f" of {plan.seconds:.1f}" if plan.seconds else ""
        under_way = sum(tick.num_in_flight for tick in ticks)
        return "\n".join(
            (
                f"{bar} {at:.1f}{end} s",
                f"requests     {done:,} done, {failed:,} failed, {under_way:,} under way",
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
        """The last values as a row of little bars."""
        values = self._levels[name]
        most = max(values, default=0.0)
        return "".join(STEPS[round(8 * value / most)] if most else " " for value in values)


def _quantiles(values: Sequence[float] | deque[float]) -> str:
    if not values:
        return "-".ljust(25)
    p50, p99 = np.quantile(list(values), (0.5, 0.99)) * 1e3
    return f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms".ljust(25)
