"""Every message of the control plane, in the order in which a node and then a request meet them.

A ZMQ message is two frames: a ``Header`` and one of the structs below, both MessagePack, both decoded strictly. Nothing
here is interpreted; what a message means is told where it is handled. Times are durations in seconds: clocks of two
machines have nothing in common.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.cache.page_layout import PageLayout
from common.errors import ErrorCode
from common.sampling_params import SamplingParams, TokenLogprobs

#: Rises with every change of what nodes say to each other; ``tests/common/wire/test_messages.py`` notices one.
#: ``Header`` and ``Refused`` stay as they are, so that a peer of any version understands why it is turned away.
PROTOCOL_VERSION = 8

Count = Annotated[int, Meta(ge=0)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
Text = Annotated[str, Meta(max_length=4096)]
Sentence = Annotated[str, Meta(max_length=512)]
ShortText = Annotated[str, Meta(max_length=256)]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
Incarnation = Annotated[str, Meta(min_length=16, max_length=32)]
Role = Literal["prefill", "decode"]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """First frame of every message: who speaks, and to which start of whom (empty: whoever listens there)."""

    version: int
    sender: Incarnation
    target: Annotated[str, Meta(max_length=32)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages."""


# ---- a node joins -------------------------------------------------------------------------------------------------


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a KV page, as ``common.cache.page_layout.PageGeometry`` knows it."""

    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_kv_heads: Annotated[int, Meta(ge=1, le=65536)]
    head_dim: Annotated[int, Meta(ge=1, le=65536)]
    page_size: Annotated[int, Meta(ge=1, le=65536)]
    dtype: Literal["float32", "bfloat16", "float16"]

    @classmethod
    def of(cls, geometry: PageLayout) -> "Geometry":
        """The message that describes this page layout."""
        return cls(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            page_size=geometry.page_size,
            dtype=geometry.dtype,  # type: ignore[arg-type]  # one of the three names that PageGeometry knows
        )

    def layout(self) -> PageLayout:
        """The page layout that this message describes."""
        return PageLayout(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size, self.dtype)


class Register(Message, frozen=True, tag="register"):
    """node -> gateway: here I am. Sent again after every reconnect; the same incarnation keeps its start counter."""

    role: Role
    name: Id
    model: Id
    digest: Id  # of configuration, and of names, types and shapes of the tensors
    weight_version: Id  # fingerprint of the weight files, or --weight-version: nodes that differ cannot share KV
    vocab_size: Annotated[int, Meta(ge=1)]
    context_length: Annotated[int, Meta(ge=1)]
    eos_token_ids: tuple[int, ...]
    generation: dict[str, float]  # the model's own sampling defaults, by their names in SamplingParams
    geometry: Geometry
    num_pages: Annotated[int, Meta(ge=1)]
    max_running: Annotated[int, Meta(ge=1)]
    max_queued: Count
    transports: tuple[str, ...]
    address: Text  # where decode nodes reach a prefill node's control socket, "host:port"; empty for decode nodes
    pid: Count
    device: Id


class Registered(Message, frozen=True, tag="registered"):
    """gateway -> node: you are in the table; requests may come."""

    starts: Annotated[int, Meta(ge=1)]  # how many starts of a node of this name the gateway has seen
    heartbeat_s: Annotated[float, Meta(gt=0)]


class Refused(Message, frozen=True, tag="refused"):
    """gateway -> node, or prefill -> decode: you cannot join, or stay, and why. Final for this start, or epoch."""

    reason: Text
    epoch: Count = 0  # prefill -> decode: of the Connect that is refused, or that held until now


class Unknown(Message, frozen=True, tag="unknown"):
    """gateway -> node: I do not know you (I am new, or I took you for lost). Register again."""


class Ping(Message, frozen=True, tag="ping"):
    """Anyone -> anyone, to find out whether the other end is still there. No answer is needed."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """node -> gateway, every ``heartbeat_s``: what I hold now and what I have done so far."""

    num_waiting: Count
    num_running: Count
    num_free_pages: Count
    num_cached_pages: Count
    num_quarantined_pages: Count
    counters: dict[str, float]  # monotonic totals since the process began, by name


class PairState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The other end of a pair: which start of which node, by which transport pages travel, and why by that one."""

    peer: Id
    incarnation: Incarnation
    transport: Id
    why: Sentence
    problem: Sentence = ""  # why no page can travel now; empty: pages can


class Pairs(Message, frozen=True, tag="pairs"):
    """node -> gateway: the pairs in which pages can travel, and those in which they should and cannot; all of them,
    whenever one has changed."""

    pairs: Annotated[tuple[PairState, ...], Meta(max_length=1_024)]


class Flush(Message, frozen=True, tag="flush"):
    """gateway -> node: forget every cached page that nobody uses."""

    number: Count = 0  # of the question; its answer has the same


class Flushed(Message, frozen=True, tag="flushed"):
    """node -> gateway: done; so many pages were forgotten."""

    num_pages: Count
    number: Count = 0


class GetDecisions(Message, frozen=True, tag="explain"):
    """gateway -> node: what have you decided lately, and why?"""

    limit: Annotated[int, Meta(ge=1, le=10_000)]
    number: Count = 0


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision about one request (``rid`` empty: about the node)."""

    ago_s: float
    rid: Annotated[str, Meta(max_length=256)]
    action: Id
    reason: Text


class Decisions(Message, frozen=True, tag="decisions"):
    """node -> gateway: the last decisions, newest last."""

    decisions: tuple[Decision, ...]
    number: Count = 0


class Deregister(Message, frozen=True, tag="leave"):
    """node -> gateway: I am stopping on purpose; send me nothing more."""


# ---- a request, at both nodes ---------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The other node of a pair, this start of it and no other."""

    name: Id
    incarnation: Incarnation
    address: Text


class Generate(Message, frozen=True, tag="generate"):
    """gateway -> both nodes of the pair, or to a decode node alone: one request (one attempt at it)."""

    rid: Id
    attempt: Count
    prompt: tuple[int, ...]
    sampling: SamplingParams
    prefill: Peer | None  # None: the decode node computes the prompt by itself
    decode: Peer
    timeout_s: Annotated[float, Meta(gt=0)]  # the request's own deadline, from now
    cache_salt: Text = ""
    priority: int = 0  # higher is more urgent
    priority_class: ShortText = ""
    tenant: ShortText = ""
    expected_output: Count = 0  # output tokens that it will probably have; 0: nobody knows
    waited_s: Annotated[float, Meta(ge=0)] = 0.0  # since it reached the gateway


class Abort(Message, frozen=True, tag="abort"):
    """gateway -> both nodes: the client has gone, has what it wanted, or the other leg failed. Idempotent."""

    rid: Id
    attempt: Count


class Reprioritize(Message, frozen=True, tag="reprioritize"):
    """gateway -> both nodes: change the priority, or the class, of a request."""

    rid: Id
    attempt: Count
    priority: int
    priority_class: ShortText | None = None  # None: as before


class Tokens(Message, frozen=True, tag="tokens"):
    """node -> gateway: output tokens from ``index`` on. The first comes from prefill, the rest from decode."""

    rid: Id
    attempt: Count
    index: Count
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: Literal["", "stop", "length"] = ""  # non-empty: the last of these tokens ended the output
    cached_tokens: Count = 0  # with index 0: prompt tokens that prefill found in its cache
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with index 0: of the prompt, from ``prompt_logprobs_from`` on
    timings: dict[str, float] = {}


class Failed(Message, frozen=True, tag="failed"):
    """node -> gateway: this request ends here, with this error."""

    rid: Id
    attempt: Count
    code: ErrorCode
    message: Text
    retry_after_s: Annotated[float, Meta(ge=0)] = 0.0


# ---- a decode node and a prefill node form a pair -------------------------------------------------------------------


class Connect(Message, frozen=True, tag="connect"):
    """decode -> prefill: my pool, and how to reach it. Opens a new epoch between the two."""

    name: Id
    digest: Id  # of the model, weights included
    epoch: Count
    geometry: Geometry
    num_pages: Annotated[int, Meta(ge=1)]
    transport: Id
    endpoint: Annotated[str, Meta(max_length=65536)]  # understood by the transport alone
    wants_checksums: bool = False
    resumes: bool = False  # the last one broke; transfers under way go on under this one


class Connected(Message, frozen=True, tag="connected"):
    """prefill -> decode: attached; grants of this epoch are welcome."""

    epoch: Count
    transport: Id
    num_units: Annotated[int, Meta(ge=1, le=65536)] = 1  # into which your pages are cut, since mine are shorter
    why: Sentence = ""  # this transport


class AttachFailed(Message, frozen=True, tag="attach_failed"):
    """prefill -> decode: your pool could not be attached under this epoch. The cause may pass: offer it again."""

    epoch: Count
    reason: Text


# ---- a transfer -----------------------------------------------------------------------------------------------------


class Grant(Message, frozen=True, tag="grant"):
    """decode -> prefill: write page ``first + i`` of the prompt into my ``pages[i]``. What I never grant I need not."""

    rid: Id
    attempt: Count
    epoch: Count
    first: Count
    pages: tuple[Count, ...]


class PagesWritten(Message, frozen=True, tag="delivered"):
    """prefill -> decode: these pages of the prompt (by index) are wholly written, as far as this part goes."""

    rid: Id
    attempt: Count
    epoch: Count
    indices: tuple[Count, ...]
    part: Count = 0  # which unit of each of these pages
    checksums: tuple[Checksum, ...] = ()  # CRC-32 of each, as it stands here; all or none
    num_resends: Count = 0  # how often each of them has been written again by now


class Resend(Message, frozen=True, tag="resend"):
    """decode -> prefill: this part of these pages (by index) came with other bytes; write it again."""

    rid: Id
    attempt: Count
    epoch: Count
    indices: tuple[Count, ...]
    part: Count
    number: Annotated[int, Meta(ge=1)]  # how often that makes; so nothing is written twice for one damage


class PrefillDone(Message, frozen=True, tag="handoff"):
    """prefill -> decode: the prompt is computed; carry on from here. May overtake the last pages."""

    rid: Id
    attempt: Count
    num_tokens: Annotated[int, Meta(ge=1)]  # prompt tokens whose KV is, or is being, delivered
    token: Count  # the first output token
    logprobs: TokenLogprobs | None = None


class TransferAck(Message, frozen=True, tag="received"):
    """decode -> prefill: I have every page; let go of the source."""

    rid: Id
    attempt: Count


class Resume(Message, frozen=True, tag="resume"):
    """decode -> prefill: I have lost this request's pages; compute these tokens for me as you would a prompt.

    Its transfer is one of its own, known by a higher attempt; the gateway hears nothing of it.
    """

    rid: Id
    attempt: Count
    prompt: tuple[Count, ...]
    timeout_s: Annotated[float, Meta(gt=0)]
    cache_salt: Text = ""
    priority: int = 0
    priority_class: ShortText = ""
    tenant: ShortText = ""
    waited_s: Annotated[float, Meta(ge=0)] = 0.0


class AbortTransfer(Message, frozen=True, tag="cancel"):
    """decode -> prefill: write no more for this transfer, and tell me when that is sure."""

    rid: Id
    attempt: Count


class Closed(Message, frozen=True, tag="closed"):
    """prefill -> decode: no write for this transfer is under way or will ever start. This is the writer's fence."""

    rid: Id
    attempt: Count
    reason: Literal["finished", "cancelled", "aborted", "failed", "unknown"]
    message: Text = ""
    code: ErrorCode = ErrorCode.TRANSFER_FAILED  # of a failure: both nodes tell the gateway the same


FromNode = Register | Heartbeat | Pairs | Deregister | Flushed | Decisions | Tokens | Failed | Ping
FromGateway = Registered | Refused | Unknown | Generate | Abort | Reprioritize | Flush | GetDecisions | Ping
FromDecode = Connect | Grant | Resend | TransferAck | AbortTransfer | Resume | Ping
FromPrefill = Connected | AttachFailed | Refused | PagesWritten | PrefillDone | Closed | Ping
