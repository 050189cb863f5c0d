"""The decode node's side of shared memory: let the right processes have the pool, and watch them until they cannot
write.

See ``shm`` for the whole story.
"""

import fcntl
import logging
import os
import secrets
import select
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from kv_transfer.page_slices import PageSlice
from kv_transfer.transports.base import Fenced, PageStore
from kv_transfer.transports.pending_connections import Visitor, Visitors
from kv_transfer.transports.shm.protocol import DETACHED, HELLO, MAGIC, TOKEN_BYTES, peer_credentials

log = logging.getLogger(__name__)

_SO_PEERPIDFD = 77  # Linux 6.5: a pidfd of the very process that connected, whatever became of its number


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of the process at the other end; raises OSError if it cannot be watched."""
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = os.pidfd_open(peer_credentials(connection)[0])
    try:
        # The number could have been used again had the process died before; then its end is closed.
        if connection.recv(1, socket.MSG_PEEK) == b"":
            raise ConnectionResetError("the peer has gone")
    except BlockingIOError:
        pass
    except OSError:
        os.close(pidfd)
        raise
    return pidfd


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _foreign(connection: socket.socket) -> str:
    """Why whoever is at the other end is turned away unheard; empty: it is a process of our own user."""
    pid, uid = peer_credentials(connection)
    return "user" if uid != os.geteuid() or pid <= 0 else ""


@dataclass(slots=True, eq=False)
class _Writer:
    """A process that may have our pool mapped. ``connection`` is None once it has closed its end."""

    peer: str
    epoch: int
    connection: socket.socket | None
    pidfd: int


class ShmReader:
    """``ReaderTransport`` of a decode node.

    Args:
        store: the pool; its memfd is sealed here against changes of size, where it allows that.
        incarnation: of this process; the writer compares it with the peer it means, unless it is empty.
        is_shared: False: watch writers of this host that reach the pool by other means, and hand nothing over.

    Raises:
        ConfigError: this kernel has no pidfds, or the pool's file has not the size of the pool.
    """

    name = "shm"
    names: Sequence[str] = ("shm",)

    def __init__(self, store: PageStore, incarnation: str = "", *, is_shared: bool = True) -> None:
        self.store = store
        self._is_shared = is_shared
        self._incarnation = incarnation.encode()
        self._num_bytes = store.geometry.pool_bytes(store.num_pages)
        assert len(self._incarnation) <= 32
        self._check_host()
        self._name = f"baton-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(f"\0{self._name}")
        listener.listen(1_024)
        self._epoll = select.epoll()
        self._visitors = Visitors(listener, self._epoll, "the pool's socket", make=Visitor, screen=_foreign)
        self._offers: dict[bytes, tuple[str, int]] = {}  # token -> peer, epoch
        self._writers: dict[int, _Writer] = {}  # by descriptor, of the connection and of the process
        self._news: list[Fenced] = []

    @property
    def dropped(self) -> Counter[str]:
        """Visitors turned away, by reason."""
        return self._visitors.dropped

    def _check_host(self) -> None:
        size = os.fstat(self.store.fd).st_size
        if size != self._num_bytes:
            raise ConfigError(f"the pool's file has {size} bytes, its pages have {self._num_bytes}")
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            raise ConfigError(f"--transport shm needs pidfd_open, which this system refuses: {error}") from error
        try:
            fcntl.fcntl(self.store.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            log.debug("the pool's file cannot be sealed: %s", error)

    # ---- offers -------------------------------------------------------------------------------------------------

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = (peer, epoch)
        return f"{self._name}:{token.hex()}"

    def withdraw(self, peer: str) -> None:
        self._offers = {token: offer for token, offer in self._offers.items() if offer[0] != peer}

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        return transport == self.name

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        """A process that has the pool mapped needs no leave."""

    def forbid(self, pages: Sequence[int]) -> None:
        """A process that has the pool mapped cannot be stopped: it is fenced, or waited for."""

    def reclaim(self, peer: str, epoch: int) -> None:
        """Nothing but its own word or its death keeps a process from memory that it has mapped."""

    def watched(self) -> set[tuple[str, int]]:
        """(peer, epoch) of processes that may reach the pool by themselves; from any thread."""
        return {(writer.peer, writer.epoch) for writer in list(self._writers.values())}

    # ---- news ---------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Fenced]:
        for descriptor, _ in self._epoll.poll(0):
            if self._visitors.is_listener(descriptor):
                self._visitors.let_in(now, self._greet)
            elif visitor := self._visitors.get(descriptor):
                self._greet(visitor)
            elif descriptor in self._writers:
                self._hear(descriptor, self._writers[descriptor])
        self._visitors.look_after(now)
        news, self._news = self._news, []
        return news

    def _greet(self, visitor: Visitor) -> None:
        """Let the visitor show its token; hand over the pool if that is an offer's."""
        connection = visitor.connection
        try:
            token = connection.recv(TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            token = b""
        offer = self._offers.pop(token, None)
        if offer is None:
            self._visitors.turn_away(visitor, "token")
            return
        peer, epoch = offer
        try:
            pidfd = peer_pidfd(connection)
        except OSError as error:
            log.warning("a prefill node on this host cannot be watched, so it gets no pool: %s", error)
            self._visitors.turn_away(visitor, "pidfd")
            return
        self._visitors.leave(visitor)
        # Known as a writer before it has the descriptor, and until it is fenced, whatever happens to the connection.
        writer = _Writer(peer, epoch, connection, pidfd)
        self._writers[connection.fileno()] = self._writers[pidfd] = writer
        for descriptor in (connection.fileno(), pidfd):
            self._epoll.register(descriptor, select.EPOLLIN)
        hello = HELLO.pack(MAGIC, epoch, self._num_bytes, self._incarnation)
        try:
            socket.send_fds(connection, [hello], [self.store.fd] if self._is_shared else [])
        except OSError:
            self._fence(writer, "the prefill node left before it had the pool")

    def _hear(self, descriptor: int, writer: _Writer) -> None:
        if descriptor == writer.pidfd:
            # Asked again: the event may be of an earlier process, whose descriptor had this number a moment ago.
            if _is_dead(writer.pidfd):
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
            self._fence(writer, "the prefill node has let go of the pool")
        else:
            self._hang_up(writer)

    def _hang_up(self, writer: _Writer) -> None:
        """The connection is of no use any more; the process may still have the pool mapped."""
        if writer.connection is not None:
            del self._writers[writer.connection.fileno()]
            self._epoll.unregister(writer.connection)
            writer.connection.close()
            writer.connection = None

    def _fence(self, writer: _Writer, reason: str, *, is_dead: bool = False) -> None:
        self._hang_up(writer)
        del self._writers[writer.pidfd]
        self._epoll.unregister(writer.pidfd)
        os.close(writer.pidfd)
        self._news.append(Fenced(writer.peer, writer.epoch, reason, is_dead))

    # ---- the end ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        return self._visitors.counters()

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        """Close every descriptor. Writers that have the pool mapped keep it."""
        self._visitors.close()
        for descriptor, writer in self._writers.items():
            if descriptor == writer.pidfd:
                os.close(descriptor)
            elif writer.connection is not None:
                writer.connection.close()
        self._writers.clear()
        self._epoll.close()
