"""Bodies of OpenAI's completions and chat completions, in OpenAI's, vLLM's and SGLang's names."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.http.protocol.decoding import Extensible, Strict
from gateway.http.protocol.fields import (
    END,
    MAX_INT,
    Count,
    NotEmpty,
    OpenAIFields,
    Positive,
    Prompts,
    Refused,
    TopLogprobs,
    supports,
)

MAX_TOOLS = 128

MAX_FUNCTION_NAME = 128

FunctionName = Annotated[str, Meta(pattern=f"^[A-Za-z0-9_.-]{{1,{MAX_FUNCTION_NAME}}}{END}")]
CallId = Annotated[str, Meta(max_length=256)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Extensible, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# ---- structured outputs ----------------------------------------------------------------------------------------------


class JsonSchemaField(Extensible, kw_only=True):
    """``json_schema`` of ``response_format``."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Extensible, kw_only=True):
    """``response_format``.

    ``structures`` and ``triggers``, or ``format``, belong to structural tags. ``schema``, as other servers name it, or
    ``value``, as Hugging Face's client does, is the schema of a ``json_object``.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaField | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None
    schema: dict[str, Any] | bool | None = None
    value: dict[str, Any] | bool | None = None


class StructuredOutputs(Strict, kw_only=True):
    """``structured_outputs``, as vLLM's: exactly one of the fields. JSON values may also be JSON text."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


# ---- both endpoints --------------------------------------------------------------------------------------------------


class OpenAIRequest(OpenAIFields, kw_only=True):
    """Fields of completions and chat completions."""

    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    # Structured outputs: OpenAI's and vLLM's field, vLLM's older fields, and SGLang's.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Count | None = None  # 0 with echo: prompt log-probabilities only
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None


# ---- chat ------------------------------------------------------------------------------------------------------------


class Part(Extensible, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: Annotated[str, supports("text", "refusal")]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Extensible, kw_only=True):
    """``function`` of a tool call; the arguments are JSON text, as the answer gave them, or an object."""

    name: FunctionName
    arguments: str | dict[str, Any] | None = "{}"


class ToolCall(Extensible, kw_only=True):
    """A call of an earlier answer, in an assistant message."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Extensible, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    # Assistant messages: what an earlier answer contained. ``reasoning`` is another name of ``reasoning_content``.
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Tool messages: the call whose result this is.
    tool_call_id: CallId | None = None
    function_call: Refused = None
    audio: Refused = None


class FunctionField(Extensible, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(Extensible, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionField


class ChosenFunction(Extensible, kw_only=True):
    name: FunctionName


class NamedTool(Extensible, kw_only=True):
    type: Literal["function"] = "function"
    function: ChosenFunction


class AllowedTools(Extensible, kw_only=True):
    """The only tools of which the model knows in this request, and whether it must call one of them."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)]


class ToolChoiceField(Extensible, kw_only=True):
    """``tool_choice`` of one function, which the model must call, or of some of the tools."""

    type: Literal["function", "allowed_tools"] = "function"
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class ThinkingSwitch(Extensible, kw_only=True):
    """``thinking`` of a chat, as in the APIs of DeepSeek, Kimi and GLM."""

    type: Literal["enabled", "disabled"]


Tools = Annotated[list[ToolField], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ToolChoiceField


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """``POST /v1/chat/completions``. The other chat endpoints make one of their bodies."""

    messages: Annotated[list[ChatMessage], NotEmpty]
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Reasoning. ``thinking_token_budget`` is vLLM's name of ``thinking_budget``.
    reasoning_effort: ReasoningEffort | None = None
    thinking: ThinkingSwitch | None = None
    thinking_budget: Count | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    # The chat template.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
