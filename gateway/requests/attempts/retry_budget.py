"""Bounds how many requests are recovered in a short time, so that failures do not multiply the load. Pure.

A recovery costs about what a new request costs. As many requests are recovered at once as are in flight, and
``MINIMUM`` more: enough for the loss of every node. Many failures in a row add no more load than as many recoveries
again every ``PERIOD_S`` seconds. A recovery beyond the budget is not refused. It waits, and the next ones wait behind
it.
"""

MINIMUM = 32
PERIOD_S = 5.0


class RetryBudget:
    """A token bucket whose size and rate follow the number of requests in flight."""

    def __init__(self) -> None:
        self._num_used = 0.0  # recoveries that the time since has not paid for yet
        self._at = 0.0

    def take(self, now: float, *, num_in_flight: int) -> float:
        """Count one recovery. Return the seconds that it has to wait; 0.0 within the budget."""
        size = num_in_flight + MINIMUM
        per_s = size / PERIOD_S
        self._num_used = max(self._num_used - max(now - self._at, 0.0) * per_s, 0.0) + 1.0
        self._at = max(now, self._at)
        return max((self._num_used - size) / per_s, 0.0)
