"""Decides how a node leaves its role, to stop or to take the other role. Pure.

A node that leaves takes no new requests and goes on with those that it has. It may leave when nothing is left, here or
on its way between a gateway and this node. A gateway acknowledges a heartbeat after it has handled all earlier messages
of this node, ``Deregister`` included; every request that it has sent before arrives before the acknowledgement. So the
node says that it is empty, and leaves once every gateway has acknowledged a later heartbeat and it is still empty.
"""

from dataclasses import dataclass
from enum import Enum

from common.config.shared import Role

#: Seconds for which a node that changes its role waits, once its requests are ended, for the proof that no peer writes
#: into its pages any more, and for its gateways.
FENCE_WAIT_S = 10.0


class DepartureStep(Enum):
    """What the event loop does next."""

    WAIT = "wait"
    SAY_EMPTY = "tell every gateway that no request is left, and ask for its acknowledgement"
    SAY_DRAINING = "tell every gateway that the node is not empty after all"
    END_REQUESTS = "end the requests that are left"
    LEAVE = "leave the role"
    STAY = "keep the role, and register again"


@dataclass(frozen=True, slots=True)
class Remainder:
    """What a node still has.

    Attributes:
        is_idle: no request is left, and the engine computes nothing.
        num_quarantined_pages: pages into which a peer may still write.
        is_registered: with one gateway at least.
        has_acknowledged: every gateway has answered since the node said that it is empty.
    """

    is_idle: bool
    num_quarantined_pages: int
    is_registered: bool
    has_acknowledged: bool


class Departure:
    """An order to leave the role.

    Args:
        next_role: None: the node stops for good.
        until: the instant at which the requests that are left are ended.

    Attributes:
        has_said_empty: the gateways were told that nothing is left here, and nothing has come since.
    """

    def __init__(self, next_role: Role | None, until: float) -> None:
        self.next_role = next_role
        self._until = until
        self.has_said_empty = False

    def registered(self) -> None:
        """A gateway has registered the node again, so the node must repeat that it leaves."""
        self.has_said_empty = False

    def next_step(self, left: Remainder, now: float) -> DepartureStep:
        is_due = now >= self._until
        if self.next_role is None and (is_due or not left.is_registered):
            return DepartureStep.LEAVE  # without a gateway, no answer can be delivered and no request can move
        if left.is_idle and (self.next_role is None or not left.num_quarantined_pages):
            if not self.has_said_empty:
                self.has_said_empty = True
                return DepartureStep.SAY_EMPTY
            if left.has_acknowledged:
                return DepartureStep.LEAVE
            return DepartureStep.STAY if self._is_overdue(now) else DepartureStep.WAIT
        if self.has_said_empty:
            self.has_said_empty = False
            return DepartureStep.SAY_DRAINING
        if self._is_overdue(now):
            return DepartureStep.STAY
        return DepartureStep.END_REQUESTS if is_due else DepartureStep.WAIT

    def _is_overdue(self, now: float) -> bool:
        """Whether the role is kept: a peer or a gateway that answers no more would hold the node for ever."""
        return self.next_role is not None and now >= self._until + FENCE_WAIT_S
