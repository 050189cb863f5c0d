"""Answers and events of the Responses API, checked by hand and against the types of OpenAI's own client."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.gateway.formatted_outputs import PIECES, delta_of, divided, events_of, output_of, streamed

from common.errors import ErrorCode, RequestError
from gateway.http.formatters.responses import ResponsesFormatter
from gateway.http.protocol.responses import ResponsesRequest, ResponseTool
from gateway.text.output_parser import ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

MODEL = SimpleNamespace(asked_name="m", tokenizer=None)
EVENT = TypeAdapter(ResponseStreamEvent)
TIMES = ("created_at", "completed_at")


def formatter_of(kept=None, **fields):
    stored = None if kept is None else lambda *response: lambda: kept.append(response)
    return ResponsesFormatter(MODEL, ResponsesRequest(input="Hi", **fields), "resp_ab", stored=stored)


def answer_of(pieces, kept=None, finish="stop", **fields):
    formatter, outputs = formatter_of(kept, **fields), [output_of(pieces, finish=finish)]
    answer = json.loads(b"".join(formatter.answer(outputs)))
    formatter.keep()
    Response.model_validate(answer)
    return answer


def without_times(response):
    return {name: value for name, value in response.items() if name not in TIMES}


def test_the_parts_of_an_output_are_items():
    answer = answer_of(PIECES)
    assert answer["output"] == [
        {
            "id": "rs_ab00", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "Think."}],
        },
        {
            "id": "msg_ab01", "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_ab02", "type": "function_call", "status": "completed", "call_id": "call_ab02", "name": "f",
            "arguments": '{"x": 1}',
        },
        {
            "id": "fc_ab03", "type": "function_call", "status": "completed", "call_id": "call_ab03", "name": "g",
            "arguments": "",
        },
    ]  # fmt: skip
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert answer["usage"] == {
        "input_tokens": 8, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 13,
    }  # fmt: skip


def test_a_response_repeats_what_was_asked_for():
    answer = answer_of(
        PIECES, instructions="Be kind.", previous_response_id="resp_0", metadata={"a": "b"}, max_output_tokens=9,
        tools=[ResponseTool(type="function", name="f")], tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    expected = {
        "id": "resp_ab", "object": "response", "model": "m", "instructions": "Be kind.", "metadata": {"a": "b"},
        "previous_response_id": "resp_0", "max_output_tokens": 9, "tool_choice": "required", "store": False,
        "parallel_tool_calls": False, "temperature": 0.5, "top_p": 0.25, "truncation": "disabled",
        "tools": [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}],
        "text": {"format": {"type": "text"}},
    }  # fmt: skip
    assert {name: answer[name] for name in expected} == expected


def test_a_stream_has_these_events_in_this_order():
    events = streamed(formatter_of(), output_of(PIECES), [PIECES])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    assert events[2]["item"]["content"] == []


@given(divided())
def test_any_division_gives_the_whole_answer(chunks):
    events = streamed(formatter_of(), output_of(PIECES), chunks)
    for event in events:
        EVENT.validate_python(event)
    assert without_times(events[-1]["response"]) == without_times(answer_of(PIECES))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Let me look."


def test_each_event_of_an_item_names_it():
    events = streamed(formatter_of(), output_of(PIECES), [PIECES])
    places = {(event["item_id"], event["output_index"]) for event in events if "item_id" in event}
    assert places == {("rs_ab00", 0), ("msg_ab01", 1), ("fc_ab02", 2), ("fc_ab03", 3)}


def test_text_after_a_call_is_another_message():
    pieces = (TextPiece("a"), ToolCallBegin(0, "f"), ToolCallArguments(0, "{}"), TextPiece("b"))
    assert [item["type"] for item in answer_of(pieces)["output"]] == ["message", "function_call", "message"]


@pytest.mark.parametrize("pieces", [PIECES, (ReasoningPiece("Thi"),), (TextPiece("Hel"),)])
def test_an_output_that_is_cut_off_is_incomplete(pieces):
    answer = answer_of(pieces, finish="length")
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed"] * (len(answer["output"]) - 1) + ["incomplete"]
    *_, last = streamed(formatter_of(), output_of(pieces, finish="length"), [pieces])
    assert last["type"] == "response.incomplete"
    assert without_times(last["response"]) == without_times(answer)


def test_an_output_without_pieces_has_no_items():
    assert answer_of(())["output"] == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.NODE_LOST, "server_error"),
        (ErrorCode.DEADLINE_EXCEEDED, "server_error"),
        (ErrorCode.QUEUE_FULL, "rate_limit_exceeded"),
    ],
)
def test_a_stream_that_fails_ends_with_a_failed_response(code, expected):
    kept = []
    formatter = formatter_of(kept)
    output = output_of(PIECES)
    formatter.first([output])
    formatter.chunk(output, delta_of([TextPiece("Hel")]))
    *_, done, failed = events_of(formatter.error(RequestError(code, "the node is gone")))
    EVENT.validate_python(failed)
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": expected, "message": "the node is gone"}
    assert failed["response"]["output"] == [done["item"]]
    assert kept == []


def test_a_finished_response_is_kept_when_it_is_told_to():
    kept = []
    answer = answer_of(PIECES, kept)
    assert [response for _, response in kept] == [answer]
    assert answer["store"] is True
    formatter, output = formatter_of(kept), output_of(PIECES)
    *_, last = streamed(formatter, output, [PIECES])
    assert len(kept) == 1
    formatter.keep()
    assert kept[1] == (output, last["response"])
