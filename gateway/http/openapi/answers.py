"""Shapes of errors and of the answers of all endpoints that generate nothing; see ``generated`` for the others."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.wire.messages import Decision, Heartbeat, PairState, Register
from gateway.http.openapi.generated import Answer
from gateway.metrics.live import LiveError, LiveSample
from gateway.workers.registry import ServingLimits
from gateway.workers.routing.pair_health import BreakerState


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
    """``max_model_len`` is null until nodes can serve the model. A LoRA adapter's ``parent`` is its model.

    The last six fields are Anthropic's, and so are the last three of the list.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    root: str
    parent: str | None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


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


class TokenizerInfo(Answer):
    """Texts of the special tokens, and the chat template; null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


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


class ProfiledNode(Answer):
    """A trace on the machine of a node, and the steps in it; ``error`` says why there is none."""

    name: str
    role: str
    model: str
    file: str
    num_steps: int
    error: str


class Profile(Answer):
    nodes: list[ProfiledNode]


class AdapterNode(msgspec.Struct):
    """A node that was asked to load or unload a LoRA adapter; ``error`` says why it has not."""

    name: str
    role: str
    error: str


class AdapterChanged(Answer):
    lora_name: str
    nodes: list[AdapterNode]


class FailedPair(msgspec.Struct):
    """A pair of nodes whose transfers have failed lately: its breaker's state, and when one request may probe it."""

    peer: str
    state: BreakerState
    num_failures: int
    probe_in_s: float | None


class Worker(msgspec.Struct, kw_only=True):
    """A node, with its registration and its last heartbeat. It serves its own metrics at ``http_address``."""

    name: str
    role: str
    model: str
    http_address: str
    incarnation: str
    starts: int
    revision: str
    num_role_changes: int
    is_draining: bool
    is_reserved: bool
    num_requests: int
    seen_s_ago: float
    load_tokens: float
    register: Register
    heartbeat: Heartbeat | None
    num_pairs: int
    pairs: list[PairState]
    failed_pairs: list[FailedPair]


class Draining(Answer):
    """The node takes no new requests, and stops when ``num_requests`` have ended or moved, or after ``timeout_s``."""

    worker: str
    is_draining: bool
    num_requests: int
    timeout_s: float


class WorkerList(Answer):
    """Nodes, ``limit`` of ``num_workers``. Pairs that work are left out if the listed nodes have very many."""

    workers: list[Worker]
    num_workers: int
    num_in_flight: int
    num_waiting: int
    model: str
    models: list[str]
    is_ready: bool


class RoleChanged(Answer):
    """The node in its new role, after ``seconds``. Its name is the same, its incarnation is not."""

    name: str
    role: str
    incarnation: str
    num_role_changes: int
    seconds: float


class ScrapeTarget(msgspec.Struct):
    """The address of a node's own ``/metrics``, as Prometheus' HTTP service discovery expects it."""

    targets: list[str]
    labels: dict[str, str]


class DecisionList(Answer):
    worker: str
    decisions: Sequence[Decision]


class LiveQueue(Answer):
    """Outputs of one priority class that wait in the gateway; ``oldest_wait_s`` is null if none waits."""

    model: str
    priority_class: str
    policy: str
    waiting: int
    oldest_wait_s: float | None


class LiveModel(Answer):
    name: str
    is_ready: bool
    has_chat_template: bool
    context_length: int | None


class Live(Answer):
    """The last minute: samples every ``interval_s`` seconds, oldest first, of all models together.

    The percentiles of a sample cover the last ``window_s`` seconds.
    """

    version: str
    uptime_s: float
    interval_s: float
    window_s: int
    samples: list[LiveSample]
    queues: list[LiveQueue]
    errors: list[LiveError]
    models: list[LiveModel]


class MeasuredLoad(Answer):
    """What clients ask of all gateways: requests, their prompt tokens that are not cached, and their output tokens."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


class AdvisedRole(Answer):
    """``advised`` is the number of nodes to have, and ``needed`` what the load needs now, which may be less.

    ``work`` is how many nodes it would keep busy all the time, and ``busy_share`` how much of theirs the nodes are.
    """

    role: str
    nodes: int
    advised: int
    needed: int
    work: float
    busy_share: float
    reason: str


class AdvisedModel(Answer):
    """The advice for one model: its load over the last ``window_s`` seconds, and the objectives that requests have."""

    model: str
    window_s: float
    load: MeasuredLoad
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    roles: list[AdvisedRole]


class Advice(Answer):
    """``hold_s`` is ``--advice-hold``, and ``utilization`` is ``--advice-utilization``."""

    hold_s: float
    utilization: float
    models: list[AdvisedModel]


class RequestSummary(Answer):
    """An output that runs or has ended; ``started_at`` is in seconds since 1970."""

    rid: str
    model: str
    status: str
    started_at: float
    duration_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_attempts: int
    prefill: str | None
    decode: str | None


class RequestList(Answer):
    requests: list[RequestSummary]


class NodeClock(Answer):
    """By how much the clock of a node was ahead, and the largest error of that; null if it is unknown."""

    offset_s: float
    error_s: float | None


class RequestSpan(Answer):
    """``process`` is "gateway" or the name of a node; ``start_s`` counts from the start of the request."""

    name: str
    process: str
    start_s: float
    duration_s: float
    attributes: dict[str, Any]


class RequestTimeline(Answer):
    rid: str
    trace_id: str
    started_at: float
    duration_s: float
    status: str
    num_attempts: int
    prefill: str | None
    decode: str | None
    clocks: dict[str, NodeClock]
    spans: list[RequestSpan]


class ChromeTrace(Answer):
    """A trace in Chrome's JSON format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str


class Health(Answer):
    status: Literal["ok"]


class Ready(Answer):
    """``models`` says which models are ready."""

    status: Literal["ready"]
    models: dict[str, bool]


class ModelState(Answer):
    """``limits`` are those of one request; null until nodes can serve the model."""

    is_ready: bool
    limits: ServingLimits | None


class ServerInfo(Answer):
    """``model`` is the default model, and ``limits`` are its own."""

    version: str
    model: str
    uptime_s: float
    num_in_flight: int
    is_ready: bool
    control_address: str
    limits: ServingLimits | None
    models: dict[str, ModelState]
    config: dict[str, Any]


class ResponseDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(Answer):
    """The ids are those of the first and the last item of ``data``."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class TokenCount(Answer):
    input_tokens: int


class InputTokenCount(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int
