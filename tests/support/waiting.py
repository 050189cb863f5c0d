"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], timeout_s: float = 60.0) -> T:
    """The first true answer of ``look``; fails if there is none in time."""
    ends = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < ends, f"it never came within {timeout_s:g} s"
        time.sleep(0.005)
    return found
