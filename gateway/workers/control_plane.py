"""The gateway's side of the control plane: nodes that come and go, and the messages between them and the requests.

One bound mailbox for the nodes of all models, read from the event loop. What is under way on the nodes is
``dispatch``'s.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import zmq

from common.clock import Clock
from common.wire.mailbox import PROBE_EVERY_S, Letter, Mailbox
from common.wire.messages import (  # fmt: skip
    Decision,
    Decisions,
    Deregister,
    Failed,
    Flush,
    Flushed,
    FromNode,
    GetDecisions,
    Heartbeat,
    Message,
    Pairs,
    Ping,
    Register,
    Registered,
    Tokens,
    Unknown,
)
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool, WorkerPools
from gateway.workers.registry import Node
from gateway.workers.router import Pair
from gateway.workers.rpc import Questions

log = logging.getLogger(__name__)

RECEIVE_AT_ONCE = 1_000
#: How long a node waits for the news that the one whose name it has is gone, before it is refused.
NAMESAKE_WAIT_S = 0.5


class Control:
    """Everything between the gateway and the nodes.

    Args:
        context: the process's ZMQ context.
        incarnation: of this gateway.
        bind: ``tcp://host:port``.
        fleets: the pure parts of each model; nobody else changes them.
        on_start, on_end: told of every output that is sent out, with its pair, and of its end.

    Attributes:
        requests: those under way.
    """

    def __init__(
        self, context: zmq.Context[Any], incarnation: str, bind: str, clock: Clock, *,
        fleets: WorkerPools, on_start: Callable[[OutputStream, Pair], None], on_end: Callable[[OutputStream], None],
    ) -> None:  # fmt: skip
        self.mailbox = Mailbox(context, incarnation, FromNode, bind=bind)
        self.fleets = fleets
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        first = secrets.randbits(31)
        self.requests = Dispatcher(fleets, self, clock, on_start=on_start, on_end=on_end, first_attempt=first)
        self._questions = Questions(self.send)
        self._fds = [int(socket.get(zmq.FD)) for socket in self.mailbox.sockets]
        self._is_drain_due = False
        self._is_probe_due = False
        self._is_shut = False
        self.is_stopping = False  # for /ready: nothing new should be sent here
        self._host = bind.removeprefix("tcp://").rpartition(":")[0]
        self._is_closed = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Tokens: self.requests.on_tokens,
            Failed: self.requests.on_failed,
            Heartbeat: self._on_heartbeat,
            Pairs: self._on_pairs,
            Register: self._on_register,
            Deregister: self._on_leave,
            Flushed: self._questions.answered,
            Decisions: self._questions.answered,
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
        assert not self.requests.num_in_flight
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

    # ---- messages -------------------------------------------------------------------------------------------------

    def send(self, message: Message, incarnation: str) -> bool:
        """To one node; False if it cannot be reached."""
        self._drain_soon()
        return self.mailbox.send(message, target=incarnation)

    def call_later(self, delay_s: float, act: Callable[[str], None], rid: str) -> asyncio.TimerHandle:
        """After so many seconds, unless it is cancelled."""
        return self._loop.call_later(delay_s, act, rid)

    def call_soon(self, act: Callable[[], None]) -> asyncio.Handle:
        """Once the handlers that are due now have run."""
        return self._loop.call_soon(act)

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
            self.requests.fail_internal(getattr(letter.message, "rid", ""))

    def _look_for_lost(self) -> None:
        self._drain()  # what somebody has said before he went counts
        self._drain_soon()
        for incarnation in self.mailbox.lost([node.incarnation for node in self.fleets.nodes()]):
            self.lose(incarnation)
        if self.mailbox.is_probing and not self._is_probe_due:
            self._is_probe_due = True
            self._loop.call_later(PROBE_EVERY_S, self._probe_again)

    def _probe_again(self) -> None:
        self._is_probe_due = False
        if not self._is_closed:
            self._look_for_lost()

    def _tick(self) -> None:
        self._tick_handle = self._loop.call_later(1.0, self._tick)
        self._look_for_lost()  # hears what has arrived first, however late the loop is
        for fleet in self.fleets:
            for incarnation in fleet.registry.silent(self._clock.now()):
                self.lose(incarnation)
        self.requests.tick(self._clock.now())

    def _on_heartbeat(self, sender: str, message: Heartbeat) -> None:
        fleet = self.fleets.of(sender)
        if fleet is None:
            self.send(Unknown(), sender)
        else:
            fleet.registry.heard(sender, self._clock.now(), message)

    def _on_pairs(self, sender: str, message: Pairs) -> None:
        fleet = self.fleets.of(sender)
        if fleet is None:
            return
        node = fleet.registry.nodes[sender]
        for pair in message.pairs:
            if pair.problem and pair.incarnation not in node.failed_peers:
                log.warning("no requests for the pair of nodes %s and %s: %s", node.name, pair.peer, pair.problem)
        if fleet.registry.set_pairs(sender, message.pairs):
            self.requests.nodes_came(fleet)

    def _on_register(self, sender: str, message: Register) -> None:
        namesake = self.fleets.namesake(message)
        if namesake is None or namesake.incarnation == sender:
            self._admit(sender, message)
        elif self.send(Ping(), namesake.incarnation):  # the one it replaces may have died a moment ago
            self._loop.call_later(NAMESAKE_WAIT_S, self._admit, sender, message)
        else:
            self.lose(namesake.incarnation)
            self._admit(sender, message)

    def _admit(self, sender: str, message: Register) -> None:
        if self._is_closed:
            return
        known_in = self.fleets.of(sender)
        if known_in is not None:  # it was cut off for a moment, and has ended everything
            self._forget(known_in, sender, message.name)
        answer = self.fleets.register(sender, message, self._clock.now())
        if not self.send(answer, sender):
            self.lose(sender)
        elif isinstance(answer, Registered):
            if known_in is None:
                log.info("%s node %s registered (start %d)", message.role, message.name, answer.starts)
                self.requests.nodes_came(self.fleets[message.model])
        else:
            log.warning("%s node %s refused: %s", message.role, message.name, answer.reason)
            if known_in is not None:
                known_in.registry.remove(sender)

    def _on_leave(self, sender: str, message: Deregister) -> None:
        fleet = self.fleets.of(sender)
        if fleet is not None:
            fleet.registry.leave(sender)

    def lose(self, incarnation: str) -> None:
        """A node is gone, or cannot be reached."""
        fleet = self.fleets.of(incarnation)
        node = fleet.registry.remove(incarnation) if fleet is not None else None
        if fleet is None or node is None:
            return
        log.info("%s node %s is gone", node.register.role, node.name)
        self._forget(fleet, incarnation, node.name)

    def _forget(self, fleet: WorkerPool, incarnation: str, name: str) -> None:
        """Everything about a node that is no longer registered, and what was under way there."""
        fleet.router.forget(incarnation)
        self._questions.gone(incarnation)
        self.requests.lost(incarnation, name)

    # ---- what others want of the nodes ----------------------------------------------------------------------------

    async def flush(self, timeout_s: float) -> list[tuple[Node, int | None]]:
        """Asks every node to forget what it has cached; each with its pages forgotten, None if it did not answer."""
        nodes = self.fleets.nodes()
        for fleet in self.fleets:
            fleet.router.forget_prefixes()
        answers = await self._questions.ask([node.incarnation for node in nodes], Flush(), Flushed, timeout_s)
        pages = {incarnation: answer.num_pages for incarnation, answer in answers.items()}
        return [(node, pages.get(node.incarnation)) for node in nodes]

    async def decisions(self, node: Node, limit: int, timeout_s: float) -> tuple[Decision, ...] | None:
        """The last that a node has taken, newest last; None if it did not answer."""
        answers = await self._questions.ask([node.incarnation], GetDecisions(limit), Decisions, timeout_s)
        answer = answers.get(node.incarnation)
        return None if answer is None else answer.decisions[-limit:]

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
            "pairs": node.pairs,
        }
