"""The prefill node's side of TCP: dial a peer's listener, and send pages straight from pool memory.

Sending is one thread per connection; everything else, acknowledgements too, happens in the loop's own thread. See
``tcp`` for the whole story.
"""

import contextlib
import logging
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.messages import Connect
from kv_transfer.pieces import Piece
from kv_transfer.transports.base import Attached, AttachError, PageStore, from_message, stage
from kv_transfer.transports.tcp_outlet import Job, Outlet
from kv_transfer.transports.tcp_wire import (
    DONE,
    DONE_FRAME_BYTES,
    DONE_MAGIC,
    ENDPOINT,
    HELLO,
    MAGIC,
    MAX_CONNECTIONS,
    NONCE_BYTES,
    PROOF_BYTES,
    WELCOME,
    Seal,
    Terms,
    family_of,
    tune,
)

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 10.0
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: on close, forget what has not been sent


class _Stage(Enum):
    DIALLING = auto()
    GREETED = auto()  # a WELCOME is awaited
    PROVEN = auto()  # to be let in
    READY = auto()


@dataclass(slots=True, eq=False)
class _Lane:
    """One connection. ``pending``: (ticket, page of the peer, bytes) handed to the thread and not acknowledged."""

    index: int
    connection: socket.socket
    nonce: bytes
    stage: _Stage = _Stage.DIALLING
    terms: Terms | None = None
    inbox: bytearray = field(default_factory=bytearray)
    jobs: "queue.SimpleQueue[Job | None]" = field(default_factory=queue.SimpleQueue)
    pending: deque[tuple[int, int, int]] = field(default_factory=deque)
    num_done: int = 0
    thread: threading.Thread | None = None
    seal: Seal | None = None


@dataclass(slots=True, eq=False)
class _Route:
    """All connections to one peer."""

    peer: str
    connect: Connect
    address: tuple[str, int]
    token: bytes
    lanes: list[_Lane]
    until: float
    is_attached: bool = False
    is_broken: bool = False

    @property
    def who(self) -> str:
        return f"decode node {self.connect.name} at {self.address[0]} port {self.address[1]}"


class TcpWriter:
    """``WriterTransport`` of a prefill node.

    Args:
        key: the cluster key; empty: none.
    """

    name = "tcp"
    names: Sequence[str] = ("tcp",)

    def __init__(self, store: PageStore, *, key: bytes = b"") -> None:
        self.store = store
        self._key = key
        self._epoll = select.epoll()
        self._routes: dict[str, _Route] = {}
        self._lanes: dict[int, tuple[_Route, _Lane]] = {}  # by descriptor
        self._remaining: dict[int, int] = {}  # ticket -> pages not acknowledged
        self._news: list[Attached] = []
        self._done: list[int] = []
        self._num_tickets = 0
        self._num_bytes = 0  # of pages, acknowledged

    # ---- attaching ----------------------------------------------------------------------------------------------

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._routes, "detach first"
        endpoint = ENDPOINT.fullmatch(connect.endpoint)
        if endpoint is None or not 0 < int(endpoint[2]) < 65536 or not 0 < int(endpoint[4]) <= MAX_CONNECTIONS:
            raise AttachError(f"{connect.name} offers an endpoint that tcp does not understand")
        address = (endpoint[1], int(endpoint[2]))
        route = _Route(peer, connect, address, bytes.fromhex(endpoint[3]), [], time.monotonic() + ATTACH_TIMEOUT_S)
        self._routes[peer] = route
        try:
            for index in range(int(endpoint[4])):
                self._dial(route, index)
        except OSError as error:
            self.detach(peer)
            raise AttachError(f"{route.who} cannot be reached by tcp: {error.strerror or error}") from error

    def _dial(self, route: _Route, index: int) -> None:
        connection = socket.socket(family_of(route.address[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            tune(connection)
            with contextlib.suppress(BlockingIOError):
                connection.connect(route.address)
        except BaseException:
            connection.close()
            raise
        lane = _Lane(index, connection, secrets.token_bytes(NONCE_BYTES))
        route.lanes.append(lane)
        self._lanes[connection.fileno()] = (route, lane)
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLOUT)

    def poll(self) -> list[Attached]:
        self._turn()
        now = time.monotonic()
        for route in self._routes.values():
            if not route.is_attached and not route.is_broken and route.until <= now:
                self._break(route, f"it did not answer within {ATTACH_TIMEOUT_S:.0f} s")
        news, self._news = self._news, []
        for attached in news:
            if attached.problem and not self._routes[attached.peer].is_attached:
                self.detach(attached.peer)
        return news

    def _turn(self) -> None:
        """Hear what the connections have to say."""
        for descriptor, _ in self._epoll.poll(0):
            found = self._lanes.get(descriptor)
            if found is None or found[0].is_broken:
                continue
            route, lane = found
            try:
                if lane.stage is _Stage.READY:
                    self._hear(lane)
                else:
                    self._shake(route, lane)
            except OSError as error:
                self._break(route, error.strerror or str(error))

    def _break(self, route: _Route, why: str) -> None:
        route.is_broken = True
        for lane in route.lanes:
            with contextlib.suppress(KeyError, FileNotFoundError, ValueError):
                self._epoll.unregister(lane.connection)
        verb = "broke" if route.is_attached else "could not be made"
        problem = f"the tcp connection to {route.who} {verb}: {why}"
        self._news.append(Attached(route.peer, route.connect.epoch, problem))

    def _shake(self, route: _Route, lane: _Lane) -> None:
        """One more step of the handshake, as soon as its frame is there whole. Raises OSError if it cannot go on."""
        if lane.stage is _Stage.DIALLING:
            if error := lane.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            lane.connection.send(HELLO.pack(MAGIC, lane.index, len(route.lanes), route.token, lane.nonce))
            lane.stage = _Stage.GREETED
            self._epoll.modify(lane.connection, select.EPOLLIN)
        elif lane.stage is _Stage.GREETED:
            if (frame := self._frame(lane, WELCOME.size)) is None:
                return
            nonce, proof = WELCOME.unpack(frame)
            lane.terms = self._terms(route, lane, nonce)
            if not lane.terms.is_proof(self._key, b"reader", proof):
                raise ConnectionError("it does not know our cluster key, or offers another pool than it says")
            lane.connection.send(lane.terms.proof(self._key, b"writer"))
            lane.stage = _Stage.PROVEN
        elif lane.stage is _Stage.PROVEN:
            if (frame := self._frame(lane, PROOF_BYTES)) is None:
                return
            assert lane.terms is not None
            if not lane.terms.is_proof(self._key, b"let in", frame):
                raise ConnectionError("it let us in without proof")
            self._open(route, lane)

    def _terms(self, route: _Route, lane: _Lane, nonce: bytes) -> Terms:
        return Terms(
            token=route.token,
            index=lane.index,
            count=len(route.lanes),
            epoch=route.connect.epoch,
            page_bytes=from_message(route.connect.geometry).page_bytes,
            num_pages=route.connect.num_pages,
            writer_nonce=lane.nonce,
            reader_nonce=nonce,
        )

    @staticmethod
    def _frame(lane: _Lane, size: int) -> bytes | None:
        """The next so many bytes, once they are all there."""
        with contextlib.suppress(BlockingIOError):
            data = lane.connection.recv(size - len(lane.inbox), socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("it closed the connection (another token, cluster key or epoch?)")
            lane.inbox += data
        if len(lane.inbox) < size:
            return None
        frame = bytes(lane.inbox)
        lane.inbox.clear()
        return frame

    def _open(self, route: _Route, lane: _Lane) -> None:
        assert lane.terms is not None
        lane.stage = _Stage.READY
        lane.seal = lane.terms.seal(self._key, b"acknowledgements")
        lane.connection.setblocking(True)  # for the thread; the loop says MSG_DONTWAIT
        outlet = Outlet(lane.connection, lane.jobs, lane.terms.seal(self._key, b"pages"), self.store)
        lane.thread = threading.Thread(target=outlet.run, name=f"tcp-send-{lane.index}", daemon=True)
        lane.thread.start()
        if all(other.stage is _Stage.READY for other in route.lanes):
            route.is_attached = True
            self._news.append(Attached(route.peer, route.connect.epoch))

    # ---- writing ------------------------------------------------------------------------------------------------

    def write(self, peer: str, pages: Sequence[tuple[int, int]], piece: Piece | None = None) -> int:
        route = self._routes[peer]
        assert route.is_attached, "not attached"
        self._num_tickets += 1
        ticket = self._num_tickets
        self._remaining[ticket] = len(pages)
        num_bytes = self.store.geometry.page_bytes if piece is None else piece.num_bytes
        for source, target in pages:
            stage(self.store, (source,))
            lane = min(route.lanes, key=lambda lane: len(lane.pending))
            lane.pending.append((ticket, target, num_bytes))
            lane.jobs.put((source, target, piece))
        if not pages:
            self._finish(ticket)
        return ticket

    def _hear(self, lane: _Lane) -> None:
        """Take acknowledgements. Raises OSError if one is not what must come next."""
        assert lane.seal is not None
        with contextlib.suppress(BlockingIOError):
            data = lane.connection.recv(64 * DONE_FRAME_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("it closed the connection")
            lane.inbox += data
        end = len(lane.inbox) // DONE_FRAME_BYTES * DONE_FRAME_BYTES
        for at in range(0, end, DONE_FRAME_BYTES):
            frame = bytes(lane.inbox[at : at + DONE_FRAME_BYTES])
            header = frame[: DONE.size]
            magic, is_placed, page, number = DONE.unpack(header)
            if magic != DONE_MAGIC or not lane.seal.is_mine(header, frame[DONE.size :]):
                raise ConnectionError("it sent something that is no acknowledgement")
            if number != lane.num_done or not lane.pending or lane.pending[0][1] != page:
                raise ConnectionError("it acknowledged a page that was not sent")
            lane.num_done += 1
            ticket, _, num_bytes = lane.pending.popleft()
            self._num_bytes += num_bytes if is_placed else 0
            self._remaining[ticket] -= 1
            if not self._remaining[ticket]:
                self._finish(ticket)
        del lane.inbox[:end]

    def _finish(self, ticket: int) -> None:
        del self._remaining[ticket]
        self._done.append(ticket)

    def done(self) -> list[int]:
        self._turn()
        tickets, self._done = self._done, []
        return tickets

    # ---- the end ------------------------------------------------------------------------------------------------

    def detach(self, peer: str) -> bool:
        route = self._routes.pop(peer, None)
        if route is None:
            return True
        self._news = [news for news in self._news if news.peer != peer]
        for lane in route.lanes:
            self._lanes.pop(lane.connection.fileno(), None)
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._epoll.unregister(lane.connection)
            for ticket, _, _ in lane.pending:
                self._remaining.pop(ticket, None)
            with contextlib.suppress(OSError):
                if lane.pending:
                    lane.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                lane.connection.shutdown(socket.SHUT_RDWR)
            lane.jobs.put(None)
        for lane in route.lanes:
            if lane.thread is not None:
                lane.thread.join()  # at once: its socket takes nothing more. After it nobody reads our pages
            lane.connection.close()
        return True

    def counters(self) -> dict[str, float]:
        return {"bytes_by_tcp": float(self._num_bytes)}

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        for peer in list(self._routes):
            self.detach(peer)
        self._epoll.close()
