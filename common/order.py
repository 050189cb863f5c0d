"""Which request comes first, wherever some must wait: in the gateway, on a prefill node, on a decode node. Pure.

The policy orders the queue; with priorities on, requests are then sorted by their standing, and the policy's order
decides among equals. Higher values are more urgent everywhere: the gateway has turned the user's value round by the
time it travels, if low values are to come first.

Ageing raises every waiting request by the same rate, so the order of two requests never changes while both wait, and a
standing needs no clock: it is the priority less the rate times the instant of arrival. A request outranks whatever
arrives ``(highest priority - own priority) / rate`` seconds after it, which bounds for how long it can be overtaken.
"""

from collections.abc import Iterable, Sequence

from common.policy import Policy
from common.request import Request
from common.scheduling import PriorityRules


class Order:
    """The order of one node's, or the gateway's, requests."""

    def __init__(self, policy: Policy, rules: PriorityRules | None = None) -> None:
        self.policy = policy
        self.rules = rules or PriorityRules()

    def sort(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, first in line first.

        Args:
            waiting: in order of arrival.
            now: seconds of the node's clock.
        """
        ordered = self.policy.order(waiting, now)
        return sorted(ordered, key=self._rank) if self.rules.is_enabled else ordered

    def merge(self, begun: Sequence[Request], waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """Those that are being worked on and those that wait, in one line: a more urgent one overtakes what has begun.

        Args:
            begun: in the order in which they began; among equals they come first.
        """
        ordered = [*begun, *self.policy.order(waiting, now)]
        return sorted(ordered, key=self._rank) if self.rules.is_enabled else ordered

    def least_first(self, running: Iterable[Request]) -> list[Request]:
        """In which order running requests give way: the least urgent first, and of these the newest."""
        return sorted(running, key=lambda request: (self.priority(request), -request.arrived_at))

    def _rank(self, request: Request) -> float:
        return -self.standing(request)

    def priority(self, request: Request) -> int:
        """Its own, or that of the most urgent request that waits for it; 0 for all with priorities off."""
        if not self.rules.is_enabled:
            return 0
        return max(request.priority, request.inherited_priority)

    def standing(self, request: Request) -> float:
        """What requests are sorted by, highest first; two of them keep their order for ever."""
        return self.priority(request) - self.rules.aging_per_s * request.arrived_at

    def beats(self, waiting: Request, running: Request) -> bool:
        """Whether one that waits may take the place of one that runs."""
        if not self.rules.is_enabled:
            return False
        return self.priority(waiting) - self.priority(running) > self.rules.preemption_threshold
