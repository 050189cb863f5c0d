"""Shapes of the answers and stream events of generating endpoints, for the API's description and its tests.

Formatters build answers as plain values, which is faster; a test decodes real answers with these types, so that both
agree.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class: an object with these fields and no others."""


# ---- OpenAI: completions and chats ----------------------------------------------------------------------------------


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer):
    """A choice of a whole answer, or a piece of it in a stream; ``stop_reason`` comes at the end."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(Answer):
    """The answer of ``/v1/completions``, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: Annotated[str, Meta(description="JSON")]


class AssistantToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AssistantToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Answer):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(Answer):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(Answer):
    """The beginning of a call, with its name, or more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Answer):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(Answer):
    """An event of the stream of ``/v1/chat/completions``; the last text of the stream is ``[DONE]``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


# ---- SGLang ---------------------------------------------------------------------------------------------------------

#: Log-probability, token id, and text if ``return_text_in_logprobs`` asks for it.
LogprobEntry = tuple[float | None, int, str | None]


class FinishReason(Answer):
    type: Literal["stop", "length"]
    matched: int | str | msgspec.UnsetType | None = msgspec.UNSET
    length: int | msgspec.UnsetType = msgspec.UNSET


class MetaInfo(Answer):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_token_logprobs: list[LogprobEntry] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[LogprobEntry]] | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[LogprobEntry] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    time_to_first_token: float | msgspec.UnsetType = msgspec.UNSET
    timings: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class Generated(Answer):
    """The answer of ``/generate`` to one prompt, and each event of its stream; ``index`` counts the outputs there."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


# ---- OpenAI: responses ----------------------------------------------------------------------------------------------


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Answer, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(Answer, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class Response(Answer):
    """The answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    background: bool
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: Any
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    completed_at: int | msgspec.UnsetType | None = msgspec.UNSET
    incomplete_details: IncompleteDetails | msgspec.UnsetType | None = msgspec.UNSET
    temperature: float | msgspec.UnsetType | None = msgspec.UNSET
    top_p: float | msgspec.UnsetType | None = msgspec.UNSET


class ResponseEvent(Answer):
    """An event of the stream of ``/v1/responses``; its type says which fields it has."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
        "response.output_item.added", "response.output_item.done",
        "response.content_part.added", "response.content_part.done",
        "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
    ]  # fmt: skip
    sequence_number: int
    response: Response | msgspec.UnsetType = msgspec.UNSET
    item: OutputMessage | ReasoningItem | FunctionCallItem | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    part: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET


# ---- Anthropic: messages --------------------------------------------------------------------------------------------


class TextBlock(Answer, tag="text"):
    text: str


class ThinkingBlock(Answer, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Answer, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    """``input_tokens`` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Message(Answer):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer):
    """An event of the stream of ``/v1/messages``; its type says which fields it has."""

    type: Literal[
        "message_start", "message_delta", "message_stop", "ping", "error",
        "content_block_start", "content_block_delta", "content_block_stop",
    ]  # fmt: skip
    message: Message | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | msgspec.UnsetType = msgspec.UNSET
    delta: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    usage: MessageUsage | msgspec.UnsetType = msgspec.UNSET
    error: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
