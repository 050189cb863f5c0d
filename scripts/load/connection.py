"""One HTTP/1.1 connection that keeps what it receives, stamped, and looks inside as little as it can.

While a response streams in, each piece costs a clock reading, two appends and a look at one of its last bytes. Only
where the response could end there is its framing followed. Everything else (chunk framing, events, JSON) waits until
the run no longer minds: ``scripts/load/stream.py``. Where tokens are far apart every piece finds the processor's caches
cold, so what counts is how little is touched, not how fast it is in a loop.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Protocol, cast

MAX_HEAD = 65536
MAX_DIGITS = 8  # of a chunk's size
HEX = b"0123456789abcdefABCDEF"
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
        stamps, pieces: when each piece of the response came, and its bytes.
        error: why it failed, by kind; empty so far.
    """

    __slots__ = (
        "ask",
        "connection",
        "data",
        "ended_at",
        "error",
        "intended_at",
        "is_retry",
        "pieces",
        "released_at",
        "sent_at",
        "stamps",
    )

    def __init__(self, ask: object, data: bytes, intended_at: float) -> None:
        self.ask = ask
        self.data = data
        self.intended_at = intended_at
        self.released_at = self.sent_at = self.ended_at = 0.0
        self.stamps: list[float] = []
        self.pieces: list[bytes] = []
        self.connection: Connection | None = None
        self.error = ""
        self.is_retry = False


class Owner(Protocol):
    """Who uses connections."""

    def on_response(self, connection: "Connection", exchange: Exchange) -> None:
        """A response has come to its end; the connection may be used again if ``is_reusable``."""
        ...

    def on_lost(self, connection: "Connection", exchange: Exchange | None, error: Exception | None) -> None:
        """The connection is gone, in the midst of ``exchange`` if that is not None."""
        ...


class Connection(asyncio.Protocol):
    """Carries one exchange at a time."""

    __slots__ = (
        "_checked", "_framing", "_is_chunked", "_keep", "_owner", "_remaining", "_stamp", "_transport",
        "exchange", "is_reusable", "num_used",
    )  # fmt: skip

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._framing = Framing.HEAD
        self._is_chunked = False
        self._stamp: Callable[[float], None]
        self._keep: Callable[[bytes], None]
        self._remaining = 0
        self._checked = 0
        self._transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.is_reusable = True
        self.num_used = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, exchange: Exchange) -> None:
        """Write the request; ``on_response`` or ``on_lost`` follows."""
        assert self.exchange is None
        self.exchange = exchange
        exchange.connection = self
        self._stamp, self._keep = exchange.stamps.append, exchange.pieces.append
        self._framing = Framing.HEAD
        self.num_used += 1
        exchange.sent_at = monotonic()
        self._transport.write(exchange.data)

    def close(self) -> None:
        """Drop the connection and whatever it carries, without a word to the owner."""
        self._leave()
        self.is_reusable = False
        self._transport.abort()

    def _leave(self) -> None:
        self.exchange = None
        self._is_chunked = False

    # ---- the hot path -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        if self._is_chunked:
            self._stamp(now)
            self._keep(data)
            # A response ends with an empty line; a piece shorter than that may be the last part of it.
            if len(data) < 4 or data[-4] == RETURN:
                self._look_for_the_end()
            return
        self._take(data, now)

    # ---- once or twice in a response --------------------------------------------------------------------------------

    def _take(self, data: bytes, now: float) -> None:
        """A piece of anything but the body of a chunked response."""
        exchange = self.exchange
        if exchange is None:  # nobody asked: no connection to trust
            self.is_reusable = False
            self._transport.abort()
            return
        self._stamp(now)
        self._keep(data)
        if self._framing is Framing.LENGTH:
            self._remaining -= len(data)
            if self._remaining <= 0:
                self._end(exchange)
        elif self._framing is Framing.HEAD:
            self._read_head(exchange)

    def _read_head(self, exchange: Exchange) -> None:
        so_far = b"".join(exchange.pieces)
        end = so_far.find(b"\r\n\r\n")
        if end < 0:
            if len(so_far) > MAX_HEAD:
                self._fail(exchange, "bad_http")
            return
        status, headers = read_head(so_far[:end])
        if status == 0:
            self._fail(exchange, "bad_http")
            return
        if 100 <= status < 200:
            exchange.pieces[:] = [so_far[end + 4 :]]
            exchange.stamps[:] = exchange.stamps[-1:]
            if exchange.pieces[0]:
                self._read_head(exchange)
            return
        if b"close" in headers.get(b"connection", b"").lower():
            self.is_reusable = False
        self._checked = end + 4
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._framing = Framing.CHUNKED
            self._is_chunked = True
            self._look_for_the_end()
        elif headers.get(b"content-length", b"").isdigit():
            self._framing = Framing.LENGTH
            self._remaining = int(headers[b"content-length"]) - (len(so_far) - end - 4)
            if self._remaining <= 0:
                self._end(exchange)
        else:
            self._framing = Framing.CLOSE
            self.is_reusable = False

    def _look_for_the_end(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        pieces = exchange.pieces
        last = pieces[-1]
        if last.endswith(END_OF_STREAM) or (
            last == LAST_CHUNK and len(pieces) > 1 and pieces[-2].endswith(END_OF_EVENTS)
        ):
            self._end(exchange)  # nothing else can look like this: no event of JSON has an empty line in it
            return
        whole = b"".join(pieces)
        self._checked, is_over = follow_chunks(whole, self._checked)
        if self._checked < 0:
            self._fail(exchange, "bad_http")
        elif is_over:
            self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        exchange.ended_at = exchange.stamps[-1]
        self._leave()
        self._owner.on_response(self, exchange)

    def _fail(self, exchange: Exchange, error: str) -> None:
        exchange.error = error
        exchange.ended_at = monotonic()
        self.close()
        self._owner.on_response(self, exchange)

    def connection_lost(self, error: Exception | None) -> None:
        exchange = self.exchange
        self._leave()
        self.is_reusable = False
        if exchange is not None and self._framing is Framing.CLOSE and error is None:
            exchange.ended_at = monotonic()
            self._owner.on_response(self, exchange)
            return
        self._owner.on_lost(self, exchange, error)


def read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers (names in lower case) of a response's head; status 0 if it is none."""
    line, *lines = head.split(b"\r\n")
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return 0, {}
    pairs = (entry.partition(b":") for entry in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def chunk_size(line: bytes) -> int:
    """What the line before a chunk says; -1 if it is none. Python's ``int`` would take signs and underscores, too."""
    digits = line.partition(b";")[0].strip()
    return int(digits, 16) if 0 < len(digits) <= MAX_DIGITS and not digits.strip(HEX) else -1


def follow_chunks(data: bytes, at: int) -> tuple[int, bool]:
    """Step over whole chunks from ``at`` on.

    Returns:
        Where the first chunk begins that is not whole yet (-1: there is no chunk there), and whether the last one,
        with its trailers, has been passed.
    """
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return at, False
        size = chunk_size(data[at:line_end])
        if size < 0:
            return -1, False
        if size == 0:
            is_over = data.startswith(b"\r\n", line_end + 2) or data.find(b"\r\n\r\n", line_end + 2) >= 0
            return at, is_over
        following = line_end + 2 + size + 2
        if following > len(data):
            return at, False
        at = following
