"""Bounded skip-ahead: smaller requests may pass one that does not fit, but only so many; then all wait. Pure."""

from common.request import Request

#: What is told of one that has passed others.
PASSING = ", passing who does not fit"
#: How many may pass one that does not fit, and how many that do not fit are looked past in one step.
MAX_SKIP_AHEAD = 8


class SkipAhead:
    """Those that did not fit in the step in the making.

    Args:
        limit: requests that may pass one that does not fit, in its whole life; 0 keeps the order strictly.
    """

    def __init__(self, limit: int = MAX_SKIP_AHEAD) -> None:
        self._limit = limit
        self._refused: list[Request] = []
        self._waiting: list[Request] = []
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Nobody further back may be tried now."""
        refused = self._refused
        return self._is_closed or len(refused) > self._limit or any(r.num_passed >= self._limit for r in refused)

    def is_closed_to(self, is_awaited: bool) -> bool:
        """As ``is_closed``; but no number of others keeps back those whom somebody waits for elsewhere."""
        return self._is_closed or (not is_awaited and self.is_closed)

    def close(self) -> None:
        """Nobody may pass, whatever the limit."""
        self._is_closed = True

    @property
    def patient(self) -> list[Request]:
        """Those that wait for something else and were passed often enough: now only by who leaves them room."""
        return [request for request in self._waiting if request.num_passed >= self._limit]

    def refuse(self, request: Request) -> None:
        """This one does not fit."""
        self._refused.append(request)

    def wait(self, request: Request) -> None:
        """What this one waits for is on its way: all may pass it, and they are counted."""
        self._waiting.append(request)

    def admit(self, request: Request) -> bool:
        """This one did fit, and has passed those before it that did not. True if there were any."""
        request.num_passed = 0
        for passed in self._refused + self._waiting:
            passed.num_passed += 1
        return bool(self._refused)
