"""Samples of a prompt, echo, prompt log-probabilities, token counts in streams, and stop strings that are shown."""

import asyncio

import pytest
from support.gateway.fake_nodes import MODEL, echo, events, make_tokenizer, running, silent

from common.sampling_params import TokenLogprobs
from common.wire.messages import Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.http.request_cycle import RequestCycle
from gateway.requests.input.generate_request import MAX_LOGPROB_BYTES, MAX_LOGPROB_BYTES_OF_ALL
from gateway.text.tokenizer import Tokenizer

TEXT = Tokenizer(make_tokenizer())
HI = [{"role": "user", "content": "Hi"}]


def ids_of(text):
    return TEXT.encode(text, add_special_tokens=False)


# ---- several samples ------------------------------------------------------------------------------------------------


async def test_samples_are_numbered_by_prompt_and_each_prompt_is_counted_once(stack):
    body = {"prompt": ["abab", "cdcdcd"], "max_tokens": 2, "n": 3, "best_of": 3, "seed": 10}
    status, answer = await stack.post("/v1/completions", body)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 3 + ["cd"] * 3
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    generates = stack.nodes[0].generates
    assert list(generates) == [f"{answer['id']}-{prompt}-{sample}" for prompt in (0, 1) for sample in (0, 1, 2)]
    assert [generate.sampling.seed for generate in generates.values()] == [10, 11, 12] * 2
    assert stack.nodes[1].generates == generates


async def test_seeds_of_samples_are_consecutive_and_wrap_around(stack):
    await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "seed": -1, "n": 2})
    await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "seed": -1, "n": 1})
    assert [generate.sampling.seed for generate in stack.nodes[0].generates.values()] == [2**64 - 1, 0, 2**64 - 1]


async def test_samples_without_a_seed_have_different_seeds(stack):
    await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 20})
    assert len({generate.sampling.seed for generate in stack.nodes[0].generates.values()}) == 20


async def test_samples_share_a_pair_and_prompts_are_spread(folder):
    async with running(folder) as stack:
        nodes = [await stack.node(role, f"{role}{i}") for role in ("prefill", "decode") for i in range(2)]
        for node in nodes:
            node.on_generate = silent
        call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": ["a", "b"], "n": 4, "max_tokens": 9}))
        for node in nodes:
            await node.until(lambda node=node: len(node.generates) == 4)
        prompts = [{generate.prompt for generate in node.generates.values()} for node in nodes]
        assert [len(prompt) for prompt in prompts] == [1, 1, 1, 1]
        assert prompts[0] != prompts[1]
        _, answer = await stack.get("/v1/workers")
        # decode: the prompt once, nine tokens for each sample; prefill: the prompt once
        assert [worker["load_tokens"] for worker in answer["workers"]] == [1, 1, 1 + 36, 1 + 36]
        await stack.post("/abort_request", {"abort_all": True})
        assert (await call)[0] == 499
        _, answer = await stack.get("/v1/workers")
        assert [worker["load_tokens"] for worker in answer["workers"]] == [0] * 4


async def test_the_loss_of_a_node_ends_all_samples(folder):
    async with running(folder, recovery_timeout=0.5) as stack:
        prefill, decode = await stack.silent_pair()
        call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": "a", "n": 3}))
        await decode.until(lambda: len(decode.generates) == 3)
        await prefill.kill()
        stack.nodes.remove(prefill)
        assert (await call)[0] == 502
        await decode.until(lambda: len(decode.aborts) == 3)


async def test_samples_of_a_chat_and_of_a_streamed_chat(stack):
    body = {"messages": HI, "max_tokens": 3, "n": 2}
    _, whole = await stack.post("/v1/chat/completions", body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    first, *chunks, done = await stack.stream("/v1/chat/completions", body)
    assert [choice["index"] for choice in first["choices"]] == [0, 1]
    for number in (0, 1):
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == number]
        content = "".join(delta.get("content", "") for delta in deltas)
        assert content == whole["choices"][number]["message"]["content"]
    assert done == "[DONE]"


async def test_samples_of_generate_are_a_list_with_their_own_ids(stack):
    body = {"text": "ab", "rid": "mine", "sampling_params": {"n": 2, "max_new_tokens": 2, "sampling_seed": 5}}
    _, answers = await stack.post("/generate", body)
    assert [(answer["text"], answer["meta_info"]["id"]) for answer in answers] == [("ab", "mine-0"), ("ab", "mine-1")]
    assert [generate.sampling.seed for generate in stack.nodes[0].generates.values()] == [5, 6]
    body = {"text": ["ab", "cd"], "rid": ["x", "y"], "sampling_params": {"n": 2, "max_new_tokens": 2}}
    _, answers = await stack.post("/generate", body)
    assert [answer["meta_info"]["id"] for answer in answers] == ["x-0", "x-1", "y-0", "y-1"]
    chunks = (await stack.stream("/generate", {**body, "rid": None}))[:-1]
    assert {chunk["index"] for chunk in chunks} == {0, 1, 2, 3}


async def test_all_samples_are_aborted_by_the_id_that_the_client_gave(folder):
    async with running(folder) as stack:
        _, decode = await stack.silent_pair()
        body = {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": {"n": 2}}
        call = asyncio.ensure_future(stack.post("/generate", body))
        await decode.until(lambda: len(decode.generates) == 4)
        assert await stack.post("/abort_request", {"rid": "x"}) == (200, {"aborted": 2})
        assert (await call)[0] == 499


# ---- echo and prompt log-probabilities ------------------------------------------------------------------------------


async def test_echo_shows_the_prompt_before_the_output(stack):
    for prompt in ("Größe", ids_of("Größe")):
        _, answer = await stack.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "echo": True})
        assert answer["choices"][0]["text"] == "Größe" + TEXT.decode(ids_of("Größe")[:2], skip_special=True)
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 2
    assert {generate.sampling.prompt_logprobs_from for generate in stack.nodes[0].generates.values()} == {None}


async def test_echo_with_logprobs_covers_every_prompt_token_but_the_first(stack):
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    _, answer = await stack.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["text"] == "abcab"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3, 4],
        "token_logprobs": [None, -1.0, -2.0, -0.5, -0.5],
        "tokens": ["a", "b", "c", "a", "b"],
        "top_logprobs": [None, {"b": 0.0}, {"c": 0.0}, {"a": -0.5}, {"b": -0.5}],
    }
    (generate,) = stack.nodes[0].generates.values()
    assert generate.sampling.prompt_logprobs_from == 1


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_prompt_logprobs_are_possible_without_output(stack, logprobs):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": logprobs}
    _, answer = await stack.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "length", None)
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}, {"c": -2.0}]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 3)
    (generate,) = stack.nodes[0].generates.values()
    assert generate.sampling.max_new_tokens == 1
    assert not stack.nodes[1].generates  # the prefill node makes the only token


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_the_chunks_of_an_echo_join_to_the_whole_answer(stack, max_tokens):
    body = {"prompt": ["a🙂b", "x"], "max_tokens": max_tokens, "echo": True, "logprobs": 1, "n": 2}
    _, whole = await stack.post("/v1/completions", body)
    *chunks, done = await stack.stream("/v1/completions", body)
    assert done == "[DONE]"
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [item for part in parts for item in part["logprobs"][field]] == choice["logprobs"][field]
        assert parts[-1]["finish_reason"] == "length"


async def test_a_streamed_echo_without_logprobs_shows_the_prompt_once(stack):
    *chunks, _ = await stack.stream("/v1/completions", {"prompt": "abc", "max_tokens": 4, "echo": True})
    assert chunks[0]["choices"][0]["text"].startswith("abc")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcabca"


async def test_the_echo_comes_with_the_first_token_even_if_that_has_no_text(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair()
        body = {"prompt": "abc", "max_tokens": 9, "echo": True, "stream": True}
        call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json=body))
        rid = await prefill.only_rid()
        ids = ids_of("🚀b")
        for i, token in enumerate(ids):
            node = decode if i else prefill
            node.tokens(rid, i, (token,), finish="length" if i == len(ids) - 1 else "")
            await node.round_trip()
        async with await call as answer:
            chunks = [event["choices"][0]["text"] async for event in events(answer) if event != "[DONE]"]
        assert chunks == ["abc", "🚀", "b"]


async def test_a_prompt_of_one_token_has_no_logprobs(stack):
    _, answer = await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "echo": True, "logprobs": 0})
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]


@pytest.mark.parametrize(
    ("start", "asked_from", "values"),
    [
        (None, None, []),
        (-1, None, []),
        (0, 1, [None, -1.0, -2.0, -3.0]),
        (2, 3, [None, -3.0]),
        (3, None, [None]),
        (4, None, []),
    ],
)
async def test_logprob_start_len_sets_the_first_listed_token(stack, start, asked_from, values):
    ids = ids_of("abcd")
    body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": start}
    _, answer = await stack.post("/generate", {**body, "sampling_params": {"max_new_tokens": 1}})
    meta = answer["meta_info"]
    shown = ids[len(ids) - len(values) :]
    assert meta["input_token_logprobs"] == [[value, token, None] for value, token in zip(values, shown, strict=True)]
    tops = [None if value is None else [[0.0, token, None], [-1.0, token + 1, None]]
            for value, token in zip(values, shown, strict=True)]  # fmt: skip
    assert meta["input_top_logprobs"] == tops
    assert len(meta["output_token_logprobs"]) == 1
    (generate,) = stack.nodes[0].generates.values()
    assert generate.sampling.prompt_logprobs_from == asked_from


async def test_generate_of_no_tokens_returns_prompt_logprobs(stack):
    body = {
        "text": ["ab", "cd"], "return_logprob": True, "logprob_start_len": [0, -1], "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    _, answers = await stack.post("/generate", body)
    assert [answer["text"] for answer in answers] == ["", ""]
    assert [answer["output_ids"] for answer in answers] == [[], []]
    a, b = ids_of("ab")
    assert answers[0]["meta_info"]["input_token_logprobs"] == [[None, a, "a"], [-1.0, b, "b"]]
    assert answers[1]["meta_info"]["input_token_logprobs"] == []
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}),
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1}),
    ],
)
async def test_damaged_prompt_logprobs_are_an_error_that_names_their_node(folder, path, body):
    def damage(node, generate):
        sent = (b"\xc1", pack_logprobs(TokenLogprobs(-1.0)))
        logprobs = (pack_logprobs(TokenLogprobs(-1.0)),)
        node.send(Tokens(generate.rid, generate.attempt, 0, (1,), logprobs, prompt_logprobs=sent))

    async with running(folder) as stack:
        await stack.pair()
        prefill, _ = stack.nodes
        prefill.on_generate = damage
        status, answer = await stack.post(path, body)
    assert (status, answer["error"]["code"]) == (502, "node_lost")
    assert answer["error"]["message"] == "node prefill sent log-probabilities of the prompt that cannot be read"


async def test_incremental_streams_carry_prompt_logprobs_once(folder):
    async with running(folder, incremental_streaming_output=True) as stack:
        await stack.pair()
        body = {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 9}}
        *chunks, _ = await stack.stream("/generate", body)
        assert len(chunks[0]["meta_info"]["input_token_logprobs"]) == 3
        assert all("input_token_logprobs" not in chunk["meta_info"] for chunk in chunks[1:])


@pytest.mark.slow
async def test_more_logprobs_than_fit_into_a_message_are_refused(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair(context_length=2_000_000, num_pages=200_000)
        count = MAX_LOGPROB_BYTES // (28 + 20 * 16) + 1
        body = {"input_ids": [1] * count, "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
        status, answer = await stack.post("/generate", body)
        assert (status, answer["error"]["param"]) == (400, "logprob_start_len")
        body = {"prompt": [1] * count, "logprobs": 20, "echo": True, "max_tokens": 0}
        status, answer = await stack.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "logprobs")
        decode.on_generate = prefill.on_generate = echo
        body = {"input_ids": [1] * (count - 1), "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
        status, answer = await stack.post("/generate", {**body, "sampling_params": {"max_new_tokens": 1}})
        assert status == 200  # the largest accepted one fits into a frame
        assert len(answer["meta_info"]["input_token_logprobs"]) == count - 1


async def test_more_prompt_logprobs_than_the_gateway_keeps_for_an_answer_are_refused(folder):
    async with running(folder) as stack:
        await stack.silent_pair(context_length=2_000_000, num_pages=200_000)
        count = MAX_LOGPROB_BYTES // (28 + 20 * 16)
        num_outputs = MAX_LOGPROB_BYTES_OF_ALL // MAX_LOGPROB_BYTES + 1
        body = {"prompt": [1] * count, "logprobs": 20, "echo": True, "max_tokens": 0, "n": num_outputs}
        status, answer = await stack.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "logprobs")
        assert "of 11 outputs are too many for one answer; ask for fewer prompts" in answer["error"]["message"]
        options = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
        body = {"input_ids": [[1] * count] * num_outputs, **options}
        status, answer = await stack.post("/generate", body)
        assert (status, answer["error"]["param"]) == (400, "logprob_start_len")


@pytest.mark.parametrize(
    ("path", "body", "num_parts"),
    [
        (
            "/v1/completions",
            {"prompt": ["ab", "c"], "logprobs": 2, "echo": True, "n": 2},
            7,
        ),  # and three around the choices
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2, "n": 2}, 5),
        ("/generate", {"text": ["ab", "c"], "return_logprob": True, "top_logprobs_num": 2}, 3),
        ("/v1/responses", {"input": "Hi", "top_logprobs": 2}, 1),
    ],
)
async def test_an_answer_with_very_many_logprobs_is_sent_in_parts(stack, monkeypatch, path, body, num_parts):
    sent = []
    write = RequestCycle.send

    async def noted(cycle, message):
        if message.get("more_body"):
            sent.append(message["body"])
        await write(cycle, message)

    monkeypatch.setattr(RequestCycle, "send", noted)
    headers = {"Idempotency-Key": path}  # so that both answers show the same outputs
    answers = []
    for most in (1 << 18, 0):
        monkeypatch.setattr("gateway.http.streaming.MOST_LOGPROBS_AT_ONCE", most)
        async with stack.client.post(stack.url + path, json=body, headers=headers) as answer:
            assert (answer.status, "Content-Length" in answer.headers) == (200, bool(most))
            answers.append(await answer.read())
    assert answers[0] == answers[1]
    assert b'"logprob' in answers[0] or b"_logprobs" in answers[0]
    assert len(sent) == num_parts


# ---- token counts and stops -----------------------------------------------------------------------------------------


async def test_token_counts_can_come_with_every_chunk(stack):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "stream_options": options}
    *chunks, last, _ = await stack.stream("/v1/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
async def test_the_stop_string_can_be_included(folder, field):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        decode.on_generate = silent
        prefill.on_generate = lambda node, generate: node.tokens(generate.rid, 0, tuple(ids_of("I compare thee")))
        for body, text in (({"stop": "omp"}, "I comp"), ({"stop": ["zzz", "compare"]}, "I compare")):
            _, answer = await stack.post("/v1/completions", {"prompt": "x", field: True, **body})
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
        prefill.on_generate = lambda node, generate: node.tokens(generate.rid, 0, tuple(ids_of("abc")), finish="stop")
        for is_kept, text in ((True, "abc"), (False, "ab")):
            params = {"stop_token_ids": ids_of("c"), field: is_kept}
            _, answer = await stack.post("/generate", {"text": "x", "sampling_params": params})
            assert answer["text"] == text
