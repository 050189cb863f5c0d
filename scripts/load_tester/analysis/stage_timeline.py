"""A request's way as stages on one axis: what the client saw, filled in with what the server timed itself.

The prefill leg ends with the first token and the decode leg with the second, so their stages are laid out backwards
from there; what they leave of the time since the send is the gateway's and the network's, and the queue's if the server
does not time it. A decode node is asked at the
same time as the prefill node, so its queue lies beside the prefill leg. The gap between first and second token, in
which disaggregation shows, always stands on its own, as the client saw it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.load_tester.analysis.records import Record

LATE, GATEWAY, WAITING = "sent late", "gateway and network", "until the first token"
UNTIMED = "queue, gateway and network"  # of servers that time the prefill alone
FIRST_GAP, STEADY = "first to second token", "steady decode, a token"
#: Stages that follow each other up to the first token, and up to the second; as servers name them.
PREFILL_LEG = {"queue_s": "queue", "prefill_queue_s": "prefill queue", "prefill_s": "prefill"}
DECODE_LEG = {
    "decode_queue_s": "decode queue",
    "prompt_wait_s": "decode waits for the prompt",
    "transfer_s": "transfer",
    "join_s": "first decode token",
}
NAMES = PREFILL_LEG | DECODE_LEG | {"decode_s": "decode"}


@dataclass(frozen=True, slots=True)
class Span:
    """One stage; seconds, ``begin_s`` from the intended instant."""

    name: str
    begin_s: float
    length_s: float

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s


def spans_of(record: Record) -> list[Span]:
    """The stages of a request that brought a token; ``STEADY`` is the mean gap after the second token."""
    sent_s, first_s, gaps = record.released_s - record.intended_s, record.ttft_s, record.gaps_s
    spans = [Span(LATE, 0.0, sent_s), *_to_first_token(sent_s, first_s, record)]
    if gaps:
        spans += _ending_at(first_s + gaps[0], DECODE_LEG, record)
        spans.append(Span(FIRST_GAP, first_s, gaps[0]))
    if len(gaps) > 1:
        spans.append(Span(STEADY, first_s + gaps[0], float(np.mean(gaps[1:]))))
    return spans


def _to_first_token(sent_s: float, first_s: float, record: Record) -> list[Span]:
    """Of a leg of which only the queue was timed nobody knows where it lies: it is left to the wait as a whole."""
    if "prefill_s" not in record.timings:
        return [Span(WAITING, sent_s, first_s - sent_s)]
    prefill = _ending_at(first_s, PREFILL_LEG, record)
    asked_s = max(sent_s, prefill[0].begin_s)
    return [Span(GATEWAY if len(prefill) > 1 else UNTIMED, sent_s, asked_s - sent_s), *prefill]


def _ending_at(end_s: float, leg: dict[str, str], record: Record) -> list[Span]:
    """Those stages of a leg that the server timed, the last of them ending at ``end_s``."""
    spans: list[Span] = []
    for name, title in reversed(leg.items()):
        if name in record.timings:
            end_s -= record.timings[name]
            spans.insert(0, Span(title, end_s, record.timings[name]))
    return spans


def median_spans(records: Sequence[Record]) -> list[Span]:
    """The median begin and length of each stage, over the requests that have it, in order of appearance."""
    by_name: dict[str, list[Span]] = {}
    for record in records:
        for span in spans_of(record):
            by_name.setdefault(span.name, []).append(span)
    found = [
        Span(name, float(np.median([s.begin_s for s in some])), float(np.median([s.length_s for s in some])))
        for name, some in by_name.items()
    ]
    return sorted(found, key=lambda span: (span.begin_s, span.end_s))
