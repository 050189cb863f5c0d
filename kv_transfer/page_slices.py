"""What a write moves when it is not whole pages: a piece of our page becomes a piece of the peer's. Pure arithmetic.

A piece is named by a ``PageSlice`` of layers, heads and tokens on either side; the two hold the same numbers of
each. Its
bytes lie in runs: as many as the two pages have in common pieces of memory. What travels in one stream (TCP, Gloo) goes
in the order of the runs, which is ``[layer][key or value][head][token][head_dim]`` of the box.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from common.cache.page_layout import ITEM_BYTES, PageLayout


class PageSlice(NamedTuple):
    """Part of a page: keys and values of these layers, heads and tokens (first, and how many)."""

    layer: int
    num_layers: int
    head: int
    num_heads: int
    token: int
    num_tokens: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return (self.num_layers, self.num_heads, self.num_tokens)

    def is_within(self, geometry: PageLayout) -> bool:
        """Is it not empty, and all of it inside of a page?"""
        return (
            min(self.layer, self.head, self.token) >= 0
            and min(self.counts) > 0
            and self.layer + self.num_layers <= geometry.num_layers
            and self.head + self.num_heads <= geometry.num_kv_heads
            and self.token + self.num_tokens <= geometry.page_size
        )

    def overlaps(self, other: "PageSlice") -> bool:
        return (
            self.layer < other.layer + other.num_layers
            and other.layer < self.layer + self.num_layers
            and self.head < other.head + other.num_heads
            and other.head < self.head + self.num_heads
            and self.token < other.token + other.num_tokens
            and other.token < self.token + self.num_tokens
        )

    def num_bytes(self, geometry: PageLayout) -> int:
        token_bytes = geometry.head_dim * ITEM_BYTES[geometry.dtype]
        return 2 * self.num_layers * self.num_heads * self.num_tokens * token_bytes

    def runs(self, geometry: PageLayout) -> list[tuple[int, int]]:
        """(offset in the page, bytes) of its contiguous parts, in order, as long as they can be."""
        assert self.is_within(geometry)
        token_bytes = geometry.head_dim * ITEM_BYTES[geometry.dtype]
        length = self.num_tokens * token_bytes
        runs: list[tuple[int, int]] = []
        layers = range(self.layer, self.layer + self.num_layers)
        heads = range(self.head, self.head + self.num_heads)
        for layer, is_value, head in product(layers, (False, True), heads):
            at = geometry.offset(0, layer=layer, value=is_value, head=head) + self.token * token_bytes
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((at, length))
        return runs


def whole(geometry: PageLayout) -> PageSlice:
    """All of a page."""
    return PageSlice(0, geometry.num_layers, 0, geometry.num_kv_heads, 0, geometry.page_size)


@dataclass(frozen=True)
class Piece:
    """``source`` of a page of ours becomes ``target`` of a page of the peer's.

    Attributes:
        ours, theirs: the shapes of the pages.
    """

    ours: PageLayout
    source: PageSlice
    theirs: PageLayout
    target: PageSlice

    def __post_init__(self) -> None:
        assert self.source.counts == self.target.counts
        assert (self.ours.head_dim, self.ours.dtype) == (self.theirs.head_dim, self.theirs.dtype)

    @cached_property
    def num_bytes(self) -> int:
        return self.source.num_bytes(self.ours)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(offset in our page, offset in the peer's, bytes), in order."""
        return tuple(_join(iter(self.source.runs(self.ours)), iter(self.target.runs(self.theirs))))


def _join(sources: Iterator[tuple[int, int]], targets: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Two lists of runs of the same bytes, cut so that they go together."""
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


def copy(piece: Piece, source: memoryview, target: memoryview) -> None:
    """From a page of ours into a page of the peer's, both as bytes."""
    for at, to, length in piece.runs:
        target[to : to + length] = source[at : at + length]
