"""Reasoning formats by name: how models divide their reasoning from the answer behind it. Pure.

Models write their reasoning first, between ``<think>`` and ``</think>`` (DeepSeek-R1, Qwen 3; documented in their model
cards and chat templates), between ``[THINK]`` and ``[/THINK]`` (Magistral), or in a channel of its own (gpt-oss). Some
chat templates put the start marker at the end of the prompt, so an output may begin inside the reasoning. Only the
first block of reasoning counts; markers that come later are text of the answer.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common.errors import ConfigError
from gateway.text.incremental_parser import SPACE, IncrementalParser, Steps, drop
from gateway.text.output_parser import OutputParser, OutputPiece, ReasoningPiece
from gateway.text.tool_parsers.harmony import CHANNEL, END, MARKERS, MESSAGE, HarmonyParser

_BREAKS = re.compile(r"\n*")


class ReasoningParser(IncrementalParser):
    """Divides off the reasoning and hands what follows to another parser.

    Whitespace before the start marker, and line breaks behind it and around the end marker, are dropped.

    Args:
        inner: parses what is not reasoning.
        is_open: the output begins inside the reasoning; a start marker may follow nevertheless.
    """

    def __init__(
        self, start: str, end: str, inner: OutputParser, *, is_open: bool, token_markers: Collection[str]
    ) -> None:
        super().__init__(token_markers)
        self._start, self._end = start, end
        self._inner = inner
        self._is_open = is_open
        self._is_over = False
        self._breaks: list[str] = []  # may precede the end marker

    def push(self, text: str, token: int | None = None) -> list[OutputPiece]:
        return self._inner.push(text, token) if self._is_over else super().push(text, token)

    def flush(self) -> list[OutputPiece]:
        pieces = [] if self._is_over else super().flush()
        return pieces + self._inner.flush()

    def _parse(self) -> Steps[None]:
        spaces: list[str] = []
        yield from self._run(SPACE, spaces.append)
        is_started = yield from self._accept((self._start,), drop)
        if is_started or self._is_open:
            if not is_started:
                self._reasoning("".join(spaces).lstrip("\n"))
            yield from self._reasoning_block()
        else:
            self._hand_over("".join(spaces), None)
        self._is_over = True
        self._hand_over(self._take(len(self._buffer)), None)
        self._hand_over(self._marker, self._token)
        self._marker = ""

    def _reasoning_block(self) -> Steps[None]:
        yield from self._run(_BREAKS, drop)
        if (yield from self._text_until((self._end,), self._reasoning)):
            yield from self._run(_BREAKS, drop)
        else:
            self._pieces.add("reasoning", ReasoningPiece, "".join(self._breaks))

    def _reasoning(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            self._pieces.add("reasoning", ReasoningPiece, "".join(self._breaks) + body)
            self._breaks.clear()
        self._breaks.append(text[len(body) :])

    def _hand_over(self, text: str, token: int | None) -> None:
        if text:
            for piece in self._inner.push(text, token):
                self._pieces.add_piece(piece)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its reasoning.

    Attributes:
        name: as in ``--reasoning-parser``.
        start, end: the markers. The caller passes the ids of those that are tokens as ``token_ids``, by text.
        is_always_open: the model reasons at once, even if neither the prompt nor the output has the start marker.
    """

    name: str
    start: str
    end: str
    is_always_open: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end)

    def is_open_after(self, prompt: str) -> bool:
        """Whether an output that continues this prompt begins inside the reasoning."""
        tail = prompt[-256:].rstrip()
        return not tail.endswith(self.end) and (self.is_always_open or tail.endswith(self.start))

    def parser(self, inner: OutputParser, *, is_open: bool, token_ids: Mapping[str, int]) -> OutputParser:
        """A parser for one output that divides off the reasoning; ``inner`` parses the rest.

        Args:
            is_open: the output begins inside the reasoning (``is_open_after``).
        """
        return ReasoningParser(self.start, self.end, inner, is_open=is_open, token_markers=token_ids)


class HarmonyReasoning(ReasoningFormat):
    """The channels of gpt-oss. The parser of its tool calls divides off the reasoning, too."""

    @property
    def markers(self) -> tuple[str, ...]:
        return MARKERS

    def parser(self, inner: OutputParser, *, is_open: bool, token_ids: Mapping[str, int]) -> OutputParser:
        return inner if isinstance(inner, HarmonyParser) else HarmonyParser((), token_ids)


_THINK = ("<think>", "</think>")
_FORMATS = (
    ReasoningFormat("deepseek-r1", *_THINK, is_always_open=True),
    ReasoningFormat("qwen3", *_THINK),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    HarmonyReasoning("gpt-oss", f"{CHANNEL}analysis{MESSAGE}", END),
)
#: Names that SGLang or vLLM use for the same format.
_ALIASES = {
    "deepseek_r1": "deepseek-r1",
    "qwen3-thinking": "deepseek-r1",
    "deepseek-v3": "qwen3",
    "deepseek_v3": "qwen3",
    "openai_gptoss": "gpt-oss",
    "gpt_oss": "gpt-oss",
}


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of a ``--reasoning-parser``, or None.

    ``none`` is no format. ``auto`` decides from the chat template: one with harmony's channels means ``gpt-oss``, one
    with ``[THINK]`` ``mistral``, one with ``<think>`` or ``</think>`` ``qwen3``; any other has no format. Other names
    are those of a format, or the name that SGLang or vLLM has for it.

    Raises ConfigError: there is no such format.
    """
    if name == "none":
        return None
    if name == "auto":
        name = _named_by(template)
        if not name:
            return None
    by_name = {format.name: format for format in _FORMATS}
    found = by_name.get(_ALIASES.get(name, name))
    if found is None:
        names = ", ".join(["auto", "none", *by_name, *_ALIASES])
        raise ConfigError(f"--reasoning-parser {name}: there is no such format; known names are {names}")
    return found


def _named_by(template: str) -> str:
    if CHANNEL in template and MESSAGE in template:
        return "gpt-oss"
    if "[THINK]" in template:
        return "mistral"
    # Templates of models that never reason remove <think> and </think> from earlier turns, too.
    return "qwen3" if any(marker in template for marker in _THINK) else ""
