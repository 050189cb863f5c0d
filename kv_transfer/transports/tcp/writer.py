"""The prefill node's side of TCP: dial a peer's listener, and send pages straight from pool memory.

Sending is one thread per connection; everything else, acknowledgements too, happens in the loop's own thread. See
``tcp`` for the whole story.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.wire.messages import Connect
from kv_transfer.page_slices import Piece
from kv_transfer.transports.base import Attached, AttachError, PageStore, from_message, stage
from kv_transfer.transports.tcp.protocol import (
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
    Line,
    Seal,
    Terms,
    family_of,
    tune,
)
from kv_transfer.transports.tcp.send_thread import Outlet

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 10.0
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: on close, forget what has not been sent


class Stage(Enum):
    DIALLING = auto()
    GREETED = auto()  # a WELCOME is awaited
    PROVEN = auto()  # to be let in
    OPENING = auto()  # let in; the outlet has something to settle with the other end first
    READY = auto()


@dataclass(slots=True, eq=False)
class Lane:
    """One connection. ``pending``: (ticket, page of the peer, bytes) handed to the outlet and not acknowledged."""

    index: int
    connection: socket.socket
    nonce: bytes
    stage: Stage = Stage.DIALLING
    terms: Terms | None = None
    inbox: bytearray = field(default_factory=bytearray)
    pending: deque[tuple[int, int, int]] = field(default_factory=deque)
    num_done: int = 0
    outlet: Outlet | None = None
    seal: Seal | None = None


@dataclass(slots=True, eq=False)
class Route:
    """All connections to one peer."""

    peer: str
    connect: Connect
    address: tuple[str, int]
    token: bytes
    lanes: list[Lane]
    until: float
    is_attached: bool = False
    is_broken: bool = False
    is_late: bool = False  # it was detached from while pages were being read

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
    magic = MAGIC

    def __init__(self, store: PageStore, *, key: bytes = b"") -> None:
        self.store = store
        self._key = key
        self._epoll = select.epoll()
        self._routes: dict[str, Route] = {}
        self._lanes: dict[int, tuple[Route, Lane]] = {}  # by descriptor
        self._leaving: dict[str, Route] = {}  # detached from, and our pages are still being read
        self._ending: list[Outlet] = []  # stopped; their threads end soon
        self._remaining: dict[int, int] = {}  # ticket -> pages not acknowledged
        self._news: list[Attached] = []
        self._done: list[int] = []
        self._num_tickets = 0
        self._num_bytes = 0  # of pages, acknowledged

    # ---- attaching ----------------------------------------------------------------------------------------------

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._routes and peer not in self._leaving, "detach first"
        endpoint = ENDPOINT.fullmatch(connect.endpoint)
        if endpoint is None or not 0 < int(endpoint[2]) < 65536 or not 0 < int(endpoint[4]) <= MAX_CONNECTIONS:
            raise AttachError(f"{connect.name} offers an endpoint that {self.name} does not understand")
        address = (endpoint[1], int(endpoint[2]))
        route = Route(peer, connect, address, bytes.fromhex(endpoint[3]), [], time.monotonic() + ATTACH_TIMEOUT_S)
        self._routes[peer] = route
        try:
            for index in range(int(endpoint[4])):
                self._dial(route, index)
        except OSError as error:
            self.detach(peer)
            raise AttachError(f"{route.who} cannot be reached by {self.name}: {error.strerror or error}") from error

    def _dial(self, route: Route, index: int) -> None:
        connection = socket.socket(family_of(route.address[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            tune(connection)
            with contextlib.suppress(BlockingIOError):
                connection.connect(route.address)
        except BaseException:
            connection.close()
            raise
        lane = Lane(index, connection, secrets.token_bytes(NONCE_BYTES))
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
        self._reap()
        for descriptor, _ in self._epoll.poll(0):
            found = self._lanes.get(descriptor)
            if found is None or found[0].is_broken:
                continue
            route, lane = found
            try:
                if lane.stage is Stage.READY:
                    self._hear(lane)
                else:
                    self._shake(route, lane)
            except OSError as error:
                why = lane.outlet.why if lane.outlet is not None else ""
                self._break(route, why or error.strerror or str(error))

    def _break(self, route: Route, why: str) -> None:
        route.is_broken = True
        for lane in route.lanes:
            with contextlib.suppress(KeyError, FileNotFoundError, ValueError):
                self._epoll.unregister(lane.connection)
        verb = "broke" if route.is_attached else "could not be made"
        problem = f"the {self.name} connection to {route.who} {verb}: {why}"
        self._news.append(Attached(route.peer, route.connect.epoch, problem))

    def _shake(self, route: Route, lane: Lane) -> None:
        """One more step of the handshake, as soon as its frame is there whole. Raises OSError if it cannot go on."""
        if lane.stage is Stage.DIALLING:
            if error := lane.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            lane.connection.send(HELLO.pack(self.magic, lane.index, len(route.lanes), route.token, lane.nonce))
            lane.stage = Stage.GREETED
            self._epoll.modify(lane.connection, select.EPOLLIN)
        elif lane.stage is Stage.GREETED:
            if (frame := self._frame(lane, WELCOME.size)) is None:
                return
            nonce, proof = WELCOME.unpack(frame)
            lane.terms = self._terms(route, lane, nonce)
            if not lane.terms.is_proof(self._key, b"reader", proof):
                raise ConnectionError("it does not know our cluster key, or offers another pool than it says")
            lane.connection.send(lane.terms.proof(self._key, b"writer"))
            lane.stage = Stage.PROVEN
        elif lane.stage is Stage.PROVEN:
            if (frame := self._frame(lane, PROOF_BYTES)) is None:
                return
            assert lane.terms is not None
            if not lane.terms.is_proof(self._key, b"let in", frame):
                raise ConnectionError("it let us in without proof")
            self._open(route, lane)

    def _terms(self, route: Route, lane: Lane, nonce: bytes) -> Terms:
        return Terms(
            magic=self.magic,
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
    def _frame(lane: Lane, size: int) -> bytes | None:
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

    def _open(self, route: Route, lane: Lane) -> None:
        """Let in: pages can be sent."""
        assert lane.terms is not None
        line = Line(lane.connection, lane.terms, self._key)
        lane.seal = line.seal(b"acknowledgements")
        lane.outlet = self._outlet(line)
        lane.outlet.start()
        self._note_ready(route, lane)

    def _outlet(self, line: Line) -> Outlet:
        return Outlet(line, self.store)

    def _note_ready(self, route: Route, lane: Lane) -> None:
        lane.stage = Stage.READY
        if all(other.stage is Stage.READY for other in route.lanes):
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
            self._stage(source)
            lane = min(route.lanes, key=lambda lane: len(lane.pending))
            assert lane.outlet is not None
            lane.pending.append((ticket, target, num_bytes))
            lane.outlet.put((source, target, piece))
        if not pages:
            self._finish(ticket)
        return ticket

    def _stage(self, page: int) -> None:
        stage(self.store, (page,))

    def _hear(self, lane: Lane) -> None:
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

    def voided(self, peer: str, endpoint: str) -> None:
        """No write outlives its connection."""

    def detach(self, peer: str) -> bool:
        route = self._routes.pop(peer, None)
        if route is not None:
            self._news = [news for news in self._news if news.peer != peer]
            self._hang_up(route)
            self._leaving[peer] = route
        return self._let_go(peer)

    def _hang_up(self, route: Route) -> None:
        for lane in route.lanes:
            self._lanes.pop(lane.connection.fileno(), None)
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._epoll.unregister(lane.connection)
            with contextlib.suppress(OSError):
                if lane.pending:
                    lane.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                lane.connection.shutdown(socket.SHUT_RDWR)
        for lane in route.lanes:
            if lane.outlet is not None:
                lane.outlet.stop()
                self._ending.append(lane.outlet)

    def _let_go(self, peer: str) -> bool:
        """Is nobody reading our pages for this peer any more? Then nothing is left of its connections. Tickets that
        were not over vanish, unless ``detach`` had to say False: then they are over now."""
        route = self._leaving.get(peer)
        if route is None:
            return True
        if any(lane.pending and lane.outlet is not None and not lane.outlet.is_idle for lane in route.lanes):
            route.is_late = True
            return False
        del self._leaving[peer]
        for lane in route.lanes:
            lane.connection.close()
        for ticket in {ticket: None for lane in route.lanes for ticket, _, _ in lane.pending}:
            del self._remaining[ticket]
            if route.is_late:
                self._done.append(ticket)
        return True

    def _reap(self) -> None:
        for peer in list(self._leaving):
            self._let_go(peer)
        self._ending = [outlet for outlet in self._ending if not outlet.is_over]

    def counters(self) -> dict[str, float]:
        return {f"bytes_by_{self.name}": float(self._num_bytes)}

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        for peer in list(self._routes):
            self.detach(peer)
        for outlet in self._ending:
            outlet.join()
        self._reap()
        self._epoll.close()
