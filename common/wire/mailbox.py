"""ZMQ sockets that send and receive typed messages, and drop anything malformed or meant for another process start.

A ``Mailbox`` either binds (many peers, each identified by its incarnation) or connects (one peer). No call blocks, and
no input raises: a frame that cannot be decoded is counted, logged once per reason and dropped. A peer with another
protocol version is refused in its own version. A closed connection is noticed at once: a bound mailbox probes the peers
that it watches, and ZMQ cannot route to closed ones.

Messages to one peer that are due together share frames, since a frame costs more than the messages in it.

The memory of messages that a peer does not read is bounded. ZMQ bounds the number of frames, which suffices for small
ones; the bytes of large ones are counted here until ZMQ has sent them.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import zmq
from msgspec import Meta
from zmq.utils.monitor import recv_monitor_message

from common.wire.messages import PROTOCOL_VERSION, Header, Message, Ping, Refused

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 << 20
MAX_WAITING = 65_536  # unsent messages to one peer
LARGE_BYTES = 4_096
MAX_LARGE_BYTES = 256 << 20  # unsent bytes of large messages to one peer; small ones can take as much
MAX_UNREAD = 256  # messages from one peer that ZMQ reads ahead; others wait at the sender
MAX_BATCH_BYTES = 64 << 20  # decoded in one call of receive
SHARED_BYTES = 3_072  # of messages that share a frame, which is then not large
MAX_MESSAGES = 1_024  # in one frame
MAX_HEADERS = 4_096  # kept encoded
NUM_PROBES = 6
PROBE_EVERY_S = 0.02
_PING = msgspec.msgpack.encode(Ping())
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # operators of enumerations are slow


class Envelope(NamedTuple):
    sender: str
    message: Any


class ConnectionEvents(NamedTuple):
    connected: bool
    disconnected: bool


class Mailbox:
    """A ZMQ socket with a strict codec.

    Args:
        incarnation: incarnation of this process, and the routing identity of a connecting mailbox.
        accepts: union of the message types to accept.
        bind, connect: ``tcp://host:port``; exactly one of the two. Port 0 binds a free port, see ``address``.
    Raises:
        zmq.ZMQError: the address cannot be bound or is malformed.
    """

    def __init__(
        self, context: zmq.Context[Any], incarnation: str, accepts: Any, *, bind: str = "", connect: str = ""
    ) -> None:
        assert bool(bind) != bool(connect)
        self.incarnation = incarnation
        self.dropped: Counter[str] = Counter()
        self.num_bytes_sent = 0  # of encoded messages
        self._is_bound = bool(bind)
        self._messages = msgspec.msgpack.Decoder(accepts | Annotated[list[accepts], Meta(max_length=MAX_MESSAGES)])
        self._header = msgspec.msgpack.Decoder(Header)
        self._encoder = msgspec.msgpack.Encoder()
        self._headers: dict[str, bytes] = {}  # encoded, by target
        self._num_probes_left = 0
        self._probed_at = 0.0
        self._large: dict[str, deque[tuple[zmq.MessageTracker, int]]] = {}  # unsent messages and bytes, by target
        self._socket = context.socket(zmq.ROUTER if bind else zmq.DEALER)
        self._configure(self._socket, incarnation, is_bound=self._is_bound)
        events = zmq.EVENT_DISCONNECTED | (0 if bind else zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._monitor = self._socket.get_monitor_socket(events)
        try:
            if bind:
                self._socket.bind(bind)
            else:
                self._socket.connect(connect)
        except zmq.ZMQError:
            self.close()
            raise

    @staticmethod
    def _configure(socket: zmq.Socket[bytes], incarnation: str, *, is_bound: bool) -> None:
        socket.set(zmq.LINGER, 200)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.SNDHWM, MAX_WAITING)
        socket.set(zmq.RCVHWM, MAX_UNREAD)
        socket.copy_threshold = LARGE_BYTES
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.HEARTBEAT_IVL, 5_000)  # finds half-open connections; slow peers pass, since libzmq answers
        socket.set(zmq.HEARTBEAT_TIMEOUT, 30_000)
        if is_bound:
            socket.set(zmq.ROUTER_MANDATORY, 1)
        else:
            socket.set(zmq.ROUTING_ID, incarnation.encode())
            socket.set(zmq.RECONNECT_IVL, 50)
            socket.set(zmq.RECONNECT_IVL_MAX, 1_000)

    @property
    def address(self) -> str:
        return str(self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"))

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll for input: the socket and its monitor."""
        return (self._socket, self._monitor)

    def send(self, *messages: Message, target: str = "") -> bool:
        """Queue messages, in order; never blocks.

        Args:
            target: incarnation of the receiver; a connecting mailbox may leave it empty.
        Returns:
            False if the peer is not connected, or too much is unsent.
        """
        return self.send_encoded([self._encoder.encode(message) for message in messages], target)

    def encode(self, message: Message) -> bytes:
        """The bytes of a message for ``send_encoded``, for one that several peers get."""
        return self._encoder.encode(message)

    def send_encoded(self, messages: Iterable[bytes], target: str) -> bool:
        """As ``send``."""
        header = self._headers.get(target)
        if header is None:
            if len(self._headers) >= MAX_HEADERS:
                self._headers.clear()
            header = self._headers[target] = self._encoder.encode(Header(PROTOCOL_VERSION, self.incarnation, target))
        return all(self._send(header, body, target) for body in _bodies(messages))

    def _send(self, header: bytes, body: bytes, target: str) -> bool:
        num_bytes = len(header) + len(body)
        is_large = num_bytes >= LARGE_BYTES
        if is_large and self._num_large_bytes(target) + num_bytes > MAX_LARGE_BYTES:
            return False
        socket = self._socket
        try:
            if self._is_bound:
                socket.send(target.encode(), _SNDMORE)
            socket.send(header, _SNDMORE)
            tracker = socket.send(body, _NOBLOCK, copy=not is_large, track=is_large)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
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

    def receive(self, limit: int = 1_000) -> list[Envelope]:
        """Return arrived messages, oldest first: about ``limit`` at most, and about 64 MiB."""
        envelopes: list[Envelope] = []
        num_bytes = 0
        while len(envelopes) < limit and num_bytes < MAX_BATCH_BYTES:
            try:
                frames = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                break
            num_bytes += len(frames[-1])
            envelopes += self._decode(frames)
        return envelopes

    def _decode(self, frames: list[bytes]) -> list[Envelope]:
        identity = frames.pop(0) if self._is_bound else None
        if len(frames) != 2:
            return self._drop("frames", f"{len(frames)} frames")
        try:
            header = self._header.decode(frames[0])
            if header.version != PROTOCOL_VERSION:
                if identity == header.sender.encode():
                    self._refuse_version(header)
                return self._drop("version", f"protocol {header.version}, ours is {PROTOCOL_VERSION}")
            if identity is not None and header.sender.encode() != identity:
                return self._drop("sender", "the sender is not the owner of the connection")
            if header.target and header.target != self.incarnation:
                return self._drop("target", "meant for an earlier start of this process")
            messages = self._messages.decode(frames[1])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return self._drop("malformed", str(error))
        if not isinstance(messages, list):
            return [Envelope(header.sender, messages)]
        return [Envelope(header.sender, message) for message in messages]

    def _refuse_version(self, header: Header) -> None:
        """Send ``Refused`` in the version of a peer that has connected with another one."""
        reason = (
            f"it speaks version {header.version} of the protocol, and this process version {PROTOCOL_VERSION}: run the "
            f"same release of Baton everywhere"
        )
        answer = self._encoder.encode(Header(header.version, self.incarnation, header.sender))
        self._send(answer, self._encoder.encode(Refused(reason)), header.sender)

    def _drop(self, reason: str, detail: str) -> list[Envelope]:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            log.warning("dropped a message (%s): %s; more of this kind are only counted", reason, detail[:200])
        return []

    def connection_events(self) -> ConnectionEvents:
        """Return the connections made and closed since the last call, for connecting mailboxes."""
        connected = disconnected = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            disconnected |= event == zmq.EVENT_DISCONNECTED
        return ConnectionEvents(connected, disconnected)

    def lost_peers(self, watched: Iterable[str]) -> list[str]:
        """Return the ``watched`` peers whose connections are closed, for bound mailboxes.

        Peers are probed only after a connection has closed. ZMQ reports that a moment before it stops routing to the
        peer, so they are probed several times: call this again soon while ``is_probing``.
        """
        if self.connection_events().disconnected:
            self._num_probes_left, self._probed_at = NUM_PROBES, 0.0
        now = time.monotonic()
        if not self._num_probes_left or now < self._probed_at + PROBE_EVERY_S:
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
        self._socket.close()


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
