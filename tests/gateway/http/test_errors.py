"""Bad input is answered with the field at fault, and the service continues."""

import asyncio
import threading

import pytest
from support.gateway.fake_nodes import MODEL, running, silent

from common.errors import ErrorCode
from common.model_folder import tokenizer_digest
from common.wire.messages import Generate
from gateway.text.chat_template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]
DEEP = b"[" * 50_000

BAD_COMPLETIONS = [
    (b"", None),
    (b"{", None),
    (b"\xff\xfe{}", None),
    (b'{"prompt":"\xff"}', None),
    (b'{"prompt":"a"} trailing', None),
    (b"[]", None),
    (b'"text"', None),
    (b'{"prompt":"\\ud800"}', None),
    (b'{"prompt":' + DEEP, None),
    (b'{"prompt":' + DEEP[:200], "prompt[0][0]"),
    (b'{"metadata":' + DEEP, None),
    (b'{"prompt":"a","temperature":NaN}', "temperature"),
    (b'{"prompt":"a","temperature":-Infinity}', "temperature"),
    (b'{"prompt":"a","temperature":1e999}', "temperature"),
    (b'{"prompt":"a","max_tokens":1e30}', "max_tokens"),
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, [2]]}, "prompt[1]"),
    ({"prompt": [1, -2]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [{"a": 1}]}, "prompt[0]"),
    ({"prompt": "a" * 600}, "prompt"),
    ({"prompt": "a" * 4_000_000}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": ["a"] * 5000}, "prompt"),
    ({"prompt": "a", "model": "other"}, "model"),
    ({"prompt": "a", "model": 5}, "model"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 512}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 1e9}, "temperature"),
    ({"prompt": "a", "top_p": -0.1}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "seed": "x"}, "seed"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": ["x" * 300]}, "stop"),
    ({"prompt": "a", "stop": [5]}, "stop[0]"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "deadline_ms": 0}, "deadline_ms"),
    ({"prompt": "a", "deadline_ms": -5}, "deadline_ms"),
    ({"prompt": "a", "slo_ttft_ms": 0}, "slo_ttft_ms"),
    ({"prompt": "a", "slo_itl_ms": 90_000_000}, "slo_itl_ms"),
    ({"prompt": "a", "priority": 2**40}, "priority"),
    ({"prompt": "a", "cache_salt": "x" * 2000}, "cache_salt"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": "a", "promt": "b"}, "promt"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": "a", "n": "2"}, "n"),
    ({"prompt": ["a"] * 20, "n": 128}, "prompt"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "echo": False, "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "logit_bias": []}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"512": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
    ({"prompt": "a", "presence_penalty": "1"}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": 2.1}, "repetition_penalty"),
    ({"prompt": "a", "no_stop_trim": False, "include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"prompt": "a", "response_format": {"type": "json"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_object", "schema": {}, "value": True}}, "response_format.value"),
    ({"prompt": "a", "response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
    ({"prompt": "a", "response_format": {"type": "text", "value": {}}}, "response_format.value"),
    ({"prompt": "a", "response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
]

BAD_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, "messages"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "logprobs": 1}, "logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "reasoning_effort": "much"}, "reasoning_effort"),
    ({"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"messages": HI, "thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget"),
    (
        {"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": ""}]},
        "messages[0].reasoning_content",
    ),
    ({"messages": HI, "max_completion_tokens": 512}, "max_completion_tokens"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HI, "prompt": "a"}, "prompt"),
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "echo": True}, "echo"),
    ({"messages": HI, "best_of": 2}, "best_of"),
]

BAD_GENERATES = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids[1]"),
    ({"input_ids": ["a"]}, "input_ids[0]"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 1000}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_tokens": 1000}}, "sampling_params.max_tokens"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "sampling_params.n"),
    ({"text": "a", "sampling_params": {"logit_bias": {"512": 1}}}, "sampling_params.logit_bias"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}}, "sampling_params.min_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 0, "min_tokens": 1}}, "sampling_params.min_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 1, "max_tokens": 2}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 0, "min_tokens": 1}}, "sampling_params.min_new_tokens"),
    ({"text": ["a"], "sampling_params": [{"seed": 1, "sampling_seed": 2}]}, "sampling_params[0].seed"),
    ({"text": "a", "sampling_params": {"regex": "a("}}, "sampling_params.regex"),
    ({"text": "a", "sampling_params": {"nothing": 2}}, "sampling_params.nothing"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "sampling_params": []}, "sampling_params"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": ["a", "b"], "rid": ["a", ""]}, "rid[1]"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": "a", "rid": "x" * 300}, "rid"),
    ({"text": "a", "top_logprobs_num": 50}, "top_logprobs_num"),
    ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"text": ["a", "b"], "return_logprob": True, "logprob_start_len": [0]}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": [0]}, "logprob_start_len"),
    ({"text": "a", "unknown": 0}, "unknown"),
]

ALL_BAD = [
    *(("/v1/completions", *case) for case in BAD_COMPLETIONS),
    *(("/v1/chat/completions", *case) for case in BAD_CHATS),
    *(("/generate", *case) for case in BAD_GENERATES),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [2**40]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": "x", "abort_all": True}, "rid"),
]


@pytest.fixture
async def stack(stack):
    yield stack
    status, _ = await stack.post("/v1/completions", {"prompt": "still there", "max_tokens": 1})
    assert status == 200


async def test_every_bad_body_is_refused_with_the_field_named(stack):
    warm_up = await stack.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1})
    assert warm_up[0] == 200
    stack.nodes[0].generates.clear()
    for path, body, param in ALL_BAD:
        status, answer = await stack.post(path, body)
        what = f"{path} {str(body)[:100]} -> {status} {answer}"
        assert 400 <= status < 500, what
        assert set(answer["error"]) == {"message", "type", "param", "code"}, what
        assert answer["error"]["param"] == param, what
        assert param is None or param.split("[")[0] in answer["error"]["message"], what
        assert len(answer["error"]["message"]) < 500, what
    assert stack.nodes[0].generates == {}


async def test_a_token_id_that_the_model_does_not_have_is_named(stack):
    for field, value in (("logit_bias", {"5": 1, "512": 1}), ("stop_token_ids", [512, 5]), ("prompt", [5, 512])):
        _, answer = await stack.post("/v1/completions", {"prompt": "a", field: value})
        assert answer["error"]["message"] == f"{field}: token id 512 is not in the vocabulary, which has 512 ids"


async def test_a_text_with_a_token_that_the_tokenizer_has_and_the_model_has_not_is_refused(folder):
    """Gemma 3 1B has the tokenizer of models that see images, with one more token."""
    async with running(folder) as stack:
        await stack.pair(vocab_size=324, tokenizer_digest=tokenizer_digest(folder))
        status, answer = await stack.post("/v1/completions", {"prompt": "a né €"})
        sentence = "prompt: token id 324 is not in the vocabulary, which has 324 ids"
        assert (status, answer["error"]["message"]) == (400, sentence)
        status, _ = await stack.post("/v1/completions", {"prompt": "a né"})
        assert status == 200


async def test_unknown_models_and_oversized_requests_have_their_own_codes(folder):
    async with running(folder) as stack:
        await stack.node("prefill", num_pages=10)
        await stack.node("decode", num_pages=20)
        for body, status, code in (
            ({"prompt": "a", "model": "b"}, 404, "model_not_found"),
            ({"prompt": [1] * 161, "max_tokens": 1}, 400, "pool_too_small"),
            ({"prompt": [1] * 160, "max_tokens": 161}, 400, "pool_too_small"),
            ({"prompt": [1] * 600, "max_tokens": 1}, 400, "context_length_exceeded"),
            ({"prompt": "a", "suffix": "b"}, 400, "not_supported"),
        ):
            got, answer = await stack.post("/v1/completions", body)
            assert (got, answer["error"]["code"]) == (status, code)
        assert (await stack.post("/v1/completions", {"prompt": [1] * 160, "max_tokens": 160}))[0] == 200


async def test_paths_that_reveal_something_need_a_key(folder):
    async with running(folder, api_key="sesame") as stack:
        await stack.pair()
        body = {"prompt": "a", "max_tokens": 1}
        assert (await stack.post("/v1/completions", body))[0] == 401
        assert (await stack.post("/v1/completions", body, Authorization="Bearer sesam"))[0] == 401
        assert (await stack.post("/v1/completions", body, Authorization="sesame"))[0] == 401
        assert (await stack.post("/v1/completions", body, Authorization="Bearer sesame"))[0] == 200
        assert (await stack.get("/v1/workers"))[0] == 401
        for path in ("/health", "/ready", "/metrics", "/"):
            assert (await stack.get(path))[0] == 200


async def test_tenants_choose_ids_without_regard_to_each_other(folder):
    async with running(folder, tenant_header=True) as stack:
        prefill, _ = await stack.silent_pair()
        body = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
        tenants = [{}, {"x-baton-tenant": "one"}, {"x-baton-tenant": "two"}]
        calls = [asyncio.ensure_future(stack.post("/generate", body, **tenant)) for tenant in tenants]
        await prefill.until(lambda: len(prefill.generates) == 3)
        calls.append(asyncio.ensure_future(stack.post("/generate", {**body, "rid": list(prefill.generates)[1]})))
        await prefill.until(lambda: len(prefill.generates) == 4)
        assert await stack.post("/abort_request", {"rid": "mine"}, **tenants[1]) == (200, {"aborted": 1})
        assert (await calls[1])[0] == 499
        for rid in prefill.generates:
            prefill.tokens(rid, 0, (65,), finish="length")
        for call, name in ((calls[0], "mine"), (calls[2], "mine"), (calls[3], list(prefill.generates)[1])):
            status, answer = await call
            assert (status, answer["meta_info"]["id"]) == (200, name)


async def test_an_id_in_use_is_refused_to_another_request_until_its_request_has_ended(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair()
        body = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
        other = {**body, "text": "b"}
        first = asyncio.ensure_future(stack.post("/generate", body))
        await prefill.until(lambda: prefill.generates)
        status, answer = await stack.post("/generate", other)
        assert (status, answer["error"]["param"]) == (400, "rid")
        prefill.tokens("mine", 0, (65,), finish="length")
        assert (await first)[0] == 200
        await decode.until(lambda: "mine" in decode.aborts)  # it must not wait for pages
        again = asyncio.ensure_future(stack.post("/generate", other))
        await prefill.until(lambda: sum(isinstance(message, Generate) for message in prefill.received) == 2)
        prefill.tokens("mine", 0, (65,), finish="length")
        assert (await again)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a"] * 4096, "n": 128}, "prompt"),
        ("/generate", {"text": ["a"] * 4096, "sampling_params": {"n": 128}}, "text"),
        ("/generate", {"input_ids": [[5]] * 4096, "sampling_params": [{"n": 128}] * 4096}, "input_ids"),
    ],
)
async def test_half_a_million_outputs_are_refused_before_they_are_built(stack, path, body, param):
    status, answer = await stack.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "524288 outputs in one request, at most 520 can be in flight" in answer["error"]["message"]


async def test_more_samples_than_can_be_in_flight_are_refused_by_their_field(folder):
    async with running(folder, max_queued_requests=1) as stack:
        await stack.pair(max_running=1)
        for path, body, param in (
            ("/v1/completions", {"prompt": "a", "n": 3}, "n"),
            ("/v1/chat/completions", {"messages": HI, "n": 3}, "n"),
            ("/generate", {"text": "a", "sampling_params": {"n": 3}}, "sampling_params.n"),
        ):
            status, answer = await stack.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param)


async def test_tokenizing_many_texts_yields_to_the_event_loop(stack, monkeypatch):
    monkeypatch.setattr("gateway.text.tokenizer.LONG_CHARACTERS", 1000)
    own, tokenizer = stack.gateway._models["tiny"].tokenizer, stack.gateway._tokenizer
    turns = []

    async def tokenize():
        for _ in range(20):
            await tokenizer.tokenize(own, "a" * 500, add_special_tokens=False, param="text")
            turns.append("ours")

    async def other():
        while turns.count("ours") < 20:
            turns.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(tokenize(), other())
    assert turns.count("other") >= 6


CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "num_documents", "is_elsewhere"),
    [
        ([{"role": "user", "content": "Hi"}] * 10, 0, False),
        ([{"role": "user", "content": "Hi"}] * 11, 0, True),
        ([{"role": "user", "content": "Hi"}] * 2, 9, True),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 11}], 0, True),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL] * 8}], 0, False),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL] * 9}], 0, True),
    ],
)
async def test_a_chat_of_many_messages_parts_calls_or_documents_is_rendered_on_a_thread(
    folder, monkeypatch, messages, num_documents, is_elsewhere
):
    monkeypatch.setattr("gateway.requests.input.input_processor.MANY_PARTS", 10)
    threads = []

    class Template(ChatTemplate):
        def render(self, messages, variables=None, **kwargs):
            threads.append(threading.current_thread())
            return messages[0]["content"]

    template = Template("", {})
    threads.clear()
    async with running(folder, fields={"chat_template": template}) as stack:
        body = {"messages": messages, "documents": [{"text": "Hi"}] * num_documents}
        status, answer = await stack.post("/tokenize", body)
    assert (status, answer["count"]) == (200, len("Hi") if len(messages) > 1 else 11 * len("Hi\n") - 1)
    assert [thread is not threading.main_thread() for thread in threads] == [is_elsewhere]


async def test_large_tools_are_rendered_on_a_thread_and_bounded(stack, monkeypatch):
    threads, to_thread = [], asyncio.BaseEventLoop.run_in_executor

    def noted(loop, executor, make, *args):
        threads.append(executor)
        return to_thread(loop, executor, make, *args)

    monkeypatch.setattr("asyncio.BaseEventLoop.run_in_executor", noted)
    for size, expected, is_elsewhere in ((100, 200, False), (100_000, 200, True), (1 << 20, 400, False)):
        threads.clear()
        tools = [{"type": "function", "function": {"name": "f", "description": "x" * size}}]
        status, answer = await stack.post("/tokenize", {"messages": HI, "tools": tools})
        assert (status, bool(threads)) == (expected, is_elsewhere)
    assert answer["error"]["param"] == "tools"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', 200),
        ('{"a": "%s"}' % ("x," * 200_000), 200),
        ("[%s1]" % ("1," * 300_000), 413),
        ("{}" * 70_000, 413),
        (["[%s[]]" % ("[]," * 10_000)] * 6, 200),
        (["[%s[]]" % ("[]," * 10_000)] * 7, 413),
        (['"', *["[%s[]]" % ("[]," * 10_000)] * 7], 413),  # the first is cut off, and none of the others is inside it
        (['["%s"]' % ("[{,'" * 10_000)] * 10, 200),
    ],
)
async def test_json_in_the_arguments_of_earlier_calls_is_bounded_as_the_body_is(stack, arguments, expected):
    calls = [{"name": "f", "arguments": text} for text in ([arguments] if isinstance(arguments, str) else arguments)]
    messages = [*HI, {"role": "assistant", "tool_calls": [{"id": "c", "function": call} for call in calls]}]
    items = [{"type": "function_call", "call_id": "c", **call} for call in calls]
    for path, body in (("/tokenize", {"messages": messages}), ("/v1/responses/input_tokens", {"input": items})):
        status, answer = await stack.post(path, body)
        assert status == expected
        assert status == 200 or answer["error"]["code"] == "body_too_large"


async def test_the_number_of_template_arguments_is_bounded(stack):
    for count, expected in ((256, 200), (257, 400)):
        kwargs = {f"k{i}": 1 for i in range(count)}
        status, answer = await stack.post("/tokenize", {"messages": HI, "chat_template_kwargs": kwargs})
        assert status == expected
    assert answer["error"]["param"] == "chat_template_kwargs"


async def test_long_outputs_and_many_logprobs_are_formatted_on_a_thread(stack, monkeypatch):
    """The result is the same as for short ones."""
    ids = list(b"to be, or not to be")
    lists, judged = {"tokens": [ids, [500, 65], ids]}, {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}

    async def answers():
        texts = [(await stack.post("/detokenize", body))[1]["text"] for body in (lists, {"tokens": ids})]
        texts += [(await stack.post("/tokenize", {"prompt": text}))[1] for text in ("to be, or", ["to be", "", "or"])]
        _, whole = await stack.post("/v1/completions", judged)
        *chunks, _ = await stack.stream("/v1/completions", judged)
        return texts, whole["choices"], [chunk["choices"] for chunk in chunks]

    threads, to_thread = [], asyncio.BaseEventLoop.run_in_executor

    def noted(loop, executor, make):
        threads.append(executor)
        return to_thread(loop, executor, make)

    monkeypatch.setattr("asyncio.BaseEventLoop.run_in_executor", noted)
    short = await answers()
    assert threads == []
    monkeypatch.setattr("gateway.text.tokenizer.LONG_IDS", 10)
    monkeypatch.setattr("gateway.text.tokenizer.LISTS_AT_ONCE", 2)
    monkeypatch.setattr("gateway.http.routes.tokenize.MANY_IDS", 2)
    monkeypatch.setattr("gateway.http.streaming.MANY_LOGPROBS", 10)
    assert await answers() == short
    assert len(threads) >= 7  # each text, all ids, each prompt that is shown, the answer, and the last chunk


async def test_too_many_requests_get_429_with_retry_after(folder):
    async with running(folder, max_queued_requests=1) as stack:
        prefill, _ = await stack.silent_pair(max_running=1)
        body = {"prompt": "a", "max_tokens": 1}
        calls = [asyncio.ensure_future(stack.post("/v1/completions", body)) for _ in range(2)]
        await prefill.until(lambda: len(prefill.generates) == 2)
        async with stack.client.post(stack.url + "/v1/completions", json=body) as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["code"] == "queue_full"
        for rid in prefill.generates:
            prefill.tokens(rid, 0, (65,), finish="length")
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_token_sets_the_status(folder, is_stream):
    async with running(folder, recovery_timeout=0.2) as stack:
        prefill, decode = await stack.pair()
        prefill.on_generate = silent
        decode.on_generate = lambda node, generate: node.fail(generate.rid, ErrorCode.QUEUE_FULL, "full")
        body = {"prompt": "a", "stream": is_stream, "model": MODEL}
        async with stack.client.post(stack.url + "/v1/completions", json=body) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        await prefill.until(lambda: prefill.aborts)
        assert decode.aborts == []
