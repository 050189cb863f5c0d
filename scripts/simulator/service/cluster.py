"""A whole service in virtual time: a gateway, prefill nodes, decode nodes, and the messages between them."""

from collections.abc import Callable, Sequence
from typing import Any

from common.config.shared import Role
from common.wire.messages import Message
from gateway.workers.auto_roles import AutoRoles, load_of
from gateway.workers.pool import WorkerPool
from scripts.simulator.event_queue import EventQueue
from scripts.simulator.service.cores import Cores
from scripts.simulator.service.gateway import TICK_S, Answer, Gateway
from scripts.simulator.service.network import Network
from scripts.simulator.service.node import Node, NodeSettings
from scripts.simulator.service.repeated_steps import RepeatedSteps

GATEWAY = "gateway"
#: Share of a message's time in which gateway and client compute, by comparison with live services (docs/planner.md).
#: Nodes with a core each do not lose it: their costs were measured beside both.
MESSAGE_WORK = 0.5
#: Something that arrives at one process from another: both, the call to make, and its arguments.
Arrival = tuple[str, str, Callable[..., None], tuple[Any, ...]]


class Cluster:
    """The nodes and the gateway of one simulated service, and the delivery of their messages.

    Attributes:
        role_changes: instant and new role of each change so far.
    """

    def __init__(
        self,
        settings: NodeSettings,
        pool: WorkerPool,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        on_end: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self.events = EventQueue()
        self._settings = settings
        num_cores = settings.num_cores
        self._cores = None if num_cores is None else Cores(self.events, num_cores)
        self.network = Network(self.events, settings.costs, self._passes, self._wait_s)
        self.gateway = Gateway(pool, self.events, self._from_gateway, on_end=on_end)
        self.nodes: dict[str, Node] = {}  # by incarnation, including killed nodes
        self.role_changes: list[tuple[float, Role]] = []
        self._message_s = settings.costs.message_s
        self._arrivals: dict[tuple[str, str], float] = {}  # of the last message between two, on shared cores
        self._cuts: dict[frozenset[str], list[Arrival]] = {}  # of a node or a pair, and what waits for the end
        for _ in range(num_prefill):
            self.start("prefill")
        for _ in range(num_decode):
            self.start("decode")
        if pool.auto_roles is not None:
            self._decide_roles(pool.auto_roles)
        elif pool.router.uses_costs:
            self._beat()

    def start(self, role: Role, previous: Node | None = None) -> Node:
        """Add a node; ``previous`` is the same node in its last role."""
        incarnation = f"{role}-{len(self.nodes)}".ljust(16, ".")
        node = Node(
            role, incarnation, self._settings, events=self.events, network=self.network, bus=self,
            cores=self._cores, previous=previous,
        )  # fmt: skip
        self.nodes[incarnation] = node
        self.gateway.register(incarnation, node.register())
        return node

    def change_role(self, node: Node, role: Role, then: Callable[[Node], None] = lambda back: None) -> None:
        """Let a node finish its requests and go on in another role, as ``POST /v1/workers/{name}/role`` does.

        Args:
            then: called with the node in its new role.
        """
        self.role_changes.append((self.events.now(), role))
        self._leave(node, lambda: self._come_back(node, role, then))

    def drain(self, node: Node, then: Callable[[], None]) -> None:
        """Let a node finish or move its requests and stop, as SIGTERM does; then call ``then``."""
        self._leave(node, lambda: self._be_gone(node, then))

    def _leave(self, node: Node, then: Callable[[], None]) -> None:
        self.gateway.pool.registry.begin_drain(node.incarnation)
        self.gateway.dispatcher.pump_soon()  # orders the moves
        # The gateway has sent nothing more; what it has sent arrives one message delay later.
        self.events.after(2 * self._message_s, node.leave, lambda: self._left(node, then))

    def _left(self, node: Node, then: Callable[[], None]) -> None:
        for other in self.nodes.values():
            if other.is_alive and other is not node:
                self.events.after(self._message_s, other.lose, node.incarnation)
        self.events.after(self._message_s, then)

    def _come_back(self, node: Node, role: Role, then: Callable[[Node], None]) -> None:
        back = self.start(role, node)
        self.gateway.pool.router.rename_worker(node.incarnation, back.incarnation)
        self.gateway.lose(node.incarnation, is_empty=True)
        then(back)

    def _be_gone(self, node: Node, then: Callable[[], None]) -> None:
        self.gateway.lose(node.incarnation, is_empty=True)
        then()

    def _beat(self) -> None:
        """Pass the heartbeats of all nodes to the gateway, once a second."""
        self.events.background_after(TICK_S, self._beat)
        pool, now = self.gateway.pool, self.events.now()
        for incarnation, worker in list(pool.registry.workers.items()):
            pool.registry.on_heartbeat(incarnation, self.nodes[incarnation].heartbeat(), now)
            pool.router.observe(worker)

    def _decide_roles(self, auto_roles: AutoRoles) -> None:
        """Do once a second what ``gateway.workers.role_changes.RoleChanges`` does."""
        self.events.background_after(TICK_S, self._decide_roles, auto_roles)
        registry, router, now = self.gateway.pool.registry, self.gateway.pool.router, self.events.now()
        workers = [worker for worker in registry.workers.values() if not worker.is_draining]
        for worker in workers:
            registry.on_heartbeat(worker.incarnation, self.nodes[worker.incarnation].heartbeat(), now)
            router.observe(worker)
        decision = auto_roles.decide([load_of(worker, router) for worker in workers], now)
        if decision is not None:
            self.change_role(self.nodes[decision.incarnation], decision.role)

    def kill(self, node: Node) -> None:
        """Stop a node as ``kill -9`` would; its peers notice one message delay later."""
        node.die()
        self.events.after(self._message_s, self.gateway.lose, node.incarnation)
        for other in self.nodes.values():
            if other.is_alive:
                self.events.after(self._message_s, other.lose, node.incarnation)

    def hang(self, node: Node, seconds: float, *, node_timeout_s: float) -> None:
        """Stop a node for a while; the gateway counts it as lost after ``node_timeout_s`` of silence."""
        node.hang()
        if seconds > node_timeout_s:
            self.events.after(node_timeout_s, self._miss, node.incarnation, self.events.now())
        self.events.after(seconds, self._wake, node)

    def _miss(self, incarnation: str, silent_since: float) -> None:
        self.gateway.lose(incarnation, alive_until=silent_since)

    def _wake(self, node: Node) -> None:
        if not node.is_alive or not node.is_hanging:
            return
        node.wake()
        if node.incarnation not in self.gateway.pool.registry.workers:
            node.lose_gateway()  # its heartbeat is answered with ``Unknown``
            self.events.after(2 * self._message_s, self._register, node)

    def _register(self, node: Node) -> None:
        if node.is_alive:
            self.gateway.register(node.incarnation, node.register())

    def cut(self, node: Node, other: Node, seconds: float, *, node_timeout_s: float) -> None:
        """Let nothing pass between two nodes; their connection breaks after ``node_timeout_s``."""
        self._cut(frozenset((node.incarnation, other.incarnation)), seconds)
        if seconds > node_timeout_s:
            self.events.after(node_timeout_s, self._break, node, other)

    def cut_off(self, node: Node, seconds: float, *, node_timeout_s: float) -> None:
        """Let nothing pass between a node and all others, the gateway included."""
        self._cut(frozenset((node.incarnation,)), seconds)
        if seconds > node_timeout_s:
            self.events.after(node_timeout_s, self._break_all, node, self.events.now())
            self.events.after(seconds, self._register, node)

    def _cut(self, ends: frozenset[str], seconds: float) -> None:
        assert not any(ends & cut for cut in self._cuts), "a node is cut off from one side at a time"
        self._cuts[ends] = []
        self.events.after(seconds, self._heal, ends)

    def _break(self, node: Node, other: Node) -> None:
        self._cuts[frozenset((node.incarnation, other.incarnation))].clear()
        node.lose(other.incarnation)
        other.lose(node.incarnation)

    def _break_all(self, node: Node, silent_since: float) -> None:
        self._cuts[frozenset((node.incarnation,))].clear()
        self._miss(node.incarnation, silent_since)
        node.lose_gateway()
        for other in list(self.nodes.values()):
            if other.is_alive and other is not node:
                node.lose(other.incarnation)
                other.lose(node.incarnation)

    def _heal(self, ends: frozenset[str]) -> None:
        for sender, receiver, what, arguments in self._cuts.pop(ends):
            self._passes(sender, receiver, what, arguments)

    def _passes(self, sender: str, receiver: str, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Let something arrive that is on its way; if its sender or receiver is cut off, when that is over."""
        if self._cuts:
            for ends in (frozenset((sender, receiver)), frozenset((sender,)), frozenset((receiver,))):
                if ends in self._cuts:
                    self._cuts[ends].append((sender, receiver, what, arguments))
                    return
        what(*arguments)

    def of(self, role: Role) -> list[Node]:
        """The living nodes of a role."""
        return [node for node in self.nodes.values() if node.kind == role and node.is_alive]

    def check(self) -> None:
        """Check the invariants of every living node; raises ``InvariantError``."""
        for node in self.nodes.values():
            if node.is_alive:
                node.role.check()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _arrival_at(self, sender: str, receiver: str) -> float:
        """When a message arrives that is sent now."""
        at = self.events.now() + self._message_s
        if self._cores is not None:
            at = max(at + self._wait_s(), self._arrivals.get((sender, receiver), 0.0))  # messages keep their order
            self._arrivals[sender, receiver] = at
        return at

    @property
    def _crowded_cores(self) -> Cores | None:
        """The cores, if there are fewer than nodes."""
        is_crowded = self._cores and sum(node.is_alive for node in self.nodes.values()) > self._cores.count
        return self._cores if is_crowded else None

    def _wait_s(self) -> float:
        """How long a thread of a node that wakes now waits for a core, unless each node has one of its own."""
        return cores.wait_s() if (cores := self._crowded_cores) else 0.0

    def _from_gateway(self, incarnation: str, message: Message) -> None:
        receive, at = self.nodes[incarnation].on_gateway_messages, self._arrival_at(GATEWAY, incarnation)
        self.events.at(at, self._passes, GATEWAY, incarnation, receive, ((message,),))

    def to_gateway(self, sender: str, messages: Sequence[Message]) -> None:
        if cores := self._crowded_cores:
            cores.take(MESSAGE_WORK * self._message_s)
        source, arrives_at = self.nodes[sender].source, self._arrival_at(sender, GATEWAY)
        arrival = (sender, GATEWAY, self.gateway.on_messages, (sender, messages))
        self.events.of_source(source, arrives_at, self._passes, *arrival)

    def defer_tokens(self, steps: RepeatedSteps) -> bool:
        """Let the streams of a repeated step take their tokens from it; False if these have to come as messages."""
        return not self._cuts and self.gateway.defer_tokens(steps)

    def catch_up(self) -> None:
        """Bring every node up to date, before anything looks at it from outside."""
        for node in self.nodes.values():
            node.catch_up()

    def to_peer(self, sender: str, peer: str, messages: Sequence[Message]) -> None:
        node = self.nodes.get(peer)
        if node is not None:
            arrival = (sender, peer, node.on_peer_messages, (sender, messages))
            self.events.at(self._arrival_at(sender, peer), self._passes, *arrival)

    def hang_up(self, sender: str, peer: str) -> None:
        node = self.nodes.get(peer)
        if node is not None:
            self.events.after(self._message_s, self._passes, sender, peer, node.lose, (sender,))
