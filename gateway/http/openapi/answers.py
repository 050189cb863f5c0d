"""Shapes of errors and of the answers of all endpoints that generate nothing; see ``generated`` for the others."""

from typing import Any, Literal

import msgspec

from gateway.http.openapi.generated import Answer


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str


class Error(Answer):
    """An error, as OpenAI's; ``param`` is the field that is wrong."""

    error: ErrorDetails


class AnthropicErrorDetails(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    """An error, as Anthropic's."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class Model(Answer):
    """``max_model_len`` is null until nodes can serve the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class ModelInfo(Answer):
    """Both paths are the name of the default model."""

    model_path: str
    tokenizer_path: str
    is_generation: bool


class Tokenized(Answer):
    """Token ids and their number; lists of them for a list of texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class Detokenized(Answer):
    """The text, under two names; a list of texts for several lists of token ids."""

    text: str | list[str]
    prompt: str | list[str]


class Aborted(Answer):
    aborted: int


class PriorityChanged(Answer):
    changed: int


class FlushedNode(Answer):
    name: str
    model: str
    num_pages: int


class CacheFlushed(Answer):
    num_pages: int
    nodes: list[FlushedNode]


class Worker(msgspec.Struct, kw_only=True):
    """A node, with its registration and its last heartbeat. It serves its own metrics at ``http_address``."""

    name: str
    role: str
    model: str
    http_address: str
    incarnation: str
    starts: int
    is_leaving: bool
    seen_s_ago: float
    load_tokens: float
    register: dict[str, Any]
    heartbeat: dict[str, Any] | None
    pairs: Any


class WorkerList(Answer):
    workers: list[Worker]
    num_in_flight: int
    num_waiting: int
    model: str
    models: list[str]
    is_ready: bool


class ScrapeTarget(msgspec.Struct):
    """The address of a node's own ``/metrics``, as Prometheus' HTTP service discovery expects it."""

    targets: list[str]
    labels: dict[str, str]


class WorkerDecision(Answer):
    """A decision of a scheduler, about one request, or about the node if ``rid`` is empty."""

    ago_s: float
    rid: str
    action: str
    reason: str


class DecisionList(Answer):
    worker: str
    decisions: list[WorkerDecision]


class Health(Answer):
    status: Literal["ok"]


class Ready(Answer):
    """``models`` says which models are ready."""

    status: Literal["ready"]
    models: dict[str, bool]


class ServerInfo(Answer):
    version: str
    model: str
    uptime_s: float
    num_in_flight: int
    is_ready: bool
    control_address: str
    limits: dict[str, Any] | None
    models: dict[str, dict[str, Any]]
    config: dict[str, Any]


class ResponseDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class TokenCount(Answer):
    input_tokens: int
