"""In which order waiting requests are tried. One protocol, one table; choosing a policy is a lookup."""

from collections.abc import Callable, Sequence
from typing import Protocol

from common.radix import RadixCache
from common.request import Request
from common.request_pages import packed_tokens

#: A longer queue makes ``lpm`` fall back to order of arrival: matching every request would cost more than it gains.
LPM_DEGRADE_THRESHOLD = 128


class Policy(Protocol):
    """Orders the waiting queue before each step."""

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, first in line first.

        Args:
            waiting: in order of arrival; those retracted or paused stand at its front.
            now: seconds of the node's clock.
        """
        ...


class FirstComeFirstServed:
    """Order of arrival, which is that of the queue."""

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return waiting


class LongestPrefixMatch:
    """Most cached tokens first; equals in order of arrival.

    Args:
        cache: of this node.
        degrade_threshold: a longer queue is served in order of arrival.
    """

    def __init__(self, cache: RadixCache, degrade_threshold: int = LPM_DEGRADE_THRESHOLD) -> None:
        self._cache = cache
        self._degrade_threshold = degrade_threshold

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        if len(waiting) > self._degrade_threshold:
            return waiting
        return sorted(waiting, key=lambda request: -self._num_cached(request))

    def _num_cached(self, request: Request) -> int:
        return self._cache.match(packed_tokens(request, request.num_cacheable), request.salt).num_tokens


#: By ``--schedule-policy``; the configuration knows the same names.
_POLICIES: dict[str, Callable[[RadixCache, int], Policy]] = {
    "fcfs": lambda cache, threshold: FirstComeFirstServed(),
    "lpm": LongestPrefixMatch,
}
#: These order by what is cached; with ``--disable-radix-cache`` they are ``fcfs``.
NEED_CACHE = ("lpm",)


def make_policy(name: str, cache: RadixCache, *, lpm_degrade_threshold: int = LPM_DEGRADE_THRESHOLD) -> Policy:
    """The policy of this ``--schedule-policy``, over this node's cache."""
    if name in NEED_CACHE and not cache.is_enabled:
        name = "fcfs"
    return _POLICIES[name](cache, lpm_degrade_threshold)
