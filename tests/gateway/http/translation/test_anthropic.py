"""Requests of the Messages API as chats."""

import json

import msgspec
import pytest

from common.errors import ErrorCode, RequestError
from gateway.http.protocol.anthropic import CountTokensRequest, MessagesRequest
from gateway.http.protocol.decoding import decode, decode_with_extras
from gateway.http.translation.anthropic import to_chat

USER = {"role": "user", "content": "Hi"}


def body_of(**fields):
    return json.dumps({"max_tokens": 9, "messages": [USER], **fields}).encode()


def chat_of(**fields):
    return to_chat(decode(MessagesRequest, body_of(**fields)))


def messages_of(*messages, **fields):
    """The messages without absent fields, with their texts joined."""
    found = []
    for message in chat_of(messages=list(messages), **fields).messages:
        shown = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
        if isinstance(shown.get("content"), list):
            shown["content"] = "|".join(part["text"] for part in shown["content"])
        found.append(shown)
    return found


def refused(**fields):
    with pytest.raises(RequestError) as error:
        chat_of(**fields)
    return error.value.param, error.value.code


def text(words):
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


@pytest.mark.parametrize("system", ["Be kind.", [text("Be kind.")]], ids=["string", "blocks"])
def test_the_system_prompt_comes_first(system):
    found = messages_of(USER, system=system)
    assert found == [{"role": "system", "content": "Be kind."}, USER]


def test_what_claude_code_writes_for_the_bill_is_left_out_of_the_system_prompt():
    bill = text("x-anthropic-billing-header: cc_version=2.1.197.3d9; cc_entrypoint=cli; cch=74943;")
    assert messages_of(USER, system=[bill, text("Be kind.")]) == [{"role": "system", "content": "Be kind."}, USER]
    assert messages_of(USER, system=[bill]) == [USER]
    assert refused(system=[bill, {"type": "image"}]) == ("system[1].type", ErrorCode.NOT_SUPPORTED)


def test_a_turn_with_thinking_text_and_calls_and_the_results_behind_it():
    found = messages_of(
        USER,
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            text("Let me look."),
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("sunny"), text("warm")]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            text("And now?"),
        ),
    )
    assert found == [
        USER,
        {
            "role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny|warm"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip


def test_neighbouring_messages_of_one_role_become_one():
    found = messages_of(user(text("a")), user(text("b"), text("c")), assistant(text("d")), assistant(text("e")), USER)
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "a|b|c"), ("assistant", "de"), ("user", "Hi"),
    ]  # fmt: skip


def test_a_system_message_may_stand_in_the_middle():
    found = messages_of(USER, {"role": "system", "content": "New rules."}, USER)
    assert [message["role"] for message in found] == ["user", "system", "user"]


def test_a_last_message_of_the_assistant_is_continued():
    chat = chat_of(messages=[USER, assistant(text("The answer is ("))])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert chat.messages[-1].content == "The answer is ("
    assert chat_of().continue_final_message is None
    assert (
        refused(messages=[USER, assistant({"type": "tool_use", "id": "t", "name": "f", "input": {}})])[0] == "messages"
    )


def test_sampling_fields():
    chat = chat_of(stop_sequences=["x"], temperature=0.5, top_p=0.25, top_k=4, stream=True, priority=2, cache_salt="s")
    assert (chat.stop, chat.temperature, chat.top_p, chat.top_k) == (["x"], 0.5, 0.25, 4)
    assert (chat.stream, chat.priority, chat.cache_salt) == (True, 2, "s")
    assert chat.max_tokens is None


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": False}, "f", True),
    ],
)
def test_tools_and_their_choice(choice, expected, is_parallel):
    schema = {"type": "object", "properties": {}}
    tools = [{"name": "f", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}}]
    chat = chat_of(tools=tools, tool_choice=choice)
    (tool,) = chat.tools
    assert (tool.function.name, tool.function.description, tool.function.parameters) == ("f", "d", schema)
    found = chat.tool_choice if isinstance(chat.tool_choice, str) else chat.tool_choice.function.name
    assert (found, chat.parallel_tool_calls) == (expected, is_parallel)


@pytest.mark.parametrize(
    ("thinking", "is_thinking", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
        ({"type": "adaptive", "display": "summarized"}, True, None),
        ({"type": "adaptive", "display": "updates"}, True, None),
        ({"type": "disabled"}, False, None),
    ],
)
def test_thinking_switches_the_template(thinking, is_thinking, budget):
    chat = chat_of(thinking=thinking)
    assert chat.chat_template_kwargs == {"enable_thinking": is_thinking, "thinking": is_thinking}
    assert chat.thinking_budget == budget


def test_without_thinking_the_template_decides():
    assert chat_of().chat_template_kwargs is None


def test_the_output_has_a_schema_and_an_effort():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    given = {"type": "json_schema", "schema": schema}
    chat = chat_of(output_config={"effort": "max", "format": given})
    assert (chat.reasoning_effort, chat.response_format.json_schema.schema) == ("max", schema)
    assert chat_of(output_format=given).response_format.json_schema.schema == schema
    both = {"output_config": {"format": given}, "output_format": given}
    assert chat_of(**both).response_format.json_schema.schema == schema
    both["output_format"] = {**given, "schema": {}}
    assert refused(**both) == ("output_format", ErrorCode.INVALID_REQUEST)


def test_tokens_are_counted_of_the_same_chat():
    fields = {"system": "s", "messages": [USER], "tools": [{"name": "f", "input_schema": {}}]}
    counted = to_chat(decode(CountTokensRequest, json.dumps(fields).encode()))
    assert counted == to_chat(decode(MessagesRequest, json.dumps({**fields, "max_tokens": 1}).encode()))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [user(IMAGE)]}, "messages[0].content[0].type"),
        ({"messages": [user(text("a"), {"type": "document", "source": {}})]}, "messages[0].content[1].type"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]})]},
            "messages[0].content[0].content[0].type",
        ),
        ({"messages": [USER, assistant({"type": "redacted_thinking", "data": "x"})]}, "messages[1].content[0].type"),
        (
            {"messages": [user({"type": "web_fetch_tool_result", "tool_use_id": "t", "content": {"url": "u"}})]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "s"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, param):
    assert refused(**fields) == (param, ErrorCode.NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "t", "content": {"x": 1}})]},
            "messages[0].content[0].content",
        ),
        ({"messages": [assistant({"type": "tool_use", "name": "f"})]}, "messages[0].content[0].id"),
        ({"messages": [assistant({"type": "tool_use", "id": "t"})]}, "messages[0].content[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, param):
    assert refused(**fields) == (param, ErrorCode.INVALID_REQUEST)


def test_max_tokens_is_required():
    with pytest.raises(RequestError, match="max_tokens"):
        decode(MessagesRequest, json.dumps({"messages": [USER]}).encode())


def test_fields_without_effect_are_accepted_and_named():
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}}
    _, ignored = decode_with_extras(MessagesRequest, body_of(**fields, cache_control={"type": "ephemeral"}))
    assert set(ignored) == {"metadata", "service_tier", "context_management"}
