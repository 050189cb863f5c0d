"""A recording of a node as a file: what its pure core was told, what its transport told it, and what it planned.

Frames of MessagePack, each behind its length (4 bytes, little endian), in the order in which things happened; the first
is ``Opening``. Read strictly: unknown fields, wrong types, oversized frames are refused. A node that was killed leaves
a frame cut short at the end, which ends the reading and is no error.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from common.errors import BatonError
from common.node.memory_plan import Capacity
from common.step_plan import StepPlan, StepResult
from common.wire.messages import FromDecode, FromGateway, FromPrefill, Geometry

VERSION = 1
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class RecordingError(BatonError):
    """A file is no recording, or is damaged; the message says where."""


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of all frames. ``now``: seconds of the node's clock."""


class Opening(Frame, frozen=True, tag="opening"):
    """Everything that the role was built from. Secrets are left out."""

    version: int
    role: str
    config: dict[str, Any]
    environ: dict[str, str]  # BATON_* variables that are read beside the configuration
    capacity: Capacity
    geometry: Geometry
    digest: str
    incarnation: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    transport: str
    transports: tuple[str, ...]


class FromTheGateway(Frame, frozen=True, tag="gateway"):
    now: float
    message: FromGateway


class FromAPeer(Frame, frozen=True, tag="peer"):
    now: float
    peer: str
    message: FromDecode | FromPrefill


class PeerLost(Frame, frozen=True, tag="peer lost"):
    now: float
    peer: str


class GatewayLost(Frame, frozen=True, tag="gateway lost"):
    now: float


class Planned(Frame, frozen=True, tag="plan"):
    now: float
    plan: StepPlan | None


class Committed(Frame, frozen=True, tag="commit"):
    now: float
    result: StepResult


class Ticked(Frame, frozen=True, tag="tick"):
    now: float


class Stopped(Frame, frozen=True, tag="stop"):
    now: float
    message: str


class News(Frame, frozen=True, tag="news"):
    """What a call of the transport returned, if that was not the usual: the ``call``-th of this method, from 0."""

    method: str
    call: int
    result: msgspec.Raw


Happened = Opening | FromTheGateway | FromAPeer | PeerLost | GatewayLost | Planned | Committed | Ticked | Stopped | News

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Happened] = msgspec.msgpack.Decoder(Happened)


def write_frame(file: IO[bytes], frame: Frame) -> None:
    """Append one frame. Raises OSError: the disk is full."""
    content = encode(frame)
    if len(content) > MAX_FRAME_BYTES:
        raise RecordingError(f"a frame of {len(content)} bytes is too large to be recorded")
    file.write(_LENGTH.pack(len(content)) + content)


def read_frames(path: str) -> Iterator[Happened]:
    """The frames of a recording, in order; the first is an ``Opening`` of our version.

    Raises:
        RecordingError: it cannot be read; says which frame.
    """
    try:
        with Path(path).open("rb") as file:
            number = 0
            while (frame := _read_frame(file, path, number)) is not None:
                if number == 0 and not isinstance(frame, Opening):
                    raise RecordingError(f"{path} does not begin as a recording does")
                yield frame
                number += 1
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    if number == 0:
        raise RecordingError(f"{path} holds nothing")


def _read_frame(file: IO[bytes], path: str, number: int) -> Happened | None:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise RecordingError(f"{path}, frame {number}: {size} bytes are more than a frame has; this is no recording")
    content = file.read(size)
    if len(content) < size:
        return None
    try:
        frame = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordingError(f"{path}, frame {number}: {error}") from error
    if isinstance(frame, Opening) and frame.version != VERSION:
        raise RecordingError(f"{path} is of version {frame.version}, this program reads {VERSION}")
    return frame


def open_new(path: str) -> tuple[IO[bytes], str]:
    """A file that nobody else may read, since prompts are in it, and its name: ``path``, or ``path.1`` if it is taken.

    Raises:
        OSError: it cannot be made.
    """
    number = 0
    while True:
        name = f"{path}.{number}" if number else path
        try:
            return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"), name
        except FileExistsError:
            number += 1
