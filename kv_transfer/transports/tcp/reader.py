"""The decode node's side of TCP: listen, let the right writers in, and place what they send, where it is allowed.

Placing is one thread per connection; everything else happens in the loop's own thread. See ``tcp`` for the whole story.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError
from kv_transfer.page_slices import PageSlice
from kv_transfer.transports.base import Fenced, PageStore
from kv_transfer.transports.pending_connections import Visitor, Visitors
from kv_transfer.transports.tcp.protocol import (
    HELLO,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    TOKEN_BYTES,
    WELCOME,
    Line,
    Terms,
    family_of,
    tune,
)
from kv_transfer.transports.tcp.receive_thread import Inlet, Leave

log = logging.getLogger(__name__)

NUM_CONNECTIONS = 2


@dataclass(slots=True, eq=False)
class _Visitor(Visitor):
    """It has not proven anything yet. ``terms``: from its HELLO on."""

    inbox: bytearray = field(default_factory=bytearray)
    terms: Terms | None = None


@dataclass(slots=True, eq=False)
class _Offer:
    """What a peer may do under one epoch: dial these connections, write through those."""

    peer: str
    epoch: int
    token: bytes
    awaited: dict[int, None]
    inlets: list[Inlet] = field(default_factory=list)


class TcpReader:
    """``ReaderTransport`` of a decode node.

    Args:
        host, port: where to listen, and what writers are told; port 0 takes any free one.
        key: the cluster key; empty: none, and then the host should be loopback.

    Raises:
        ConfigError: that address cannot be listened on.
    """

    name = "tcp"
    names: Sequence[str] = ("tcp",)
    magic = MAGIC

    def __init__(
        self,
        store: PageStore,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: bytes = b"",
        num_connections: int = NUM_CONNECTIONS,
    ) -> None:
        self.store = store
        self._key = key
        self._num_connections = num_connections
        listener = _listen(host, port)
        self._host = host
        self._port: int = listener.getsockname()[1]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._visitors = Visitors(listener, self._epoll, "the data port", make=_Visitor)
        self._offers: dict[str, _Offer] = {}  # by peer
        self._leave = Leave()
        self._ended: deque[Inlet] = deque()  # said by their threads
        self._closing: list[Inlet] = []
        self._news: list[Fenced] = []

    @property
    def dropped(self) -> Counter[str]:
        """Visitors turned away, by reason."""
        return self._visitors.dropped

    @property
    def port(self) -> int:
        return self._port

    # ---- offers -------------------------------------------------------------------------------------------------

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
        for inlet in offer.inlets:
            inlet.shut()
        self._closing += offer.inlets
        self._leave.revoke(offer.peer)
        self._news.append(Fenced(offer.peer, offer.epoch, reason))

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        offer = self._offers.get(peer)
        return transport == self.name and offer is not None and offer.epoch == epoch and not offer.awaited

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        if again is None:
            self._leave.give(peer, epoch, pages)
        else:
            self._leave.give_again((peer, epoch), pages, again)

    def reclaim(self, peer: str, epoch: int) -> None:
        """``withdraw`` has fenced it."""

    def forbid(self, pages: Sequence[int]) -> None:
        self._leave.take(pages)
        for offer in self._offers.values():
            for inlet in offer.inlets:
                inlet.wait_out(pages)

    # ---- news ---------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Fenced]:
        for descriptor, _ in self._epoll.poll(0):
            if self._visitors.is_listener(descriptor):
                self._visitors.let_in(now, self._hear)
            elif descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif visitor := self._visitors.get(descriptor):
                self._hear(visitor)
        while self._ended:
            inlet = self._ended.popleft()
            offer = self._offers.get(inlet.peer)
            if offer is not None and inlet in offer.inlets:
                self._shut(offer, f"the {self.name} connection to the prefill node ended: {inlet.why}")
        self._closing = [inlet for inlet in self._closing if not inlet.collect()]
        self._visitors.look_after(now)
        news, self._news = self._news, []
        return news

    def _hear(self, visitor: _Visitor) -> None:
        """One more step of the handshake, as soon as its frame is there whole; never reads beyond it."""
        size = HELLO.size if visitor.terms is None else PROOF_BYTES
        try:
            data = visitor.connection.recv(size - len(visitor.inbox))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._visitors.turn_away(visitor, "left")
            return
        visitor.inbox += data
        if len(visitor.inbox) < size:
            return
        frame = bytes(visitor.inbox)
        visitor.inbox.clear()
        try:
            if visitor.terms is None:
                self._greet(visitor, frame)
            else:
                self._admit(visitor, visitor.terms, frame)
        except OSError:
            self._visitors.turn_away(visitor, "left")

    def _greet(self, visitor: _Visitor, frame: bytes) -> None:
        magic, index, count, token, nonce = HELLO.unpack(frame)
        offer = self._offer_with(token)
        if magic != self.magic or offer is None or count != self._num_connections or index not in offer.awaited:
            self._visitors.turn_away(visitor, "token" if magic == self.magic else "garbage")
            return
        visitor.terms = Terms(
            magic=self.magic,
            token=token,
            index=index,
            count=count,
            epoch=offer.epoch,
            page_bytes=self.store.geometry.page_bytes,
            num_pages=self.store.num_pages,
            writer_nonce=nonce,
            reader_nonce=secrets.token_bytes(NONCE_BYTES),
        )
        proof = visitor.terms.proof(self._key, b"reader")
        visitor.connection.send(WELCOME.pack(visitor.terms.reader_nonce, proof))

    def _offer_with(self, token: bytes) -> _Offer | None:
        return next((offer for offer in self._offers.values() if offer.token == token), None)

    def _admit(self, visitor: _Visitor, terms: Terms, proof: bytes) -> None:
        offer = self._offer_with(terms.token)
        if not terms.is_proof(self._key, b"writer", proof):
            self._visitors.turn_away(visitor, "key")
            return
        if offer is None or terms.index not in offer.awaited:  # withdrawn, or taken by another in the meantime
            self._visitors.turn_away(visitor, "token")
            return
        visitor.connection.send(terms.proof(self._key, b"let in"))
        del offer.awaited[terms.index]
        self._visitors.leave(visitor)
        inlet = self._inlet(Line(visitor.connection, terms, self._key), (offer.peer, offer.epoch))
        offer.inlets.append(inlet)
        inlet.start()

    def _inlet(self, line: Line, owner: tuple[str, int]) -> Inlet:
        return Inlet(line, owner, self.store, self._leave, self._on_end)

    def _on_end(self, inlet: Inlet) -> None:
        """Called in the inlet's own thread."""
        self._ended.append(inlet)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ---- the end ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        return {
            f"bytes_by_{self.name}": float(self._leave.num_bytes),
            "refused_pages": float(self._leave.num_refused),
            **self._visitors.counters(),
        }

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        for peer in list(self._offers):
            self.withdraw(peer)
        for inlet in self._closing:
            inlet.join()
        self._visitors.close()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(family_of(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(listener)  # accepted connections inherit it
        listener.bind((host, port))
        listener.listen(1_024)
    except OSError as error:
        listener.close()
        where = f"{host} port {port}" if port else host
        raise ConfigError(f"cannot listen for KV pages on {where} (--data-interface): {error.strerror}") from error
    return listener
