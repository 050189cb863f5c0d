"""The event loop of a node: receive, commit, plan, run, send. One thread, no locks; the role decides everything.

The node dials the gateway until it is stopped. It registers whenever the connection comes up. When the connection goes
down, no answer can be delivered any more, and every request ends here.
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from common.clock import Clock
from common.config.shared import Role as RoleName
from common.errors import ConfigError, InvariantError
from common.node.engine_thread import EngineThread
from common.node.role import Role
from common.reminder import Reminder
from common.scheduling.grammar_queue import CompileGrammar
from common.wire.address import in_url
from common.wire.curve import KEY_BYTES, CurveKeys
from common.wire.mailbox import PROBE_EVERY_S, SILENCE_S, HandshakeFailure, Mailbox
from common.wire.messages import (
    ChangeRole,
    Deregister,
    Done,
    Drain,
    FromDecode,
    FromGateway,
    FromPrefill,
    Heartbeat,
    HeartbeatAck,
    Message,
    Pairs,
    PairState,
    Peer,
    Ping,
    PrefillNodes,
    Refused,
    Register,
    Registered,
    StartProfile,
    StopProfile,
    Unknown,
)

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 1.0
REGISTRATION_S = 10.0  # in which a gateway must have answered a registration; the node then connects again
MAX_PAIRS = 1_024  # reported to the gateway
#: How often a node that leaves its role looks whether it may.
DEPARTURE_CHECK_S = 0.1
#: How long a node that leaves its role waits for the proof that no peer writes into its pages any more.
FENCE_WAIT_S = 10.0
NO_KEY = bytes(KEY_BYTES)  # no process has the secret of this public key
REMEDIES = {
    HandshakeFailure.KEY: "it does not permit the key of this node: give both --keys folders of one baton keygen, with "
    "the node's public key in the folder nodes of the gateway's",
    HandshakeFailure.PROTOCOL: "only one of the two has keys (start both with keys, or both with --insecure), or the "
    "process there is no gateway of this release of Baton",
    HandshakeFailure.CLOSED: "the process there closes the connection, as a gateway with another key does: give both "
    "--keys folders of one baton keygen",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a node at one instant.

    Attributes:
        at: the instant, in seconds of the loop's clock.
    """

    at: float
    heartbeat: Heartbeat
    pairs: tuple[PairState, ...]


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """The control plane's end in this process.

    Attributes:
        context: of all sockets.
        incarnation: drawn at each start of a process, and again for each other role that it takes.
        listen: mailbox on which decode nodes reach this node, to receive pages.
        keys: of this process; None: connections are neither encrypted nor authenticated.
        node_timeout_s: silence after which a connection is closed.
    """

    context: "zmq.Context[zmq.Socket[bytes]]"
    incarnation: str
    listen: Mailbox
    keys: CurveKeys | None = None
    node_timeout_s: float = SILENCE_S

    def close(self) -> None:
        """Close the listening socket and the context; all other sockets must be closed."""
        self.listen.close()
        self.context.term()

    def dial(self, accepts: Any, address: str, server_key: bytes) -> Mailbox:
        """A mailbox connected to ``address``, which accepts only the owner of ``server_key`` as its server."""
        curve = None if self.keys is None else self.keys.client(server_key)
        return Mailbox(
            self.context,
            self.incarnation,
            accepts,
            connect=f"tcp://{address}",
            curve=curve,
            silence_s=self.node_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Departure:
    """An order to leave the role: take no new requests, finish those that are here, and come back in another role.

    Attributes:
        role: None: stop for good.
        until: the instant at which the requests that are left are ended.
    """

    role: RoleName | None
    until: float


class EventLoop:
    """Connects a role and an engine with the gateway and the other nodes.

    Args:
        role: decides.
        engine: computes.
        register: makes the message that registers this node.
        gateway: ``host:port`` of the gateway's control socket.

    Attributes:
        gateway_address: as given.
        refused: the reason for which the gateway has refused this node; None if it has not.
        next_role: the role in which this node is to go on, once ``run`` has returned; None if it stops.
        is_registered, is_dialling: whether the gateway has accepted this node, and whether it is not even connected.
        turned_at: the instant at which the loop last began a turn, which it does once a second at least.
        snapshots: the latest two, the newest last; one is taken whenever a heartbeat is due. Other threads may read
            these attributes.
    """

    def __init__(
        self,
        role: Role,
        engine: EngineThread,
        *,
        register: Callable[[], Register],
        gateway: str,
        endpoint: ControlEndpoint,
        clock: Clock,
    ) -> None:
        self._role = role
        self._engine = engine
        self._register = register
        self._endpoint = endpoint
        self._listen = endpoint.listen
        self._clock = clock
        self._gateway = endpoint.dial(FromGateway, gateway, b"" if endpoint.keys is None else endpoint.keys.gateway)
        self.gateway_address = gateway
        self._connected_at: float | None = None  # to a gateway that has not answered yet
        self._failures: set[HandshakeFailure] = set()  # logged since the last registration
        self._gateway_incarnation = ""
        self._prefill_nodes: dict[str, Mailbox] = {}  # whose pages come here, by incarnation
        self._heartbeat_s = 1.0
        self._next_heartbeat_at = 0.0
        self._heard: tuple[float, float] = (0.0, 0.0)  # when the gateway sent its last instant, and when it came
        self._is_stopping = False
        self._is_checked = True
        self._num_failed_checks = 0
        self._sent_pairs: tuple[PairState, ...] | None = None  # since the last registration
        self._num_dropped = self._num_bytes_sent = 0  # by mailboxes that are closed
        self._reminder = Reminder(clock.now())
        self.is_registered = False
        self.is_dialling = True
        self.turned_at = clock.now()
        self.snapshots: tuple[Snapshot, ...] = ()
        self.refused: str | None = None
        self.next_role: RoleName | None = None
        self._departure: Departure | None = None
        self._drain_s: float | None = None  # a drain that was asked for and has not begun
        self._num_heartbeats = 0  # sent since the last registration
        self._num_acks = 0
        self._num_acks_due: int | None = None  # for a departure: that of a heartbeat sent while the role was empty
        self._poller = zmq.Poller()
        self._watch(self._gateway)
        self._watch(self._listen)
        self._poller.register(engine.fileno(), zmq.POLLIN)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._files: list[int] = []

    def _watch(self, mailbox: Mailbox) -> None:
        for socket in mailbox.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _unwatch(self, mailbox: Mailbox) -> None:
        for socket in mailbox.sockets:
            self._poller.unregister(socket)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until ``stop`` is called, the gateway refuses this node, or the node leaves its role."""
        more = False
        while not self._is_stopping and self.refused is None and self.next_role is None:
            self._wait(0.0 if more else LONGEST_WAIT_S)
            now = self.turned_at = self._clock.now()
            self._receive(now)
            result = self._engine.take()
            if result is not None:
                self._role.commit(result, now)
            for answer in self._engine.take_answers():
                self._gateway.send(answer, target=self._gateway_incarnation)
            self._compile_grammars(now)
            self._start_step(now)
            self._send(now)  # first tokens leave, and the engine computes, before pages are moved
            more = self._role.tick(now)
            self._start_step(now)  # the tick may have ended what the role waited for
            self._flush()
            self._check_when_idle()
            if self._drain_s is not None:
                self._begin_drain(self._drain_s, now)
            self._depart_when_empty(now)
            if not self.is_registered and self._reminder.is_due(now):
                self._log_waiting()

    def _log_waiting(self) -> None:
        where = self.gateway_address
        if self.is_dialling:
            log.info("still waiting for the gateway at %s; start one, or name another with --gateway HOST:PORT", where)
        else:
            log.info("still waiting for the gateway at %s to answer: it is connected, and has not registered us", where)

    def _compile_grammars(self, now: float) -> None:
        """Begin to compile what the role needs, and tell it what is ready; a known grammar is ready at once."""
        grammars = self._role.outbox.grammars
        for effect in grammars:
            if isinstance(effect, CompileGrammar):
                self._engine.compile_grammar(effect.grammar)
            else:
                self._engine.drop_grammar(effect.grammar)
        grammars.clear()
        for grammar, error in self._engine.take_grammars():
            if error:
                self._role.grammar_failed(grammar, error, now)
            else:
                self._role.grammar_compiled(grammar, now)

    def _start_step(self, now: float) -> None:
        """Give an idle engine its next step, if there is one."""
        if not self._engine.is_busy:
            plan = self._role.plan(now)
            if plan is not None:
                self._engine.submit(plan)

    def _check_when_idle(self) -> None:
        """Check the role once after each period of work: a leak shows here, long before the pool is empty."""
        if self._engine.is_busy:
            self._is_checked = False
        elif not self._is_checked and self._role.load().num_running == 0:
            self._is_checked = True
            try:
                self._role.check()
            except InvariantError:
                self._num_failed_checks += 1
                log.exception("the state of this node is inconsistent; please report this")

    # ---- leaving a role ---------------------------------------------------------------------------------------------

    def _change_role(self, message: ChangeRole, now: float) -> None:
        """Begin to leave the role, or say why not."""
        register = self._register()
        problem = register.fixed_role
        if self._departure is not None:
            problem = f"node {register.name} is changing its role already"
        elif message.role == register.role:
            problem = f"node {register.name} is a {message.role} node already"
        self._gateway.send(Done(problem, message.number), target=self._gateway_incarnation)
        if not problem:
            log.info("leaving the %s role to become a %s node", register.role, message.role)
            self._departure = Departure(message.role, now + message.timeout_s)
            self._gateway.send(Deregister(), target=self._gateway_incarnation)

    def _begin_drain(self, timeout_s: float, now: float) -> None:
        self._drain_s = None
        load = self._role.load()
        num_left = load.num_waiting + load.num_running
        log.info("draining: taking no new requests, and stopping in %g s or when %d have ended", timeout_s, num_left)
        self._departure = Departure(None, now + timeout_s)
        self._gateway.send(Deregister(), target=self._gateway_incarnation)

    def _depart_when_empty(self, now: float) -> None:
        """Leave the role when nothing is left, here or on its way between the gateway and this node.

        The gateway acknowledges a heartbeat after it has handled all earlier messages of this node, ``Deregister``
        included; every request that it has sent before arrives before the acknowledgement.
        """
        departure = self._departure
        if departure is None:
            return
        if departure.role is None and (now >= departure.until or not self.is_registered):
            self._is_stopping = True  # without a gateway, no answer can be delivered and no request can move
            return
        load, outbox = self._role.load(), self._role.outbox
        is_idle = not (load.num_waiting or load.num_running or self._engine.is_busy or outbox.grammars)
        if is_idle and (departure.role is None or not load.num_quarantined_pages):
            if self._num_acks_due is None:
                self._gateway.send(Deregister(is_empty=True), target=self._gateway_incarnation)
                self._num_acks_due = self._num_heartbeats + 1
                self._next_heartbeat_at = now
            if not self.is_registered or self._num_acks >= self._num_acks_due:
                self.next_role = departure.role
                self._is_stopping |= departure.role is None
            return
        if self._num_acks_due is not None:
            self._gateway.send(Deregister(), target=self._gateway_incarnation)
            self._num_acks_due = None
        if departure.role is not None and now >= departure.until + FENCE_WAIT_S:
            log.error(
                "the role is kept: %d requests and %d pages into which another node may still write are left",
                load.num_waiting + load.num_running,
                load.num_quarantined_pages,
            )
            self._departure = None
            self._gateway.send(self._register())
        elif now >= departure.until:
            self._role.stop("the node changes its role", now)
            self._flush()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> None:
        """Ask the loop to end once its requests have, or after ``timeout_s``; safe in a signal handler."""
        self._drain_s = timeout_s
        self._wake_up()

    def stop(self) -> None:
        """Ask the loop to end now; safe in a signal handler."""
        self._is_stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake >= 0:  # else it is closed: Ctrl-C comes from the terminal and from the supervisor
            os.eventfd_write(self._wake, 1)

    def close(self, reason: str) -> None:
        """Answer every open request, deregister, and close every socket."""
        self._role.stop(reason, self._clock.now())
        self._flush()
        self._gateway.send(Deregister(is_empty=self.next_role is not None), target=self._gateway_incarnation)
        for mailbox in self._mailboxes():
            mailbox.close()
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _wait(self, longest_s: float) -> None:
        files = [int(file) for file in self._role.files()]
        for file in self._files:
            if file not in files:
                self._poller.unregister(file)
        for file in files:
            if file not in self._files:
                self._poller.register(file, zmq.POLLIN)
        self._files = files
        longest_s = min(longest_s, max(0.0, self._next_heartbeat_at - self._clock.now()))
        if self._listen.is_probing:
            longest_s = min(longest_s, PROBE_EVERY_S)
        if self._departure is not None:
            longest_s = min(longest_s, DEPARTURE_CHECK_S)
        self._poller.poll(math.ceil(longest_s * 1_000))

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        events = self._gateway.connection_events()
        if events.failure is not None:
            self._report_failure(events.failure)
        if events.disconnected:
            if events.failure is None:
                log.warning("the gateway is gone; ending its requests and dialling it again")
            self.is_registered, self.is_dialling = False, True
            self._reminder = Reminder(now)
            self._gateway_incarnation = ""
            self._role.gateway_lost(now)
            self._connected_at = None
        if events.connected:
            self._connected_at = now
            self.is_dialling = False
            self._gateway.send(self._register())
        elif self._connected_at is not None and now - self._connected_at > REGISTRATION_S:
            self._connected_at = None
            self._gateway.redial()
        for letter in self._gateway.receive():
            self._on_gateway(letter.sender, letter.message, now)
        self._receive_from_decode_nodes(now)
        for incarnation in list(self._prefill_nodes):
            self._receive_from_prefill_node(incarnation, now)

    def _report_failure(self, failure: HandshakeFailure) -> None:
        """Log why the gateway cannot be reached: each cause once, since an attacker on the path can forge it."""
        if failure not in self._failures:
            self._failures.add(failure)
            log.error("cannot connect to --gateway %s: %s; trying again", self.gateway_address, REMEDIES[failure])

    def _on_gateway(self, sender: str, message: Message, now: float) -> None:
        if sender != self._gateway_incarnation and self._gateway_incarnation:
            self._role.gateway_lost(now)  # another process has taken over the address of the first one
        self._gateway_incarnation = sender
        self._connected_at = None
        if isinstance(message, Registered):
            self._failures.clear()
            if not self.is_registered:
                log.info("registered with the gateway (start %d)", message.starts)
            self.is_registered = True
            self._sent_pairs = None
            self._heartbeat_s = message.heartbeat_s
            self._next_heartbeat_at = now
            self._num_heartbeats = self._num_acks = 0
            if self._departure is not None:
                self._num_acks_due = None
                self._gateway.send(Deregister(), target=self._gateway_incarnation)
            self._heard = (message.sent_at, self._clock.now())  # ``now`` may be earlier than it was sent
        elif isinstance(message, HeartbeatAck):
            self._heard = (message.sent_at, self._clock.now())  # likewise
            self._num_acks += 1
        elif isinstance(message, ChangeRole):
            self._change_role(message, now)
        elif isinstance(message, Drain):
            self._gateway.send(Done(number=message.number), target=self._gateway_incarnation)
            self._begin_drain(message.timeout_s, now)
        elif isinstance(message, Unknown):
            self._role.gateway_lost(now)
            self._gateway.send(self._register())
        elif isinstance(message, Refused):
            self.refused = message.reason
        elif isinstance(message, StartProfile | StopProfile):
            self._engine.profile(message)
        elif isinstance(message, PrefillNodes) and not message.nodes:
            log.info("the gateway has no prefill node yet; until one comes, only local prefill works (--local-prefill)")
            self._role.on_gateway(message, now)
        elif not isinstance(message, Ping):
            self._role.on_gateway(message, now)

    def _receive_from_decode_nodes(self, now: float) -> None:
        for letter in self._listen.receive():
            if not isinstance(letter.message, Ping):
                self._role.on_peer(letter.sender, letter.message, now)
        for peer in self._listen.lost_peers(self._role.peers()):
            log.warning("decode node %s is gone", peer[:8])
            self._role.peer_lost(peer, now)

    def _receive_from_prefill_node(self, incarnation: str, now: float) -> None:
        mailbox = self._prefill_nodes[incarnation]
        for letter in mailbox.receive():
            if letter.sender == incarnation and not isinstance(letter.message, Ping):
                self._role.on_peer(incarnation, letter.message, now)
        if mailbox.connection_events().disconnected:
            log.warning("node %s is gone, from which pages came", incarnation[:8])
            self._role.peer_lost(incarnation, now)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        self._flush()
        if now < self._next_heartbeat_at:
            return
        self._next_heartbeat_at = now + self._heartbeat_s
        snapshot = Snapshot(now, self._heartbeat(), tuple(self._role.pairs())[:MAX_PAIRS])
        self.snapshots = (*self.snapshots[-1:], snapshot)
        if self.is_registered:
            self._num_heartbeats += 1
            self._gateway.send(snapshot.heartbeat, target=self._gateway_incarnation)
            self._send_pairs(snapshot.pairs)

    def _send_pairs(self, pairs: tuple[PairState, ...]) -> None:
        if pairs != self._sent_pairs:
            self._sent_pairs = pairs
            self._gateway.send(Pairs(pairs), target=self._gateway_incarnation)

    def _flush(self) -> None:
        outbox = self._role.outbox
        for peer in outbox.dial:
            self._dial(peer)
        outbox.dial.clear()
        for incarnation, message in outbox.peers:
            is_ours = isinstance(message, FromPrefill)  # pages go from here to there
            mailbox = self._listen if is_ours else self._prefill_nodes.get(incarnation)
            if mailbox is not None:
                mailbox.send(message, target=incarnation)
        outbox.peers.clear()
        if outbox.gateway:
            self._gateway.send(*outbox.gateway, target=self._gateway_incarnation)
            outbox.gateway.clear()
        for incarnation in outbox.hang_up:
            self._hang_up(incarnation)
        outbox.hang_up.clear()

    def _dial(self, peer: Peer) -> None:
        self._hang_up(peer.incarnation)
        mailbox = self._endpoint.dial(FromPrefill, peer.address, bytes.fromhex(peer.public_key) or NO_KEY)
        self._prefill_nodes[peer.incarnation] = mailbox
        self._watch(mailbox)

    def _hang_up(self, incarnation: str) -> None:
        mailbox = self._prefill_nodes.pop(incarnation, None)
        if mailbox is not None:
            self._unwatch(mailbox)
            self._num_dropped += mailbox.dropped.total()
            self._num_bytes_sent += mailbox.num_bytes_sent
            mailbox.close()

    def _heartbeat(self) -> Heartbeat:
        load = self._role.load()
        (gateway_sent_at, received_at), self._heard = self._heard, (0.0, 0.0)
        return Heartbeat(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_free_pages=load.num_free_pages,
            num_cached_pages=load.num_cached_pages,
            num_quarantined_pages=load.num_quarantined_pages,
            counters={
                **self._role.counters(),
                "refused_connections": float(sum(m.refused.total() for m in self._mailboxes())),
                "dropped_messages": float(self._num_dropped + sum(m.dropped.total() for m in self._mailboxes())),
                "control_bytes_sent": float(
                    self._num_bytes_sent + sum(mailbox.num_bytes_sent for mailbox in self._mailboxes())
                ),
                "failed_checks": float(self._num_failed_checks),
                "busy_seconds": self._engine.steps.seconds.sum,
            },
            gauges=self._role.gauges(),
            gateway_sent_at=gateway_sent_at,
            received_at=received_at,
            sent_at=self._clock.now(),
        )

    def _mailboxes(self) -> list[Mailbox]:
        return [self._gateway, *self._prefill_nodes.values(), self._listen]


def listen_mailbox(
    context: "zmq.Context[zmq.Socket[bytes]]",
    incarnation: str,
    host: str,
    port: int,
    *,
    keys: CurveKeys | None,
    silence_s: float = SILENCE_S,
) -> Mailbox:
    """The socket on which decode nodes reach this node, to receive pages; port 0 takes any free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        curve = None if keys is None else keys.server
        bind = f"tcp://{in_url(host)}:{port}"
        return Mailbox(context, incarnation, FromDecode, bind=bind, curve=curve, silence_s=silence_s)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot bind --advertise-host {host} --data-port {port}: {error.strerror or error}"
        ) from error
