"""Bounds the requests in flight, and tells a refused client when to come back. Pure.

The bound is what the decode nodes run at once plus a queue. A request beyond it is refused with the time after which
enough requests will have ended: enough for it, and for those that were told an earlier time. These promises lapse once
only half as many requests are in flight, since their clients have not come, or the estimate was too long.

A request that is paused, since its client does not read, takes no place of others. As many may be paused beside the
bound as the bound allows: what the gateway keeps for requests is never more than twice as much.

The rate at which requests end is the number that are served at once, divided by the time that the latest ones took
(Little's law). That holds from the first end on, while the number of ends in a period says little until many periods
are over.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sized
from itertools import islice
from typing import NamedTuple

from common.errors import ErrorCode, RequestError
from gateway.requests.output_processor import OutputStream

#: Ended requests whose times are remembered; how many ``pace`` needs, and how long ago the last of them may have ended.
NUM_SAMPLES, NUM_RELIABLE, RELIABLE_S = 64, 16, 30.0
MAX_RETRY_AFTER_S = 60.0
#: Outputs in flight, the oldest first, from whose progress a time is estimated.
MAX_ESTIMATED = 1_000


class Pace(NamedTuple):
    """How fast requests are served now.

    Attributes:
        interval_s: mean time between two ends.
        served_s, num_tokens: mean time from being sent to the end, and mean number of output tokens.
    """

    interval_s: float
    served_s: float
    num_tokens: float

    def least_s(self, num_tokens: int) -> float:
        """A time in which a request for ``num_tokens`` is served, but no more than the mean."""
        return self.served_s * min(1.0, num_tokens / self.num_tokens)


class Admission:
    """Counts requests in flight.

    Args:
        max_queued: requests beyond those that the nodes run at once.
        refuses_hopeless: requests that would miss their objective for the first token are refused.
    """

    def __init__(self, max_queued: int, *, refuses_hopeless: bool = False) -> None:
        self.max_queued = max_queued
        self.refuses_hopeless = refuses_hopeless
        self._served: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)  # seconds from being sent to the end; tokens
        self._served_at = 0.0  # the last end of those
        self._changed_at = 0.0  # when the last request was served, or the first came
        self._promised: list[tuple[float, int]] = []  # a heap: when how many were told to come back
        self._num_promised = 0
        self._full_at = 0  # requests in flight at the last refusal
        self.num_in_flight = 0
        self._num_paused = 0  # of those

    def excess(self, count: int, max_running: int) -> int:
        """Requests beyond the bound if ``count`` more came; zero or negative if they fit."""
        limit = max_running + self.max_queued
        return self.num_in_flight - min(self._num_paused, limit) + count - limit

    def set_paused(self, *, is_paused: bool) -> None:
        """A request in flight is paused, since its client is slow to read, or goes on."""
        self._num_paused += 1 if is_paused else -1
        assert 0 <= self._num_paused <= self.num_in_flight

    def admit(
        self, count: int, *, max_running: int, now: float, waiting: Sized = (), in_flight: Iterable[OutputStream] = ()
    ) -> None:
        """Count all of them in, or none. Raises RequestError: there are too many for now.

        Args:
            waiting, in_flight: as for ``retry_after``.
        """
        excess = self.take(count, max_running=max_running, now=now)
        if excess > 0:
            limit = max_running + self.max_queued
            num_taken = self.num_in_flight - min(self._num_paused, limit)
            message = f"{num_taken} requests are in flight, the limit is {limit}; retry later"
            retry_after_s = self.retry_after(excess, now, waiting=waiting, in_flight=in_flight)
            raise RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=retry_after_s)

    def take(self, count: int, *, max_running: int, now: float) -> int:
        """Count all of them in, unless they are too many. Return the excess: more than 0 if they are."""
        if 2 * self.num_in_flight <= self._full_at:
            self._promised.clear()
            self._num_promised = 0
        excess = self.excess(count, max_running)
        if excess <= 0:
            if self.num_in_flight == 0:
                self._changed_at = now
            self.num_in_flight += count
        return excess

    def release(self, now: float, *, served_s: float | None, num_tokens: int = 1, is_typical: bool = True) -> None:
        """One request has ended.

        Args:
            served_s: seconds from being sent to its end; None if it was not served to its end.
            num_tokens: of its output.
            is_typical: false if it was paused or needed further attempts. It shows that requests end, but not in which
                time.
        """
        assert self.num_in_flight > 0
        self.num_in_flight -= 1
        if served_s is None:
            return
        self._changed_at = now
        if is_typical:
            self._served.append((served_s, max(num_tokens, 1)))
            self._served_at = now

    def pace(self, now: float, *, waiting: Sized) -> Pace | None:
        """How fast requests are served now; None if too few have ended lately to tell.

        Args:
            waiting: requests in flight that are not being served yet.
        """
        is_reliable = len(self._served) >= NUM_RELIABLE and now - self._served_at <= RELIABLE_S
        if not is_reliable or (interval_s := self._interval_s(now, len(waiting), ())) is None:
            return None
        served_s, num_tokens = (sum(values) / len(self._served) for values in zip(*self._served, strict=True))
        return Pace(interval_s, served_s, num_tokens)

    def retry_after(
        self, count: int, now: float, *, waiting: Sized = (), in_flight: Iterable[OutputStream] = ()
    ) -> float:
        """Seconds, 1 to 60 and whole, after which ``count`` refused requests should come back.

        By then that many requests, and those promised earlier, will have ended. The promise is remembered until then.

        Args:
            waiting: requests in flight that are not being served yet.
            in_flight: the outputs in flight, from whose progress the time is estimated while none has ended.
        """
        self._full_at = self.num_in_flight
        while self._promised and self._promised[0][0] <= now:
            self._num_promised -= heapq.heappop(self._promised)[1]
        interval_s = self._interval_s(now, len(waiting), in_flight)
        # Without data: nothing has ended for so long that it may well take as long again.
        known_s = now - self._changed_at if interval_s is None else (count + self._num_promised) * interval_s
        seconds = float(min(max(math.ceil(known_s), 1), MAX_RETRY_AFTER_S))
        if interval_s is not None and seconds < MAX_RETRY_AFTER_S:
            heapq.heappush(self._promised, (now + seconds, count))
            self._num_promised += count
        return seconds

    def _interval_s(self, now: float, num_waiting: int, in_flight: Iterable[OutputStream]) -> float | None:
        """Estimated mean time between two ends; None without data."""
        served = [served_s for served_s, _ in self._served]
        served_s = sum(served) / len(served) if served else _seconds_served(in_flight)
        if served_s is None:
            return None
        # It takes longer now if nothing has ended for longer.
        num_served = self.num_in_flight - self._num_paused - num_waiting
        return max(served_s, now - self._changed_at) / max(num_served, 1)


def _seconds_served(in_flight: Iterable[OutputStream]) -> float | None:
    """Estimated mean time from being sent to the end, from the progress of outputs; None without data.

    An output without a predicted length is assumed to grow to twice its present length, within its maximum.
    """
    estimates = []
    for stream in islice(in_flight, MAX_ESTIMATED):
        num_tokens, request = len(stream.ids), stream.request
        if num_tokens > 1 and stream.sent_at:  # else another gateway has begun it, and it waits here
            num_left = request.expected_output - num_tokens
            if num_left <= 0:
                num_left = min(num_tokens, request.sampling.max_new_tokens - num_tokens)
            pace_s = (stream.last_at - stream.first_at) / (num_tokens - 1)
            estimates.append(stream.last_at - stream.sent_at + num_left * pace_s)
    return sum(estimates) / len(estimates) if estimates else None
