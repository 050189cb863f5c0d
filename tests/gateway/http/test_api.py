"""Answers and streams of every endpoint, over real HTTP, from nodes that echo the prompt."""

import asyncio
import itertools

import pytest
from support.gateway.fake_nodes import EOS, MODEL, PADDED_VOCAB, events, make_tokenizer, running, silent

from gateway.text.tokenizer import Tokenizer

TEXT = Tokenizer(make_tokenizer())


@pytest.fixture
async def stack(folder):
    async with running(folder, enable_priority_scheduling=True) as running_stack:
        await running_stack.pair()
        yield running_stack


def ids_of(text):
    return TEXT.encode(text, add_special_tokens=False)


# ---- completions --------------------------------------------------------------------------------


async def test_a_completion_of_a_string(stack):
    status, answer = await stack.post("/v1/completions", {"model": MODEL, "prompt": "ababab", "max_tokens": 4})
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": "abab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    num_prompt = len(ids_of("ababab"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
    }


async def test_a_completion_has_sixteen_tokens_by_default(stack):
    _, answer = await stack.post("/v1/completions", {"prompt": "a"})
    assert answer["usage"]["completion_tokens"] == 16


async def test_only_a_new_message_is_decoded_without_the_text_before_it(stack, monkeypatch):
    befores = []
    detokenizer = Tokenizer.detokenizer

    def noted(self, before=(), *, skip_special):
        befores.append(TEXT.decode(before, skip_special=False))
        return detokenizer(self, before, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "detokenizer", noted)
    user, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I compare"}
    await stack.post("/v1/completions", {"prompt": "To begin with", "max_tokens": 1})
    await stack.post("/generate", {"text": "Nature's", "sampling_params": {"max_new_tokens": 1}})
    await stack.post("/v1/chat/completions", {"messages": [user], "max_tokens": 1})
    continued = {"messages": [user, begun], "continue_final_message": True, "max_tokens": 1}
    await stack.post("/v1/chat/completions", continued)
    await stack.post("/v1/messages", {"messages": [user, begun], "max_tokens": 1})
    assert [bool(before) for before in befores] == [True, True, False, True, True]
    texts = ["To begin with", "Nature's", "", *["assistant\nI compare"] * 2]
    assert all(text.endswith(before) for text, before in zip(texts, befores, strict=True))


@pytest.mark.parametrize("prompt", [["ab", "cd"], [ids_of("ab"), ids_of("cd")]], ids=["strings", "lists of token ids"])
async def test_several_prompts_give_several_choices_with_their_own_ids(stack, prompt):
    _, answer = await stack.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "return_token_ids": True})
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "ab"), (1, "cd")]
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids_of("ab"), ids_of("cd")]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids_of("ab"), ids_of("cd")]
    rids = list(stack.nodes[0].generates)
    assert rids == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert answer["usage"]["completion_tokens"] == 4


async def test_token_ids_are_one_prompt(stack):
    _, answer = await stack.post("/v1/completions", {"prompt": ids_of("abc"), "max_tokens": 3})
    assert answer["choices"][0]["text"] == "abc"


async def test_ids_beyond_the_tokenizer_are_accepted_and_have_no_text(stack):
    _, answer = await stack.post("/v1/completions", {"prompt": [500, *ids_of("a")], "max_tokens": 2})
    assert answer["choices"][0]["text"] == "a"


async def test_the_chunks_of_a_completion_join_to_the_whole_and_end_with_usage(stack):
    body = {"prompt": "Größe 🙂 zwei", "max_tokens": 30}
    _, whole = await stack.post("/v1/completions", body)
    *chunks, last, done = await stack.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert (last["choices"], last["usage"], done) == ([], whole["usage"], "[DONE]")


async def test_logprobs_in_the_completions_shape(stack):
    _, answer = await stack.post("/v1/completions", {"prompt": "ab", "max_tokens": 3, "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "a"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [2, 3, 4]  # the text begins behind the prompt
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}


async def test_streamed_logprobs_equal_those_of_the_whole_answer(stack):
    body = {"prompt": "a🙂b", "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
    _, whole = await stack.post("/v1/completions", body)
    *chunks, _ = await stack.stream("/v1/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    for field in ("tokens", "token_logprobs", "text_offset"):
        joined = [item for part in parts for item in part["logprobs"][field]]
        assert joined == whole["choices"][0]["logprobs"][field]
    assert [token for part in parts for token in part["token_ids"]] == whole["choices"][0]["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"] == ids_of("a🙂b")
    assert not any("prompt_token_ids" in part for part in parts[1:])


# ---- chat --------------------------------------------------------------------------------


async def test_a_chat_is_rendered_with_the_template(stack):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    status, answer = await stack.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    (generate,) = stack.nodes[0].generates.values()
    expected = f"<|im_start|>system\nBe kind.{EOS}\n<|im_start|>user\nHi{EOS}\n<|im_start|>assistant\n"
    assert TEXT.decode(generate.prompt, skip_special=False) == expected
    assert generate.rid == answer["id"]


async def test_a_chat_may_fill_the_context_by_default(stack):
    body = {"messages": [{"role": "user", "content": "Hi"}], "stop": "assistant"}
    _, answer = await stack.post("/v1/chat/completions", body)
    (generate,) = stack.nodes[0].generates.values()
    assert generate.sampling.max_new_tokens == 512 - len(generate.prompt)
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_streamed_chat(stack):
    body = {"messages": [{"role": "user", "content": "Größe 🙂"}], "max_completion_tokens": 25}
    _, whole = await stack.post("/v1/chat/completions", body)
    first, *chunks, done = await stack.stream("/v1/chat/completions", body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


async def test_a_chat_gives_the_token_ids_of_its_prompt_once(stack):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 2, "return_token_ids": True}
    _, whole = await stack.post("/v1/chat/completions", body)
    prompt = list(next(iter(stack.nodes[0].generates.values())).prompt)
    first, *chunks, _ = await stack.stream("/v1/chat/completions", body)
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in part for part in (*chunks, *whole["choices"]))


async def test_logprobs_in_the_chat_shape(stack):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    _, answer = await stack.post("/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[1]["token"] == "u"  # of "user", after <|im_start|>
    assert content[1]["bytes"] == [ord("u")]
    assert [top["logprob"] for top in content[1]["top_logprobs"]] == [-0.5, -1.5]


@pytest.mark.parametrize("fields", [{"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}])
async def test_no_alternatives_without_logprobs_ask_for_nothing(stack, fields):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **fields}
    status, answer = await stack.post("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["logprobs"]) == (200, None)


# ---- native --------------------------------------------------------------------------------


async def test_generate_answers_in_the_format_of_sglang(stack):
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "rid": "mine"}
    status, answer = await stack.post("/generate", body)
    assert status == 200
    assert (answer["text"], answer["output_ids"]) == ("abca", ids_of("abca"))
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 1)
    assert meta["e2e_latency"] > 0


async def test_generate_takes_put_as_sglang_does(stack):
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    async with stack.client.put(f"{stack.url}/generate", json=body) as answer:
        assert answer.status == 200
        assert (await answer.json())["text"] == "abca"


async def test_generate_makes_128_tokens_by_default(stack):
    _, answer = await stack.post("/generate", {"input_ids": ids_of("ab")})
    assert answer["meta_info"]["completion_tokens"] == 128


async def test_generate_of_a_batch(stack):
    body = {"text": ["ab", "cd"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}], "rid": ["x", "y"]}
    _, answers = await stack.post("/generate", body)
    assert [(answer["text"], answer["meta_info"]["id"]) for answer in answers] == [("a", "x"), ("cd", "y")]
    _, answers = await stack.post("/generate", {"input_ids": [ids_of("ab")], "sampling_params": {"max_new_tokens": 1}})
    assert [answer["text"] for answer in answers] == ["a"]


async def test_generate_streams_the_whole_text_so_far(stack):
    *chunks, done = await stack.stream("/generate", {"text": "Größe 🙂", "sampling_params": {"max_new_tokens": 12}})
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert chunks[-1]["output_ids"] == ids_of("Größe 🙂" * 2)[:12]
    assert (chunks[-1]["meta_info"]["finish_reason"]["type"], done) == ("length", "[DONE]")


async def test_generate_streams_increments_if_configured(folder):
    async with running(folder, incremental_streaming_output=True) as stack:
        await stack.pair()
        body = {"text": "Größe 🙂", "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}
        *chunks, _ = await stack.stream("/generate", body)
        assert [token for chunk in chunks for token in chunk["output_ids"]] == ids_of("Größe 🙂" * 2)[:12]
        assert sum(len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks) == 12


async def test_generate_with_logprobs(stack):
    body = {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    _, answer = await stack.post("/generate", body)
    a, b = ids_of("ab")
    assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, a, "a"], [-0.5, b, "b"]]
    assert answer["meta_info"]["output_top_logprobs"][0] == [[-0.5, a, "a"], [-1.5, a + 1, "b"]]


# ---- sampling --------------------------------------------------------------------------------


async def test_every_field_reaches_both_nodes(stack):
    body = {
        "prompt": "a", "max_tokens": 5, "min_tokens": 2, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1,
        "seed": -1, "stop_token_ids": [5], "ignore_eos": True, "logprobs": 3, "priority": 4, "deadline_ms": 25_500,
        "slo_ttft_ms": 250, "slo_itl_ms": 40, "cache_salt": "me",
        "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 2,
        "logit_bias": {"7": 100, "3": -1.5},
    }  # fmt: skip
    assert (await stack.post("/v1/completions", body))[0] == 200
    (generate,) = stack.nodes[0].generates.values()
    assert list(stack.nodes[1].generates.values()) == [generate]
    sampling = generate.sampling
    assert (sampling.max_new_tokens, sampling.min_tokens, sampling.temperature, sampling.top_k) == (5, 2, 0.7, 40)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.9, 0.1, 2**64 - 1)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((5,), True, 3)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, -0.5, 2.0)
    assert (sampling.logit_bias, sampling.prompt_logprobs_from) == (((7, 100.0), (3, -1.5)), None)
    assert (generate.priority, generate.cache_salt) == (4, "me")
    assert (generate.slo_ttft_s, generate.slo_itl_s) == (0.25, 0.04)
    assert generate.timeout_s == pytest.approx(25.5 - generate.waited_s)
    assert generate.prefill.address == "127.0.0.1:9"


async def test_absent_fields_take_the_models_defaults(folder):
    async with running(folder) as stack:
        generation = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05}
        await stack.pair(generation=generation)
        await stack.post("/v1/completions", {"prompt": "a", "top_p": 0.5})
        (generate,) = stack.nodes[0].generates.values()
        sampling = generate.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.5)
        assert sampling.repetition_penalty == 1.05


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ],
)
async def test_a_top_p_of_zero_leaves_the_most_likely_token(stack, path, body):
    assert (await stack.post(path, {**body, "temperature": 0.7, "top_p": 0}))[0] == 200
    (generate,) = stack.nodes[0].generates.values()
    assert (generate.sampling.temperature, generate.sampling.top_p) == (0.0, 1.0)


async def test_without_a_seed_one_is_drawn_for_both_nodes(stack):
    for _ in range(2):
        await stack.post("/v1/completions", {"prompt": "a"})
    first, second = stack.nodes[0].generates.values()
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling == stack.nodes[1].generates[first.rid].sampling


async def test_top_k_of_minus_one_and_ignored_fields_are_accepted(stack):
    body = {
        "prompt": "a", "top_k": -1, "n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1, "user": "me", "metadata": {"a": 1}, "store": False,
        "service_tier": "auto", "stop": None, "stream": None, "suffix": None,
    }  # fmt: skip
    assert (await stack.post("/v1/completions", body))[0] == 200


# ---- stop strings --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_the_text_and_both_nodes_are_told(folder, is_stream):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair()
        body = {"prompt": "x", "max_tokens": 50, "stop": ["compare", "zzz"], "stream": is_stream}
        call = asyncio.ensure_future(
            stack.stream("/v1/completions", body) if is_stream else stack.post("/v1/completions", body)
        )
        rid = await prefill.only_rid()
        for i, token in enumerate(ids_of("Shall I compare thee")):
            node = decode if i else prefill
            node.tokens(rid, i, (token,))
            await node.round_trip()
        if is_stream:
            *chunks, _ = await call
            texts = [chunk["choices"][0]["text"] for chunk in chunks]
            assert len(texts) > 2
            assert "".join(texts) == "Shall I "
            choice = chunks[-1]["choices"][0]
        else:
            choice = (await call)[1]["choices"][0]
            assert choice["text"] == "Shall I "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "compare")
        await prefill.until(lambda: rid in prefill.aborts)
        await decode.until(lambda: rid in decode.aborts)


async def test_the_end_token_is_not_shown(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        prefill.on_generate = lambda node, generate: node.tokens(generate.rid, 0, tuple(ids_of("a")))
        decode.on_generate = lambda node, generate: node.tokens(
            generate.rid, 1, (*ids_of("b"), ids_of("c")[0]), finish="stop"
        )
        _, answer = await stack.post("/generate", {"text": "x"})
        assert answer["text"] == "ab"
        assert answer["output_ids"] == ids_of("abc")
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids_of("c")[0]}
        for fields, reason in (({}, None), ({"stop_token_ids": ids_of("c")}, ids_of("c")[0])):
            _, answer = await stack.post("/v1/completions", {"prompt": "x", **fields})
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)  # as vLLM has it


async def test_tokens_are_streamed_at_once_and_in_order(folder):
    async with running(folder, heartbeat_interval=300.0, node_timeout=900.0) as stack:
        prefill, decode = await stack.pair()
        stack.gateway._control._tick_handle.cancel()  # nothing but the tokens themselves wakes the gateway
        prefill.on_generate = decode.on_generate = silent
        body = {"prompt": "x", "max_tokens": 6, "stream": True}
        call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json=body))
        rid = await prefill.only_rid()
        decode.tokens(rid, 1, tuple(ids_of("b")))  # overtakes
        await decode.round_trip()
        assert not call.done()
        prefill.tokens(rid, 0, tuple(ids_of("a")))
        async with await call as answer:
            arriving = events(answer)
            assert (await anext(arriving))["choices"][0]["text"] == "ab"
            for i, letter in enumerate("cdef"):
                decode.tokens(rid, 2 + i, tuple(ids_of(letter)), finish="length" if letter == "f" else "")
                assert (await anext(arriving))["choices"][0]["text"] == letter
            assert await anext(arriving) == "[DONE]"


async def test_an_incomplete_character_makes_no_chunk(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair()
        body = {"prompt": "x", "max_tokens": 9, "stream": True}
        call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json=body))
        rid = await prefill.only_rid()
        ids = ids_of("a🚀b")
        assert len(ids) > 3
        for i, token in enumerate(ids):
            node = decode if i else prefill
            node.tokens(rid, i, (token,), finish="length" if i == len(ids) - 1 else "")
            await node.round_trip()
        async with await call as answer:
            chunks = [event["choices"][0]["text"] async for event in events(answer) if event != "[DONE]"]
        assert chunks == ["a", "🚀", "b"]


# ---- the others --------------------------------------------------------------------------------


async def test_models(stack):
    status, answer = await stack.get("/v1/models")
    assert status == 200
    assert [(model["id"], model["max_model_len"]) for model in answer["data"]] == [(MODEL, 512)]


async def test_model_info_as_the_frontend_of_sglang_asks_for_it(stack):
    status, answer = await stack.get("/get_model_info")
    assert (status, answer) == (200, {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True})


async def test_detokenize_reverses_tokenize(stack):
    _, answer = await stack.post("/tokenize", {"prompt": "Größe 🙂"})
    assert (answer["tokens"], answer["count"]) == (ids_of("Größe 🙂"), len(ids_of("Größe 🙂")))
    _, text = await stack.post("/detokenize", {"tokens": answer["tokens"]})
    assert text["text"] == "Größe 🙂"
    _, answer = await stack.post("/tokenize", {"prompt": ["a", "bc"]})
    assert (answer["tokens"], answer["count"]) == ([ids_of("a"), ids_of("bc")], [1, 2])
    _, text = await stack.post("/detokenize", {"tokens": [ids_of("a"), [PADDED_VOCAB - 1]]})
    assert text["text"] == ["a", ""]
    for tokens in ([1, PADDED_VOCAB], [[1], [], [PADDED_VOCAB, 1]]):
        status, answer = await stack.post("/detokenize", {"tokens": tokens})
        sentence = f"tokens: token id {PADDED_VOCAB} is not in the vocabulary, which has {PADDED_VOCAB} ids"
        assert (status, answer["error"]["message"]) == (400, sentence)
    _, answer = await stack.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert TEXT.decode(answer["tokens"], skip_special=False).endswith("<|im_start|>assistant\n")


async def test_the_ids_of_many_lists_are_checked_at_once(stack, monkeypatch):
    checked = []
    monkeypatch.setattr("gateway.http.routes.tokenize.check_vocabulary", lambda ids, *_: checked.append(ids))
    status, _ = await stack.post("/detokenize", {"tokens": [[65], [], [66, 67]]})
    assert (status, checked) == (200, [[65, 66, 67]])


@pytest.mark.parametrize(
    ("given", "of_text", "of_messages"),
    [({}, True, False), (None, True, False), (True, True, True), (False, False, False)],
)
async def test_tokenize_adds_special_tokens_as_generating_endpoints_do(stack, monkeypatch, given, of_text, of_messages):
    added = []
    encode = Tokenizer.encode

    def noted(self, text, *, add_special_tokens, **options):
        added.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    fields = {"add_special_tokens": given} if given != {} else {}
    assert (await stack.post("/tokenize", {"prompt": "a", **fields}))[0] == 200
    assert (await stack.post("/tokenize", {"messages": [{"role": "user", "content": "a"}], **fields}))[0] == 200
    assert added == [of_text, of_messages]


async def test_workers_show_the_last_reports_of_the_nodes(stack):
    for node in stack.nodes:
        node.is_beating = False
        node.beat(steps_total=12.0)
        await node.round_trip()
    _, answer = await stack.get("/v1/workers")
    assert [(worker["name"], worker["role"]) for worker in answer["workers"]] == [
        ("prefill", "prefill"),
        ("decode", "decode"),
    ]
    assert answer["workers"][0]["heartbeat"]["counters"] == {"steps_total": 12.0}
    assert answer["workers"][0]["load_tokens"] == 0


async def test_server_info_and_the_page(folder):
    async with running(folder, api_key="secret-key") as stack:
        status, answer = await stack.get("/server_info", Authorization="Bearer secret-key")
        assert status == 200
        assert answer["model"] == MODEL
        assert "secret-key" not in str(answer)
        status, page = await stack.get("/")
        assert status == 200
        assert "/v1/workers" in page
