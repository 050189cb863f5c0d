"""The event loop of a node: receive, commit, plan, run, send. One thread, no locks; the role decides everything.

The node registers with every gateway of its directory. Each request belongs to the gateway that sent it. When the
connection to a gateway goes down, its requests end here, or go on for a time if a client may ask for them again.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from msgspec import structs

from common.clock import Clock
from common.config.shared import Role
from common.discovery.gateway_directory import GatewayDirectory
from common.errors import ErrorCode, InvariantError
from common.node.adapters import NodeAdapters
from common.node.departure import Departure, DepartureStep, Remainder
from common.node.endpoint import ControlEndpoint
from common.node.engine_thread import EngineThread
from common.node.gateways.gateway_link import NO_LOAD, GatewayLink
from common.node.gateways.gateway_links import GatewayLinks
from common.node.gateways.request_owners import RequestOwners
from common.node.prefill_mailboxes import PrefillMailboxes
from common.node.role import NodeRole, heartbeat_of
from common.request import RequestKey
from common.scheduling.grammar_queue import CompileGrammar
from common.wire.mailbox import PROBE_EVERY_S, Mailbox
from common.wire.messages import (
    Abort,
    Adapters,
    AdapterUnused,
    ChangeRole,
    Deregister,
    Done,
    Drain,
    EndReason,
    Failed,
    Find,
    Found,
    FromPrefill,
    Generate,
    Heartbeat,
    HeartbeatAck,
    Invite,
    KeptOutput,
    LoadAdapter,
    Message,
    PairState,
    Ping,
    PrefillNodes,
    Refused,
    Register,
    Registered,
    RequestMessage,
    StartProfile,
    StopProfile,
    Unknown,
    UnloadAdapter,
)

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 1.0
MAX_PAIRS = 1_024  # reported to the gateway
#: Seconds between two looks whether a node that leaves its role may go.
DEPARTURE_CHECK_S = 0.1
#: Seconds between two reports to each of several gateways of the load of the others, if it has changed.
LOAD_REPORT_S = 0.05


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a node at one instant.

    Attributes:
        at: the instant, in seconds of the loop's clock.
    """

    at: float
    heartbeat: Heartbeat
    pairs: tuple[PairState, ...]


class EventLoop:
    """Connects a role and an engine with the gateways and the other nodes.

    Args:
        role: decides.
        engine: computes.
        register: makes the message that registers this node.
        gateways: names the gateways to register with.
        orphan_timeout_s: how long requests with a key outlive their gateway.
        max_running: requests that run at once, which several gateways share.
        adapters: the LoRA adapters of this node.

    Attributes:
        next_role: the role in which this node is to go on, once ``run`` has returned; None if it stops.
        turned_at: the instant at which the loop last began a turn, which it does once a second at least.
        snapshots: the latest two, the newest last; one is taken whenever a heartbeat is due. Other threads may read
            these attributes.
    """

    def __init__(
        self,
        role: NodeRole,
        engine: EngineThread,
        *,
        register: Callable[[], Register],
        gateways: GatewayDirectory,
        endpoint: ControlEndpoint,
        clock: Clock,
        orphan_timeout_s: float,
        max_running: int,
        adapters: NodeAdapters,
    ) -> None:
        self._role = role
        self._engine = engine
        self._endpoint = endpoint
        self._listen = endpoint.listen
        self._clock = clock
        self._gateways = gateways
        self._register = register
        self._adapters = adapters
        self._owners = RequestOwners(orphan_timeout_s)
        self._next_heartbeat_at = self._next_load_at = 0.0
        self._is_stopping, self._is_checked, self._num_failed_checks = False, True, 0
        self.turned_at = clock.now()
        self.snapshots: tuple[Snapshot, ...] = ()
        self.next_role: Role | None = None
        self._departure: Departure | None = None
        self._is_empty = False  # nothing is left here, as every gateway knows
        self._drain_s: float | None = None  # a drain that was asked for and has not begun
        self._loss_level = logging.WARNING  # until a signal comes, which often ends all processes of a service
        self._poller = zmq.Poller()
        self._links = GatewayLinks(
            gateways,
            endpoint,
            register=self._describe,
            clock=clock,
            poller=self._poller,
            max_running=max_running,
        )
        self._sources = PrefillMailboxes(endpoint, self._poller)
        for socket in self._listen.sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(engine.fileno(), zmq.POLLIN)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._files: list[int] = []

    @property
    def waits_for(self) -> str:
        """What a node that no gateway has accepted waits for; else empty. Other threads may ask."""
        return self._links.waits_for

    @property
    def is_registered(self) -> bool:
        """Whether a gateway has accepted this node. Other threads may ask."""
        return self._links.is_registered

    @property
    def refused(self) -> str | None:
        """The reason for which the last of all gateways has refused this node; None if one has not."""
        return self._links.refused

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until ``stop`` is called, every gateway refuses this node, or the node leaves its role."""
        more = False
        while not self._is_stopping and self.refused is None and self.next_role is None:
            self._wait(0.0 if more else LONGEST_WAIT_S)
            now = self.turned_at = self._clock.now()
            self._links.follow_directory()
            self._receive(now)
            while (result := self._engine.take()) is not None:
                self._role.commit(result, now)
            for link, answer in self._engine.take_answers():
                if link in self._links:
                    link.send(answer)
            self._compile_grammars(now)
            if self._adapters.has_news:
                self._change_adapters()
            self._start_step(now)
            self._send(now)  # first tokens leave, and the engine computes, before pages are moved
            more = self._role.tick(now)
            self._start_step(now)  # the tick may have ended what the role waited for
            self._flush()
            self._check_when_idle()
            if self._drain_s is not None:
                self._begin_drain(self._drain_s, now)
            if self._departure is not None:
                self._depart(self._departure, now)
            self._links.remind(now)

    def _wait(self, longest_s: float) -> None:
        files = list(self._role.files())
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
        if self._has_load_to_report:
            longest_s = min(longest_s, max(0.0, self._next_load_at - self._clock.now()))
        if self._wake in dict(self._poller.poll(math.ceil(longest_s * 1_000))):
            os.eventfd_read(self._wake)

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

    def _change_adapters(self) -> None:
        """Tell every gateway of the adapters that come, are withdrawn or go, and the one that asked, how that went."""
        in_use = {request.adapter for request in self._role.requests().values()}
        for asker, answer in self._adapters.take(in_use, self._links.connected):
            for link in self._links:
                if link is asker:
                    link.send(answer)
                elif not answer.error:
                    link.send(Adapters(answer.adapters, answer.unloaded))

    def _start_step(self, now: float) -> None:
        """Give the engine its next steps, as far as it has room and there are any."""
        while self._engine.has_room and (plan := self._role.plan(now)) is not None:
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

    def _describe(self) -> Register:
        return structs.replace(self._register(), is_draining=self._departure is not None)

    def _change_role(self, link: GatewayLink, message: ChangeRole, now: float) -> None:
        """Begin to leave the role, or say why not."""
        register = self._register()
        problem = register.fixed_role
        if self._departure is not None:
            problem = f"node {register.name} is draining or changing its role already"
        elif message.role == register.role:
            problem = f"node {register.name} is a {message.role} node already"
        link.send(Done(problem, message.number))
        if not problem:
            log.info("leaving the %s role to become a %s node", register.role, message.role)
            self._departure = Departure(message.role, now + message.timeout_s)
            self._links.send_to_all(Deregister())

    def _begin_drain(self, timeout_s: float, now: float) -> None:
        self._drain_s, num_left = None, len(self._role.requests())
        log.info("draining: stopping once no request is left (now %d), or in %g s", num_left, timeout_s)
        self._departure = Departure(None, now + timeout_s)
        self._links.send_to_all(Deregister())

    def _depart(self, departure: Departure, now: float) -> None:
        """Take the next step of leaving the role."""
        load = self._role.load()
        num_left = load.num_waiting + load.num_running
        is_idle = not (num_left or self._engine.is_busy or self._role.outbox.grammars)
        has_acknowledged = self._links.have_acknowledged
        left = Remainder(is_idle, load.num_quarantined_pages, self.is_registered, has_acknowledged)
        match departure.next_step(left, now):
            case DepartureStep.SAY_EMPTY:
                for link in self._links:
                    link.send(Deregister(is_empty=True))
                    link.expect_ack()
                self._next_heartbeat_at = now
            case DepartureStep.SAY_DRAINING:
                self._links.send_to_all(Deregister())
            case DepartureStep.END_REQUESTS:
                self._role.stop("the node changes its role", now)
                self._flush()
            case DepartureStep.LEAVE:
                self._is_empty = departure.has_said_empty and has_acknowledged
                self.next_role = departure.next_role
                self._is_stopping |= departure.next_role is None
            case DepartureStep.STAY:
                log.error(
                    "keeping the role: %d requests are left, and %d pages that another node may still write to",
                    num_left,
                    load.num_quarantined_pages,
                )
                self._departure = None
                for link in self._links:
                    link.register()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> None:
        """Ask the loop to end once its requests have, or after ``timeout_s``; safe in a signal handler."""
        self._drain_s = timeout_s
        self._loss_level = logging.INFO
        self._wake_up()

    def stop(self) -> None:
        """Ask the loop to end now; safe in a signal handler."""
        self._is_stopping = True
        self._loss_level = logging.INFO
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake >= 0:  # else it is closed: Ctrl-C comes from the terminal and from the supervisor
            os.eventfd_write(self._wake, 1)

    def close(self, reason: str, code: ErrorCode = ErrorCode.SHUTTING_DOWN) -> None:
        """Answer every open request with this code, deregister, and close every socket."""
        self._role.stop(reason, self._clock.now(), code)
        self._flush()
        self._links.send_to_all(Deregister(is_empty=self._is_empty))
        for mailbox in self._mailboxes():
            mailbox.close()
        wake, self._wake = self._wake, -1
        os.close(wake)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        for link in list(self._links):
            if link not in self._links:  # what came over another link has made this node leave it
                continue
            if lost := link.follow(now, self._loss_level):
                self._lose(lost, now)
            for envelope in link.mailbox.receive():
                if link.is_dialling:
                    continue  # it came before the connection broke, from a process that may have ended
                self._on_gateway(link, envelope.sender, envelope.message, now)
                if link not in self._links:
                    break
        self._receive_from_decode_nodes(now)
        self._receive_from_prefill_nodes(now)

    def _on_gateway(self, link: GatewayLink, sender: str, message: Message, now: float) -> None:
        if link.incarnation != sender:
            self._links.leave_duplicates(link, sender)
        if lost := link.heard_from(sender):
            self._lose(lost, now)
        if isinstance(message, RequestMessage):
            self._on_request(sender, message, now)
        elif isinstance(message, Registered):
            self._links.on_registered(link, message)
            self._end_requests(self._owners.reclaim(sender), now, "continued")
            self._next_heartbeat_at = now
            if self._departure is not None:
                self._departure.registered()
                link.send(Deregister())  # the gateway may have dropped one that came while it looked for a namesake
            if self._adapters.has_changed:  # since the registration was sent, perhaps
                link.send(self._adapters.state)
        elif isinstance(message, HeartbeatAck):
            self._links.on_acknowledged(link, message)
        elif isinstance(message, ChangeRole):
            self._change_role(link, message, now)
        elif isinstance(message, Drain):
            link.send(Done(number=message.number))
            self._begin_drain(message.timeout_s, now)
        elif isinstance(message, Unknown):
            self._end_requests(self._owners.reclaim(sender), now, "continued")
            link.register()
        elif isinstance(message, Refused):
            self._end_requests(self._owners.reclaim(sender), now, "continued")
            self._links.on_refused(link, message.reason)
        elif isinstance(message, Find):
            link.send(Found(self._find(message, now), message.number))
        elif isinstance(message, StartProfile | StopProfile):
            self._engine.profile(message, link)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._adapters.begin(link, message)
        elif isinstance(message, AdapterUnused):
            self._adapters.unused(sender, message.adapter)
        elif isinstance(message, PrefillNodes):
            link.on_prefill_nodes(message)
            nodes = self._links.prefill_nodes
            if not nodes and self._departure is None:
                log.info("no gateway has a prefill node; until one comes, only local prefill works (--local-prefill)")
            self._role.on_gateway(PrefillNodes(nodes), now)
        elif not isinstance(message, Ping):
            self._role.on_gateway(message, now)
            outgoing = self._role.outbox.gateway
            link.send(*[answer for answer in outgoing if not isinstance(answer, RequestMessage)])
            outgoing[:] = [message for message in outgoing if isinstance(message, RequestMessage)]

    def _on_request(self, gateway: str, message: RequestMessage, now: float) -> None:
        self._role.on_gateway(message, now)
        if isinstance(message, Generate):
            decode = message.decode
            is_whole = decode is None or decode.incarnation == self._endpoint.incarnation
            self._owners.add(message, gateway, self._role.requests(), is_whole=is_whole)
        elif isinstance(message, Abort):
            self._owners.drop_output((message.rid, message.attempt))

    # ---- requests and the gateways that they belong to --------------------------------------------------------------

    def _lose(self, gateway: str, now: float) -> None:
        """End the requests of a lost gateway, except those that another gateway may continue."""
        self._end_requests(self._owners.lose(gateway, now), now)
        self._links.lost(gateway)

    def _end_requests(self, keys: Sequence[RequestKey], now: float, reason: EndReason = "aborted") -> None:
        """End requests that no gateway wants any more here."""
        for rid, attempt in keys:
            self._role.on_gateway(Abort(rid, attempt, reason), now)

    def _find(self, message: Find, now: float) -> tuple[KeptOutput, ...]:
        """Outputs that another gateway continues. They end here, and the gateway that had them is told."""
        outputs: list[KeptOutput] = []
        for digest in message.keys:
            if (found := self._owners.find(digest)) is None:
                continue
            (rid, attempt), owned = found
            outputs.append(KeptOutput(digest, owned.output, owned.finish))
            if owned.ended_at is None and not owned.finish:
                self._end_requests([(rid, attempt)], now, "continued")
                reason = "another gateway goes on with the request, since its client has asked there again"
                self._role.outbox.gateway.append(Failed(rid, attempt, ErrorCode.TAKEN_OVER, reason))
        return tuple(outputs)

    def _send_to_owners(self, messages: Sequence[Message]) -> None:
        """Send each message to the gateway of its request, and messages about the node to all gateways."""
        only = self._links.only
        if only is not None and not self._owners.has_keys:
            only.send(*messages)
            return
        owned = [(self._owners.owner(one) if isinstance(one, RequestMessage) else None, one) for one in messages]
        for link in self._links:
            if link.is_registered:
                link.send(*[message for owner, message in owned if owner in (link.incarnation, None)])

    def _receive_from_decode_nodes(self, now: float) -> None:
        known = frozenset(self._role.peers())
        for envelope in self._listen.receive(is_known=known.__contains__):
            if isinstance(envelope.message, Invite):
                if self._endpoint.is_gateway(envelope.sender):
                    self._gateways.invited(envelope.message)
            elif not isinstance(envelope.message, Ping):
                self._role.on_peer(envelope.sender, envelope.message, now)
        for peer in self._listen.lost_peers(self._role.peers()):
            # No warning: the gateway knows whether a node has left or was lost, and warns of a loss.
            log.info("decode node %s is gone", self._name_of(peer))
            self._role.peer_lost(peer, now)

    def _name_of(self, peer: str) -> str:
        """Name of a node that pages go to or come from; the end of its incarnation if the role has dropped it."""
        return next((pair.peer for pair in self._role.pairs() if pair.incarnation == peer), peer[-8:])

    def _receive_from_prefill_nodes(self, now: float) -> None:
        for incarnation, message in self._sources.receive():
            self._role.on_peer(incarnation, message, now)
        for incarnation in self._sources.lost():
            log.info("node %s, which sent pages to this node, is gone", self._name_of(incarnation))
            self._role.peer_lost(incarnation, now)

    # ---- sending ----------------------------------------------------------------------------------------------------

    @property
    def _has_load_to_report(self) -> bool:
        """Whether gateways share this node, and it has or had something to do for one."""
        return self._links.is_shared and (
            bool(self._role.requests()) or any(link.other_load != NO_LOAD for link in self._links if link.is_registered)
        )

    def _report_load(self, now: float) -> None:
        """Tell each gateway how much this node has to do for the others."""
        self._next_load_at = now + LOAD_REPORT_S
        requests = self._role.requests()
        for link in self._links:
            if link.is_registered:
                load = self._owners.load_of_others(link.incarnation, requests, link.most_held_tokens)
                link.tell_other_load(load)

    def _send(self, now: float) -> None:
        self._flush()
        if now >= self._next_load_at and self._has_load_to_report:
            self._report_load(now)
        if now < self._next_heartbeat_at:
            return
        self._next_heartbeat_at = now + min((link.heartbeat_s for link in self._links), default=LONGEST_WAIT_S)
        snapshot = Snapshot(now, self._heartbeat(), tuple(self._role.pairs())[:MAX_PAIRS])
        self.snapshots = (*self.snapshots[-1:], snapshot)
        self._end_requests(self._owners.sweep(self._role.requests(), now), now)
        in_flight = self._owners.num_on_node() if self._links.is_shared else {}
        self._links.beat(snapshot.heartbeat, snapshot.pairs, in_flight)

    def _flush(self) -> None:
        outbox = self._role.outbox
        for peer in outbox.dial:
            self._sources.dial(peer)
        outbox.dial.clear()
        for incarnation, message in outbox.peers:
            if isinstance(message, FromPrefill):  # pages go from here to there
                self._listen.send(message, target=incarnation)
            else:
                self._sources.send(incarnation, message)
        outbox.peers.clear()
        if outbox.gateway:
            self._send_to_owners(outbox.gateway)
            outbox.gateway.clear()
        for incarnation in outbox.hang_up:
            self._sources.hang_up(incarnation)
        outbox.hang_up.clear()

    def _heartbeat(self) -> Heartbeat:
        mailboxes, sources = self._mailboxes(), self._sources
        num_dropped = sources.num_dropped + sum(mailbox.dropped.total() for mailbox in mailboxes)
        num_bytes = sources.num_bytes_sent + sum(mailbox.num_bytes_sent for mailbox in mailboxes)
        counters = {
            "refused_connections": float(sum(mailbox.refused.total() for mailbox in mailboxes)),
            "dropped_messages": float(num_dropped),
            "control_bytes_sent": float(num_bytes),
            "failed_checks": float(self._num_failed_checks),
            "busy_seconds": self._engine.steps.seconds.sum,
        }
        gauges = {"orphans": float(self._owners.num_orphans)}
        return heartbeat_of(
            self._role, self._engine.steps.times, counters=counters, gauges=gauges, sent_at=self._clock.now()
        )

    def _mailboxes(self) -> list[Mailbox]:
        return [*self._links.mailboxes(), *self._sources.mailboxes(), self._listen]
