"""Bounded skip-ahead: a limited number of smaller requests may be admitted before one that does not fit. Pure."""

from itertools import chain

from common.request import Request

#: Appended to the reason of a decision that admits a request out of order.
PASSING = ", ahead of requests that do not fit"
#: Requests that may pass one that does not fit, and requests that do not fit which one step may look past.
MAX_SKIP_AHEAD = 8


class SkipAhead:
    """The requests that did not fit into the step being planned. At most ``limit`` requests pass each of them.

    Attributes:
        blocking: deferred requests that reached the limit. Later requests may pass them only if they leave room for
            them. The list only grows.
    """

    def __init__(self, limit: int) -> None:
        self.blocking: list[Request] = []
        self._limit = limit
        self._refused: list[Request] = []
        self._deferred: list[Request] = []
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether no later request may be tried in this step."""
        refused = self._refused
        return self._is_closed or len(refused) > self._limit or any(r.num_passed >= self._limit for r in refused)

    def is_closed_to(self, is_awaited: bool) -> bool:
        """Like ``is_closed``, but the limit does not hold back a request that another node waits for."""
        return self._is_closed or (not is_awaited and self.is_closed)

    def close(self) -> None:
        self._is_closed = True

    def refuse(self, request: Request) -> None:
        self._refused.append(request)

    def defer(self, request: Request) -> None:
        """Note that a request waits for something other than room. Later requests may pass it, and are counted."""
        if request.num_passed < self._limit:
            self._deferred.append(request)
        else:
            self.blocking.append(request)

    def admit(self, request: Request) -> bool:
        """Note that a request fits. Return whether it passed requests that did not."""
        request.num_passed = 0
        for passed in chain(self._refused, self._deferred, self.blocking):
            passed.num_passed += 1
        deferred, self._deferred = self._deferred, []
        for passed in deferred:
            self.defer(passed)
        return bool(self._refused)
