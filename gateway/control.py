"""The gateway's side of the control plane: nodes that come and go, and the requests that are under way on them.

One bound mailbox, read from the event loop. Every request that is sent out is in one table until it ends, and it leaves
by one way, ``ended``: at its last token, a stop string, either node's failure or loss, its deadline, or because the
client has gone. Whichever it is, the nodes that may still work on it are told at once.
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
from gateway.admission import Admission
from gateway.registry import Limits, Node, Registry
from gateway.relay import Ask, Relay
from gateway.router import Pair, Router

log = logging.getLogger(__name__)

#: Seconds by which the nodes' own timeout is later than the gateway's, which is the one that the client sees.
NODE_TIMEOUT_MARGIN_S = 5.0
RECEIVE_AT_ONCE = 1_000
#: How long a node waits for the news that the one whose name it has is gone, before it is refused.
NAMESAKE_WAIT_S = 0.5


@dataclass(slots=True)
class Leg:
    """One request under way: its relay, its pair, and its deadline's timer."""

    relay: Relay
    pair: Pair
    timer: asyncio.TimerHandle
    is_prefill_counted: bool = True
    failed_at: str = ""  # the node that ended it, which need not be told


class Control:
    """Everything between the gateway and the nodes.

    Args:
        context: the process's ZMQ context.
        incarnation: of this gateway.
        bind: ``tcp://host:port``.
        registry, router, admission: the pure parts; nobody else changes them.
        on_end: told of every request's end, for the metrics.
    """

    def __init__(
        self, context: zmq.Context[Any], incarnation: str, bind: str, clock: Clock, *,
        registry: Registry, router: Router, admission: Admission, on_end: Callable[[Relay], None],
    ) -> None:  # fmt: skip
        self.mailbox = Mailbox(context, incarnation, FromNode, bind=bind)
        self.registry = registry
        self.admission = admission
        self._router = router
        self._clock = clock
        self._on_end = on_end
        self._legs: dict[str, Leg] = {}
        self._loop = asyncio.get_running_loop()
        self._fds = [int(socket.get(zmq.FD)) for socket in self.mailbox.sockets]
        self._is_drain_due = False
        self._is_probe_due = False
        self._is_shut = False
        self._is_closed = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Tokens: self._on_tokens,
            Failed: self._on_failed,
            Heartbeat: self._on_heartbeat,
            Register: self._on_register,
            Leave: self._on_leave,
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

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._legs)

    def limits(self) -> Limits:
        """What the nodes can do for one request. Raises RequestError while no pair is there."""
        limits = self.registry.limits()
        if limits is None:
            raise RequestError(ErrorCode.NO_ROUTE, "no pair of a prefill and a decode node is registered at present")
        return limits

    def dispatch(self, relays: Sequence[Relay]) -> None:
        """Sends requests out, all or none.

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
        self.admission.admit(len(relays), max_running=self.limits().max_running, now=now)
        for i, relay in enumerate(relays):
            pair = self._choose(relay.ask)
            if pair is None:
                for _ in relays[i:]:
                    self.admission.release(now)
                error = RequestError(ErrorCode.NO_ROUTE, "no pair of nodes has a large enough pool at present")
                for sent in relays[:i]:
                    self._fail(sent.ask.rid, error)
                raise error
            self._send_out(relay, pair)

    def _choose(self, ask: Ask) -> Pair | None:
        prefills, decodes = self.registry.able("prefill"), self.registry.able("decode")
        return self._router.choose(prefills, decodes, ask.prompt, num_new=ask.sampling.max_new_tokens, salt=ask.salt)

    def _send_out(self, relay: Relay, pair: Pair) -> None:
        ask = relay.ask
        left_s = max(ask.timeout_s - (self._clock.now() - relay.started_at), 0.001)
        timer = self._loop.call_later(left_s, self._on_deadline, ask.rid)
        self._legs[ask.rid] = Leg(relay, pair, timer)
        generate = Generate(
            rid=ask.rid,
            attempt=0,
            prompt=ask.prompt,
            sampling=ask.sampling,
            prefill=self._peer(pair.prefill),
            decode=self._peer(pair.decode),
            timeout_s=left_s + NODE_TIMEOUT_MARGIN_S,
            cache_salt=ask.salt,
            priority=ask.priority,
        )
        for incarnation in (pair.prefill, pair.decode):
            if not self._send(generate, incarnation):
                self._lose(incarnation)  # ends this request with the others of that node
                return

    def _peer(self, incarnation: str) -> Peer:
        node = self.registry.nodes[incarnation]
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
            self._router.prefill_done(leg.pair)
        self._router.decode_done(leg.pair)
        self.admission.release(relay.ended_at)
        abort = Abort(relay.ask.rid, 0)
        for incarnation in self._still_working(relay, leg):
            self._send(abort, incarnation)
        self._on_end(relay)

    def _still_working(self, relay: Relay, leg: Leg) -> Iterable[str]:
        """Nodes that may not know of the end by themselves."""
        if relay.finish and not isinstance(relay.matched, str):
            return (leg.pair.decode,) if len(relay.ids) <= 1 else ()  # prefill ended it; decode may wait for a handoff
        return (node for node in (leg.pair.prefill, leg.pair.decode) if node != leg.failed_at)

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
        for incarnation in self.mailbox.lost(list(self.registry.nodes)):
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
        for incarnation in self.registry.silent(self._clock.now()):
            self._lose(incarnation)

    def _on_tokens(self, sender: str, message: Tokens) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != 0 or sender not in (leg.pair.prefill, leg.pair.decode):
            # Ended here, or sent out by an earlier gateway: the node should not go on with it.
            self._send(Abort(message.rid, message.attempt), sender)
            return
        if message.index == 0 and leg.is_prefill_counted:
            leg.is_prefill_counted = False
            self._router.prefill_done(leg.pair)
        leg.relay.on_tokens(message, self._clock.now())

    def _on_failed(self, sender: str, message: Failed) -> None:
        leg = self._legs.get(message.rid)
        if leg is None or message.attempt != 0 or sender not in (leg.pair.prefill, leg.pair.decode):
            return
        retry_after_s: float | None = None
        if message.code is ErrorCode.QUEUE_FULL:
            retry_after_s = message.retry_after_s or self.admission.retry_after(1, self._clock.now())
        leg.failed_at = sender
        self._fail(message.rid, RequestError(message.code, message.message, retry_after_s=retry_after_s))

    def _on_heartbeat(self, sender: str, message: Heartbeat) -> None:
        if not self.registry.heard(sender, self._clock.now(), message):
            self._send(Unknown(), sender)

    def _on_register(self, sender: str, message: Register) -> None:
        namesake = self.registry.named(message.name)
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
        was_known = sender in self.registry.nodes
        answer = self.registry.register(sender, message, self._clock.now())
        if not self._send(answer, sender):
            self._lose(sender)
        elif isinstance(answer, Registered):
            if not was_known:
                log.info("%s node %s registered (start %d)", message.role, message.name, answer.starts)
        else:
            log.warning("%s node %s refused: %s", message.role, message.name, answer.reason)
            if was_known:
                self._forget(sender, message.name)

    def _on_leave(self, sender: str, message: Leave) -> None:
        self.registry.leave(sender)

    def _lose(self, incarnation: str) -> None:
        node = self.registry.remove(incarnation)
        if node is None:
            return
        log.info("%s node %s is gone", node.register.role, node.name)
        self._forget(incarnation, node.name)

    def _forget(self, incarnation: str, name: str) -> None:
        """Ends what was under way on a node that is no longer registered.

        A prefill node is done with a request of which decode has sent a token; that one goes on.
        """
        self._router.forget(incarnation)
        message = f"node {name} was lost while it worked on the request"
        for rid, leg in list(self._legs.items()):
            is_handed_over = len(leg.relay.ids) > 1
            if incarnation == leg.pair.decode or (incarnation == leg.pair.prefill and not is_handed_over):
                self._fail(rid, RequestError(ErrorCode.NODE_LOST, message))

    def describe(self, node: Node) -> dict[str, Any]:
        """One row of the workers' list."""
        register, heartbeat = node.register, node.heartbeat
        return {
            "name": node.name,
            "role": register.role,
            "incarnation": node.incarnation,
            "starts": node.starts,
            "is_leaving": node.is_leaving,
            "seen_s_ago": round(self._clock.now() - node.seen_at, 3),
            "load_tokens": self._router.load(node.incarnation),
            "register": register,
            "heartbeat": heartbeat,
        }
