"""One HTTP/1.1 connection that keeps what it receives, stamped, and looks inside as little as it can.

While a response streams in, each piece costs a clock reading, two appends and a look at one of its last bytes; with a
``Reader`` it waits in C until one has to be looked at. Only where the response could end there is its framing followed.
Everything else (chunk framing, events, JSON) waits until the run no longer minds:
``scripts/load_tester/client/sse_parser.py``. Where
tokens are far apart every piece finds the processor's caches cold, so what counts is how little is touched, not how
fast it is in a loop.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from time import monotonic
from typing import Protocol, cast

from scripts.load_tester.client.http_framing import follow_chunks, read_head

MAX_HEAD = 65536
MAX_RESPONSE = 64 << 20
MAX_LENGTH_DIGITS = 15  # Python refuses to read thousands of them
RETURN = 13  # of ``\r\n\r\n``, with which every chunked response ends, the first byte
LAST_CHUNK = b"0\r\n\r\n"
END_OF_EVENTS = b"[DONE]\n\n\r\n"
END_OF_STREAM = END_OF_EVENTS + LAST_CHUNK


class Framing(Enum):
    """How a response says where it ends."""

    HEAD = "its head has not been read yet"
    CHUNKED = "by a chunk of size 0"
    LENGTH = "by a Content-Length"
    CLOSE = "by closing the connection"


class Exchange:
    """One request under way and what came back.

    Attributes:
        ask: what was asked for; opaque here.
        data: the whole request as bytes.
        is_awaited: whether anybody waits for its end.
        stamps, sizes: when each piece of the response came, and how many bytes it had.
        parts: the bytes; a part is a piece, or several.
        error: why it failed, by kind; empty so far.
    """

    __slots__ = (
        "ask",
        "connection",
        "data",
        "ended_at",
        "error",
        "intended_at",
        "is_awaited",
        "is_retry",
        "parts",
        "released_at",
        "sent_at",
        "sizes",
        "stamps",
    )

    def __init__(self, ask: object, data: bytes, intended_at: float, *, is_awaited: bool = True) -> None:
        self.ask = ask
        self.data = data
        self.intended_at = intended_at
        self.released_at = self.sent_at = self.ended_at = 0.0
        self.stamps = array("d")
        self.sizes = array("I")
        self.parts: list[bytes] = []
        self.connection: Connection | None = None
        self.error = ""
        self.is_awaited = is_awaited
        self.is_retry = False

    def drop_first(self, count: int) -> None:
        """Forget the first bytes, with their stamps."""
        self.parts[:] = [b"".join(self.parts)[count:]]  # who appends to it goes on
        while self.sizes and self.sizes[0] <= count:
            count -= self.sizes.pop(0)
            del self.stamps[0]
        if count:
            self.sizes[0] -= count

    def drop_last(self, count: int) -> None:
        """Forget the last bytes, with their stamps."""
        whole = b"".join(self.parts)
        self.parts[:] = [whole[: len(whole) - count]]
        while self.sizes and self.sizes[-1] <= count:
            count -= self.sizes.pop()
            del self.stamps[-1]
        if count:
            self.sizes[-1] -= count


class Owner(Protocol):
    """Who uses connections."""

    def on_response(self, connection: "Connection", exchange: Exchange) -> None:
        """A response has come to its end; the connection may be used again if ``is_reusable``."""
        ...

    def on_lost(self, connection: "Connection", exchange: Exchange | None, error: Exception | None) -> None:
        """The connection is gone, in the midst of ``exchange`` if that is not None."""
        ...


class Reader(Protocol):
    """Who receives for connections, if their transports do not: ``Courier``."""

    def watch(self, fd: int, connection: "Connection") -> int: ...

    def expect(self, number: int, *, is_chunked: bool, is_awaited: bool) -> None: ...

    def forget(self, number: int) -> None: ...

    def trust(self, number: int) -> None: ...


class Connection(asyncio.Protocol):
    """Carries one exchange at a time, and keeps those in order that a courier has sent behind it.

    Args:
        owner: see there.
        reader: reads in place of the transport, and calls ``receive`` and ``lost``.
    """

    __slots__ = (
        "_following", "_framing", "_is_chunked", "_keep", "_measure", "_num_looked_at", "_owner", "_reader",
        "_remaining", "_rest", "_size", "_stamp", "_transport", "exchange", "is_reusable", "num_used", "number",
    )  # fmt: skip

    def __init__(self, owner: Owner, reader: Reader | None = None) -> None:
        self._owner = owner
        self._reader = reader
        self.number = 0  # the reader's; 0: the transport reads
        self._following: deque[Exchange] = deque()  # sent behind a response that has ended, but was not looked at yet
        self._framing = Framing.HEAD
        self._is_chunked = False
        self._stamp: Callable[[float], None]
        self._measure: Callable[[int], None]
        self._keep: Callable[[bytes], None]
        self._remaining = 0
        self._size = 0  # of the response so far
        self._num_looked_at = 0  # parts of a chunked response whose chunks have been followed
        self._rest = b""  # what they hold of a chunk that is not whole yet
        self._transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.is_reusable = True
        self.num_used = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def hand_over(self) -> None:
        """Let the reader receive from now on, if there is one.

        Not in ``connection_made``: with early releases of Python 3.11 (3.11.2, for one) a transport begins to read
        after that, even if it was paused, and takes pieces away.
        """
        if self._reader:
            with suppress(OSError, MemoryError):  # no room for it: it is read as any other
                self.number = self._reader.watch(self._transport.get_extra_info("socket").fileno(), self)
                self._transport.pause_reading()

    def send(self, exchange: Exchange) -> None:
        """Write the request; ``on_response`` or ``on_lost`` follows."""
        self.sent(exchange, monotonic(), 0)

    def sent(self, exchange: Exchange, at: float, num_sent: int) -> None:
        """So much of the request went out at that instant, maybe behind the end of a response that nobody has looked
        at yet; the rest goes now, and ``on_response`` or ``on_lost`` follows."""
        exchange.connection = self
        exchange.sent_at = at
        self.num_used += 1
        if num_sent < len(exchange.data):
            self._transport.write(exchange.data[num_sent:])
        if self.exchange is None:
            self._begin(exchange)
        else:
            self._following.append(exchange)

    def _begin(self, exchange: Exchange) -> None:
        """What comes from now on is the response to this one."""
        self.exchange = exchange
        self._stamp, self._measure, self._keep = exchange.stamps.append, exchange.sizes.append, exchange.parts.append
        self._framing = Framing.HEAD
        self._is_chunked = False
        self._size = 0
        self._expect(exchange.is_awaited)

    def close(self) -> None:
        """Drop the connection and what it carries, without a word to the owner; requests behind that are lost."""
        self._forget()
        self._leave()
        self.is_reusable = False
        self._transport.abort()
        self._lose_following(None)

    def _lose_following(self, error: Exception | None) -> None:
        while self._following:
            self._owner.on_lost(self, self._following.popleft(), error)

    def _forget(self) -> None:
        if self._reader and self.number:
            self._reader.forget(self.number)
            self.number = 0

    def _leave(self) -> None:
        self.exchange = None
        self._rest = b""
        self._is_chunked = False
        self._expect(True)  # what comes now has no business here

    def hurry(self) -> None:
        """Somebody waits for the end of the exchange from now on."""
        if self.exchange:
            for exchange in (self.exchange, *self._following):
                exchange.is_awaited = True
            self._expect(True)

    def _expect(self, is_awaited: bool) -> None:
        if self._reader and self.number:
            self._reader.expect(self.number, is_chunked=self._is_chunked, is_awaited=is_awaited)

    # ---- the hot path -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.receive(data, monotonic())

    def receive(self, data: bytes, now: float) -> None:
        """A piece of the response, read at that instant."""
        size = len(data)
        self._size += size
        if self._is_chunked and self._size <= MAX_RESPONSE:
            self._stamp(now)
            self._measure(size)
            self._keep(data)
            # A response ends with an empty line; a piece shorter than that may be the last part of it.
            if size < 4 or data[-4] == RETURN:
                self._look_for_the_end()
            return
        self._take(data, (now,), (size,))

    # ---- once or twice in a response --------------------------------------------------------------------------------

    def receive_all(self, data: bytes, stamps: Iterable[float], sizes: Iterable[int]) -> None:
        """Several pieces at once: their bytes, when each was read, and how many of the bytes it had."""
        self._size += len(data)
        self._take(data, stamps, sizes)

    def _take(self, data: bytes, stamps: Iterable[float], sizes: Iterable[int]) -> None:
        exchange = self.exchange
        if exchange is None:  # nobody asked: no connection to trust
            self.close()
            return
        if self._size > MAX_RESPONSE:
            self._give_up(exchange)
            return
        exchange.stamps.extend(stamps)
        exchange.sizes.extend(sizes)
        exchange.parts.append(data)
        if self._framing is Framing.LENGTH:
            self._remaining -= len(data)
            if self._remaining <= 0:
                self._end(exchange, -self._remaining)
        elif self._framing is Framing.HEAD:
            self._read_head(exchange)
        elif self._framing is Framing.CHUNKED:
            self._look_for_the_end()

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
            exchange.drop_first(end + 4)  # an interim head is passed over
        if len(so_far) > MAX_HEAD:
            self._fail(exchange, "bad_http")

    def _begin_body(self, exchange: Exchange, headers: dict[bytes, bytes], body: bytes) -> None:
        """How it will end is known now; ``body`` is what has come of it."""
        if b"close" in headers.get(b"connection", b"").lower():
            self.is_reusable = False
        length = headers.get(b"content-length", b"")
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._framing = Framing.CHUNKED
            self._is_chunked = True
            self._expect(exchange.is_awaited)
            self._num_looked_at, self._rest = len(exchange.parts), body
            self._look_for_the_end()
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

    def _look_for_the_end(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        parts = exchange.parts
        last = parts[-1]
        if last.endswith(END_OF_STREAM) or (
            last == LAST_CHUNK and len(parts) > 1 and parts[-2].endswith(END_OF_EVENTS)
        ):
            self._end(exchange)  # nothing else can look like this: no event of JSON has an empty line in it
            return
        data = self._rest + b"".join(parts[self._num_looked_at :])
        at, is_over = follow_chunks(data, 0)
        self._num_looked_at, self._rest = len(parts), data[at:]
        if at < 0:
            self._fail(exchange, "bad_http")
        elif is_over:
            self._end(exchange, len(data) - data.find(b"\r\n\r\n", at) - 4)

    def _end(self, exchange: Exchange, num_beyond: int = 0) -> None:
        """The response is whole; bytes beyond it are no part of it, and nobody asked for them."""
        if num_beyond:
            exchange.drop_last(num_beyond)
            self.close()
        exchange.ended_at = exchange.stamps[-1]
        if self._reader and self.number and self._is_chunked and self.is_reusable:
            self._reader.trust(self.number)
        self._leave()
        if self._following:
            self._begin(self._following.popleft())
        self._owner.on_response(self, exchange)

    def _fail(self, exchange: Exchange, error: str) -> None:
        exchange.error = error
        exchange.ended_at = monotonic()
        self.close()
        self._owner.on_response(self, exchange)

    def _give_up(self, exchange: Exchange) -> None:
        """It is too large; what came of it goes, since many of them would fill the memory, too."""
        if exchange.parts:
            exchange.drop_last(sum(exchange.sizes) - len(exchange.parts[0]))
        self._fail(exchange, "too_large")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(error, monotonic())

    def lost(self, error: Exception | None, now: float) -> None:
        """The reader has found that the peer closed the connection, or that it broke."""
        self._lost(error, now)
        self._transport.abort()

    def _lost(self, error: Exception | None, now: float) -> None:
        self._forget()
        exchange = self.exchange
        self._leave()
        self.is_reusable = False
        if exchange is not None and self._framing is Framing.CLOSE and error is None:
            exchange.ended_at = now
            self._owner.on_response(self, exchange)
        else:
            self._owner.on_lost(self, exchange, error)
        self._lose_following(error)
