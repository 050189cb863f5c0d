"""The harmony format of gpt-oss: messages in channels, for reasoning, answers and calls.

    <|channel|>analysis<|message|>The user asks for the weather.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

(in one line). Documented in "OpenAI harmony response format" (docs/format.md of openai/harmony). The prompt ends with
``<|start|>assistant``, so an output begins inside the header of a message. ``analysis`` is reasoning, ``final`` is the
answer, ``commentary`` is a preamble for the user or, with a recipient, a call. The recipient may also stand before the
channel. ``<|call|>`` and ``<|return|>`` end an output, so an output holds at most one call, and they usually do not
reach the parser. All markers are special tokens.

A message to a recipient that is not one of the tools (such as the built-in ``python``) is reasoning in ``analysis`` and
text elsewhere. A header that is cut off is dropped.
"""

import re
from collections.abc import Mapping, Sequence

from gateway.text.incremental_parser import Sink, Steps
from gateway.text.output_parser import ReasoningPiece, Tool
from gateway.text.tool_parsers import grammar
from gateway.text.tool_parsers.base import NotACall, ToolFormat, ToolParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_ENDS = (END, CALL, RETURN)
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


class HarmonyParser(ToolParser):
    def _parse(self) -> Steps[None]:
        marker = yield from self._header("")
        while marker:
            if marker in _ENDS:
                marker = yield from self._text_until((START, CHANNEL), self._text)
            elif marker == MESSAGE:
                marker = yield from self._content(self._read_header())
            else:
                marker = yield from self._header(marker)

    def _header(self, marker: str) -> Steps[str]:
        """Read a header behind ``<|start|>`` or ``<|channel|>``, or "" at first; return the marker that follows.

        A header without a message is dropped, but text in front of all markers is the answer.
        """
        try:
            if marker == CHANNEL:
                self._hold(CHANNEL)
            following = yield from self._text_until((MESSAGE, START, *_ENDS), self._hold)
        except NotACall:
            self._release()
            return (yield from self._text_until((START, *_ENDS), self._text))
        if following != MESSAGE:
            if marker or CHANNEL in "".join(self._held):
                self._forget()
            else:
                self._release()
        return following

    def _read_header(self) -> Sink:
        """The sink of the content of a message, whose header was held."""
        header = "".join(self._held)
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        if recipient is not None:
            try:
                self._begin(recipient[1].removeprefix("functions."))
            except NotACall:
                pass
            else:
                return self._arguments
        self._forget()
        return self._reasoning if is_reasoning else self._text

    def _content(self, sink: Sink) -> Steps[str]:
        """Read the content of a message; return the marker that ends it."""
        is_empty = not (yield from self._peek())
        marker = yield from self._text_until((START, *_ENDS), sink)
        if is_empty and sink == self._arguments:
            self._arguments("{}")
        return marker

    def _reasoning(self, text: str) -> None:
        self._pieces.add("reasoning", ReasoningPiece, text)


class HarmonyFormat(ToolFormat):
    def __init__(self) -> None:
        super().__init__("gpt-oss", MARKERS, covers_reasoning=True)

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> HarmonyParser:
        return HarmonyParser(tools, token_ids)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        rules = _messages("call" if required else "(call | final)", "TEXT", token_ids)
        return "\n".join(rules + _call_rules(tools, token_ids, required=required))

    def answer_grammar(self, rule: str, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> str:
        rules = _messages("(call | final)" if tools else "final", "answer", token_ids)
        calls = _call_rules(tools, token_ids, required=True) if tools else []
        return "\n".join([*rules, *calls, f"answer: {rule}"])


def _call_rules(tools: Sequence[Tool], token_ids: Mapping[str, int], *, required: bool) -> list[str]:
    """The rules of a message that calls one of the tools."""
    channel, constrain, message, call = (
        grammar.marker(text, token_ids) for text in (CHANNEL, CONSTRAIN, MESSAGE, CALL)
    )
    rules = [f'call: {channel} "commentary to=functions." ({grammar.alternatives("call", len(tools))}) {call}?']
    for i, tool in enumerate(tools):
        name = grammar.literal(f"{tool.name} ")
        rules.append(f'call_{i}: {name} {constrain} "json" {message} arguments_{i}')
        rules.append(f"arguments_{i}: {grammar.arguments(tool, required=required)}")
    return rules


def _messages(last: str, answer: str, token_ids: Mapping[str, int]) -> list[str]:
    """Rules of reasoning and preambles before the last message; the text of a final message is ``answer``."""
    start, channel, message, end = (grammar.marker(text, token_ids) for text in (START, CHANNEL, MESSAGE, END))
    return [
        f'start: (message {start} "assistant")* {last}',
        f'message: {channel} ("analysis" | "commentary") {message} TEXT {end}',
        f'final: {channel} "final" {message} {answer}',
        grammar.TEXT,
    ]
