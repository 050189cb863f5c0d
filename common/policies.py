"""What a policy is, and the small ones: each orders the waiting queue by one thing. Pure."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from common.radix import RadixCache
from common.request import Request
from common.request_pages import packed_tokens

#: A longer queue makes ``lpm`` fall back to order of arrival: matching every request would cost more than it gains.
LPM_DEGRADE_THRESHOLD = 128


class Policy(Protocol):
    """Orders the waiting queue before each step. A policy of one's own inherits what it does not need.

    Attributes:
        name: as in ``--schedule-policy``.
        reason: why this order was chosen, where the policy chooses among several.
    """

    name: str
    reason: str = ""

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

    def served(self, request: Request, *, num_input: int = 0, num_output: int = 0) -> None:
        """So many prompt tokens are computed for a request, or so many output tokens were."""
        return


class FirstComeFirstServed(Policy):
    """Order of arrival, which is that of the queue."""

    name = "fcfs"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return waiting


class LongestPrefixMatch(Policy):
    """Most cached tokens first; equals in order of arrival.

    Args:
        cache: of this node.
        degrade_threshold: a longer queue is served in order of arrival.
    """

    name = "lpm"

    def __init__(self, cache: RadixCache, degrade_threshold: int = LPM_DEGRADE_THRESHOLD) -> None:
        self._cache = cache
        self._degrade_threshold = degrade_threshold

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        if len(waiting) > self._degrade_threshold:
            return waiting
        return sorted(waiting, key=lambda request: -self._num_cached(request))

    def _num_cached(self, request: Request) -> int:
        return self._cache.match(packed_tokens(request, request.num_cacheable), request.salt).num_tokens
