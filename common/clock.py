"""Clocks, which are passed to the code that needs the time. Monotonic seconds as floats, never the wall clock."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return the seconds since a fixed instant; the value never falls."""
        ...


class MonotonicClock:
    now = staticmethod(time.monotonic)  # a function in C, since it is called for every token
