"""One HTTP/1.1 client connection that stamps and keeps what it receives, and parses as little as it can.

While a response streams in, each piece costs a clock reading, three appends and a look at one of its last bytes. The
framing is followed only where the response could end. Chunks, events and JSON are parsed after the run, by
``sse_parser``, so that parsing never delays a send or a time stamp.
"""

import asyncio
from array import array
from enum import Enum
from time import monotonic
from typing import Protocol, cast

from scripts.load_tester.client.http_framing import follow_chunks, read_head

MAX_HEAD = 65536
MAX_RESPONSE = 64 << 20
MAX_LENGTH_DIGITS = 15  # Python refuses to convert thousands of digits
RETURN = 13  # first byte of ``\r\n\r\n``, with which every chunked response ends
#: A server that closes an idle connection as it is used again has done so before it saw the request: the client learns
#: of it at once. After this long, the server has had the request and lost it.
CLOSED_IDLE_S = 0.25
LAST_CHUNK = b"0\r\n\r\n"
END_OF_EVENTS = b"[DONE]\n\n\r\n"
END_OF_STREAM = END_OF_EVENTS + LAST_CHUNK


class Framing(Enum):
    """How a response marks its end."""

    HEAD = "the head has not been read yet"
    CHUNKED = "by a chunk of size 0"
    LENGTH = "by a Content-Length"
    CLOSE = "by closing the connection"


class Exchange:
    """One request in flight and the response received so far.

    Attributes:
        request: the message that scheduled it; opaque here.
        stamps, sizes: when each piece of the response arrived, and its length in bytes.
    """

    __slots__ = (
        "connection", "data", "ended_at", "error", "intended_at", "is_retry", "parts", "released_at", "request",
        "sent_at", "sizes", "stamps",
    )  # fmt: skip

    def __init__(self, request: object, data: bytes, intended_at: float) -> None:
        self.request = request
        self.data = data
        self.intended_at = intended_at
        self.released_at = self.sent_at = self.ended_at = 0.0
        self.stamps = array("d")
        self.sizes = array("I")
        self.parts: list[bytes] = []
        self.connection: Connection | None = None
        self.error = ""
        self.is_retry = False

    def drop_first(self, count: int) -> None:
        self.parts = [b"".join(self.parts)[count:]]
        while self.sizes and self.sizes[0] <= count:
            count -= self.sizes.pop(0)
            del self.stamps[0]
        if count:
            self.sizes[0] -= count

    def drop_last(self, count: int) -> None:
        whole = b"".join(self.parts)
        self.parts = [whole[: len(whole) - count]]
        while self.sizes and self.sizes[-1] <= count:
            count -= self.sizes.pop()
            del self.stamps[-1]
        if count:
            self.sizes[-1] -= count


class ConnectionOwner(Protocol):
    def on_response(self, connection: "Connection", exchange: Exchange) -> None:
        """A response is complete; the connection may be used again if ``is_reusable``."""
        ...

    def on_lost(self, connection: "Connection", exchange: Exchange | None) -> None:
        """The connection is gone, in the middle of ``exchange`` unless that is None."""
        ...


class Connection(asyncio.Protocol):
    """Carries one exchange at a time."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._framing = Framing.HEAD
        self._remaining = 0  # bytes of a body with a Content-Length
        self._size = 0  # bytes of the response so far
        self._num_followed = 0  # parts of a chunked response whose chunks have been followed
        self._rest = b""  # their last, incomplete chunk
        self._transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.is_reusable = True
        self.num_used = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, exchange: Exchange) -> None:
        """Write the request; ``on_response`` or ``on_lost`` follows."""
        exchange.connection = self
        exchange.sent_at = monotonic()
        self.num_used += 1
        self.exchange = exchange
        self._framing = Framing.HEAD
        self._size = 0
        self._transport.write(exchange.data)

    def was_closed_idle(self, exchange: Exchange) -> bool:
        """Whether the server closed this connection just as it was used again, before it saw the request."""
        return self.num_used > 1 and not exchange.parts and monotonic() - exchange.sent_at < CLOSED_IDLE_S

    def close(self) -> None:
        """Abort the connection and its exchange without calling the owner."""
        self._release()
        self.is_reusable = False
        self._transport.abort()

    def _release(self) -> None:
        self.exchange = None
        self._rest = b""

    # ---- receiving --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        exchange = self.exchange
        if exchange is None:  # bytes without a request: this connection cannot be trusted
            self.close()
            return
        self._size += len(data)
        if self._size > MAX_RESPONSE:
            self._give_up(exchange)
            return
        exchange.stamps.append(now)
        exchange.sizes.append(len(data))
        exchange.parts.append(data)
        if self._framing is Framing.CHUNKED:
            # The response ends with an empty line; a shorter piece may be the last part of one.
            if len(data) < 4 or data[-4] == RETURN:
                self._look_for_end(exchange)
        elif self._framing is Framing.LENGTH:
            self._remaining -= len(data)
            if self._remaining <= 0:
                self._end(exchange, -self._remaining)
        elif self._framing is Framing.HEAD:
            self._read_head(exchange)

    def _read_head(self, exchange: Exchange) -> None:
        so_far = b"".join(exchange.parts)
        while (end := so_far.find(b"\r\n\r\n")) >= 0:
            status, headers = read_head(so_far[:end])
            so_far = so_far[end + 4 :]
            if status < 100:
                self._fail(exchange, "bad_http")
                return
            if status >= 200:
                self._begin_body(exchange, headers, so_far)
                return
            exchange.drop_first(end + 4)  # an interim head
        if len(so_far) > MAX_HEAD:
            self._fail(exchange, "bad_http")

    def _begin_body(self, exchange: Exchange, headers: dict[bytes, bytes], body: bytes) -> None:
        """Choose the framing; ``body`` is what has arrived of the body."""
        if b"close" in headers.get(b"connection", b"").lower():
            self.is_reusable = False
        length = headers.get(b"content-length", b"")
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._framing = Framing.CHUNKED
            self._num_followed, self._rest = len(exchange.parts), body
            self._look_for_end(exchange)
        elif length.isdigit():
            self._framing = Framing.LENGTH
            if len(length) > MAX_LENGTH_DIGITS:
                self._give_up(exchange)
                return
            self._remaining = int(length) - len(body)
            if self._remaining <= 0:
                self._end(exchange, -self._remaining)
        else:
            self._framing = Framing.CLOSE
            self.is_reusable = False

    def _look_for_end(self, exchange: Exchange) -> None:
        parts = exchange.parts
        last = parts[-1]
        if last.endswith(END_OF_STREAM) or (
            last == LAST_CHUNK and len(parts) > 1 and parts[-2].endswith(END_OF_EVENTS)
        ):
            self._end(exchange)  # unambiguous: no event of JSON contains an empty line
            return
        data = self._rest + b"".join(parts[self._num_followed :])
        at, is_over = follow_chunks(data)
        self._num_followed, self._rest = len(parts), data[at:]
        if at < 0:
            self._fail(exchange, "bad_http")
        elif is_over:
            self._end(exchange, len(data) - data.find(b"\r\n\r\n", at) - 4)

    def _end(self, exchange: Exchange, num_beyond: int = 0) -> None:
        """The response is complete; ``num_beyond`` bytes after it belong to no request."""
        if num_beyond:
            exchange.drop_last(num_beyond)
            self.close()
        exchange.ended_at = exchange.stamps[-1]
        self._release()
        self._owner.on_response(self, exchange)

    def _fail(self, exchange: Exchange, error: str) -> None:
        exchange.error = error
        exchange.ended_at = monotonic()
        self.close()
        self._owner.on_response(self, exchange)

    def _give_up(self, exchange: Exchange) -> None:
        """End a response that is too large; only its first part is kept, since many such would fill the memory."""
        if exchange.parts:
            exchange.drop_last(sum(exchange.sizes) - len(exchange.parts[0]))
        self._fail(exchange, "too_large")

    def connection_lost(self, error: Exception | None) -> None:
        exchange = self.exchange
        self._release()
        self.is_reusable = False
        if exchange is not None and self._framing is Framing.CLOSE and error is None:
            exchange.ended_at = monotonic()
            self._owner.on_response(self, exchange)
        else:
            self._owner.on_lost(self, exchange)
