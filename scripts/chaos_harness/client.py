"""Sends requests over connections of the load tester's client, and collects the answers."""

import asyncio
import time

from scripts.chaos_harness.answers import Answer, read_answer
from scripts.chaos_harness.workload import LoadRequest
from scripts.load_tester.client.connection import Connection, Exchange

#: Idle connections are not used again after this long. A gateway closes them after 75 s, so that one that it closes
#: under a request has lost that request.
MAX_IDLE_S = 30.0


class Client:
    """An HTTP client that keeps connections open and reuses them."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[tuple[Connection, float]] = []  # since when

    async def send(self, request: LoadRequest, timeout_s: float, headers: str = "") -> Answer:
        """The answer, however it ended; late if it did not end in time."""
        exchange = self._exchange("POST", request.path, request.body, headers)
        try:
            await asyncio.wait_for(self._run(exchange), timeout_s)
        except TimeoutError:
            exchange.error = "timeout"
        exchange.ended_at = exchange.ended_at or time.monotonic()
        return read_answer(exchange)

    async def leave(self, request: LoadRequest, after_s: float) -> bool:
        """Send a request and close the connection after ``after_s``; True if the answer had not ended by then."""
        return (await self.send(request, after_s)).is_late

    async def call(self, method: str, path: str, body: bytes = b"", timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Status and body of a short answer; status 0 if there is none."""
        exchange = self._exchange(method, path, body, "")
        try:
            await asyncio.wait_for(self._run(exchange), timeout_s)
        except TimeoutError:
            return 0, b""
        head, _, rest = b"".join(exchange.parts).partition(b"\r\n\r\n")
        words = head.split(b" ", 2)
        return (int(words[1]), rest) if len(words) > 1 and not exchange.error else (0, rest)

    def close(self) -> None:
        for connection, _ in self._idle:
            connection.close()
        self._idle.clear()

    def _exchange(self, method: str, path: str, body: bytes, headers: str) -> Exchange:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        now = time.monotonic()
        exchange = Exchange(None, head.encode() + body, now)
        exchange.released_at = now
        return exchange

    async def _run(self, exchange: Exchange) -> None:
        ended = exchange.request = asyncio.get_running_loop().create_future()
        try:
            connection = self._kept() or await self._open()
        except OSError as error:
            exchange.error = f"connect: {error}"
            return
        connection.send(exchange)
        try:
            await ended
        finally:
            if connection.exchange is exchange:  # this was cancelled
                connection.close()

    def _kept(self) -> Connection | None:
        """An open connection, if there is one that is not too old."""
        while self._idle:
            connection, since = self._idle.pop()
            if time.monotonic() - since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _open(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self), self._host, self._port
        )
        return connection

    # ---- called by connections ---------------------------------------------------------------------------------------

    def on_response(self, connection: Connection, exchange: Exchange) -> None:
        if connection.is_reusable and connection.exchange is None:
            self._idle.append((connection, time.monotonic()))
        self._end(exchange, exchange.error)

    def on_lost(self, connection: Connection, exchange: Exchange | None) -> None:
        if exchange is None:
            self._idle = [kept for kept in self._idle if kept[0] is not connection]
            return
        exchange.ended_at = time.monotonic()
        self._end(exchange, "dropped")

    @staticmethod
    def _end(exchange: Exchange, error: str) -> None:
        exchange.error = error
        ended = exchange.request
        assert isinstance(ended, asyncio.Future)
        if not ended.done():
            ended.set_result(None)
