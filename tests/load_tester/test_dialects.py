"""Streams as real servers send them: recorded from llama.cpp's server, vLLM 0.32 and SGLang 0.5.23."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from scripts.load_tester.client.ipc import RequestDone
from scripts.load_tester.client.server_info import ServerInfo, fetch_server_info
from scripts.load_tester.client.sse_parser import ParsedResponse, parse_response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(*events: dict[str, Any], head: bytes = HEAD) -> ParsedResponse:
    """Each event in a chunk of its own, at instants 1, 2, 3, ..."""
    data = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    pieces = [head + chunk(data[0]), *map(chunk, data[1:]), b"0\r\n\r\n"]
    stamps = array("d", range(1, len(pieces) + 1)).tobytes()
    sizes = array("I", map(len, pieces)).tobytes()
    return parse_response(RequestDone(0, 0.0, 0.0, 0.0, float(len(pieces)), stamps, sizes, b"".join(pieces), "", False))


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


def test_a_tool_call_is_output() -> None:
    name, arguments = [{"index": 0, "function": {"name": "f", "arguments": ""}}], [{"function": {"arguments": "{}"}}]
    events = delta_of(role="assistant", content=None), delta_of(tool_calls=name), delta_of(tool_calls=arguments)
    answer = read(*events, delta_of("tool_calls"))
    assert (answer.text, answer.error, answer.finish, answer.stamps) == ("f{}", "", "tool_calls", [2.0, 3.0])


def test_vllm_counts_tokens_only_on_request() -> None:
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


def test_vllm_refuses_a_prompt_inside_the_stream() -> None:
    error = {"message": "Token id 9928 is out of vocabulary", "type": "BadRequestError", "param": "prompt", "code": 400}
    answer = read({"error": error})
    assert (answer.error, answer.message, answer.stamps) == ("stream_400", "Token id 9928 is out of vocabulary", [])


def native(text: str, ids: list[int], so_far: int, **more: Any) -> dict[str, Any]:
    """An event of SGLang's native stream, from version 0.5.23 with --enable-metrics."""
    meta = {"id": "r", "finish_reason": None, "prompt_tokens": 4, "weight_version": "default", "num_retractions": 0}
    meta |= {"forward_entry_time": 1795305004.75, "prefill_finished_time": 1795305004.875, "queue_time": 0.03}
    meta |= {"reasoning_tokens": 0, "completion_tokens": so_far, "cached_tokens": 2, "cached_tokens_details": None}
    return {"text": text, "output_ids": ids, "meta_info": meta | more}


LENGTH = {"finish_reason": {"type": "length", "length": 4}, "e2e_latency": 0.5, "first_token_latency": 0.2}


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_output_that_the_server_cut_off_has_failed(reason: str) -> None:
    for end in (delta_of(reason, content=""), text_of("", finish_reason=reason)):
        cut = read(text_of("a"), end)
        assert (cut.error, cut.finish, cut.text) == (f"stream_{reason}", reason, "a")


@pytest.mark.parametrize("is_cumulative", [True, False])
def test_the_stream_of_sglang_may_be_cumulative(is_cumulative: bool) -> None:
    """The increment "nona" begins like the text so far but is not cumulative."""
    if is_cumulative:
        events = [native("no", [7], 1), native("nono", [7, 7], 2), native("nononona", [7, 7, 7, 9], 4, **LENGTH)]
    else:
        events = [native("no", [7], 1), native("no", [7], 2), native("nona", [7, 9], 4, **LENGTH)]
    answer = read(*events)
    assert (answer.text, answer.ids) == ("nononona", [7, 7, 7, 9])
    assert (answer.counts, answer.stamps) == ([1, 1, 2], [1.0, 2.0, 3.0])
    assert (answer.usage_prompt, answer.usage_output, answer.usage_cached, answer.finish) == (4, 4, 2, "length")
    assert answer.timings == {"queue_s": 0.03, "prefill_s": 0.125}


def test_an_increment_of_text_alone_keeps_the_tokens() -> None:
    """A character of two tokens, of which the second ends the output and the text comes after it."""
    found = read(native("", [5], 1), native("", [6], 2), native("é", [], 2))
    assert (found.text, found.ids, found.counts) == ("é", [5, 6], [1, 1])


def test_a_full_queue_of_sglang_is_an_error_in_every_dialect() -> None:
    abort = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    own = read({"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": abort, "completion_tokens": 0}})
    error = {"object": "error", "message": "The request queue is full.", "type": "SERVICE_UNAVAILABLE", "code": 503}
    nothing = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0, "reasoning_tokens": 0}
    openai = read({"error": error}, {"id": "r", "object": "text_completion", "choices": [], "usage": nothing})
    for answer in (own, openai):
        assert (answer.error, answer.message, answer.stamps) == ("stream_503", "The request queue is full.", [])


def test_sglang_refuses_without_an_envelope() -> None:
    body = b'{"object":"error","message":"Messages cannot be empty.","type":"BadRequestError","param":null,"code":400}'
    raw = b"HTTP/1.1 400 Bad Request\r\nserver: uvicorn\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    stamps, sizes = array("d", [1.0]).tobytes(), array("I", [len(raw)]).tobytes()
    answer = parse_response(RequestDone(0, 0.0, 0.0, 0.0, 1.0, stamps, sizes, raw, "", False))
    assert (answer.error, answer.message) == ("http_400", "Messages cannot be empty.")


def test_completions_of_sglang_have_token_ids_on_request() -> None:
    more = {"matched_stop": None}
    usage = {
        "prompt_tokens": 3,
        "total_tokens": 6,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    answer = read(
        text_of(" he", token_ids=[292], prompt_token_ids=[5, 6, 7], **more) | {"usage": None},
        text_of("'ll give", token_ids=[324, 279], finish_reason="length", **more) | {"usage": None},
        {"choices": [], "usage": usage | {"reasoning_tokens": 0}},
    )
    assert (answer.ids, answer.counts, answer.usage_cached, answer.finish) == ([292, 324, 279], [1, 2], 2, "length")
    chat = read(
        delta_of(role="assistant", content="", reasoning_content=None),
        delta_of(content="P", reasoning_content=None),
        delta_of("length", reasoning_content=None),
        {"choices": [], "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None}},
    )
    assert (chat.text, chat.counts, chat.stamps, chat.usage_cached) == ("P", [1], [2.0], None)


def test_streams_of_sglang_may_have_null_usage() -> None:
    usage = {"prompt_tokens": 9, "total_tokens": 11, "completion_tokens": 2, "prompt_tokens_details": None}
    said = [delta_of(role="assistant", content=""), delta_of(content="x", reasoning_content=None), delta_of("stop")]
    answer = read(*(event | {"usage": None} for event in said), {"choices": [], "usage": usage})
    assert (answer.text, answer.usage_prompt, answer.usage_output, answer.usage_cached) == ("x", 9, 2, None)
    assert answer.stamps == [2.0]


@pytest.mark.parametrize(("kind", "is_streamed"), [("sglang", False), ("vllm", True), ("baton", True)])
def test_token_ids_are_requested_where_a_server_supports_them(kind: str, is_streamed: bool) -> None:
    server = ServerInfo(None, None, kind, {})
    assert server.sends_ids("chat", is_stream=True) is is_streamed
    assert server.sends_ids("chat", is_stream=False) and server.sends_ids("completions", is_stream=True)


def test_a_local_model_folder_gives_the_vocabulary_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and SGLang list the model's folder, not the size of its vocabulary."""
    listed = {"id": "m", "owned_by": "sglang", "root": str(tmp_path), "parent": None, "max_model_len": 4096}
    pages = {"/v1/models": {"object": "list", "data": [listed]}, "/server_info": {"version": "0.5.23"}}
    monkeypatch.setattr("scripts.load_tester.client.server_info.get_json", lambda parts, path, *_, **_more: pages[path])
    assert fetch_server_info("http://x", {}).vocab_size is None
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    found = fetch_server_info("http://x", {})
    assert (found.model, found.kind, found.vocab_size, found.vocab) == ("m", "sglang", 1024, (100, 960))
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 2048}}')
    assert fetch_server_info("http://x", {}).vocab_size == 2048
    (tmp_path / "config.json").write_text("[]")
    assert fetch_server_info("http://x", {}).vocab_size is None
