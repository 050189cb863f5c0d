"""Messages between the parent and its client processes, over pipes.

Each is four bytes of length and a tagged MessagePack struct. Instants are seconds on the monotonic clock, which all
processes of a machine share.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

MAX_MESSAGE = 1 << 30


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


# ---- parent -> client process ---------------------------------------------------------------------------------------


class Setup(Message, frozen=True):
    """Configures a client process.

    Attributes:
        host: resolved address to connect to.
        server_name: name for TLS; empty without TLS.
        head: head of every HTTP request, up to and including ``Content-Length: ``.
        slots: sessions in flight at once in a closed loop; 0 for an open loop.
        timeout_s: limit from sending a request to its last byte.
        stop_after_s: closed loop: seconds after the start at which no new session begins; 0 for no limit.
    """

    host: str
    port: int
    server_name: str
    is_tls_checked: bool
    head: bytes
    slots: int
    timeout_s: float
    stop_after_s: float
    reports_progress: bool = False


class SendRequest(Message, frozen=True):
    """Schedules one request.

    Attributes:
        at: seconds after the start; ignored for later turns and in a closed loop.
        session: number of a session of several turns, which are sent one after another; -1 for a single request.
        think_s: pause after the session's previous turn; -1 for a first turn.
        turns_left: turns of the session after this one.
        headers: the request's own headers, each with its line end.
    """

    index: int
    at: float
    session: int
    think_s: float
    turns_left: int
    headers: bytes
    body: bytes


class StartClock(Message, frozen=True):
    """Starts the schedule at this instant."""

    start_at: float


class EndOfRequests(Message, frozen=True):
    """Says that no more requests will come."""


class Stop(Message, frozen=True):
    """Ends all requests in flight; ``ClientFinished`` follows."""


# ---- client process -> parent ---------------------------------------------------------------------------------------


class ClientReady(Message, frozen=True):
    """Says that the client process is configured."""


class RequestDone(Message, frozen=True):
    """One finished request with its response as received, not parsed.

    Attributes:
        intended_at: when the request should have gone out.
        released_at: when the client turned to it.
        sent_at: when it was written to a connection; 0 if never.
        stamps: float64 instants at which the pieces of ``raw`` arrived.
        sizes: uint32 lengths of these pieces in bytes.
        error: kind of failure; empty if the response is complete.
        is_retry: whether it was sent again because a kept-alive connection had been closed.
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


class RequestsDone(Message, frozen=True):
    """Finished requests, many at a time, since every message wakes the parent."""

    ended: list[RequestDone]


class Progress(Message, frozen=True):
    """State of a client process for the live view.

    Attributes:
        at: seconds after the start.
        num_pieces: pieces received so far, including those of responses in flight.
        first_s: seconds from intended instant to first output, of responses that ended since the previous message.
        gaps_s: latest gap between pieces of each response in flight.
    """

    at: float
    num_in_flight: int
    num_done: int
    num_failed: int
    num_pieces: int
    first_s: list[float]
    gaps_s: list[float]


class ClientFinished(Message, frozen=True):
    """Final figures of a client process, after its last request.

    Attributes:
        cpu_s, wall_s: CPU and elapsed seconds since the start.
        lags: sampled seconds by which the event loop was late.
    """

    cpu_s: float
    wall_s: float
    lags: list[float]
    num_connections: int


_encoder = msgspec.msgpack.Encoder()
client_decoder = msgspec.msgpack.Decoder(Setup | SendRequest | StartClock | EndOfRequests | Stop)
parent_decoder = msgspec.msgpack.Decoder(ClientReady | RequestsDone | Progress | ClientFinished)


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class MessageReader(asyncio.Protocol):
    """Reading end of a pipe.

    Args:
        on_end: called once, when the other end has closed.
    """

    def __init__(
        self, decoder: "msgspec.msgpack.Decoder[Any]", on_message: Callable[[Any], None], on_end: Callable[[], None]
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
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
            assert end - at <= MAX_MESSAGE
            if len(buffer) < end:
                break
            self._on_message(self._decode(bytes(buffer[at + 4 : end])))
            at = end
        if at:
            del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


class MessageWriter(asyncio.BaseProtocol):
    """Writing end of a pipe.

    Messages of one iteration of the event loop leave together, since each write wakes the other end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queued: list[bytes] = []
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

    def send(self, message: Message) -> None:
        if not self._queued:
            self._loop.call_soon(self._flush)
        self._queued.append(encode(message))

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        if queued and not self.transport.is_closing():
            self.transport.write(b"".join(queued))

    async def drain(self) -> None:
        """Write now, and wait while the reader is behind."""
        self._flush()
        await self.room()

    async def room(self) -> None:
        """Wait while the reader is behind."""
        await self._flowing.wait()

    def close(self) -> None:
        """Write what is left and close the pipe."""
        self._flush()
        self.transport.close()
