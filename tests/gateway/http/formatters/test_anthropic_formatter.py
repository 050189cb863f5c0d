"""Answers and events of the Messages API, checked by hand and with Anthropic's own client."""

import json
from types import SimpleNamespace

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from pydantic import TypeAdapter
from support.gateway.formatted_outputs import PIECES, delta_of, divided, events_of, output_of, streamed

from common.errors import ErrorCode, RequestError
from gateway.http.formatters.anthropic import AnthropicFormatter, anthropic_error
from gateway.http.protocol.anthropic import MessagesRequest, ThinkingConfig
from gateway.text.output_parser import ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

MODEL = SimpleNamespace(asked_name="m")
EVENT = TypeAdapter(RawMessageStreamEvent)


def formatter_of(max_tokens=5, **fields):
    return AnthropicFormatter(MODEL, MessagesRequest(messages=[], max_tokens=max_tokens, **fields), "msg_ab")


def answer_of(pieces, *, finish="stop", matched=None, num_tokens=5, **fields):
    output = output_of(pieces, finish=finish, matched=matched, num_tokens=num_tokens)
    answer = json.loads(b"".join(formatter_of(**fields).answer([output])))
    Message.model_validate(answer)
    return answer


def test_the_parts_of_an_output_are_blocks():
    answer = answer_of(PIECES)
    assert answer == {
        "id": "msg_ab", "type": "message", "role": "assistant", "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Think.", "signature": "ab"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_ab02", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "toolu_ab03", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {
            "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }  # fmt: skip


def test_a_stream_has_these_events_in_this_order():
    events = streamed(formatter_of(), output_of(PIECES), [PIECES])
    assert [event["type"] for event in events] == [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "Think."},
        {"type": "signature_delta", "signature": "ab"},
        {"type": "text_delta", "text": "Let me look."},
        {"type": "input_json_delta", "partial_json": '{"x": 1}'},
    ]
    assert events[0]["message"]["content"] == []
    assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@given(divided())
def test_the_client_puts_any_division_together_to_the_whole_answer(chunks):
    message, buffers = None, {}
    for event in streamed(formatter_of(), output_of(PIECES), chunks):
        if event["type"] != "ping":
            typed = EVENT.validate_python(event)
            message = accumulate_event(event=typed, current_snapshot=message, json_bufs=buffers)
    assert message.to_dict() == {**answer_of(PIECES), "stop_details": None}


@pytest.mark.parametrize(
    ("pieces", "fields", "reason", "sequence"),
    [
        ((TextPiece("a"),), {}, "end_turn", None),
        ((TextPiece("a"),), {"matched": 7}, "end_turn", None),
        ((TextPiece("a"),), {"matched": "STOP"}, "stop_sequence", "STOP"),
        (PIECES, {}, "tool_use", None),
        (PIECES, {"finish": "length"}, "max_tokens", None),
        ((TextPiece("a"),), {"finish": "length", "max_tokens": 9}, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(pieces, fields, reason, sequence):
    answer = answer_of(pieces, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("text", ['{"x": ', "[1]", "no JSON"])
def test_arguments_that_are_no_object_are_kept_as_text(text):
    answer = answer_of((ToolCallBegin(0, "f"), ToolCallArguments(0, text)), finish="length")
    assert answer["content"][0]["input"] == {"INVALID_JSON": text}


def test_omitted_thinking_leaves_an_empty_block():
    pieces = (ReasoningPiece("Think."), TextPiece("a"))
    thinking = ThinkingConfig(type="adaptive", display="omitted")
    assert answer_of(pieces, thinking=thinking)["content"] == [
        {"type": "thinking", "thinking": "", "signature": "ab"},
        {"type": "text", "text": "a"},
    ]
    events = streamed(formatter_of(thinking=thinking), output_of(pieces), [pieces])
    assert not any("Think" in str(event) for event in events)


def test_an_output_without_pieces_has_no_blocks():
    assert answer_of(())["content"] == []


def test_a_stream_that_fails_ends_with_an_error():
    formatter = formatter_of()
    output = output_of(PIECES)
    formatter.first([output])
    formatter.chunk(output, delta_of([TextPiece("Hel")]))
    (event,) = events_of(formatter.error(RequestError(ErrorCode.NODE_LOST, "the node is gone")))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "the node is gone"}}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.INVALID_REQUEST, "invalid_request_error"),
        (ErrorCode.AUTHENTICATION, "authentication_error"),
        (ErrorCode.MODEL_NOT_FOUND, "not_found_error"),
        (ErrorCode.BODY_TOO_LARGE, "request_too_large"),
        (ErrorCode.QUEUE_FULL, "rate_limit_error"),
        (ErrorCode.NO_ROUTE, "overloaded_error"),
        (ErrorCode.DEADLINE_EXCEEDED, "timeout_error"),
        (ErrorCode.NODE_LOST, "api_error"),
        (ErrorCode.INTERNAL, "api_error"),
        (ErrorCode.ABORTED, "invalid_request_error"),
    ],
)
def test_types_of_errors(code, kind):
    assert anthropic_error(RequestError(code, "why")) == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_a_prompt_that_is_too_long_is_recognised_by_its_message():
    message = anthropic_error(RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "9 tokens"))["error"]["message"]
    assert message.startswith("prompt is too long: ")
