"""Turns the gateways' advice into the count of a group. Pure.

The advice changes from second to second. More nodes are started once more have been advised for ``up_after_s`` without
a break, and only as many as were advised all that time. Nodes are stopped once fewer have been advised for
``down_after_s`` without a break, and only as many as were too many all that time. A time without any advice is a break.
"""

from collections import deque
from dataclasses import dataclass, field

from scripts.cluster_manager.config import AutoscaleTimes, Bounds

#: Seconds without advice that are a break. Gateways are asked every two seconds.
BREAK_S = 10.0


@dataclass(slots=True)
class Autoscaler:
    """The count of one group."""

    bounds: Bounds
    times: AutoscaleTimes
    _advice: deque[tuple[float, int]] = field(default_factory=deque)
    _above_since: float | None = None
    _below_since: float | None = None
    _heard_at: float = 0.0

    def count(self, current: int, advised: int, now: float) -> int:
        """The count that the group should have, given the nodes that it has and those that are advised."""
        if now - self._heard_at > BREAK_S:
            self._begin_again()
        self._heard_at = now
        wanted = min(max(advised, self.bounds.min), self.bounds.max)
        self._advice.append((now, wanted))
        if wanted > current:
            self._below_since = None
            self._above_since = now if self._above_since is None else self._above_since
            return self._change(current, now, self._above_since, self.times.up_after_s)
        self._above_since = None
        if wanted < current:
            self._below_since = now if self._below_since is None else self._below_since
            return self._change(current, now, self._below_since, self.times.down_after_s)
        self._below_since = None
        self._advice.clear()
        return current

    def _change(self, current: int, now: float, since: float, after_s: float) -> int:
        while self._advice[0][0] < since:
            self._advice.popleft()
        if now - since < after_s:
            return current
        wanted = [count for _, count in self._advice]
        self._begin_again()
        return min(wanted) if min(wanted) > current else max(wanted)

    def _begin_again(self) -> None:
        self._above_since = self._below_since = None
        self._advice.clear()
