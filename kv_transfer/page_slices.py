"""Slices of pages, and what a write moves when it does not move whole pages. Pure arithmetic.

A ``PageSlice`` names tokens and heads of a page. A ``SlicePair`` names a slice of our page and the slice of the peer's
page that it becomes; both hold the same numbers of tokens and heads. The bytes of a slice lie in runs, as many as the
contiguous pieces of memory that the two pages share. On one stream (TCP, Gloo) they travel in the order of the runs,
which is ``[layer][key or value][head][token][head_dim]`` of the slice, with the scales of a head's tokens after their
numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from common.cache.page_layout import PageLayout


class PageSlice(NamedTuple):
    """Part of a page: the keys and values of ``num_tokens`` tokens from ``token`` on, and of ``num_heads`` KV heads
    from ``head`` on.

    ``rank``: whose page it is, on a node that divides its pages among ranks.
    """

    token: int
    num_tokens: int
    head: int
    num_heads: int
    rank: int = 0

    def is_within(self, layout: PageLayout) -> bool:
        """Whether the slice is not empty and lies inside a page."""
        return (
            0 <= self.token < self.token + self.num_tokens <= layout.page_size
            and 0 <= self.head < self.head + self.num_heads <= layout.num_kv_heads
        )

    def is_whole(self, layout: PageLayout) -> bool:
        """Whether the slice is all of a page."""
        return (self.num_tokens, self.num_heads) == (layout.page_size, layout.num_kv_heads)

    def overlaps(self, other: "PageSlice") -> bool:
        """Whether a byte of the same page is in both."""
        return (
            self.token < other.token + other.num_tokens
            and other.token < self.token + self.num_tokens
            and self.head < other.head + other.num_heads
            and other.head < self.head + self.num_heads
        )

    def num_bytes(self, layout: PageLayout) -> int:
        return layout.page_bytes // (layout.page_size * layout.num_kv_heads) * self.num_tokens * self.num_heads

    def runs(self, layout: PageLayout) -> list[tuple[int, int]]:
        """(offset in the page, bytes) of its contiguous parts, in order, each as long as possible."""
        assert self.is_within(layout)
        if self.is_whole(layout):
            return [(0, layout.page_bytes)]
        found = []
        for layer, (side, dim) in product(range(layout.num_layers), enumerate(layout.stored_dims)):
            start = layout.offset(0, layer=layer, value=side == 1, head=self.head)
            head_bytes = layout.head_bytes(dim)
            if self.num_tokens == layout.page_size:  # heads of a layer are contiguous
                found.append((start, self.num_heads * head_bytes))
                continue
            found += [
                (start + head * head_bytes + inside + self.token * size, self.num_tokens * size)
                for head in range(self.num_heads)
                for inside, size in layout.token_parts(dim)
            ]
        return found


def whole(layout: PageLayout) -> PageSlice:
    """The slice that is all of a page."""
    return PageSlice(0, layout.page_size, 0, layout.num_kv_heads)


@dataclass(frozen=True)
class SlicePair:
    """``source`` of a page of ours becomes ``target`` of a page of the peer's.

    Attributes:
        ours, theirs: the layouts of the pages; those of the ranks where nodes divide their pages.
    """

    ours: PageLayout
    source: PageSlice
    theirs: PageLayout
    target: PageSlice

    def __post_init__(self) -> None:
        assert self.source[1::2] == self.target[1::2], "the two hold different numbers of tokens or heads"
        alike = replace(self.ours, page_size=self.theirs.page_size, num_kv_heads=self.theirs.num_kv_heads)
        assert alike == self.theirs

    @property
    def is_whole(self) -> bool:
        """Whether a whole page becomes a whole page of the same layout."""
        return self.ours == self.theirs and self.source.is_whole(self.ours)

    @cached_property
    def num_bytes(self) -> int:
        return self.source.num_bytes(self.ours)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(offset in our page, offset in the peer's, bytes), in order."""
        return tuple(_join(iter(self.source.runs(self.ours)), iter(self.target.runs(self.theirs))))


def _join(sources: Iterator[tuple[int, int]], targets: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Cut two lists of runs of the same bytes so that they correspond one to one."""
    source, num_source, target, num_target = 0, 0, 0, 0
    while True:
        if not num_source:
            source, num_source = next(sources, (0, 0))
        if not num_target:
            target, num_target = next(targets, (0, 0))
        length = min(num_source, num_target)
        if not length:
            assert num_source == num_target == 0, "the two hold different numbers of bytes"
            return
        yield source, target, length
        source, num_source, target, num_target = (
            source + length,
            num_source - length,
            target + length,
            num_target - length,
        )


def whole_pages(layout: PageLayout) -> SlicePair:
    """The pair of slices that are all of a page, where both ends have the same layout."""
    return SlicePair(layout, whole(layout), layout, whole(layout))


def copy(slices: SlicePair, source: memoryview, target: memoryview) -> None:
    """Copy a slice of our page into the peer's page, both given as bytes."""
    for at, to, length in slices.runs:
        target[to : to + length] = source[at : at + length]
