"""What a client process still has to send, in the order of its instants.

With a courier the next requests stand in its line, made ready, and it sends them at their instants without Python.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.ipc import Ask

LINE_S = 2.0  # longer than anybody lets a courier wait; else it would have to ring for the next ones
MAX_LINE = 32
MAX_LINE_BYTES = 1 << 20

Entry = tuple[float, int, Ask]  # seconds after the start, and what makes entries differ


class Line(Protocol):
    """Where requests wait for their instants: ``Courier``."""

    def offer(self, exchange: Exchange) -> None: ...

    def withdraw_first(self) -> None: ...

    def withdraw_last(self) -> None: ...

    def prepare(self, connections: Sequence[Connection], ring_at: float) -> None: ...


class Departures:
    """Asks with their instants; nothing is due before ``start``.

    Args:
        make: makes the request of an ask that is intended for an instant of the monotonic clock.
        line: if a courier sends.
    """

    def __init__(self, make: Callable[[Ask, float], Exchange], line: Line | None) -> None:
        self._make = make
        self._courier_line = line
        self._order = itertools.count()
        self._later: list[Entry] = []  # a heap
        self._line: deque[tuple[Entry, Exchange]] = deque()  # as in the courier's: in order, none after any of the heap
        self._line_bytes = 0
        self._start_at = float("inf")

    def __len__(self) -> int:
        return len(self._later) + len(self._line)

    def start(self, at: float) -> None:
        """Second 0 is this instant."""
        self._start_at = at

    def add(self, at: float, ask: Ask) -> None:
        heapq.heappush(self._later, (at, next(self._order), ask))

    def clear(self) -> None:
        while self._line:
            self._withdraw_last()
        self._later.clear()

    @property
    def next_at(self) -> float:
        """The instant of the first that stands in no line; infinite if there is none."""
        return self._start_at + self._later[0][0] if self._later else float("inf")

    def take_due(self) -> Exchange | None:
        """The first one, if its instant has come."""
        now = time.monotonic()
        line, later = self._line, self._later
        if line and not (later and later[0] < line[0][0]):
            if line[0][1].intended_at > now:
                return None
            assert self._courier_line
            self._courier_line.withdraw_first()
            return self.take_departed()
        if self.next_at > now:
            return None
        at, _, ask = heapq.heappop(later)
        return self._make(ask, self._start_at + at)

    def take_departed(self) -> Exchange:
        """The first one of the line, which the courier has sent."""
        _, exchange = self._line.popleft()
        self._line_bytes -= len(exchange.data)
        return exchange

    def line_up(self, idle: Sequence[Connection], *, are_all: bool = False) -> None:
        """Put the next ones into the courier's line, and say on which connections they may go out.

        Args:
            are_all: no more will be added; then the courier rings once the last one has gone.
        """
        line, later, courier_line = self._line, self._later, self._courier_line
        assert courier_line
        while line and later and later[0] < line[-1][0]:
            heapq.heappush(later, self._withdraw_last())
        until = time.monotonic() + LINE_S
        while len(line) < MAX_LINE and self._line_bytes < MAX_LINE_BYTES and self.next_at < until:
            entry = heapq.heappop(later)
            exchange = self._make(entry[2], self._start_at + entry[0])
            line.append((entry, exchange))
            self._line_bytes += len(exchange.data)
            courier_line.offer(exchange)
        usable = idle[-len(line) :] if line else ()
        is_end = are_all and line and not later
        courier_line.prepare([one for one in usable if one.number], line[-1][1].intended_at if is_end else self.next_at)

    def _withdraw_last(self) -> Entry:
        assert self._courier_line
        self._courier_line.withdraw_last()
        entry, exchange = self._line.pop()
        self._line_bytes -= len(exchange.data)
        return entry
