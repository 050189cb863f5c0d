"""The file format of a recording: every event of a role, every result of its transport, and every plan.

A recording is a sequence of MessagePack frames, each behind its length (4 bytes, little endian), in the order of the
events. The first frame is a ``RecordingHeader``. Reading refuses unknown fields, wrong types and oversized frames.
A node that was killed leaves a truncated frame at the end, which ends the reading and is not an error.
"""

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from common.errors import BatonError, ErrorCode
from common.node.loading.memory_plan import Capacity
from common.step_plan import StepPlan, StepResult
from common.wire.messages import FromDecode, FromGateway, FromPrefill, LayoutMessage

VERSION = 5
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class RecordingError(BatonError):
    """A file is not a recording, or is damaged; the message says where."""


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of all frames. ``now`` is in seconds of the node's clock."""


class RecordingHeader(Frame, frozen=True, tag="opening"):
    """Everything that the role was built from, without secrets."""

    version: int
    role: str
    config: dict[str, Any]
    environ: dict[str, str]  # BATON_* variables that are read beside the configuration
    capacity: Capacity
    layout: LayoutMessage
    digest: str
    incarnation: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    transport: str
    transports: tuple[str, ...]


class GatewayMessage(Frame, frozen=True, tag="gateway"):
    now: float
    message: FromGateway


class PeerMessage(Frame, frozen=True, tag="peer"):
    now: float
    peer: str
    message: FromDecode | FromPrefill


class PeerLost(Frame, frozen=True, tag="peer lost"):
    now: float
    peer: str


class GrammarCompiled(Frame, frozen=True, tag="grammar compiled"):
    now: float
    grammar: str


class GrammarFailed(Frame, frozen=True, tag="grammar failed"):
    now: float
    grammar: str
    message: str


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
    code: ErrorCode


class TransportResult(Frame, frozen=True, tag="news"):
    """The result of call number ``call`` (from 0) of a method of an end of the transport, unless it was the default
    result."""

    end: Literal["reader", "writer"]
    method: str
    call: int
    result: msgspec.Raw


AnyFrame = (
    RecordingHeader
    | GatewayMessage
    | PeerMessage
    | PeerLost
    | GrammarCompiled
    | GrammarFailed
    | Planned
    | Committed
    | Ticked
    | Stopped
    | TransportResult
)

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def write_frame(file: IO[bytes], frame: Frame) -> None:
    """Append one frame. Raises OSError if the disk is full."""
    content = encode(frame)
    if len(content) > MAX_FRAME_BYTES:
        raise RecordingError(f"a frame of {len(content)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    file.write(_LENGTH.pack(len(content)) + content)


def read_frames(path: str) -> Iterator[AnyFrame]:
    """The frames of a recording, in order; the first is a ``RecordingHeader`` of our version.

    Raises:
        RecordingError: the file cannot be read; says at which frame.
    """
    try:
        with Path(path).open("rb") as file:
            number = 0
            while (frame := _read_frame(file, path, number)) is not None:
                if number == 0 and not isinstance(frame, RecordingHeader):
                    raise RecordingError(f"{path} is not a recording: it does not begin with a header")
                yield frame
                number += 1
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    if number == 0:
        raise RecordingError(f"{path} is empty")


def _read_frame(file: IO[bytes], path: str, number: int) -> AnyFrame | None:
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise RecordingError(
            f"{path}, frame {number}: {size} bytes exceed the limit of a frame; this is not a recording"
        )
    content = file.read(size)
    if len(content) < size:
        return None
    try:
        frame = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordingError(f"{path}, frame {number}: {error}") from error
    if isinstance(frame, RecordingHeader) and frame.version != VERSION:
        raise RecordingError(f"{path} has version {frame.version}; this program reads version {VERSION}")
    return frame


def open_new(path: str) -> tuple[IO[bytes], str]:
    """Create a file that only this user may read, since it holds prompts; return it and its name.

    The name is ``path``, or ``path.1`` and so on if that exists.

    Raises:
        OSError: the file cannot be created, or there is a folder of that name.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    number = 0
    while True:
        name = f"{path}.{number}" if number else path
        try:
            return os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"), name
        except FileExistsError:
            number += 1
