"""Bodies of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.http.protocol.decoding import Extensible
from gateway.http.protocol.fields import (
    Count,
    OpenAIFields,
    Positive,
    Refused,
    TopLogprobs,
    supports,
)
from gateway.http.protocol.openai import MAX_TOOLS, CallId, FunctionName, ReasoningEffort

MAX_METADATA = 16
#: The only value of ``include`` that has an effect.
LOGPROBS = "message.output_text.logprobs"

ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class InputPart(Extensible, omit_defaults=True, kw_only=True):
    """A part of an item's content; only text is supported."""

    type: (
        Annotated[str, supports("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")]
        | None
    ) = None
    text: str | None = None
    refusal: str | None = None
    # Parts of an answer have these; they may come back and mean nothing then.
    annotations: Any = None
    logprobs: Any = None


class InputItem(Extensible, omit_defaults=True, kw_only=True):
    """An item of ``input``; ``type`` says which fields it has. The items of an answer are items of later inputs."""

    type: str | None = None  # a message, or with nothing but an id a reference to an item of a stored answer
    # message
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None  # also of reasoning
    # function_call
    call_id: CallId | None = None
    name: FunctionName | None = None
    namespace: FunctionName | None = None
    arguments: str | dict[str, Any] | None = None  # an object in calls of OpenAI's tools
    # function_call_output
    output: str | list[InputPart] | dict[str, Any] | None = None  # an object in results of OpenAI's tools
    # reasoning
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    # Items of an answer have these; they may come back and mean nothing then.
    id: str | None = None
    status: str | None = None


class ResponseFunction(Extensible, omit_defaults=True, kw_only=True):
    """A function that the model may call; tools that OpenAI runs are refused by their type."""

    type: Annotated[str, supports("function")]
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseTool(ResponseFunction, omit_defaults=True, kw_only=True):
    """A function, or a namespace of functions, as Codex declares the tools of an MCP server."""

    type: Annotated[str, supports("function", "namespace", "web_search")]
    tools: Annotated[list[ResponseFunction], Meta(max_length=MAX_TOOLS)] | None = None  # of a namespace

    @property
    def is_ignored(self) -> bool:
        """Whether the model does not see it: Codex offers OpenAI's search of the web in all its requests."""
        return self.type.startswith("web_search")  # there are forms with dates


class NamedResponseTool(Extensible, omit_defaults=True, kw_only=True):
    type: str = "function"
    name: FunctionName | None = None


class ResponseToolChoice(Extensible, omit_defaults=True, kw_only=True):
    """``tool_choice`` of one function, or of some of the tools (``allowed_tools``)."""

    type: Annotated[str, supports("function", "allowed_tools")]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedResponseTool], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(Extensible, omit_defaults=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Extensible, omit_defaults=True, kw_only=True):
    format: TextFormat | None = None


class ReasoningConfig(Extensible, omit_defaults=True, kw_only=True):
    effort: ReasoningEffort | None = None
    # Reasoning is shown in full, so a summary is never made.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Extensible, kw_only=True):
    """``stream_options``, of which nothing has an effect here."""


class ResponsesRequest(OpenAIFields, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: TopLogprobs | None = None
    # Beyond OpenAI's.
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: Count | None = None
    prompt: Refused = None
    conversation: Refused = None

    def values_without_effect(self) -> list[str]:
        values = [f"include.{value}" for value in dict.fromkeys(self.include or []) if value != LOGPROBS]
        return values + [f"tools.{tool.type[:100]}" for tool in self.tools or [] if tool.is_ignored]
