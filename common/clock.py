"""Time, handed in. Seconds as floats, monotonic; never the wall clock."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed instant; never goes back."""
        ...


class MonotonicClock:
    """The machine's own."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that a test or a simulation turns by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now += seconds
