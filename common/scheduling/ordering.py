"""The order in which waiting requests are served, in the gateway, on a prefill node and on a decode node. Pure.

The scheduling policy orders the queue. With priorities enabled, requests are then sorted by effective priority, and the
policy's order decides among equals. A higher value is more urgent everywhere; the gateway negates the user's value if
low values come first.

Ageing raises the priority of every waiting request at the same rate, so two requests keep their order while both wait.
The effective priority therefore needs no clock: it is the priority minus the rate times the arrival instant, rounded
down. Requests of one priority that arrive in the same ``1 / rate`` seconds are equal, and the policy orders them. A
request comes before everything that arrives ``(highest priority - own priority + 1) / rate`` seconds after it. That
bounds, for every policy, how long others can overtake or preempt it (``docs/scheduling.md`` derives the bounds).

With ``--priority-classes`` these rules hold inside a class. Classes take turns by virtual token counters
(``common/scheduling/policies/fair.py``): while several classes have waiting requests, each is served in proportion to
its weight.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from common.config.scheduling import PriorityRules
from common.request import LOWEST_PRIORITY, Request
from common.scheduling.policies.base import Policy
from common.scheduling.policies.fair import TokenCounters, request_cost, weighted_tokens


class RequestOrdering:
    """The order of the requests of one node or of the gateway.

    Attributes:
        is_charging: served tokens are counted, by the policy or for classes.
    """

    def __init__(self, policy: Policy, rules: PriorityRules | None = None) -> None:
        self.policy = policy
        self.rules = rules or PriorityRules()
        weights = self.rules.class_weights
        self._classes = TokenCounters(weights, default_weight=min(weights.values())) if weights else None
        self.is_charging = self._classes is not None or type(policy).served is not Policy.served

    # ---- events -----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        self.policy.arrived(request)
        if self._classes is not None:
            self._classes.arrived(self._class_of(request))

    def left(self, request: Request) -> None:
        self.policy.left(request)
        if self._classes is not None:
            self._classes.left(self._class_of(request))

    def admitted(self, request: Request, *, num_input: int) -> None:
        """Charge for a request's prompt, of which ``num_input`` tokens must be computed.

        A request is charged once. Tokens that are computed again after a retraction are free.
        """
        if self.is_charging and not request.is_charged:
            request.is_charged = True
            self.served(request, num_input=num_input)

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        if self.is_charging:
            self.policy.served(request, num_input=num_input, num_output=num_output)
            if self._classes is not None:
                self._classes.charge(self._class_of(request), weighted_tokens(num_input, num_output))

    def decoded(self, requests: Sequence[Request]) -> None:
        if self.is_charging:
            self.policy.decoded(requests)
            if self._classes is not None:
                for name, count in Counter(map(self._class_of, requests)).items():
                    self._classes.charge(name, weighted_tokens(0, count))

    def _class_of(self, request: Request) -> str:
        return request.priority_class or self.rules.default_class

    # ---- the order --------------------------------------------------------------------------------------------------

    def sort(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, given in order of arrival, in the order in which they are served."""
        return self.by_priority(self.policy.order(waiting, now))

    def merge(self, begun: Sequence[Request], waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """Begun and waiting requests in one order, in which a more urgent waiting request comes before a begun one.

        A policy that ``overtakes`` orders all of them; otherwise begun requests come first among equals.
        """
        if self.policy.overtakes:
            return self.by_priority(self.policy.order([*begun, *waiting], now))
        return self.by_priority([*begun, *self.policy.order(waiting, now)])

    def by_priority(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests by class turn and, inside a class, by effective priority. Equal requests keep their order."""
        ordered = self.by_effective_priority(requests)
        return self._classes.interleave(ordered, self._class_of, request_cost) if self._classes else ordered

    def by_effective_priority(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests by effective priority, highest first. Equal requests keep their order."""
        if not self.rules.is_enabled:
            return requests
        rate = self.rules.aging_per_s
        # The negated effective priority, written out because queues are long.
        if not rate:
            return sorted(requests, key=lambda r: -r.priority)
        return sorted(requests, key=lambda r: math.ceil(rate * r.arrived_at - r.priority))

    # ---- priorities -------------------------------------------------------------------------------------------------

    def priority(self, request: Request) -> int:
        """The request's priority; 0 with priorities disabled."""
        return request.priority if self.rules.is_enabled else 0

    def effective_priority(self, request: Request) -> int:
        """The value that requests are sorted by, highest first. The difference between two requests never changes."""
        rate = self.rules.aging_per_s
        return self.priority(request) if not rate else -math.ceil(rate * request.arrived_at - self.priority(request))

    def comes_first(self, request: Request, other: Request) -> bool | None:
        """Whether a request comes before another one by effective priority; None if that decides nothing."""
        if not self.rules.is_enabled or self._class_of(request) != self._class_of(other):
            return None
        difference = self.effective_priority(request) - self.effective_priority(other)
        return difference > 0 if difference else None

    # ---- preemption -------------------------------------------------------------------------------------------------

    def may_preempt(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether a waiting request may take the place of a running one.

        Both are of one class, the priority of the waiting request is higher by more than the threshold, and its
        effective priority is higher. A request that has waited until it comes first therefore also keeps its place, and
        two requests never preempt each other in turn. A request that was preempted keeps its place for
        ``preemption_cooldown_s`` once it has it again, and for good after ``max_preemptions`` times.
        """
        rules = self.rules
        if rules.max_preemptions is not None and running.num_preempted >= rules.max_preemptions:
            return False
        if running.num_preempted and now - running.placed_at < rules.preemption_cooldown_s:
            return False
        if self.priority(waiting) - self.priority(running) <= self.rules.preemption_threshold:
            return False
        return self.is_more_urgent(waiting, running)

    def is_more_urgent(self, request: Request, other: Request) -> bool:
        """Whether a request comes before another one of its class because of its priority, and not only of its age."""
        if not self.rules.is_enabled or self.priority(request) <= self.priority(other):
            return False
        if self._class_of(request) != self._class_of(other):
            return False
        return self.effective_priority(request) > self.effective_priority(other)

    def may_preempt_any(self, waiting: Iterable[Request], running: Iterable[Request]) -> bool:
        """Whether a waiting request could preempt a running one. False is always right; True may be wrong, since ages
        and classes are not looked at."""
        if not self.rules.is_enabled:
            return False
        highest = max((request.priority for request in waiting), default=LOWEST_PRIORITY)
        lowest = min((request.priority for request in running), default=highest)
        return highest - lowest > self.rules.preemption_threshold

    def in_preemption_order(self, running: Iterable[Request]) -> list[Request]:
        """Running requests by effective priority, lowest first, the newest first among equals."""
        return sorted(running, key=lambda request: (self.effective_priority(request), -request.arrived_at))

    def retraction_rank(self, request: Request) -> tuple[float, float]:
        """A sort key; the lowest is retracted first: the most-served class, and in it the lowest effective priority."""
        served = self._classes.value(self._class_of(request)) if self._classes else 0.0
        return -served, self.effective_priority(request)
