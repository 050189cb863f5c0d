"""What a policy is, and the small ones: each orders the waiting queue by one thing. Pure.

What is cached of a waiting request is read off its watch, which the radix cache keeps current, so that no policy
matches anything. All sorts keep the order of arrival among equals.
"""

from abc import abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from common.scheduling.in_batch_prefix_caching import Sharing, SharingLimits
from common.scheduling.new_token_ratio import RatioConstants


class Policy(Protocol):
    """Orders the waiting queue before each step. A policy of one's own inherits what it does not need.

    Attributes:
        name: as in ``--schedule-policy``.
        choice: the policy that it follows just now, where it chooses among several, and why (``reason``).
        overtakes: whether one that waits may come before one that has begun to be computed, between two chunks.
    """

    name: str
    choice: str = ""
    reason: str = ""
    overtakes: bool = False

    @abstractmethod
    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, first in line first.

        Args:
            waiting: in order of arrival; those retracted or paused stand at its front.
            now: seconds of the node's clock.
        """

    def arrived(self, request: Request) -> None:
        """A request waits from now on."""
        return

    def left(self, request: Request) -> None:
        """It waits no longer, whatever became of it."""
        return

    def missed(self, request: Request) -> None:
        """The deadline of a request that has waited here passed before its end."""
        return

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """So many prompt tokens are computed for a request, or so many output tokens were."""
        return

    def decoded(self, requests: Sequence[Request]) -> None:
        """Each of these produced one output token, which is ``served`` of each, if there is no quicker way."""
        for request in requests:
            self.served(request, num_output=1)

    def totals(self) -> dict[str, float]:
        """Monotonic totals, for metrics."""
        return {}


class FirstComeFirstServed(Policy):
    """Order of arrival, which is that of the queue."""

    name = "fcfs"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return waiting


class LongestOutputFirst(Policy):
    """Whoever may produce most begins first, so that no long one is left running alone at the end."""

    name = "lof"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: -request.sampling.max_new_tokens)


class Shuffled(Policy):
    """Another order for every step, as the seed has it.

    Positions are drawn by a counter-based generator (SplitMix64 of Steele, Lea and Flood, OOPSLA'14), so that the order
    follows from the seed and the number of orders before it.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._state = seed % 2**64
        self._num_drawn = 0

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        counts = np.arange(self._num_drawn + 1, self._num_drawn + 1 + len(waiting), dtype=np.uint64)
        self._num_drawn += len(waiting)
        keys = _mixed(np.uint64(self._state) + counts * np.uint64(0x9E3779B97F4A7C15))
        return [waiting[index] for index in np.argsort(keys, kind="stable").tolist()]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finishing: nearby numbers come out unlike each other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ShortestFirst(Policy):
    """Least work first: prompt tokens that are not cached, and the output that is expected.

    Where nothing is known about a request's output, it counts with the share of what it may produce that the new-token
    ratio begins with.
    """

    name = "short-first"

    def __init__(self, constants: RatioConstants | None = None) -> None:
        constants = constants or RatioConstants()
        self._clip = constants.clip
        self._share = constants.initial

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=self._work)

    def _work(self, request: Request) -> float:
        num_output = len(request.output)
        num_left = request.sampling.max_new_tokens - num_output
        if request.expected_output:
            expected: float = min(max(request.expected_output - num_output, 1), num_left)
        else:
            expected = min(num_left, self._clip) * self._share
        return request.num_uncached + expected


class HighestResponseRatioNext(Policy):
    """Longest waiting, measured by the tokens that are to be computed: short ones go first, and long ones get there.

    Brinch Hansen's rule (1971): the ratio of waiting and service time to service time.
    """

    name = "hrrn"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: (request.arrived_at - now) / max(request.num_uncached, 1))


class EarliestDeadlineFirst(Policy):
    """Earliest deadline first; those that are lost already, last. A prompt that has begun is overtaken too."""

    name = "edf"
    overtakes = True

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        can_be_met = [request for request in waiting if request.deadline_at > now]
        lost = [request for request in waiting if request.deadline_at <= now]
        return sorted(can_be_met, key=_deadline) + sorted(lost, key=_deadline)


class LongestPrefixMatch(Policy):
    """Most cached tokens first; last those whose prefix one before them will have put into the cache.

    Args:
        page_size: of the node's cache.
        sharing: who counts as having the prefix of another.
        degrade_threshold: a longer queue is served in order of arrival.
    """

    name = "lpm"

    def __init__(self, page_size: int, *, sharing: SharingLimits, degrade_threshold: int) -> None:
        self._page_size = page_size
        self._sharing = sharing
        self._degrade_threshold = degrade_threshold

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        if len(waiting) > self._degrade_threshold:
            return waiting
        sharing = Sharing(self._page_size, self._sharing)
        first: list[Request] = []
        last: list[Request] = []
        for request in waiting:
            (last if sharing.holds_back_or_add(request) else first).append(request)
        first.sort(key=_minus_cached)
        return first + last


_deadline = attrgetter("deadline_at")


def _minus_cached(request: Request) -> int:
    return 0 if request.watch is None else -request.watch.num_tokens
