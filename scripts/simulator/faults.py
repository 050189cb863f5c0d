"""Faults in virtual time, with the names and the schedule of the chaos harness.

Nodes are lost and come back, hang, are cut off from all others or from one, drain or change their roles, and clients
vanish. Beside those, nodes are slow and their clocks jump. There are no files, sockets and packets here: a full disk, a
lack of descriptors and hostile clients are left to the harness, and lost or late packets are short cuts, as over TCP.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config.shared import ROLES, Role
from scripts.chaos_harness.schedule import FaultKind, NodeState, PlannedFault, choose_target, fault_schedule
from scripts.simulator.service.cluster import Cluster
from scripts.simulator.service.node import Node

SLOWNESS = 5.0
Strike = Callable[["FaultInjector", Node, PlannedFault], None]


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Which faults happen, and how often.

    Attributes:
        names: keys of ``KINDS``.
        kill_every_s, fault_every_s: seconds between two losses of a node, and between two smaller faults.
        node_timeout_s: silence after which a node counts as lost.
    """

    names: Sequence[str]
    kill_every_s: float
    fault_every_s: float
    node_timeout_s: float
    seed: int


def kinds(node_timeout_s: float) -> dict[str, FaultKind]:
    """The faults by name, with the times that they last."""
    longer = (node_timeout_s + 1.0, node_timeout_s + 4.0)
    shorter = (0.05, node_timeout_s * 0.9)
    found = [
        FaultKind("kill", True, ROLES, (2.0, 8.0)),
        FaultKind("hang", True, ROLES, longer),
        FaultKind("cut", True, ROLES, longer),
        FaultKind("pause", False, ROLES, shorter),
        FaultKind("flap", False, ROLES, shorter),
        FaultKind("pair-cut", False, ROLES, (0.1, node_timeout_s + 4.0)),
        FaultKind("drain", False, ROLES, (0.5, 5.0)),
        FaultKind("role", False, ROLES, (1.0, 10.0)),
        FaultKind("vanish", False, (), (0.0, 0.0)),
        FaultKind("slow", False, ROLES, (1.0, 20.0)),
        FaultKind("jump", False, ROLES, (1.0, 60.0)),
    ]
    return {kind.name: kind for kind in found}


class FaultInjector:
    """Injects the faults of a schedule into a cluster, at their instants of virtual time."""

    def __init__(self, cluster: Cluster, options: FaultOptions) -> None:
        self._cluster = cluster
        self._timeout_s = options.node_timeout_s
        chosen = kinds(options.node_timeout_s)
        self._schedule = fault_schedule(
            [chosen[name] for name in options.names],
            kill_every=options.kill_every_s,
            fault_every=options.fault_every_s,
            seed=options.seed,
        )
        self._lone_roles = [role for role in ROLES if len(cluster.of(role)) == 1]
        self._is_hit: set[str] = set()  # the nodes that a fault hits now, by incarnation
        self.injected: Counter[str] = Counter()
        self._next()

    def _next(self) -> None:
        planned = next(self._schedule, None)
        if planned is not None:
            events = self._cluster.events
            events.background_after(max(planned.at_s - events.now(), 0.0), self._strike, planned)

    def _strike(self, planned: PlannedFault) -> None:
        states = [self._state(node) for role in ROLES for node in self._cluster.of(role)]
        if not planned.kind.roles:
            self._vanish(planned)
        elif target := choose_target(planned, states, self._lone_roles):
            self.injected[planned.kind.name] += 1
            self._is_hit.add(target)
            STRIKES[planned.kind.name](self, self._cluster.nodes[target], planned)
        self._next()

    def _state(self, node: Node) -> NodeState:
        worker = self._cluster.gateway.pool.registry.workers.get(node.incarnation)
        is_up = worker is not None and not worker.is_draining and node.incarnation not in self._is_hit
        return NodeState(node.incarnation, node.kind, is_up)

    def _end_after(self, seconds: float, *nodes: Node) -> None:
        """Let a fault be over after some time, so that its nodes may be hit again."""
        self._cluster.events.after(seconds, self._is_hit.difference_update, [node.incarnation for node in nodes])

    def _vanish(self, planned: PlannedFault) -> None:
        """Let the client of a request in flight leave."""
        in_flight = list(self._cluster.gateway.answers)
        if in_flight:
            self.injected["vanish"] += 1
            self._cluster.gateway.abort(in_flight[int(planned.draw * len(in_flight))])

    def kill(self, node: Node, planned: PlannedFault) -> None:
        self._cluster.kill(node)
        self._cluster.events.after(planned.lasts_s, self._start, node.kind)

    def _start(self, role: Role) -> None:
        self._cluster.start(role)

    def hang(self, node: Node, planned: PlannedFault) -> None:
        self._cluster.hang(node, planned.lasts_s, node_timeout_s=self._timeout_s)
        self._end_after(planned.lasts_s, node)

    def cut_off(self, node: Node, planned: PlannedFault) -> None:
        self._cluster.cut_off(node, planned.lasts_s, node_timeout_s=self._timeout_s)
        self._end_after(planned.lasts_s, node)

    def pair_cut(self, node: Node, planned: PlannedFault) -> None:
        others = [other for other in self._cluster.of(_other(node.kind)) if self._state(other).is_up]
        if others:
            other = others[int(planned.draw * len(others))]
            self._is_hit.add(other.incarnation)
            self._cluster.cut(node, other, planned.lasts_s, node_timeout_s=self._timeout_s)
            self._end_after(planned.lasts_s, other)
        self._end_after(planned.lasts_s, node)

    def drain(self, node: Node, planned: PlannedFault) -> None:
        self._cluster.drain(node, lambda: self._cluster.events.after(planned.lasts_s, self._start, node.kind))

    def role(self, node: Node, planned: PlannedFault) -> None:
        """Change the role of a node, and change it back some time later."""

        def go_back(changed: Node) -> None:
            self._is_hit.add(changed.incarnation)
            self._cluster.events.after(planned.lasts_s, self._cluster.change_role, changed, node.kind)

        self._cluster.change_role(node, _other(node.kind), go_back)

    def slow(self, node: Node, planned: PlannedFault) -> None:
        node.slow_down(SLOWNESS)
        self._cluster.events.after(planned.lasts_s, node.slow_down, 1.0)
        self._end_after(planned.lasts_s, node)

    def jump(self, node: Node, planned: PlannedFault) -> None:
        node.clock.jump(planned.lasts_s)
        node.turn()
        self._end_after(planned.lasts_s, node)


def _other(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"


STRIKES: dict[str, Strike] = {
    "kill": FaultInjector.kill,
    "hang": FaultInjector.hang,
    "cut": FaultInjector.cut_off,
    "pause": FaultInjector.hang,
    "flap": FaultInjector.cut_off,
    "pair-cut": FaultInjector.pair_cut,
    "drain": FaultInjector.drain,
    "role": FaultInjector.role,
    "slow": FaultInjector.slow,
    "jump": FaultInjector.jump,
}
#: Names of all faults.
FAULT_NAMES = (*STRIKES, "vanish")
