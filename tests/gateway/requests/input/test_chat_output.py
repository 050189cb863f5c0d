"""How an answer is told to reason, where the vocabulary lacks a marker of the reasoning."""

import json

import pytest
from support.gateway.fake_nodes import make_tokenizer
from support.gateway.toy_formats import TOY_FORMATS
from tokenizers import normalizers

from common.errors import ErrorCode, RequestError
from common.sampling_params import Thinking
from gateway.http.protocol.decoding import decode
from gateway.http.protocol.openai import ChatCompletionRequest
from gateway.requests.input.chat_output import PLAIN_TEXT, ChatOutput, chat_output
from gateway.text.output_formats import ModelFormats
from gateway.text.reasoning_parsers import reasoning_format
from gateway.text.tokenizer import Tokenizer

#: The toy model reasons in parentheses.
START, END = "(", ")"
STRUCTURE = ChatOutput(grammar='start: "yes"', param="ebnf")


def tokenizer_with(character, replacement):
    """A tokenizer that drops a character, or replaces it as if the vocabulary did not have it."""
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Replace(character, replacement)
    return Tokenizer(tokenizer)


def output_of(tokenizer, *, prompt="Hi", structure=PLAIN_TEXT, formats=TOY_FORMATS, **fields):
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    chat = decode(ChatCompletionRequest, json.dumps(body).encode())
    return chat_output(chat, formats, tokenizer, prompt, structure)


@pytest.mark.parametrize("replacement", ["", "?"])
def test_a_grammar_rules_out_reasoning_that_no_tokens_end(replacement):
    output = output_of(tokenizer_with(END, replacement), structure=STRUCTURE)
    assert (output.grammar, output.thinking) == (STRUCTURE.grammar, None)


def test_a_marker_of_several_tokens_ends_no_reasoning_since_it_may_merge_with_the_text_beside_it():
    tokenizer, formats = Tokenizer(make_tokenizer()), ModelFormats(reasoning=reasoning_format("qwen3", ""))
    assert len(tokenizer.encode("</think>", add_special_tokens=False)) > 1
    with pytest.raises(RequestError, match="whose vocabulary has no token for </think>"):
        output_of(tokenizer, prompt="Hi<think>", structure=STRUCTURE, formats=formats)


def test_reasoning_that_the_prompt_has_begun_needs_no_token_that_begins_it():
    tokenizer = tokenizer_with(START, "")
    end_ids = tuple(tokenizer.encode(END, add_special_tokens=False))
    assert output_of(tokenizer, prompt=f"Hi{START}", structure=STRUCTURE).thinking == Thinking(None, *end_ids)


@pytest.mark.parametrize("replacement", ["", "?"])
@pytest.mark.parametrize(
    ("marker", "prompt", "fields", "param"),
    [
        (END, "Hi", {"thinking_budget": 5}, "thinking_budget"),
        (END, "Hi", {"thinking_token_budget": 5}, "thinking_token_budget"),
        (END, f"Hi{START}", {}, STRUCTURE.param),
        (END, f"Hi{START}", {"thinking_token_budget": 5}, "thinking_token_budget"),
        (START, "Hi", {"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_a_field_that_depends_on_a_marker_without_tokens_is_refused(replacement, marker, prompt, fields, param):
    with pytest.raises(RequestError, match="whose vocabulary has no token") as caught:
        output_of(tokenizer_with(marker, replacement), prompt=prompt, structure=STRUCTURE, **fields)
    assert (caught.value.param, caught.value.code) == (param, ErrorCode.NOT_SUPPORTED)
    assert caught.value.message.endswith(f" for {marker}")
