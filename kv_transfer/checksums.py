"""Checksums of pages, or of slices of them, where they lie at either end of a transfer.

A checksum is half of an XXH3 hash of 64 bits, which is computed as fast as memory is read (zlib's CRC-32 takes six
times as long), and misses one in four billion damaged pages. Where pages are cut differently at the two ends, both take
the bytes in the order ``[layer][key or value][head][token][head_dim]`` of the slice, so that the runs do not matter.

The source is summed as its write begins, and must not change before the write is over. It does not: a page is given to
the sender when it is computed, whole and final; its KV depends on nothing that comes later; it stays held until the
transfer's ``Released``; and nothing is written behind the prompt's last tokens on a partly filled page, since a prefill
node computes no output. A source that changed all the same would show as a mismatch.
"""

from collections.abc import Iterable

import xxhash

from common.wire.messages import Coverage
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.page_store import PageStore

WIDTHS: tuple[Coverage, ...] = ("off", "sampled", "all")
#: One of so many pages is sampled.
SAMPLED_EVERY = 16


def wider(one: Coverage, other: Coverage) -> Coverage:
    """The one of two that covers more pages."""
    return max(one, other, key=WIDTHS.index)


def is_covered(coverage: Coverage, attempt: int, unit: int) -> bool:
    """Whether a unit of a transfer gets a checksum. A sample begins at another unit in each attempt."""
    return coverage == "all" or (coverage == "sampled" and (attempt + unit) % SAMPLED_EVERY == 0)


class Checksums:
    """Checksums of the pages of one store."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._size = store.layout.page_bytes
        self._scratch = bytearray()

    def of_sources(self, pages: Iterable[int], slices: SlicePair | None) -> list[int]:
        """``of_source`` of each of these pages."""
        return [self.of_source(page, slices) for page in pages]

    def of_targets(self, pages: Iterable[int], page_slice: PageSlice) -> list[int]:
        """``of_target`` of this slice of each of these pages."""
        runs = page_slice.runs(self._store.layout)
        return [self.of_target(page, runs) for page in pages]

    def of_source(self, page: int, slices: SlicePair | None) -> int:
        """Checksum of our page as it stands in the pool, or of the source slice of it."""
        runs = None if slices is None else [(at, length) for at, _, length in slices.runs]
        return self._sum(page, runs, is_in_memory=self._store.is_mapped)

    def of_target(self, page: int, runs: Iterable[tuple[int, int]]) -> int:
        """Checksum of these (offset, bytes) runs of a page that has come, where it has come to."""
        is_in_memory = self._store.is_mapped or not self._store.is_in_place
        return self._sum(page, runs, is_in_memory=is_in_memory)

    def _sum(self, page: int, runs: Iterable[tuple[int, int]] | None, *, is_in_memory: bool) -> int:
        if is_in_memory:
            with memoryview(self._store.memory) as memory:
                return _sum(memory, page * self._size, runs or [(0, self._size)])
        self._scratch = self._scratch or bytearray(self._size)
        with memoryview(self._scratch) as scratch:
            self._store.export_page(page, scratch)
            return _sum(scratch, 0, runs or [(0, self._size)])


def _sum(memory: memoryview, base: int, runs: Iterable[tuple[int, int]]) -> int:
    total = xxhash.xxh3_64()
    for at, length in runs:
        with memory[base + at : base + at + length] as run:
            total.update(run)
    return total.intdigest() >> 32
