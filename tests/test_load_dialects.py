"""Streams as real servers send them: recorded from llama.cpp's server and vLLM 0.32, written down for SGLang."""

import json
from array import array
from typing import Any

import pytest

from scripts.load.stream import Answer, read_answer
from scripts.load.wire import Done

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(*events: dict[str, Any], head: bytes = HEAD) -> Answer:
    """Each event in a chunk of its own, at instants 1, 2, 3, ..."""
    data = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    pieces = [head + chunk(data[0]), *map(chunk, data[1:]), b"0\r\n\r\n"]
    stamps = array("d", range(1, len(pieces) + 1)).tobytes()
    sizes = array("I", map(len, pieces)).tobytes()
    return read_answer(Done(0, 0.0, 0.0, 0.0, float(len(pieces)), stamps, sizes, b"".join(pieces), "", False))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def text_of(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None} | more]}


def delta_of(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


LLAMA_USAGE = {
    "usage": {"completion_tokens": 2, "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
    "timings": {
        "cache_n": 1, "prompt_n": 2, "prompt_ms": 5.396, "prompt_per_token_ms": 2.698, "prompt_per_second": 370.6,
        "predicted_n": 2, "predicted_ms": 4.5, "predicted_per_token_ms": 2.25, "predicted_per_second": 444.4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "events",
    [
        [
            text_of("I"),
            text_of(" am"),
            {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]} | LLAMA_USAGE,
        ],
        [
            delta_of(role="assistant", content=None),
            delta_of(content="I"),
            delta_of(content=" am"),
            delta_of("length"),
            {"choices": []} | LLAMA_USAGE,
        ],
    ],
    ids=["completions", "chat"],
)
def test_llama_cpp_times_two_stages_in_milliseconds(events: list[dict[str, Any]]) -> None:
    answer = read(*events)
    assert (answer.text, answer.error, answer.finish) == ("I am", "", "length")
    assert (answer.usage_prompt, answer.usage_output, answer.usage_cached) == (3, 2, 1)
    assert answer.timings == {"prefill_s": pytest.approx(0.005396), "decode_s": pytest.approx(0.0045)}, "rates are none"
    first = next(number for number, event in enumerate(events, 1) if "I" in str(event["choices"]))
    assert answer.stamps == [first, first + 1]


def test_vllm_counts_tokens_only_if_it_is_asked_for_them() -> None:
    usage = {
        "prompt_tokens": 3,
        "total_tokens": 6,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    last = {"choices": [], "usage": usage, "system_fingerprint": "vllm"}
    more: dict[str, Any] = {"stop_reason": None, "prompt_token_ids": [5, 6, 7]}
    counted = read(text_of(":", token_ids=[25], **more), text_of("\nBut", token_ids=[198, 445], **more), last)
    assert (counted.ids, counted.counts, counted.has_counts) == ([25, 198, 445], [1, 2], True)
    plain = read(
        delta_of(role="assistant", content=""), delta_of(content=":", token_ids=None), delta_of("length"), last
    )
    assert (plain.ids, plain.counts, plain.has_counts) == ([], [1], False)
    assert (counted.usage_output, plain.usage_output, plain.stamps) == (3, 3, [2.0])


def test_vllm_refuses_a_prompt_inside_of_the_stream() -> None:
    error = {"message": "Token id 9928 is out of vocabulary", "type": "BadRequestError", "param": "prompt", "code": 400}
    answer = read({"error": error})
    assert (answer.error, answer.message, answer.stamps) == ("stream_400", "Token id 9928 is out of vocabulary", [])


@pytest.mark.parametrize("is_cumulative", [True, False])
def test_sglangs_own_stream_may_repeat_what_it_said(is_cumulative: bool) -> None:
    ids, words = [7, 8, 9], ["a", " b", " c"]
    events = []
    for end in (1, 3):
        begin = 0 if is_cumulative else (0, 0, 0, 1)[end]
        meta: dict[str, Any] = {"id": "r", "prompt_tokens": 4, "completion_tokens": end, "cached_tokens": 2}
        meta |= {"finish_reason": {"type": "length", "length": 3} if end == 3 else None, "e2e_latency": 0.5}
        meta |= {"queue_time": 0.03} if end == 3 else {}
        events.append({"text": "".join(words[begin:end]), "output_ids": ids[begin:end], "meta_info": meta})
    answer = read(*events)
    assert (answer.text, answer.ids, answer.counts, answer.stamps) == ("a b c", ids, [1, 2], [1.0, 2.0])
    assert (answer.usage_prompt, answer.usage_output, answer.usage_cached, answer.finish) == (4, 3, 2, "length")
    assert answer.timings == {"queue_s": 0.03}


def test_sglangs_openai_stream_has_a_null_for_usage_in_every_event() -> None:
    usage = {"prompt_tokens": 9, "total_tokens": 11, "completion_tokens": 2, "prompt_tokens_details": None}
    said = [delta_of(role="assistant", content=""), delta_of(content="x", reasoning_content=None), delta_of("stop")]
    answer = read(*(event | {"usage": None} for event in said), {"choices": [], "usage": usage})
    assert (answer.text, answer.usage_prompt, answer.usage_output, answer.usage_cached) == ("x", 9, 2, None)
    assert answer.stamps == [2.0]
