"""How a model writes the parts of its answers, as the gateway uses it: the formats of tool calls and of reasoning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.text.output_parser import OutputParser, Tool


class ToolFormat(Protocol):
    """How a model writes tool calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the format gives a meaning."""
        ...

    def parser(self, tools: Sequence[Tool], *, token_ids: Mapping[str, int] | None = None) -> OutputParser: ...

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, required: bool, token_ids: Mapping[str, int] | None = None
    ) -> str: ...

    @property
    def covers_reasoning(self) -> bool:
        """The format also says what is reasoning; its grammars allow it."""
        ...

    def answer_grammar(
        self, rule: str, tools: Sequence[Tool] = (), *, token_ids: Mapping[str, int] | None = None
    ) -> str:
        """A Lark grammar of outputs that call one of the tools or whose answer follows this rule; for formats that
        cover the reasoning."""
        ...


class ReasoningFormat(Protocol):
    """How a model writes its reasoning before the answer."""

    @property
    def start(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    def is_open_after(self, prompt: str) -> bool:
        """Whether an output that continues this prompt begins inside the reasoning."""
        ...

    def parser(self, inner: OutputParser, *, is_open: bool, token_ids: Mapping[str, int] | None = None) -> OutputParser:
        """A parser that divides the reasoning off and hands what follows to ``inner``."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How one model writes the parts of its answers; None for a part that it does not have."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


#: Of a model whose answers are text alone.
TEXT_ONLY = ModelFormats()
