"""A page allocator, a radix cache and ``PrefillAdder``s over them, for tests of admission. Pages have 4 tokens."""

from itertools import count
from typing import Any

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import cache_computed
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.prefill_adder import AddResult, PrefillAdder, PrefillLimits

CONTINUE, NO_TOKEN, OTHER = AddResult.CONTINUE, AddResult.NO_TOKEN, AddResult.OTHER
PAGE = 4
_names = count()


class Pool:
    """A page allocator and a radix cache, and adders over them."""

    def __init__(self, num_pages: int, page_size: int = PAGE, *, is_enabled: bool = True) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, page_size, is_enabled=is_enabled)

    @property
    def num_tokens(self) -> int:
        """Free and evictable memory in tokens."""
        return (self.allocator.num_free + self.cache.num_evictable_pages) * self.page_size

    def adder(
        self,
        total: int | None = None,
        inputs: int = 10_000,
        chunk: int | None = None,
        **rest: Any,
    ) -> PrefillAdder:
        limits = PrefillLimits(8, max_prefill_tokens=inputs, chunk_tokens=chunk)
        options = {"total_tokens": self.num_tokens if total is None else total, "reserve_output": False, **rest}
        return PrefillAdder(self.cache, self.allocator, limits, **options)

    def cached(self, *tokens: int) -> None:
        """Put these tokens into the cache."""
        pages = self.allocator.alloc(len(tokens) // self.page_size, Owner.REQUEST)
        assert pages is not None
        self.cache.insert(tokens, pages)

    def check(self) -> None:
        self.allocator.check()
        self.cache.check()


def request(length: int, max_new: int = 1, *, start: int | None = None, ignore_eos: bool = False) -> Request:
    """Return a request with the prompt ``start, start + 1, ...``, by default with tokens of no other request."""
    number = next(_names)
    first = number * 1000 if start is None else start
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=ignore_eos)
    return Request(f"r{number}", 0, tuple(range(first, first + length)), sampling)


def chunks_of(adder: PrefillAdder) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.num_tokens, chunk.is_last) for chunk in adder.chunks]


def compute(pool: Pool, adder: PrefillAdder) -> None:
    """Count the chunks as computed and cache them, as a role does after the step."""
    for chunk in adder.chunks:
        chunk.request.num_computed += chunk.num_tokens
        cache_computed(pool.cache, chunk.request)
    pool.check()
