"""The decode node's side of TCP: listen, authenticate writers, and place their pages where that is permitted.

One thread per connection places the pages; everything else happens in the loop's thread.
"""

import contextlib
import os
import secrets
import select
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError
from kv_transfer.page_slices import PageSlice
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Fenced, ReaderTransport
from kv_transfer.transports.pending_connections import PendingConnection, PendingConnections
from kv_transfer.transports.tcp.protocol import (
    HELLO,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    TOKEN_BYTES,
    WELCOME,
    AuthenticatedConnection,
    Terms,
    family_of,
    tune,
)
from kv_transfer.transports.tcp.receive_thread import ReceiveThread, WritePermissions

NUM_CONNECTIONS = 2


@dataclass(slots=True, eq=False)
class _PendingConnection(PendingConnection):
    """A connection that has proven nothing yet. ``terms`` is set by its HELLO."""

    inbox: bytearray = field(default_factory=bytearray)
    terms: Terms | None = None


@dataclass(slots=True, eq=False)
class _Offer:
    """What a peer may do under one epoch: dial the connections ``awaited``, and write through ``threads``."""

    peer: str
    epoch: int
    token: bytes
    awaited: dict[int, None]
    threads: list[ReceiveThread] = field(default_factory=list)


class TcpReader(ReaderTransport):
    """``ReaderTransport`` of a decode node.

    Args:
        host: where to listen, at any free port; writers are told the address, even if this is a name.
        key: the cluster key; empty: none, and then the host should be loopback.

    Raises:
        ConfigError: the address cannot be bound.
    """

    name = "tcp"
    magic = MAGIC

    def __init__(
        self,
        store: PageStore,
        *,
        host: str = "127.0.0.1",
        key: bytes = b"",
        num_connections: int = NUM_CONNECTIONS,
    ) -> None:
        self.store = store
        self._key = key
        self._num_connections = num_connections
        listener = _listen(host)
        self._host: str = listener.getsockname()[0]
        self._port: int = listener.getsockname()[1]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._pending = PendingConnections(
            listener, self._epoll, "the port for pages", make=_PendingConnection, num_awaited=self._num_awaited
        )
        self._offers: dict[str, _Offer] = {}  # by peer
        self._permissions = WritePermissions()
        self._ended: deque[ReceiveThread] = deque()  # appended by their threads
        self._closing: list[ReceiveThread] = []
        self._news: list[Fenced] = []

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[peer] = _Offer(peer, epoch, token, dict.fromkeys(range(self._num_connections)))
        return f"{self._host}:{self._port}:{token.hex()}:{self._num_connections}"

    def withdraw(self, peer: str) -> None:
        if peer in self._offers:
            self._shut(self._offers[peer], "the connection was closed on our side")

    def _shut(self, offer: _Offer, reason: str) -> None:
        """The fence: after it no byte of this epoch is placed, and none can come in any more."""
        del self._offers[offer.peer]
        for thread in offer.threads:
            thread.shut()
        self._closing += offer.threads
        self._permissions.revoke(offer.peer)
        self._news.append(Fenced(offer.peer, offer.epoch, reason))

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        offer = self._offers.get(peer)
        return transport == self.name and offer is not None and offer.epoch == epoch and not offer.awaited

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        if again is None:
            self._permissions.give(peer, epoch, pages)
        else:
            self._permissions.give_again((peer, epoch), pages, again)

    def forbid(self, pages: Sequence[int]) -> None:
        self._permissions.take(pages)
        taken = frozenset(pages)
        for offer in self._offers.values():
            for thread in offer.threads:
                thread.wait_out(taken)

    def poll(self, now: float) -> list[Fenced]:
        for descriptor, _ in self._epoll.poll(0):
            if self._pending.is_listener(descriptor):
                self._pending.accept(now, self._hear)
            elif descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif pending := self._pending.get(descriptor):
                self._hear(pending)
        while self._ended:
            thread = self._ended.popleft()
            offer = self._offers.get(thread.peer)
            if offer is not None and thread in offer.threads:
                self._shut(offer, f"the {self.name} connection to the prefill node ended: {thread.why}")
        self._closing = [thread for thread in self._closing if not thread.collect()]
        self._pending.expire(now)
        news, self._news = self._news, []
        return news

    def _hear(self, pending: _PendingConnection) -> None:
        """Continue the handshake when its next frame is complete; never reads beyond that frame."""
        size = HELLO.size if pending.terms is None else PROOF_BYTES
        try:
            data = pending.connection.recv(size - len(pending.inbox))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._pending.reject(pending, "left")
            return
        pending.inbox += data
        if len(pending.inbox) < size:
            return
        frame = bytes(pending.inbox)
        pending.inbox.clear()
        try:
            if pending.terms is None:
                self._greet(pending, frame)
            else:
                self._admit(pending, pending.terms, frame)
        except OSError:
            self._pending.reject(pending, "left")

    def _greet(self, pending: _PendingConnection, frame: bytes) -> None:
        magic, index, count, token, nonce = HELLO.unpack(frame)
        offer = self._offer_with(token)
        if magic != self.magic or offer is None or count != self._num_connections or index not in offer.awaited:
            self._pending.reject(pending, "token" if magic == self.magic else "garbage")
            return
        pending.terms = Terms(
            magic=self.magic,
            token=token,
            index=index,
            count=count,
            epoch=offer.epoch,
            page_bytes=self.store.layout.page_bytes,
            num_pages=self.store.num_pages,
            writer_nonce=nonce,
            reader_nonce=secrets.token_bytes(NONCE_BYTES),
        )
        proof = pending.terms.proof(self._key, b"reader")
        pending.connection.send(WELCOME.pack(pending.terms.reader_nonce, proof))

    def _num_awaited(self) -> int:
        """Connections that peers with an offer have not made yet."""
        return sum(len(offer.awaited) for offer in self._offers.values())

    def _offer_with(self, token: bytes) -> _Offer | None:
        return next((offer for offer in self._offers.values() if offer.token == token), None)

    def _admit(self, pending: _PendingConnection, terms: Terms, proof: bytes) -> None:
        offer = self._offer_with(terms.token)
        if not terms.is_proof(self._key, b"writer", proof):
            self._pending.reject(pending, "key")
            return
        if offer is None or terms.index not in offer.awaited:  # withdrawn, or made by another connection meanwhile
            self._pending.reject(pending, "token")
            return
        pending.connection.send(terms.proof(self._key, b"accepted"))
        authenticated = AuthenticatedConnection(pending.connection, terms, self._key)
        thread = self._make_receive_thread(authenticated, (offer.peer, offer.epoch))
        thread.start()
        del offer.awaited[terms.index]
        self._pending.promote(pending)
        offer.threads.append(thread)

    def _make_receive_thread(self, authenticated: AuthenticatedConnection, owner: tuple[str, int]) -> ReceiveThread:
        return ReceiveThread(authenticated, owner, self.store, self._permissions, self._on_end)

    def _on_end(self, thread: ReceiveThread) -> None:
        """Called in the thread of a connection that has ended."""
        self._ended.append(thread)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def counters(self) -> dict[str, float]:
        return {
            f"bytes_by_{self.name}": float(self._permissions.num_bytes),
            "refused_pages": float(self._permissions.num_refused),
            **self._pending.counters(),
        }

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        for peer in list(self._offers):
            self.withdraw(peer)
        for thread in self._closing:
            thread.join()
        self._pending.close()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)


def _listen(host: str) -> socket.socket:
    listener = socket.socket(family_of(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(listener)  # accepted connections inherit these options
        listener.bind((host, 0))
        listener.listen(1_024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot bind --data-interface {host}: {error.strerror}") from error
    return listener
