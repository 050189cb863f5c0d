"""A request in a scheduler: its tokens, its pages and its progress."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.sampling_params import SamplingParams, TokenLogprobs
from common.stage_spans import StageLog

if TYPE_CHECKING:
    from common.cache.tree_node import PrefixWatch, TreeNode

#: Request id and attempt; an attempt is one try on one pair of nodes.
RequestKey = tuple[str, int]

#: Lower than every priority that a user can give.
LOWEST_PRIORITY = -(2**31)


@dataclass(slots=True, eq=False)
class Request:
    """A request on one node, or as the gateway queues it. On a node, only the role, the parts of its scheduler and its
    ``RequestStats`` change it.

    Attributes:
        salt: requests with different salts never share cached pages.
        adapter: id of the LoRA adapter, which the salt stands for too; empty: the model itself.
        priority: higher is more urgent.
        priority_class, tenant: the class and tenant that are charged; empty: none.
        expected_output: predicted number of output tokens, those of earlier attempts included; 0: unknown.
        num_earlier: output tokens of earlier attempts, with which ``output`` begins on a decode node.
        arrived_at, admitted_at, deadline_at: instants in seconds of the node's clock. ``arrived_at`` is earlier than
            the arrival on this node by ``waited_s``.
        slo_ttft_s, slo_itl_s: objectives for the first token, and between two tokens; 0 without one.
        first_token_at, last_token_at: instants of the first and of the latest output token; 0: none yet.
        waited_s: seconds that the request had waited before it arrived on this node.
        placed_at: instant at which the request got its slot, its pages, or both, last.
        num_preempted: number of times that a more urgent request took its place on this node.
        num_passed: number of requests that were admitted before this one because it did not fit.
        watch: cached length on this node, while the request waits.
        is_charged: whether the prompt has been charged to tenant and class.
        pages: page table; page i holds the KV of tokens from ``i * page_size`` on.
        own: the last entries of ``pages``, which belong to the request (``Owner.REQUEST``) and not to the radix cache.
        is_wrapped: the entries of ``pages`` before ``own`` are outside the model's window and hold other tokens, or
            none; see ``common/cache/kv_window.py``. A request that is not wrapped has cached pages there.
        window_first, window_end: the pages from ``window_first`` to before ``window_end`` have window pages that the
            request holds; see ``common/cache/window_pages.py``.
        window_reserved: the most window pages that the request can hold.
        window_sent: the executor knows the window pages before this one.
        node: radix node whose path is locked for this request.
        num_computed: tokens whose KV is in ``pages`` after all committed steps.
        num_scheduled: tokens whose KV is in ``pages`` after all planned steps; at least ``num_computed``.
        num_sampling: output tokens of planned steps that are not in ``output`` yet.
        num_to_compute: tokens that were not cached when the request was admitted last; at least 1 since then.
        num_cached: prompt tokens that were in this node's cache at the first admission; 0 with earlier output.
        prompt_logprobs: log-probabilities computed so far, of prompt tokens from ``sampling.prompt_logprobs_from`` on.
        slot: row of the executor's request table; -1: none.
        admission: number of the request's admission to that slot; 0: none. See ``common/scheduling/slots.py``.
        stages: where the request has spent its time on this node.
        packed: the first tokens in packed form, which ``request_kv.packed_tokens`` extends.
    """

    rid: str
    attempt: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    priority_class: str = ""
    tenant: str = ""
    expected_output: int = 0
    num_earlier: int = 0
    arrived_at: float = 0.0
    admitted_at: float = 0.0
    deadline_at: float = float("inf")
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    waited_s: float = 0.0
    placed_at: float = 0.0
    num_preempted: int = 0
    num_passed: int = 0
    watch: "PrefixWatch | None" = None
    is_charged: bool = False
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    is_wrapped: bool = False
    window_first: int = 0
    window_end: int = 0
    window_reserved: int = 0
    window_sent: int = 0
    node: "TreeNode | None" = None
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0
    num_to_compute: int = 0
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    slot: int = -1
    admission: int = 0
    stages: StageLog = field(default_factory=StageLog)
    packed: bytes = b""
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.rid, self.attempt)

    @property
    def received_at(self) -> float:
        """Instant of the arrival on this node."""
        return self.arrived_at + self.waited_s

    @property
    def due_at(self) -> float:
        """Instant of the next objective: the first token, the next token, or the deadline if that is earlier."""
        objective_s = self.slo_itl_s if self.output else self.slo_ttft_s
        if not objective_s:
            return self.deadline_at
        return min(self.deadline_at, max(self.arrived_at, self.last_token_at) + objective_s)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_left(self) -> int:
        """Number of output tokens that the request may still produce."""
        return self.sampling.max_new_tokens - len(self.output)

    @property
    def num_uncached(self) -> int:
        """Number of tokens that are still to be computed: not in pages and, while the request waits, not cached."""
        num_found = self.num_computed if self.watch is None else self.watch.num_tokens
        return len(self.prompt) + len(self.output) - num_found

    @property
    def num_decodable(self) -> int:
        """Number of tokens whose KV is needed to decode the next one: the prompt, or all but the last sampled token."""
        return self.num_tokens - 1 if self.output else len(self.prompt)

    @property
    def num_cacheable(self) -> int:
        """Number of first tokens that may come from the cache; the logits of all later ones are needed.

        These are the logits of the last token and, with prompt log-probabilities, of the tokens before each token asked
        for.
        """
        first = self.sampling.prompt_logprobs_from
        if first is None or self.output:
            return self.num_tokens - 1
        return max(0, min(self.num_tokens, first) - 1)

    def tokens(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Return prompt and output tokens at positions ``start .. end - 1``."""
        end = self.num_tokens if end is None else end
        num_prompt = len(self.prompt)
        if end <= num_prompt:
            return self.prompt[start:end]
        tail = tuple(self.output[max(0, start - num_prompt) : end - num_prompt])
        return self.prompt[start:] + tail if start < num_prompt else tail
