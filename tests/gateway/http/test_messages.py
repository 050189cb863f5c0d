"""``/v1/messages`` over real HTTP, with nodes that answer as the test says."""

import json

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from support.gateway.formatted_outputs import events_of
from support.gateway.toy_formats import ToyTools
from support.gateway.toy_stack import answers, failing_stream, last_generate, last_prompt, toy_stack

EVENT = TypeAdapter(RawMessageStreamEvent)
HI = {"role": "user", "content": "Hi"}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]


@pytest.fixture
async def stack(folder):
    async with toy_stack(folder) as running_stack:
        yield running_stack


async def message(stack, **fields):
    status, answer = await stack.post("/v1/messages", {"max_tokens": 99, "messages": [HI], **fields})
    assert status == 200, answer
    Message.model_validate(answer)
    return answer


async def stream(stack, **fields):
    body = json.dumps({"max_tokens": 99, "messages": [HI], "stream": True, **fields})
    headers = {"Content-Type": "application/json"}
    async with stack.client.post(f"{stack.url}/v1/messages", data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return events_of(await answer.read())


async def refused(stack, path="/v1/messages", **fields):
    status, answer = await stack.post(path, {"max_tokens": 99, "messages": [HI], **fields})
    assert answer["type"] == "error"
    assert answer["request_id"]
    return status, answer["error"]["type"], answer["error"]["message"]


async def test_thinking_text_and_calls_become_blocks(stack):
    answers(stack, '(Hm.)I add.[add|{"a":1}]')
    answer = await message(stack, tools=TOOLS, system=[{"type": "text", "text": "Be kind."}])
    thinking, text, call = answer["content"]
    assert thinking["thinking"] == "Hm."
    assert text == {"type": "text", "text": "I add."}
    assert (call["name"], call["input"]) == ("add", {"a": 1})
    assert (answer["stop_reason"], answer["id"][:4], answer["model"]) == ("tool_use", "msg_", "tiny")
    usage = answer["usage"]
    prompt = last_generate(stack).prompt
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(prompt) - 3, 3)
    assert usage["output_tokens_details"]["thinking_tokens"] > 0
    assert last_prompt(stack).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


async def test_a_stream_has_the_parts_of_the_answer_that_is_not_streamed(stack):
    answers(stack, '(Hm.)I add.[add|{"a":1}]')
    whole = await message(stack, tools=TOOLS)
    events = await stream(stack, tools=TOOLS)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("text", "") for delta in deltas) == "I add."
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"a":1}'
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-1] == {"type": "message_stop"}


async def test_max_tokens_is_an_upper_bound(stack):
    answers(stack, "Hello", finish="length")
    assert (await message(stack, max_tokens=2))["stop_reason"] == "max_tokens"
    assert last_generate(stack).sampling.max_new_tokens == 2
    assert (await message(stack, max_tokens=100_000))["stop_reason"] == "model_context_window_exceeded"
    generate = last_generate(stack)
    assert generate.sampling.max_new_tokens == 512 - len(generate.prompt)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": {"type": "any"}, "stop_sequences": ["x"]}])
async def test_without_output_the_prompt_is_computed_and_the_message_is_empty(stack, fields):
    answers(stack, "x")
    answer = await message(stack, max_tokens=0, **fields)
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    generate = last_generate(stack)
    assert (generate.sampling.max_new_tokens, generate.sampling.grammar) == (1, "")
    assert [event["type"] for event in await stream(stack, max_tokens=0, **fields)] == [
        "message_start", "ping", "message_delta", "message_stop",
    ]  # fmt: skip


async def test_stop_sequences(stack):
    answers(stack, "One. Two.")
    answer = await message(stack, stop_sequences=["Tw"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Tw")
    assert answer["content"] == [{"type": "text", "text": "One. "}]


async def test_a_last_message_of_the_assistant_is_continued(stack):
    answers(stack, "A)")
    await message(stack, messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert last_prompt(stack).endswith("<|im_start|>assistant\nThe answer is (")


async def test_results_of_tools_come_back(stack):
    answers(stack, '(Hm.)[add|{"a":1}]')
    answer = await message(stack, tools=TOOLS)
    call = answer["content"][-1]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "2"}]}
    await message(stack, tools=TOOLS, messages=[HI, {"role": "assistant", "content": answer["content"]}, result])
    assert "<|im_start|>tool\n2<|im_end|>" in last_prompt(stack)


async def test_a_thinking_budget_reaches_the_nodes(stack):
    answers(stack, "Hello.")
    await message(stack, thinking={"type": "enabled", "budget_tokens": 1024})
    assert last_generate(stack).sampling.thinking.budget == 1024


async def test_a_thinking_budget_that_no_token_can_end_is_ignored(folder, monkeypatch):
    monkeypatch.setattr(ToyTools, "covers_reasoning", True)
    async with toy_stack(folder) as stack:
        answers(stack, "Hello.")
        await message(stack, thinking={"type": "enabled", "budget_tokens": 1024})
        assert last_generate(stack).sampling.thinking is None


async def test_tokens_are_counted_as_they_are_sent_to_the_nodes(stack):
    answers(stack, "Hello.")
    fields = {"system": "Be kind.", "messages": [HI], "tools": TOOLS}
    answer = await message(stack, **fields)
    status, counted = await stack.post("/v1/messages/count_tokens", fields)
    usage = answer["usage"]
    assert status == 200
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_errors_have_anthropics_envelope(stack):
    assert await refused(stack, max_tokens=-1) == (
        400, "invalid_request_error", "max_tokens: Expected int >= 0",
    )  # fmt: skip
    assert (await refused(stack, model="other"))[:2] == (404, "not_found_error")
    status, kind, text = await refused(stack, messages=[{"role": "user", "content": "word " * 2000}])
    assert (status, kind) == (400, "invalid_request_error")
    assert text.startswith("prompt is too long: ")
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    status, kind, text = await refused(stack, messages=[{"role": "user", "content": [image]}])
    assert (status, kind) == (400, "invalid_request_error")
    assert text.startswith("messages[0].content[0].type: 'image' is not supported")
    assert (await refused(stack, "/v1/messages/count_tokens"))[:2] == (400, "invalid_request_error")  # max_tokens
    assert (await refused(stack, "/v1/messages/batches"))[:2] == (400, "invalid_request_error")
    assert (await refused(stack, "/v1/messages/nothing"))[:2] == (404, "not_found_error")


async def test_a_node_that_fails_during_a_stream_ends_it_with_an_error(stack):
    body = {"max_tokens": 9, "messages": [HI]}
    *_, last = events_of(await failing_stream(stack, "/v1/messages", body))
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert "no pages" in last["error"]["message"]


async def test_a_tool_runner_is_told_to_send_the_whole_conversation(stack):
    body = {"max_tokens": 9, "messages": [HI], "thread": {"type": "create"}}
    status, answer = await stack.post("/v1/messages?beta=true", body)
    assert status == 400
    assert answer["error"]["message"] == "thread: not supported by this server; send the whole conversation"
    assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_errors_about_tools_name_them_as_the_client_does(stack):
    tool = {"name": "f", "input_schema": {"type": "object"}}
    assert (await refused(stack, tools=[tool, tool]))[2].startswith("tools[1].name: ")
    assert (await refused(stack, tools=[tool], tool_choice={"type": "tool", "name": "g"}))[2] == (
        "tool_choice.name: g is not one of the tools"
    )


async def test_the_client_recognises_a_missing_key(folder):
    async with toy_stack(folder, api_key="secret") as stack:
        assert (await refused(stack))[:2] == (401, "authentication_error")
        answers(stack, "Hello.")
        async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="tiny", max_tokens=9, messages=[HI])
            right = client.with_options(api_key="secret")
            message = await right.messages.create(model="tiny", max_tokens=9, messages=[HI])
            assert message.content[0].text == "Hello."


async def test_fields_that_mean_nothing_here_are_named_in_a_header(stack):
    answers(stack, "Hello.")
    cached = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [cached]}], "metadata": {"user_id": "u"}}
    async with stack.client.post(f"{stack.url}/v1/messages", json=body) as answer:
        assert answer.status == 200
        assert answer.headers["x-baton-ignored"] == "metadata"


async def test_every_answer_of_the_api_has_its_id_as_anthropics_clients_read_it(stack):
    answers(stack, "Hello.")
    count, body = "/v1/messages/count_tokens", {"messages": [HI]}
    for path, fields, status in (("/v1/messages", {"max_tokens": 9}, 200), ("/v1/messages", {}, 400), (count, {}, 200),
                                 (count, {"x": 1}, 400), ("/v1/messages/batches", {}, 400)):  # fmt: skip
        async with stack.client.post(f"{stack.url}{path}", json={**body, **fields}) as answer:
            assert answer.status == status
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
    async with stack.client.options(f"{stack.url}/v1/messages") as answer:
        assert answer.status == 204
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
