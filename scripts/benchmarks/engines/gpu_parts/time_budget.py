"""Bounds the time of a benchmark: the items that come last are dropped when they would not end in time."""

import time
from collections.abc import Callable, Iterable


class TimeBudget:
    """Time for a whole run.

    Args:
        total_s: for all parts together.
        say: prints a line.

    Attributes:
        dropped: names of the items that were not measured, with the reason.
    """

    def __init__(
        self,
        total_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._clock = clock
        self._say = say
        self._until = clock() + total_s
        self.dropped: list[str] = []

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - self._clock())

    def part(self, items: Iterable[tuple[str, Callable[[], str]]], limit_s: float, *, growth: float = 1.0) -> None:
        """Run items, cheapest first, for at most ``limit_s``.

        Args:
            items: names, and functions that measure and return why that is impossible; empty if it was not.
            growth: an item is expected to take this many times as long as the longest before it.
        """
        until = min(self._clock() + limit_s, self._until)
        longest_s = 0.0
        waiting = list(items)
        for index, (name, measure) in enumerate(waiting):
            began_at = self._clock()
            if began_at + growth * longest_s >= until:
                for late, _ in waiting[index:]:
                    self.drop(late, "no time left")
                return
            problem = measure()
            longest_s = max(longest_s, self._clock() - began_at)
            if problem:
                self.drop(name, problem)

    def drop(self, name: str, why: str) -> None:
        self.dropped.append(f"{name}: {why}")
        self._say(f"not measured: {name} ({why})")
