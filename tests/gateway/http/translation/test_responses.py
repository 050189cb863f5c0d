"""Requests of the Responses API as chats."""

import json

import msgspec
import pytest

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.decoding import decode, decode_with_extras
from gateway.http.protocol.openai import ChatMessage
from gateway.http.protocol.responses import InputItem, ResponsesRequest
from gateway.http.translation.responses import input_items, to_chat, turn_starts


def request(**fields):
    return decode(ResponsesRequest, json.dumps({"input": "Hi", **fields}).encode())


def chat_of(*, history=(), **fields):
    return to_chat(request(**fields), msgspec.convert(list(history), list[InputItem]))


def messages_of(**fields):
    """The messages without absent fields, with their texts joined."""
    found = []
    for message in chat_of(**fields).messages:
        shown = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
        if isinstance(shown.get("content"), list):
            shown["content"] = "|".join(part["text"] for part in shown["content"])
        found.append(shown)
    return found


def refused(**fields):
    with pytest.raises(RequestError) as error:
        chat_of(**fields)
    return error.value.param, error.value.code


LONG = {"type": "function", "name": "f" * 99}
IMAGE = {"type": "input_image", "image_url": "x"}
USER = {"role": "user", "content": "Hi"}
CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "f",
    "arguments": '{"x":1}',
    "id": "fc_1",
    "status": "completed",
}
PLAIN_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


def test_a_string_is_a_message_of_the_user_behind_the_instructions():
    assert messages_of(input="Hi", instructions="Be kind.") == [{"role": "system", "content": "Be kind."}, USER]
    assert [item.content for item in input_items(request(input="Hi"))] == ["Hi"]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": None, "role": "user", "content": [{"type": "text", "text": "Hi"}], "status": "completed"},
    ],
    ids=["easy", "with parts", "without a type"],
)
def test_the_forms_of_a_message(item):
    assert messages_of(input=[item]) == [USER]


def test_reasoning_text_and_calls_of_one_turn_are_one_message():
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Think."}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
        },
        CALL,
        {**CALL, "call_id": "c2", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rainy"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    assert messages_of(input=items) == [
        {
            "role": "assistant", "content": "Let me look.", "reasoning_content": "Think.",
            "tool_calls": [PLAIN_CALL, {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "rainy", "tool_call_id": "c2"},
        {"role": "assistant", "content": "No."},
    ]  # fmt: skip


def test_reasoning_after_calls_begins_the_next_turn():
    items = [CALL, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Again."}]}, CALL]
    first, second = messages_of(input=items)
    assert first == {"role": "assistant", "tool_calls": [PLAIN_CALL]}
    assert second == {"role": "assistant", "reasoning_content": "Again.", "tool_calls": [PLAIN_CALL]}


def test_text_after_calls_does_not_part_them_from_their_results():
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I asked f."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    assert messages_of(input=[CALL, text, result]) == [
        {"role": "assistant", "content": "I asked f.", "tool_calls": [PLAIN_CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]


def test_encrypted_reasoning_of_another_server_adds_nothing():
    items = [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, CALL]
    assert messages_of(input=items) == [{"role": "assistant", "tool_calls": [PLAIN_CALL]}]


def test_the_items_of_an_answer_come_back_without_a_field_that_is_ignored():
    answer = {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    _, ignored = decode_with_extras(ResponsesRequest, json.dumps({"input": [answer, CALL]}).encode(), are_refused=True)
    assert ignored == ()


def test_history_stands_between_the_instructions_and_the_input():
    history = [{"type": "message", "role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    found = messages_of(history=history, instructions="Be kind.")
    assert [message["content"] for message in found] == ["Be kind.", "A", "B", "Hi"]


def test_tools_choices_and_formats_have_the_form_of_chats():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    chat = chat_of(
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "high", "summary": "auto"},
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        seed=3,
    )
    assert msgspec.to_builtins(chat.tools) == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": True}}
    ]
    assert chat.tool_choice.function.name == "f"
    assert chat.parallel_tool_calls is False
    assert (chat.response_format.type, chat.response_format.json_schema.schema) == ("json_schema", schema)
    assert (chat.response_format.json_schema.name, chat.response_format.json_schema.strict) == ("n", True)
    assert chat.reasoning_effort == "high"
    assert (chat.max_completion_tokens, chat.temperature, chat.top_p, chat.seed) == (7, 0.5, 0.25, 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, None)),
        ({"top_logprobs": 0}, (False, None)),
        ({"top_logprobs": 2}, (True, 2)),
        ({"include": ["message.output_text.logprobs"]}, (True, None)),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, (True, 3)),
        ({"include": ["reasoning.encrypted_content"]}, (False, None)),
    ],
)
def test_log_probabilities_are_asked_for_in_either_way(fields, expected):
    chat = chat_of(**fields)
    assert (chat.logprobs, chat.top_logprobs) == expected


def test_turns_begin_with_messages_of_users_behind_the_instructions():
    roles = ("system", "developer", "user", "assistant", "tool", "assistant", "user", "user", "assistant", "system")
    messages = [ChatMessage(role=role, content="") for role in roles]
    assert turn_starts(messages) == [2, 6, 7]
    assert turn_starts(messages[:2]) == []
    assert turn_starts(messages[3:]) == [0, 3, 4]


def test_allowed_tools_are_those_of_chats():
    tools = [{"type": "function", "name": name} for name in ("f", "g", "h")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    allowed = chat_of(tools=tools, tool_choice=choice).tool_choice.allowed_tools
    assert (allowed.mode, [tool.function.name for tool in allowed.tools]) == ("required", ["g"])


def test_functions_of_a_namespace_have_its_name_before_theirs_and_its_description_without_their_own():
    functions = [
        {"type": "function", "name": "find", "strict": True},
        {"type": "function", "name": "f", "description": "F"},
    ]
    crm = {"type": "namespace", "name": "crm", "description": "Customers", "tools": functions}
    of_server = {"type": "namespace", "name": "mcp__files__", "tools": functions[1:]}
    call = {**CALL, "name": "find", "namespace": "crm"}
    chat = chat_of(tools=[crm, functions[1], of_server], input=[USER, call])
    assert [(tool.function.name, tool.function.description, tool.function.strict) for tool in chat.tools] == [
        ("crm__find", "Customers", True), ("crm__f", "F", None), ("f", "F", None), ("mcp__files__f", "F", None),
    ]  # fmt: skip
    assert chat.messages[1].tool_calls[0].function.name == "crm__find"


@pytest.mark.parametrize("text", [None, {}, {"format": None}])
def test_without_a_format_the_answer_is_free(text):
    assert chat_of(text=text).response_format is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "s"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [USER, {"type": "computer_call_output", "call_id": "c"}]}, "input[1].type"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields, param):
    assert refused(**fields) == (param, ErrorCode.NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {"x": 1}}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n" * 99, "tools": [LONG]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": n, "tools": [LONG] * 65} for n in "ab"]}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}}, "tool_choice.tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"tools": [{"type": "function", "name": "with space"}]}, "tools[0].name"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, param):
    found, code = refused(**fields)
    assert (found, code) == (param, ErrorCode.INVALID_REQUEST)


def test_values_and_fields_without_effect_are_named_or_refused():
    body = {
        "input": "Hi", "stream": True, "max_tool_calls": 3, "stream_options": {"include_obfuscation": True},
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content", "x\r\ny"],
        "tools": [{"type": "web_search"}, {"type": "function", "name": "f"}],
    }  # fmt: skip
    decoded, ignored = decode_with_extras(ResponsesRequest, json.dumps(body).encode())
    assert [tool.function.name for tool in to_chat(decoded, []).tools] == ["f"]
    expected = ("max_tool_calls", "stream_options.include_obfuscation", "include.reasoning.encrypted_content")
    assert ignored == (*expected, "include.x__y", "tools.web_search")
    for field in ("max_tool_calls", "stream_options", "include", "tools"):
        given = {"input": "Hi", "stream": True, field: body[field]}
        with pytest.raises(RequestError) as caught:
            decode_with_extras(ResponsesRequest, json.dumps(given).encode(), are_refused=True)
        assert caught.value.param.startswith(field)


def test_harmless_fields_are_accepted():
    chat_of(
        store=False, metadata={"a": "b"}, user="u", safety_identifier="s", service_tier="auto", background=False,
        include=["reasoning.encrypted_content"], truncation="disabled", max_tool_calls=3, prompt_cache_key="k",
        text={"verbosity": "low"}, moderation={"model": "m"}, stream=True,
        stream_options={"include_obfuscation": False},
    )  # fmt: skip
