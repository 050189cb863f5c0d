"""Sends and receives by a loop in C, which wakes Python up only for what Python has to judge: ``courier.c``.

Where tokens are far apart everything finds cold caches, and what Python touches to send a request or to take a piece of
a response is most of what it costs. So requests stand in a line until their instants, and the pieces of a response lie
in a place of the connection's own, each with the instant at which it was read, until one comes that may be the last and
that somebody waits for, or something else wakes the process up; then the connection gets them all at once, before
anything else happens. All that happens to a connection is what would have happened without: only later.

``CourierSelector`` is the selector of an asyncio loop that waits that way. It needs Linux and a C compiler; without,
and for TLS, transports send and receive.
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
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    addressof,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Protocol

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.precise_timer import open_timer

log = logging.getLogger(__name__)

PLACE_DUE, REST_DUE, RING_DUE = 1, 2, 4
MAX_PIECES, MAX_BYTES, MAX_TURNS, MAX_DEPARTURES = 256, 32768, 16, 32
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
        ("is_kept", c_int32),
        ("is_over", c_int32),
        ("is_full", c_int32),
        ("num_pieces", c_int32),
        ("num_bytes", c_int32),
        ("num_turns", c_uint32),
        ("turns", c_uint32 * MAX_TURNS),
        ("number", c_uint64),
        ("next_marked", c_uint64),
        ("closed_at", c_double),
        ("stamps", c_double * MAX_PIECES),
        ("sizes", c_uint32 * MAX_PIECES),
        ("bytes", c_char * MAX_BYTES),
    )


class _Departure(Structure):
    """A request to be sent. The C struct of the same name."""

    _fields_ = (
        ("at", c_double),
        ("sent_at", c_double),
        ("data", c_char_p),
        ("size", c_int64),
        ("num_sent", c_int64),
        ("is_awaited", c_int64),
        ("number", c_uint64),
    )


class _Departures(Structure):
    """What is to be sent. The C struct of the same name."""

    _fields_ = (
        ("ring_at", c_double),
        ("armed_at", c_double),
        ("timer", c_int32),
        ("num_idle", c_int32),
        ("next", c_uint64),
        ("end", c_uint64),
        ("idle", c_void_p * MAX_DEPARTURES),
        ("line", _Departure * MAX_DEPARTURES),
    )


STAMPS_AT, SIZES_AT, BYTES_AT = _Place.stamps.offset, _Place.sizes.offset, _Place.bytes.offset


class Sender(Protocol):
    """Who has requests to send, and connections to send them on: ``Client``."""

    def line_up(self) -> None:
        """Offer what goes out next, and prepare for it: the courier is about to wait."""
        ...

    def on_departed(self, connection: Connection, at: float, num_sent: int) -> None:
        """The first of the line has gone out there, at that instant and with so many of its bytes."""
        ...

    def ring(self) -> None:
        """Something is due that the courier cannot send."""
        ...


class Courier:
    """Connections, what has come on them that they have not been given yet, and requests to be sent on them.

    Args:
        library: of ``courier.c``.

    Raises:
        OSError, AttributeError: it is no such library.
    """

    def __init__(self, library: str) -> None:
        functions = ctypes.CDLL(library)
        for size, struct in ((functions.baton_place_size, _Place), (functions.baton_departures_size, _Departures)):
            size.restype = c_int64
            assert size() == ctypes.sizeof(struct)
        self._watch = functions.baton_watch
        self._watch.argtypes = (c_int, c_int, POINTER(_Place), c_int)
        self._carry = functions.baton_carry
        self._carry.argtypes = (c_int, c_double, POINTER(_Departures), POINTER(c_uint64))
        self._poll = select.epoll()
        self._sender: Sender | None = None
        self._departures = _Departures(ring_at=math.inf, timer=open_timer())
        functions.baton_watch_timer.argtypes = (c_int, POINTER(_Departures))
        _check(functions.baton_watch_timer(self._poll.fileno(), self._departures))
        self._first_marked = c_uint64()
        self._numbers = itertools.count(1)
        self._places: dict[int, tuple[_Place, memoryview, Connection]] = {}
        #: Connections for which something has to be looked at, by number.
        self.marked: list[int] = []

    def watch_rest(self, fd: int) -> None:
        """Wait for this descriptor, too, without reading from it."""
        _check(self._watch(self._poll.fileno(), fd, None, False))

    def watch(self, fd: int, connection: Connection) -> int:
        """Receive for a connection.

        Returns:
            Its number here, never 0 and never used again.

        Raises:
            OSError, MemoryError: there is no room for another one.
        """
        number = next(self._numbers)
        place = _Place(fd=fd, is_awaited=True, number=number)
        _check(self._watch(self._poll.fileno(), fd, place, False))
        self._places[number] = place, memoryview(place).cast("B"), connection
        return number

    def expect(self, number: int, *, is_chunked: bool, is_awaited: bool) -> None:
        """Say which pieces have to be looked at, and whether at once."""
        place, *_ = self._places[number]
        place.is_chunked, place.is_awaited = is_chunked, is_awaited

    def attend(self, sender: Sender) -> None:
        """Send for this one."""
        self._sender = sender

    def trust(self, number: int) -> None:
        """After the end of a stream this connection goes on."""
        self._places[number][0].is_kept = True

    def offer(self, exchange: Exchange) -> None:
        """Put a request at the end of the line; its bytes must not go before it is sent or withdrawn."""
        departures = self._departures
        departure = departures.line[departures.end % MAX_DEPARTURES]
        departure.at = exchange.intended_at
        departure.data = exchange.data
        departure.size = len(exchange.data)
        departure.is_awaited = exchange.is_awaited
        departures.end += 1

    def withdraw_last(self) -> None:
        """Take the last one out of the line."""
        self._departures.end -= 1

    def withdraw_first(self) -> None:
        """Take the first one out of the line."""
        self._departures.next += 1

    def prepare(self, connections: Sequence[Connection], ring_at: float) -> None:
        """Say which connections may be used, the last one first, and when to ring in any case."""
        departures = self._departures
        departures.ring_at = ring_at
        for at, connection in enumerate(connections):
            departures.idle[at] = addressof(self._places[connection.number][0])
        departures.num_idle = len(connections)

    def forget(self, number: int) -> None:
        """Receive no longer; what lies for the connection goes. Before its descriptor is closed."""
        place, *_ = self._places[number]
        self._poll.unregister(place.fd)
        del self._places[number]

    def wait(self, timeout_s: float) -> int:
        """Send and receive until something is due or time is over; negative: it never is.

        Returns:
            ``PLACE_DUE``, ``REST_DUE`` and ``RING_DUE``, those that are; 0 if time is over.
        """
        departures, sender = self._departures, self._sender
        if sender:
            sender.line_up()
        sent = departures.next
        due: int = self._carry(self._poll.fileno(), timeout_s, departures, self._first_marked)
        if sender and departures.next != sent:
            for at in range(sent, departures.next):
                one = departures.line[at % MAX_DEPARTURES]
                sender.on_departed(self._places[one.number][2], one.sent_at, one.num_sent)
        number = self._first_marked.value
        while number:
            self.marked.append(number)
            place, *_ = self._places[number]
            place.is_marked = False
            number = place.next_marked
        return due

    def ring(self) -> None:
        """Let what is due be sent in another way."""
        if self._sender:
            self._sender.ring()

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
            turns = place.turns[: place.num_turns]
            place.num_pieces = place.num_bytes = place.num_turns = place.is_over = 0
            if place.is_full:
                place.is_full = 0
                _check(self._watch(self._poll.fileno(), place.fd, place, True))
            begin = at = 0
            for end in (*turns, num_pieces):
                size = sum(sizes[begin:end]) if turns else len(data)
                connection.receive_all(data[at : at + size], stamps[begin:end], sizes[begin:end])
                begin, at = end, at + size
        if place.is_closed and number in self._places:
            error = OSError(place.error, os.strerror(place.error)) if place.error else None
            connection.lost(error, place.closed_at)

    def close(self) -> None:
        self._poll.close()
        if self._departures.timer >= 0:
            os.close(self._departures.timer)
            self._departures.timer = -1


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


class CourierSelector(selectors.EpollSelector):
    """What an asyncio loop waits with: for its own descriptors as ever, and for a courier's connections in C."""

    def __init__(self, courier: Courier) -> None:
        super().__init__()
        self._courier = courier
        courier.watch_rest(self.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Timers are rounded up to milliseconds, as without.
        due = self._courier.wait(-1.0 if timeout is None else math.ceil(timeout * 1e3) * 1e-3)
        if self._courier.marked:
            asyncio.get_running_loop().call_soon(self._courier.deliver)  # the first thing of this round
        if due & RING_DUE:
            asyncio.get_running_loop().call_soon(self._courier.ring)
        return super().select(0) if due & REST_DUE else []

    def close(self) -> None:
        self._courier.close()
        super().close()


@cache
def find_library() -> str:
    """The library's file, compiled now if it never was; empty where it cannot be, which is said once."""
    from common.compile_native import NOT_BUILT, Library, built, reason_of  # of no use to client processes

    source = Path(__file__).with_name("courier.c")
    try:
        file = str(built(Library("courier", [source], flags=("-O2", "-Wall", "-Wextra")), COMPILE_TIMEOUT_S))
        Courier(file).close()
    except (*NOT_BUILT, AttributeError) as error:
        log.warning("no compiled courier, Python sends and receives itself (dearer): %s", reason_of(error))
        return ""
    return file
