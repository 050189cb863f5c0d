"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.http.protocol.decoding import Extensible, Strict
from gateway.http.protocol.fields import (
    MAX_STOPS,
    Count,
    DeadlineMs,
    NotEmpty,
    Positive,
    Priority,
    PriorityClass,
    Salt,
    Seed,
    Share,
    Temperature,
    TopK,
    supports,
)
from gateway.http.protocol.openai import MAX_TOOLS, CallId, FunctionName

#: Marks where Anthropic's service caches a prompt. Baton caches every prefix without it, so there is nothing to do.
CacheControl = dict[str, Any]


class ContentBlock(Extensible, kw_only=True):
    """A part of a message, of the system prompt or of a tool's result; ``type`` says which fields it has."""

    type: Annotated[str, supports("text", "thinking", "tool_use", "tool_result")]
    text: str | None = None
    thinking: str | None = None
    # tool_use
    id: CallId | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: CallId | None = None
    content: "str | list[ContentBlock] | dict[str, Any] | None" = None  # an object in results of Anthropic's tools
    # Blocks of an answer have these; they may come back and mean nothing then.
    signature: str | None = None
    citations: Any = None
    caller: Any = None
    cache_control: CacheControl | None = None


class AnthropicMessage(Extensible, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(Extensible, kw_only=True):
    """A function that the model may call; tools that Anthropic defines are refused by their type."""

    name: FunctionName | None = None  # toolsets have none
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(Extensible, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Extensible, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class AnthropicOutputFormat(Extensible, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Extensible, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None


class CountTokensRequest(Strict, kw_only=True):
    """``POST /v1/messages/count_tokens``: the fields of a message request that shape its prompt."""

    messages: Annotated[list[AnthropicMessage], NotEmpty]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicOutputFormat | None = None  # an older name of output_config.format
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: Count  # 0: the prompt is computed and cached, and the message is empty
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    # Beyond Anthropic's; the last six are Baton's own fields, as in all endpoints.
    seed: Seed | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    priority_class: PriorityClass | None = None
    deadline_ms: DeadlineMs | None = None
    slo_ttft_ms: DeadlineMs | None = None
    slo_itl_ms: DeadlineMs | None = None
    cache_salt: Salt | None = None
