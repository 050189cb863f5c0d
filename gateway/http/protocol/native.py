"""Bodies of SGLang's ``/generate``, ``/tokenize``, ``/detokenize`` and ``/abort_request``, and of our own endpoints."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from common.config.lora import ADAPTER_NAME
from common.config.shared import Role
from gateway.http.protocol.decoding import Strict
from gateway.http.protocol.fields import (
    END,
    Count,
    DeadlineMs,
    Priority,
    PriorityClass,
    Rid,
    Salt,
    SamplingFields,
    Seed,
    StartLen,
    Texts,
    TokenId,
    TopLogprobs,
)
from gateway.http.protocol.openai import ChatMessage, Tools


class NativeSamplingParams(SamplingFields, kw_only=True):
    """``sampling_params`` of ``POST /generate``, in SGLang's names; ours of the OpenAI endpoints are understood too."""

    max_new_tokens: Count | None = None  # 0: prompt log-probabilities only
    max_tokens: Count | None = None
    min_new_tokens: Count | None = None
    min_tokens: Count | None = None
    sampling_seed: Seed | None = None
    # Structured outputs, at most one; JSON values are JSON text or objects.
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class NativeRequest(Strict, kw_only=True):
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
    slo_ttft_ms: DeadlineMs | None = None
    slo_itl_ms: DeadlineMs | None = None
    cache_salt: Salt | None = None


class TokenizeRequest(Strict, kw_only=True):
    """``POST /tokenize``: a text, texts, or messages that the chat template renders."""

    model: str | None = None
    prompt: Texts | None = None
    text: Texts | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # by default to texts, and not to messages
    # With messages, as in chat completions.
    tools: Tools | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict, kw_only=True):
    """``POST /detokenize``: one list of token ids, or several."""

    model: str | None = None
    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = False


class AbortRequest(Strict, kw_only=True):
    """``POST /abort_request``."""

    rid: Rid | None = None
    abort_all: bool = False


class ProfileRequest(Strict, kw_only=True):
    """``POST /start_profile``, in SGLang's names."""

    num_steps: Annotated[int, Meta(ge=1, le=1_000)] = 100
    activities: Annotated[list[Literal["CPU", "GPU"]], Meta(min_length=1, max_length=2)] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    output_dir: str | None = None  # refused: a node writes to its --profile-dir only


class DrainRequest(Strict, kw_only=True):
    """``POST /v1/workers/{name}/drain``."""

    timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0  # for the requests that the node has


class RoleChange(Strict, kw_only=True):
    """``POST /v1/workers/{name}/role``."""

    role: Role
    timeout_s: Annotated[float, Meta(ge=0, le=3_600)] = 30.0  # for the requests that the node has
    force: bool = False  # the last node of its role may change, too


class LoadLoraRequest(Strict, kw_only=True):
    """``POST /v1/load_lora_adapter``, in vLLM's names."""

    lora_name: Annotated[str, Meta(pattern=f"^{ADAPTER_NAME}{END}")]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]  # below --lora-dir of each node
    base_model_name: str | None = None  # by default the first served model


class UnloadLoraRequest(Strict, kw_only=True):
    """``POST /v1/unload_lora_adapter``, in vLLM's names."""

    lora_name: Annotated[str, Meta(pattern=f"^{ADAPTER_NAME}{END}")]


class PriorityChange(Strict, kw_only=True):
    """``POST /v1/requests/ID/priority``."""

    priority: Priority | None = None
    priority_class: PriorityClass | None = None
