"""Builds one prefill batch from the ordered waiting queue, within three budgets. Pure.

1. total: memory that the caller allows, in tokens. A request is admitted only if it needs strictly less.
2. input: prompt tokens of one batch. Only the first request may exceed it.
3. chunk: prompt tokens of one step. A request that is longer than what is left is cut at a page boundary and continues
   in later steps. Behind its last chunk there is room for short requests and for the first chunk of another. With
   dynamic chunking (``common/scheduling/chunked_prefill.py``) a step also holds at most the work of one full chunk at
   the beginning of a prompt.

All three are spent in whole pages. Names and rules are those of SGLang's ``PrefillAdder``, with two differences. Each
step is filled to the chunk budget instead of serving one cut request alone. Admission allocates the pages for all of a
request's tokens at once, so that a request never waits for memory between its first chunk and its first token. Where
every layer attends within a window and the pages do not suffice for the whole prompt, these are the pages of a ring
(``common/cache/kv_window.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.cache.kv_window import KVWindow, ring_table
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import packed_tokens
from common.cache.tree_node import Match
from common.request import Request, RequestKey
from common.sampling_params import TokenLogprobs
from common.scheduling.chunked_prefill import ChunkAlignment, prefill_work, tokens_within
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits
from common.scheduling.output_reserve import RESERVED_TOKENS, reserved_room
from common.scheduling.skip_ahead import MAX_SKIP_AHEAD
from common.step_plan import Admit, Row, StepResult


class AddResult(Enum):
    CONTINUE = auto()  # it is in the batch; try the next
    NO_TOKEN = auto()  # it does not fit into memory now
    OTHER = auto()  # memory is not the reason: the batch is full


@dataclass(frozen=True, slots=True)
class LongPromptLimits:
    """How long prompts share steps with others; see ``common/scheduling/long_prompts.py``.

    Attributes:
        threshold: a prompt with more tokens to compute is long; None is the chunk budget of a step.
        share: of the chunk budget, for long prompts while shorter ones wait; 1.0 shares nothing: begun prompts come
            first, and each takes what the budget has left.
        max_begun: long prompts in progress; further ones do not begin.
    """

    threshold: int | None = None
    share: float = 0.5
    max_begun: int = 2


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds of a node that computes prompts; None means no bound.

    Attributes:
        max_running: slots: the number of prompts being extended at once, and of rows of the largest decode batch.
        max_queued: waiting requests; one more is refused.
        context_length: tokens of the model's context: of prompt and output together.
        max_prefill_tokens: input tokens of one step.
        chunk_tokens: input tokens of one step, after which a prompt is cut; None computes prompts whole.
        alignment: where a prompt may be cut.
        sharing: when a prompt waits for a prefix that another request is computing.
        max_skip_ahead: smaller requests that may overtake a request that lacks pages.
        long_prompts: how long prompts share steps with others.
        kv_window: which pages a request needs; None: all.
    """

    max_running: int
    max_queued: int | None = None
    context_length: int | None = None
    max_prefill_tokens: int = 16_384
    chunk_tokens: int | None = None
    alignment: ChunkAlignment = field(default_factory=ChunkAlignment)
    sharing: InBatchPrefixLimits = field(default_factory=InBatchPrefixLimits)
    max_skip_ahead: int = MAX_SKIP_AHEAD
    long_prompts: LongPromptLimits = field(default_factory=LongPromptLimits)
    kv_window: KVWindow | None = None


@dataclass(slots=True)
class Chunk:
    """One extend: compute tokens ``start .. start + num_tokens - 1`` of the request in this step.

    Attributes:
        targets: prompt tokens whose log-probabilities are wanted.
        first_target: token of the chunk that the first target follows.
        admission: number of the stay in a slot that the chunk was planned for; see ``common/scheduling/slots.py``.
    """

    request: Request
    start: int
    num_tokens: int
    is_last: bool
    targets: tuple[int, ...] = ()
    first_target: int = 0
    admission: int = 0

    @classmethod
    def of(cls, request: Request, start: int, num_tokens: int) -> "Chunk":
        end = start + num_tokens
        chunk = cls(request, start, num_tokens, is_last=end == request.num_tokens)
        wanted = request.sampling.prompt_logprobs_from
        if wanted is not None and not request.output:
            first = max(start + 1, wanted)
            chunk.targets = request.prompt[first : end + 1]
            chunk.first_target = first - 1 - start if chunk.targets else 0
        return chunk

    @property
    def is_current(self) -> bool:
        """Whether the request is still in the slot that the chunk was planned for, without having left it since."""
        return self.admission == self.request.admission > 0

    def to_row(self) -> Row:
        """The row that the executor computes, for the request's present stay in a slot."""
        self.admission = self.request.admission
        tokens = self.request.tokens(self.start, self.start + self.num_tokens)
        return Row(
            self.request.slot, self.start, tokens, self.is_last, targets=self.targets, first_target=self.first_target
        )


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The result of one chunk.

    Attributes:
        sampled: the token and its log-probabilities after a last chunk, otherwise None.
        prompt_logprobs: of the chunk's targets.
        error: why there is no valid token after a last chunk; empty if there is one.
    """

    sampled: tuple[int, TokenLogprobs | None] | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class SamplingFailed:
    """The effect of a step that has sampled no valid token for a request, which ends with this message."""

    request: Request
    message: str


def chunk_results(chunks: Sequence[Chunk], result: StepResult, *, num_before: int = 0) -> list[ChunkResult]:
    """Split the result of a step by chunk; ``num_before`` rows before the chunks sampled one token each."""
    tokens = iter(result.tokens[num_before:])
    logprobs = iter(result.logprobs[num_before:] or (None,) * len(result.tokens))
    errors = iter(result.errors[num_before:] or ("",) * len(result.tokens))
    prompt_logprobs = iter(result.prompt_logprobs)
    return [
        ChunkResult(
            (next(tokens), next(logprobs)) if chunk.is_last else None,
            next(prompt_logprobs) if chunk.targets else (),
            next(errors) if chunk.is_last else "",
        )
        for chunk in chunks
    ]


def admit_row(request: Request, *, last_token: int | None = None) -> Admit:
    """The message that tells the executor of a request in a slot.

    Args:
        last_token: the token sampled last, if the request decodes next; None if it extends its prompt.
    """
    history = request.tokens() if request.sampling.needs_history else ()
    return Admit(request.slot, request.sampling, len(request.prompt), last_token, history, request.adapter)


class PrefillAdder:
    """One batch that is being built; each step has a new one.

    Args:
        total_tokens: free and evictable memory minus the room kept for outputs of admitted requests.
        reserve_output: keep room for the outputs of admitted requests; true on the node that decodes them.
        reserved_tokens: the most tokens of room for the further output of one request.
        is_alone: no other request holds pages, so the first request is admitted if its prompt fits.
    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        limits: PrefillLimits,
        *,
        total_tokens: int,
        reserve_output: bool,
        reserved_tokens: int = RESERVED_TOKENS,
        is_alone: bool = False,
    ) -> None:
        self.chunks: list[Chunk] = []
        self.total_left = total_tokens
        self.input_left = limits.max_prefill_tokens
        self._unit = limits.alignment.unit(cache.page_size)
        self.chunk_left = None if limits.chunk_tokens is None else max(limits.chunk_tokens, self._unit)
        self._crossover = None if self.chunk_left is None else limits.alignment.crossover_tokens
        self._work_left = prefill_work(self._crossover or 0.0, 0, self.chunk_left or 0)
        self.cache = cache
        self._allocator = allocator
        self.page_size = cache.page_size
        self._places: dict[RequestKey, int] = {}  # of each request's chunk in ``chunks``
        self._reserve_output = reserve_output
        self._reserved_tokens = reserved_tokens
        self._is_alone = is_alone
        self._kv_window = limits.kv_window or KVWindow(cache.page_size)

    @property
    def tokens_left(self) -> int | None:
        """Whole pages that are left of the chunk and input budgets, in tokens; None without a chunk budget."""
        if self.chunk_left is None:
            return None
        return max(min(self.chunk_left, self.input_left), 0) // self.page_size * self.page_size

    def add_chunked_req(self, request: Request, *, most: int | None = None, is_reserved: bool = False) -> AddResult:
        """Add the next chunk of an admitted request, or lengthen its chunk. CONTINUE if it is in the batch, else OTHER.

        The memory of the request was spent when it was admitted, so NO_TOKEN is impossible.

        Args:
            most: the largest number of tokens; None for what the budgets allow.
            is_reserved: a place in the batch is kept for it, so it proceeds even if the step holds enough work already.
        """
        start = request.num_scheduled
        length = request.num_tokens - start
        assert request.pages, "this request was not admitted"
        assert length > 0, "the whole prompt is scheduled already"
        if request.key not in self._places and self._is_full():
            return AddResult.OTHER
        num_tokens = self._fit(start, length, most=most, is_first=is_reserved or not self.chunks)
        if num_tokens == 0:
            return AddResult.OTHER
        self._take(request, start, num_tokens)
        return AddResult.CONTINUE

    def add_one_req(self, request: Request, *, most: int | None = None) -> AddResult:
        """Admit a waiting request: match and lock its prefix, test the budgets, allocate all pages, add its first
        chunk.

        CONTINUE if it is in the batch. Otherwise the request, the locks and the allocator are unchanged, but cached
        pages may have been evicted: a page that a running step still uses becomes free only when the step ends.
        """
        assert not request.pages, "this request is admitted already"
        if self._is_full() or most == 0:
            return AddResult.OTHER
        if self.total_left <= 0:
            return AddResult.NO_TOKEN
        kv_window, num_tokens = self._kv_window, request.num_tokens
        if kv_window.is_cached(num_tokens):
            match = self.cache.match(packed_tokens(request, request.num_cacheable), request.salt)
            result = self._add(request, match, kv_window.num_pages(num_tokens) - len(match.pages), most)
            if result is not AddResult.NO_TOKEN:
                return result
            if not kv_window.prefers_ring(num_tokens, match, self._allocator.num_pages):
                return result
        return self._add(request, Match(), kv_window.pages_to_compute(num_tokens), most, is_ring=True)

    def _add(
        self, request: Request, match: Match, num_pages: int, most: int | None, *, is_ring: bool = False
    ) -> AddResult:
        """Admit a request with its cached prefix and ``num_pages`` further pages; see ``add_one_req``.

        Args:
            is_ring: the pages are a ring; nothing of it is cached.
        """
        length = request.num_tokens - match.num_tokens
        num_tokens = self._fit(match.num_tokens, length, most=most, is_first=not self.chunks)
        if num_tokens == 0:
            return AddResult.OTHER
        num_evictable = self.cache.num_evictable_pages
        self.cache.lock(match.node)
        # What is locked can no longer be evicted, so the budget is tested only now.
        self.total_left -= (num_locked := self._tokens(num_evictable - self.cache.num_evictable_pages))
        own = self._allocate(request, match, num_pages)
        if own is None:
            self.total_left += num_locked
            self.cache.unlock(match.node)
            return AddResult.NO_TOKEN
        self._admit(request, match, own, is_ring=is_ring)
        self._take(request, match.num_tokens, num_tokens)
        return AddResult.CONTINUE

    # ---- budgets ----------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return self.chunk_left is not None and self.chunk_left <= 0

    def _fit(self, start: int, length: int, *, most: int | None, is_first: bool) -> int:
        """The number of tokens from ``start`` on that this batch takes: ``length``, fewer if it is cut, or 0.

        Args:
            is_first: the request proceeds by at least one unit, so that the first request in order always does.
        """
        if self.chunk_left is not None:
            length = self._cut(start, length, self.chunk_left if most is None else min(most, self.chunk_left), is_first)
        if self.chunks and self._rounded(length) > self.input_left:
            return 0
        return length

    def _cut(self, start: int, length: int, most: int, is_first: bool) -> int:
        if most <= 0:
            return 0
        if self._crossover is not None:
            most = min(most, tokens_within(self._crossover, start, self._work_left))
        if length <= most:
            return length
        end = (start + most) // self._unit * self._unit
        if end <= start and is_first:
            end = (start // self._unit + 1) * self._unit
        return min(max(end - start, 0), length)

    def _take(self, request: Request, start: int, num_tokens: int) -> None:
        place = self._places.setdefault(request.key, len(self.chunks))
        if place == len(self.chunks):
            self.chunks.append(Chunk.of(request, start, num_tokens))
        else:
            first = self.chunks[place].start
            self.chunks[place] = Chunk.of(request, first, start + num_tokens - first)
        request.num_scheduled = start + num_tokens
        if self._allocator.window_pages is not None:
            self._allocator.window_pages.advance(request, self.chunks[place].start, request.num_scheduled)
        self.input_left -= self._rounded(num_tokens)
        if self.chunk_left is not None:
            self.chunk_left -= self._rounded(num_tokens)
        if self._crossover is not None:
            self._work_left -= prefill_work(self._crossover, start, num_tokens)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, request: Request, match: Match, count: int) -> list[int] | None:
        """Allocate pages beside the cached ones, evicting as needed; None if the request does not fit."""
        if not self._may_spend(request, match, self._tokens(count)):
            return None
        window_pages = self._allocator.window_pages
        if (
            window_pages is not None
            and window_pages.needs(request, decodes=self._reserve_output) > window_pages.num_unreserved
        ):
            return None
        missing = count - self._allocator.num_for_steps
        if missing > self.cache.num_evictable_pages:
            return None
        self.cache.evict(missing)
        return self._allocator.alloc_for_step(count)

    def _may_spend(self, request: Request, match: Match, num_tokens: int) -> bool:
        """Test the total budget; the prefix must be locked. ``num_tokens`` is the size of the new pages."""
        if self._is_alone and not self.chunks:
            return True  # waiting longer gains nothing
        # A request may ask for more output than the pool holds. It is admitted once it has the pool for itself, because
        # waiting longer gains nothing.
        num_usable = (
            self._tokens(self._allocator.num_pages - self._allocator.count(Owner.QUARANTINE)) - match.num_tokens
        )
        need = min(num_tokens + self._reserve(request), max(num_usable - 1, num_tokens))
        return need < self.total_left

    def _reserve(self, request: Request) -> int:
        if not self._reserve_output:
            return 0
        return reserved_room(request, self._reserved_tokens, self._kv_window)

    def _admit(self, request: Request, match: Match, own: list[int], *, is_ring: bool) -> None:
        num_pages = self._kv_window.num_pages(request.num_tokens)
        request.pages = ring_table(own, num_pages) if is_ring else match.pages + own
        request.own = request.pages[num_pages - len(own) :]
        request.is_wrapped = is_ring
        request.node = match.node
        self.cache.count_use(match.node)
        request.num_computed = request.num_scheduled = match.num_tokens
        if not (request.output or request.num_to_compute):  # otherwise it was admitted before
            request.num_cached = match.num_tokens
        request.num_to_compute = request.num_tokens - match.num_tokens
        self.total_left -= self._tokens(len(own)) + self._reserve(request)
        window_pages = self._allocator.window_pages
        if window_pages is not None:
            window_pages.admit(request, match.num_tokens, window_pages.needs(request, decodes=self._reserve_output))

    def _tokens(self, num_pages: int) -> int:
        return num_pages * self.page_size

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size
