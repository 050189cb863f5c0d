"""The prefill node's side of shared memory: ask for a peer's pool, map it, and copy pages into it.

``LocalWriter`` asks for the pool; what it gets and how it opens that differs between the transports of one host.
"""

import array
import contextlib
import mmap
import os
import select
import socket
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from common.wire.messages import Connect
from kv_transfer.page_slices import SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, AttachError, WriterTransport, node_of
from kv_transfer.transports.shm.copy_thread import CopyThread, MappedPool, PeerPool
from kv_transfer.transports.shm.protocol import (
    DETACHED,
    ENDPOINT,
    HELLO,
    MAGIC,
    MAX_POOL_INFO_BYTES,
    peer_credentials,
)


@dataclass(slots=True, eq=False)
class _Attaching:
    """A pool that has been asked for. ``connection`` is None while the reader's backlog is full."""

    connect: Connect
    name: str
    token: bytes
    connection: socket.socket | None = None


@dataclass(slots=True, eq=False)
class _Attachment:
    connection: socket.socket
    epoch: int
    who: str
    pool: PeerPool
    is_broken: bool = False


class LocalWriter(WriterTransport):
    """``WriterTransport`` to pools of the same host. A thread copies the pages; see ``CopyThread``.

    Attributes:
        place: what the pools are in, for error messages.
    """

    place: str

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._epoll = select.epoll()
        self._attaching: dict[str, _Attaching] = {}
        self._attachments: dict[str, _Attachment] = {}
        self._stuck: dict[str, None] = {}  # detached peers to which copies may be under way for good
        self._num_tickets = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        try:
            self._copy_thread = CopyThread(self.name, store.num_pages, self._wake)
        except OSError:
            os.close(self._wake)
            raise

    @abstractmethod
    def _open(self, connect: Connect, pool_info: bytes, descriptors: Sequence[int]) -> PeerPool:
        """The pool that the reader has handed over with its first frame: ``pool_info`` follows ``HELLO`` in it.

        Raises:
            AttachError: it cannot be written to.
        """

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._attaching and peer not in self._attachments, "detach first"
        endpoint = ENDPOINT.fullmatch(connect.endpoint)
        if endpoint is None:
            raise AttachError(f"the endpoint offered by {connect.name} is not one of {self.place}")
        attaching = _Attaching(connect, endpoint[1], bytes.fromhex(endpoint[2]))
        self._dial(attaching)
        self._attaching[peer] = attaching

    def _dial(self, attaching: _Attaching) -> None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as error:  # this process has no descriptor left
            raise AttachError(f"this prefill node cannot open a socket ({error.strerror})") from error
        try:
            connection.connect(f"\0{attaching.name}")
            if peer_credentials(connection)[1] != os.geteuid():
                raise AttachError(f"{attaching.connect.name} runs as another user than this prefill node")
            connection.send(attaching.token)
        except BlockingIOError:  # its backlog is full: dial again at the next poll
            connection.close()
        except OSError as error:
            connection.close()
            raise AttachError(
                f"{attaching.connect.name} is not on the host of this prefill node: its socket cannot be reached"
                f" ({error.strerror})"
            ) from error
        except AttachError:
            connection.close()
            raise
        else:
            attaching.connection = connection
            self._epoll.register(connection, select.EPOLLIN)

    def poll(self) -> list[Attached]:
        news = self._broken()
        for peer, attaching in list(self._attaching.items()):
            try:
                if attaching.connection is None:
                    self._dial(attaching)
                is_over = attaching.connection is not None and self._receive(peer, attaching, attaching.connection)
                problem = ""
            except AttachError as error:
                is_over, problem = True, str(error)
                self.detach(peer)
            if is_over:
                news.append(Attached(peer, attaching.connect.epoch, problem))
        return news

    def _broken(self) -> list[Attached]:
        """Attachments that worked until a copy failed."""
        news = []
        for peer, attachment in self._attachments.items():
            if attachment.pool.problem and not attachment.is_broken:
                attachment.is_broken = True
                problem = f"writing into the {self.place} of {attachment.who} failed: {attachment.pool.problem}"
                news.append(Attached(peer, attachment.epoch, problem))
        return news

    def _receive(self, peer: str, attaching: _Attaching, connection: socket.socket) -> bool:
        """Receive what the reader hands over and open the pool; False if it is not there yet.

        Raises:
            AttachError: the reader refuses, or sent something else.
        """
        connect, who = attaching.connect, attaching.connect.name
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        size = HELLO.size + MAX_POOL_INFO_BYTES + 1
        try:
            frame, ancillary, flags, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise AttachError(f"{who} broke off the connection over its socket ({error.strerror})") from error
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        try:
            if not frame:
                raise AttachError(f"{who} would not hand over its pool: another token, user or process namespace")
            num_bytes = connect.layout.layout().pool_bytes(connect.num_pages)
            senders = [sender.ljust(32, b"\0") for sender in (node_of(peer).encode(), b"")]
            expected = [(MAGIC, connect.epoch, num_bytes, sender) for sender in senders]
            if len(frame) < HELLO.size or HELLO.unpack_from(frame) not in expected:
                raise AttachError(f"the offer of {who} and what it sent over its socket differ")
            if flags & socket.MSG_CTRUNC:
                raise AttachError(f"{who} did not hand over its pool as one file")
            pool = self._open(connect, frame[HELLO.size :], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._epoll.unregister(connection)
        del self._attaching[peer]
        self._attachments[peer] = _Attachment(connection, connect.epoch, who, pool)
        return True

    def prepare(self, peer: str, pages: Sequence[int]) -> None:
        self._copy_thread.prepare(self._attachments[peer].pool, pages)

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        self._num_tickets += 1
        self._copy_thread.begin(self._attachments[peer].pool, self._num_tickets, pages, slices)
        return self._num_tickets

    def done(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return self._copy_thread.done()

    def detach(self, peer: str) -> bool:
        attaching = self._attaching.pop(peer, None)
        attachment = self._attachments.pop(peer, None)
        connection = attaching.connection if attaching is not None else None
        if connection is not None:
            self._epoll.unregister(connection)
        is_fenced = peer not in self._stuck
        if attachment is not None:
            is_fenced = attachment.pool.shut()
            connection = attachment.connection
        if not is_fenced:  # the reader waits for the death of this process
            self._stuck[peer] = None
        if connection is not None:
            if is_fenced:
                with contextlib.suppress(OSError):  # the reader may be gone
                    connection.send(DETACHED)
            connection.close()
        return is_fenced

    def counters(self) -> dict[str, float]:
        return {f"bytes_by_{self.name}": float(self._copy_thread.num_bytes)}

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        if self._epoll.closed:
            return
        for peer in [*self._attaching, *self._attachments]:
            self.detach(peer)
        self._copy_thread.close()
        self._epoll.close()
        os.close(self._wake)


class ShmWriter(LocalWriter):
    """``WriterTransport`` of a prefill node over shared memory."""

    name = "shm"
    place = "shared memory"

    def _open(self, connect: Connect, pool_info: bytes, descriptors: Sequence[int]) -> MappedPool:
        who, layout = connect.name, connect.layout.layout()
        if len(descriptors) != 1 or pool_info:
            raise AttachError(f"{who} did not hand over its pool as one file")
        num_bytes = layout.pool_bytes(connect.num_pages)
        size = os.fstat(descriptors[0]).st_size
        if size != num_bytes:
            raise AttachError(f"the pool of {who} is {size} bytes long, its pages have {num_bytes}")
        try:
            memory = mmap.mmap(descriptors[0], num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise AttachError(f"the pool of {who} cannot be mapped: {error}") from error
        memory.madvise(mmap.MADV_DONTFORK)  # a child process could outlive us and write behind the fence
        return MappedPool(self.store, memory, layout.page_bytes)
