"""The stages of a request on one time axis, from the client's stamps and the server's own timings.

Prefill stages end with the first token and decode stages with the second, so they are laid out backwards from there.
The rest of the time since the send belongs to gateway and network, and to the queue where the server does not time it.
A decode node gets the request at the same time as the prefill node, so its queue lies beside the prefill stages. The
gap between first and second token, which shows the cost of disaggregation, is always the client's own measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.load_tester.analysis.records import RequestRecord

LATE, GATEWAY, WAITING = "sent late", "gateway and network", "until the first token"
UNTIMED = "queue, gateway and network"  # where the server times the prefill alone
FIRST_GAP, STEADY = "first to second token", "steady decode, a token"
#: Successive stages up to the first token and up to the second, by the servers' names.
PREFILL_STAGES = {"queue_s": "queue", "prefill_queue_s": "prefill queue", "prefill_s": "prefill"}
DECODE_STAGES = {
    "decode_queue_s": "decode queue",
    "prompt_wait_s": "decode waits for the prompt",
    "transfer_s": "transfer",
    "join_s": "first decode token",
}
REST = "decode, all later tokens"
MEANINGS = {
    LATE: "the client sent the request after its intended instant",
    GATEWAY: "HTTP, tokenizer and routing, on the way there and back",
    UNTIMED: "what the server did not time",
    WAITING: "from the send to the first token",
    "queue": "waiting for the engine",
    "prefill queue": "waiting at the prefill node for compute or memory",
    "prefill": "computing the prompt's KV cache and the first token",
    "decode queue": "waiting for KV pages on the decode node, beside the prefill",
    "decode waits for the prompt": "pages are reserved, the prompt is still being computed, beside the prefill",
    FIRST_GAP: "what handing the request to the decode node costs the user",
    "transfer": "last KV pages to the decode node",
    "first decode token": "joining the decode batch and its first step",
    REST: "from the second token to the last",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One stage; seconds, ``begin_s`` from the intended instant."""

    name: str
    begin_s: float
    length_s: float

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s


def spans_of(record: RequestRecord) -> list[Span]:
    """Stages of a request with output; ``STEADY`` is the mean gap after the second token."""
    sent_s, first_s, gaps = record.released_s - record.intended_s, record.ttft_s, record.gaps_s
    spans = [Span(LATE, 0.0, sent_s), *_to_first_token(sent_s, first_s, record)]
    if gaps:
        spans += _ending_at(first_s + gaps[0], DECODE_STAGES, record)
        spans.append(Span(FIRST_GAP, first_s, gaps[0]))
    if len(gaps) > 1:
        spans.append(Span(STEADY, first_s + gaps[0], float(np.mean(gaps[1:]))))
    return spans


def _to_first_token(sent_s: float, first_s: float, record: RequestRecord) -> list[Span]:
    """Stages up to the first token: one wait, unless the server timed the prefill."""
    if "prefill_s" not in record.timings:
        return [Span(WAITING, sent_s, first_s - sent_s)]
    prefill = _ending_at(first_s, PREFILL_STAGES, record)
    asked_s = max(sent_s, prefill[0].begin_s)
    return [Span(GATEWAY if len(prefill) > 1 else UNTIMED, sent_s, asked_s - sent_s), *prefill]


def _ending_at(end_s: float, stages: dict[str, str], record: RequestRecord) -> list[Span]:
    """The stages that the server timed, the last one ending at ``end_s``."""
    spans: list[Span] = []
    for name, title in reversed(stages.items()):
        if name in record.timings:
            end_s -= record.timings[name]
            spans.insert(0, Span(title, end_s, record.timings[name]))
    return spans


def median_spans(records: Sequence[RequestRecord]) -> list[Span]:
    """Median begin and length of each stage over the requests that have it, in order of time."""
    by_name: dict[str, list[Span]] = {}
    for record in records:
        for span in spans_of(record):
            by_name.setdefault(span.name, []).append(span)
    found = [
        Span(name, float(np.median([s.begin_s for s in some])), float(np.median([s.length_s for s in some])))
        for name, some in by_name.items()
    ]
    return sorted(found, key=lambda span: (span.begin_s, span.end_s))


@dataclass(frozen=True, slots=True)
class StageShare:
    """One row of the table of stages.

    Attributes:
        share: its part of the time from the intended instant to the last token, summed over all requests.
        is_part: whether it lies inside or beside other stages. The shares of the rest add up to 1.
        p50_s, p99_s: over the requests that have the stage.
    """

    name: str
    share: float
    is_part: bool
    p50_s: float
    p99_s: float


def stage_shares(records: Sequence[RequestRecord]) -> list[StageShare]:
    """Where the time of successful requests went, in the order in which a request meets the stages."""
    lengths: dict[str, list[float]] = {}
    for record in records:
        spans = [span for span in spans_of(record) if span.name != STEADY]
        if len(record.stamps_s) > 2:
            spans.append(Span(REST, 0.0, record.stamps_s[-1] - record.stamps_s[1]))
        for span in spans:
            lengths.setdefault(span.name, []).append(max(0.0, span.length_s))
    parts = set(DECODE_STAGES.values())
    total_s = sum(sum(own) for name, own in lengths.items() if name not in parts)
    return [
        StageShare(
            name,
            sum(lengths[name]) / total_s if total_s else 0.0,
            name in parts,
            *(float(np.quantile(lengths[name], share)) for share in (0.5, 0.99)),
        )
        for name in MEANINGS
        if name in lengths
    ]
