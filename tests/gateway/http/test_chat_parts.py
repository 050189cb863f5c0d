"""Tool calls and reasoning in the answers and streams of chats."""

import json
import re

import pytest
from support.gateway.fake_nodes import running
from support.gateway.toy_stack import answers, ids_of, toy_stack

from common.sampling_params import Thinking
from gateway.text.output_formats import ModelFormats

HI = [{"role": "user", "content": "Hi"}]


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **fields}}


TOOLS = [tool("add"), tool("find", description="Finds it.")]


@pytest.fixture
async def stack(folder):
    async with toy_stack(folder) as running_stack:
        yield running_stack


async def chat(stack, **fields):
    status, answer = await stack.post("/v1/chat/completions", {"messages": HI, **fields})
    assert status == 200, answer
    return answer


def sampling(stack):
    return list(stack.nodes[0].generates.values())[-1].sampling


def thinking(budget):
    """Of an answer that may begin with reasoning, perhaps behind white space."""
    return Thinking(*ids_of("("), *ids_of(")"), budget, (*ids_of("\n"), *ids_of(" ")))


# ---- tool calls ------------------------------------------------------------------------------------------------------


async def test_tool_calls_are_divided_from_the_text(stack):
    answers(stack, 'I add.[add|{"a":1}][find|{}]')
    (choice,) = (await chat(stack, tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "I add."
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": '{"a":1}'},
        {"name": "find", "arguments": "{}"},
    ]
    assert [(set(call), call["type"]) for call in calls] == [({"id", "type", "function"}, "function")] * 2
    assert all(call["id"].startswith("call_") for call in calls)
    assert calls[0]["id"] != calls[1]["id"]


async def test_the_content_of_an_answer_of_calls_alone_is_null(stack):
    answers(stack, "[add|{}]")
    (choice,) = (await chat(stack, tools=TOOLS))["choices"]
    assert choice["message"]["content"] is None


async def test_an_answer_without_calls_ends_as_any_other(stack):
    answers(stack, "No.")
    (choice,) = (await chat(stack, tools=TOOLS))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "No.", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_ends_with_length(stack):
    answers(stack, '[add|{"a', finish="length")
    (choice,) = (await chat(stack, tools=TOOLS))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


@pytest.mark.parametrize(
    ("choice", "content"),
    [("auto", "[ad"), ("required", ""), ({"type": "function", "function": {"name": "add"}}, "")],
)
async def test_a_required_call_that_is_cut_off_before_its_name_ends_is_no_text(stack, choice, content):
    answers(stack, "[ad", finish="length")
    body = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
    (shown,) = (await chat(stack, **body))["choices"]
    assert shown["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert shown["finish_reason"] == "length"
    _, *chunks, _ = await stack.stream("/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_gives_the_name_first_and_then_pieces_of_the_arguments(stack):
    answers(stack, 'x[add|{"a":1}][find|{}]')
    first, *chunks, done = await stack.stream("/v1/chat/completions", {"messages": HI, "tools": TOOLS})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "x"
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", ())]
    begins = [entry for entry in entries if "id" in entry]
    assert [(entry["index"], entry["type"], entry["function"]["name"]) for entry in begins] == [
        (0, "function", "add"),
        (1, "function", "find"),
    ]
    for index, arguments in ((0, '{"a":1}'), (1, "{}")):
        mine = [entry for entry in entries if entry["index"] == index]
        assert mine[0] in begins
        assert all(set(entry) == {"index", "function"} for entry in mine[1:])
        assert "".join(entry["function"]["arguments"] for entry in mine) == arguments
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("tool_calls", "[DONE]")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_without_parallel_calls_only_the_first_is_shown(stack, is_stream):
    answers(stack, "[add|{}][find|{}]")
    body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
    if is_stream:
        _, *chunks, _ = await stack.stream("/v1/chat/completions", body)
        calls = [entry for chunk in chunks for entry in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert {entry["index"] for entry in calls} == {0}
    else:
        (choice,) = (await chat(stack, **body))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]


NAMED = {"type": "function", "function": {"name": "find"}}
ADD_ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"tools": [{"type": "function", "function": {"name": "add"}}]},
}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, ""),
        ({"tool_choice": "auto"}, ""),
        ({"tool_choice": "required"}, "['add', 'find'] parallel=True required=True"),
        ({"tool_choice": NAMED}, "['find'] parallel=False required=True"),
        ({"tools": [tool("add", strict=True), tool("find")]}, "['add', 'find'] parallel=True required=False"),
    ],
)
async def test_a_grammar_binds_calls_that_must_come_and_strict_tools(stack, fields, grammar):
    answers(stack, "x")
    await chat(stack, **{"tools": TOOLS, **fields})
    assert sampling(stack).grammar.removeprefix('start: "[" // ') == grammar


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, "start: ANSWER"),
        ({"tools": TOOLS, "tool_choice": "none"}, "start: ANSWER"),
        (
            {"tools": TOOLS},
            "start: either_calls | either_answer\neither_answer: ANSWER\n"
            "either_calls: \"[\" // ['add', 'find'] parallel=True required=True",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "start: \"[\" // ['add', 'find'] parallel=True required=True"),
    ],
)
async def test_the_answer_follows_a_schema_or_consists_of_calls(stack, fields, grammar):
    answers(stack, "x")
    await chat(stack, response_format=FORMAT, **fields)
    assert re.sub("%json .*", "ANSWER", sampling(stack).grammar) == grammar
    assert sampling(stack).thinking == thinking(None)


async def test_any_structured_output_can_be_combined_with_tools(stack):
    answers(stack, "x")
    await chat(stack, tools=TOOLS, structured_outputs={"regex": "a+"})
    assert sampling(stack).grammar == (
        "start: either_calls | either_answer\neither_answer: %lark {\nstart: /a+/\n}\n"
        "either_calls: \"[\" // ['add', 'find'] parallel=True required=True"
    )


async def test_with_the_tool_choice_none_the_model_neither_sees_tools_nor_calls_them(stack):
    answers(stack, "[add|{}]")
    (choice,) = (await chat(stack, tools=TOOLS, tool_choice="none"))["choices"]
    assert choice["message"]["content"] == "[add|{}]"
    assert choice["finish_reason"] == "stop"


async def test_tools_are_refused_if_the_format_of_calls_is_unknown(folder):
    async with running(folder) as stack:
        await stack.pair()
        for fields, param in (
            ({"tools": TOOLS}, "tools"),
            ({"thinking_budget": 5}, "thinking_budget"),
            ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ):
            status, answer = await stack.post("/v1/chat/completions", {"messages": HI, **fields})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "not_supported")
        await chat(stack, tools=TOOLS, tool_choice="none", max_tokens=1)
        await chat(stack, tools=[], tool_choice="auto", max_tokens=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("add")], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [tool("add"), tool("add")]}, "tools[1].function.name"),
        ({"tools": [tool("sub"), tool("add"), tool("add")], "tool_choice": ADD_ALLOWED}, "tools[2].function.name"),
        ({"tools": [tool("add two")]}, "tools[0].function.name"),
        ({"tools": [tool("add\n")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("add", description="x" * (1 << 20))]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("add", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"function_call": {"name": "add"}}, "function_call"),
    ],
)
async def test_bad_tools_are_refused_with_the_field_named(stack, fields, param):
    status, answer = await stack.post("/v1/chat/completions", {"messages": HI, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert param.split("[")[0] in answer["error"]["message"]


# ---- reasoning -------------------------------------------------------------------------------------------------------


async def test_reasoning_is_divided_from_the_answer_and_its_tokens_are_counted(stack):
    answers(stack, "(hm)Yes")
    answer = await chat(stack)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
    # "(" and the letters of "hm"; ")" precedes the answer, and the end token is counted as completion only
    num_reasoning = len(ids_of("(hm"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    assert answer["usage"]["completion_tokens"] == len(ids_of("(hm)Yes")) + 1


async def test_a_stream_gives_reasoning_before_content(stack):
    answers(stack, "(hm)Yes[add|{}]")
    body = {"messages": HI, "tools": TOOLS, "stream_options": {"include_usage": True}}
    first, *chunks, last, _ = await stack.stream("/v1/chat/completions", body)
    assert first["usage"] is None
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for field, text in (("reasoning_content", "hm"), ("content", "Yes")):
        assert "".join(delta.get(field, "") for delta in deltas) == text
    first_content = next(i for i, delta in enumerate(deltas) if "content" in delta)
    assert not any("reasoning_content" in delta for delta in deltas[first_content + 1 :])
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(ids_of("(hm"))}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"include_reasoning": False}, {"content": "Yes"}),
        ({"separate_reasoning": False}, {"content": "(hm)Yes"}),
    ],
)
async def test_reasoning_can_be_left_out_or_stay_in_the_text(stack, fields, message):
    answers(stack, "(hm)Yes")
    (choice,) = (await chat(stack, **fields))["choices"]
    assert choice["message"] == {"role": "assistant", "refusal": None, **message}


async def test_an_answer_begins_inside_reasoning_that_the_prompt_has_begun(stack):
    answers(stack, "hm)Yes")
    messages = [*HI, {"role": "assistant", "content": "Well ("}]
    answer = await chat(stack, messages=messages, continue_final_message=True, thinking_budget=7)
    assert answer["choices"][0]["message"]["reasoning_content"] == "hm"
    assert sampling(stack).thinking == Thinking(None, *ids_of(")"), 7)


async def test_what_the_user_writes_begins_no_reasoning_of_the_answer(stack):
    answers(stack, "Yes")
    messages = [{"role": "user", "content": "What is a (?"}, {"role": "assistant", "content": "Well,"}]
    answer = await chat(stack, messages=messages, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == "Yes"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"thinking_budget": 7}, thinking(7)),
        ({"thinking_token_budget": 0}, thinking(0)),
        ({"tools": TOOLS, "tool_choice": "required"}, thinking(None)),
    ],
)
async def test_nodes_know_the_reasoning_if_a_budget_or_a_grammar_needs_it(stack, fields, thinking):
    answers(stack, "x")
    await chat(stack, **fields)
    assert sampling(stack).thinking == thinking


async def test_an_answer_of_reasoning_alone_has_empty_content(stack):
    answers(stack, "(hm", finish="length")
    (choice,) = (await chat(stack))["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "hm")


async def test_a_model_without_reasoning_has_no_details_in_usage(folder):
    async with toy_stack(folder, ModelFormats()) as stack:
        answers(stack, "(hm)Yes")
        answer = await chat(stack)
    assert answer["choices"][0]["message"]["content"] == "(hm)Yes"
    assert "completion_tokens_details" not in answer["usage"]


async def test_calls_are_json_texts_that_clients_can_send_back(stack):
    answers(stack, '[add|{"a":1}]')
    (choice,) = (await chat(stack, tools=TOOLS))["choices"]
    message = choice["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    assert len(result["tool_call_id"]) <= 40  # a conversation may go on at OpenAI's servers, which take no more
    answers(stack, "Two.")
    await chat(stack, tools=TOOLS, messages=[*HI, message, result])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
