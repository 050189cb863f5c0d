"""The bodies that clients may send, decoded strictly.

Every field is declared here. An unknown field is refused by name, as is a field without effect. All errors of decoding
become a ``RequestError`` that names the field.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from common.errors import ErrorCode, RequestError
from common.sampling_params import MAX_TOP_LOGPROBS

MAX_INT = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_SAMPLES = 128
MAX_BIASES = 300

Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StartLen = Annotated[int, Meta(ge=-1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Salt = Annotated[str, Meta(max_length=1024)]
Rid = Annotated[str, Meta(min_length=1, max_length=200)]
Priority = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
PriorityClass = Annotated[str, Meta(min_length=1, max_length=200)]
DeadlineMs = Annotated[float, Meta(gt=0, le=86_400_000)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
#: A field that works not yet: any value but null is refused.
Unsupported = Annotated[Any, Meta(description="not supported yet")]
Texts = str | list[str]
Prompts = str | list[str | int | list[int]]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body that refuses unknown fields."""


class SamplingFields(_Strict, kw_only=True):
    """Sampling fields of all endpoints; None means the model's default."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Share | None = None
    stop: Texts | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    # vLLM's and SGLang's names for one option: the stop string or token is shown.
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None


class StreamOptions(_Strict, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(SamplingFields, kw_only=True):
    """Fields of both OpenAI endpoints."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    return_token_ids: bool | None = None
    # Baton's own fields, in all endpoints.
    priority: Priority | None = None
    priority_class: PriorityClass | None = None
    deadline_ms: DeadlineMs | None = None
    cache_salt: Salt | None = None
    # Refused unless they ask for nothing; see NO_EFFECT.
    response_format: Any = None
    # Accepted and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Count | None = None  # 0 with echo: prompt log-probabilities only
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class Part(_Strict, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    audio_url: Any = None
    file: Any = None


class ChatMessage(_Strict, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: None = None
    annotations: Any = None


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    # Refused unless they ask for nothing; see NO_EFFECT.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    web_search_options: Unsupported = None
    verbosity: Unsupported = None


class NativeSamplingParams(SamplingFields, kw_only=True):
    """``sampling_params`` of ``POST /generate``, in SGLang's names; ours of the OpenAI endpoints are understood too."""

    max_new_tokens: Count | None = None  # 0: prompt log-probabilities only
    max_tokens: Count | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    # Refused unless they ask for nothing; see NO_EFFECT.
    spaces_between_special_tokens: bool | None = None
    json_schema: Unsupported = None
    regex: Unsupported = None
    ebnf: Unsupported = None
    structural_tag: Unsupported = None
    stop_regex: Any = None
    custom_params: Unsupported = None
    stream_interval: int | None = None


class NativeRequest(_Strict, kw_only=True):
    """``POST /generate``."""

    text: Texts | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSamplingParams | list[NativeSamplingParams] | None = None
    stream: bool | None = None
    rid: Rid | list[Rid] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    model: str | None = None
    # Baton's own fields, in all endpoints.
    priority: Priority | None = None
    priority_class: PriorityClass | None = None
    deadline_ms: DeadlineMs | None = None
    cache_salt: Salt | None = None
    # Refused unless they ask for nothing; see NO_EFFECT.
    token_ids_logprob: Unsupported = None
    return_hidden_states: bool | None = None
    lora_path: Unsupported = None
    input_embeds: Unsupported = None
    image_data: Unsupported = None
    audio_data: Unsupported = None
    video_data: Unsupported = None
    session_params: Unsupported = None
    custom_logit_processor: Unsupported = None
    log_metrics: Any = None
    background: bool | None = None


class TokenizeRequest(_Strict, kw_only=True):
    """``POST /tokenize``: a text, texts, or messages that the chat template renders."""

    model: str | None = None
    prompt: Texts | None = None
    text: Texts | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Strict, kw_only=True):
    """``POST /detokenize``: one list of token ids, or several."""

    model: str | None = None
    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = False


class AbortRequest(_Strict, kw_only=True):
    """``POST /abort_request``."""

    rid: Rid | None = None
    abort_all: bool = False


class PriorityChange(_Strict, kw_only=True):
    """``POST /v1/requests/ID/priority``."""

    priority: Priority | None = None
    priority_class: PriorityClass | None = None


#: Fields that have no effect yet, with the values that are accepted because they ask for nothing.
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_interval": (1,),
    "return_hidden_states": (False,),
    "background": (False,),
    "tool_calls": ([],),
}

Body = TypeVar("Body", bound=msgspec.Struct)


def refuse(message: str, param: str | None, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> RequestError:
    """An error about one field of the body."""
    return RequestError(code, f"{param}: {message}" if param else message, param=param)


def decode(kind: type[Body], body: bytes) -> Body:
    """Decodes a body. Raises RequestError naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from error
    except UnicodeDecodeError as error:
        raise refuse("the body is not valid UTF-8", None) from error
    except RecursionError as error:
        raise refuse("the body is nested too deeply", None) from error


_AT = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_QUOTED_FIELD = re.compile(r"(?:unknown|required) field `([^`]*)`")
_LAST_KEY = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]{0,63})"\s*:\s*[-+]?$')


def _named(message: str) -> RequestError:
    """msgspec's complaint, its ``$.a.b[0]`` turned into a parameter's name."""
    at = _AT.search(message)
    path = re.sub(r"\[\.\.\.\]", "", at.group(1)) if at else ""
    sentence = message[: at.start()] if at else message
    field = _QUOTED_FIELD.search(message)
    if field:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
    return refuse(sentence.replace("`", ""), path or None)


def _malformed(body: bytes, message: str) -> RequestError:
    """The error for broken JSON. It names a field if the fault, such as ``NaN``, directly follows its key."""
    at = re.search(r"\(byte (\d+)\)", message)
    key = _LAST_KEY.search(body[max(0, int(at.group(1)) - 80) : int(at.group(1))]) if at else None
    return refuse(f"the body is not valid JSON: {message}", key.group(1).decode() if key else None)
