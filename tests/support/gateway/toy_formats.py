"""Formats of reasoning and tool calls that are easy to write by hand: ``(reasoning)answer[name|arguments]``."""

from collections.abc import Mapping, Sequence

from gateway.text.output_formats import ModelFormats
from gateway.text.output_parser import (
    OutputParser,
    OutputPiece,
    ReasoningPiece,
    TextPiece,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
)


class ToyToolParser:
    """Character by character; whitespace is never dropped."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._name: str | None = None  # so far; None outside a call
        self._is_in_arguments = False

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        return [piece for character in text for piece in self._take(character)]

    def _take(self, character: str) -> list[OutputPiece]:
        if self._is_in_arguments:
            self._is_in_arguments = character != "]"
            return [ToolCallArguments(self._num_calls - 1, character)] if character != "]" else []
        if self._name is None:
            self._name = "" if character == "[" else None
            return [] if character == "[" else [TextPiece(character)]
        if character != "|":
            self._name += character
            return []
        name, self._name, self._is_in_arguments = self._name, None, True
        self._num_calls += 1
        return [ToolCallBegin(self._num_calls - 1, name)]

    def flush(self) -> list[OutputPiece]:
        return [] if self._name is None else [TextPiece("[" + self._name)]


class ToyReasoningParser:
    def __init__(self, inner: OutputParser, *, is_open: bool) -> None:
        self._inner = inner
        self._is_open = is_open

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        return [piece for character in text for piece in self._take(character)]

    def _take(self, character: str) -> list[OutputPiece]:
        if character in "()":
            self._is_open = character == "("
            return []
        return [ReasoningPiece(character)] if self._is_open else self._inner.push(character)

    def flush(self) -> list[OutputPiece]:
        return self._inner.flush()


class ToyTools:
    markers = ("[", "]")
    covers_reasoning = False

    def answer_grammar(self, rule: str, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> str:
        raise NotImplementedError

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> OutputParser:
        return ToyToolParser()

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        """Any call; a comment shows what it was asked for."""
        return f'start: "[" // {[tool.name for tool in tools]} parallel={parallel} required={required}'


class ToyReasoning:
    start, end = "(", ")"
    markers = (start, end)

    def is_open_after(self, prompt: str) -> bool:
        return prompt.endswith(self.start)

    def parser(self, inner: OutputParser, *, is_open: bool, token_ids: Mapping[str, int]) -> OutputParser:
        return ToyReasoningParser(inner, is_open=is_open)


TOY_FORMATS = ModelFormats(tools=ToyTools(), reasoning=ToyReasoning())
