"""Fair sharing by virtual token counters: over tenants (``--schedule-policy fair``) and over priority classes. Pure.

Every account has a counter, charged for the tokens it was served, divided by its weight; whoever has the lowest comes
next. An account that had nothing waiting for a while is lifted to the lowest of those that wait (or, if nobody waits,
to that of the account which left last), so that idleness earns no credit. While two accounts both have requests
waiting, what they were served differs by at most twice the cost of one largest request, or of all outputs in progress.
The method is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24, arXiv:2401.00588), as are the
weights of input and output tokens.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from common.request import Request
from common.scheduling.policies.base import Policy

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
#: Accounts that are remembered while they have nothing waiting; the names come from clients.
MAX_IDLE_ACCOUNTS = 10_000


class TokenCounters:
    """Args:
    weights: by account; one that is not named has ``default_weight``.
    """

    def __init__(self, weights: Mapping[str, float], *, default_weight: float = 1.0) -> None:
        self._weights = dict(weights)
        self._default_weight = default_weight
        self._values: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._last_left = ""  # the account that left the queue last

    def value(self, account: str) -> float:
        """Tokens that the account was served, or was lifted over, divided by its weight."""
        return self._values.get(account, 0.0)

    def arrived(self, account: str) -> None:
        """One more request of this account waits."""
        if not self._num_waiting[account]:
            active = [self.value(other) for other, count in self._num_waiting.items() if count]
            self._values[account] = max(self.value(account), min(active, default=self.value(self._last_left)))
        self._num_waiting[account] += 1

    def left(self, account: str) -> None:
        """One request less of this account waits, whatever became of it."""
        assert self._num_waiting[account] > 0, f"a request of {account!r} leaves that never came"
        self._num_waiting[account] -= 1
        if not self._num_waiting[account]:
            del self._num_waiting[account]
            self._last_left = account
            if len(self._values) > MAX_IDLE_ACCOUNTS + len(self._num_waiting):
                self._forget()

    def charge(self, account: str, tokens: float) -> None:
        """The account was served so much, in weighted tokens."""
        self._values[account] = self.value(account) + tokens / self.weight(account)

    def interleave(
        self, ordered: Sequence[Request], account_of: Callable[[Request], str], cost_of: Callable[[Request], float]
    ) -> list[Request]:
        """Whose turn is when, if each is charged its cost as it comes up. Inside an account the order stays.

        Equal counters go by the given order.
        """
        queues: dict[str, list[Request]] = {}
        places: dict[str, list[int]] = {}
        for place, request in enumerate(ordered):
            account = account_of(request)
            if account not in queues:
                queues[account], places[account] = [], []
            queues[account].append(request)
            places[account].append(place)
        if len(queues) < 2:
            return list(ordered)
        turns: list[tuple[float, int, float, Iterator[Request], Iterator[int]]] = []
        for account, queue in queues.items():
            later = iter(places[account])
            turns.append((self.value(account), next(later), self.weight(account), iter(queue), later))
        heapq.heapify(turns)
        return list(_take_turns(turns, cost_of))

    def weight(self, account: str) -> float:
        """The account's share."""
        return self._weights.get(account, self._default_weight)

    def _forget(self) -> None:
        """Drop the lower half of the idle: most of them would be lifted on return anyway."""
        idle = sorted((value, account) for account, value in self._values.items() if account not in self._num_waiting)
        for _, account in idle[: len(idle) // 2]:
            del self._values[account]


def _take_turns(
    turns: list[tuple[float, int, float, Iterator[Request], Iterator[int]]], cost_of: Callable[[Request], float]
) -> Iterator[Request]:
    """From a heap of counters; each with the place of its next request, its weight, its requests and later places."""
    while turns:
        value, _, weight, requests, later = turns[0]
        request = next(requests)
        yield request
        place = next(later, None)
        if place is None:
            heapq.heappop(turns)
        else:
            heapq.heapreplace(turns, (value + cost_of(request) / weight, place, weight, requests, later))


def cost_of(request: Request) -> float:
    """What a request is charged when it is admitted: prompt tokens that are not cached."""
    return 0.0 if request.is_charged else INPUT_WEIGHT * request.num_uncached


def weighted(num_input: int, num_output: int) -> float:
    """Tokens as they are charged."""
    return INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output


class Fair(Policy):
    """The tenant that was served least comes first.

    A node sees what it serves itself: prompts on a prefill node, prompts and outputs on a decode node and the gateway.

    Args:
        weights: of tenants; one that is not named has 1.
    """

    name = "fair"

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.counters = TokenCounters(weights)

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return self.counters.interleave(waiting, attrgetter("tenant"), cost_of)

    def arrived(self, request: Request) -> None:
        self.counters.arrived(request.tenant)

    def left(self, request: Request) -> None:
        self.counters.left(request.tenant)

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        self.counters.charge(request.tenant, weighted(num_input, num_output))

    def decoded(self, requests: Sequence[Request]) -> None:
        for tenant, count in Counter(map(attrgetter("tenant"), requests)).items():
            self.counters.charge(tenant, weighted(0, count))
