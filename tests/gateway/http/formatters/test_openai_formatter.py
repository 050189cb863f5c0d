"""Chunks of OpenAI's streams that show text alone, which are cut around the text, against the general way."""

import json
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from common.sampling_params import SamplingParams
from gateway.http.formatters.openai import MARK, ChatFormatter, CompletionFormatter
from gateway.http.protocol.decoding import decode
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import Delta, OutputStream

MODEL = SimpleNamespace(asked_name="m", tokenizer=None)
NAMES = st.sampled_from(["m", MARK, 'a"b', f'"{MARK}"', "größe"])


def output_of(number):
    return OutputStream(GenerateRequest("r", "r", (1, 2), SamplingParams()), number, None, None, 0.0, created=7)


def delta_of(text):
    return Delta(text, 1, [5], [None], is_last=False)


def streamed(formatter, number, text):
    event = formatter.chunk(output_of(number), delta_of(text))
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    return json.loads(event.removeprefix(b"data: "))


@given(NAMES, st.lists(st.tuples(st.integers(0, 3), st.text(min_size=1)), min_size=1), st.booleans())
def test_each_chunk_shows_its_own_text(name, chunks, has_usage):
    options = {"include_usage": True} if has_usage else None
    common = {"stream": True, "stream_options": options}
    completions = CompletionFormatter(SimpleNamespace(asked_name=name, tokenizer=None), completion(**common), "cmpl-1")
    chats = ChatFormatter(SimpleNamespace(asked_name=name, tokenizer=None), chat(**common), "chatcmpl-1")
    for number, text in chunks:
        usage = {"usage": None} if has_usage else {}
        choice = {"index": number, "logprobs": None, "finish_reason": None}
        chunk = streamed(completions, number, text)
        assert chunk.pop("created") == 7
        assert chunk == {
            "id": "cmpl-1", "object": "text_completion", "model": name, **usage, "choices": [{**choice, "text": text}],
        }  # fmt: skip
        chunk = streamed(chats, number, text)
        assert chunk.pop("created") == 7
        assert chunk == {
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "model": name, **usage,
            "choices": [{**choice, "delta": {"content": text}}],
        }  # fmt: skip


def completion(**fields):
    return decoded(CompletionRequest, prompt="a", **fields)


def chat(**fields):
    return decoded(ChatCompletionRequest, messages=[{"role": "user", "content": "a"}], **fields)


def decoded(kind, **fields):
    return decode(kind, json.dumps({name: value for name, value in fields.items() if value is not None}).encode())


def test_a_chunk_with_token_ids_has_them():
    formatter = CompletionFormatter(MODEL, completion(return_token_ids=True), "cmpl-1")
    assert streamed(formatter, 0, "x")["choices"][0]["token_ids"] == [5]


def test_a_chunk_with_usage_so_far_has_it():
    options = {"include_usage": True, "continuous_usage_stats": True}
    formatter = CompletionFormatter(MODEL, completion(stream=True, stream_options=options), "cmpl-1")
    assert streamed(formatter, 0, "x")["usage"]["prompt_tokens"] == 2


def test_a_delta_without_text_makes_no_chunk():
    formatter = ChatFormatter(MODEL, chat(), "chatcmpl-1")
    assert formatter.chunk(output_of(0), delta_of("")) == b""
