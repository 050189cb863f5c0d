"""The requests that are under way: to whom each was sent, and the one way by which it leaves.

Every output that is sent out is in one table until it ends, and it leaves by one way, ``ended``: at its last token, a
stop string, a node's failure or loss, its deadline, or because the client has gone. Whichever it is, the nodes that may
still work on it are told at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.clock import Clock
from common.errors import ErrorCode, RequestError
from common.messages import Abort, Failed, Generate, Message, Peer, Tokens
from gateway.fleet import Fleet, Fleets
from gateway.relay import Relay
from gateway.router import Pair

#: Seconds by which the nodes' own timeout is later than the gateway's, which is the one that the client sees.
NODE_TIMEOUT_MARGIN_S = 5.0


class Timer(Protocol):
    def cancel(self) -> None: ...


class Post(Protocol):
    """What the table of requests needs of the control plane around it."""

    def send(self, message: Message, incarnation: str) -> bool:
        """False if the node cannot be reached."""
        ...

    def lose(self, incarnation: str) -> None:
        """The node could not be reached: ``Dispatch.lost`` is called before this returns."""
        ...

    def call_later(self, delay_s: float, act: Callable[[str], None], rid: str) -> Timer: ...


@dataclass(slots=True)
class Leg:
    """One output under way: its relay, its model's fleet, its pair there, and its deadline's timer."""

    relay: Relay
    fleet: Fleet
    pair: Pair
    nodes: tuple[str, ...]  # of the pair
    timer: Timer
    is_prefill_counted: bool = True
    failed_at: str = ""  # the node that ended it, which need not be told


class Dispatch:
    """The table.

    Args:
        fleets: the pure parts of each model.
        post: how nodes are reached.
        on_start, on_end: told of every output that is sent out, with its pair, and of its end.
    """

    def __init__(
        self, fleets: Fleets, post: Post, clock: Clock,
        *, on_start: Callable[[Relay, Pair], None], on_end: Callable[[Relay], None],
    ) -> None:  # fmt: skip
        self._fleets = fleets
        self._post = post
        self._clock = clock
        self._on_start = on_start
        self._on_end = on_end
        self._legs: dict[str, Leg] = {}
        self._is_shut = False

    @property
    def num_in_flight(self) -> int:
        return len(self._legs)

    # ---- out ------------------------------------------------------------------------------------------------------

    def dispatch(self, relays: Sequence[Relay]) -> None:
        """Sends the outputs of one request out, all or none; the samples of a prompt to one pair.

        Raises:
            RequestError: an id is in use, too many are in flight, or no pair of nodes fits; nothing was sent then.
        """
        if self._is_shut:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        now = self._clock.now()
        for relay in relays:
            if relay.ask.rid in self._legs:
                message = f"rid: a request with the id {relay.ask.rid!r} is in flight"
                raise RequestError(ErrorCode.INVALID_REQUEST, message, param="rid")
        fleet = self._fleets[relays[0].ask.model]
        fleet.admission.admit(len(relays), max_running=fleet.limits().max_running, now=now)
        pairs: dict[int, Pair] = {}
        for i, relay in enumerate(relays):
            pair = fleet.choose(relay.ask, siblings=pairs.get(relay.ask.prompt_number))
            if pair is None:
                for _ in relays[i:]:
                    fleet.admission.release(now)
                error = RequestError(ErrorCode.NO_ROUTE, "no nodes with a large enough pool are there at present")
                for sent in relays[:i]:
                    self._fail(sent.ask.rid, error)
                raise error
            pairs[relay.ask.prompt_number] = pair
            self._send_out(relay, fleet, pair)

    def _send_out(self, relay: Relay, fleet: Fleet, pair: Pair) -> None:
        ask = relay.ask
        left_s = max(ask.timeout_s - (self._clock.now() - relay.started_at), 0.001)
        timer = self._post.call_later(left_s, self._on_deadline, ask.rid)
        self._legs[ask.rid] = Leg(relay, fleet, pair, pair.nodes, timer)
        self._on_start(relay, pair)
        generate = Generate(
            rid=ask.rid,
            attempt=0,
            prompt=ask.prompt,
            sampling=ask.sampling,
            prefill=None if pair.prefill is None else self._peer(fleet, pair.prefill),
            decode=self._peer(fleet, pair.decode),
            timeout_s=left_s + NODE_TIMEOUT_MARGIN_S,
            cache_salt=ask.salt,
            priority=ask.priority,
        )
        for incarnation in pair.nodes:
            if not self._post.send(generate, incarnation):
                self._post.lose(incarnation)  # ends this request with the others of that node
                return

    @staticmethod
    def _peer(fleet: Fleet, incarnation: str) -> Peer:
        node = fleet.registry.nodes[incarnation]
        return Peer(node.name, incarnation, node.register.address)

    # ---- the end --------------------------------------------------------------------------------------------------

    def abort(self, rid: str, message: str = "the request was aborted") -> bool:
        """Ends one request on the client's behalf; False if it isn't under way."""
        return self._fail(rid, RequestError(ErrorCode.ABORTED, message))

    def abort_matching(self, request_id: str) -> int:
        """Ends a request, or all the outputs of a batch, by the id that the client knows. Returns how many."""
        rids = [rid for rid, leg in self._legs.items() if request_id in (rid, leg.relay.ask.request_id)]
        return sum(self.abort(rid) for rid in rids)

    def abort_all(self, code: ErrorCode = ErrorCode.ABORTED, message: str = "the request was aborted") -> int:
        """Ends everything under way. Returns how many requests that were."""
        return sum(self._fail(rid, RequestError(code, message)) for rid in list(self._legs))

    def shut(self) -> None:
        """The gateway stops: everything under way ends, and nothing new is sent out."""
        self._is_shut = True
        self.abort_all(ErrorCode.SHUTTING_DOWN, "the server is stopping")

    def fail_internal(self, rid: str) -> None:
        """A message about this request could not be handled, which is our fault."""
        self._fail(rid, RequestError(ErrorCode.INTERNAL, "the gateway failed on a message about this request"))

    def _on_deadline(self, rid: str) -> None:
        message = f"the request's deadline of {self._legs[rid].relay.ask.timeout_s:g} s has passed"
        self._fail(rid, RequestError(ErrorCode.DEADLINE_EXCEEDED, message))

    def _fail(self, rid: str, error: RequestError) -> bool:
        leg = self._legs.get(rid)
        if leg is None:
            return False
        leg.relay.fail(error, self._clock.now())
        return True

    def ended(self, relay: Relay) -> None:
        """The one way out of the table; every relay calls it when it ends."""
        leg = self._legs.pop(relay.ask.rid, None)
        if leg is None:
            return  # it was never sent out
        leg.timer.cancel()
        if leg.is_prefill_counted:
            leg.fleet.router.prefill_done(leg.pair)
        leg.fleet.router.decode_done(leg.pair)
        leg.fleet.admission.release(relay.ended_at)
        abort = Abort(relay.ask.rid, 0)
        for incarnation in self._still_working(relay, leg):
            self._post.send(abort, incarnation)
        self._on_end(relay)

    def _still_working(self, relay: Relay, leg: Leg) -> Iterable[str]:
        """Nodes that may not know of the end by themselves."""
        if relay.finish and not isinstance(relay.matched, str):
            is_ended_by_prefill = leg.pair.prefill is not None and len(relay.ids) <= 1
            return (leg.pair.decode,) if is_ended_by_prefill else ()  # it may wait for a handoff
        return (node for node in leg.pair.nodes if node != leg.failed_at)

    # ---- what nodes say -------------------------------------------------------------------------------------------

    def on_tokens(self, sender: str, message: Tokens) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != 0 or sender not in leg.nodes:
            # Ended here, or sent out by an earlier gateway: the node should not go on with it.
            self._post.send(Abort(message.rid, message.attempt), sender)
            return
        if message.index == 0 and leg.is_prefill_counted:
            leg.is_prefill_counted = False
            leg.fleet.router.prefill_done(leg.pair)
        leg.relay.on_tokens(message, self._clock.now())

    def on_failed(self, sender: str, message: Failed) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != 0 or sender not in leg.nodes:
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
            if incarnation == leg.pair.decode or (incarnation == leg.pair.prefill and not is_handed_over):
                self._fail(rid, RequestError(ErrorCode.NODE_LOST, message))
