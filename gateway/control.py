"""The gateway's side of the control plane: nodes that come and go, and the requests that are under way on them.

One bound mailbox for the nodes of all models, read from the event loop. Every request that is sent out is in one table
until it ends, and it leaves by one way, ``ended``: at its last token, a stop string, a node's failure or loss, its
deadline, or because the client has gone. Whichever it is, the nodes that may still work on it are told at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from common.clock import Clock
from common.errors import ErrorCode, RequestError
from common.mailbox import PROBE_EVERY_S, Letter, Mailbox
from common.messages import (
    Abort,
    Failed,
    Flush,
    Flushed,
    FromNode,
    Generate,
    Heartbeat,
    Leave,
    Message,
    Peer,
    Ping,
    Register,
    Registered,
    Tokens,
    Unknown,
)  # fmt: skip
from gateway.fleet import Fleet, Fleets
from gateway.flushes import Flushes
from gateway.registry import Node
from gateway.relay import Relay
from gateway.router import Pair

log = logging.getLogger(__name__)

#: Seconds by which the nodes' own timeout is later than the gateway's, which is the one that the client sees.
NODE_TIMEOUT_MARGIN_S = 5.0
RECEIVE_AT_ONCE = 1_000
#: How long a node waits for the news that the one whose name it has is gone, before it is refused.
NAMESAKE_WAIT_S = 0.5


@dataclass(slots=True)
class Leg:
    """One output under way: its relay, its model's fleet, its pair there, and its deadline's timer."""

    relay: Relay
    fleet: Fleet
    pair: Pair
    nodes: tuple[str, ...]  # of the pair
    timer: asyncio.TimerHandle
    is_prefill_counted: bool = True
    failed_at: str = ""  # the node that ended it, which need not be told


class Control:
    """Everything between the gateway and the nodes.

    Args:
        context: the process's ZMQ context.
        incarnation: of this gateway.
        bind: ``tcp://host:port``.
        fleets: the pure parts of each model; nobody else changes them.
        on_start, on_end: told of every output that is sent out, with its pair, and of its end, for the metrics.
    """

    def __init__(
        self, context: zmq.Context[Any], incarnation: str, bind: str, clock: Clock, *,
        fleets: Fleets, on_start: Callable[[Relay, Pair], None], on_end: Callable[[Relay], None],
    ) -> None:  # fmt: skip
        self.mailbox = Mailbox(context, incarnation, FromNode, bind=bind)
        self.fleets = fleets
        self._clock = clock
        self._on_start = on_start
        self._on_end = on_end
        self._legs: dict[str, Leg] = {}
        self._flushes = Flushes(lambda incarnation: self._send(Flush(), incarnation))
        self._loop = asyncio.get_running_loop()
        self._fds = [int(socket.get(zmq.FD)) for socket in self.mailbox.sockets]
        self._is_drain_due = False
        self._is_probe_due = False
        self._is_shut = False
        self.is_stopping = False  # for /ready: nothing new should be sent here
        self._host = bind.removeprefix("tcp://").rpartition(":")[0]
        self._is_closed = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Tokens: self._on_tokens,
            Failed: self._on_failed,
            Heartbeat: self._on_heartbeat,
            Register: self._on_register,
            Leave: self._on_leave,
            Flushed: self._on_flushed,
            Ping: lambda sender, message: None,
        }

    def start(self) -> None:
        """Begins to listen. Needs the running event loop."""
        messages, connections = self._fds
        self._loop.add_reader(messages, self._drain)
        self._loop.add_reader(connections, self._look_for_lost)
        self._tick()

    def close(self) -> None:
        """Stops listening. Requests must have ended before."""
        assert not self._legs
        self._is_closed = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self.mailbox.close()

    @property
    def address(self) -> str:
        """``host:port`` that nodes dial."""
        return f"{self._host}:{self.mailbox.address.rpartition(':')[2]}"

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._legs)

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
        fleet = self.fleets[relays[0].ask.model]
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
        timer = self._loop.call_later(left_s, self._on_deadline, ask.rid)
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
            if not self._send(generate, incarnation):
                self._lose(incarnation)  # ends this request with the others of that node
                return

    @staticmethod
    def _peer(fleet: Fleet, incarnation: str) -> Peer:
        node = fleet.registry.nodes[incarnation]
        return Peer(node.name, incarnation, node.register.address)

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
            self._send(abort, incarnation)
        self._on_end(relay)

    def _still_working(self, relay: Relay, leg: Leg) -> Iterable[str]:
        """Nodes that may not know of the end by themselves."""
        if relay.finish and not isinstance(relay.matched, str):
            is_ended_by_prefill = leg.pair.prefill is not None and len(relay.ids) <= 1
            return (leg.pair.decode,) if is_ended_by_prefill else ()  # it may wait for a handoff
        return (node for node in leg.pair.nodes if node != leg.failed_at)

    # ---- messages -------------------------------------------------------------------------------------------------

    def _send(self, message: Message, incarnation: str) -> bool:
        self._drain_soon()
        return self.mailbox.send(message, target=incarnation)

    def _drain_soon(self) -> None:
        """After anything that touches the socket, which may swallow the edge that announces input."""
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._is_closed:
            return
        letters = self.mailbox.receive(RECEIVE_AT_ONCE)
        for letter in letters:
            self._handle(letter)
        if len(letters) == RECEIVE_AT_ONCE:
            self._drain_soon()

    def _handle(self, letter: Letter) -> None:
        try:
            self._handlers[type(letter.message)](letter.sender, letter.message)
        except Exception:  # one message's fault is no reason to lose the others
            log.exception("a %s message failed", type(letter.message).__name__)
            rid = getattr(letter.message, "rid", "")
            self._fail(rid, RequestError(ErrorCode.INTERNAL, "the gateway failed on a message about this request"))

    def _look_for_lost(self) -> None:
        self._drain_soon()
        for incarnation in self.mailbox.lost([node.incarnation for node in self.fleets.nodes()]):
            self._lose(incarnation)
        if self.mailbox.is_probing and not self._is_probe_due:
            self._is_probe_due = True
            self._loop.call_later(PROBE_EVERY_S, self._probe_again)

    def _probe_again(self) -> None:
        self._is_probe_due = False
        if not self._is_closed:
            self._look_for_lost()

    def _tick(self) -> None:
        self._tick_handle = self._loop.call_later(1.0, self._tick)
        self._drain()  # what has arrived counts, however late the loop is
        self._look_for_lost()
        for fleet in self.fleets:
            for incarnation in fleet.registry.silent(self._clock.now()):
                self._lose(incarnation)

    def _on_tokens(self, sender: str, message: Tokens) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != 0 or sender not in leg.nodes:
            # Ended here, or sent out by an earlier gateway: the node should not go on with it.
            self._send(Abort(message.rid, message.attempt), sender)
            return
        if message.index == 0 and leg.is_prefill_counted:
            leg.is_prefill_counted = False
            leg.fleet.router.prefill_done(leg.pair)
        leg.relay.on_tokens(message, self._clock.now())

    def _on_failed(self, sender: str, message: Failed) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != 0 or sender not in leg.nodes:
            return
        retry_after_s: float | None = None
        if message.code is ErrorCode.QUEUE_FULL:
            retry_after_s = message.retry_after_s or leg.fleet.admission.retry_after(1, self._clock.now())
        leg.failed_at = sender
        self._fail(message.rid, RequestError(message.code, message.message, retry_after_s=retry_after_s))

    def _on_heartbeat(self, sender: str, message: Heartbeat) -> None:
        fleet = self.fleets.of(sender)
        if fleet is None:
            self._send(Unknown(), sender)
        else:
            fleet.registry.heard(sender, self._clock.now(), message)

    def _on_register(self, sender: str, message: Register) -> None:
        namesake = self.fleets.namesake(message)
        if namesake is None or namesake.incarnation == sender:
            self._admit(sender, message)
        elif self._send(Ping(), namesake.incarnation):  # the one it replaces may have died a moment ago
            self._loop.call_later(NAMESAKE_WAIT_S, self._admit, sender, message)
        else:
            self._lose(namesake.incarnation)
            self._admit(sender, message)

    def _admit(self, sender: str, message: Register) -> None:
        if self._is_closed:
            return
        known_in = self.fleets.of(sender)
        was_known = known_in is not None
        answer = self.fleets.register(sender, message, self._clock.now())
        if not self._send(answer, sender):
            self._lose(sender)
        elif isinstance(answer, Registered):
            if not was_known:
                log.info("%s node %s registered (start %d)", message.role, message.name, answer.starts)
        else:
            log.warning("%s node %s refused: %s", message.role, message.name, answer.reason)
            if known_in is not None:
                known_in.registry.remove(sender)
                self._forget(known_in, sender, message.name)

    def _on_leave(self, sender: str, message: Leave) -> None:
        fleet = self.fleets.of(sender)
        if fleet is not None:
            fleet.registry.leave(sender)

    def _lose(self, incarnation: str) -> None:
        fleet = self.fleets.of(incarnation)
        node = fleet.registry.remove(incarnation) if fleet is not None else None
        if fleet is None or node is None:
            return
        log.info("%s node %s is gone", node.register.role, node.name)
        self._forget(fleet, incarnation, node.name)

    def _forget(self, fleet: Fleet, incarnation: str, name: str) -> None:
        """Ends what was under way on a node that is no longer registered.

        A prefill node is done with a request of which decode has sent a token; that one goes on.
        """
        fleet.router.forget(incarnation)
        self._flushes.answered(incarnation, None)
        message = f"node {name} was lost while it worked on the request"
        for rid, leg in list(self._legs.items()):
            is_handed_over = len(leg.relay.ids) > 1
            if incarnation == leg.pair.decode or (incarnation == leg.pair.prefill and not is_handed_over):
                self._fail(rid, RequestError(ErrorCode.NODE_LOST, message))

    # ---- what others want of the nodes ----------------------------------------------------------------------------

    async def flush(self, timeout_s: float) -> list[tuple[Node, int | None]]:
        """Asks every node to forget what it has cached; each with its pages forgotten, None if it did not answer."""
        nodes = self.fleets.nodes()
        for fleet in self.fleets:
            fleet.router.forget_prefixes()
        answers = await self._flushes.ask([node.incarnation for node in nodes], timeout_s)
        return [(node, answers.get(node.incarnation)) for node in nodes]

    def _on_flushed(self, sender: str, message: Flushed) -> None:
        self._flushes.answered(sender, message.num_pages)

    def describe(self, node: Node) -> dict[str, Any]:
        """One row of the workers' list."""
        register, heartbeat = node.register, node.heartbeat
        fleet = self.fleets[register.model]
        return {
            "name": node.name,
            "role": register.role,
            "model": register.model,
            "incarnation": node.incarnation,
            "starts": node.starts,
            "is_leaving": node.is_leaving,
            "seen_s_ago": round(self._clock.now() - node.seen_at, 3),
            "load_tokens": fleet.router.load(node.incarnation),
            "register": register,
            "heartbeat": heartbeat,
        }
