"""The prefill node's side of TCP: dial a peer's listener, and send pages straight from pool memory.

One thread per connection sends; everything else, acknowledgements included, happens in the loop's thread.
"""

import contextlib
import math
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

from common.errors import ConfigError
from common.wire.address import is_address
from common.wire.messages import Connect
from kv_transfer.page_slices import SlicePair, whole_pages
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, AttachError, WriterTransport, stage
from kv_transfer.transports.silence import LATE_S, LOOK_PAUSE_S, LOST, has_silent
from kv_transfer.transports.tcp.alarm import Alarm
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
    AuthenticatedConnection,
    FrameAuthenticator,
    Terms,
    family_of,
    tune,
)
from kv_transfer.transports.tcp.send_thread import SendThread

ATTACH_TIMEOUT_S = 10.0
#: A connection that has not formed by then is dialled again, each time after twice as long: where packets are lost, the
#: kernel itself repeats the first one only after a second.
REDIAL_S = 0.25
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: on close, drop what has not been sent


class Stage(Enum):
    DIALLING = auto()
    GREETED = auto()  # waits for WELCOME
    PROVEN = auto()  # waits for the reader's last proof
    OPENING = auto()  # accepted; the thread has to settle something with the other end first
    READY = auto()


@dataclass(slots=True, eq=False)
class TcpConnection:
    """One connection.

    Attributes:
        redial_at, patience_s: when it is dialled again unless it has formed, and how long after it was dialled.
        pending: (ticket, page of the peer, bytes, when) given to its thread and not acknowledged.
    """

    index: int
    sock: socket.socket
    nonce: bytes
    redial_at: float
    patience_s: float = REDIAL_S
    stage: Stage = Stage.DIALLING
    terms: Terms | None = None
    inbox: bytearray = field(default_factory=bytearray)
    pending: deque[tuple[int, int, int, float]] = field(default_factory=deque)
    num_done: int = 0
    thread: SendThread | None = None
    seal: FrameAuthenticator | None = None


@dataclass(slots=True, eq=False)
class PeerState:
    peer: str
    connect: Connect
    address: tuple[str, int]
    token: bytes
    connections: list[TcpConnection]
    until: float
    is_attached: bool = False
    is_broken: bool = False
    is_late: bool = False  # pages were being read when it was detached

    def waited_s(self, now: float) -> float:
        """How long a page has not been acknowledged."""
        return max(
            (now - connection.pending[0][3] for connection in self.connections if connection.pending), default=0.0
        )

    @property
    def who(self) -> str:
        return f"decode node {self.connect.name} at {self.address[0]} port {self.address[1]}"


class TcpWriter(WriterTransport):
    """``WriterTransport`` of a prefill node.

    Args:
        key: the cluster key; empty: none.

    Raises:
        ConfigError: this process has no descriptor left.
    """

    name = "tcp"
    magic = MAGIC

    def __init__(self, store: PageStore, *, key: bytes = b"") -> None:
        self.store = store
        self._key = key
        self._whole_pages = whole_pages(store.layout)
        self._epoll = select.epoll()
        self._results = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # set while a result waits for its caller
        self._epoll.register(self._results, select.EPOLLIN)
        try:
            self._alarm = Alarm()
        except OSError as error:
            self._epoll.close()
            os.close(self._results)
            reason = error.strerror or error
            raise ConfigError(
                f"--transport {self.name}: cannot make a timer ({reason}); allow more open files (ulimit -n)"
            ) from error
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._alarm_at = math.inf
        self._look_at = math.inf  # when to look for connections whose packets vanish; infinite while nothing is sent
        self._late: dict[str, None] = {}
        self._peers: dict[str, PeerState] = {}
        self._by_descriptor: dict[int, tuple[PeerState, TcpConnection]] = {}
        self._leaving: dict[str, PeerState] = {}  # detached peers for which our pages are still being read
        self._ending: list[SendThread] = []  # threads that were stopped and end soon
        self._remaining: dict[int, int] = {}  # ticket -> pages not acknowledged
        self._news: list[Attached] = []
        self._done: list[int] = []
        self._num_tickets = 0
        self._num_bytes = 0  # of pages, acknowledged

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._peers and peer not in self._leaving, "detach first"
        endpoint = ENDPOINT.fullmatch(connect.endpoint)
        if (
            endpoint is None
            or not is_address(endpoint[1])  # the resolution of a name would block
            or not 0 < int(endpoint[2]) < 65536
            or not 0 < int(endpoint[4]) <= MAX_CONNECTIONS
        ):
            raise AttachError(f"the endpoint offered by {connect.name} is not one of {self.name}")
        address = (endpoint[1], int(endpoint[2]))
        peer_state = PeerState(
            peer, connect, address, bytes.fromhex(endpoint[3]), [], time.monotonic() + ATTACH_TIMEOUT_S
        )
        self._peers[peer] = peer_state
        try:
            for index in range(int(endpoint[4])):
                self._dial(peer_state, index)
        except OSError as error:
            self.detach(peer)
            raise AttachError(
                f"{peer_state.who} cannot be reached by {self.name}: {error.strerror or error}"
            ) from error
        now = time.monotonic()
        self._set_alarm(min(self._alarm_at, now + REDIAL_S), now)

    def _dial(self, peer_state: PeerState, index: int) -> None:
        sock = self._connect(peer_state.address)
        nonce, redial_at = secrets.token_bytes(NONCE_BYTES), time.monotonic() + REDIAL_S
        connection = TcpConnection(index, sock, nonce, redial_at)
        peer_state.connections.append(connection)
        self._by_descriptor[sock.fileno()] = (peer_state, connection)

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        """A socket that connects, which wakes the loop when it has."""
        sock = socket.socket(family_of(address[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            tune(sock)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT)
        except BaseException:
            sock.close()
            raise
        return sock

    def _dial_again(self, peer_state: PeerState, now: float) -> float:
        """Dial connections again that have not formed in time. Return when to look next."""
        dialling = [one for one in peer_state.connections if one.stage is Stage.DIALLING]
        for connection in dialling:
            if connection.redial_at > now:
                continue
            try:
                sock = self._connect(peer_state.address)
            except OSError as error:
                self._break(peer_state, error.strerror or str(error))
                return math.inf
            del self._by_descriptor[connection.sock.fileno()]
            connection.sock.close()
            connection.sock = sock
            connection.patience_s *= 2
            connection.redial_at = now + connection.patience_s
            self._by_descriptor[sock.fileno()] = (peer_state, connection)
        return min((connection.redial_at for connection in dialling), default=math.inf)

    def poll(self) -> list[Attached]:
        self._process_events()
        now, alarm_at = time.monotonic(), math.inf
        for peer_state in self._peers.values():
            if peer_state.is_attached or peer_state.is_broken:
                continue
            if peer_state.until <= now:
                self._break(peer_state, f"it did not answer within {ATTACH_TIMEOUT_S:.0f} s")
            else:
                alarm_at = min(alarm_at, self._dial_again(peer_state, now))
        if self._look_at <= now:
            self._look_at = now + self._look_for_silence(now)
        self._set_alarm(min(alarm_at, self._look_at), now)
        news, self._news = self._news, []
        for attached in news:
            if attached.problem and not self._peers[attached.peer].is_attached:
                self.detach(attached.peer)
        self._signal_results()
        return news

    def _look_for_silence(self, now: float) -> float:
        """Break the pairs whose packets vanish (``silence``). Return how soon to look again."""
        pause_s = math.inf
        for peer_state in self._peers.values():
            waited_s = 0.0 if peer_state.is_broken else peer_state.waited_s(now)
            if waited_s < LATE_S:
                pause_s = min(pause_s, LATE_S if waited_s else math.inf)
                continue
            pause_s = LOOK_PAUSE_S
            self._late[peer_state.peer] = None
            if has_silent([connection.sock for connection in peer_state.connections], waited_s):
                self._break(peer_state, LOST)
        return pause_s

    def late(self) -> list[str]:
        late, self._late = list(self._late), {}
        return late

    def _set_alarm(self, at: float, now: float) -> None:
        """Wake the loop at this instant; infinite: not."""
        if at != self._alarm_at:
            self._alarm_at = at
            self._alarm.arm(at - now) if at < math.inf else self._alarm.disarm()

    def _signal_results(self) -> None:
        """Wake the loop for results that one of ``poll`` and ``done`` has found and the other one returns."""
        if self._news or self._done:
            os.eventfd_write(self._results, 1)
        else:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._results)

    def _process_events(self) -> None:
        self._reap()
        for descriptor, _ in self._epoll.poll(0):
            found = self._by_descriptor.get(descriptor)
            if found is None or found[0].is_broken:
                continue
            peer_state, connection = found
            try:
                if connection.stage is Stage.READY:
                    self._read_acknowledgements(connection)
                else:
                    self._continue_handshake(peer_state, connection)
            except OSError as error:
                why = connection.thread.why if connection.thread is not None else ""
                self._break(peer_state, why or error.strerror or str(error))

    def _break(self, peer_state: PeerState, why: str) -> None:
        peer_state.is_broken = True
        for connection in peer_state.connections:
            with contextlib.suppress(KeyError, FileNotFoundError, ValueError):
                self._epoll.unregister(connection.sock)
        verb = "broke" if peer_state.is_attached else "could not be made"
        problem = f"the {self.name} connection to {peer_state.who} {verb}: {why}"
        self._news.append(Attached(peer_state.peer, peer_state.connect.epoch, problem))

    def _continue_handshake(self, peer_state: PeerState, connection: TcpConnection) -> None:
        """Make the next step of the handshake when its frame is complete.

        Raises:
            OSError: the handshake cannot go on.
        """
        if connection.stage is Stage.DIALLING:
            if error := connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            connection.sock.send(
                HELLO.pack(
                    self.magic, connection.index, len(peer_state.connections), peer_state.token, connection.nonce
                )
            )
            connection.stage = Stage.GREETED
            self._epoll.modify(connection.sock, select.EPOLLIN)
        elif connection.stage is Stage.GREETED:
            if (frame := self._frame(connection, WELCOME.size)) is None:
                return
            nonce, proof = WELCOME.unpack(frame)
            connection.terms = self._terms(peer_state, connection, nonce)
            if not connection.terms.is_proof(self._key, b"reader", proof):
                raise ConnectionError("it has another cluster key (--cluster-key), or offers another pool than it says")
            connection.sock.send(connection.terms.proof(self._key, b"writer"))
            connection.stage = Stage.PROVEN
        elif connection.stage is Stage.PROVEN:
            if (frame := self._frame(connection, PROOF_BYTES)) is None:
                return
            assert connection.terms is not None
            if not connection.terms.is_proof(self._key, b"accepted", frame):
                raise ConnectionError("it accepted the connection without proof")
            self._open(peer_state, connection)

    def _terms(self, peer_state: PeerState, connection: TcpConnection, nonce: bytes) -> Terms:
        return Terms(
            magic=self.magic,
            token=peer_state.token,
            index=connection.index,
            count=len(peer_state.connections),
            epoch=peer_state.connect.epoch,
            page_bytes=peer_state.connect.layout.layout().page_bytes,
            num_pages=peer_state.connect.num_pages,
            writer_nonce=connection.nonce,
            reader_nonce=nonce,
        )

    @staticmethod
    def _frame(connection: TcpConnection, size: int) -> bytes | None:
        """The next ``size`` bytes once all of them are there, else None."""
        with contextlib.suppress(BlockingIOError):
            data = connection.sock.recv(size - len(connection.inbox), socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("it closed the connection (another token, cluster key or epoch?)")
            connection.inbox += data
        if len(connection.inbox) < size:
            return None
        frame = bytes(connection.inbox)
        connection.inbox.clear()
        return frame

    def _open(self, peer_state: PeerState, connection: TcpConnection) -> None:
        """The reader has accepted the connection: pages can be sent."""
        assert connection.terms is not None
        authenticated = AuthenticatedConnection(connection.sock, connection.terms, self._key)
        connection.seal = authenticated.seal(b"acknowledgements")
        thread = self._make_send_thread(authenticated)
        thread.start()
        connection.thread = thread
        self._mark_ready(peer_state, connection)

    def _make_send_thread(self, authenticated: AuthenticatedConnection) -> SendThread:
        return SendThread(authenticated, self.store)

    def _mark_ready(self, peer_state: PeerState, connection: TcpConnection) -> None:
        connection.stage = Stage.READY
        if all(other.stage is Stage.READY for other in peer_state.connections):
            peer_state.is_attached = True
            self._news.append(Attached(peer_state.peer, peer_state.connect.epoch))

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        peer_state = self._peers[peer]
        assert peer_state.is_attached, "not attached"
        self._num_tickets += 1
        ticket = self._num_tickets
        self._remaining[ticket] = len(pages)
        slices = slices or self._whole_pages
        now = time.monotonic()
        for source, target in pages:
            self._stage(source)
            connection = min(peer_state.connections, key=lambda connection: len(connection.pending))
            assert connection.thread is not None
            connection.pending.append((ticket, target, slices.num_bytes, now))
            connection.thread.put((source, target, slices))
        if not pages:
            self._finish(ticket)
        elif self._look_at == math.inf:
            self._look_at = now + LATE_S
            self._set_alarm(min(self._alarm_at, self._look_at), now)
        return ticket

    def _stage(self, page: int) -> None:
        stage(self.store, (page,))

    def _read_acknowledgements(self, connection: TcpConnection) -> None:
        """Take acknowledgements; an OSError says which is not what must come next."""
        assert connection.seal is not None
        with contextlib.suppress(BlockingIOError):
            data = connection.sock.recv(64 * DONE_FRAME_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("it closed the connection")
            connection.inbox += data
        end = len(connection.inbox) // DONE_FRAME_BYTES * DONE_FRAME_BYTES
        for at in range(0, end, DONE_FRAME_BYTES):
            frame = bytes(connection.inbox[at : at + DONE_FRAME_BYTES])
            header = frame[: DONE.size]
            magic, is_placed, page, number = DONE.unpack(header)
            if magic != DONE_MAGIC or not connection.seal.is_mine(header, frame[DONE.size :]):
                raise ConnectionError("it sent a frame that is not an acknowledgement")
            if number != connection.num_done or not connection.pending or connection.pending[0][1] != page:
                raise ConnectionError("it acknowledged a page that was not sent")
            connection.num_done += 1
            ticket, _, num_bytes, _ = connection.pending.popleft()
            self._num_bytes += num_bytes if is_placed else 0
            self._remaining[ticket] -= 1
            if not self._remaining[ticket]:
                self._finish(ticket)
        del connection.inbox[:end]

    def _finish(self, ticket: int) -> None:
        del self._remaining[ticket]
        self._done.append(ticket)

    def done(self) -> list[int]:
        self._process_events()
        tickets, self._done = self._done, []
        self._signal_results()
        return tickets

    def detach(self, peer: str) -> bool:
        peer_state = self._peers.pop(peer, None)
        if peer_state is not None:
            self._news = [news for news in self._news if news.peer != peer]
            self._shut_down(peer_state)
            self._leaving[peer] = peer_state
        return self._release_if_unread(peer)

    def _shut_down(self, peer_state: PeerState) -> None:
        for connection in peer_state.connections:
            self._by_descriptor.pop(connection.sock.fileno(), None)
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._epoll.unregister(connection.sock)
            with contextlib.suppress(OSError):
                if connection.pending:
                    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                connection.sock.shutdown(socket.SHUT_RDWR)
        for connection in peer_state.connections:
            if connection.thread is not None:
                connection.thread.stop()
                self._ending.append(connection.thread)

    def _release_if_unread(self, peer: str) -> bool:
        """Close the connections to a detached peer once none of our pages is being read for it.

        Tickets that were not over vanish, unless ``detach`` returned False: then they are over now. True: nothing is
        left of the connections.
        """
        peer_state = self._leaving.get(peer)
        if peer_state is None:
            return True
        if any(
            connection.pending and connection.thread is not None and not connection.thread.is_idle
            for connection in peer_state.connections
        ):
            peer_state.is_late = True
            return False
        del self._leaving[peer]
        for connection in peer_state.connections:
            connection.sock.close()
        for ticket in {one[0]: None for connection in peer_state.connections for one in connection.pending}:
            del self._remaining[ticket]
            if peer_state.is_late:
                self._done.append(ticket)
        return True

    def _reap(self) -> None:
        for peer in list(self._leaving):
            self._release_if_unread(peer)
        self._ending = [thread for thread in self._ending if not thread.is_over]

    def counters(self) -> dict[str, float]:
        return {f"bytes_by_{self.name}": float(self._num_bytes)}

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def close(self) -> None:
        for peer in list(self._peers):
            self.detach(peer)
        for thread in self._ending:
            thread.join()
        self._reap()
        if not self._epoll.closed:
            self._epoll.close()
            self._alarm.close()
            os.close(self._results)
