"""Measures what clients ask of one gateway for one model: how many requests arrive, how large, with which objectives.

Pure. Requests are counted by how many have ended and how many are in flight, and their sizes are those of requests that
have ended, so that a request on its way to the nodes costs nothing more.
"""

import math
from collections import deque
from typing import NamedTuple

from common.capacity import ATTAINMENT
from common.wire.messages import ClientLoad
from gateway.requests.output_processor import OutputStream

#: Most and fewest requests whose sizes count: those that ended in the window, and earlier ones if these are too few.
MAX_SIZES, MIN_SIZES = 4_096, 32
#: The last part of the window, whose rate counts if it is higher.
RECENT_SHARE = 0.25


class Objectives(NamedTuple):
    """Objectives in seconds for the first token, and between two tokens; infinite without one."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


class EndedRequest(NamedTuple):
    """Sizes and objectives of a request that has ended.

    Attributes:
        num_prompt: tokens of the prompt that were not cached.
    """

    at: float
    num_prompt: int
    num_output: int
    objectives: Objectives


class LoadMeter:
    """Measures the load of one model at this gateway.

    Args:
        window_s: over which arrivals are averaged.
        objectives: while no request has ended.
    """

    def __init__(self, window_s: float, objectives: Objectives) -> None:
        self._window_s = window_s
        self._default = objectives
        self._num_ended = 0
        self._arrivals: deque[tuple[float, int]] = deque()  # once a second: requests that have arrived so far
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_SIZES)

    def ended(self, stream: OutputStream) -> None:
        """An output that was in flight has ended."""
        self._num_ended += 1
        if not stream.first_at:
            return  # its size is not known
        request = stream.request
        objectives = Objectives(request.slo_ttft_s or math.inf, request.slo_itl_s or math.inf)
        num_prompt = max(len(request.prompt) - stream.cached_tokens, 0)
        self._ended.append(EndedRequest(stream.ended_at, num_prompt, len(stream.ids), objectives))

    def sample(self, num_in_flight: int, now: float) -> None:
        """Count the arrivals so far. Called once a second."""
        arrivals, ended = self._arrivals, self._ended
        arrivals.append((now, self._num_ended + num_in_flight))
        while len(arrivals) > 2 and now - arrivals[1][0] >= self._window_s:
            arrivals.popleft()
        while len(ended) > MIN_SIZES and now - ended[0].at > self._window_s:
            ended.popleft()

    @property
    def seconds(self) -> float:
        """The time that ``load`` covers: the window, or less soon after the start."""
        return self._arrivals[-1][0] - self._arrivals[0][0] if self._arrivals else 0.0

    def load(self, num_waiting: int) -> ClientLoad:
        """What clients ask for per second.

        Args:
            num_waiting: requests that wait in the gateway. They count as if they arrived once more within a window,
                since nodes that are just enough for new requests never get to them.
        """
        if not self.seconds:
            return ClientLoad()
        rate = max(self._rate(0), self._recent_rate()) + num_waiting / self._window_s
        ended = self._ended
        if not ended:
            return ClientLoad(rate)
        each = rate / len(ended)
        return ClientLoad(
            requests=rate,
            prompt_tokens=each * sum(one.num_prompt for one in ended),
            prompt_squares=each * sum(one.num_prompt**2 for one in ended),
            output_tokens=each * sum(one.num_output for one in ended),
        )

    def _rate(self, first: int, num_doubtful: float = 0.0) -> float:
        """Arrivals per second since a sample, less those that may be chance."""
        (since, before), (now, total) = self._arrivals[first], self._arrivals[-1]
        return max(total - before - num_doubtful, 0.0) / (now - since) if now > since else 0.0

    def _recent_rate(self) -> float:
        """The rate of the last part of the window, for loads that grow, less one standard deviation."""
        now = self._arrivals[-1][0]
        first = next(i for i, (at, _) in enumerate(self._arrivals) if now - at <= self._window_s * RECENT_SHARE)
        num_arrived = self._arrivals[-1][1] - self._arrivals[first][1]
        return self._rate(first, math.sqrt(max(num_arrived, 0)))

    def objectives(self) -> Objectives:
        """The strictest objectives that more than a few requests have: those of the others are no stricter."""
        if not self._ended:
            return self._default
        place = int(round((1 - ATTAINMENT) * len(self._ended), 6))
        return Objectives(
            sorted(one.objectives.ttft_s for one in self._ended)[place],
            sorted(one.objectives.itl_s for one in self._ended)[place],
        )
