"""The parts of a model's output: reasoning, text and tool calls. Pure.

A parser takes the output as it is generated, in pieces of any size, and returns the parts that are certain. How the
output is cut into pieces never changes the result, except into how many pieces a part is divided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

#: Anthropic's name for arguments that are no JSON object, when they must stand where an object belongs.
INVALID_JSON = "INVALID_JSON"
#: The parameters of a tool that names none.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        is_strict: the arguments must follow the schema.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; ``index`` counts the calls of one output from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of the arguments of call ``index``. No other part stands between the pieces of a call."""

    index: int
    text: str


OutputPiece = TextPiece | ReasoningPiece | ToolCallBegin | ToolCallArguments


class OutputParser(Protocol):
    """Divides one output into its parts."""

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        """Take more of the output.

        Args:
            token: the id of a marker, a token that the format gives a meaning; ``text`` is its text then. None:
                ``text`` is ordinary text, of any number of tokens.
        """
        ...

    def flush(self) -> list[OutputPiece]:
        """End the output and return what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one output is written, for requests whose answers show its parts.

    Attributes:
        markers: texts of the tokens that the format gives a meaning, by id. They reach the parser alone, even if they
            are special tokens, which the text of an answer leaves out.
    """

    new_parser: Callable[[], OutputParser]
    markers: Mapping[int, str] = field(default_factory=dict)


class TextParser:
    """The parser of outputs that consist of text alone."""

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        return [TextPiece(text)] if text else []

    def flush(self) -> list[OutputPiece]:
        return []


class FirstCallParser:
    """Leaves out all tool calls of another parser but the first."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        return [piece for piece in self._parser.push(text, token) if _is_shown(piece)]

    def flush(self) -> list[OutputPiece]:
        return [piece for piece in self._parser.flush() if _is_shown(piece)]


class RequiredCallsParser:
    """Leaves out text that another parser still holds at the end of an output that must call tools.

    It is the beginning of a call that was cut off before its name was complete, and no text of an answer.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        return self._parser.push(text, token)

    def flush(self) -> list[OutputPiece]:
        return [piece for piece in self._parser.flush() if not isinstance(piece, TextPiece)]


def _is_shown(piece: OutputPiece) -> bool:
    return isinstance(piece, TextPiece | ReasoningPiece) or piece.index == 0


def joined(pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
    """The same parts with neighbouring pieces of one part joined."""
    parts: list[OutputPiece] = []
    for _, group in groupby(pieces, key=_part_of):
        same = list(group)
        first = same[0]
        if len(same) == 1 or isinstance(first, ToolCallBegin):
            parts += same
        else:  # all at once: adding one text after the other would copy those before it each time
            texts = [piece.text for piece in same if not isinstance(piece, ToolCallBegin)]
            parts.append(replace(first, text="".join(texts)))
    return parts


def _part_of(piece: OutputPiece) -> tuple[type[OutputPiece], int]:
    """Equal for the pieces of one part."""
    return type(piece), 0 if isinstance(piece, TextPiece | ReasoningPiece) else piece.index
