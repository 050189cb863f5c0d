"""Reads a received response, and compares it with the reference: pure functions.

A response is reduced to what the client was promised: the text, the token ids, the log-probabilities and the finish
reason of each output, and the usage. How it was cut into events does not matter.
"""

import json
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, takewhile
from typing import Any

from scripts.load_tester.client.connection import Exchange
from scripts.load_tester.client.http_framing import read_head
from scripts.load_tester.client.sse_parser import body_parts, split_events

#: Log-probabilities of one token in batches of other shapes differ by rounding.
LOGPROB_TOLERANCE = 1e-3
#: Error codes of requests that were never accepted.
REFUSALS = ("queue_full", "no_route")
#: A gateway without nodes refuses at once. After this long, ``no_route`` ends a request that was accepted and waited
#: for nodes, by default for 60 s.
MAX_REFUSAL_S = 30.0


class Verdict(Enum):
    EQUAL = "equal to the reference"
    ROUNDED = "complete, with other tokens by rounding"
    REFUSED = "refused"
    FAILED = "ended with an error"
    WRONG = "wrong"
    LOST = "without an end"
    HANGING = "hanging"


@dataclass(slots=True)
class Output:
    """One of the outputs of a response."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


@dataclass(slots=True)
class Answer:
    """A response as far as it has arrived.

    Attributes:
        status: HTTP status; 0 if the connection ended before one arrived.
        code, message: the error; empty without one.
        is_complete: the response has its proper end.
        is_late: no end came within the time limit.
        began_at, ended_at: instants by ``time.monotonic``.
        stamps: the instant of each event with output.
        counts: the tokens that had arrived with each of these events.
        usage: prompt and completion tokens; empty if the response has none.
    """

    outputs: dict[int, Output] = field(default_factory=dict)
    status: int = 0
    code: str = ""
    message: str = ""
    is_complete: bool = False
    is_late: bool = False
    began_at: float = 0.0
    ended_at: float = 0.0
    stamps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    usage: tuple[int, ...] = ()

    def output(self, index: int) -> Output:
        return self.outputs.setdefault(index, Output())

    @property
    def num_tokens(self) -> int:
        return sum(len(output.ids) for output in self.outputs.values())


def read_answer(exchange: Exchange) -> Answer:
    """The response that an exchange has received, complete or not."""
    answer = Answer(began_at=exchange.released_at, ended_at=exchange.ended_at, is_late=exchange.error == "timeout")
    raw = b"".join(exchange.parts)
    head_end = raw.find(b"\r\n\r\n")
    if head_end < 0:
        return answer
    answer.status, headers = read_head(raw[:head_end])
    is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
    if b"event-stream" in headers.get(b"content-type", b""):
        ends = list(accumulate(array("I", exchange.sizes)))
        for end, data in split_events(raw, head_end + 4, is_chunked):
            _take_event(answer, data, exchange.stamps[min(bisect_left(ends, end), len(ends) - 1)])
    elif not exchange.error:
        _take_body(answer, b"".join(body for _, body in body_parts(raw, head_end + 4, is_chunked)))
    if exchange.error:
        answer.is_complete = False
    return answer


def as_seen(earlier: Sequence[Answer], answer: Answer) -> Answer:
    """The answer with the instants at which its client had each token first.

    Args:
        earlier: answers to the same request whose connections were lost. Every answer begins with the first token.
    """
    stamps: list[float] = []
    counts: list[int] = []
    for part in (*earlier, answer):
        for at, count in zip(part.stamps, part.counts, strict=True):
            if not counts or count > counts[-1]:
                stamps.append(at)
                counts.append(count)
    began_at = min(part.began_at for part in (*earlier, answer))
    return replace(answer, began_at=began_at, stamps=stamps, counts=counts)


def _take_event(answer: Answer, data: bytes, at: float) -> None:
    if data == b"[DONE]":
        answer.is_complete = not answer.code and all(output.finish for output in answer.outputs.values())
        return
    event = json.loads(data) if data else {}
    before = sum(len(output.text) + len(output.ids) for output in answer.outputs.values())
    _take(answer, event)
    if sum(len(output.text) + len(output.ids) for output in answer.outputs.values()) > before:
        answer.stamps.append(at)
        answer.counts.append(answer.num_tokens)


def _take_body(answer: Answer, body: bytes) -> None:
    try:
        event = json.loads(body)
    except ValueError:
        return
    _take(answer, event)
    if not answer.code and answer.status == 200:
        answer.is_complete = bool(answer.outputs) and all(output.finish for output in answer.outputs.values())


def _take(answer: Answer, event: dict[str, Any]) -> None:
    error = event.get("error")
    if error is not None:
        answer.code = str(error.get("code") or error.get("type") or answer.status)
        answer.message = str(error.get("message", ""))[:200]
        return
    usage = event.get("usage")
    if usage:
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    if "meta_info" in event:
        _take_native(answer, event)
    for choice in event.get("choices", ()):
        output = answer.output(choice.get("index", 0))
        delta = choice.get("delta") or choice.get("message") or {}
        output.text += choice.get("text") or delta.get("content") or ""
        output.ids += choice.get("token_ids") or ()
        output.finish = choice.get("finish_reason") or output.finish
        output.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()


def _take_native(answer: Answer, event: dict[str, Any]) -> None:
    """An event of ``/generate`` has all output so far."""
    output, meta = answer.output(0), event["meta_info"]
    output.text, output.ids = event["text"], event["output_ids"]
    output.finish = (meta["finish_reason"] or {}).get("type", "")
    answer.usage = (meta["prompt_tokens"], meta["completion_tokens"])


def judge(answer: Answer, reference: Answer, *, is_exact: bool = True) -> tuple[Verdict, str]:
    """The verdict about an answer, and what differs; the reference is a complete answer to the same request.

    Args:
        is_exact: tokens do not depend on the batch that they are computed in. Otherwise, an answer may have other
            tokens than the reference.
    """
    difference = _wrong_beginning(answer, reference)
    if difference and is_exact:
        return Verdict.WRONG, difference
    took_s = answer.ended_at - answer.began_at
    if answer.is_late:
        return Verdict.HANGING, f"{_so_far(answer)} after {took_s:.0f} s"
    has_waited = answer.code == "no_route" and took_s > MAX_REFUSAL_S
    if answer.code in REFUSALS and not answer.stamps and not has_waited:
        return Verdict.REFUSED, answer.code
    if answer.code:
        return Verdict.FAILED, f"{answer.code}: {answer.message} ({_so_far(answer)})"
    if not answer.is_complete:
        return Verdict.LOST, f"the connection ended with status {answer.status}, {_so_far(answer)}"
    if not is_exact and answer.outputs.keys() == reference.outputs.keys() and answer.usage[:1] == reference.usage[:1]:
        difference = difference or _incomplete(answer, reference)
        return (Verdict.ROUNDED, difference) if difference else (Verdict.EQUAL, "")
    difference = _incomplete(answer, reference)
    return (Verdict.WRONG, difference) if difference else (Verdict.EQUAL, "")


def smallest_margin(body: bytes) -> float:
    """The smallest difference between the log-probabilities of the two likeliest tokens, in a response of completions
    with two of them at each position.
    """
    choices = json.loads(body)["choices"]
    tops = [sorted(top.values()) for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    return min((top[-1] - top[-2] for top in tops if len(top) > 1), default=float("inf"))


def num_agreeing(answer: Answer, reference: Answer) -> tuple[int, int]:
    """Tokens of the answer before the first that differs from the reference, in all outputs, and all of its tokens."""
    agreeing = total = 0
    for index, output in answer.outputs.items():
        expected = reference.outputs.get(index, Output()).ids
        same = takewhile(lambda pair: pair[0] == pair[1], zip(output.ids, expected, strict=False))
        agreeing += sum(1 for _ in same)
        total += len(output.ids)
    return agreeing, total


def _so_far(answer: Answer) -> str:
    return f"{answer.num_tokens} tokens so far"


def _wrong_beginning(answer: Answer, reference: Answer) -> str:
    """What differs in the part that has arrived; an answer that ended early must be a beginning of the reference."""
    for index, output in sorted(answer.outputs.items()):
        expected = reference.outputs.get(index, Output())
        if output.ids != expected.ids[: len(output.ids)]:
            at = next(i for i, token in enumerate(output.ids) if [token] != expected.ids[i : i + 1])
            return f"output {index}, token {at}: {output.ids[at : at + 3]}, expected {expected.ids[at : at + 3]}"
        if not expected.text.startswith(output.text):
            return f"output {index}: text {output.text[-40:]!r} is not the beginning of {expected.text[:200]!r}"
        for at, (given, right) in enumerate(zip(output.logprobs, expected.logprobs, strict=False)):
            if abs(given - right) > LOGPROB_TOLERANCE:
                return f"output {index}, token {at}: log-probability {given}, expected {right}"
    return ""


def _incomplete(answer: Answer, reference: Answer) -> str:
    """What a complete answer lacks that has the right beginning."""
    if answer.outputs.keys() != reference.outputs.keys():
        return f"outputs {sorted(answer.outputs)}, expected {sorted(reference.outputs)}"
    for index, output in answer.outputs.items():
        expected = reference.outputs[index]
        if output.text != expected.text or len(output.ids) != len(expected.ids):
            return (
                f"output {index} ends early, after {len(output.ids)} of {len(expected.ids)} tokens, as {output.finish}"
            )
        if output.finish != expected.finish:
            return f"output {index} ends as {output.finish}, expected {expected.finish}"
        if len(output.logprobs) != len(expected.logprobs):
            return f"output {index}: {len(output.logprobs)} log-probabilities, expected {len(expected.logprobs)}"
    if answer.usage != reference.usage:
        return f"usage {answer.usage}, expected {reference.usage}"
    return ""
