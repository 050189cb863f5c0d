"""``/v1/responses`` over real HTTP, with nodes that answer as the test says."""

import json
import threading

import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter
from support.gateway.formatted_outputs import events_of
from support.gateway.toy_stack import answers, failing_stream, ids_of, last_generate, last_prompt, toy_stack

from gateway.http.formatters.responses import ResponsesFormatter
from gateway.http.responses import ResponsesApi
from gateway.requests.response_store import ResponseStore

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]


CRM = {"type": "namespace", "name": "crm", "description": "Customers", "tools": TOOLS}


@pytest.fixture
async def stack(folder):
    async with toy_stack(folder) as running_stack:
        yield running_stack


async def respond(stack, **fields):
    status, answer = await stack.post("/v1/responses", {"input": "Hi", **fields})
    assert status == 200, answer
    Response.model_validate(answer)
    return answer


async def stream(stack, **fields):
    body = json.dumps({"input": "Hi", "stream": True, **fields})
    headers = {"Content-Type": "application/json"}
    async with stack.client.post(f"{stack.url}/v1/responses", data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        events = events_of(await answer.read())
    for event in events:
        EVENT.validate_python(event)
    return events


async def refused(stack, **fields):
    status, answer = await stack.post("/v1/responses", {"input": "Hi", **fields})
    return status, answer["error"]["param"], answer["error"]["code"]


def text_of(answer):
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


# ---- answers ---------------------------------------------------------------------------------------------------------


async def test_reasoning_text_and_calls_become_items(stack):
    answers(stack, '(Hm.)I add.[add|{"a":1}]')
    answer = await respond(stack, tools=TOOLS, instructions="Be kind.")
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert text_of(answer) == "I add."
    assert (answer["output"][2]["name"], answer["output"][2]["arguments"]) == ("add", '{"a":1}')
    assert (answer["status"], answer["id"][:5], answer["model"]) == ("completed", "resp_", "tiny")
    prompt = last_generate(stack).prompt
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (len(prompt), 3)
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert last_prompt(stack).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


async def test_a_stream_ends_with_the_answer_that_is_not_streamed(stack):
    answers(stack, '(Hm.)I add.[add|{"a":1}]')
    whole = await respond(stack, tools=TOOLS)
    events = await stream(stack, tools=TOOLS)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    def shown(item):
        return {name: value for name, value in item.items() if name not in ("id", "call_id")}

    assert list(map(shown, last["output"])) == list(map(shown, whole["output"]))
    assert last["usage"] == whole["usage"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "I add."


async def test_an_answer_without_any_format_is_text(folder):
    async with toy_stack(folder) as stack:
        answers(stack, "Hello.")
        answer = await respond(stack)
        assert (text_of(answer), len(answer["output"])) == ("Hello.", 1)


async def test_an_answer_that_is_cut_off_is_incomplete(stack):
    answers(stack, "Hel", finish="length")
    answer = await respond(stack, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last_generate(stack).sampling.max_new_tokens == 3
    assert (await stream(stack, max_output_tokens=3))[-1]["type"] == "response.incomplete"


async def test_a_node_that_fails_during_a_stream_ends_it_with_a_failed_response(stack):
    failed = events_of(await failing_stream(stack, "/v1/responses", {"input": "Hi"}))[-1]
    EVENT.validate_python(failed)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert "no pages" in failed["response"]["error"]["message"]


async def test_errors_carry_the_names_of_this_api(stack):
    assert await refused(stack, max_output_tokens=4096) == (400, "max_output_tokens", "context_length_exceeded")
    assert await refused(stack, input="word " * 2000) == (400, "input", "context_length_exceeded")
    assert await refused(stack, input=[]) == (400, "input", "invalid_request")
    assert await refused(stack, model="other") == (404, "model", "model_not_found")
    assert await refused(stack, background=True) == (400, "background", "not_supported")
    assert await refused(stack, tools=[{"type": "file_search"}]) == (400, "tools[0].type", "not_supported")
    assert await refused(stack, unknown=1) == (400, "unknown", "invalid_request")


async def test_a_budget_beyond_what_messages_can_carry_is_refused(stack):
    assert await refused(stack, thinking_budget=2**64) == (400, "thinking_budget", "invalid_request")
    assert stack.gateway._dispatcher.num_in_flight == 0


async def test_errors_about_tools_name_them_as_the_client_does(stack):
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]
    assert await refused(stack, tools=tools) == (400, "tools[1].name", "invalid_request")
    in_namespace = [*TOOLS, {"type": "namespace", "name": "n", "tools": tools}]
    assert await refused(stack, tools=in_namespace) == (400, "tools[1].tools[1].name", "invalid_request")
    choice = {"type": "function", "name": "g"}
    assert await refused(stack, tools=TOOLS, tool_choice=choice) == (400, "tool_choice.name", "invalid_request")


async def test_the_client_recognises_a_missing_key(folder):
    async with toy_stack(folder, api_key="secret") as stack:
        answers(stack, "Hello.")
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model="tiny", input="Hi")
            right = client.with_options(api_key="secret")
            assert (await right.responses.create(model="tiny", input="Hi")).output_text == "Hello."


async def test_calls_of_functions_in_a_namespace_have_it_and_come_back_with_it(stack):
    answers(stack, "[crm__add|{}][add|{}]")
    events = await stream(stack, tools=[CRM, *TOOLS])
    response = events[-1]["response"]
    Response.model_validate(response)
    calls = response["output"]
    assert [(call.get("namespace"), call["name"]) for call in calls] == [("crm", "add"), (None, "add")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == calls
    assert response["tools"][0]["tools"] == response["tools"][1:]
    answers(stack, "Done.")
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    assert text_of(await respond(stack, input=[*calls, *results], tools=[CRM, *TOOLS])) == "Done."


# ---- stored responses ------------------------------------------------------------------------------------------------


async def test_a_response_continues_an_earlier_one(stack):
    answers(stack, "(Hm.)One.")
    first = await respond(stack, input="1?", instructions="Only now.")
    answers(stack, "[add|{}]")
    second = await respond(stack, input="2?", previous_response_id=first["id"], tools=TOOLS)
    call_id = second["output"][0]["call_id"]
    answers(stack, "Three.")
    result = {"type": "function_call_output", "call_id": call_id, "output": "ok"}
    third = await respond(stack, input=[result], previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert text_of(third) == "Three."
    turns = last_prompt(stack).split("<|im_start|>")[1:]
    assert [turn.split("<|im_end|>")[0] for turn in turns] == [
        "user\n1?", "assistant\nOne.", "user\n2?", "assistant\n", "tool\nok", "assistant\n",
    ]  # fmt: skip


def reference_to(item):
    return {"type": "item_reference", "id": item["id"]}


async def test_an_input_refers_to_items_of_stored_answers(stack):
    """The AI SDK sends the messages of earlier answers so."""
    asked = {"role": "user", "content": "1?"}
    answers(stack, "(Hm.)One.[add|{}]")
    first = await respond(stack, input=[asked], tools=TOOLS)
    reasoning, message, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    answers(stack, "Two.")
    await respond(stack, input=[asked, reasoning, message, call, result])
    whole = last_prompt(stack)
    second = await respond(stack, input=[asked, *map(reference_to, (reasoning, message)), {"id": call["id"]}, result])
    assert last_prompt(stack) == whole
    await respond(stack, input="3?", previous_response_id=second["id"])
    assert last_prompt(stack).startswith(whole)
    _, listed = await stack.get(f"/v1/responses/{second['id']}/input_items?order=asc")
    assert [item["type"] for item in listed["data"]] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    await respond(stack, input=[asked, reference_to(message), reference_to(second["output"][0])])
    assert "assistant\nOne.<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>" in last_prompt(stack)
    count = {"input": [asked, reference_to(message)]}
    _, counted = await stack.post("/v1/responses/input_tokens", count)
    _, same = await stack.post("/v1/responses/input_tokens", {"input": [asked, message]})
    assert counted["input_tokens"] == same["input_tokens"]


async def test_a_retry_with_references_can_be_continued(stack):
    answers(stack, "One.")
    first = await respond(stack, input="1?")
    body = {"input": [*map(reference_to, first["output"]), {"role": "user", "content": "2?"}]}
    for is_retry in (False, True):
        headers = {"Idempotency-Key": "k"}
        async with stack.client.post(f"{stack.url}/v1/responses", json=body, headers=headers) as answer:
            assert ("idempotent-replayed" in answer.headers) == is_retry
            second = await answer.json()
    await respond(stack, input="3?", previous_response_id=second["id"])
    turns = last_prompt(stack).split("<|im_start|>")[1:]
    assert [turn.split("<|im_end|>")[0] for turn in turns[:-1]] == [
        "assistant\nOne.", "user\n2?", "assistant\nOne.", "user\n3?",
    ]  # fmt: skip


async def test_references_to_items_that_are_not_stored_are_refused(stack):
    answers(stack, "One.")
    (message,) = (await respond(stack, input="1?"))["output"]
    (unkept,) = (await respond(stack, input="1?", store=False))["output"]
    missing = (400, "input[1]", "previous_response_not_found")
    for item_id in (unkept["id"], message["id"] + "0", "msg_x", "x", "resp_" * 99):
        assert await refused(stack, input=[message, {"id": item_id}]) == missing
    twice = [reference_to(message), reference_to(message)]
    assert await refused(stack, input=twice) == (400, "input", "invalid_request")
    assert await refused(stack, input=[{"type": "item_reference"}]) == (400, "input[0].id", "invalid_request")


async def test_references_are_refused_where_nothing_is_stored(folder):
    async with toy_stack(folder, max_stored_responses=0) as stack:
        assert await refused(stack, input=[{"id": "msg_1"}]) == (400, "input", "not_supported")


async def test_the_items_that_an_input_refers_to_are_bounded(folder):
    async with toy_stack(folder, max_body_bytes=1024) as stack:
        answers(stack, "x" * 400)
        items = [(await respond(stack))["output"][0] for _ in range(2)]
        await respond(stack, input=[reference_to(items[0])])
        assert await refused(stack, input=[*map(reference_to, items)]) == (413, "input", "body_too_large")


async def test_log_probabilities_of_what_is_continued_have_no_weight(stack, monkeypatch):
    monkeypatch.setattr("gateway.http.responses.LIGHT_BYTES", 0)
    monkeypatch.setattr("gateway.http.limits.MAX_PARTS", 50)
    answers(stack, "x" * 40)
    first = await respond(stack, top_logprobs=2)
    assert len(first["output"][0]["content"][0]["logprobs"]) == 40
    await respond(stack, previous_response_id=first["id"])
    await respond(stack, input=[reference_to(first["output"][0])])


async def test_the_parts_of_what_is_continued_are_bounded(stack, monkeypatch):
    answers(stack, "One.")
    first = await respond(stack)
    monkeypatch.setattr("gateway.http.responses.LIGHT_BYTES", 0)
    monkeypatch.setattr("gateway.http.limits.MAX_PARTS", 10)
    body = {"input": "Hi", "previous_response_id": first["id"]}
    status, answer = await stack.post("/v1/responses", body)
    message = "previous_response_id: the stored conversation has more than 10 texts, lists and objects"
    assert (status, answer["error"]["param"], answer["error"]["message"]) == (413, "previous_response_id", message)
    assert await refused(stack, input=[reference_to(first["output"][0])]) == (413, "input", "body_too_large")


async def test_a_streamed_response_can_be_continued_as_soon_as_it_has_ended(stack):
    answers(stack, "One.")
    first = (await stream(stack, input="1?"))[-1]["response"]
    await respond(stack, input="2?", previous_response_id=first["id"])
    assert "assistant\nOne.<|im_end|>" in last_prompt(stack)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_many_log_probabilities_are_encoded_on_a_thread_and_stored_by_the_event_loop(
    stack, monkeypatch, is_stream
):
    is_main = []

    def note(kind, name):
        method = getattr(kind, name)

        def noted(*args):
            is_main.append((name, threading.current_thread() is threading.main_thread()))
            return method(*args)

        monkeypatch.setattr(kind, name, noted)

    note(ResponseStore, "add")
    note(ResponsesApi, "_stored")
    note(ResponsesFormatter, "_finished")
    monkeypatch.setattr("gateway.http.streaming.MANY_LOGPROBS", 1)
    answers(stack, "One.")
    if is_stream:
        answer = (await stream(stack, top_logprobs=1))[-1]["response"]
    else:
        answer = await respond(stack, top_logprobs=1)
    assert is_main == [("_finished", False), ("_stored", False), ("add", True)]
    assert await stack.get(f"/v1/responses/{answer['id']}") == (200, answer)


async def test_a_stored_response_can_be_read_and_deleted(stack):
    answers(stack, "One.")
    answer = await respond(stack, metadata={"a": "b"})
    path = f"/v1/responses/{answer['id']}"
    assert await stack.get(path) == (200, answer)
    async with stack.client.delete(stack.url + path) as deleted:
        assert await deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
    status, missing = await stack.get(path)
    assert (status, missing["error"]["code"]) == (404, "not_found")
    async with stack.client.delete(stack.url + path) as deleted:
        assert deleted.status == 404


async def test_a_stored_response_is_not_streamed(stack):
    answers(stack, "One.")
    answer = await respond(stack)
    path = f"/v1/responses/{answer['id']}"
    assert await stack.get(f"{path}?stream=false") == (200, answer)
    for query, param in (("stream=true&starting_after=3", "stream"), ("starting_after=3", "starting_after")):
        status, error = await stack.get(f"{path}?{query}")
        assert (status, error["error"]["param"], error["error"]["code"]) == (400, param, "not_supported")


async def test_the_input_of_a_stored_response_can_be_listed_in_pages(stack):
    answers(stack, "One.")
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    given = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "Hm."},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "2", "id": "mine"},
        {"role": "user", "content": [{"type": "input_text", "text": "Well?"}]},
    ]
    answer = await respond(stack, input=given)
    path = f"/v1/responses/{answer['id']}/input_items"
    status, newest = await stack.get(path)
    assert status == 200
    ResponseItemList.model_validate(newest)
    assert [item["type"] for item in newest["data"]] == [
        "message", "function_call_output", "function_call", "message", "message",
    ]  # fmt: skip
    assert newest["data"][1]["id"] == newest["data"][1]["id"] == "mine"
    assert newest["data"][-1]["content"] == [{"type": "input_text", "text": "1?"}]
    assert newest["has_more"] is False
    _, page = await stack.get(f"{path}?order=asc&limit=2")
    assert (page["data"], page["has_more"]) == (newest["data"][:2:-1], True)
    _, rest = await stack.get(f"{path}?order=asc&limit=3&after={page['last_id']}")
    assert (rest["data"], rest["has_more"]) == (newest["data"][2::-1], False)
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
        status, error = await stack.get(f"{path}?{query}")
        assert (status, error["error"]["param"]) == (400, param)
    assert (await stack.get("/v1/responses/resp_none/input_items"))[0] == 404


async def test_the_tokens_of_an_input_can_be_counted(stack):
    answers(stack, "One.")
    first = await respond(stack, input="1?", instructions="Be kind.")
    for fields in (
        {"input": "1?", "instructions": "Be kind."},
        {"input": "2?", "previous_response_id": first["id"], "tools": TOOLS},
    ):
        status, counted = await stack.post("/v1/responses/input_tokens", fields)
        assert status == 200
        answer = await respond(stack, **fields)
        assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    status, error = await stack.post("/v1/responses/input_tokens", {"input": [{"role": "user"}]})
    assert (status, error["error"]["param"]) == (400, "input[0].content")


# ---- truncation ------------------------------------------------------------------------------------------------------


async def test_with_automatic_truncation_the_oldest_turns_are_dropped_and_the_instructions_stay(stack):
    """A turn takes more than a tenth of the context."""
    context = (await stack.get("/v1/models/tiny"))[1]["max_model_len"]
    size, num_output = context // 10, context // 20
    answers(stack, "One.")
    turns = [
        turn
        for number in range(20)
        for turn in (
            {"role": "user", "content": f"{number}? " + "x" * size},
            {"role": "assistant", "content": f"{number}!"},
        )
    ]
    given = {"input": [*turns, {"role": "user", "content": "And?"}], "instructions": "Be kind."}
    assert await refused(stack, **given) == (400, "input", "context_length_exceeded")
    answer = await respond(stack, truncation="auto", max_output_tokens=num_output, **given)
    assert answer["truncation"] == "auto"
    generate = last_generate(stack)
    assert len(generate.prompt) + num_output <= context
    prompt = last_prompt(stack)
    assert prompt.startswith("<|im_start|>system\nBe kind.")
    assert prompt.endswith("user\nAnd?<|im_end|>\n<|im_start|>assistant\n")
    kept = [number for number in range(20) if f"user\n{number}? x" in prompt]
    assert kept == list(range(kept[0], 20)) and 0 < kept[0] < 20
    dropped = f"<|im_start|>user\n{kept[0] - 1}? {'x' * size}<|im_end|>\n<|im_start|>assistant\n0!<|im_end|>\n"
    assert len(generate.prompt) + num_output + len(ids_of(dropped)) > context, "one turn more would not fit"


async def test_automatic_truncation_keeps_the_last_turn_whole(stack):
    given = {"input": "x" * 5_000, "truncation": "auto"}
    assert await refused(stack, **given) == (400, "input", "context_length_exceeded")
    assert await refused(stack, input="Hi", truncation="auto", temperature=-1) == (
        400,
        "temperature",
        "invalid_request",
    )


# ---- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_probabilities_are_those_of_the_tokens_of_the_text(stack, is_stream):
    written = '(Hm.)I add.[add|{"a":1}]'
    answers(stack, written)
    fields = {"tools": TOOLS, "top_logprobs": 2}
    answer = (await stream(stack, **fields))[-1]["response"] if is_stream else await respond(stack, **fields)
    assert answer["top_logprobs"] == 2
    content = answer["output"][1]["content"][0]
    found = content["logprobs"]
    assert content["text"] == "".join(entry["token"] for entry in found) == "I add."
    first = len(ids_of("(Hm.)"))
    assert [entry["logprob"] for entry in found] == [-(first + i) for i in range(len(found))]
    other = {"token": "b", "bytes": [98], "logprob": -9.0}
    assert [entry["top_logprobs"][1:] for entry in found] == [[other]] * len(found)


async def test_streamed_log_probabilities_come_with_their_text(stack):
    answers(stack, "I add.")
    events = await stream(stack, include=["message.output_text.logprobs"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert "".join(entry["token"] for entry in entries) == "I add."
    assert all(entry["top_logprobs"] == [] for entry in entries)
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == entries
    (added,) = [event for event in events if event["type"] == "response.content_part.added"]
    assert added["part"]["logprobs"] == []


async def test_without_asking_there_are_no_log_probabilities(stack):
    answers(stack, "I add.")
    answer = await respond(stack)
    assert answer["output"][0]["content"][0]["logprobs"] == []


async def test_a_response_that_is_not_to_be_stored_is_not(stack):
    answers(stack, "One.")
    answer = await respond(stack, store=False)
    assert answer["store"] is False
    assert (await stack.get(f"/v1/responses/{answer['id']}"))[0] == 404
    expected = (400, "previous_response_id", "previous_response_not_found")
    assert await refused(stack, previous_response_id=answer["id"]) == expected


async def test_a_tenant_cannot_reach_the_responses_of_another(folder):
    async with toy_stack(folder, tenant_header=True) as stack:
        answers(stack, "One.")
        _, answer = await stack.post("/v1/responses", {"input": "Hi"}, **{"x-baton-tenant": "one"})
        path = f"/v1/responses/{answer['id']}"
        assert (await stack.get(path, **{"x-baton-tenant": "one"}))[0] == 200
        assert (await stack.get(path, **{"x-baton-tenant": "two"}))[0] == 404
        body = {"input": "Hi", "previous_response_id": answer["id"]}
        status, error = await stack.post("/v1/responses", body, **{"x-baton-tenant": "two"})
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_gateway_that_stores_nothing_says_so(folder):
    async with toy_stack(folder, max_stored_responses=0) as stack:
        answers(stack, "One.")
        answer = await respond(stack)
        assert answer["store"] is False
        status, error = await stack.post("/v1/responses", {"input": "Hi", "previous_response_id": answer["id"]})
        assert (status, error["error"]["code"]) == (400, "not_supported")
        assert "--max-stored-responses" in error["error"]["message"]


async def test_a_conversation_beyond_the_limit_of_a_body_is_refused(folder):
    async with toy_stack(folder, max_body_bytes=1024) as stack:
        answers(stack, "One.")
        reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 600}
        first = await respond(stack, input=[reasoning, {"role": "user", "content": "Hi"}])
        second = await respond(stack, input=[reasoning, {"role": "user", "content": "Hi"}], store=True,
                               previous_response_id=first["id"])  # fmt: skip
        status, error = await stack.post("/v1/responses", {"input": "Hi", "previous_response_id": second["id"]})
        assert (status, error["error"]["param"]) == (413, "previous_response_id")


@pytest.mark.parametrize("path", ["resp_1/cancel", "compact"])
async def test_responses_are_neither_cancelled_nor_compacted(stack, path):
    status, error = await stack.post(f"/v1/responses/{path}", {})
    assert (status, error["error"]["code"]) == (400, "not_supported")


# ---- endpoints of other servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embeddings", "score", "audio/transcriptions", "batches/b/cancel", "vector_stores"])
async def test_endpoints_that_generate_no_text_are_refused_by_name(stack, name):
    status, error = await stack.post(f"/v1/{name}", {"input": "Hi"})
    assert (status, error["error"]["code"]) == (400, "not_supported")
    assert error["error"]["message"].startswith(f"/v1/{name.partition('/')[0]} is not supported")
