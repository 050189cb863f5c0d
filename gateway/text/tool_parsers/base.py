"""What all tool call formats share: the format's interface, and the beginning and end of calls. Pure."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.text.incremental_parser import SPACE, IncrementalParser, Sink, Steps, drop
from gateway.text.output_parser import OutputParser, OutputPiece, TextPiece, Tool, ToolCallArguments, ToolCallBegin

#: Calls in one output; what resembles a call after that is text.
MAX_CALLS = 128
#: Characters that are held back until it is certain that they begin a call.
MAX_HELD = 16 << 10

_OBJECT_SEPARATORS = re.compile(r"[ \t\r\n,]*")


class ToolFormat(ABC):
    """How a family of models writes tool calls.

    Args:
        name: as in ``--tool-call-parser``.
        covers_reasoning: the format also says what is reasoning: its parser divides it off, and its grammar allows it.
        markers: texts that the format gives a meaning. The caller looks up which of them are tokens and passes their
            ids as ``token_ids``, by text, to both methods; their ids belong in ``OutputFormat.markers``.
    """

    def __init__(self, name: str, markers: tuple[str, ...], *, covers_reasoning: bool = False) -> None:
        self.name = name
        self.markers = markers
        self.covers_reasoning = covers_reasoning

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> OutputParser:
        """A parser for one output. What resembles a call of a function that is not among ``tools`` is text."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int]) -> str:
        """A Lark grammar, in the dialect of llguidance, of outputs with valid calls of these tools.

        Arguments follow the schema of a tool if it is strict or ``required`` is set. Schema keywords that llguidance
        does not support are an error for a strict tool and ignored for others.

        Args:
            parallel: several calls may follow each other.
            required: the output consists of calls; otherwise text may come first, and only what follows the beginning
                of a call is constrained.
            token_ids: markers that the grammar names by their ids, so that the model must write the token. The syntax
                has no other name for tokens such as ``[TOOL_CALLS]``; other markers are text in the grammar.
        """

    def answer_grammar(self, rule: str, tools: Sequence[Tool], *, token_ids: Mapping[str, int]) -> str:
        """A Lark grammar of outputs that call one of these tools or whose answer follows a rule, given by its body.

        Only a format that covers the reasoning has it; for others, calls and answers are alternatives.
        """
        raise NotImplementedError


class NotACall(Exception):
    """What was held back is text: it only resembles the beginning of a call."""


class ToolParser(IncrementalParser):
    """An incremental parser of tool calls and the text around them.

    Whitespace before a call, between calls and between a call and the end is dropped. What may begin a call is held
    until the function's name is complete and known (``_hold``), and is text otherwise (``NotACall``, ``_release``).
    """

    def __init__(self, tools: Sequence[Tool], token_markers: Collection[str]) -> None:
        super().__init__(token_markers)
        self._tools = {tool.name: tool for tool in tools}
        self._num_calls = 0
        self._held: list[str] = []
        self._num_held = 0
        self._space: list[str] = []  # may precede a call
        self._is_after_call = False

    def flush(self) -> list[OutputPiece]:
        pieces = super().flush()
        if self._space and not self._is_after_call:
            pieces.append(TextPiece("".join(self._space)))
        return pieces

    def _text(self, text: str) -> None:
        body = text.rstrip(" \t\r\n")
        if body:
            self._pieces.add("text", TextPiece, "".join(self._space) + body)
            self._space.clear()
            self._is_after_call = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _hold(self, text: str) -> None:
        """Keep text, read just now, that may begin a call. Raises NotACall if it is too long; the excess is unread."""
        excess = max(self._num_held + len(text) - MAX_HELD, 0)
        self._at -= excess
        self._held.append(text[: len(text) - excess])
        self._num_held += len(text) - excess
        if excess:
            raise NotACall

    def _release(self) -> None:
        """Make text of what was held."""
        held = "".join(self._held)
        self._forget()
        self._text(held)

    def _forget(self) -> None:
        self._held.clear()
        self._num_held = 0

    def _begin(self, name: str) -> None:
        """Begin a call; what was held belongs to it. Raises NotACall."""
        if name not in self._tools or self._num_calls == MAX_CALLS:
            raise NotACall
        self._forget()
        self._space.clear()
        self._is_after_call = True
        self._pieces.add_piece(ToolCallBegin(self._num_calls, name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        index = self._num_calls - 1
        self._pieces.add(index, lambda joined: ToolCallArguments(index, joined), text)

    def _text_and_calls(
        self, markers: Sequence[str], read: Callable[[str], Steps[str]], *, may_begin_at_once: bool = False
    ) -> Steps[None]:
        """Read an output of text, and of calls behind markers.

        Args:
            read: reads what follows a marker, and returns the next marker if it has read that, too. It raises NotACall
                if what it holds is text.
            may_begin_at_once: a call may begin the output; ``read`` gets an empty text for its marker.
        """
        marker = ""
        is_due = may_begin_at_once
        while True:
            if not is_due:
                marker = yield from self._text_until(markers, self._text)
                if not marker:
                    return
            try:
                marker = yield from read(marker)
            except NotACall:
                self._release()
                marker = ""
            is_due = bool(marker)

    def _after_call(self, markers: Sequence[str]) -> Steps[str]:
        """Read one of these markers with the whitespace before it, if it comes next."""
        yield from self._run(SPACE, self._text)
        marker = yield from self._accept(markers, drop)
        if marker:
            self._space.clear()
        return marker

    def _call_object(self) -> Steps[bool]:
        """Read a call that is a JSON object with the name and the arguments, in any order.

        Returns:
            False if the arguments are broken or cut off; what was read of them has been passed on.

        Raises:
            NotACall: before the call has begun.
        """
        if not (yield from self._literal("{", self._hold)):
            raise NotACall
        reader = _CallObject()
        while True:
            sink = drop if reader.has_begun else self._hold
            yield from self._run(_OBJECT_SEPARATORS, sink)
            if (yield from self._literal("}", sink)):
                break
            key = yield from self._key(sink)
            if key is None:
                return self._broken_object(reader)
            if key == "name" and not reader.has_begun:
                yield from self._name(reader)
            elif key in ("arguments", "parameters") and not reader.has_arguments:
                if not (yield from self._object_arguments(reader)):
                    return False
            elif not (yield from self._json(sink)):
                return self._broken_object(reader)
        if not reader.has_begun:
            raise NotACall
        if not reader.has_arguments:
            self._arguments("{}")
        return True

    def _broken_object(self, reader: "_CallObject") -> bool:
        if not reader.has_begun:
            raise NotACall
        return reader.has_arguments

    def _key(self, sink: Sink) -> Steps[str | None]:
        """Read a key with its colon; None if there is none."""
        if (yield from self._peek()) != '"':
            return None
        texts: list[str] = []

        def collect(text: str) -> None:
            texts.append(text)
            sink(text)

        if not (yield from self._json_string(collect)):
            return None
        yield from self._run(SPACE, sink)
        if not (yield from self._literal(":", sink)):
            return None
        yield from self._run(SPACE, sink)
        return json_text("".join(texts))

    def _name(self, reader: "_CallObject") -> Steps[None]:
        if (yield from self._peek()) != '"':
            raise NotACall
        num_before = len(self._held)
        if not (yield from self._json_string(self._hold)):
            raise NotACall
        self._begin(json_text("".join(self._held[num_before:])))
        reader.has_begun = True
        if reader.has_arguments:
            self._arguments(reader.held_arguments)

    def _object_arguments(self, reader: "_CallObject") -> Steps[bool]:
        """Pass the arguments on, or hold them if the name is still to come."""
        reader.has_arguments = True
        if reader.has_begun:
            return (yield from self._json(self._arguments))
        num_before = len(self._held)
        if not (yield from self._json(self._hold)):
            raise NotACall
        reader.held_arguments = "".join(self._held[num_before:])
        return True


class _CallObject:
    """What was read of a call that is a JSON object."""

    def __init__(self) -> None:
        self.has_begun = False
        self.has_arguments = False
        self.held_arguments = ""


def json_text(raw: str) -> str:
    """The value of a JSON string; "" if it is invalid."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return ""
    assert isinstance(value, str)
    return value
