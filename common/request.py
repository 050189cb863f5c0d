"""One request as a node's scheduler sees it: its tokens, its pages, and how far it has come."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.sampling_params import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from common.cache.prefix_watch import PrefixWatch
    from common.cache.radix_cache import TreeNode

#: The request id and the number of the attempt: one request on one pair of nodes.
RequestKey = tuple[str, int]

#: Below every priority that a user can name.
LOWEST_PRIORITY = -(2**31)


@dataclass(slots=True, eq=False)
class Request:
    """A request on one node. Changed only by that node's scheduler and ``PrefillAdder``.

    Attributes:
        rid, attempt: who it is; an attempt is one try on one pair of nodes.
        prompt: token ids as the user sent them.
        sampling: validated parameters.
        salt: requests with different salts never share cached pages.
        priority: higher is more urgent.
        priority_class, tenant: on whose account it is served; empty for nobody's in particular.
        expected_output: output tokens that it will probably have in all; 0 if nothing is known.
        arrived_at, admitted_at, deadline_at: instants in seconds of the node's clock. What it waited elsewhere before
            counts: it arrived here so much earlier.
        waited_s: what it had waited before it came here.
        inherited_priority: the highest of those that wait for it.
        num_passed: requests that were admitted before it since it did not fit.
        watch: while it waits on a node, how much of it is cached there.
        is_charged: its prompt is on its tenant's and class's account.
        output: tokens sampled so far, on any node.
        pages: page table; page i holds the KV of tokens ``i * page_size`` and on.
        own: those of ``pages`` that belong to the request (``Owner.REQUEST``), not to the radix cache.
        node: the radix node whose path is locked for this request.
        num_computed: tokens whose KV is in ``pages``, as far as committed steps tell.
        num_scheduled: the same once all planned steps have run; never less.
        num_sampling: output tokens that planned steps sample and that are not in ``output`` yet.
        num_cached: prompt tokens that were found in this node's cache when it was admitted first.
        prompt_logprobs: of prompt tokens from ``sampling.prompt_logprobs_from`` on, as far as they are computed.
        slot: row of the executor's request table; -1 while it has none.
        admission: number of its stay in that slot; 0 while it has none. See ``common/scheduling/slots.py``.
        packed: its first tokens in the radix cache's packed form, kept by ``request_pages.packed_tokens``. Tokens are
            only ever appended, so it stays true.
    """

    rid: str
    attempt: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    priority: int = 0
    priority_class: str = ""
    tenant: str = ""
    expected_output: int = 0
    arrived_at: float = 0.0
    admitted_at: float = 0.0
    deadline_at: float = float("inf")
    waited_s: float = 0.0
    inherited_priority: int = LOWEST_PRIORITY
    num_passed: int = 0
    watch: "PrefixWatch | None" = None
    is_charged: bool = False
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    node: "TreeNode | None" = None
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    slot: int = -1
    admission: int = 0
    packed: bytes = b""
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.rid, self.attempt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_left(self) -> int:
        """Output tokens it may still produce."""
        return self.sampling.max_new_tokens - len(self.output)

    @property
    def num_uncached(self) -> int:
        """Tokens that are still to be computed, as far as is known while it waits."""
        num_found = self.num_computed if self.watch is None else self.watch.num_tokens
        return len(self.prompt) + len(self.output) - num_found

    @property
    def num_decodable(self) -> int:
        """Tokens whose KV it takes to decode its next token: the prompt, or all but the token sampled last."""
        return self.num_tokens - 1 if self.output else len(self.prompt)

    @property
    def num_cacheable(self) -> int:
        """Tokens that a cached prefix may stand for: the rest must be computed, since something of it is wanted.

        The last token's logits always are; with prompt log-probabilities, those before each token asked for.
        """
        first = self.sampling.prompt_logprobs_from
        if first is None or self.output:
            return self.num_tokens - 1
        return max(0, min(self.num_tokens, first) - 1)

    def tokens(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Prompt and output tokens at positions ``start .. end``."""
        end = self.num_tokens if end is None else end
        num_prompt = len(self.prompt)
        if end <= num_prompt:
            return self.prompt[start:end]
        tail = tuple(self.output[max(0, start - num_prompt) : end - num_prompt])
        return self.prompt[start:] + tail if start < num_prompt else tail
