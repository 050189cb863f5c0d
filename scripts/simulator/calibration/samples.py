"""Measurements of a live service, from what its clients saw."""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class PromptSample(NamedTuple):
    """A prompt that was computed while no other request was in flight."""

    num_input: int
    ttft_s: float
    prefill_s: float | None  # on the node, by the server's own timings; None without these


#: Steps that are averaged: a client that reads a token late sees the next one too early.
NUM_AVERAGED = 6


class StepSample(NamedTuple):
    """Decode steps, by the gaps between a few tokens of a stream."""

    num_rows: int  # requests that were decoding, this one included
    num_context: int  # tokens that these attended to, together
    gaps_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The mean of the gaps: the time of a step."""
        return sum(self.gaps_s) / len(self.gaps_s)


class HandoffSample(NamedTuple):
    """The time between first and second token of a request that was alone: the transfer, and a step."""

    num_input: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """One answered request. Instants in seconds from a common start."""

    num_input: int
    sent_s: float
    stamps_s: Sequence[float]
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Samples:
    """All measurements.

    Attributes:
        steps_beside, prompts_beside: from times in which the prefill and the decode node computed.
        steps_beside_decode: from times in which two decode nodes computed.
    """

    prompts: list[PromptSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    handoffs: list[HandoffSample] = field(default_factory=list)
    steps_beside: list[StepSample] = field(default_factory=list)
    prompts_beside: list[PromptSample] = field(default_factory=list)
    steps_beside_decode: list[StepSample] = field(default_factory=list)

    def add_alone(self, requests: Iterable[StreamedRequest]) -> None:
        """Add requests that were sent one after another."""
        for one in requests:
            stamps = one.stamps_s
            self.prompts.append(PromptSample(one.num_input, stamps[0] - one.sent_s, one.timings.get("prefill_s")))
            if len(stamps) > 1:
                self.handoffs.append(HandoffSample(one.num_input, stamps[1] - stamps[0]))
            for first, last in _spans(stamps):
                context = one.num_input + (first + last - 1) // 2
                self.steps.append(StepSample(1, context, _gaps_s(stamps[first : last + 1])))

    def add_together(self, requests: Sequence[StreamedRequest]) -> None:
        """Add requests that were in flight together. Rows and context are those in the middle of a span."""
        self.steps += self._steps_together(requests)

    def add_beside(self, outputs: Sequence[StreamedRequest], prompts: Sequence[StreamedRequest]) -> None:
        """Add outputs that were in flight together, and prompts that were sent meanwhile.

        What counts are the times in which all outputs were in flight, and prompts too. Prompts that the node computed
        together are left out: of such, it does not say how long each took.
        """
        if not outputs or not prompts:
            return
        began_s, ended_s = max(one.stamps_s[0] for one in outputs), min(one.stamps_s[-1] for one in outputs)
        timed = [one for one in prompts if "prefill_s" in one.timings]
        for one in timed:
            middle_s = one.stamps_s[0] - one.timings["prefill_s"] / 2
            is_alone = not any(_began_s(other) < middle_s < other.stamps_s[0] for other in timed if other is not one)
            if is_alone and began_s <= one.sent_s and one.stamps_s[0] <= ended_s:
                ttft_s = one.stamps_s[0] - one.sent_s - one.timings.get("prefill_queue_s", 0.0)
                self.prompts_beside.append(PromptSample(one.num_input, ttft_s, one.timings["prefill_s"]))
        last_s = max(one.stamps_s[0] for one in prompts)
        self.steps_beside += self._steps_together(outputs, began_s, min(ended_s, last_s))

    def add_on_two_nodes(self, outputs: Sequence[StreamedRequest]) -> None:
        """Add outputs that two decode nodes shared evenly. Steps count while all outputs were in flight."""
        steps = list(self._steps_together(outputs))
        most = max((one.num_rows for one in steps), default=0)
        self.steps_beside_decode += [
            StepSample(most // 2, one.num_context // 2, one.gaps_s) for one in steps if one.num_rows == most
        ]

    def _steps_together(
        self, requests: Sequence[StreamedRequest], began_s: float = -math.inf, ended_s: float = math.inf
    ) -> Iterator[StepSample]:
        several = [one for one in requests if len(one.stamps_s) > 2]
        starts = np.array([_joined_s(one.stamps_s) for one in several])
        ends = np.array([one.stamps_s[-1] for one in several])
        for one in several:
            for first, last in _spans(one.stamps_s):
                stamps = one.stamps_s[first : last + 1]
                middle = (stamps[0] + stamps[-1]) / 2
                if not began_s <= middle <= ended_s:
                    continue
                present = [several[place] for place in np.flatnonzero((starts <= middle) & (middle < ends))]
                context = sum(other.num_input + bisect.bisect_right(other.stamps_s, middle) for other in present)
                yield StepSample(len(present), context, _gaps_s(stamps))


def _gaps_s(stamps_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.diff(stamps_s).tolist())


def _spans(stamps_s: Sequence[float]) -> Iterator[tuple[int, int]]:
    """First and last token of stretches of a few tokens, from the second token on."""
    for first in range(1, len(stamps_s) - 1, NUM_AVERAGED):
        yield first, min(first + NUM_AVERAGED, len(stamps_s) - 1)


def _began_s(prompt: StreamedRequest) -> float:
    """When the node began to compute a prompt, about."""
    return prompt.stamps_s[0] - prompt.timings["prefill_s"]


def _joined_s(stamps_s: Sequence[float]) -> float:
    """When a request joined the batch: a usual gap before its second token. Until then its pages were on their way."""
    return max(stamps_s[0], stamps_s[1] - float(np.median(np.diff(stamps_s[1:]))))
