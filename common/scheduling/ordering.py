"""Which request comes first, wherever some must wait: in the gateway, on a prefill node, on a decode node. Pure.

The policy orders the queue; with priorities on, requests are then sorted by their standing, and the policy's order
decides among equals. Higher values are more urgent everywhere: the gateway has turned the user's value round by the
time it travels, if low values are to come first.

Ageing raises every waiting request by the same rate, so the order of two requests never changes while both wait, and a
standing needs no clock: it is the priority less the rate times the instant of arrival. A request outranks whatever
arrives ``(highest priority - own priority) / rate`` seconds after it, which bounds for how long it can be overtaken, or
lose a place that it has (docs/scheduling.md tells which bounds on waiting follow).

With ``--priority-classes`` all that holds inside a class. The classes take turns by virtual token counters
(``common/scheduling/policies/fair.py``), so that while several have requests waiting each is served in proportion to
its weight.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from common.config.scheduling import PriorityRules
from common.decision_log import Decisions
from common.request import LOWEST_PRIORITY, Request, RequestKey
from common.scheduling.policies.base import Policy
from common.scheduling.policies.fair import Fair, TokenCounters, cost_of, weighted

#: What a ranked request stands by: lower is earlier; the last number is that of its arrival.
Place = tuple[float, bool, bool, float, bool, int]


class RequestOrdering:
    """The order of one node's, or the gateway's, requests.

    Attributes:
        is_ranked: who comes first follows from ``place`` and, if it is not None, from ``turns``.
        turns: by which accounts take turns.
        are_begun_in_turn: also those that have begun; otherwise these come first.
    """

    def __init__(self, policy: Policy, rules: PriorityRules | None = None) -> None:
        self.policy = policy
        self.rules = rules or PriorityRules()
        weights = self.rules.class_weights
        self._classes = TokenCounters(weights, default_weight=min(weights.values())) if weights else None
        self._choice = policy.choice
        tenants = policy.counters if isinstance(policy, Fair) else None
        self.turns = self._classes or tenants
        self.are_begun_in_turn = self._classes is not None
        has_own_turns = tenants is not None and (self._classes is not None or self.rules.is_enabled)
        self.is_ranked = _is_ranked(policy) and not has_own_turns
        self.is_charging = self._classes is not None or type(policy).served is not Policy.served

    # ---- what there is to be ordered --------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request waits from now on."""
        self.policy.arrived(request)
        if self._classes is not None:
            self._classes.arrived(self._class_of(request))

    def left(self, request: Request) -> None:
        """It waits no longer: admitted, aborted or failed."""
        self.policy.left(request)
        if self._classes is not None:
            self._classes.left(self._class_of(request))

    def admitted(self, request: Request, *, num_input: int) -> None:
        """A request is served from now on, and so many of its prompt's tokens have to be computed for it.

        What is computed again after a retraction is nobody's to pay.
        """
        if self.is_charging and not request.is_charged:
            request.is_charged = True
            self.served(request, num_input=num_input)

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """So many prompt tokens are computed for a request, or so many output tokens were."""
        if self.is_charging:
            self.policy.served(request, num_input=num_input, num_output=num_output)
            if self._classes is not None:
                self._classes.charge(self._class_of(request), weighted(num_input, num_output))

    def decoded(self, requests: Sequence[Request]) -> None:
        """Each of these produced one output token. Costs nothing unless somebody counts."""
        if self.is_charging:
            self.policy.decoded(requests)
            if self._classes is not None:
                for name, count in Counter(map(self._class_of, requests)).items():
                    self._classes.charge(name, weighted(0, count))

    def explain(self, decisions: Decisions, now: float) -> None:
        """Note it if the policy follows another one than before."""
        before, self._choice = self._choice, self.policy.choice
        if self._choice != before:
            decisions.note(now, "", "adapt", "from {} to {}: {}", before, self._choice, self.policy.reason)

    def are_of_one_class(self, one: Request, other: Request) -> bool:
        return self._class_of(one) == self._class_of(other)

    def _class_of(self, request: Request) -> str:
        return request.priority_class or self.rules.default_class

    # ---- the order --------------------------------------------------------------------------------------------------

    def sort(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, first in line first.

        Args:
            waiting: in order of arrival.
            now: seconds of the node's clock.
        """
        return self._by_rules(self.policy.order(waiting, now))

    def merge(self, begun: Sequence[Request], waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """Those that are being worked on and those that wait, in one line: a more urgent one overtakes what has begun.

        With a policy that ``overtakes``, the policy decides about all of them.

        Args:
            begun: in the order in which they began; among equals they come first.
        """
        if self.policy.overtakes:
            return self._by_rules(self.policy.order([*begun, *waiting], now))
        return self._by_rules([*begun, *self.policy.order(waiting, now)])

    def _by_rules(self, ordered: Sequence[Request]) -> Sequence[Request]:
        ordered = self.by_standing(ordered)
        return self._classes.interleave(ordered, self._class_of, cost_of) if self._classes else ordered

    def account(self, request: Request) -> str:
        """On which of those that take turns it is."""
        if self.turns is None:
            return ""
        return self._class_of(request) if self.are_begun_in_turn else request.tenant

    def place(self, request: Request, number: int, now: float, *, has_begun: bool = False) -> Place:
        """Where a request stands on its account, if ``is_ranked``. Two places are never the same.

        Args:
            number: of its arrival, or of its beginning.
        """
        policy, standing = self.policy, -self.standing(request) if self.rules.is_enabled else 0.0
        if has_begun and not policy.overtakes:
            return standing, False, False, 0.0, False, number
        has_fallen = policy.falls_at(request) <= now
        return standing, not policy.overtakes, has_fallen, policy.rank(request), not has_begun, number

    def in_turn(self, requests: Sequence[Request]) -> Sequence[Request]:
        """First in line first, whatever the policy: the class that was served least, and in it by standing."""
        return self._by_rules(requests)

    def claim_to_stay(self, request: Request) -> tuple[float, float]:
        """The lower, the sooner a request gives way: that of the class that was served most, and in it by standing."""
        served = self._classes.value(self._class_of(request)) if self._classes else 0.0
        return -served, self.standing(request)

    def by_standing(self, requests: Sequence[Request]) -> Sequence[Request]:
        """The most urgent first, whatever the policy; equals as they stand."""
        if not self.rules.is_enabled:
            return requests
        rate = self.rules.aging_per_s
        # Highest standing first, spelt out since queues are long.
        return sorted(requests, key=lambda r: rate * r.arrived_at - max(r.priority, r.inherited_priority))

    def most_urgent(self, waiting: Iterable[Request]) -> Request:
        """The one of highest standing, of equals the first."""
        return max(waiting, key=self.standing)

    def may_beat(self, most: int, running: Iterable[Request]) -> bool:
        """Whether one of those that wait, of which the highest priority is ``most``, could take the place of one that
        runs; quick, and never wrong about a no."""
        if not self.rules.is_enabled:
            return False
        least = min((self.priority(request) for request in running), default=most)
        return most - least > self.rules.preemption_threshold

    def least_first(self, running: Iterable[Request]) -> list[Request]:
        """In which order running requests give way: the one that stands lowest first, among equals the newest."""
        return sorted(running, key=lambda request: (self.standing(request), -request.arrived_at))

    def priority(self, request: Request) -> int:
        """Its own, or that of the most urgent request that waits for it; 0 for all with priorities off."""
        if not self.rules.is_enabled:
            return 0
        return max(request.priority, request.inherited_priority)

    def loan(self, waiting: Request, holder: Request) -> int:
        """The priority that one which others wait for has of one of these.

        It may not come to stand before the one that waits, or what is lent to one that has aged would be worth more
        than it is to the lender, and two borrowers could take each other's place in turn.
        """
        priority = self.priority(waiting)
        if not self.rules.is_enabled or holder.arrived_at >= waiting.arrived_at:
            return priority
        age_s = waiting.arrived_at - holder.arrived_at
        return max(LOWEST_PRIORITY, priority - math.ceil(self.rules.aging_per_s * age_s))

    def lend(self, waiting: Request, holder: Request, lent: dict[RequestKey, int]) -> None:
        """Note in ``lent``, by borrower, what one of these lends the other, if nobody lends it more."""
        lent[holder.key] = max(lent.get(holder.key, LOWEST_PRIORITY), self.loan(waiting, holder))

    def standing(self, request: Request) -> float:
        """What requests are sorted by, highest first; two of them keep their order for ever."""
        return self.priority(request) - self.rules.aging_per_s * request.arrived_at

    def beats(self, waiting: Request, running: Request) -> bool:
        """Whether one that waits may take the place of one that runs, which is of the same class.

        Its priority is higher by more than the threshold, and it stands before the other. So one that has waited long
        enough to come first keeps what it then got; and two never take each other's place in turn, since the difference
        between their standings stays what it is.
        """
        if not self.rules.is_enabled or not self.are_of_one_class(waiting, running):
            return False
        difference = self.priority(waiting) - self.priority(running)
        return difference > self.rules.preemption_threshold and self.standing(waiting) > self.standing(running)


def _is_ranked(policy: Policy) -> bool:
    """Whether it says so itself: a policy of one's own may have inherited that, and order otherwise."""
    makers = [next(kind for kind in type(policy).__mro__ if name in vars(kind)) for name in ("is_ranked", "order")]
    return policy.is_ranked and makers[0] is makers[1]
