"""Fields of OpenAI, vLLM and SGLang beyond sampling: each has its documented effect."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.gateway.fake_nodes import EOS, make_model_folder, make_tokenizer, prompt_logprobs_of, running
from tokenizers import normalizers

from common.sampling_params import SamplingParams, TokenLogprobs
from common.wire.messages import Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.http.formatters.openai import CompletionFormatter
from gateway.http.protocol.openai import CompletionRequest
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.input.grammars.checker import GrammarChecker
from gateway.requests.output_processor import OutputStream
from gateway.text.tokenizer import Tokenizer

TEXT = Tokenizer(make_tokenizer())
HI = [{"role": "user", "content": "Hi"}]


def ids_of(text):
    return tuple(TEXT.encode(text, add_special_tokens=False))


def sent(stack):
    """The request that nodes received last."""
    return list(stack.nodes[0].generates.values())[-1]


async def complete(stack, prompt="ab", **fields):
    status, answer = await stack.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, **fields})
    assert status == 200, answer
    return answer


async def chat(stack, messages=HI, **fields):
    status, answer = await stack.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, **fields})
    assert status == 200, answer
    return answer


async def param_of(stack, path, body):
    status, answer = await stack.post(path, body)
    assert status == 400, answer
    return answer["error"]["param"]


# ---- sampling --------------------------------------------------------------------------------------------------------


async def test_bad_words_reach_the_nodes_as_tokens_with_and_without_a_space(stack):
    await complete(stack, bad_words=["a", " b", "summer"])
    assert sent(stack).sampling.bad_words == tuple(map(ids_of, ("a", " a", " b", "summer", " summer")))
    body = {"text": ["x", "y"], "sampling_params": [{"bad_words": ["a"]}, {}]}
    await stack.post("/generate", body)
    assert [request.sampling.bad_words for request in stack.nodes[0].generates.values()][1:] == [
        (ids_of("a"), ids_of(" a")),
        (),
    ]
    for words, param in (([""], "bad_words"), ([" "], "bad_words"), (["x"] * 129, "bad_words")):
        assert await param_of(stack, "/v1/completions", {"prompt": "a", "bad_words": words}) == param
    assert await param_of(stack, "/v1/completions", {"prompt": "a", "bad_words": ["x" * 257]}) == "bad_words[0]"


async def test_a_bad_word_that_becomes_no_token_is_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Replace("x", "")
    tokenizer.save(str(make_model_folder(tmp_path) / "tokenizer.json"))
    async with running(tmp_path) as stack:
        await stack.pair()
        assert await param_of(stack, "/v1/completions", {"prompt": "a", "bad_words": ["a", "x"]}) == "bad_words"
        body = {"text": "a", "sampling_params": {"bad_words": ["x"]}}
        assert await param_of(stack, "/generate", body) == "sampling_params.bad_words"


async def test_allowed_token_ids_reach_the_nodes_each_once(stack):
    await complete(stack, allowed_token_ids=[9, 5, 9])
    assert sent(stack).sampling.allowed_token_ids == (9, 5)
    for ids, param in (([], "allowed_token_ids"), ([512], "allowed_token_ids"), ([-1], "allowed_token_ids[0]")):
        assert await param_of(stack, "/v1/completions", {"prompt": "a", "allowed_token_ids": ids}) == param


@pytest.mark.parametrize("stop", ["", [], [""], ["", "zzz"]])
async def test_empty_stop_strings_ask_for_nothing(stack, stop):
    answer = await complete(stack, stop=stop)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_both_names_of_the_output_length_work_everywhere(stack):
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HI})):
        _, answer = await stack.post(path, {**body, "max_completion_tokens": 3})
        assert answer["usage"]["completion_tokens"] == 3
        assert await param_of(stack, path, {**body, "max_completion_tokens": 3, "max_tokens": 4}) == "max_tokens"


async def test_structured_output_reaches_the_nodes_as_a_grammar(stack):
    await complete(stack, guided_choice=["yes", "no"])
    assert sent(stack).sampling.grammar == 'start: CHOICE\nCHOICE: "yes" | "no"'
    params = [{"regex": "a+", "max_new_tokens": 1}, {"max_new_tokens": 1}]
    await stack.post("/generate", {"text": ["a", "b"], "sampling_params": params})
    grammars = [request.sampling.grammar for request in stack.nodes[0].generates.values()]
    assert [bool(grammar) for grammar in grammars] == [True, True, False]
    await chat(stack, response_format={"type": "text"})
    assert sent(stack).sampling.grammar == ""
    body = {"prompt": "a", "regex": "a+", "guided_choice": ["b"]}
    assert await param_of(stack, "/v1/completions", body) == "guided_choice"
    body = {"text": "a", "sampling_params": {"ebnf": "root"}}
    assert await param_of(stack, "/generate", body) == "sampling_params.ebnf"


@pytest.mark.parametrize("name", ["schema", "value"])
async def test_a_json_object_follows_the_schema_that_is_given_with_it(stack, name):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    await chat(stack, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    grammar = sent(stack).sampling.grammar
    await chat(stack, response_format={"type": "json_object", name: schema})
    assert sent(stack).sampling.grammar == grammar
    body = {"messages": HI, "response_format": {"type": "json_object", name: {"properties": {"a": {"type": "no"}}}}}
    assert await param_of(stack, "/v1/chat/completions", body) == f"response_format.{name}.properties.a"


async def test_without_an_output_no_grammar_reaches_the_nodes(stack):
    await complete(stack, max_tokens=0, echo=True, guided_choice=["yes"], bad_words=["a"])
    assert (sent(stack).sampling.grammar, sent(stack).sampling.bad_words) == ("", ())
    await stack.post("/generate", {"text": "a", "sampling_params": {"regex": "a", "max_new_tokens": 0}})
    assert sent(stack).sampling.grammar == ""


async def test_a_grammar_of_many_prompts_is_checked_once(stack, monkeypatch):
    checked = []

    async def check(self, wanted, tenant):
        checked.append(wanted.value)
        return "start: /a/"

    monkeypatch.setattr(GrammarChecker, "check", check)
    await stack.post("/generate", {"text": ["a"] * 20, "sampling_params": {"regex": "a", "max_new_tokens": 1}})
    assert checked == ["a"]
    assert [request.sampling.grammar for request in stack.nodes[0].generates.values()] == ["start: /a/"] * 20


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 6}, "abcdef"),
        ({"truncate_prompt_tokens": 500}, "abcdef"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
    ],
)
async def test_a_prompt_is_cut_to_its_last_or_first_tokens(stack, fields, kept):
    for prompt in ("abcdef", list(ids_of("abcdef"))):
        await complete(stack, prompt, **fields)
        assert sent(stack).prompt == ids_of(kept)


async def test_a_prompt_beyond_the_context_can_be_cut_to_what_fits(stack):
    await complete(stack, "ab" * 100_000, truncate_prompt_tokens=-1, max_tokens=1)
    assert len(sent(stack).prompt) == 511  # one token of the context of 512 is for the output
    await complete(stack, "ab" * 100_000, truncate_prompt_tokens=4)
    assert sent(stack).prompt == ids_of("abab")
    await chat(stack, truncate_prompt_tokens=5)
    assert len(sent(stack).prompt) == 5
    for keep in (0, -2):
        body = {"prompt": "a", "truncate_prompt_tokens": keep}
        assert await param_of(stack, "/v1/completions", body) == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("send", "max_tokens", "num_prompt", "num_output"),
    [(complete, 100, 412, 100), (complete, None, 496, 16), (chat, 100, 412, 100), (chat, None, 384, 128)],
)
async def test_a_prompt_that_is_cut_to_what_fits_leaves_room_for_the_output(
    stack, send, max_tokens, num_prompt, num_output
):
    """The context has 512 tokens."""
    prompt = "ab" * 1_000 if send is complete else [{"role": "user", "content": "ab" * 1_000}]
    await send(stack, prompt, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert (len(sent(stack).prompt), sent(stack).sampling.max_new_tokens) == (num_prompt, num_output)


async def test_an_output_beside_which_no_prompt_fits_is_refused(stack):
    body = {"prompt": "ab", "truncate_prompt_tokens": -1, "max_tokens": 512}
    assert await param_of(stack, "/v1/completions", body) == "max_tokens"


async def test_the_echo_of_a_cut_prompt_is_what_the_model_saw(stack):
    answer = await complete(stack, "abcdef", truncate_prompt_tokens=3, echo=True, logprobs=0)
    assert answer["choices"][0]["text"] == "defde"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


async def test_a_chat_can_continue_its_final_message(stack):
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    await chat(stack, messages, continue_final_message=True, add_generation_prompt=False)
    expected = f"<|im_start|>user\nHi{EOS}\n<|im_start|>assistant\nI am"
    assert TEXT.decode(sent(stack).prompt, skip_special=False) == expected
    _, answer = await stack.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert tuple(answer["tokens"]) == sent(stack).prompt


async def test_an_assistant_turn_may_have_no_content(stack):
    for turn in ({"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}):
        await chat(stack, [*HI, turn, *HI])
        assert f"<|im_start|>assistant\n{EOS}" in TEXT.decode(sent(stack).prompt, skip_special=False)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1] * 600}, "prompt"),
        ("/v1/completions", {"prompt": "ab" * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 511}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab" * 600}]}, "messages"),
        ("/generate", {"text": "ab" * 600}, "text"),
    ],
)
async def test_clients_recognise_a_prompt_beyond_the_context(stack, path, body, param):
    """litellm looks for the first phrase in the message, LangChain for the second."""
    status, answer = await stack.post(path, body)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in error["message"]
    assert "context_length_exceeded" in error["message"]
    assert ("ask for fewer" in error["message"]) is (param == "max_tokens")


async def test_extra_keys_that_clients_send_unasked_are_accepted(stack):
    messages = [{"role": "user", "id": "m1", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]
    extras = {"user": "me", "verbosity": "low", "stream_options": {"include_obfuscation": False}}
    events = await stack.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 2, **extras})
    assert events[-1] == "[DONE]"


# ---- log-probabilities of characters of several tokens ---------------------------------------------------------------


def with_tops(stack, text, tops):
    """Make the nodes answer with this text, and with these (id, log-probability) alternatives at each token."""
    ids = ids_of(text)
    prefill, decode = stack.nodes

    def logprobs(i):
        return (TokenLogprobs(-0.5, tops(ids[i])),)

    def first(node, generate):
        known = {"logprobs": logprobs(0), "prompt_logprobs": prompt_logprobs_of(generate)}
        node.tokens(generate.rid, 0, ids[:1], **known)

    def rest(node, generate):
        for i in range(1, len(ids)):
            finish = "length" if i == len(ids) - 1 else ""
            node.tokens(generate.rid, i, ids[i : i + 1], logprobs=logprobs(i), finish=finish)

    prefill.on_generate, decode.on_generate = first, rest
    return ids


async def test_tokens_within_a_character_are_shown_as_bytes_at_its_position(stack):
    ids = with_tops(stack, "a€b", lambda token: ())
    assert [TEXT.piece(token) for token in ids] == [b"a", b"\xe2", b"\x82", b"\xac", b"b"]
    for echo, start in ((False, 3), (True, 3)):
        (choice,) = (await complete(stack, "xyz", max_tokens=9, logprobs=0, echo=echo))["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][-5:] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
        assert logprobs["text_offset"][-5:] == [start, start + 1, start + 1, start + 1, start + 2]
        assert logprobs["text_offset"][:-5] == ([0, 1, 2] if echo else [])
        assert choice["text"] == ("xyz" if echo else "") + "a€b"


async def test_the_position_behind_a_prompt_counts_its_characters(stack):
    for prompt in ("€ü", list(ids_of("€ü"))):
        with_tops(stack, "ab", lambda token: ())
        (choice,) = (await complete(stack, prompt, logprobs=0))["choices"]
        assert choice["logprobs"]["text_offset"] == [2, 3]
        (choice,) = (await complete(stack, prompt, logprobs=0, echo=True))["choices"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 2, 3]


async def test_offsets_point_into_the_text_however_it_is_streamed(stack):
    model = stack.gateway._models["tiny"]
    body = CompletionRequest(prompt="", logprobs=0)

    @settings(deadline=None)
    @example(f"a{EOS}b", "c", True, [])
    @given(st.text(max_size=12), st.text(min_size=1, max_size=12), st.booleans(), st.lists(st.integers(1, 12)))
    def check(prompt, text, is_echo, cuts):
        prompt_ids, ids = ids_of(prompt), ids_of(text)
        request = GenerateRequest(
            "r", "r", prompt_ids, SamplingParams(logprobs=0), echo=prompt if is_echo else "",
            logprob_start=0 if is_echo else None, text_offset=len(prompt),
        )  # fmt: skip
        output = OutputStream(request, 0, lambda: TEXT.detokenizer(skip_special=True), lambda _: None, 0.0)
        formatter, offsets, tokens = CompletionFormatter(model, body, "r"), [], []
        places = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
        for start, end in itertools.pairwise(places):
            finish = "length" if end == len(ids) else ""
            logprobs = (pack_logprobs(TokenLogprobs(-1.0)),) * (end - start)
            output.on_tokens(Tokens("r", 0, start, ids[start:end], finish=finish, logprobs=logprobs), 1.0)
            chunk = json.loads(formatter.chunk(output, output.take()).removeprefix(b"data: "))
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
            tokens += chunk["choices"][0]["logprobs"]["tokens"]
        answer = json.loads(b"".join(CompletionFormatter(model, body, "r").answer([output])))
        whole = answer["choices"][0]["logprobs"]
        assert (whole["text_offset"], whole["tokens"]) == (offsets, tokens)
        assert len(offsets) == len(ids) + (len(prompt_ids) if is_echo else 0)
        assert offsets == sorted(offsets)
        for offset, token in zip(offsets, tokens, strict=True):
            if not token.startswith("bytes:"):
                assert (prompt + text)[offset : offset + len(token)] == token

    check()


async def test_tokens_that_look_alike_have_keys_of_their_own(stack):
    a, other_byte = ids_of("a")[0], ids_of("€")[1]
    with_tops(stack, "ab", lambda token: ((a, -0.1), (500, -1.0), (501, -2.0), (other_byte, -3.0)))
    (choice,) = (await complete(stack, logprobs=4))["choices"]
    first, second = choice["logprobs"]["top_logprobs"]
    assert first == {"a": -0.1, "": -1.0, "token_id:501": -2.0, "bytes:\\x82": -3.0}
    assert second == {**first, "b": -0.5}


async def test_tokens_can_be_shown_by_their_ids(stack):
    a, b = with_tops(stack, "ab", lambda token: ())
    (choice,) = (await complete(stack, logprobs=0, return_tokens_as_token_ids=True))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{a}", f"token_id:{b}"]
    (choice,) = (await chat(stack, logprobs=True, return_tokens_as_token_ids=True))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{a}", f"token_id:{b}"]


async def test_log_probabilities_of_chats_show_bytes_too(stack):
    with_tops(stack, "€", lambda token: ())
    (choice,) = (await chat(stack, max_tokens=9, logprobs=True))["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert [entry["bytes"] for entry in entries] == [[0xE2], [0x82], [0xAC]]


# ---- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_continuous", [False, True])
async def test_every_chunk_of_a_chat_has_usage_if_it_is_asked_for(stack, is_continuous):
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    body = {"messages": HI, "max_tokens": 3, "stream_options": options}
    *chunks, last, _ = await stack.stream("/v1/chat/completions", body)
    assert len(chunks) >= 2  # the role, and the text
    assert {chunk["usage"] is None for chunk in chunks} == {not is_continuous}
    assert last["usage"]["completion_tokens"] == 3
    chunks = (await stack.stream("/v1/chat/completions", {"messages": HI, "max_tokens": 3}))[:-1]
    assert not any("usage" in chunk for chunk in chunks)
