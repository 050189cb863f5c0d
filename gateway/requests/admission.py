"""Bounds the requests in flight, and tells a refused client when to come back. Pure.

The bound is what the decode nodes run at once plus a queue. A request beyond it is refused with the time after which
enough requests will have ended, at the rate seen lately: enough for it, and for all that were told an earlier time and
are still to come back. Until the first request has ended, the time is estimated from the progress of those in flight.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable

from common.errors import ErrorCode, RequestError
from gateway.requests.output_processor import OutputStream

WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Counts requests in flight.

    Args:
        max_queued: requests beyond those that the nodes run at once.
    """

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self._ended: deque[float] = deque(maxlen=1_024)  # in busy time, which stands still while nothing is in flight
        self._busy_before = 0.0
        self._busy_since = 0.0
        self._promised: list[tuple[float, int]] = []  # a heap: when how many were told to come back
        self._num_promised = 0
        self.num_in_flight = 0

    def excess(self, count: int, max_running: int) -> int:
        """Requests beyond the bound if ``count`` more came; zero or negative if they fit."""
        return self.num_in_flight + count - max_running - self.max_queued

    def admit(self, count: int, *, max_running: int, now: float, in_flight: Iterable[OutputStream] = ()) -> None:
        """Counts all of them in, or none. Raises RequestError: there are too many for now."""
        excess = self.excess(count, max_running)
        if excess > 0:
            limit = max_running + self.max_queued
            message = f"{self.num_in_flight} requests are in flight, the limit is {limit}; retry later"
            retry_after_s = self.retry_after(excess, now, in_flight=in_flight)
            raise RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=retry_after_s)
        if self.num_in_flight == 0:
            self._busy_since = now
        self.num_in_flight += count

    def release(self, now: float, *, is_evicted: bool = False) -> None:
        """One request has ended. An evicted one does not count towards the rate at which requests end."""
        assert self.num_in_flight > 0
        busy = self._busy(now)
        if not is_evicted:
            self._ended.append(busy)
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._busy_before = busy

    def _busy(self, now: float) -> float:
        return self._busy_before + (now - self._busy_since if self.num_in_flight else 0.0)

    def retry_after(self, count: int, now: float, *, in_flight: Iterable[OutputStream] = ()) -> float:
        """Seconds, 1 to 60 and whole, after which ``count`` refused requests should come back.

        By then that many requests, and those promised earlier, will have ended at the rate of the last busy half
        minute. The promise is remembered until then.

        Args:
            in_flight: the outputs in flight, from whose progress the time is estimated while none has ended lately.
        """
        while self._promised and self._promised[0][0] <= now:
            self._num_promised -= heapq.heappop(self._promised)[1]
        known = self._seconds(count + self._num_promised, now, in_flight)
        # Without data: nothing has ended for so long that it may well take as long again.
        seconds = float(min(max(math.ceil(known or self._busy(now)), 1), MAX_RETRY_AFTER_S))
        if known and seconds < MAX_RETRY_AFTER_S:
            heapq.heappush(self._promised, (now + seconds, count))
            self._num_promised += count
        return seconds

    def _seconds(self, count: int, now: float, in_flight: Iterable[OutputStream]) -> float:
        """Estimated seconds until ``count`` requests have ended; 0.0 without data."""
        busy = self._busy(now)
        while self._ended and self._ended[0] < busy - WINDOW_S:
            self._ended.popleft()
        if not self._ended:
            return _seconds_until(count, in_flight)
        since = self._ended[0] if len(self._ended) == self._ended.maxlen else max(0.0, busy - WINDOW_S)
        return count * (busy - since) / len(self._ended)


def _seconds_until(count: int, in_flight: Iterable[OutputStream]) -> float:
    """Estimated seconds until ``count`` outputs finish, from their own progress; 0.0 without data.

    If fewer outputs have made progress, the others are assumed to follow at the same rate.
    """
    left = heapq.nsmallest(count, [_seconds_left(stream) for stream in in_flight if len(stream.ids) > 1])
    return left[-1] * count / len(left) if left else 0.0


def _seconds_left(stream: OutputStream) -> float:
    """Estimated seconds until this output, of at least two tokens, ends at its own pace.

    Without a predicted length, it is assumed to grow to twice its present length, within its maximum.
    """
    num_tokens, request = len(stream.ids), stream.request
    num_left = request.expected_output - num_tokens
    if num_left <= 0:
        num_left = min(num_tokens, request.sampling.max_new_tokens - num_tokens)
    return num_left * (stream.last_at - stream.first_at) / (num_tokens - 1)
