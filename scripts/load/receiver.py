"""Receives by a loop in C, which wakes Python up only for what Python has to judge: ``receive.c``.

Where tokens are far apart every piece finds cold caches, and what Python touches to take one is most of what it costs.
So the pieces of a response lie in a place of the connection's own, each with the instant at which it was read, until
one comes that may be the last, or something else wakes the process up; then the connection gets them all at once,
before anything else happens. All that happens to a connection is what would have happened without: only later.

``ReceivingSelector`` is the selector of an asyncio loop that waits that way. It needs Linux and a C compiler; without,
and for TLS, connections receive by their transports.
"""

import asyncio
import ctypes
import itertools
import logging
import math
import os
import select
import selectors
from array import array
from ctypes import POINTER, Structure, byref, c_char, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64
from functools import cache
from pathlib import Path

from scripts.load.connection import Connection

log = logging.getLogger(__name__)

PLACE_DUE, REST_DUE = 1, 2
MAX_PIECES, MAX_BYTES = 256, 32768
COMPILE_TIMEOUT_S = 0.8  # the first request must go out soon


class _Place(Structure):
    """Where a connection's pieces lie. The C struct of the same name."""

    _fields_ = (
        ("fd", c_int32),
        ("is_chunked", c_int32),
        ("is_awaited", c_int32),
        ("is_marked", c_int32),
        ("is_closed", c_int32),
        ("error", c_int32),
        ("num_pieces", c_int32),
        ("num_bytes", c_int32),
        ("number", c_uint64),
        ("next_marked", c_uint64),
        ("closed_at", c_double),
        ("stamps", c_double * MAX_PIECES),
        ("sizes", c_uint32 * MAX_PIECES),
        ("bytes", c_char * MAX_BYTES),
    )


STAMPS_AT, SIZES_AT, BYTES_AT = _Place.stamps.offset, _Place.sizes.offset, _Place.bytes.offset


class Receiver:
    """Connections, and what has come on them that they have not been given yet.

    Args:
        library: of ``receive.c``.

    Raises:
        OSError, AttributeError: it is no such library.
    """

    def __init__(self, library: str) -> None:
        functions = ctypes.CDLL(library)
        functions.baton_place_size.restype = c_int64
        assert functions.baton_place_size() == ctypes.sizeof(_Place)
        self._watch = functions.baton_watch
        self._watch.argtypes = (c_int, c_int, POINTER(_Place))
        self._receive = functions.baton_receive
        self._receive.argtypes = (c_int, c_double, POINTER(c_uint64))
        self._poll = select.epoll()
        self._first_marked = c_uint64()
        self._numbers = itertools.count(1)
        self._places: dict[int, tuple[_Place, memoryview, Connection]] = {}
        #: Connections for which something has to be looked at, by number.
        self.marked: list[int] = []

    def watch_rest(self, fd: int) -> None:
        """Wait for this descriptor, too, without reading from it."""
        self._add(fd, None)

    def watch(self, fd: int, connection: Connection) -> int:
        """Receive for a connection.

        Returns:
            Its number here, never 0 and never used again.

        Raises:
            OSError, MemoryError: there is no room for another one.
        """
        number = next(self._numbers)
        place = _Place(fd=fd, is_awaited=True, number=number)
        self._add(fd, place)
        self._places[number] = place, memoryview(place).cast("B"), connection
        return number

    def _add(self, fd: int, place: _Place | None) -> None:
        error = self._watch(self._poll.fileno(), fd, place)
        if error:
            raise OSError(error, os.strerror(error))

    def expect(self, number: int, *, is_chunked: bool, is_awaited: bool) -> None:
        """Say which pieces have to be looked at, and whether at once."""
        place, *_ = self._places[number]
        place.is_chunked, place.is_awaited = is_chunked, is_awaited

    def forget(self, number: int) -> None:
        """Receive no longer; what lies for the connection goes. Before its descriptor is closed."""
        place, *_ = self._places[number]
        self._poll.unregister(place.fd)
        del self._places[number]

    def wait(self, timeout_s: float) -> int:
        """Receive until something is due (``PLACE_DUE``, ``REST_DUE``) or time is over (0); negative: it never is."""
        due: int = self._receive(self._poll.fileno(), timeout_s, byref(self._first_marked))
        number = self._first_marked.value
        while number:
            self.marked.append(number)
            place, *_ = self._places[number]
            place.is_marked = False
            number = place.next_marked
        return due

    def deliver(self) -> None:
        """Give connections what they have to look at."""
        marked, self.marked = self.marked, []
        for number in reversed(marked):
            self._give(number)

    def catch_up(self) -> None:
        """Give connections all that has come."""
        self.wait(0.0)
        for number in list(self._places):
            self._give(number)

    def _give(self, number: int) -> None:
        if number not in self._places:  # closed meanwhile
            return
        place, view, connection = self._places[number]
        num_pieces = place.num_pieces
        if num_pieces:
            stamps, sizes = array("d"), array("I")
            stamps.frombytes(view[STAMPS_AT : STAMPS_AT + 8 * num_pieces])
            sizes.frombytes(view[SIZES_AT : SIZES_AT + 4 * num_pieces])
            data = view[BYTES_AT : BYTES_AT + place.num_bytes].tobytes()
            place.num_pieces = place.num_bytes = 0
            connection.receive_all(data, stamps, sizes)
        if place.is_closed and number in self._places:
            error = OSError(place.error, os.strerror(place.error)) if place.error else None
            connection.lost(error, place.closed_at)

    def close(self) -> None:
        self._poll.close()


class ReceivingSelector(selectors.EpollSelector):
    """What an asyncio loop waits with: for its own descriptors as ever, and for a receiver's connections in C."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver
        receiver.watch_rest(self.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Timers are rounded up to milliseconds, as without.
        due = self._receiver.wait(-1.0 if timeout is None else math.ceil(timeout * 1e3) * 1e-3)
        if self._receiver.marked:
            asyncio.get_running_loop().call_soon(self._receiver.deliver)  # the first thing of this round
        return super().select(0) if due & REST_DUE else []

    def close(self) -> None:
        self._receiver.close()
        super().close()


@cache
def find_library() -> str:
    """The library's file, compiled now if it never was; empty where it cannot be, which is said once."""
    from common.native import NOT_BUILT, Library, built, reason_of  # of no use to client processes

    source = Path(__file__).with_name("receive.c")
    try:
        file = str(built(Library("receive", [source], flags=("-O2", "-Wall", "-Wextra")), COMPILE_TIMEOUT_S))
        Receiver(file).close()
    except (*NOT_BUILT, AttributeError) as error:
        log.warning("no compiled receiver, Python's own is used (dearer): %s", reason_of(error))
        return ""
    return file
