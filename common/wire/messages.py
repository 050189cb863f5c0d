"""All messages of the control plane, in the order in which a node and then a request meet them.

A ZMQ message has two frames: a ``Header`` and one of the structs below, both MessagePack, both decoded strictly. Times
are durations in seconds, since two machines have no common clock. The only instants are those of spans and those by
which the gateway estimates how far apart the clocks are.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.cache.page_layout import PageLayout
from common.config.lora import ADAPTER_NAME, adapter_id
from common.config.shared import Role
from common.errors import ErrorCode
from common.finish_reason import Finish
from common.sampling_params import SamplingParams
from common.stage_spans import StageSpan
from common.wire.packed_logprobs import PackedLogprobs

#: Rises with every change of the protocol; ``tests/common/wire/test_messages.py`` detects one. ``Header`` and
#: ``Refused`` never change, so that a peer with another version understands why it is refused.
PROTOCOL_VERSION = 22

Count = Annotated[int, Meta(ge=0)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
MAX_TEXT = 4_096
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
MAX_SENTENCE = 512
Sentence = Annotated[str, Meta(max_length=MAX_SENTENCE)]
ShortText = Annotated[str, Meta(max_length=256)]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
Incarnation = Annotated[str, Meta(min_length=16, max_length=32)]
Coverage = Literal["off", "sampled", "all"]  # which pages travel with a checksum
EndReason = Literal["aborted", "stopped", "finished", "continued"]  # why an attempt ends
CloseReason = Literal["finished", "cancelled", "aborted", "failed", "unknown"]  # why a transfer ends
NumRanks = Annotated[int, Meta(ge=1, le=1_024)]
AdapterName = Annotated[str, Meta(pattern=f"^{ADAPTER_NAME}$")]
AdapterList = Annotated[tuple["Adapter", ...], Meta(max_length=1_024)]
UnloadedAdapters = Annotated[dict[AdapterName, Count], Meta(max_length=1_024)]  # changes that unloaded them, by name
PublicKey = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]  # of CURVE; empty without keys

NixlSettings = Annotated[dict[Id, Sentence], Meta(max_length=128)]

MAX_SECONDS = 1e10
MAX_AMOUNT = 1 << 53
#: An instant or a duration. It is finite, since a sum or a mean that an infinite one enters stays infinite.
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=MAX_SECONDS)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]

#: Numbers of a heartbeat by name. The limits are far above what a node has.
Figures = Annotated[dict[Annotated[str, Meta(max_length=128)], float], Meta(max_length=1_024)]

#: Prefill nodes to which decode nodes connect before a request needs them.
MAX_PREFILL_NODES = 1_024

#: Spans of one message; the limits in ``common.stage_spans`` keep it shorter.
MAX_SPANS = 64


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """First frame of every message.

    Attributes:
        target: incarnation of the receiving process; empty: any process at the address.
    """

    version: int
    sender: Incarnation
    target: Annotated[str, Meta(max_length=32)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base class of all messages."""


# ---- a node joins -------------------------------------------------------------------------------------------------


class LayoutMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layout of a KV page, a ``common.cache.page_layout.PageLayout``."""

    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_kv_heads: Annotated[int, Meta(ge=1, le=65536)]
    head_dim: Annotated[int, Meta(ge=1, le=65536)]
    page_size: Annotated[int, Meta(ge=1, le=65536)]
    dtype: Literal["float32", "bfloat16", "float16", "fp8_e4m3", "int8"]
    value_dim: Annotated[int, Meta(ge=0, le=65536)] = 0  # 0: as ``head_dim``
    is_latent: bool = False
    window: Annotated[int, Meta(ge=0, le=2**31)] = 0
    full_slabs: Annotated[int, Meta(ge=1, le=4096)] = 1
    window_slabs: Annotated[int, Meta(ge=0, le=4096)] = 0

    @classmethod
    def of(cls, layout: PageLayout) -> "LayoutMessage":
        return cls(**dataclasses.asdict(layout))

    def layout(self) -> PageLayout:
        return PageLayout(**msgspec.structs.asdict(self))


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter of a node."""

    name: AdapterName
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # of its content
    path: Text = ""  # from which a gateway had it loaded; empty: the node has had it since its start
    change: Count = 0  # number of the change that loaded or withdrew it; later changes of a name have higher ones
    is_withdrawn: bool = False  # no gateway takes new requests for it, and it is dropped with the last one that has it

    @property
    def id(self) -> str:
        """What requests and caches know it by."""
        return adapter_id(self.name, self.digest)


class Invite(Message, frozen=True, tag="invite"):
    """gateway -> node: register with this gateway. Sent again and again to nodes that the gateway lists."""

    role: Role  # that the gateway expects of the node
    address: Annotated[str, Meta(min_length=1, max_length=256)]  # "host:port" of the gateway's control socket


class Register(Message, frozen=True, tag="register"):
    """node -> gateway: registers the node. Sent again after every reconnect."""

    role: Role
    name: Id
    model: Id
    digest: Id  # hash of the model's configuration and of the names, types and shapes of its tensors
    weight_version: Id  # --weight-version, or a hash of the weight files
    vocab_size: Annotated[int, Meta(ge=1)]
    context_length: Annotated[int, Meta(ge=1)]
    eos_token_ids: tuple[int, ...]
    generation: dict[str, float]  # sampling defaults of the model, by names in SamplingParams
    layout: LayoutMessage
    num_pages: Annotated[int, Meta(ge=1)]
    max_running: Annotated[int, Meta(ge=1)]
    max_queued: Count
    transports: tuple[str, ...]
    address: Text  # "host:port" of the control socket to which nodes connect that receive pages; empty: none
    pid: Count
    device: Id
    http_address: Text = ""  # "host:port" of the node's own /health and /metrics; empty: it serves none
    tokenizer_digest: ShortText = ""  # sha256 of tokenizer.json; empty: the node has none and follows no grammar
    public_key: PublicKey = ""  # with which decode nodes verify that they have reached this prefill node
    num_role_changes: Count = 0  # of this process
    previous: Annotated[str, Meta(max_length=32)] = ""  # incarnation of this process in its last role, which has ended
    fixed_role: Sentence = ""  # why the node cannot change its role; empty: it can
    share: Count | None = None  # as in ``Heartbeat``
    num_ranks: NumRanks = 1  # processes among which the node divides its model
    adapters: AdapterList = ()
    longest_tokens: Count = 0  # prompt and output of the longest request that fits; 0: as many as the pool has
    nixl: NixlSettings = {}  # of a node that has NIXL: its back-end, and the variables of UCX by their names
    unloaded: UnloadedAdapters = {}
    most_held_tokens: Count = 0  # of the pool that one request holds, however long it gets; 0: all of its tokens
    is_draining: bool = False  # as after ``Deregister``


class Registered(Message, frozen=True, tag="registered"):
    """gateway -> node: the node is registered and may receive requests."""

    starts: Annotated[int, Meta(ge=1)]  # number of starts of a node of this name that the gateway has seen
    heartbeat_s: PositiveSeconds
    sent_at: Seconds = 0.0  # by the gateway's clock; 0: unknown


class Refused(Message, frozen=True, tag="refused"):
    """gateway -> node, prefill -> decode: the receiver cannot join or stay. Final for this start or this epoch."""

    reason: Text
    epoch: Count = 0  # prefill -> decode: epoch of the connection that is refused or ended


class Unknown(Message, frozen=True, tag="unknown"):
    """gateway -> node: the gateway has no such node (it restarted, or counted the node as lost). Register again."""


class Ping(Message, frozen=True, tag="ping"):
    """Any process -> any process: probes whether the connection is open. Needs no answer."""


class NodeCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What work takes on a node at present, as measured there; 0: not measured yet."""

    step_s: Seconds = 0.0  # a step that computes no prompt
    prompt_token_s: Seconds = 0.0  # what a prompt token adds to a step
    transfer_bytes_per_s: Amount = 0.0  # pages to decode nodes, while any are under way


class ClientLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Client load of a gateway for one model, per second: new requests and a share of the waiting ones."""

    requests: Amount = 0.0
    prompt_tokens: Amount = 0.0  # that are not cached
    prompt_squares: Amount = 0.0  # of the numbers of such tokens of each request
    output_tokens: Amount = 0.0


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """node -> gateway, every ``heartbeat_s`` seconds: the state of the node."""

    num_waiting: Count
    num_running: Count
    num_free_pages: Count
    num_cached_pages: Count
    num_quarantined_pages: Count
    counters: Figures  # totals since the process began, by name; they never fall
    gauges: Figures = {}  # present values, by name
    sent_at: Seconds = 0.0  # by the node's clock; 0: unknown
    gateway_sent_at: Seconds = 0.0  # ``sent_at`` of the last ``Registered`` or ``HeartbeatAck``; 0: none since the last
    received_at: Seconds = 0.0  # when the node received that, by its own clock
    share: Count | None = None  # requests that this gateway may have here at once; None: as many as the node takes
    costs: NodeCosts = NodeCosts()
    other_load: ClientLoad = ClientLoad()  # of the node's other gateways, together


class HeartbeatAck(Message, frozen=True, tag="heartbeat_ack"):
    """gateway -> node: answer to ``Heartbeat``."""

    sent_at: Seconds  # by the gateway's clock
    demand: Count = 0  # outputs of the node's model that the gateway has in flight or waiting
    load: ClientLoad = ClientLoad()


class OtherLoad(Message, frozen=True, tag="other_load"):
    """node -> gateway, soon after a change: what requests of its other gateways cost a node that has several."""

    num_to_compute: Count  # tokens of these requests that are not in pages yet
    num_to_hold: Count  # tokens of prompts and expected outputs


class PairState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peer of a pair, and the transport between the two."""

    peer: Id
    incarnation: Incarnation
    transport: Id
    why: Sentence  # why this transport was chosen
    problem: Sentence = ""  # why the pair cannot transfer pages now; empty: it can


class Pairs(Message, frozen=True, tag="pairs"):
    """node -> gateway, whenever a pair has changed: all pairs of the node, also those that cannot transfer pages."""

    pairs: Annotated[tuple[PairState, ...], Meta(max_length=1_024)]


class Flush(Message, frozen=True, tag="flush"):
    """gateway -> node: evict every cached page that is not in use."""

    number: Count = 0  # identifies the question; the answer has the same number


class Flushed(Message, frozen=True, tag="flushed"):
    """node -> gateway: answer to ``Flush``, with the number of evicted pages."""

    num_pages: Count
    number: Count = 0


class GetDecisions(Message, frozen=True, tag="get_decisions"):
    """gateway -> node: asks for the latest scheduling decisions and their reasons."""

    limit: Annotated[int, Meta(ge=1, le=10_000)]
    number: Count = 0


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision about a request, or about the node if ``rid`` is empty."""

    ago_s: Seconds
    rid: Annotated[str, Meta(max_length=256)]
    action: Id
    reason: Text


class Decisions(Message, frozen=True, tag="decisions"):
    """node -> gateway: answer to ``GetDecisions``, newest decision last."""

    decisions: tuple[Decision, ...]
    number: Count = 0


class StartProfile(Message, frozen=True, tag="start_profile"):
    """gateway -> node: record the next steps with torch's profiler."""

    num_steps: Annotated[int, Meta(ge=1, le=1_000)] = 100
    activities: Annotated[tuple[Literal["CPU", "GPU"], ...], Meta(min_length=1, max_length=2)] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    number: Count = 0


class StopProfile(Message, frozen=True, tag="stop_profile"):
    """gateway -> node: end the profile, and answer once its file is written."""

    number: Count = 0


class ProfileAnswer(Message, frozen=True, tag="profile_answer"):
    """node -> gateway: answer to ``StartProfile`` and ``StopProfile``."""

    file: Text = ""  # of the trace, on the node's machine
    num_steps: Count = 0  # recorded; 0 in an answer to ``StartProfile``
    error: Sentence = ""  # why nothing was started or written
    number: Count = 0


class LoadAdapter(Message, frozen=True, tag="load_adapter"):
    """gateway -> node: load a LoRA adapter from a folder below ``--lora-dir`` of the node, and serve it."""

    name: AdapterName
    path: Text
    change: Count
    number: Count = 0


class UnloadAdapter(Message, frozen=True, tag="unload_adapter"):
    """gateway -> node: withdraw an adapter: tell every gateway, and drop it once each has sent ``AdapterUnused``."""

    name: AdapterName
    change: Count
    number: Count = 0


class AdapterUnused(Message, frozen=True, tag="adapter_unused"):
    """gateway -> node: no request of this gateway has the adapter, which is withdrawn, and none will have it."""

    adapter: ShortText  # ``Adapter.id``


class Adapters(Message, frozen=True, tag="adapters"):
    """node -> gateway, after each change: all adapters of the node; and the answer to the gateway that asked for it."""

    adapters: AdapterList
    unloaded: UnloadedAdapters = {}
    error: Sentence = ""  # why nothing has changed
    number: Count = 0  # of the question, to the gateway that asked


class Deregister(Message, frozen=True, tag="deregister"):
    """node -> gateway: the node takes no more requests, finishes or moves those it has, and then leaves its role."""

    is_empty: bool = False  # it is done with all requests; the decode nodes have every page that they needed from it


class PrefillNodes(Message, frozen=True, tag="prefill_nodes"):
    """gateway -> decode node, whenever they change: the prefill nodes to connect to before the first request comes."""

    nodes: Annotated[tuple["Peer", ...], Meta(max_length=MAX_PREFILL_NODES)]  # requests may name others


class Drain(Message, frozen=True, tag="drain"):
    """gateway -> node: drain as after SIGTERM, and stop. The node answers ``Done``, and then sends ``Deregister``."""

    timeout_s: Seconds  # requests that are left then end, and continue elsewhere
    number: Count = 0


class ChangeRole(Message, frozen=True, tag="change_role"):
    """gateway -> node: drain, keep model and cache, and register again in this role. The node answers ``Done``."""

    role: Role
    timeout_s: Seconds
    number: Count = 0


class Done(Message, frozen=True, tag="done"):
    """node -> gateway: the order with this number is accepted, or refused with an error."""

    error: Sentence = ""
    number: Count = 0


# ---- a request, at both nodes ---------------------------------------------------------------------------------------


class RequestMessage(Message, frozen=True, omit_defaults=True):
    """Base class of the messages about one attempt at a request.

    Fields that have their default values are not sent, which shortens a token's message by a third.
    """

    rid: Id
    attempt: Count


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of a pair, in a specific start."""

    name: Id
    incarnation: Incarnation
    address: Text
    public_key: PublicKey = ""  # of a prefill node
    num_ranks: NumRanks = 1  # among which the node divides its KV heads


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another sample of the same prompt: a request of its own, equal in all but this."""

    rid: Id
    attempt: Count
    seed: Annotated[int, Meta(ge=0)]
    key: ShortText = ""


class Generate(RequestMessage, frozen=True, tag="generate"):
    """gateway -> both nodes of a pair, or one node alone: one attempt at a request, and at samples of it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    prefill: Peer | None  # None: the decode node computes the prompt
    decode: Peer | None  # None: the prefill node makes the only token
    timeout_s: PositiveSeconds  # seconds until the request's deadline
    cache_salt: Text = ""  # stands for the adapter too: requests share cached pages only if it is equal
    adapter: ShortText = ""  # ``Adapter.id``; empty: the model itself
    priority: int = 0  # higher is more urgent
    priority_class: ShortText = ""
    tenant: ShortText = ""
    expected_output: Count = 0  # predicted number of output tokens; 0: unknown
    waited_s: Seconds = 0.0  # seconds since the request reached the gateway
    slo_ttft_s: Seconds = 0.0  # objective for the first token, from then on; 0: none
    slo_itl_s: Seconds = 0.0  # objective between two tokens; 0: none
    others: Annotated[tuple[Sample, ...], Meta(max_length=1_024)] = ()  # none with ``output``
    key: ShortText = ""  # digest of the client's key, with which another gateway may ask for it; empty without one
    output: tuple[Count, ...] = ()  # of earlier attempts; this one continues after it, and sends no token of it again

    def __post_init__(self) -> None:
        """Raises ValueError: samples of one prompt have outputs of their own."""
        if self.output and self.others:
            raise ValueError("a request that continues an output has no other samples")

    def samples(self) -> Iterator["Generate"]:
        """This request alone, and each other sample as a request of its own."""
        yield msgspec.structs.replace(self, others=()) if self.others else self
        for other in self.others:
            sampling = self.sampling._replace(seed=other.seed)
            own = {"rid": other.rid, "attempt": other.attempt, "key": other.key, "sampling": sampling}
            yield msgspec.structs.replace(self, **own, others=())


class Abort(RequestMessage, frozen=True, tag="abort"):
    """gateway -> both nodes: end this attempt, since the client left, has all it needs, or the other node failed."""

    #: ``finished``: the prefill node has sampled the last token, and counts the request. ``stopped``: the gateway has
    #: found a stop string, and the decode node counts the request as one that has stopped. ``continued``: the request
    #: has not ended, and another attempt follows.
    reason: EndReason = "aborted"


class Reprioritize(RequestMessage, frozen=True, tag="reprioritize"):
    """gateway -> both nodes: changes the priority, and perhaps the class, of a request.

    A decode node passes it on, as of the transfer, to the prefill node that computes the request again (``Resume``).
    """

    priority: int
    priority_class: ShortText | None = None  # None: unchanged


class SetPaused(RequestMessage, frozen=True, tag="set_paused"):
    """gateway -> decode node: pause the request while its client is slow to read, or let it go on."""

    is_paused: bool


class Move(RequestMessage, frozen=True, tag="move"):
    """gateway -> decode node: stop this attempt, keep its pages, and send them to another decode node.

    The node sends the tokens that it still has, and then ``Moved``; or ``Failed`` with ``SHUTTING_DOWN`` if it has no
    pages to send. The pages travel as those of attempt ``new_attempt``, for which the other decode node names this
    node as its prefill node.
    """

    new_attempt: Count
    decode: Peer


class Moved(RequestMessage, frozen=True, tag="moved"):
    """node -> gateway: the attempt has stopped after ``num_output`` tokens, and its pages wait for the other node."""

    num_output: Count


class Tokens(RequestMessage, frozen=True, gc=False, tag="tokens"):
    """node -> gateway: output tokens from ``index`` on. The prefill node sends token 0, the decode node the rest."""

    index: Count
    tokens: tuple[int, ...]
    logprobs: tuple[PackedLogprobs, ...] = ()  # of each of these tokens, or of none
    finish: Finish = ""  # not empty: the last of these tokens ends the output
    cached_tokens: Count = 0  # with index 0: prompt tokens that the node had cached
    prompt_logprobs: tuple[PackedLogprobs, ...] = ()  # with index 0: from token ``prompt_logprobs_from`` on


class Spans(RequestMessage, frozen=True, tag="spans"):
    """node -> gateway: stages of the attempt that are over on this node.

    A prefill node sends them before the first token, a decode node before the second and before the last. Each sends
    the rest if the attempt fails or is aborted.
    """

    spans: Annotated[tuple[StageSpan, ...], Meta(max_length=MAX_SPANS)]  # by the node's clock

    def __post_init__(self) -> None:
        """Raises ValueError: numbers that no clock and no count can have. ``StageSpan`` cannot say it: it needs no
        msgspec."""
        for _, start_s, duration_s, amount in self.spans:
            if not (-MAX_SECONDS <= start_s <= MAX_SECONDS >= duration_s >= 0.0 and 0 <= amount <= MAX_AMOUNT):
                raise ValueError("a span has a number that no clock and no count can have")


class Failed(RequestMessage, frozen=True, tag="failed"):
    """node -> gateway: the attempt failed on this node."""

    code: ErrorCode
    message: Text


class Find(Message, frozen=True, tag="find"):
    """gateway -> node: a client asks again for requests with these keys, which another gateway may have sent.

    The node ends them if they still run, and answers with what it has of their outputs.
    """

    keys: Annotated[tuple[ShortText, ...], Meta(max_length=1_024)]
    number: Count = 0


class KeptOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The output so far of a request with a key."""

    key: ShortText
    tokens: tuple[Count, ...]  # from the first on; empty if they cannot be continued
    finish: Finish = ""


class Found(Message, frozen=True, tag="found"):
    """node -> gateway: answer to ``Find``, with the requests that the node knows."""

    outputs: Annotated[tuple[KeptOutput, ...], Meta(max_length=1_024)]
    number: Count = 0


# ---- a decode node and a prefill node form a pair -------------------------------------------------------------------


class Connect(Message, frozen=True, tag="connect"):
    """decode -> prefill: describes the KV pool of the decode node and opens a new epoch between the two nodes."""

    name: Id
    digest: Id  # digest and weight version of the model
    epoch: Count
    layout: LayoutMessage  # of pages with the KV heads of all ranks
    num_pages: Annotated[int, Meta(ge=1)]
    transport: Id
    endpoint: Annotated[str, Meta(max_length=65536)]  # of the transport, which alone can parse it
    checksums: Coverage = "off"  # which pages come with one, at least
    resumes: bool = False  # the last connection broke, and its transfers go on under this epoch
    num_ranks: NumRanks = 1  # of the decode node, each with its KV heads of every page
    num_peer_ranks: NumRanks = 1  # of the prefill node, as the decode node knows it
    beside: Count = 0  # epoch of the connection that goes on until this offer is taken up; 0: none goes on


class Connected(Message, frozen=True, tag="connected"):
    """prefill -> decode: the pool is attached; grants of this epoch are accepted."""

    epoch: Count
    transport: Id
    num_token_ranges: Annotated[int, Meta(ge=1, le=65536)] = 1  # in which each page comes
    why: Sentence = ""  # why this transport was chosen


class OfferBeside(Message, frozen=True, tag="offer_beside"):
    """prefill -> decode: a better transport may work again; offer the pool beside the connection, which goes on."""

    epoch: Count  # of the connection


class AttachFailed(Message, frozen=True, tag="attach_failed"):
    """prefill -> decode: the pool cannot be attached, or not any more, for a cause that may pass.

    Nothing is written into it under this epoch. The decode node connects again.
    """

    epoch: Count
    reason: Text


# ---- a transfer -----------------------------------------------------------------------------------------------------


class Grant(RequestMessage, frozen=True, tag="grant"):
    """decode -> prefill: write page ``first + i`` of the prompt into page ``pages[i]`` of the decode node.

    The decode node has, or does not need, prompt pages that it never grants.
    """

    epoch: Count
    first: Count
    pages: tuple[Count, ...]


class PagesWritten(RequestMessage, frozen=True, tag="pages_written"):
    """prefill -> decode: one unit of these pages of the prompt is written."""

    epoch: Count
    indices: tuple[Count, ...]  # of the pages in the prompt
    unit: Count = 0  # number of the unit in each page: see ``kv_transfer.page_mapping``
    checksums: tuple[Checksum, ...] = ()  # of each unit at the prefill node; all or none
    num_resends: Count = 0  # number of times that these units were written again


class Resend(RequestMessage, frozen=True, tag="resend"):
    """decode -> prefill: this unit of these pages has a wrong checksum; write it again."""

    epoch: Count
    indices: tuple[Count, ...]
    unit: Count
    number: Annotated[int, Meta(ge=1)]  # number of resends, this one included, so that a repeated message has no effect


class PrefillDone(RequestMessage, frozen=True, tag="prefill_done"):
    """prefill -> decode: the prompt is computed, and the first token sampled. May arrive before the last pages."""

    length: Annotated[int, Meta(ge=1)]  # of what is written or being written: see ``PageAllocator.transfer_length``
    token: Count  # the first output token


class TransferAck(RequestMessage, frozen=True, tag="transfer_ack"):
    """decode -> prefill: all pages have arrived; the prefill node may release them."""


#: Added to the attempt of a transfer each time that a prompt is computed and sent again, so that keys stay unique.
RESUMED = 1 << 32


class Resume(RequestMessage, frozen=True, tag="resume"):
    """decode -> prefill: compute the tokens of a retracted request again, like a prompt.

    The transfer of its pages has an attempt number of its own: that of the request plus a multiple of ``RESUMED``. The
    gateway does not see it.

    It has no objectives: its first token has been sent, and after the gap that it makes it would be late between two
    tokens, so that ``edf`` would put it last.
    """

    prompt: tuple[Count, ...]
    timeout_s: PositiveSeconds
    cache_salt: Text = ""
    adapter: ShortText = ""
    priority: int = 0
    priority_class: ShortText = ""
    tenant: ShortText = ""
    waited_s: Seconds = 0.0


class AbortTransfer(RequestMessage, frozen=True, tag="abort_transfer"):
    """decode -> prefill: stop writing for this transfer, and confirm with ``Closed``."""


class Closed(RequestMessage, frozen=True, tag="closed"):
    """prefill -> decode: no write of this transfer is in flight or will start. This is the writer's fence."""

    reason: CloseReason
    message: Text = ""
    #: Of a failure. Both nodes report it alike, but for those that are of the prefill node alone: ``SHUTTING_DOWN``,
    #: ``INTERNAL`` and ``QUEUE_FULL``. ``TAKEN_OVER``: the request was ``aborted`` here since another attempt follows.
    code: ErrorCode = ErrorCode.TRANSFER_FAILED


FromNode = (
    Register
    | Heartbeat
    | OtherLoad
    | Pairs
    | Deregister
    | Flushed
    | Decisions
    | ProfileAnswer
    | Adapters
    | Done
    | Tokens
    | Spans
    | Moved
    | Failed
    | Found
    | Ping
)
FromGateway = (
    Registered
    | HeartbeatAck
    | Refused
    | Unknown
    | PrefillNodes
    | Drain
    | ChangeRole
    | Generate
    | Abort
    | Reprioritize
    | SetPaused
    | Move
    | Find
    | Flush
    | GetDecisions
    | StartProfile
    | StopProfile
    | LoadAdapter
    | UnloadAdapter
    | AdapterUnused
    | Ping
)
FromDecode = Connect | Grant | Resend | TransferAck | AbortTransfer | Resume | Reprioritize | Ping
#: What may come to the socket on which a node listens.
ToListeningNode = FromDecode | Invite
FromPrefill = Connected | OfferBeside | AttachFailed | Refused | PagesWritten | PrefillDone | Closed | Ping
