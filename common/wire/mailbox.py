"""Typed ZMQ sockets: whole, well-formed messages of the right version, from and for the right start, or nothing.

A ``Mailbox`` either binds (many peers, each known by its incarnation) or connects (one peer). Nothing here blocks and
nothing that a stranger sends raises: what cannot be decoded is counted, logged once per reason, and dropped. One that
speaks another version is told so, in its own. A peer whose connection closes is noticed at once: a bound mailbox probes
everyone it is asked to watch, and ZMQ refuses to route to those that are gone.

What waits for a peer that does not read is bounded in bytes: ZMQ counts messages, of which there may be many as long as
they are small; what is large is counted here until ZMQ has let go of it.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.wire.messages import PROTOCOL_VERSION, Header, Message, Ping, Refused

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 << 20
MAX_WAITING = 65_536  # messages to one peer
LARGE_BYTES = 4_096
MAX_LARGE_BYTES = 256 << 20  # of large ones to one peer; of small ones there can be as much
MAX_UNREAD = 256  # messages from one peer that ZMQ reads ahead; what else has been sent waits there
MAX_BATCH_BYTES = 64 << 20  # decoded at once
NUM_PROBES = 6
PROBE_EVERY_S = 0.02
_PING = msgspec.msgpack.encode(Ping())


@dataclass(frozen=True, slots=True)
class Letter:
    """One decoded message and the incarnation that sent it."""

    sender: str
    message: Any


@dataclass(frozen=True, slots=True)
class Link:
    """Changes in connections since the last look (connecting mailboxes; a bound one uses ``lost``)."""

    connected: bool = False
    disconnected: bool = False


class Mailbox:
    """One ZMQ socket and its strict codec.

    Args:
        context: the process's ZMQ context.
        incarnation: of this start of this process; also the routing identity of a connecting mailbox.
        accepts: union of the message types that may arrive here.
        bind / connect: ``tcp://host:port``; exactly one of the two. Port 0 binds any free port, see ``address``.
    """

    def __init__(
        self, context: zmq.Context[Any], incarnation: str, accepts: Any, *, bind: str = "", connect: str = ""
    ) -> None:
        assert bool(bind) != bool(connect)
        self.incarnation = incarnation
        self.dropped: Counter[str] = Counter()
        self.num_bytes_sent = 0  # in messages, as they are encoded
        self._is_bound = bool(bind)
        self._message = msgspec.msgpack.Decoder(accepts)
        self._header = msgspec.msgpack.Decoder(Header)
        self._encoder = msgspec.msgpack.Encoder()
        self._num_probes_left = 0
        self._probed_at = 0.0
        self._large: dict[str, deque[tuple[zmq.MessageTracker, int]]] = {}  # by target, with bytes; what may wait yet
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
        socket.set(zmq.HEARTBEAT_IVL, 5_000)  # finds half-open connections, not slow peers: libzmq's own thread answers
        socket.set(zmq.HEARTBEAT_TIMEOUT, 30_000)
        if is_bound:
            socket.set(zmq.ROUTER_MANDATORY, 1)
        else:
            socket.set(zmq.ROUTING_ID, incarnation.encode())
            socket.set(zmq.RECONNECT_IVL, 50)
            socket.set(zmq.RECONNECT_IVL_MAX, 1_000)

    @property
    def address(self) -> str:
        """The endpoint really bound, ``tcp://host:port``."""
        return str(self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"))

    @property
    def port(self) -> int:
        """The port really bound."""
        return int(self.address.rpartition(":")[2])

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to poll for input: the socket and its monitor."""
        return (self._socket, self._monitor)

    def send(self, message: Message, *, target: str = "") -> bool:
        """Queue one message; never blocks.

        Args:
            target: incarnation of the receiver. A bound mailbox needs it; a connecting one may leave it empty
                before it knows who answers.
        Returns:
            False if that peer is not connected, or has let too much pile up.
        """
        header = self._encoder.encode(Header(PROTOCOL_VERSION, self.incarnation, target))
        return self._send([header, self._encoder.encode(message)], target)

    def _send(self, frames: list[bytes], target: str) -> bool:
        num_bytes = sum(map(len, frames))
        is_large = num_bytes >= LARGE_BYTES
        if is_large and self._num_large_bytes(target) + num_bytes > MAX_LARGE_BYTES:
            return False
        if self._is_bound:
            frames.insert(0, target.encode())
        try:
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=not is_large, track=is_large)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        if tracker is not None:
            self._large.setdefault(target, deque()).append((tracker, num_bytes))
        self.num_bytes_sent += num_bytes
        return True

    def _num_large_bytes(self, target: str) -> int:
        """In large messages to this peer that ZMQ holds."""
        for to, waiting in list(self._large.items()):
            while waiting and waiting[0][0].done:
                waiting.popleft()
            if not waiting:
                del self._large[to]
        return sum(num_bytes for _, num_bytes in self._large.get(target, ()))

    def receive(self, limit: int = 1_000) -> list[Letter]:
        """What has arrived, oldest first: at most ``limit``, and not many bytes more than 64 MiB."""
        letters: list[Letter] = []
        num_bytes = 0
        while len(letters) < limit and num_bytes < MAX_BATCH_BYTES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_bytes += sum(map(len, frames))
            letter = self._decode(frames)
            if letter is not None:
                letters.append(letter)
        return letters

    def _decode(self, frames: list[bytes]) -> Letter | None:
        identity = frames.pop(0) if self._is_bound else None
        if len(frames) != 2:
            return self._drop("frames", f"{len(frames)} frames")
        try:
            header = self._header.decode(frames[0])
            if header.version != PROTOCOL_VERSION:
                if identity == header.sender.encode():
                    self._turn_away(header)
                return self._drop("version", f"protocol {header.version}, ours is {PROTOCOL_VERSION}")
            if identity is not None and header.sender.encode() != identity:
                return self._drop("sender", "sender is not who the connection belongs to")
            if header.target and header.target != self.incarnation:
                return self._drop("target", "meant for an earlier start of this process")
            message = self._message.decode(frames[1])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return self._drop("malformed", str(error))
        return Letter(header.sender, message)

    def _turn_away(self, header: Header) -> None:
        """Tell one who has dialled us, and speaks another version, why nobody listens."""
        reason = (
            f"it speaks version {header.version} of the protocol, and this process version {PROTOCOL_VERSION}: run the "
            f"same release of Baton everywhere"
        )
        answer = self._encoder.encode(Header(header.version, self.incarnation, header.sender))
        self._send([answer, self._encoder.encode(Refused(reason))], header.sender)

    def _drop(self, reason: str, detail: str) -> Letter | None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            log.warning("dropped a message (%s): %s; further ones of this kind are only counted", reason, detail[:200])
        return None

    def link(self) -> Link:
        """Connections made and lost since the last call."""
        connected = disconnected = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            disconnected |= event == zmq.EVENT_DISCONNECTED
        return Link(connected, disconnected)

    def lost(self, watched: Iterable[str]) -> list[str]:
        """Bound mailboxes: which of these peers have gone. Costs nothing unless some connection closed lately.

        ZMQ tells of a closed connection a moment before it stops routing to it, so the peers are probed a few times, a
        little apart; call this again soon while ``is_probing``.
        """
        if self.link().disconnected:
            self._num_probes_left, self._probed_at = NUM_PROBES, 0.0
        now = time.monotonic()
        if not self._num_probes_left or now < self._probed_at + PROBE_EVERY_S:
            return []
        self._num_probes_left, self._probed_at = self._num_probes_left - 1, now
        self._socket.get(zmq.EVENTS)  # lets ZMQ take note of what its I/O thread has done; sending alone may not
        header = self._encoder.encode(Header(PROTOCOL_VERSION, self.incarnation, ""))
        return [peer for peer in watched if not self._send([header, _PING], peer)]

    @property
    def is_probing(self) -> bool:
        """A connection closed lately, and ``lost`` may still find out whose it was."""
        return self._num_probes_left > 0

    def close(self) -> None:
        """Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
