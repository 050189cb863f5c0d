"""Fair sharing by virtual token counters, among tenants (``--schedule-policy fair``) and priority classes. Pure.

Each account has a counter of the tokens that it was served, divided by its weight. The account with the lowest counter
comes next. When an account without waiting requests gets one, its counter is raised to the lowest counter of an account
with waiting requests (or of the account that left the queue last, if there is none), so that idle time earns no credit.
While two accounts both have waiting requests, the weighted service that they received differs by at most twice the cost
of one largest request or of all outputs in progress.

The method and the weights of input and output tokens are those of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI'24, arXiv:2401.00588).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from common.request import Request
from common.scheduling.policies.base import Policy

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
#: Accounts without waiting requests that are remembered. Clients choose the names, so there must be a bound.
MAX_IDLE_ACCOUNTS = 10_000


class TokenCounters:
    """The counters of all accounts. An account that ``weights`` does not name has ``default_weight``."""

    def __init__(self, weights: Mapping[str, float], *, default_weight: float = 1.0) -> None:
        self._weights = dict(weights)
        self._default_weight = default_weight
        self._values: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._last_left = ""  # the account that left the queue last

    def value(self, account: str) -> float:
        """The account's counter, in weighted tokens divided by the account's weight."""
        return self._values.get(account, 0.0)

    def arrived(self, account: str) -> None:
        if not self._num_waiting[account]:
            active = [self.value(other) for other, count in self._num_waiting.items() if count]
            self._values[account] = max(self.value(account), min(active, default=self.value(self._last_left)))
        self._num_waiting[account] += 1

    def left(self, account: str) -> None:
        assert self._num_waiting[account] > 0, f"account {account!r} has no waiting request"
        self._num_waiting[account] -= 1
        if not self._num_waiting[account]:
            del self._num_waiting[account]
            self._last_left = account
            if len(self._values) > MAX_IDLE_ACCOUNTS + len(self._num_waiting):
                self._forget()

    def charge(self, account: str, tokens: float) -> None:
        """Add served tokens, in weighted tokens, to the account's counter."""
        self._values[account] = self.value(account) + tokens / self.weight(account)

    def interleave(
        self, ordered: Sequence[Request], account_of: Callable[[Request], str], cost_of: Callable[[Request], float]
    ) -> list[Request]:
        """The requests in the order in which accounts take turns, if each request is charged its cost at its turn.

        The order inside an account stays. Equal counters go by the given order.
        """
        queues: dict[str, list[tuple[int, Request]]] = {}
        for place, request in enumerate(ordered):
            queues.setdefault(account_of(request), []).append((place, request))
        if len(queues) < 2:
            return list(ordered)
        # A heap of counter, place of the next request, that request, weight, and later requests with their places.
        turns = [
            (self.value(account), *queue[0], self.weight(account), iter(queue[1:])) for account, queue in queues.items()
        ]
        heapq.heapify(turns)  # places differ, so that requests are never compared
        taken: list[Request] = []
        while turns:
            value, _, request, weight, later = turns[0]
            taken.append(request)
            follows = next(later, None)
            if follows is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (value + cost_of(request) / weight, *follows, weight, later))
        return taken

    def weight(self, account: str) -> float:
        return self._weights.get(account, self._default_weight)

    def _forget(self) -> None:
        """Forget the lower half of the idle accounts. Most of these would be raised on return anyway."""
        idle = sorted((value, account) for account, value in self._values.items() if account not in self._num_waiting)
        for _, account in idle[: len(idle) // 2]:
            del self._values[account]


def request_cost(request: Request) -> float:
    """Weighted tokens that a request is charged at admission: the prompt tokens that are not cached."""
    return 0.0 if request.is_charged else INPUT_WEIGHT * request.num_uncached


def weighted_tokens(num_input: int, num_output: int) -> float:
    return INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output


class Fair(Policy):
    """``fair``: the tenant that was served least comes first; a tenant that ``weights`` does not name has 1.

    Each process counts what it serves itself: prompts on a prefill node, prompts and outputs on a decode node and in
    the gateway.
    """

    name = "fair"
    forecast = "arrival"

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.counters = TokenCounters(weights)

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return self.counters.interleave(waiting, attrgetter("tenant"), request_cost)

    def arrived(self, request: Request) -> None:
        self.counters.arrived(request.tenant)

    def left(self, request: Request) -> None:
        self.counters.left(request.tenant)

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        self.counters.charge(request.tenant, weighted_tokens(num_input, num_output))

    def decoded(self, requests: Sequence[Request]) -> None:
        for tenant, count in Counter(map(attrgetter("tenant"), requests)).items():
            self.counters.charge(tenant, weighted_tokens(0, count))
