"""The policy interface, and the policies that order the waiting queue by one value. Pure.

The cached length of a waiting request comes from its watch, which the radix cache keeps up to date, so no policy looks
up prefixes. Requests that are equal under a policy keep their order of arrival.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from common.scheduling.in_batch_prefix_caching import InBatchPrefixes, InBatchPrefixLimits


class Policy(Protocol):
    """Orders the waiting queue before each step. A user's policy inherits the methods that it does not need.

    Attributes:
        name: as in ``--schedule-policy``.
        overtakes: whether a waiting request may come before one whose prompt is partly computed, between two chunks.
        forecast: the instant whose order of the queue tells what is served before a new request: its arrival, its last
            chance to be served in time, or none. The gateway refuses hopeless deadlines by it.
    """

    name: str
    overtakes: bool = False
    forecast: Literal["none", "arrival", "last chance"] = "none"

    @abstractmethod
    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests in the order in which they are served, at ``now`` seconds of the node's clock.

        They are given in order of arrival. With ``overtakes``, begun and retracted requests are among them, and first.
        """

    def arrived(self, request: Request) -> None:
        """A request joined the queue."""
        return

    def left(self, request: Request) -> None:
        """A request left the queue, for whatever reason."""
        return

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """Prompt tokens of a request are going to be computed, or output tokens were produced."""
        return

    def decoded(self, requests: Sequence[Request]) -> None:
        """Each of these requests produced one output token."""
        for request in requests:
            self.served(request, num_output=1)

    def totals(self) -> dict[str, float]:
        """Monotonic totals for metrics."""
        return {}


class FirstComeFirstServed(Policy):
    """``fcfs``: order of arrival."""

    name = "fcfs"
    forecast = "arrival"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return waiting


class LongestOutputFirst(Policy):
    """``lof``: the longest allowed output first, so that no long output is left to run alone at the end."""

    name = "lof"
    forecast = "arrival"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: -request.sampling.max_new_tokens)


class Shuffled(Policy):
    """``random``: a new order for each step.

    Sort keys come from a counter-based generator (SplitMix64 of Steele, Lea and Flood, OOPSLA'14), so the order follows
    from the seed and the number of orders before it.
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
    """The output function of SplitMix64: a bijection that makes nearby numbers unlike each other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class ShortestFirst(Policy):
    """``short-first``: the fewest prompt tokens to compute plus expected output tokens first.

    Without a prediction, 70 % of the allowed output are expected, and at most 2,867 tokens.
    """

    name = "short-first"
    forecast = "arrival"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=self._work)

    def _work(self, request: Request) -> float:
        num_output = len(request.output)
        num_left = request.sampling.max_new_tokens - num_output
        if request.expected_output:
            expected: float = min(max(request.expected_output - num_output, 1), num_left)
        else:
            expected = min(num_left, 4096) * 0.7
        return request.num_uncached + expected


class HighestResponseRatioNext(Policy):
    """``hrrn``: the longest waiting time per token to compute first, so long requests are not starved.

    The rule of Brinch Hansen (1971), the ratio of waiting plus service time to service time.
    """

    name = "hrrn"
    forecast = "last chance"  # what precedes a new request then has done so ever since

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: (request.arrived_at - now) / max(request.num_uncached, 1))


class EarliestDeadlineFirst(Policy):
    """``edf``: the earliest objective or deadline first. Requests without output that have missed it come last; others
    do not, since their clients wait for the next token. Overtakes begun prompts."""

    name = "edf"
    overtakes = True
    forecast = "arrival"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: ((due_at := request.due_at) <= now and not request.output, due_at))


class LongestPrefixMatch(Policy):
    """``lpm``: the most cached tokens first. A request that shares a prefix with one before it comes last, because that
    prefix will be cached by then."""

    name = "lpm"

    def __init__(self, page_size: int, sharing: InBatchPrefixLimits) -> None:
        self._page_size = page_size
        self._sharing = sharing

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        sharing = InBatchPrefixes(self._page_size, self._sharing)
        first: list[Request] = []
        last: list[Request] = []
        for request in waiting:
            (last if sharing.defer_or_add(request) else first).append(request)
        first.sort(key=_minus_cached)
        return first + last


def _minus_cached(request: Request) -> int:
    return 0 if request.watch is None else -request.watch.num_tokens
