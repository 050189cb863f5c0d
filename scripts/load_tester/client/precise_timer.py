"""A timer for asyncio that is exact to microseconds.

Event loops round their timers to milliseconds, which would delay every send; a Linux timerfd does not.
"""

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

CLOCK_MONOTONIC = 1
TFD_NONBLOCK, TFD_CLOEXEC, TFD_TIMER_ABSTIME = os.O_NONBLOCK, os.O_CLOEXEC, 1
ITIMERSPEC = struct.Struct("4l")  # interval and value, each in seconds and nanoseconds


def _open_timer() -> int:
    """Descriptor of a new timer on the monotonic clock."""
    fd = int(ctypes.CDLL(None, use_errno=True).timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class PreciseTimer:
    """Calls ``callback`` once at the instant set last, or as soon as possible after it; it may call ``set`` again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._set_at = float("inf")
        self._fd = _open_timer()
        self._set_timer = ctypes.CDLL(None).timerfd_settime
        self._set_timer.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        loop.add_reader(self._fd, self._on_timer)

    def set(self, at: float) -> None:
        """Fire at this instant of the monotonic clock; replaces any earlier setting."""
        if at == self._set_at:
            return
        self._set_at = at
        nanoseconds = max(1, int(at * 1e9))  # 0 would disarm the timer
        self._set_timer(self._fd, TFD_TIMER_ABSTIME, ITIMERSPEC.pack(0, 0, *divmod(nanoseconds, 10**9)), None)

    def _on_timer(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it has been set again in the meantime
        self._set_at = float("inf")
        self._callback()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
