"""What requests and steps have taken on one node so far, as distributions and counts. Pure.

Every event is counted on one node only, so that sums over all nodes are right: a first token where the prompt was
computed, a gap where the later of its two tokens was sampled, a stop where the last token was sampled. A request that
ends without a last token, by an abort or an error, is counted on its decode node, or on the prefill node if it has no
other.

Bounds include those of vLLM's histograms of the same quantities, so that charts made for vLLM fit. Below a hundredth of
a second there are more.
"""

from collections.abc import Sequence
from itertools import pairwise

from common.finish_reason import Finish
from common.metrics.distribution import Distribution
from common.node.monitoring.step_times import StepTimes
from common.request import Request

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
NUM_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
STEP_ROWS = tuple(float(2**power) for power in range(11))

#: Why a request has ended without a last token.
ABORT, ERROR = "abort", "error"


class RequestStats:
    """Distributions over the requests of one node, in seconds and tokens.

    Attributes:
        time_to_first_token: from a request's arrival at the gateway.
        inter_token: between two tokens of an output.
        end_to_end: from a request's arrival at the gateway to its last token.
        queue, prefill, decode: seconds of a request until its prompt was begun, in which it was computed, and from the
            first to the last token.
        prompt_tokens, output_tokens, max_tokens: tokens of finished requests, and the most that each could produce.
        ends: finished requests by ``stop``, ``length``, ``abort`` or ``error``.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Distribution(FIRST_TOKEN_S)
        self.inter_token = Distribution(TOKEN_GAP_S)
        self.end_to_end = Distribution(REQUEST_S)
        self.queue = Distribution(REQUEST_S)
        self.prefill = Distribution(REQUEST_S)
        self.decode = Distribution(REQUEST_S)
        self.prompt_tokens = Distribution(NUM_TOKENS)
        self.output_tokens = Distribution(NUM_TOKENS)
        self.max_tokens = Distribution(NUM_TOKENS)
        self.ends = {"stop": 0, "length": 0, ABORT: 0, ERROR: 0}
        self._sampled_at = -1.0  # no instant of a request

    def first_token(self, request: Request, now: float) -> None:
        """The prompt was computed here, and its first token sampled."""
        self.time_to_first_token.add(now - request.arrived_at)
        self.queue.add(request.admitted_at - request.arrived_at)
        self.prefill.add(now - request.admitted_at)
        request.first_token_at = request.last_token_at = now

    def handed_off(self, request: Request, at: float) -> None:
        """Another node has sampled the first token of a request, or an earlier output that is continued here."""
        if not request.first_token_at:
            request.first_token_at = request.last_token_at = at

    def sampled(self, requests: Sequence[Request], now: float) -> None:
        """One more token of each of these requests was sampled, in one step.

        Nearly all of them were in the step before as well. These have the same gap, which is added once.
        """
        before, self._sampled_at = self._sampled_at, now
        num_alike = 0
        for request in requests:
            last_at = request.last_token_at
            request.last_token_at = now
            if last_at == before:
                num_alike += 1
            elif last_at:
                self.inter_token.add(now - last_at)
            else:
                self.first_token(request, now)
        if num_alike:
            self.inter_token.add(now - before, num_alike)

    def sampled_in_steps(self, requests: Sequence[Request], instants: Sequence[float]) -> None:
        """One more token of each of these requests was sampled at each of these instants."""
        self.sampled(requests, instants[0])
        self.inter_token.add_each([now - before for before, now in pairwise(instants)], len(requests))
        self._sampled_at = instants[-1]
        for request in requests:
            request.last_token_at = self._sampled_at

    def finished(self, request: Request, finish: Finish, now: float) -> None:
        """The last token of a request was sampled, or a stop string has ended it, perhaps in its first token."""
        self.ends[finish] += 1
        self.end_to_end.add(now - request.arrived_at)
        self.decode.add(now - (request.first_token_at or now))
        self.prompt_tokens.add(len(request.prompt))
        self.output_tokens.add(max(len(request.output), 1))  # the first token may still be on its way here
        self.max_tokens.add(request.sampling.max_new_tokens)

    def ended(self, reason: str) -> None:
        """A request has ended without a last token: ``abort`` or ``error``."""
        self.ends[reason] += 1


class StepStats:
    """Distributions over the steps of one engine.

    Attributes:
        seconds: in the executor.
        rows, tokens: rows of a step, and tokens whose KV it computed.
        times: of the latest steps.
    """

    def __init__(self) -> None:
        self.seconds = Distribution(STEP_S)
        self.rows = Distribution(STEP_ROWS)
        self.tokens = Distribution(STEP_TOKENS)
        self.times = StepTimes()

    def add(self, seconds: float, num_rows: int, num_tokens: int, *, num_prompt_tokens: int) -> None:
        self.seconds.add(seconds)
        self.rows.add(num_rows)
        self.tokens.add(num_tokens)
        self.times.add(seconds, num_prompt_tokens)
