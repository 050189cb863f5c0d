"""Builds one prefill batch out of the ordered waiting queue, under three budgets.

1. total: tokens of memory that the caller says may be spent; a request is admitted only if it needs strictly less.
2. input: prompt tokens of one batch. The first request may exceed it, a later one that does not fit waits.
3. chunk: prompt tokens of one step. A request longer than what is left is cut at a page boundary and goes on in later
   steps; behind its tail there is room for whole short requests and for the head of the next. With a cut by work
   (``common/scheduling/chunked_prefill.py``) the step also holds no more work than one full chunk at the beginning
   of a prompt.

All three are spent in whole pages. Names and rules are those of SGLang's ``PrefillAdder``, with two differences. Every
step is filled to the chunk budget instead of serving one cut request alone. And admission allocates pages for all of a
request's tokens at once, so that one that has begun to compute never waits for memory before its first token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import Match, RadixCache
from common.cache.request_kv import packed_tokens
from common.request import Request
from common.sampling_params import TokenLogprobs
from common.scheduling.chunked_prefill import ChunkAlignment, most_tokens, work
from common.scheduling.ignore_eos_admission import Growth, fits, is_extending, num_private_pages
from common.scheduling.new_token_ratio import CLIP_TOKENS, expected_left
from common.step_plan import Admit, Row, StepResult


class AddResult(Enum):
    """What became of one request."""

    CONTINUE = auto()  # it is in the batch; try the next
    NO_TOKEN = auto()  # it does not fit into memory now
    OTHER = auto()  # memory is not the reason: the batch is full


@dataclass(frozen=True, slots=True)
class Budgets:
    """Of one batch, in tokens.

    Attributes:
        total_tokens: free and evictable memory less what running and held requests are still expected to need.
        input_tokens: ``--max-prefill-tokens``.
        chunk_tokens: ``--chunked-prefill-size``; None for off. Less than where a prompt may be cut counts as that.
        cut: where prompts are cut, and whether work is counted beside tokens.
    """

    total_tokens: int
    input_tokens: int
    chunk_tokens: int | None = None
    cut: ChunkAlignment = field(default_factory=ChunkAlignment)


@dataclass(slots=True)
class Chunk:
    """One extend: compute tokens ``start .. start + num_tokens`` of the request in this step.

    Attributes:
        targets: prompt tokens whose log-probabilities are wanted.
        first_target: token of the chunk that the first target follows.
        admission: stay in a slot that the chunk was planned for; see ``common/scheduling/slots.py``.
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
        """The row that the executor computes, for the stay in a slot that the request has now."""
        self.admission = self.request.admission
        tokens = self.request.tokens(self.start, self.start + self.num_tokens)
        return Row(
            self.request.slot, self.start, tokens, self.is_last, targets=self.targets, first_target=self.first_target
        )


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a step found out about one chunk.

    Attributes:
        sampled: token and its log-probability, of a last chunk.
        prompt_logprobs: of the chunk's targets, if it had any.
    """

    sampled: tuple[int, TokenLogprobs | None] | None
    prompt_logprobs: tuple[TokenLogprobs, ...]


def chunk_results(chunks: Sequence[Chunk], result: StepResult, *, num_before: int = 0) -> list[ChunkResult]:
    """Take a step's result apart by chunk. ``num_before`` sampled rows without targets came before the chunks."""
    tokens = iter(result.tokens[num_before:])
    logprobs = iter(result.logprobs[num_before:] or (None,) * len(result.tokens))
    judged = iter(result.prompt_logprobs)
    return [
        ChunkResult(
            (next(tokens), next(logprobs)) if chunk.is_last else None,
            next(judged) if chunk.targets else (),
        )
        for chunk in chunks
    ]


def admit_row(request: Request, *, last_token: int | None = None) -> Admit:
    """How a request takes its slot. ``last_token``: sampled elsewhere or before, if its prompt is not extended now."""
    history = request.tokens() if request.sampling.has_penalties else ()
    return Admit(request.slot, request.sampling, len(request.prompt), last_token, history)


class PrefillAdder:
    """One batch in the making; a new one for each step.

    Args:
        budgets: of this batch.
        max_requests: chunks of this batch at most.
        clip: output tokens reserved for one request at most.
        reserve_output: count the outputs of admitted requests (true where this node decodes them).
        running: requests that decode here now; the ignore-EOS proof walks them. Their expected needs are in the budget.
        ratio: share of its remaining output that a request without ignore-EOS is expected to produce.
    """

    def __init__(
        self,
        cache: RadixCache,
        books: PageAllocator,
        budgets: Budgets,
        *,
        max_requests: int | None = None,
        clip: int = CLIP_TOKENS,
        reserve_output: bool,
        running: Sequence[Request] = (),
        ratio: float = 1.0,
    ) -> None:
        self.chunks: list[Chunk] = []
        self.total_left = budgets.total_tokens
        self.input_left = budgets.input_tokens
        self._unit = budgets.cut.unit(cache.page_size)
        self.chunk_left = None if budgets.chunk_tokens is None else max(budgets.chunk_tokens, self._unit)
        self._crossover = None if self.chunk_left is None else budgets.cut.crossover_tokens
        self._work_left = work(self._crossover or 0.0, 0, self.chunk_left or 0)
        self._cache = cache
        self._books = books
        self._page_size = cache.page_size
        self._max_requests = max_requests
        self._clip = clip
        self._reserve_output = reserve_output
        self._running = running
        self._ratio = ratio

    def add_chunked_req(self, request: Request) -> AddResult:
        """The next chunk of a request that is admitted and not wholly scheduled. CONTINUE if it is in the batch.

        Its memory was spent when it was admitted, so it never answers NO_TOKEN.
        """
        start = request.num_scheduled
        length = request.num_tokens - start
        assert request.pages, "this request was not admitted"
        assert length > 0, "there is nothing left to extend"
        num_tokens = self._fit(start, length)
        if num_tokens == 0:
            return AddResult.OTHER
        self._take(request, start, num_tokens)
        return AddResult.CONTINUE

    def add_one_req(self, request: Request) -> AddResult:
        """Admit a waiting request: match, lock, test the budgets, allocate every page, and take its first chunk.

        CONTINUE if it is in the batch; otherwise the request, the locks and the books are as they were. (Cached pages
        may have been evicted for it without use if they linger; they are there for the next attempt.)
        """
        assert not request.pages, "this request is admitted already"
        if self._is_full():
            return AddResult.OTHER
        if self.total_left <= 0 and not self._proves(request):
            return AddResult.NO_TOKEN
        match = self._cache.match(packed_tokens(request, request.num_cacheable), request.salt)
        num_tokens = self._fit(match.num_tokens, request.num_tokens - match.num_tokens)
        if num_tokens == 0:
            return AddResult.OTHER
        num_evictable = self._cache.num_evictable_pages
        self._cache.lock(match.node)
        # What is locked can no longer be evicted, so the budget is tested only now.
        self.total_left -= (num_locked := self._tokens(num_evictable - self._cache.num_evictable_pages))
        own = self._allocate(request, match)
        if own is None:
            self.total_left += num_locked
            self._cache.unlock(match.node)
            return AddResult.NO_TOKEN
        self._admit(request, match, own)
        self._take(request, match.num_tokens, num_tokens)
        return AddResult.CONTINUE

    # ---- budgets ----------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        if self._max_requests is not None and len(self.chunks) >= self._max_requests:
            return True
        return self.chunk_left is not None and self.chunk_left <= 0

    def _fit(self, start: int, length: int) -> int:
        """How many of ``length`` tokens from ``start`` on go into this batch: all, up to where it is cut, or 0."""
        if self._is_full():
            return 0
        length = self._cut(start, length)
        if self.chunks and self._rounded(length) > self.input_left:
            return 0
        return length

    def _cut(self, start: int, length: int) -> int:
        if self.chunk_left is None:
            return length
        most = self.chunk_left
        if self._crossover is not None:
            most = min(most, most_tokens(self._crossover, start, self._work_left))
        if length <= most:
            return length
        end = (start + most) // self._unit * self._unit
        if end <= start and not self.chunks:
            end = (start // self._unit + 1) * self._unit  # however little fits, the first in order goes on
        return min(max(end - start, 0), length)

    def _take(self, request: Request, start: int, num_tokens: int) -> None:
        self.chunks.append(Chunk.of(request, start, num_tokens))
        request.num_scheduled = start + num_tokens
        self.input_left -= self._rounded(num_tokens)
        if self.chunk_left is not None:
            self.chunk_left -= self._rounded(num_tokens)
        if self._crossover is not None:
            self._work_left -= work(self._crossover, start, num_tokens)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, request: Request, match: Match) -> list[int] | None:
        """Pages for what is not cached, if the request may have them. Evicts as needed."""
        num_tokens = self._rounded(request.num_tokens - match.num_tokens)
        if not self._may_spend(request, match, num_tokens):
            return None
        count = num_tokens // self._page_size
        missing = count - self._books.num_free
        if missing > self._cache.num_evictable_pages:
            return None
        if missing > 0:
            self._cache.evict(missing - self._books.num_lingering)  # lingering pages come back by themselves
        return self._books.alloc(count, Owner.REQUEST)

    def _may_spend(self, request: Request, match: Match, num_tokens: int) -> bool:
        """The total test, under the lock; ``num_tokens`` are those of the new pages."""
        if self._proves(request):
            return self._never_runs_out(request, match, num_tokens // self._page_size)
        # A request may ask for more output than the pool can ever hold. Once it would have the pool for itself, waiting
        # gains nothing.
        num_usable = self._tokens(self._books.num_pages - self._books.count(Owner.QUARANTINE)) - match.num_tokens
        need = min(num_tokens + self._reserve(request), max(num_usable - 1, num_tokens))
        return need < self.total_left

    def _proves(self, request: Request) -> bool:
        """Whether outputs are of known length, so that the future can be walked instead of guessed."""
        return self._reserve_output and request.sampling.ignore_eos

    def _never_runs_out(self, request: Request, match: Match, count: int) -> bool:
        """Whether all that run here, and this one too, can grow to their ends in what memory there is."""
        others = [Growth.of(other, self._expected(other), is_late=is_extending(other)) for other in self._running]
        running = {id(other) for other in self._running}
        for chunk in self.chunks:
            if id(chunk.request) not in running:
                others.append(Growth.of(chunk.request, self._expected(chunk.request), is_late=not chunk.is_last))
        if not others:
            return True  # alone: waiting gains nothing
        num_private = count + num_private_pages(match.node)
        num_held = len(match.pages) + count
        # It may be cut into chunks, and then it ends later than by counting its tokens; assume so.
        mine = Growth(request.num_tokens, num_held, self._expected(request), num_private, is_late=True)
        num_available = self._books.num_free + self._cache.num_evictable_pages - count
        return fits([*others, mine], num_available, self._page_size)

    def _expected(self, request: Request) -> int:
        """Output tokens that a request is going to produce (ignore-EOS), or is expected to."""
        if request.sampling.ignore_eos:
            return request.num_left
        return math.ceil(expected_left(request, self._ratio, self._clip))

    def _reserve(self, request: Request) -> int:
        """Output tokens to keep room for."""
        if not self._reserve_output:
            return 0
        return math.ceil(expected_left(request, 1.0, self._clip))

    def _admit(self, request: Request, match: Match, own: list[int]) -> None:
        request.pages = match.pages + own
        request.own = own
        request.node = match.node
        request.num_computed = request.num_scheduled = match.num_tokens
        if not request.output:  # otherwise it was admitted before, here or elsewhere
            request.num_cached = match.num_tokens
        self.total_left -= self._tokens(len(own)) + self._reserve(request)

    def _tokens(self, num_pages: int) -> int:
        return num_pages * self._page_size

    def _rounded(self, num_tokens: int) -> int:
        """Up to whole pages."""
        return -(-num_tokens // self._page_size) * self._page_size
