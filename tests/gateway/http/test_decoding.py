"""Fields that a body may have although they have no effect, and fields that are refused by name."""

import contextlib
import difflib
import json
from types import SimpleNamespace

import msgspec
import pytest
from anthropic.types.beta import message_create_params as anthropic_messages
from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chats
from openai.types.responses import response_create_params as openai_responses
from openai.types.responses.input_token_count_params import InputTokenCountParams

from common.errors import RequestError
from gateway.http.formatters.common import ignored_header
from gateway.http.protocol import decoding
from gateway.http.protocol.anthropic import CountTokensRequest, MessagesRequest
from gateway.http.protocol.decoding import decode, decode_with_extras, value_of_either
from gateway.http.protocol.extras import UNSUPPORTED, WITHOUT_EFFECT
from gateway.http.protocol.native import NativeRequest
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest
from gateway.http.protocol.responses import ResponsesRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PART = {"type": "text", "text": "Hi"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def decoded(kind, body, **options):
    return decode_with_extras(kind, json.dumps(body).encode(), **options)


def refused(kind, body, **options):
    with pytest.raises(RequestError) as caught:
        decoded(kind, body, **options)
    return caught.value


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({}, ()),
        ({"user": "me", "metadata": {"a": 1}, "store": False}, ("user", "metadata", "store")),
        ({"verbosity": "low", "moderation": {}}, ("verbosity", "moderation")),
        ({"user": None, "service_tier": None}, ()),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, ("stream_options.include_obfuscation",)),
        (
            {"messages": [{"role": "user", "id": "m1", "content": [{**PART, "cache_control": {}}] * 2}] * 2},
            ("messages.id", "messages.content.cache_control"),
        ),
        (
            {"tools": [{"type": "function", "cache_control": {}, "function": {"name": "f", "defer_loading": True}}]},
            ("tools.cache_control", "tools.function.defer_loading"),
        ),
        ({"suffix": None, "modalities": ["text"], "functions": [], "function_call": "none", "best_of": 1}, ()),
        ({"prompt_cache_key": "mine"}, ()),
    ],
)
def test_fields_without_effect_are_dropped_and_named_once(body, ignored):
    request, names = decoded(ChatCompletionRequest, {**CHAT, **body})
    assert names == ignored
    assert request.messages[0].role == "user"


def test_the_rest_of_a_body_is_decoded_as_without_extras():
    body = {**CHAT, "temperature": 1, "logit_bias": {"5": 1, "7": -2.5}, "tool_choice": "auto", "stop": ["a"]}
    body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"user": 1, "anyOf": [{}, None]}}}]
    plain, _ = decoded(ChatCompletionRequest, body)
    with_extras, ignored = decoded(ChatCompletionRequest, {**body, "user": "me"})
    assert (with_extras, ignored) == (plain, ("user",))


def test_types_are_checked_in_bodies_with_extras_too():
    error = refused(ChatCompletionRequest, {**CHAT, "user": "me", "n": "2"})
    assert error.param == "n"
    error = refused(ChatCompletionRequest, {"messages": [{"role": "user", "content": 5, "id": 1}]})
    assert error.param == "messages[0].content"


@pytest.mark.parametrize("extra", [{}, {"user": "me"}])
def test_a_number_without_a_fraction_is_an_integer(extra):
    request, _ = decoded(ChatCompletionRequest, {**CHAT, **extra, "max_tokens": 256.0, "seed": 1e3, "temperature": 1.0})
    assert (request.max_tokens, request.seed, request.temperature) == (256, 1000, 1.0)
    assert (type(request.max_tokens), type(request.seed), type(request.temperature)) == (int, int, float)
    native, _ = decoded(NativeRequest, {"text": "a", "logprob_start_len": 1.0, "sampling_params": {"top_k": 8.0}})
    assert (native.logprob_start_len, native.sampling_params.top_k) == (1, 8)


@pytest.mark.parametrize("value", [8.5, 0.0, 1e300])
def test_other_numbers_are_no_count(value):
    assert refused(ChatCompletionRequest, {**CHAT, "max_tokens": value}).param == "max_tokens"


@pytest.mark.parametrize(
    ("kind", "body", "param", "hint"),
    [
        (ChatCompletionRequest, {**CHAT, "temprature": 1}, "temprature", "did you mean temperature?"),
        (ChatCompletionRequest, {**CHAT, "max_new_tokens": 1}, "max_new_tokens", "use max_tokens"),
        (ChatCompletionRequest, {**CHAT, "enable_thinking": True}, "enable_thinking", "chat_template_kwargs"),
        (ChatCompletionRequest, {**CHAT, "rid": "a"}, "rid", "/abort_request takes the id of the answer"),
        (ChatCompletionRequest, {**CHAT, "xyzzy": 1}, "xyzzy", "unknown field"),
        (ChatCompletionRequest, {**CHAT, "structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "mean json?"),
        (CompletionRequest, {"prompt": "a", "promt": "a"}, "promt", "did you mean prompt?"),
        (NativeRequest, {"text": "a", "sampling_params": {"topk": 1}}, "sampling_params.topk", "did you mean top_k?"),
        (NativeRequest, {"text": "a", "sampling_params": [{}, {"x": 1}]}, "sampling_params[1].x", "unknown field"),
        (NativeRequest, {"text": "a", "temperature": 0}, "temperature", "put it into sampling_params"),
        (NativeRequest, {"text": "a", "max_new_tokens": 1}, "max_new_tokens", "put it into sampling_params"),
        (NativeRequest, {"prompt": "a"}, "prompt", "use text"),
        (ChatCompletionRequest, {**CHAT, "include_usage": True}, "include_usage", "put it into stream_options"),
        (CompletionRequest, {"prompt": "a", "messages": []}, "messages", "use prompt"),
        (ResponsesRequest, {"input": "a", "response_format": {}}, "response_format", "use text.format"),
        (ResponsesRequest, {"input": "a", "reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
        (MessagesRequest, {**CHAT, "max_tokens": 1, "stop": ["a"]}, "stop", "use stop_sequences"),
    ],
)
def test_unknown_fields_are_refused_with_a_hint(kind, body, param, hint):
    error = refused(kind, body)
    assert (error.param, error.code) == (param, "invalid_request")
    assert hint in error.message


def test_of_a_long_name_only_the_beginning_is_compared_with_others_and_shown(monkeypatch):
    sizes = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *others: sizes.append(len(name)) or [])
    assert refused(ChatCompletionRequest, {**CHAT, "x" * 100_000: 1}).param == "x" * 200
    shown = SimpleNamespace(sub=lambda instead, text: sizes.append(len(text)) or text)
    monkeypatch.setattr(decoding, "_STRANGE", shown)
    _, ignored = decoded(ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi", "x" * 100_000: 1}]})
    assert ignored == ("messages." + "x" * 55,)
    assert len(sizes) == 2 and max(sizes) <= 256


def test_of_many_fields_with_one_long_beginning_only_some_are_read(monkeypatch):
    num_read = 0

    def replaced(instead, text):
        nonlocal num_read
        num_read += 1
        return text

    monkeypatch.setattr(decoding, "_STRANGE", SimpleNamespace(sub=replaced))
    extras = {"x" * 100 + str(i): 1 for i in range(2_000)}
    _, ignored = decoded(ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi", **extras}]})
    assert (ignored, num_read) == (("messages." + "x" * 55,), decoding.MAX_READ_EXTRAS)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("suffix", "b", "leave it out"),
        ("audio", {"voice": "alloy"}, "leave it out"),
        ("modalities", ["text", "audio"], "leave it out"),
        ("functions", [{"name": "f"}], "use tools"),
        ("best_of", 2, "leave it out"),
        ("best_of", True, "leave it out"),
        ("use_beam_search", True, "leave it out"),
        ("chat_template", "{{ 1 }}", "--chat-template"),
        ("extra_key", "x", "use cache_salt"),
        ("web_search_options", {}, "leave it out"),
    ],
)
def test_fields_that_ask_for_what_is_not_supported_are_refused_by_name(field, value, hint):
    error = refused(ChatCompletionRequest, {**CHAT, field: value})
    assert (error.param, error.code) == (field, "not_supported")
    assert hint in error.message


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ChatCompletionRequest, {"messages": [{"role": "function"}]},
         "messages[0].role: Invalid enum value 'function'; it may be assistant, developer, system, tool, user"),
        (ChatCompletionRequest, {**CHAT, "user": "me", "tool_choice": "any"},
         "tool_choice: Invalid enum value 'any'; it may be auto, none, required"),
        (ChatCompletionRequest, {**CHAT, "tools": [{"type": "custom"}]},
         "tools[0].type: Invalid enum value 'custom'; it may be function"),
        (MessagesRequest, {**CHAT, "max_tokens": 1, "output_config": {"effort": "none"}},
         "output_config.effort: Invalid enum value 'none'; it may be high, low, max, medium, xhigh"),
        (ChatCompletionRequest, {}, "messages: is missing"),
        (ChatCompletionRequest, {**CHAT, "tools": [{}]}, "tools[0].function: is missing"),
        (ChatCompletionRequest, [], "the body is wrong: Expected object, got array"),
    ],
)  # fmt: skip
def test_errors_name_the_values_that_a_field_may_have_and_what_is_missing(kind, body, message):
    assert refused(kind, body).message == message


def test_of_a_long_text_that_is_wrong_only_the_beginning_is_shown():
    message = refused(ChatCompletionRequest, {**CHAT, "tool_choice": "x" * 100_000}).message
    assert message.startswith("tool_choice: Invalid enum value 'xxx")
    assert message.endswith("x; it may be auto, none, required")
    assert len(message) < 500


@pytest.mark.parametrize("text", ["\ud83d", "a\ud83d", "\ud83dabcdefghijk", "b\ude80", "\ud83d\ud83d"])
def test_half_of_a_character_is_refused_by_what_it_is(text):
    """Some clients cut long texts between the two escapes of an emoji."""
    for body in ({"prompt": text}, {"prompt": text, "max_tokens": 1}, {"max_tokens": 1, "prompt": [text, "a"]}):
        assert "a text has half of a character" in refused(CompletionRequest, body).message
    assert decoded(CompletionRequest, {"prompt": "\ud83d\ude80"})[0].prompt == "\U0001f680"
    with pytest.raises(RequestError, match="not valid JSON"):
        decode(CompletionRequest, b'{"prompt": "\\u12"}')


def test_a_byte_order_mark_is_refused_by_what_it_is():
    with pytest.raises(RequestError, match="byte order mark"):
        decode(CompletionRequest, b'\xef\xbb\xbf{"prompt": "a"}')


def test_strict_fields_refuse_what_has_no_effect():
    for body, param in (
        ({**CHAT, "user": "me"}, "user"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "a", "id": 5}]},
            "messages[1].id",
        ),
    ):
        error = refused(ChatCompletionRequest, body, are_refused=True)
        assert (error.param, error.code) == (param, "invalid_request")
        assert "--strict-fields" in error.message
    decoded(ChatCompletionRequest, {**CHAT, "user": None, "modalities": ["text"]}, are_refused=True)


def test_that_the_result_of_a_tool_is_an_error_is_named_since_the_model_does_not_see_it():
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no such file", "is_error": True}
    _, ignored = decoded(MessagesRequest, {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]})
    assert ignored == ("messages.content.is_error",)


def test_the_header_names_safe_characters_only_and_a_bounded_number_of_fields():
    message = {"role": "user", "content": "a", "x\r\nset-cookie: y": 1, "ü": 2, "k" * 100: 3}
    _, ignored = decoded(ChatCompletionRequest, {"messages": [message]})
    assert ignored == ("messages.x__set-cookie__y", "messages._", "messages." + "k" * 55)
    _, ignored = decoded(
        ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"} | {f"k{i}": 1 for i in range(99)}]}
    )
    assert len(ignored) == 16
    assert ignored_header(()) == {}
    assert ignored_header(("user", "messages.id")) == {"x-baton-ignored": "user, messages.id"}


def test_the_tables_contain_no_field_that_a_body_declares():
    declared = {*ChatCompletionRequest.__struct_fields__, *NativeRequest.__struct_fields__}
    assert not declared & WITHOUT_EFFECT
    assert not declared & set(UNSUPPORTED)
    assert not WITHOUT_EFFECT & set(UNSUPPORTED)


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (openai_chats.CompletionCreateParamsNonStreaming, ChatCompletionRequest),
        (openai_completions.CompletionCreateParamsNonStreaming, CompletionRequest),
        (openai_responses.ResponseCreateParamsNonStreaming, ResponsesRequest),
        (InputTokenCountParams, ResponsesRequest),
        (anthropic_messages.MessageCreateParamsNonStreaming, MessagesRequest),
        (MessageCountTokensParams, CountTokensRequest),
    ],
)
def test_every_field_of_the_official_clients_is_known(params, body):
    given = (params.__required_keys__ | params.__optional_keys__) - {"betas"}  # they become a header
    assert given - set(body.__struct_fields__) - WITHOUT_EFFECT - set(UNSUPPORTED) == set()


def test_what_training_frameworks_send_with_every_prompt_to_sglang_is_accepted():
    sampling = {"top_k": -1, "stop": None, "no_stop_trim": True, "spaces_between_special_tokens": False}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "image_data": [], "return_logprob": True}
    request, ignored = decoded(NativeRequest, body, are_refused=True)
    assert (request.input_ids, request.sampling_params.top_k, ignored) == ([1, 2], -1, ())


def test_what_codex_adds_to_its_requests_is_ignored():
    body = {"input": "Hi", "client_metadata": {"x-codex-installation-id": "1"}, "text": {"verbosity": "low"}}
    assert decoded(ResponsesRequest, body)[1] == ("client_metadata", "text.verbosity")


@given(JSON)
def test_any_json_is_decoded_or_refused(value):
    for body in (value, {**CHAT, "user": value}, {"messages": value}, {**CHAT, "tools": value}, {**CHAT, "x": value}):
        with contextlib.suppress(RequestError):
            decode(ChatCompletionRequest, json.dumps(body).encode())


def test_token_ids_beside_a_field_without_effect_are_not_looked_at_one_by_one(monkeypatch):
    looked_at = []
    cleaned = decoding._Cleaner.cleaned

    def counted(self, value, kind, path):
        looked_at.append(path)
        return cleaned(self, value, kind, path)

    monkeypatch.setattr(decoding._Cleaner, "cleaned", counted)
    ids = list(range(1_000))
    request, ignored = decoded(CompletionRequest, {"prompt": [ids, ids], "user": "me"})
    assert (request.prompt, ignored) == ([ids, ids], ("user",))
    assert looked_at == ["", "prompt"]


def test_a_field_with_two_names_has_one_value():
    class Fields(msgspec.Struct):
        new: int | None = None
        old: int | None = None

    values = [value_of_either(Fields(*given), "new", "old") for given in ((None, None), (0, None), (None, 0), (2, 2))]
    assert values == [None, 0, 0, 2]
    with pytest.raises(RequestError, match=r"^in\.new: differs from old; give one of the two$") as caught:
        value_of_either(Fields(0, 1), "new", "old", "in.")
    assert caught.value.param == "in.new"
