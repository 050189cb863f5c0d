"""A whole service in virtual time: a gateway, prefill nodes, decode nodes, and what travels between them."""

from collections.abc import Callable, Sequence

from common.config.shared import Role
from common.wire.messages import Message
from gateway.workers.pool import WorkerPool
from scripts.simulator.event_queue import Agenda
from scripts.simulator.gateway import Answer, Gateway
from scripts.simulator.network import TimedWire
from scripts.simulator.node import Make, Node


class Cluster:
    """Args:
    make: what nodes are made of.
    num_prefill, num_decode: how many.
    fleet: the gateway's pure parts.
    on_end: told of every answer that is over.
    """

    def __init__(
        self,
        make: Make,
        fleet: WorkerPool,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        on_end: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self.agenda = Agenda()
        self.make = make
        self.wire = TimedWire(self.agenda, make.costs)
        self.gateway = Gateway(fleet, self.agenda, self._from_gateway, on_end=on_end)
        self.nodes: dict[str, Node] = {}  # by incarnation; the dead included
        self._message_s = make.costs.message_s
        for _ in range(num_prefill):
            self.start("prefill")
        for _ in range(num_decode):
            self.start("decode")

    def start(self, role: Role) -> Node:
        """One more node."""
        incarnation = f"{role}-{len(self.nodes)}".ljust(16, ".")
        node = Node(role, incarnation, self.make, agenda=self.agenda, wire=self.wire, mail=self)
        self.nodes[incarnation] = node
        self.gateway.register(incarnation, node.register())
        return node

    def kill(self, node: Node) -> None:
        """As kill -9; the others notice after as long as a message takes."""
        node.die()
        self.agenda.after(self._message_s, self.gateway.lose, node.incarnation)
        for other in self.nodes.values():
            if other.is_alive and other.kind != node.kind:
                self.agenda.after(self._message_s, other.lose, node.incarnation)

    def of(self, role: Role) -> list[Node]:
        """The nodes of a role that are alive."""
        return [node for node in self.nodes.values() if node.kind == role and node.is_alive]

    def check(self) -> None:
        """Prove the books of every node; raises ``InvariantError``."""
        for node in self.nodes.values():
            if node.is_alive:
                node.role.check()

    # ---- mail -------------------------------------------------------------------------------------------------------

    def _from_gateway(self, incarnation: str, message: Message) -> None:
        self.agenda.after(self._message_s, self.nodes[incarnation].hear_gateway, (message,))

    def to_gateway(self, sender: str, messages: Sequence[Message]) -> None:
        self.agenda.after(self._message_s, self.gateway.hear, sender, messages)

    def to_peer(self, sender: str, peer: str, messages: Sequence[Message]) -> None:
        node = self.nodes.get(peer)
        if node is not None:
            self.agenda.after(self._message_s, node.hear_peer, sender, messages)

    def hang_up(self, sender: str, peer: str) -> None:
        node = self.nodes.get(peer)
        if node is not None:
            self.agenda.after(self._message_s, node.lose, sender)
