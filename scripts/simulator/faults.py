"""Faults in virtual time: nodes are lost and come back, hang, are cut off from each other, are slow, or their clocks
jump. The schedule is that of the chaos harness."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config.shared import Role
from scripts.chaos_harness.schedule import FaultKind, NodeState, PlannedFault, choose_target, fault_schedule
from scripts.simulator.cluster import Cluster
from scripts.simulator.node import Node

ROLES: tuple[Role, ...] = ("prefill", "decode")
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
    return {
        "kill": FaultKind("kill", True, ROLES, (2.0, 8.0)),
        "hang": FaultKind("hang", True, ROLES, longer),
        "pause": FaultKind("pause", False, ROLES, (0.05, node_timeout_s * 0.9)),
        "cut": FaultKind("cut", False, ROLES, (0.1, node_timeout_s + 4.0)),
        "slow": FaultKind("slow", False, ROLES, (1.0, 20.0)),
        "jump": FaultKind("jump", False, ROLES, (1.0, 60.0)),
    }


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
        self._is_stopped = False
        self._is_hit: Counter[str] = Counter()  # faults under way, by the node's incarnation
        self.injected: Counter[str] = Counter()
        self._next()

    def stop(self) -> None:
        """Inject no more faults."""
        self._is_stopped = True

    def _next(self) -> None:
        planned = None if self._is_stopped else next(self._schedule, None)
        if planned is not None:
            events = self._cluster.events
            events.background_after(max(planned.at_s - events.now(), 0.0), self._strike, planned)

    def _strike(self, planned: PlannedFault) -> None:
        if self._is_stopped:
            return
        registered = self._cluster.gateway.pool.registry.workers
        states = [
            NodeState(
                node.incarnation, node.kind, node.incarnation in registered and not self._is_hit[node.incarnation]
            )
            for role in ROLES
            for node in self._cluster.of(role)
        ]
        target = choose_target(planned, states)
        if target:
            self.injected[planned.kind.name] += 1
            self._is_hit[target] += 1
            self._cluster.events.after(planned.lasts_s, self._over, target)
            STRIKES[planned.kind.name](self, self._cluster.nodes[target], planned)
        self._next()

    def _over(self, target: str) -> None:
        self._is_hit[target] -= 1

    def kill(self, node: Node, planned: PlannedFault) -> None:
        self._cluster.kill(node)
        self._cluster.events.after(planned.lasts_s, self._replace, node.kind)

    def _replace(self, role: Role) -> None:
        self._cluster.start(role)

    def hang(self, node: Node, planned: PlannedFault) -> None:
        self._cluster.hang(node, planned.lasts_s, node_timeout_s=self._timeout_s)

    def cut(self, node: Node, planned: PlannedFault) -> None:
        others = self._cluster.of("prefill" if node.kind == "decode" else "decode")
        other = others[int(planned.draw * len(others))]
        self._cluster.cut(node, other, planned.lasts_s, node_timeout_s=self._timeout_s)

    def slow(self, node: Node, planned: PlannedFault) -> None:
        node.slow_down(SLOWNESS)
        self._cluster.events.after(planned.lasts_s, node.slow_down, 1.0)

    def jump(self, node: Node, planned: PlannedFault) -> None:
        node.clock.jump(planned.lasts_s)
        node.turn()


STRIKES: dict[str, Strike] = {
    "kill": FaultInjector.kill,
    "hang": FaultInjector.hang,
    "pause": FaultInjector.hang,
    "cut": FaultInjector.cut,
    "slow": FaultInjector.slow,
    "jump": FaultInjector.jump,
}
