"""Sends one client process's share of the load, each request at its instant, whatever the responses do.

Open loop: the first request of every session (of one or more turns) goes out at its scheduled instant; nothing holds it
back or drops it. Closed loop: a fixed number of sessions is in flight, and a session's intended instant is when its
slot became free. A later turn is intended for the end of the turn before it plus the think time.
"""

import asyncio
import errno
import heapq
import itertools
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.ipc import Progress, RequestDone, SendRequest, Setup
from scripts.load_tester.client.precise_timer import PreciseTimer

MAX_GAPS = 256
OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # this machine has no more files or ports
CHECK_S = 1.0  # each check wakes a sleeping process, which costs as much as a token


class HttpClient:
    """Turns each ``SendRequest`` into a ``RequestDone``.

    Args:
        on_idle: called when all requests have ended and no more will come, perhaps more than once.
    """

    def __init__(self, setup: Setup, on_done: Callable[[RequestDone], None], on_idle: Callable[[], None]) -> None:
        self._setup = setup
        self._on_done = on_done
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._alarm = PreciseTimer(self._loop, self._send_due)
        self._ssl = _tls(setup)
        self._start_at = float("inf")
        self._order = itertools.count()  # breaks ties of the heap
        self._scheduled: list[tuple[float, int, SendRequest]] = []  # a heap, by seconds after the start
        self._waiting: deque[SendRequest] = deque()  # closed loop: first turns
        self._turns: dict[int, deque[SendRequest]] = {}  # later turns by session
        self._dropped: set[int] = set()  # sessions that were not begun, whose turns may still come
        self._between: dict[int, float] = {}  # sessions whose next turn has not been read yet: end of their last one
        self._free_slots: list[float] = []  # closed loop: since when each is free
        self._idle: list[Connection] = []
        self._in_flight: dict[Exchange, None] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_all = False
        self.bytes_waiting = 0
        self.num_done = self.num_failed = self.num_pieces = self.num_connections = 0
        self.first_s: list[float] = []
        self.lags = array("d")

    # ---- requests come in -------------------------------------------------------------------------------------------

    def add(self, request: SendRequest) -> None:
        """Schedule a request; its body counts as ``bytes_waiting`` until it is sent."""
        if request.think_s >= 0 and request.session in self._dropped:
            return
        self.bytes_waiting += len(request.body)
        if request.think_s >= 0:
            self._turns.setdefault(request.session, deque()).append(request)
            if request.session in self._between:
                self._schedule_turn(request.session, self._between.pop(request.session))
        elif self._setup.slots:
            self._waiting.append(request)
            self._fill_slots()
        else:
            self._schedule(request.at, request)

    def end_of_requests(self) -> None:
        self._has_all = True
        self._check_idle()

    def start(self, start_at: float) -> None:
        """Start the schedule: its second 0 is this instant."""
        self._start_at = start_at
        self._free_slots = [start_at] * self._setup.slots
        self._timer = self._loop.call_later(CHECK_S, self._check, time.monotonic() + CHECK_S)
        if self._setup.slots:
            self._alarm.set(start_at)
        self._set_alarm()
        self._check_idle()

    # ---- the schedule -----------------------------------------------------------------------------------------------

    def _schedule(self, at: float, request: SendRequest) -> None:
        heapq.heappush(self._scheduled, (at, next(self._order), request))
        self._set_alarm()

    def _schedule_turn(self, session: int, ended_at: float) -> None:
        turns = self._turns[session]
        request = turns.popleft()
        if not turns:
            del self._turns[session]
        self._schedule(ended_at + request.think_s - self._start_at, request)

    @property
    def _next_at(self) -> float:
        """Instant of the next scheduled request; infinite without one."""
        return self._start_at + self._scheduled[0][0] if self._scheduled else float("inf")

    def _set_alarm(self) -> None:
        if self._next_at < float("inf"):
            self._alarm.set(self._next_at)

    def _send_due(self) -> None:
        while self._next_at <= time.monotonic():
            at, _, request = heapq.heappop(self._scheduled)
            self._send(request, self._start_at + at)
        self._fill_slots()
        self._set_alarm()

    def _fill_slots(self) -> None:
        now = time.monotonic()
        if now < self._start_at:
            return
        if self._is_late(now):
            self._drop_waiting()
        while self._free_slots and self._waiting:
            self._send(self._waiting.popleft(), self._free_slots.pop())

    def _is_late(self, now: float) -> bool:
        return 0 < self._setup.stop_after_s <= now - self._start_at

    def _drop_waiting(self) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            if request.turns_left:
                self._dropped.add(request.session)
            turns = self._turns.pop(request.session, ())
            self.bytes_waiting -= sum(len(one.body) for one in (request, *turns))

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _send(self, request: SendRequest, intended_at: float) -> None:
        data = b"%b%d\r\n%b\r\n%b" % (self._setup.head, len(request.body), request.headers, request.body)
        exchange = Exchange(request, data, intended_at)
        exchange.released_at = time.monotonic()
        self.bytes_waiting -= len(request.body)
        self._in_flight[exchange] = None
        if self._idle:
            self._idle.pop().send(exchange)
        else:
            self._open_for(exchange)

    def _open_for(self, exchange: Exchange) -> None:
        opening = self._loop.create_task(self._open(exchange))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, exchange: Exchange) -> None:
        self.num_connections += 1
        setup = self._setup
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self),
                setup.host,
                setup.port,
                ssl=self._ssl,
                server_hostname=setup.server_name or None,
            )
        except (OSError, ssl.SSLError) as error:
            exchange.error = exchange.error or ("no_socket" if error.errno in OWN_LIMITS else "connect")
            exchange.ended_at = time.monotonic()
            self._end(exchange)
            return
        if exchange in self._in_flight:
            connection.send(exchange)
        else:  # it timed out in the meantime
            self._idle.append(connection)

    # ---- responses --------------------------------------------------------------------------------------------------

    def on_response(self, connection: Connection, exchange: Exchange) -> None:
        if connection.is_reusable and connection.exchange is None:
            self._idle.append(connection)
        self._end(exchange)

    def on_lost(self, connection: Connection, exchange: Exchange | None) -> None:
        if exchange is None:
            if connection in self._idle:
                self._idle.remove(connection)
            return
        if connection.was_closed_idle(exchange) and not exchange.is_retry:  # neither side is at fault
            exchange.is_retry = True
            self._open_for(exchange)
            return
        exchange.error = "dropped"
        exchange.ended_at = time.monotonic()
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        if self._in_flight.pop(exchange, 0) == 0:
            return
        request = exchange.request
        assert isinstance(request, SendRequest)
        self.num_done += 1
        self.num_failed += bool(exchange.error)
        self.num_pieces += len(exchange.sizes)
        if len(exchange.stamps) > 1:
            self.first_s.append(exchange.stamps[1] - exchange.intended_at)
        self._on_done(
            RequestDone(
                request.index,
                exchange.intended_at,
                exchange.released_at,
                exchange.sent_at,
                exchange.ended_at,
                exchange.stamps.tobytes(),
                exchange.sizes.tobytes(),
                b"".join(exchange.parts),
                exchange.error,
                exchange.is_retry,
            )
        )
        if request.turns_left:
            if request.session in self._turns:
                self._schedule_turn(request.session, exchange.ended_at)
            else:
                self._between[request.session] = exchange.ended_at
        elif self._setup.slots:
            self._free_slots.append(exchange.ended_at)
            self._fill_slots()
        self._check_idle()

    def _check_idle(self) -> None:
        is_idle = not (self._in_flight or self._scheduled or self._waiting or self._between)
        if self._has_all and self._start_at < float("inf") and is_idle:
            self._on_idle()

    # ---- periodic work ----------------------------------------------------------------------------------------------

    def _check(self, expected_at: float) -> None:
        """Note how late the loop is, and end requests that exceed the timeout."""
        now = time.monotonic()
        self.lags.append(max(0.0, now - expected_at))
        self._timer = self._loop.call_later(CHECK_S, self._check, now + CHECK_S)
        oldest = now - self._setup.timeout_s
        for exchange in list(self._in_flight):  # in order of release
            if exchange.released_at > oldest:
                break
            self._cut(exchange, "timeout", now)
        if self._setup.slots and self._waiting and self._is_late(now):
            self._drop_waiting()
            self._check_idle()

    def _cut(self, exchange: Exchange, error: str, now: float) -> None:
        exchange.error, exchange.ended_at = error, now
        if exchange.connection is not None and exchange.connection.exchange is exchange:
            exchange.connection.close()
        self._end(exchange)

    def progress(self) -> Progress:
        """State for the live view; first tokens since the previous call are handed over."""
        first_s, self.first_s = self.first_s, []
        at = time.monotonic() - self._start_at
        pieces = self.num_pieces + sum(len(exchange.sizes) for exchange in self._in_flight)
        gaps_s = [one.stamps[-1] - one.stamps[-2] for one in self._in_flight if len(one.stamps) > 2]
        return Progress(at, len(self._in_flight), self.num_done, self.num_failed, pieces, first_s, gaps_s[:MAX_GAPS])

    def stop(self) -> None:
        """End everything now; requests in flight count as halted."""
        for queue in (self._scheduled, self._waiting, self._turns, self._between):
            queue.clear()
        self._has_all = True
        now = time.monotonic()
        for exchange in list(self._in_flight):
            self._cut(exchange, "halted", now)
        self._between.clear()
        self._check_idle()

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._alarm.close()
        for connection in self._idle:
            connection.close()


def _tls(setup: Setup) -> ssl.SSLContext | None:
    if not setup.server_name:
        return None
    context = ssl.create_default_context()
    if not setup.is_tls_checked:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
