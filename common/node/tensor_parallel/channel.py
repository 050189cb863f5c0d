"""Messages between rank 0 and another rank, over a socket pair that the other rank inherits at its start.

The module does not import torch, which is loaded only after a node's configuration has been accepted.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from common.cache.page_layout import PageLayout
from common.cache.window_pages import LayerGroups
from common.config.shared import LogFormat, LogLevel, ModelImplementation, WeightDtype

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from common.engine.batch import RowArrays

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 1


class LoadModel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to another: load your part of the model.

    Attributes:
        name: of the rank, in its log.
        folder: with the checkpoint.
        digest: of the model at rank 0.
        implementation: what computes the model at rank 0.
        overrides, trust_remote_code: as for ``ModelSource``.
        attention: resolved name of the backend.
    """

    rank: int
    num_ranks: int
    name: str
    folder: str
    digest: str
    device: str
    dtype: str
    weight_dtype: WeightDtype
    attention: str
    num_threads: int
    log_level: LogLevel
    log_format: LogFormat
    has_dummy_weights: bool
    implementation: ModelImplementation
    overrides: dict[str, Any]
    trust_remote_code: bool


class Prepared(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answers ``LoadModel``, and ``Join`` once the pool is made. ``problem``: why it has failed; empty otherwise."""

    problem: str = ""


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to another: make the pool, and form the group. With the descriptor of the file of the group's store.

    Attributes:
        layout: of this rank's pages, with all layers.
        num_pages, groups, num_window_pages: as for ``common.engine.kv_pool.KVPool``.
    """

    layout: PageLayout
    num_pages: int
    timeout_s: float
    groups: LayerGroups | None = None
    num_window_pages: int = 0


class Transfer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to another: serve an end of its transports over the socket that comes with this."""


class ReadAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to another: read a LoRA adapter; ``OtherRanks.read_adapter`` has the fields."""

    number: int
    digest: str
    folder: str
    max_rank: int
    root: str | None


class AdapterRead(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answers ``ReadAdapter``. ``problem``: why it has failed; empty if it has not."""

    number: int
    problem: str = ""


class Step(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Rank 0 to another: compute a step. The arrays of ``RowArrays`` as bytes, and the tokens that are kept.

    Attributes:
        adapters: as for ``OtherRanks.begin``.
        dropped: numbers of adapters to forget, which neither this step nor a later one has.
    """

    starts: bytes
    num_new: bytes
    page_table: bytes
    kept: bytes
    page_size: int
    adapters: list[int]
    dropped: list[int]
    window_table: bytes | None = None

    @classmethod
    def of(
        cls, rows: "RowArrays", kept: "NDArray[np.int64]", adapters: Sequence[int] = (), dropped: Sequence[int] = ()
    ) -> "Step":
        starts, num_new, page_table = rows.starts.tobytes(), rows.num_new.tobytes(), rows.page_table.tobytes()
        windows = None if rows.window_table is None else rows.window_table.tobytes()
        return cls(starts, num_new, page_table, kept.tobytes(), rows.page_size, list(adapters), list(dropped), windows)

    def arrays(self) -> "tuple[RowArrays, NDArray[np.int64]]":
        """The rows, and the indices of the tokens that are kept."""
        import numpy as np

        from common.engine.batch import RowArrays

        starts, num_new, kept = (
            np.frombuffer(part, np.int64).copy() for part in (self.starts, self.num_new, self.kept)
        )
        page_table, windows = (
            None if table is None else np.frombuffer(table, np.int32).copy().reshape(len(starts), -1)
            for table in (self.page_table, self.window_table)
        )
        assert page_table is not None
        return RowArrays(starts, num_new, page_table, self.page_size, windows), kept


RankMessage = LoadModel | Prepared | Join | Transfer | ReadAdapter | AdapterRead | Step


class RankChannel:
    """One end of a socket pair. Both ends are processes of one node, so that what comes is as we wrote it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # steps and transfers are ordered by different threads
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankMessage)

    def limit(self, timeout_s: float) -> None:
        """Let a send or a receipt that takes longer than this fail with a ``TimeoutError``."""
        self._connection.settimeout(timeout_s)

    def send(self, message: RankMessage, descriptors: Sequence[int] = ()) -> None:
        with self._sending:
            frame = self._encoder.encode(message)
            socket.send_fds(self._connection, [_LENGTH.pack(len(frame))], descriptors)
            self._connection.sendall(frame)

    def receive(self) -> tuple[RankMessage, list[int]]:
        """The next message, and the descriptors that came with it.

        Raises:
            EOFError: the other end is closed.
        """
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        header, descriptors, _, _ = socket.recv_fds(self._connection, _LENGTH.size, _MAX_FDS, flags)
        if len(header) < _LENGTH.size:
            raise EOFError
        frame = bytearray(_LENGTH.unpack(header)[0])
        at = 0
        with memoryview(frame) as left:
            while at < len(frame):
                if not (count := self._connection.recv_into(left[at:])):
                    raise EOFError
                at += count
        return self._decoder.decode(frame), descriptors

    def shut(self) -> None:
        """End the connection for both ends; the other one receives ``EOFError``. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def path_of(descriptor: int) -> str:
    """A path at which this process can open the file of a descriptor of its own."""
    assert os.fstat(descriptor)
    return f"/proc/self/fd/{descriptor}"
