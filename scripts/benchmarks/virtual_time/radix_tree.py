"""The radix cache with a million tokens of ``bench scheduler``, and its timer."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import TOKEN_BYTES, TokenKey

PAGE_SIZE = 16
NUM_PREFIXES = 50
PREFIX_TOKENS = 256
NUM_LEAVES = 1_000
LEAF_TOKENS = 1_008
PROBE_TOKENS = 8_192
CHAIN_NODES = 16


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table, in microseconds; None where no figure has been published."""

    name: str
    median_us: float
    p99_us: float
    python_tree_us: float | None = None
    rust_tree_us: float | None = None
    mark_us: float | None = None


class Tree:
    """A cache with 1,020,800 tokens, and room for the probes."""

    def __init__(self) -> None:
        num_pages = (NUM_PREFIXES * PREFIX_TOKENS + NUM_LEAVES * LEAF_TOKENS + 2 * PROBE_TOKENS) // PAGE_SIZE
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.allocator, PAGE_SIZE)
        self._random = np.random.default_rng(0)
        self.prefixes = [self.fresh(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self._num_leaves = 0
        self._locked = list(self.cache.nodes())
        self.grow(NUM_LEAVES)
        assert self.cache.num_pages * PAGE_SIZE == 1_020_800

    def grow(self, num_leaves: int) -> None:
        """Add requests with a shared prefix and 1,008 new tokens each."""
        for _ in range(num_leaves):
            self.add(self.prefixes[self._num_leaves % NUM_PREFIXES] + self.fresh(LEAF_TOKENS))
            self._num_leaves += 1

    def fresh(self, num_tokens: int) -> TokenKey:
        """Packed random tokens from a vocabulary of 151,936."""
        return self._random.integers(0, 151_936, num_tokens).astype("<i4").tobytes()

    def pages_for(self, key: TokenKey) -> list[int]:
        pages = self.allocator.alloc(len(key) // (TOKEN_BYTES * PAGE_SIZE), Owner.REQUEST)
        assert pages is not None
        return pages

    def add(self, key: TokenKey) -> None:
        pages = self.pages_for(key)
        self.allocator.free(pages[: self.cache.insert(key, pages).first_adopted], Owner.REQUEST)

    def add_chain(self, key: TokenKey, num_nodes: int) -> list[int]:
        """Insert the first ``num_nodes`` sixteenths of ``key`` one by one, as chunks are; return their pages."""
        size = len(key) // CHAIN_NODES
        pages: list[int] = []
        for end in range(size, num_nodes * size + 1, size):
            pages += self.pages_for(key[:size])
            self.cache.insert(key[:end], pages)
        return pages

    def lock_all(self) -> None:
        """Lock all nodes, so that ``cache.clear`` removes only nodes added later."""
        self._locked = list(self.cache.nodes())
        for node in self._locked:
            self.cache.lock(node)

    def unlock_all(self) -> None:
        for node in self._locked:
            self.cache.unlock(node)


def timed(work: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def figure(
    name: str, times_us: list[float], *,
    python: float | None = None, rust: float | None = None, mark: float | None = None,
) -> Figure:  # fmt: skip
    """Median and 99th percentile of the samples, with the published figures of SGLang's trees and the target."""
    ordered = sorted(times_us)
    return Figure(name, statistics.median(ordered), ordered[int(len(ordered) * 0.99)], python, rust, mark)
