"""Calls from rank 0 to the transports of another rank, and what these have to report, over a socket pair.

Both ends are processes of one node and of one program, so that what comes is as we wrote it. Rank 0 has one connection
for the reader of a rank and another one for its writer.
"""

import contextlib
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from common.wire.messages import Connect
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.transports.base import Attached, Fenced
from kv_transfer.transports.factory import TransportSettings

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rank 0 to another: call this method. Every call gets an ``Answer``, except posts."""

    method: str
    arguments: msgspec.Raw
    is_post: bool = False


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of a call, which is plain data."""

    result: Any


class Refusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answers ``open`` if the transport is not available in the process of this rank."""

    problem: str


class News(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank to rank 0, at any time: what its transports report."""

    attached: list[Attached] = []
    done: list[int] = []
    fenced: list[Fenced] = []


Frame = Call | Answer | Refusal | News

#: Arguments of every method that rank 0 may call. ``write`` names the ticket first.
ARGUMENTS: dict[str, Any] = {
    "open_reader": tuple[TransportSettings],
    "open_writer": tuple[TransportSettings],
    "close": tuple[()],
    "counters": tuple[()],
    "attach": tuple[str, Connect],
    "prepare": tuple[str, list[int]],
    "write": tuple[int, str, list[tuple[int, int]], SlicePair | None],
    "detach": tuple[str],
    "source_checksums": tuple[list[int], SlicePair | None],
    "offer": tuple[str, int],
    "withdraw": tuple[str],
    "forget": tuple[str],
    "chosen": tuple[str, int, str],
    "allow": tuple[str, int, list[int], PageSlice | None],
    "forbid": tuple[list[int]],
    "reclaim": tuple[str, int],
    "landed": tuple[str, list[int]],
    "target_checksums": tuple[str, list[int], PageSlice],
}
_DECODERS = {method: msgspec.msgpack.Decoder(types) for method, types in ARGUMENTS.items()}
_ENCODER = msgspec.msgpack.Encoder()
_FRAMES = msgspec.msgpack.Decoder(Frame)


def call_of(method: str, *arguments: Any, is_post: bool = False) -> Call:
    return Call(method, msgspec.Raw(_ENCODER.encode(arguments)), is_post)


def arguments_of(call: Call) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _DECODERS[call.method].decode(call.arguments)
    return found


class FrameStream:
    """Frames over a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._inbox = bytearray()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def send(self, frame: Frame) -> None:
        """Raises OSError: the other process is gone, or takes nothing."""
        data = _ENCODER.encode(frame)
        self.connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, *, waits: bool) -> list[Frame]:
        """All frames that are there; ``waits``: for one at least.

        Raises:
            EOFError: the other process has closed the connection.
            OSError: nothing came within the socket's timeout.
        """
        while True:
            frames = list(self._frames())
            if frames or not (waits or self._readable.poll(0)):
                return frames
            if not (data := self.connection.recv(_RECEIVE_BYTES)):
                raise EOFError
            self._inbox += data

    def _frames(self) -> Iterator[Frame]:
        while len(self._inbox) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._inbox)[0]
            if len(self._inbox) < end:
                return
            frame = bytes(self._inbox[_LENGTH.size : end])
            del self._inbox[:end]
            yield _FRAMES.decode(frame)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
