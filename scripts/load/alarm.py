"""A timer that is exact to microseconds.

Event loops round their timers to milliseconds, which would shift every send; a Linux timerfd does not. Where there is
none, the loop's own timers are used.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

CLOCK_MONOTONIC = 1
TFD_NONBLOCK, TFD_CLOEXEC, TFD_TIMER_ABSTIME = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0), 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class Alarm:
    """Calls ``ring`` once at, or as soon as possible after, the instant that was set last.

    Args:
        loop: whose thread everything happens in.
        ring: called without arguments; may call ``set`` again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._set_at = float("inf")
        self._fd = -1
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        except (OSError, AttributeError):
            pass
        if self._fd >= 0:
            loop.add_reader(self._fd, self._on_timer)

    def set(self, at: float) -> None:
        """Ring at this instant of the monotonic clock instead of any earlier setting."""
        if at == self._set_at:
            return
        self._set_at = at
        if self._fd < 0:
            if self._handle:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, at - time.monotonic()), self._go)
            return
        nanoseconds = max(1, int(at * 1e9))  # 0 would switch it off
        value = _Timer(_Time(0, 0), _Time(nanoseconds // 10**9, nanoseconds % 10**9))
        self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def _on_timer(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew meanwhile
        self._go()

    def _go(self) -> None:
        self._set_at = float("inf")
        self._ring()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        elif self._handle:
            self._handle.cancel()
