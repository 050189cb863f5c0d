"""The seeded schedule of faults: pure, so that a seed gives the same faults on the same nodes again.

Losses of a node come at most every ``kill_every`` seconds and smaller faults every ``fault_every`` seconds, each kind
in turn of a shuffled order. A node is hit only if another node of its role is up and hit by nothing, or if the service
has no other node of that role: then requests wait until it is back.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What the schedule knows about a fault.

    Attributes:
        is_loss: the service loses a node or a gateway by it.
        roles: roles of the nodes that it may hit; empty if it hits none of the processes.
        lasts_s: shortest and longest time until it is undone.
    """

    name: str
    is_loss: bool
    roles: tuple[str, ...]
    lasts_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of the schedule.

    Attributes:
        at_s: seconds after the start of the load.
        draw: chooses among the nodes that may be hit at that moment; at least 0 and less than 1.
    """

    at_s: float
    kind: FaultKind
    lasts_s: float
    draw: float


def fault_schedule(
    kinds: Sequence[FaultKind], *, kill_every: float, fault_every: float, seed: int
) -> Iterator[PlannedFault]:
    """Faults without end, in the order of their instants."""
    losses = _turns([kind for kind in kinds if kind.is_loss], kill_every, random.Random(f"losses of {seed}"))
    others = _turns([kind for kind in kinds if not kind.is_loss], fault_every, random.Random(f"faults of {seed}"))
    following = [next(losses, None), next(others, None)]
    while any(following):
        first = min((fault for fault in following if fault is not None), key=lambda fault: fault.at_s)
        yield first
        index = following.index(first)
        following[index] = next((losses, others)[index], None)


def _turns(kinds: list[FaultKind], every_s: float, drawn: random.Random) -> Iterator[PlannedFault]:
    at_s = 0.0
    while kinds:
        drawn.shuffle(kinds)
        for kind in kinds:
            at_s += every_s * drawn.uniform(1.0, 1.25)
            yield PlannedFault(at_s, kind, drawn.uniform(*kind.lasts_s), drawn.random())


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as the choice of a target sees it."""

    name: str
    role: str
    is_up: bool  # registered, and hit by no fault


def choose_target(fault: PlannedFault, nodes: Sequence[NodeState], lone_roles: Collection[str] = ()) -> str:
    """The node that a fault hits; empty if none may be hit now.

    Args:
        lone_roles: roles of which the service has one node.
    """
    num_up = Counter(node.role for node in nodes if node.is_up)
    candidates = [
        node.name
        for node in nodes
        if node.is_up and node.role in fault.kind.roles and (num_up[node.role] > 1 or node.role in lone_roles)
    ]
    return candidates[int(fault.draw * len(candidates))] if candidates else ""
