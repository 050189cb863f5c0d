"""How one model writes the parts of its answers: its formats of tool calls and of reasoning."""

from dataclasses import dataclass

from gateway.text.reasoning_parsers import ReasoningFormat
from gateway.text.tool_parsers.base import ToolFormat


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of one model; None for a part that its answers do not have."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def covers_reasoning(self) -> bool:
        """Whether the format of tool calls also says what is reasoning, as gpt-oss's does."""
        return self.tools is not None and self.tools.covers_reasoning


#: Of a model whose answers are text alone.
TEXT_ONLY = ModelFormats()
