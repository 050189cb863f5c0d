"""How many requests may be in flight, and when one that was turned away should come again. Pure.

The bound is what the decode nodes run at once and a queue on top. Whoever is over it is told at once, with the time
after which, at the rate seen lately, enough requests will have ended: for it, and for all who were told an earlier time
and are still to come back. Until the first has ended it is what those under way are expected to take.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable

from common.errors import ErrorCode, RequestError

WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Counts requests in flight.

    Args:
        max_queued: requests beyond those that the nodes run at once.

    Attributes:
        forecast: in how many seconds so many of those in flight will have ended, by what they have said so far; 0.0 if
            that cannot be told. Asked while none has ended lately; whoever knows them sets it.
    """

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._ended: deque[float] = deque(maxlen=1_024)  # in busy time, which stands still while nothing is in flight
        self._busy_before = 0.0
        self._busy_since = 0.0
        self._promised: list[tuple[float, int]] = []  # a heap: when how many were told to come back
        self._num_promised = 0
        self.num_in_flight = 0
        self.forecast: Callable[[int], float] = lambda count: 0.0

    def limit(self, max_running: int) -> int:
        return max_running + self._max_queued

    def excess(self, count: int, max_running: int) -> int:
        """How many would be too many if so many more came; at most 0 if none."""
        return self.num_in_flight + count - self.limit(max_running)

    def admit(self, count: int, *, max_running: int, now: float) -> None:
        """All of them or none. Raises RequestError: too many for ever (400), or for now (429)."""
        limit = self.limit(max_running)
        if count > limit:
            message = f"prompt: {count} prompts in one request, {limit} are possible at once"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param="prompt")
        excess = self.excess(count, max_running)
        if excess > 0:
            message = f"{self.num_in_flight} requests are in flight, {limit} are allowed"
            raise RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=self.retry_after(excess, now))
        if self.num_in_flight == 0:
            self._busy_since = now
        self.num_in_flight += count

    def release(self, now: float, *, is_evicted: bool = False) -> None:
        """One request has ended. If it only gave way to another, that says nothing about the rate at which they end."""
        assert self.num_in_flight > 0
        busy = self._busy(now)
        if not is_evicted:
            self._ended.append(busy)
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._busy_before = busy

    def _busy(self, now: float) -> float:
        return self._busy_before + (now - self._busy_since if self.num_in_flight else 0.0)

    def retry_after(self, count: int, now: float) -> float:
        """When to come back with a request that is this many too many, in seconds; 1 to 60, whole.

        As many requests and those that will have come back by then will have ended, at the rate of the last busy half
        minute. What is told here is remembered until then.
        """
        while self._promised and self._promised[0][0] <= now:
            self._num_promised -= heapq.heappop(self._promised)[1]
        known = self._seconds(count + self._num_promised, now)
        # Nobody knows: nothing has ended for so long that it may well take as long again.
        seconds = float(min(max(math.ceil(known or self._busy(now)), 1), MAX_RETRY_AFTER_S))
        if known and seconds < MAX_RETRY_AFTER_S:
            heapq.heappush(self._promised, (now + seconds, count))
            self._num_promised += count
        return seconds

    def _seconds(self, count: int, now: float) -> float:
        """Until so many will have ended; 0.0 if that cannot be told."""
        busy = self._busy(now)
        while self._ended and self._ended[0] < busy - WINDOW_S:
            self._ended.popleft()
        if not self._ended:
            return self.forecast(count)
        since = self._ended[0] if len(self._ended) == self._ended.maxlen else max(0.0, busy - WINDOW_S)
        return count * (busy - since) / len(self._ended)
