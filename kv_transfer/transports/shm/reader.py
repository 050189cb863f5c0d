"""The decode node's side of shared memory: hand the pool to permitted processes, and watch them until they cannot
write.
"""

import fcntl
import logging
import os
import secrets
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Fenced, ReaderTransport
from kv_transfer.transports.pending_connections import PendingConnection, PendingConnections
from kv_transfer.transports.shm.protocol import DETACHED, HELLO, MAGIC, TOKEN_BYTES, peer_credentials

log = logging.getLogger(__name__)

_SO_PEERPIDFD = 77  # Linux 6.5: a pidfd of the process that connected, even if its number is used again


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of the process at the other end.

    Raises:
        OSError: the process cannot be watched.
    """
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = os.pidfd_open(peer_credentials(connection)[0])
    try:
        # If the process has died, its number may belong to another one by now; but then its end is closed.
        if connection.recv(1, socket.MSG_PEEK) == b"":
            raise ConnectionResetError("the peer has gone")
    except BlockingIOError:
        pass
    except OSError:
        os.close(pidfd)
        raise
    return pidfd


def is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _reason_to_reject(connection: socket.socket) -> str:
    """Why the process at the other end is rejected unheard; empty if it runs as our own user."""
    pid, uid = peer_credentials(connection)
    return "user" if uid != os.geteuid() or pid <= 0 else ""


@dataclass(slots=True, eq=False)
class _Writer:
    """A process that may have our pool mapped.

    Attributes:
        connection: None once the process has closed its end.
        is_chosen: it has reported that it has attached.
    """

    peer: str
    epoch: int
    connection: socket.socket | None
    pidfd: int
    is_chosen: bool = False


class ShmReader(ReaderTransport):
    """``ReaderTransport`` of a decode node. A process that has the pool mapped needs no permission to write it.

    Args:
        store: the pool; its memfd is sealed here against changes of size, where the system allows that.
        incarnation: of this process; the writer compares it with the peer that it expects, unless it is empty.
        is_shared: False: watch writers of this host that reach the pool by other means; the memfd is not handed over.

    Raises:
        ConfigError: this kernel has no pidfds, or the pool's file does not have the size of the pool.
    """

    name = "shm"

    def __init__(self, store: PageStore, incarnation: str = "", *, is_shared: bool = True) -> None:
        self.store = store
        self._is_shared = is_shared
        self._incarnation = incarnation.encode()
        self._num_bytes = store.layout.pool_bytes(store.num_pages)
        assert len(self._incarnation) <= 32
        self._check_host()
        self._name = f"baton-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(f"\0{self._name}")
        listener.listen(1_024)
        self._epoll = select.epoll()
        self._pending = PendingConnections(
            listener, self._epoll, "the pool's socket", make=PendingConnection, screen=_reason_to_reject
        )
        self._offers: dict[bytes, tuple[str, int]] = {}  # token -> peer, epoch
        self._writers: dict[int, _Writer] = {}  # by descriptor, of the connection and of the process
        self._news: list[Fenced] = []

    def _check_host(self) -> None:
        size = os.fstat(self.store.fd).st_size
        if size != self._num_bytes:
            raise ConfigError(f"the file of the KV pool has {size} bytes, its pages need {self._num_bytes}")
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            raise ConfigError(
                f"--transport {self.name} needs pidfd_open, which this system refuses ({error}); use --transport tcp"
            ) from error
        try:
            fcntl.fcntl(self.store.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            log.debug("the pool's file cannot be sealed: %s", error)

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = (peer, epoch)
        return f"{self._name}:{token.hex()}"

    def withdraw(self, peer: str) -> None:
        self._offers = {token: offer for token, offer in self._offers.items() if offer[0] != peer}

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        for writer in self._writers.values():
            writer.is_chosen |= (peer, epoch, transport) == (writer.peer, writer.epoch, self.name)
        return super().chosen(peer, epoch, transport)

    def watched(self) -> set[tuple[str, int]]:
        """(peer, epoch) of processes that may reach the pool by themselves. Thread-safe."""
        return {(writer.peer, writer.epoch) for writer in list(self._writers.values())}

    def poll(self, now: float) -> list[Fenced]:
        for descriptor, _ in self._epoll.poll(0):
            if self._pending.is_listener(descriptor):
                self._pending.accept(now, self._greet)
            elif pending := self._pending.get(descriptor):
                self._greet(pending)
            elif descriptor in self._writers:
                self._hear(descriptor, self._writers[descriptor])
        self._pending.expire(now)
        news, self._news = self._news, []
        return news

    def _greet(self, pending: PendingConnection) -> None:
        """Read the token of a connection, and send the pool's descriptor if the token is an offer's."""
        connection = pending.connection
        try:
            token = connection.recv(TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            token = b""
        offer = self._offers.pop(token, None)
        if offer is None:
            self._pending.reject(pending, "token")
            return
        peer, epoch = offer
        try:
            pidfd = peer_pidfd(connection)
        except OSError as error:
            log.warning("a prefill node on this host cannot be watched, so it gets no pool: %s", error)
            self._pending.reject(pending, "pidfd")
            return
        self._pending.promote(pending)
        # It counts as a writer before it has the descriptor and until it is fenced, whatever happens to the connection.
        writer = _Writer(peer, epoch, connection, pidfd)
        self._writers[connection.fileno()] = self._writers[pidfd] = writer
        for descriptor in (connection.fileno(), pidfd):
            self._epoll.register(descriptor, select.EPOLLIN)
        hello = HELLO.pack(MAGIC, epoch, self._num_bytes, self._incarnation) + self._pool_info()
        try:
            socket.send_fds(connection, [hello], [self.store.fd] if self._is_shared else [])
        except OSError:
            self._fence(writer, "the prefill node left before it had the pool")

    def _pool_info(self) -> bytes:
        """What a writer is given beside the descriptor, or instead of it: at most ``MAX_POOL_INFO_BYTES``."""
        return b""

    def _hear(self, descriptor: int, writer: _Writer) -> None:
        if descriptor == writer.pidfd:
            # Check again: the event may be of an earlier process whose descriptor had this number a moment ago.
            if is_dead(writer.pidfd):
                self._fence(writer, "the prefill node's process has died", is_dead=True)
            return
        assert writer.connection is not None
        try:
            word = writer.connection.recv(len(DETACHED) + 1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == DETACHED:
            self._fence(writer, "the prefill node has unmapped the pool")
        else:
            self._close_connection(writer)

    def _close_connection(self, writer: _Writer) -> None:
        """The connection has no further use; the process may still have the pool mapped."""
        if writer.connection is not None:
            del self._writers[writer.connection.fileno()]
            self._epoll.unregister(writer.connection)
            writer.connection.close()
            writer.connection = None

    def _fence(self, writer: _Writer, reason: str, *, is_dead: bool = False) -> None:
        self._close_connection(writer)
        del self._writers[writer.pidfd]
        self._epoll.unregister(writer.pidfd)
        os.close(writer.pidfd)
        self._news.append(Fenced(writer.peer, writer.epoch, reason, is_dead))

    def counters(self) -> dict[str, float]:
        return self._pending.counters()

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        """Close every descriptor. Writers that have the pool mapped keep it."""
        self._pending.close()
        for descriptor, writer in self._writers.items():
            if descriptor == writer.pidfd:
                os.close(descriptor)
            elif writer.connection is not None:
                writer.connection.close()
        self._writers.clear()
        self._epoll.close()
