"""Pieces of an output become its parts."""

import json
from types import SimpleNamespace

from common.sampling_params import SamplingParams
from gateway.http.formatters.openai import ChatFormatter
from gateway.http.protocol.openai import ChatCompletionRequest, ChatMessage
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.text.output_parser import (
    OutputFormat,
    ReasoningPiece,
    TextParser,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    joined,
)


class OneText(str):
    """A text that refuses to be added to another: with one addition for each token, an answer of n tokens would take a
    time that grows with the square of n.
    """

    def __add__(self, other):
        raise AssertionError("the texts of a part are joined at once")

    __radd__ = __add__


PIECES = [
    *[ReasoningPiece(OneText(text)) for text in ("a", "b", "c")],
    *[TextPiece(OneText(text)) for text in ("d", "e")],
    ToolCallBegin(0, "f"),
    *[ToolCallArguments(0, OneText(text)) for text in ("{", "}")],
    ToolCallBegin(1, "g"),
    *[ToolCallArguments(1, OneText(text)) for text in ("{", " ", "}")],
    *[TextPiece(OneText(text)) for text in ("h", "i")],
]


def test_the_pieces_of_a_part_are_joined_at_once():
    parts = [ReasoningPiece("abc"), TextPiece("de"), ToolCallBegin(0, "f"), ToolCallArguments(0, "{}")]
    assert joined(PIECES) == [*parts, ToolCallBegin(1, "g"), ToolCallArguments(1, "{ }"), TextPiece("hi")]
    assert joined([]) == []


def test_a_chat_shows_the_pieces_of_each_part_joined_at_once():
    body = ChatCompletionRequest(messages=[ChatMessage(role="user", content="a")])
    formatter = ChatFormatter(SimpleNamespace(asked_name="m", tokenizer=None), body, "chatcmpl-1")
    request = GenerateRequest("r", "r", (1,), SamplingParams(), output_format=OutputFormat(TextParser))
    output = OutputStream(request, 0, None, None, 0.0, pieces=PIECES, finish="stop")
    message = json.loads(b"".join(formatter.answer([output])))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("abc", "dehi")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}", "{ }"]
