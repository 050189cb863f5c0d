"""What the parent and its client processes say to each other, over pipes.

A frame is four bytes of length and a tagged MessagePack struct. Instants are seconds on the machine's monotonic clock,
which all processes of a machine share.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

MAX_FRAME = 1 << 30


class Frame(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


# ---- parent -> client process ---------------------------------------------------------------------------------------


class Setup(Frame, frozen=True):
    """Where to, and how.

    Attributes:
        addresses: (host, port) to connect to, names already resolved.
        server_name: for TLS; empty without it.
        head: the HTTP request up to and with ``Content-Length: ``.
        slots: chains under way at once in a closed loop; 0 for an open loop.
        timeout_s: after sending, until the last byte.
        stop_after_s: of a closed loop: from then on, since the start, no new chain begins; 0 for never.
        has_ticks: whether somebody watches.
    """

    host: str
    port: int
    server_name: str
    is_tls_checked: bool
    head: bytes
    slots: int
    timeout_s: float
    stop_after_s: float
    has_ticks: bool = False


class Ask(Frame, frozen=True):
    """One request to send.

    Attributes:
        at: seconds after the start; of later turns and in a closed loop it is not looked at.
        session: requests of one session run one after another; -1 for none.
        think_s: pause between the end of the session's turn before and this one.
        turns_left: how many turns of the session come after this one.
        headers: more of them, each with its line end: those that are not the same for all requests.
    """

    index: int
    at: float
    session: int
    think_s: float
    turns_left: int
    headers: bytes
    body: bytes


class Go(Frame, frozen=True):
    """The clock starts at this instant."""

    start_at: float


class EndOfAsks(Frame, frozen=True):
    """No more asks will come."""


class Halt(Frame, frozen=True):
    """Give up what is under way and say ``Finished``."""


# ---- client process -> parent ---------------------------------------------------------------------------------------


class Ready(Frame, frozen=True):
    """Set up."""


class Done(Frame, frozen=True):
    """One request has ended; everything about it as received, unparsed.

    Attributes:
        intended_at, released_at, sent_at, ended_at: when it should have gone out, when the client turned to it, when
            it was written to a connection (0 if never), when it ended.
        stamps: float64 instants, one for each piece of ``sizes``.
        sizes: bytes of each piece of ``raw``, as they came from the connection, as uint32.
        error: why it failed, by kind; empty if the response came to its end.
        is_retry: a kept-alive connection turned out to be closed, and a fresh one was used.
    """

    index: int
    intended_at: float
    released_at: float
    sent_at: float
    ended_at: float
    stamps: bytes
    sizes: bytes
    raw: bytes
    error: str
    is_retry: bool


class Dones(Frame, frozen=True):
    """Requests that have ended: many in one frame, since every frame wakes the parent up."""

    ended: list[Done]


class Tick(Frame, frozen=True):
    """The state of a client process, a few times a second, if somebody watches.

    Attributes:
        num_pieces: received so far, those of answers under way included.
        first_s: from intended instant to first byte of output, of answers that ended since the tick before.
        gaps_s: the last gap of each answer under way.
    """

    at: float
    num_in_flight: int
    num_done: int
    num_failed: int
    num_pieces: int
    num_waiting: int
    first_s: list[float]
    gaps_s: list[float]


class Finished(Frame, frozen=True):
    """All asks have ended.

    Attributes:
        cpu_s: CPU seconds of the process since the start.
        wall_s: since the start.
        lags: seconds by which the loop was late, sampled.
        num_connections: opened in all.
    """

    cpu_s: float
    wall_s: float
    lags: list[float]
    num_connections: int
    num_unsent: int


_encoder = msgspec.msgpack.Encoder()
to_client = msgspec.msgpack.Decoder(Setup | Ask | Go | EndOfAsks | Halt)
to_parent = msgspec.msgpack.Decoder(Ready | Dones | Tick | Finished)


def encode(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "little") + body


class FrameReader(asyncio.Protocol):
    """The reading end of a pipe.

    Args:
        decoder: ``to_client`` or ``to_parent``.
        on_frame: called with each frame.
        on_end: called once when the other end has closed.
    """

    def __init__(
        self, decoder: "msgspec.msgpack.Decoder[Any]", on_frame: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._decode = decoder.decode
        self._on_frame = on_frame
        self._on_end = on_end
        self._buffer = bytearray()
        self.transport: asyncio.ReadTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.ReadTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            end = at + 4 + int.from_bytes(buffer[at : at + 4], "little")
            assert end - at <= MAX_FRAME
            if len(buffer) < end:
                break
            self._on_frame(self._decode(bytes(buffer[at + 4 : end])))
            at = end
        if at:
            del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


class FrameWriter(asyncio.BaseProtocol):
    """The writing end of a pipe; ``await drain()`` and ``await room()`` wait while the other end is behind.

    Frames of one round of the loop leave together: each write wakes the other end up.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: list[bytes] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def pause_writing(self) -> None:
        self._flowing.clear()

    def resume_writing(self) -> None:
        self._flowing.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._flowing.set()

    def send(self, frame: Frame) -> None:
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(encode(frame))

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and not self.transport.is_closing():
            self.transport.write(b"".join(frames))

    async def drain(self) -> None:
        self._flush()
        await self._flowing.wait()

    async def room(self) -> None:
        """As ``drain``, but what has been sent in this round still leaves together."""
        if not self._flowing.is_set():
            await self._flowing.wait()

    def close(self) -> None:
        """No more will be sent; what has been goes out first."""
        self._flush()
        self.transport.close()
