"""Clocks, which are passed to the code that needs the time. Monotonic seconds as floats, never the wall clock."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return the seconds since a fixed instant; the value never falls."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that a test or a simulation advances."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds
