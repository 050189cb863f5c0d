"""The requests that are under way: who waits, to whom each was sent, and the one way by which it leaves.

Requests go out as long as the nodes have room; the rest waits in the backlog of its model, and is sent out, in order,
as others end. The pair is chosen then. Every output is in one table from its arrival to its end, and it leaves by one
way, ``ended``: at its last token, a stop string, a node's failure or loss, its deadline, or because the client has
gone. Whichever it is, the nodes that may still work on it are told at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Protocol

from common.clock import Clock
from common.decision_log import Decisions
from common.errors import ErrorCode, RequestError
from common.request import Request
from common.wire.messages import Abort, Failed, Generate, Message, Peer, Reprioritize, Tokens
from gateway.requests.forecast import seconds_until
from gateway.requests.in_flight import InFlightRequest, Timer, request_of
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool, WorkerPools
from gateway.workers.registry import Node
from gateway.workers.router import Pair

#: Outputs, and tokens of their prompts, that are sent out before others have their turn.
SENT_AT_ONCE, TOKENS_AT_ONCE = 64, 1 << 17

#: How a decision to send is told, by the number of nodes.
SENT = {1: "to {1.name} alone, {0:.3f} s after it came", 2: "to {1.name} and {2.name}, {0:.3f} s after it came"}


class NodeChannel(Protocol):
    """What the table of requests needs of the control plane around it."""

    def send(self, message: Message, incarnation: str) -> bool:
        """False if the node cannot be reached."""
        ...

    def lose(self, incarnation: str) -> None:
        """The node could not be reached: ``Dispatcher.lost`` is called before this returns."""
        ...

    def call_later(self, delay_s: float, act: Callable[[str], None], rid: str) -> Timer: ...

    def call_soon(self, act: Callable[[], None]) -> object: ...


class Dispatcher:
    """The table.

    Args:
        fleets: the pure parts of each model.
        post: how nodes are reached.
        on_start, on_end: told of every output that is sent out, with its pair, and of its end.
        first_attempt: outputs are numbered from here on as they are sent out. Clients may use an id again, and nodes
            remember for a while what has ended: the number, random at the start of a gateway, keeps them apart.
    """

    def __init__(
        self,
        fleets: WorkerPools,
        post: NodeChannel,
        clock: Clock,
        *,
        on_start: Callable[[OutputStream, Pair], None],
        on_end: Callable[[OutputStream], None],
        first_attempt: int = 0,
    ) -> None:
        self._fleets = fleets
        self._post = post
        self._clock = clock
        self._on_start = on_start
        self._on_end = on_end
        self.decisions = Decisions()
        self._legs: dict[str, InFlightRequest] = {}
        self._is_shut = False
        self._is_pump_due = False
        self._attempts = count(first_attempt)
        for fleet in fleets:
            fleet.admission.forecast = partial(self._seconds_until, fleet)

    @property
    def num_in_flight(self) -> int:
        return len(self._legs)

    # ---- in -------------------------------------------------------------------------------------------------------

    def dispatch(self, relays: Sequence[OutputStream]) -> None:
        """Takes the outputs of one request, all or none; the samples of a prompt go to one pair.

        Raises:
            RequestError: an id is in use, too many are in flight, or no nodes are there.
        """
        if self._is_shut:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        for relay in relays:
            if relay.ask.rid in self._legs:
                message = f"rid: a request with the id {relay.ask.rid!r} is in flight"
                raise RequestError(ErrorCode.INVALID_REQUEST, message, param="rid")
        fleet = self._fleets[relays[0].ask.model]
        now = self._clock.now()
        self._admit(fleet, relays, now)
        siblings: dict[int, Pair] = {}
        legs = []
        for relay in relays:
            left_s = max(relay.ask.timeout_s - (now - relay.started_at), 0.001)
            timer = self._post.call_later(left_s, self._on_deadline, relay.ask.rid)
            leg = self._legs[relay.ask.rid] = InFlightRequest(relay, fleet, timer, siblings)
            legs.append(leg)
        credit = max(fleet.credit(), 0) if fleet.backlog.is_idle else 0
        turn = min(credit, _num_in_turn(relay.ask.prompt for relay in relays))
        for leg in legs[turn:credit]:
            self._enqueue(leg)
        for leg in legs[credit:]:
            self._wait(leg, now)
        if turn < credit:
            self.pump_soon()
        for leg in legs[:turn]:
            if fleet.backlog.order.is_charging:
                self._enqueue(leg)  # for no time at all, but its order must know of everybody
            if not leg.relay.is_ended and not self._send_out(leg, now):
                message = "no nodes with a large enough pool are there at present"
                leg.relay.fail(RequestError(ErrorCode.NO_ROUTE, message), now)

    def _admit(self, fleet: WorkerPool, relays: Sequence[OutputStream], now: float) -> None:
        """Counts a request's outputs in. If that is too many, requests that stand lower give way, or it is refused."""
        max_running = fleet.limits().max_running
        excess = fleet.admission.excess(len(relays), max_running)
        if excess > 0:
            for leg in self._outranked(fleet, request_of(relays[0]), excess):
                self._evict(leg, relays[0], now)
        try:
            fleet.admission.admit(len(relays), max_running=max_running, now=now)
        except RequestError as error:
            self.decisions.note(now, relays[0].ask.rid, "refuse", "{}", error.message)
            raise

    def _outranked(self, fleet: WorkerPool, request: Request, count: int) -> list[InFlightRequest]:
        """Who gives way to a newcomer: those who wait here or, if nobody does, for their first token from a node."""
        backlog = fleet.backlog
        sent: list[Request] = []
        if backlog.is_idle and backlog.order.rules.is_enabled:
            legs = [leg for leg in self._legs.values() if leg.fleet is fleet and leg.pair and not leg.relay.ids]
            sent = [request_of(leg.relay) for leg in legs]
        return [self._legs[victim.rid] for victim in backlog.outranked(request, count, sent=sent)]

    def _seconds_until(self, fleet: WorkerPool, count: int) -> float:
        return seconds_until(count, (leg.relay for leg in self._legs.values() if leg.fleet is fleet))

    def _evict(self, leg: InFlightRequest, other: OutputStream, now: float) -> None:
        reason = "a more urgent one has taken its place in a full queue"
        self.decisions.note(now, leg.relay.ask.rid, "evict", "{} came: " + reason, other.ask.rid)
        leg.is_evicted = True
        retry_after_s = leg.fleet.admission.retry_after(1, now)
        message = f"the request waited, and {reason}"
        leg.relay.fail(RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=retry_after_s), now)

    def _wait(self, leg: InFlightRequest, now: float) -> None:
        rid, backlog = leg.relay.ask.rid, leg.fleet.backlog
        self.decisions.note(now, rid, "wait", "the nodes are full, {} wait already", len(backlog))
        self._enqueue(leg)

    @staticmethod
    def _enqueue(leg: InFlightRequest) -> None:
        leg.request = request_of(leg.relay)
        leg.fleet.backlog.push(leg.request)

    # ---- out ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Sends out whoever's turn it is, as far as the nodes have room."""
        self._is_pump_due = False
        now = self._clock.now()
        for fleet in self._fleets:
            if not fleet.backlog.is_idle and (credit := fleet.credit()) > 0:
                line = self._first(fleet, credit, now)
                turn = _num_in_turn(request.prompt for request in line)
                for request in line[:turn]:
                    leg = self._legs.get(request.rid)
                    if leg is None or leg.request is not request:
                        continue  # it ended just now, with a node that was found to be gone
                    if not self._send_out(leg, now):
                        fleet.backlog.strand(request, now)
                        self.decisions.note(now, request.rid, "strand", "no pool that is there could hold it")
                if not fleet.backlog.is_idle and fleet.credit() > 0:
                    self.pump_soon()

    def _first(self, fleet: WorkerPool, count: int, now: float) -> Sequence[Request]:
        """Who is next; tells of another policy if ``adaptive`` has chosen one."""
        backlog = fleet.backlog
        before = backlog.policy
        line = backlog.first(count, now)
        if backlog.policy != before:
            self.decisions.note(
                now, "", "adapt", "from {} to {}: {}", before, backlog.policy, backlog.order.policy.reason
            )
        return line

    def pump_soon(self) -> None:
        """Once what happens now is over, since many may end at once."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._post.call_soon(self.pump)

    def nodes_came(self, fleet: WorkerPool) -> None:
        """A node registered: there is more room, and perhaps a pool for those that had none."""
        fleet.backlog.nodes_came()
        self.pump_soon()

    def tick(self, now: float) -> None:
        """Ends those who have waited long enough for nodes that did not come."""
        for fleet in self._fleets:
            if len(fleet.backlog):
                for request in fleet.backlog.hopeless(now, is_routable=fleet.registry.is_ready):
                    message = "the nodes that it takes are gone, and no others came while the request waited"
                    self._fail(request.rid, RequestError(ErrorCode.NO_ROUTE, message))

    def _send_out(self, leg: InFlightRequest, now: float) -> bool:
        """To a pair chosen now. False if no pool is large enough."""
        relay, fleet, ask = leg.relay, leg.fleet, leg.relay.ask
        pair = fleet.choose(ask, siblings=leg.siblings.get(ask.prompt_number))
        if pair is None:
            return False
        if leg.request is not None:
            fleet.backlog.remove(leg.request)
            num_input = len(ask.prompt) if pair.prefill is None else pair.num_compute
            fleet.backlog.order.admitted(leg.request, num_input=num_input)
        leg.siblings[ask.prompt_number] = leg.pair = pair
        leg.nodes = pair.nodes
        leg.attempt = next(self._attempts)
        leg.is_prefill_counted = True
        relay.sent_at = now
        waited_s = max(now - relay.started_at, 0.0)
        nodes = [fleet.registry.nodes[incarnation] for incarnation in pair.nodes]
        self.decisions.note(now, ask.rid, "send", SENT[len(nodes)], waited_s, *nodes)
        self._on_start(relay, pair)
        generate = Generate(
            rid=ask.rid,
            attempt=leg.attempt,
            prompt=ask.prompt,
            sampling=ask.sampling,
            prefill=None if pair.prefill is None else _peer(nodes[0]),
            decode=_peer(nodes[-1]),
            timeout_s=max(ask.timeout_s - waited_s, 0.001),
            cache_salt=ask.salt,
            priority=ask.priority,
            priority_class=ask.priority_class,
            tenant=ask.tenant,
            expected_output=ask.expected_output,
            waited_s=waited_s,
        )
        for incarnation in pair.nodes:
            if not self._post.send(generate, incarnation):
                self._post.lose(incarnation)  # ends this request with the others of that node
                break
        return True

    # ---- another priority -----------------------------------------------------------------------------------------

    def reprioritize(self, request_id: str, tenant: str, priority: int | None, priority_class: str | None) -> int:
        """Changes what is under way, wherever it is. Returns how many outputs that were.

        Args:
            request_id, tenant: as in ``abort_matching``.
            priority, priority_class: None for what stays.
        """
        legs = self._matching(request_id, tenant)
        now = self._clock.now()
        for leg in legs:
            ask = leg.relay.ask
            priority_now = ask.priority if priority is None else priority
            class_now = ask.priority_class if priority_class is None else priority_class
            leg.relay.ask = replace(ask, priority=priority_now, priority_class=class_now)
            self.decisions.note_change(now, ask.rid, (ask.priority, ask.priority_class), (priority_now, class_now))
            if leg.request is not None:
                leg.fleet.backlog.change(leg.request, priority_now, class_now)
            for incarnation in leg.nodes:
                self._post.send(Reprioritize(ask.rid, leg.attempt, priority_now, priority_class), incarnation)
        return len(legs)

    # ---- the end --------------------------------------------------------------------------------------------------

    def abort(self, rid: str, message: str = "the request was aborted") -> bool:
        """Ends one request on the client's behalf; False if it isn't under way."""
        return self._fail(rid, RequestError(ErrorCode.ABORTED, message))

    def abort_matching(self, request_id: str | None, tenant: str = "") -> int:
        """Ends a request, or all the outputs of a batch, by the id that the client knows. Returns how many.

        Args:
            request_id: None for all.
            tenant: one in particular, who can end only what is his own.
        """
        return sum(self.abort(leg.relay.ask.rid) for leg in self._matching(request_id, tenant))

    def _matching(self, request_id: str | None, tenant: str) -> list[InFlightRequest]:
        return [
            leg
            for rid, leg in self._legs.items()
            if (request_id is None or request_id in (rid, leg.relay.ask.request_id))
            and (not tenant or leg.relay.ask.tenant == tenant)
        ]

    def shut(self) -> None:
        """The gateway stops: everything under way ends, and nothing new is sent out."""
        self._is_shut = True
        for rid in list(self._legs):
            self._fail(rid, RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping"))

    def fail_internal(self, rid: str) -> None:
        """A message about this request could not be handled, which is our fault."""
        self._fail(rid, RequestError(ErrorCode.INTERNAL, "the gateway failed on a message about this request"))

    def _on_deadline(self, rid: str) -> None:
        leg = self._legs[rid]
        message = f"the request's deadline of {leg.relay.ask.timeout_s:g} s has passed"
        self._fail(rid, RequestError(ErrorCode.DEADLINE_EXCEEDED, message))
        if leg.request is not None:
            leg.fleet.backlog.order.policy.missed(leg.request)

    def _fail(self, rid: str, error: RequestError) -> bool:
        leg = self._legs.get(rid)
        if leg is None:
            return False
        leg.relay.fail(error, self._clock.now())
        return True

    def ended(self, relay: OutputStream) -> None:
        """The one way out of the table; every relay calls it when it ends."""
        leg = self._legs.pop(relay.ask.rid, None)
        if leg is None:
            return  # it was never taken
        leg.timer.cancel()
        if leg.pair is not None:
            self._leave_nodes(leg, leg.pair)
        elif leg.request is not None:
            leg.fleet.backlog.remove(leg.request)
        leg.fleet.admission.release(relay.ended_at, is_evicted=leg.is_evicted)
        if not leg.fleet.backlog.is_idle:
            self.pump_soon()
        self._on_end(relay)

    def _leave_nodes(self, leg: InFlightRequest, pair: Pair) -> None:
        if leg.is_prefill_counted:
            leg.fleet.router.prefill_done(pair)
        leg.fleet.router.decode_done(pair)
        abort = Abort(leg.relay.ask.rid, leg.attempt)
        for incarnation in leg.still_working(pair):
            self._post.send(abort, incarnation)

    # ---- what nodes say -------------------------------------------------------------------------------------------

    def on_tokens(self, sender: str, message: Tokens) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != leg.attempt or sender not in leg.nodes:
            # Ended here, or sent out by an earlier gateway: the node should not go on with it.
            self._post.send(Abort(message.rid, message.attempt), sender)
            return
        if message.index == 0 and leg.is_prefill_counted and leg.pair is not None:
            leg.is_prefill_counted = False
            leg.fleet.router.prefill_done(leg.pair)
        if leg.request is not None:
            leg.fleet.backlog.order.served(leg.request, num_output=len(message.tokens))
        leg.relay.on_tokens(message, self._clock.now())

    def on_failed(self, sender: str, message: Failed) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != leg.attempt or sender not in leg.nodes:
            return
        retry_after_s: float | None = None
        if message.code is ErrorCode.QUEUE_FULL:
            retry_after_s = message.retry_after_s or leg.fleet.admission.retry_after(1, self._clock.now())
        leg.failed_at = sender
        self._fail(message.rid, RequestError(message.code, message.message, retry_after_s=retry_after_s))

    def lost(self, incarnation: str, name: str) -> None:
        """Ends what was under way on a node that is no longer registered.

        A prefill node is done with a request of which decode has sent a token; that one goes on.
        """
        message = f"node {name} was lost while it worked on the request"
        for rid, leg in list(self._legs.items()):
            is_handed_over = len(leg.relay.ids) > 1
            if leg.pair is None:
                continue  # it waits, for whatever nodes there will be
            if incarnation == leg.pair.decode or (incarnation == leg.pair.prefill and not is_handed_over):
                self._fail(rid, RequestError(ErrorCode.NODE_LOST, message))


def _num_in_turn(prompts: Iterable[Sequence[int]]) -> int:
    """How many of these are sent out at once: one in any case."""
    num_tokens = 0
    for number, prompt in enumerate(islice(prompts, SENT_AT_ONCE)):
        num_tokens += len(prompt)
        if num_tokens > TOKENS_AT_ONCE:
            return max(number, 1)
    return SENT_AT_ONCE


def _peer(node: Node) -> Peer:
    return Peer(node.name, node.incarnation, node.register.address)
