"""A client process's part of the load: sends each request at its instant, whatever the answers do.

Open loop: the first request of every chain (a session, or a single request) goes out at its scheduled instant; nothing
ever holds it back or drops it. Closed loop: a fixed number of chains is under way, and a chain's intended instant is
when its slot became free. Later turns of a session are intended for the end of the turn before plus the think time.
"""

import asyncio
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.ipc import Ask, Done, Setup, Tick
from scripts.load_tester.client.precise_timer import Alarm
from scripts.load_tester.client.send_schedule import Departures

if TYPE_CHECKING:
    from scripts.load_tester.client.courier import Courier

MAX_GAPS = 256
LAG_S = 1.0  # each look wakes a sleeping process up, which costs as much as a token


class Client:
    """Everything between an ``Ask`` and its ``Done``.

    Args:
        setup: see there.
        on_done: called with each ended request.
        on_idle: called when all asks have ended and no more will come; also after each end until then it is not.
        courier: of connections without TLS, if it is not their transports that read.
    """

    def __init__(
        self,
        setup: Setup,
        on_done: Callable[[Done], None],
        on_idle: Callable[[], None],
        courier: "Courier | None" = None,
    ) -> None:
        self._setup = setup
        self._courier = courier
        self._on_done = on_done
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self.ring)
        self._ssl = _tls(setup)
        self._start_at = float("inf")
        self._departures = Departures(self._exchange, courier)
        self._waiting: deque[Ask] = deque()  # closed loop: first turns
        self._turns: dict[int, deque[Ask]] = {}  # later turns by session
        self._between: dict[int, float] = {}  # sessions whose next turn has not come yet: when their last one ended
        self._free_slots: list[float] = []  # closed loop: since when
        self._idle: list[Connection] = []
        self._under_way: dict[Exchange, None] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_all = False
        self.bytes_waiting = 0
        self.num_done = self.num_failed = self.num_pieces = self.num_connections = self.num_unsent = 0
        self.first_s: list[float] = []
        self.lags = array("d")
        if courier:
            courier.attend(self)

    # ---- asks come in -----------------------------------------------------------------------------------------------

    def add(self, ask: Ask) -> None:
        """Take an ask up; its bytes count as waiting until it is sent."""
        self.bytes_waiting += len(ask.body)
        if ask.think_s >= 0:
            self._turns.setdefault(ask.session, deque()).append(ask)
            if ask.session in self._between:
                self._next_turn(ask.session, self._between.pop(ask.session))
        elif self._setup.slots:
            self._waiting.append(ask)
            self._fill_slots()
        else:
            self._departures.add(ask.at, ask)
            self._set_alarm()

    def end_of_asks(self) -> None:
        self._has_all = True
        self._hurry()
        self._check_idle()

    def go(self, start_at: float) -> None:
        """Time 0 of the schedule is this instant."""
        self._start_at = start_at
        self._departures.start(start_at)
        self._free_slots = [start_at] * self._setup.slots
        self._timer = self._loop.call_later(LAG_S, self._look_around, time.monotonic() + LAG_S)
        if self._setup.slots:
            self._alarm.set(start_at)
        self._set_alarm()
        self._check_idle()

    # ---- the schedule -----------------------------------------------------------------------------------------------

    def _set_alarm(self) -> None:
        if not self._courier and (at := self._departures.next_at) < float("inf"):
            self._alarm.set(at)

    def ring(self) -> None:
        """Something is due."""
        while exchange := self._departures.take_due():
            self._send(exchange)
        self._fill_slots()
        self._set_alarm()
        self._hurry()

    def line_up(self) -> None:
        """The courier is about to wait."""
        self._departures.line_up(self._idle, are_all=self._has_all)

    def on_departed(self, connection: Connection, at: float, num_sent: int) -> None:
        """The courier has sent the first one of its line there."""
        exchange = self._departures.take_departed()
        if connection.exchange is None:
            self._idle.remove(connection)
        self._note_release(exchange, at)
        self.lags.append(max(0.0, at - exchange.intended_at))
        connection.sent(exchange, at, num_sent)

    def _hurry(self) -> None:
        """Once nothing is left to be sent, the last ends are waited for."""
        if self._has_all and not self._departures:
            for exchange in self._under_way:
                if exchange.connection:
                    exchange.connection.hurry()

    def _fill_slots(self) -> None:
        now = time.monotonic()
        if now < self._start_at:
            return
        if self._is_late(now):
            self._drop_waiting()
        while self._free_slots and self._waiting:
            self._send(self._exchange(self._waiting.popleft(), self._free_slots.pop()))

    def _is_late(self, now: float) -> bool:
        return 0 < self._setup.stop_after_s <= now - self._start_at

    def _drop_waiting(self) -> None:
        while self._waiting:
            ask = self._waiting.popleft()
            self.bytes_waiting -= len(ask.body)
            self._turns.pop(ask.session, None)

    def _next_turn(self, session: int, ended_at: float) -> None:
        turns = self._turns[session]
        ask = turns.popleft()
        if not turns:
            del self._turns[session]
        self._departures.add(ended_at + ask.think_s - self._start_at, ask)
        self._set_alarm()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _exchange(self, ask: Ask, intended_at: float) -> Exchange:
        data = b"%b%d\r\n%b\r\n%b" % (self._setup.head, len(ask.body), ask.headers, ask.body)
        return Exchange(ask, data, intended_at, is_awaited=bool(self._setup.slots or ask.turns_left))

    def _send(self, exchange: Exchange) -> None:
        self._note_release(exchange, time.monotonic())
        if self._idle:
            self._idle.pop().send(exchange)
        else:
            self._open_for(exchange)

    def _note_release(self, exchange: Exchange, at: float) -> None:
        assert isinstance(exchange.ask, Ask)
        self.bytes_waiting -= len(exchange.ask.body)
        exchange.released_at = at
        self._under_way[exchange] = None

    def _open_for(self, exchange: Exchange) -> None:
        opening = self._loop.create_task(self._open(exchange))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, exchange: Exchange) -> None:
        self.num_connections += 1
        setup = self._setup
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self, self._courier),
                setup.host,
                setup.port,
                ssl=self._ssl,
                server_hostname=setup.server_name or None,
            )
        except (OSError, ssl.SSLError):
            exchange.error = exchange.error or "connect"
            exchange.ended_at = time.monotonic()
            self._end(exchange)
            return
        connection.hand_over()
        if exchange in self._under_way:
            connection.send(exchange)
        else:  # timed out meanwhile
            self._idle.append(connection)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def on_response(self, connection: Connection, exchange: Exchange) -> None:
        if connection.is_reusable and connection.exchange is None:
            self._idle.append(connection)
        self._end(exchange)

    def on_lost(self, connection: Connection, exchange: Exchange | None, error: Exception | None) -> None:
        if exchange is None:
            if connection in self._idle:
                self._idle.remove(connection)
            return
        if not exchange.parts and connection.num_used > 1 and not exchange.is_retry:
            # The server closed a kept-alive connection just as it was used again: no fault of either.
            exchange.is_retry = True
            self._open_for(exchange)
            return
        exchange.error = "dropped"
        exchange.ended_at = time.monotonic()
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        if self._under_way.pop(exchange, 0) == 0:
            return
        ask = exchange.ask
        assert isinstance(ask, Ask)
        self.num_done += 1
        self.num_failed += bool(exchange.error)
        self.num_pieces += len(exchange.sizes)
        if len(exchange.stamps) > 1:
            self.first_s.append(exchange.stamps[1] - exchange.intended_at)
        self._on_done(
            Done(
                ask.index,
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
        if ask.turns_left:
            if ask.session in self._turns:
                self._next_turn(ask.session, exchange.ended_at)
            else:
                self._between[ask.session] = exchange.ended_at
        elif self._setup.slots:
            self._free_slots.append(exchange.ended_at)
            self._fill_slots()
        self._check_idle()

    def _check_idle(self) -> None:
        if self._has_all and self._start_at < float("inf") and not self._under_way and not self._departures:
            if not self._waiting and not self._between:
                self._on_idle()

    # ---- regularly --------------------------------------------------------------------------------------------------

    def _look_around(self, expected_at: float) -> None:
        """Note how late the loop is; time out what has taken too long."""
        now = time.monotonic()
        self.lags.append(max(0.0, now - expected_at))
        self._timer = self._loop.call_later(LAG_S, self._look_around, now + LAG_S)
        oldest = now - self._setup.timeout_s
        late = []
        for exchange in self._under_way:  # in order of release
            if exchange.released_at > oldest:
                break
            late.append(exchange)
        if late:
            self._catch_up()
        for exchange in late:
            self._cut(exchange, "timeout", now)
        if self._setup.slots and self._waiting and self._is_late(now):
            self._drop_waiting()
            self._check_idle()

    def _cut(self, exchange: Exchange, error: str, now: float) -> None:
        exchange.error, exchange.ended_at = error, now
        if exchange.connection is not None and exchange.connection.exchange is exchange:
            exchange.connection.close()
        self._end(exchange)

    def _catch_up(self) -> None:
        """Take up all that has been received; some of what is under way may end by that."""
        if self._courier:
            self._courier.catch_up()

    def tick(self) -> Tick:
        """What a live view shows; first tokens since the last tick are handed over."""
        self._catch_up()
        first_s, self.first_s = self.first_s, []
        at = time.monotonic() - self._start_at
        waiting = len(self._departures) + len(self._waiting)
        pieces = self.num_pieces + sum(len(exchange.sizes) for exchange in self._under_way)
        gaps_s = [one.stamps[-1] - one.stamps[-2] for one in self._under_way if len(one.stamps) > 2]
        return Tick(
            at, len(self._under_way), self.num_done, self.num_failed, pieces, waiting, first_s, gaps_s[:MAX_GAPS]
        )

    def halt(self) -> None:
        """Give up everything that has not ended."""
        self.num_unsent += len(self._departures) + len(self._waiting) + sum(map(len, self._turns.values()))
        self._departures.clear()
        self._waiting.clear()
        self._turns.clear()
        self._between.clear()
        self._has_all = True
        self._catch_up()
        now = time.monotonic()
        for exchange in list(self._under_way):
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
