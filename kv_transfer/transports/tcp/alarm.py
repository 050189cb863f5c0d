"""A timer with a file descriptor, which wakes a loop that waits for descriptors."""

import ctypes
import os
import time

_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Instants(ctypes.Structure):
    """``itimerspec``: the interval, which is zero for a timer that goes off once, and the time until then."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class Alarm:
    """A ``timerfd``, which the module ``os`` has from Python 3.13 on.

    Raises OSError: this process has no descriptor left.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._checked(self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS))

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def fileno(self) -> int:
        """Readable once the alarm has gone off, until ``arm`` or ``disarm`` is called."""
        return self._file

    def arm(self, seconds: float) -> None:
        """Go off once, in more than 0 seconds; an earlier time does not count any more."""
        whole = int(seconds)
        instants = _Instants(0, 0, whole, max(int((seconds - whole) * 1e9), 1))
        self._checked(self._libc.timerfd_settime(self._file, 0, ctypes.byref(instants), None))

    def disarm(self) -> None:
        """Do not go off, and count as not readable."""
        self._checked(self._libc.timerfd_settime(self._file, 0, ctypes.byref(_Instants()), None))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
