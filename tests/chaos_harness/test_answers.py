"""Verdicts about received bytes: a lost, a wrong, a hanging and a refused answer are each seen."""

import json
from typing import Any

import pytest

from scripts.chaos_harness.answers import Answer, Verdict, judge, read_answer, smallest_margin
from scripts.load_tester.client.connection import Exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(token: int, text: str, finish: str | None = None, index: int = 0) -> bytes:
    choice: dict[str, Any] = {"index": index, "text": text, "token_ids": [token], "finish_reason": finish}
    choice["logprobs"] = {"token_logprobs": [-0.5 * token]}
    return chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


USAGE = chunk(b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n')
END = chunk(b"data: [DONE]\n\n") + chunk(b"")
WHOLE = [event(1, "To"), event(2, " be"), event(3, ",", "length"), USAGE, END]


def received(pieces: list[bytes], *, error: str = "", head: bytes = HEAD) -> Answer:
    """The answer after these pieces; the first comes at 11 s, each a second after the one before."""
    exchange = Exchange(None, b"", 10.0)
    exchange.released_at = 10.0
    for number, piece in enumerate([head + pieces[0], *pieces[1:]] if pieces else []):
        exchange.parts.append(piece)
        exchange.sizes.append(len(piece))
        exchange.stamps.append(11.0 + number)
    exchange.error, exchange.ended_at = error, 11.0 + len(pieces)
    return read_answer(exchange)


REFERENCE = received(WHOLE)


def test_a_stream_is_reduced_to_what_the_client_was_promised() -> None:
    output = REFERENCE.outputs[0]
    assert (output.text, output.ids, output.logprobs, output.finish) == (
        "To be,",
        [1, 2, 3],
        [-0.5, -1, -1.5],
        "length",
    )
    assert REFERENCE.usage == (5, 3)
    assert REFERENCE.stamps == [11.0, 12.0, 13.0]
    assert REFERENCE.is_complete


def test_the_same_tokens_in_other_pieces_are_equal() -> None:
    raw = b"".join(WHOLE)
    assert judge(received([raw[:50], raw[50:]]), REFERENCE) == (Verdict.EQUAL, "")


BROKEN = {
    "another token": ([event(1, "To"), event(7, " be"), *WHOLE[2:]], "", Verdict.WRONG),
    "a token twice": ([WHOLE[0], WHOLE[0], *WHOLE[1:]], "", Verdict.WRONG),
    "a token missing": ([WHOLE[0], *WHOLE[2:]], "", Verdict.WRONG),
    "an end too early": ([event(1, "To"), event(2, " be", "length"), USAGE, END], "", Verdict.WRONG),
    "another finish reason": ([*WHOLE[:2], event(3, ",", "stop"), USAGE, END], "", Verdict.WRONG),
    "no usage": ([*WHOLE[:3], END], "", Verdict.WRONG),
    "another text": ([event(1, "to"), *WHOLE[1:]], "", Verdict.WRONG),
    "an output too many": ([*WHOLE[:3], event(3, ",", "length", 1), USAGE, END], "", Verdict.WRONG),
    "a wrong token before the connection drops": ([event(9, "No")], "dropped", Verdict.WRONG),
    "a dropped connection": (WHOLE[:2], "dropped", Verdict.LOST),
    "no answer at all": ([], "dropped", Verdict.LOST),
    "an end without [DONE]": ([*WHOLE[:3], chunk(b"")], "", Verdict.LOST),
    "no end in time": (WHOLE[:2], "timeout", Verdict.HANGING),
    "nothing in time": ([], "timeout", Verdict.HANGING),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_seen(name: str) -> None:
    pieces, error, expected = BROKEN[name]
    verdict, why = judge(received(pieces, error=error), REFERENCE)
    assert verdict is expected, why
    assert why


def test_an_error_within_a_stream_fails_an_accepted_request() -> None:
    failure = chunk(b'data: {"error": {"code": "node_lost", "message": "gone"}}\n\n')
    answer = received([WHOLE[0], failure, END])
    assert judge(answer, REFERENCE)[0] is Verdict.FAILED
    assert answer.code == "node_lost"


@pytest.mark.parametrize(("code", "verdict"), [("queue_full", Verdict.REFUSED), ("internal", Verdict.FAILED)])
def test_only_a_request_that_was_not_accepted_is_refused(code: str, verdict: Verdict) -> None:
    head = b"HTTP/1.1 503 No\r\nContent-Type: application/json\r\n\r\n"
    body = json.dumps({"error": {"code": code, "message": "no"}}).encode()
    assert judge(received([body], head=head), REFERENCE)[0] is verdict


def test_an_accepted_request_that_waited_for_nodes_in_vain_is_not_refused() -> None:
    head = b"HTTP/1.1 503 No\r\nContent-Type: application/json\r\n\r\n"
    answer = received([json.dumps({"error": {"code": "no_route", "message": "no"}}).encode()], head=head)
    assert judge(answer, REFERENCE)[0] is Verdict.REFUSED
    answer.ended_at = answer.began_at + 60.5
    assert judge(answer, REFERENCE)[0] is Verdict.FAILED


def test_a_wrong_log_probability_is_seen_and_rounding_is_not() -> None:
    answer = received(WHOLE)
    answer.outputs[0].logprobs[1] += 1e-5
    assert judge(answer, REFERENCE)[0] is Verdict.EQUAL
    answer.outputs[0].logprobs[1] += 0.01
    assert judge(answer, REFERENCE)[0] is Verdict.WRONG


def test_an_answer_without_streaming_is_read() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    choice = {"index": 0, "text": "To be,", "token_ids": [1, 2, 3], "finish_reason": "length"}
    choice["logprobs"] = {"token_logprobs": [-0.5, -1, -1.5]}
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}).encode()
    assert judge(received([body], head=head), REFERENCE) == (Verdict.EQUAL, "")
    assert judge(received([body[:40]], head=head, error="dropped"), REFERENCE)[0] is Verdict.LOST


def test_the_smallest_margin_is_that_of_the_two_likeliest_tokens_at_any_position() -> None:
    tops = [{"a": -0.5, "b": -1.0}, {"c": -0.75, "d": -0.625}, {"e": -0.1}]
    body = json.dumps({"choices": [{"logprobs": {"top_logprobs": tops}}]}).encode()
    assert smallest_margin(body) == 0.125
