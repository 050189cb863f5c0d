"""Holds a step back for a moment, so that requests whose last pages are on their way can join it. Pure.

A request that comes just after a step has begun waits for all of that step. The prefill node announces the end of its
prompt before the last pages are in place (``PrefillDone``), mostly by much less than a step. A step waits for such a
request once, and never for longer than its arrival saves: with ``n`` running requests, that all of them wait costs
``n`` times as much as one of them gains by not waiting for a whole step.
"""

import math
from collections import deque

#: The largest part of a step for which the next one is held back.
MAX_SHARE = 0.25


class StepHold:
    """Decides whether the next step of a decode node is held back.

    Attributes:
        begun_at: instant at which the last step that is over began.
        until: instant at which the next step is planned at the latest; infinity if it is not held back.
    """

    def __init__(self) -> None:
        self.begun_at = self._ended_at = 0.0  # of the last step that is over
        self.until = math.inf
        self._planned_at: deque[float] = deque()  # of outstanding steps

    @property
    def planned_at(self) -> float:
        """When the newest outstanding step was planned."""
        return self._planned_at[-1]

    def planned(self, now: float) -> None:
        """A step was planned."""
        self._planned_at.append(now)

    def committed(self, now: float) -> None:
        """The oldest outstanding step is over."""
        self.begun_at, self._ended_at = max(self._planned_at.popleft(), self._ended_at), now

    def holds(self, num_landing: int, num_running: int, now: float) -> bool:
        """Whether the next step waits.

        Args:
            num_landing: requests for which it may wait.
            num_running: requests that would wait.
        """
        share = min(MAX_SHARE, num_landing / num_running) if num_running else 0.0
        until = self._ended_at + share * (self._ended_at - self.begun_at)
        self.until = until if now < until else math.inf
        return now < until
