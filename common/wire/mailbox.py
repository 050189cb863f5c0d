"""ZMQ sockets that send and receive typed messages, and drop anything malformed or meant for another process start.

A ``Mailbox`` either binds (many peers, each identified by its incarnation) or connects (one peer). No call blocks, and
no input raises: a frame that cannot be decoded is counted, logged once per reason and dropped. A peer with another
protocol version is refused in its own version. A closed connection is noticed at once: a bound mailbox probes the peers
that it watches, and ZMQ cannot route to closed ones.

With keys (``common.wire.curve``), connections are encrypted and authenticated at both ends. ZMQ gives up a connection
for good if its handshake fails or it carries a forged frame, since anyone on the way can cause both; a connecting
mailbox then dials again.

ZMQ ignores a second connection with the identity of an open one, and a process may well have two to one address: the
first may have been dialled for a process that had the address before. So every connection of a process has an identity
of its own, its incarnation and a number. A bound mailbox answers on the newest from which a message has come, and drops
what still comes over older ones, until it finds the newest closed.

Messages to one peer that are due together share frames, since a frame costs more than the messages in it.

Of a peer that the process does not know yet, a bound mailbox decodes little; see ``common.wire.unknown_peers``.

The memory of messages that a peer does not read is bounded. ZMQ bounds the number of frames, which suffices for small
ones; the bytes of large ones are counted here until ZMQ has sent them.
"""

import contextlib
import functools
import itertools
import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
import zmq
from msgspec import Meta

from common.wire.address import host_and_port, is_address
from common.wire.curve import ZAP_DOMAIN, CurveClient, CurveServer, ZapHandler, public_key
from common.wire.messages import PROTOCOL_VERSION, Header, Message, Ping, Refused
from common.wire.unknown_peers import UnknownPeers

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 << 20
MAX_WAITING = 65_536  # unsent messages to one peer
LARGE_BYTES = 4_096
MAX_LARGE_BYTES = 256 << 20  # unsent bytes of large messages to one peer; small ones can take as much
MAX_UNREAD = 256  # frames of one peer that ZMQ reads ahead for a bound mailbox; others wait at the sender
MAX_BATCH_BYTES = 64 << 20  # decoded in one call of receive
SHARED_BYTES = 3_072  # of messages that share a frame, which is then not large
MAX_DISCARDED = 64  # frames of unknown peers in one call of receive
MAX_MESSAGES = 1_024  # in one frame
MAX_DIGITS = 18  # of the number of a connection
MAX_ROUTES = 4_096  # of peers that the process does not know
NUM_PROBES = 6
PROBE_EVERY_S = 0.02  # at first; each pause is twice as long as the one before it
SILENCE_S = 30.0  # unless a mailbox is given another time
REDIAL_S = 3.0  # without a connection; ZMQ dials again by itself after most failures, but not all
HANDSHAKE_MS = 10_000  # for all of a handshake; ZMQ closes connections that take longer
MAX_EVENTS = 1_000  # read from ZMQ in one call
_PING = msgspec.msgpack.encode(Ping())
#: Failures that ZMQ takes for errors of the protocol have an event, too. It is not asked for: sending it makes libzmq
#: 4.3.5 forget that a frame could not be decrypted. The connection then stays half open, or the process aborts.
_ACCEPTED, _CONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DISCONNECTED, _REFUSED = int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_CLOSED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_EVENT = struct.Struct("=HI")  # number and value
_CONNECTIONS = itertools.count(1)  # of this process
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # operators of enumerations are slow


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A received message. Every token has one, and a named tuple would take several times as long to make."""

    sender: str
    message: Any


class HandshakeFailure(StrEnum):
    """Why a connection could not be made; also the label of a count."""

    KEY = "key"  # the server does not permit the client's key
    CLOSED = "closed"  # the other end closed the connection, for another key or, often, a reason of ``PROTOCOL``
    PROTOCOL = "protocol"  # the other end has no keys (or this one), or does not speak ZMTP, or a frame was changed
    HANDSHAKE = "handshake"  # at a server: another one than ``KEY``


class ConnectionEvents(NamedTuple):
    connected: bool
    disconnected: bool
    failure: HandshakeFailure | None = None  # the last one


class Mailbox:
    """A ZMQ socket with a strict codec.

    Args:
        incarnation: incarnation of this process, with which the routing identity of a connecting mailbox begins.
        accepts: union of the message types to accept.
        bind, connect: ``tcp://host:port``; exactly one of the two. Port 0 binds a free port, see ``address``.
        curve: the keys; None neither encrypts nor authenticates. A context can have one bound mailbox with keys.
        silence_s: seconds without a message, or an answer to a probe, after which a connection is closed.

    Attributes:
        dropped: numbers of malformed messages, by reason.
        refused: numbers of connections that a bound mailbox has refused, by ``HandshakeFailure``.
    Raises:
        zmq.ZMQError: the address cannot be bound or is malformed.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        incarnation: str,
        accepts: Any,
        *,
        bind: str = "",
        connect: str = "",
        curve: CurveServer | CurveClient | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        assert bool(bind) != bool(connect)
        assert curve is None or isinstance(curve, CurveServer if bind else CurveClient)
        self.incarnation = incarnation
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.num_bytes_sent = 0  # of encoded messages
        self._is_bound = bool(bind)
        self._messages = msgspec.msgpack.Decoder(
            accepts | Annotated[list[accepts], Meta(min_length=1, max_length=MAX_MESSAGES)]
        )
        self._header = msgspec.msgpack.Decoder(Header)
        self._encoder = msgspec.msgpack.Encoder()
        self._unknown = UnknownPeers()
        self._routes: dict[str, tuple[int, bytes]] = {}  # number and identity of the newest connection, by incarnation
        self._most_routes = MAX_ROUTES
        self._has_unread = False
        self._num_probes_left = 0
        self._probed_at = 0.0
        self._large: dict[str, deque[tuple[zmq.MessageTracker, int]]] = {}  # unsent messages and bytes, by target
        self._socket = context.socket(zmq.ROUTER if bind else zmq.DEALER)
        self._readable = [(self._socket, int(zmq.POLLIN))]  # for ``zmq_poll``
        self._configure(self._socket, is_bound=self._is_bound, silence_s=silence_s)
        self._endpoint = connect
        self._is_name = bool(connect) and not is_address(host_and_port(connect.removeprefix("tcp://"), "connect")[0])
        #: Since when a connecting mailbox lacks the connection that it had, or that it may have to dial in another way.
        self._lost_at = time.monotonic() if self._is_name else None
        self._num_pending = 0  # connections to a bound mailbox whose handshake is not finished
        self._num_key_refusals = 0  # of those; they are counted already
        self._is_connected = False  # of a connecting mailbox
        self._failure = HandshakeFailure.PROTOCOL  # of its handshake in progress, unless an event says otherwise
        events = _CONNECTED | _DISCONNECTED | (_ACCEPTED if bind else _REFUSED | _CLOSED)
        try:
            self._monitor = self._socket.get_monitor_socket(events)
        except zmq.ZMQError:  # this process has no descriptor left
            self._socket.close(linger=0)
            raise
        self._zap: ZapHandler | None = None
        try:
            if isinstance(curve, CurveServer):
                self._zap = ZapHandler(context, curve.permitted, self._on_refused_key)
            if curve is not None:
                set_keys(self._socket, curve)
            if bind:
                self._socket.bind(bind)
            else:
                self._connect()
        except zmq.ZMQError:
            self.close()
            raise

    @staticmethod
    def _configure(socket: zmq.Socket[bytes], *, is_bound: bool, silence_s: float) -> None:
        socket.set(zmq.LINGER, 200)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.SNDHWM, MAX_WAITING)
        # ZMQ answers no probe while it has read that much. A connecting mailbox that hears nothing then dials again by
        # itself, and libzmq 4.3.5 aborts the process as soon as it reads on (zeromq/libzmq#3937).
        socket.set(zmq.RCVHWM, MAX_UNREAD if is_bound else MAX_WAITING)
        socket.copy_threshold = LARGE_BYTES
        socket.set(zmq.IPV6, 1)
        # Finds half-open connections and stopped processes. Slow peers pass, since libzmq's thread answers.
        interval_ms = max(round(silence_s * 200), 1)
        socket.set(zmq.HEARTBEAT_IVL, interval_ms)
        socket.set(zmq.HEARTBEAT_TIMEOUT, max(round(silence_s * 1_000) - interval_ms, 1))
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if is_bound:
            socket.set(zmq.ROUTER_MANDATORY, 1)
        else:
            socket.set(zmq.RECONNECT_IVL, 50)
            socket.set(zmq.RECONNECT_IVL_MAX, 1_000)

    def _connect(self) -> None:
        self._socket.set(zmq.ROUTING_ID, f"{self.incarnation}.{next(_CONNECTIONS)}".encode())
        self._socket.connect(self._endpoint)

    @property
    def address(self) -> str:
        return str(self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"))

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll for input: one for ``receive``, and others for ``connection_events``."""
        if self._zap is None:
            return (self._socket, self._monitor)
        return (self._socket, self._monitor, self._zap.socket)

    def send(self, *messages: Message, target: str = "") -> bool:
        """Queue messages, in order; never blocks.

        Args:
            target: incarnation of the receiver; a connecting mailbox may leave it empty.
        Returns:
            False if too much is unsent, or a bound mailbox has no connection to the peer; a connecting one queues.
        """
        return self.send_encoded([self._encoder.encode(message) for message in messages], target)

    def encode(self, message: Message) -> bytes:
        """The bytes of a message for ``send_encoded``, for one that several peers get."""
        return self._encoder.encode(message)

    def send_encoded(self, messages: Iterable[bytes], target: str) -> bool:
        """As ``send``."""
        header = self._encoder.encode(Header(PROTOCOL_VERSION, self.incarnation, target))
        return all(self._send(header, body, target) for body in _bodies(messages))

    def _send(self, header: bytes, body: bytes, target: str) -> bool:
        num_bytes = len(header) + len(body)
        is_large = num_bytes >= LARGE_BYTES
        if is_large and self._num_large_bytes(target) + num_bytes > MAX_LARGE_BYTES:
            return False
        socket = self._socket
        try:
            if self._is_bound:
                route = self._routes.get(target)
                socket.send(target.encode() if route is None else route[1], _SNDMORE)
            socket.send(header, _SNDMORE)
            tracker = socket.send(body, _NOBLOCK, copy=not is_large, track=is_large)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._routes.pop(target, None)  # an older connection may be open
                return False
            if error.errno == zmq.EAGAIN:
                return False
            raise
        if tracker is not None:
            self._large.setdefault(target, deque()).append((tracker, num_bytes))
        self.num_bytes_sent += num_bytes
        return True

    def _num_large_bytes(self, target: str) -> int:
        """Return the unsent bytes of large messages to this peer."""
        for to, waiting in list(self._large.items()):
            while waiting and waiting[0][0].done:
                waiting.popleft()
            if not waiting:
                del self._large[to]
        return sum(num_bytes for _, num_bytes in self._large.get(target, ()))

    def receive(self, limit: int = 1_000, *, is_known: Callable[[str], bool] | None = None) -> list[Envelope]:
        """Return arrived messages, oldest first: of about ``limit`` frames at most, and about 64 MiB.

        Args:
            is_known: whether a peer of a bound mailbox, by incarnation, is one of the process's; None knows all.
        """
        envelopes: list[Envelope] = []
        num_frames = num_bytes = num_discarded = 0
        self._has_unread = True
        while max(num_frames, len(envelopes)) < limit and num_bytes < MAX_BATCH_BYTES and num_discarded < MAX_DISCARDED:
            if not zmq.zmq_poll(self._readable, 0):  # a tenth of the cost of the exception that receiving would raise
                self._has_unread = False
                break
            try:
                first = self._socket.recv(_NOBLOCK, copy=False) if self._is_bound else None
                if first is None or is_known is None or is_known(_owner_of(first.bytes)[0]):
                    frames = self._socket.recv_multipart(_NOBLOCK)
                else:
                    frames = self._recv_unknown(first)
            except zmq.Again:
                self._has_unread = False
                break
            if not frames:
                num_discarded += 1
                continue
            num_frames += 1
            num_bytes += len(frames[-1])
            envelopes += self._decode(None if first is None else self._identity(first), frames)
        if len(self._routes) > self._most_routes and is_known is not None:
            heard = {envelope.sender for envelope in envelopes}  # they may become known by what they say
            self._routes = {peer: route for peer, route in self._routes.items() if peer in heard or is_known(peer)}
            self._most_routes = len(self._routes) + MAX_ROUTES
        return envelopes

    @property
    def has_unread(self) -> bool:
        """Whether the last call of ``receive`` may have left something."""
        return self._has_unread

    def discard_unread(self) -> None:
        """Drop what a connecting mailbox has read ahead. ZMQ keeps that when a connection breaks and is made again."""
        for _ in range(MAX_WAITING):
            try:
                self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                break

    def _recv_unknown(self, first: zmq.Frame) -> list[bytes]:
        """The other frames of a message whose sender is not known; none if it has sent too much."""
        frames = self._socket.recv_multipart(_NOBLOCK, copy=False)
        num_bytes = sum(map(len, frames))
        if not self._unknown.may_send(_owner_of(first.bytes)[0], num_bytes, time.monotonic()):
            self._drop("unknown", "a peer that has not registered sends too much")
            return []
        return [frame.bytes for frame in frames]

    def _identity(self, first: zmq.Frame) -> bytes:
        """The identity of the connection, as the first frame says; empty if its key cannot have it."""
        identity = first.bytes
        if self._zap is not None and not identity.startswith(str(first.get("User-Id")).encode()):
            return b""
        return identity

    def _decode(self, identity: bytes | None, frames: list[bytes]) -> list[Envelope]:
        if len(frames) != 2:
            return self._drop("frames", f"{len(frames)} frames")
        owner, number = ("", 0) if identity is None else _owner_of(identity)
        try:
            header = self._header.decode(frames[0])
            if header.version != PROTOCOL_VERSION:
                if identity and owner == header.sender:
                    self._refuse_version(header, identity)
                return self._drop("version", f"protocol {header.version}, ours is {PROTOCOL_VERSION}")
            if identity is not None and header.sender != owner:
                return self._drop("sender", "the sender is not the owner of the connection")
            if header.target and header.target != self.incarnation:
                return self._drop("target", "meant for an earlier start of this process")
            messages = self._messages.decode(frames[1])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return self._drop("malformed", str(error))
        if identity is not None:
            newest = self._routes.get(owner, (-1, b""))[0]
            if number < newest:
                return self._drop("replaced", "it came over an older connection of its sender")
            if number > newest:
                self._routes[owner] = (number, identity)
        if not isinstance(messages, list):
            return [Envelope(header.sender, messages)]
        return [Envelope(header.sender, message) for message in messages]

    def _refuse_version(self, header: Header, identity: bytes) -> None:
        """Send ``Refused`` in the version of a peer that has connected with another one."""
        reason = (
            f"it speaks version {header.version} of the protocol, and this process version {PROTOCOL_VERSION}: run the "
            f"same release of Baton everywhere"
        )
        answer = self._encoder.encode(Header(header.version, self.incarnation, header.sender))
        with contextlib.suppress(zmq.ZMQError):  # it is gone
            self._socket.send_multipart([identity, answer, self._encoder.encode(Refused(reason))], _NOBLOCK)

    def _drop(self, reason: str, detail: str) -> list[Envelope]:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            log.warning("dropped a message (%s): %s; more of this kind are only counted", reason, detail[:200])
        return []

    def connection_events(self) -> ConnectionEvents:
        """Answer clients that want to connect, and return what happened to connections since the last call.

        A connecting mailbox without a connection dials again; this must be called every few seconds at least.
        """
        if self._zap is not None:
            self._zap.answer_all()
        connected = disconnected = False
        failure = None
        for _ in range(MAX_EVENTS):
            try:
                event, _ = _EVENT.unpack(self._monitor.recv_multipart(_NOBLOCK)[0])
            except zmq.Again:
                break
            connected |= event == _CONNECTED
            disconnected |= event == _DISCONNECTED
            if self._is_bound:
                self._on_server_event(event)
            else:
                failure = self._on_client_event(event) or failure
        if self._lost_at is not None and time.monotonic() - self._lost_at >= REDIAL_S:
            self.redial()
        return ConnectionEvents(connected, disconnected, failure)

    def _on_server_event(self, event: int) -> None:
        """Count connections that end before their handshake does.

        ZMQ does not say which connections end. While a handshake is in progress, the end of another connection is
        taken for its; when the handshake succeeds after all, the next one that does not makes up for it.
        """
        if event == _ACCEPTED:
            self._num_pending += 1
        elif event == _CONNECTED:
            self._num_pending -= 1
        elif self._num_pending > 0:
            self._num_pending -= 1
            if self._num_key_refusals:
                self._num_key_refusals -= 1
            else:
                detail = "the peer has no keys, or expects another server, or gave up"
                self._count_refusal(HandshakeFailure.HANDSHAKE, detail)

    def _on_client_event(self, event: int) -> HandshakeFailure | None:
        """Follow the connection; return why it could not be made, if it could not."""
        if event == _CONNECTED:
            self._is_connected, self._lost_at = True, None
        elif event == _REFUSED:
            self._failure = HandshakeFailure.KEY
        elif event == _CLOSED:
            self._failure = HandshakeFailure.CLOSED
        else:
            self._lost_at = self._lost_at or time.monotonic()
            was_connected, self._is_connected = self._is_connected, False
            failure, self._failure = self._failure, HandshakeFailure.PROTOCOL
            return None if was_connected else failure
        return None

    def redial(self) -> None:
        """Close the connection of a connecting mailbox, if it has one, and make another one.

        ZMQ does not dial again by itself after an error that it takes for one of the protocol. And a server ignores a
        connection for good if the last one of the same peer is still open there. If a name has addresses of both kinds,
        ZMQ dials IPv6 or IPv4 alone, as the socket says; so they take turns.
        """
        self._lost_at, self._is_connected = time.monotonic(), False
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self._endpoint)
        if self._is_name:
            self._socket.set(zmq.IPV6, not self._socket.get(zmq.IPV6))
        self._connect()

    def _on_refused_key(self, detail: str) -> None:
        self._num_key_refusals += 1
        self._count_refusal(HandshakeFailure.KEY, detail)

    def _count_refusal(self, failure: HandshakeFailure, detail: str) -> None:
        self.refused[failure] += 1
        if self.refused[failure] == 1:
            log.warning("refused a connection (%s): %s; more of this kind are only counted", failure, detail)

    def lost_peers(self, watched: Iterable[str]) -> list[str]:
        """Return the ``watched`` peers whose connections are closed, for bound mailboxes.

        Peers are probed only after a connection has closed. ZMQ reports that a moment before it stops routing to the
        peer, which is longer on a busy machine, so they are probed several times: call this again soon while
        ``is_probing``.
        """
        if self.connection_events().disconnected:
            self._num_probes_left, self._probed_at = NUM_PROBES, 0.0
        now = time.monotonic()
        pause_s = PROBE_EVERY_S * 2 ** (NUM_PROBES - self._num_probes_left - 1)
        if not self._num_probes_left or now < self._probed_at + pause_s:
            return []
        self._num_probes_left, self._probed_at = self._num_probes_left - 1, now
        self._socket.get(zmq.EVENTS)  # makes ZMQ process the commands of its I/O thread; sending alone may not
        header = self._encoder.encode(Header(PROTOCOL_VERSION, self.incarnation, ""))
        return [peer for peer in watched if not self._send(header, _PING, peer)]

    @property
    def is_probing(self) -> bool:
        """Whether a connection closed a moment ago, and ``lost_peers`` may still find the peer."""
        return self._num_probes_left > 0

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        if self._zap is not None:
            self._zap.socket.close()
        self._socket.close()


@functools.lru_cache(4_096)
def _owner_of(identity: bytes) -> tuple[str, int]:
    """The incarnation of the process that has made a connection with this identity, and its number there."""
    owner, _, number = identity.decode("latin-1").rpartition(".")
    is_numbered = owner and len(number) <= MAX_DIGITS and number.isdecimal() and number.isascii()
    return (owner, int(number)) if is_numbered else (identity.decode("latin-1"), 0)


def _bodies(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Bodies of frames that hold these messages in order."""
    joined: list[bytes] = []
    num_bytes = 0
    for message in messages:
        if joined and num_bytes + len(message) > SHARED_BYTES:
            yield _body(joined)
            joined, num_bytes = [], 0
        joined.append(message)
        num_bytes += len(message)
    if joined:
        yield _body(joined)


def _body(messages: list[bytes]) -> bytes:
    """One message as it is, several as a MessagePack array."""
    return messages[0] if len(messages) == 1 else b"".join((b"\xdc", len(messages).to_bytes(2), *messages))


def set_keys(socket: zmq.Socket[bytes], curve: CurveServer | CurveClient) -> None:
    """Make a socket a CURVE server or client, before it binds or connects."""
    socket.set(zmq.CURVE_SECRETKEY, curve.secret)
    if isinstance(curve, CurveServer):
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it, a missing authenticator would permit every key
    else:
        socket.set(zmq.CURVE_PUBLICKEY, public_key(curve.secret))
        socket.set(zmq.CURVE_SERVERKEY, curve.server)
