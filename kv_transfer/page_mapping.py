"""How the pages of two pools correspond when their sizes differ, or when ranks divide them. Pure index arithmetic.

The smaller page is the measure: a token range of that size lies in one page of either pool. Where a node divides its
pages among ranks, each rank has some of the KV heads of every page, and a token range is sent in as many *parts* as
there are pairs of ranks that share heads (``head_parts``). One part of one token range is a *unit*. Delivery is
reported by (page of the decode node, unit), and a page is received when all units that the prompt has of it are there.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from common.cache.page_layout import PageLayout, kv_heads_of
from kv_transfer.page_slices import PageSlice, SlicePair

#: The most units of a page: a prefill node keeps a slice pair of each, for every decode node.
MAX_UNITS = 4_096


class HeadPart(NamedTuple):
    """The KV heads that one rank of the prefill node sends to one rank of the decode node."""

    source_rank: int
    target_rank: int
    heads: range


@lru_cache(maxsize=256)  # a node has many pairs, and nearly all of them are alike
def head_parts(num_kv_heads: int, num_sources: int, num_targets: int) -> tuple[HeadPart, ...]:
    """All parts of a page between two nodes of so many ranks; no pair of ranks has more than one.

    Every target rank gets each of its heads once. Where several source ranks have a head, the targets that need it are
    divided among them.
    """
    having, wanting = _ranks_by_head(num_kv_heads, num_sources), _ranks_by_head(num_kv_heads, num_targets)
    parts: list[HeadPart] = []
    for target in range(num_targets):
        for head in kv_heads_of(target, num_targets, num_kv_heads):
            number = wanting[head].index(target)
            source = having[head][number * len(having[head]) // len(wanting[head])]
            if parts and parts[-1][:2] == (source, target):
                parts[-1] = HeadPart(source, target, range(parts[-1].heads.start, head + 1))
            else:
                parts.append(HeadPart(source, target, range(head, head + 1)))
    return tuple(parts)


def _ranks_by_head(num_kv_heads: int, num_ranks: int) -> list[list[int]]:
    owned = [kv_heads_of(rank, num_ranks, num_kv_heads) for rank in range(num_ranks)]
    return [[rank for rank, heads in enumerate(owned) if head in heads] for head in range(num_kv_heads)]


def rank_layout(layout: PageLayout, num_ranks: int) -> PageLayout:
    """The layout of the pages of one of so many ranks, from that of whole pages."""
    return layout.of_heads(len(kv_heads_of(0, num_ranks, layout.num_kv_heads)))


@dataclass(frozen=True, slots=True)
class Units:
    """The common measure of the pages of two nodes.

    Attributes:
        tokens: of a unit.
        per_source, per_target: units of a page of the prefill node, and of a page of the decode node.
        num_parts: units of the same tokens, which hold different heads.
    """

    tokens: int
    per_source: int = 1
    per_target: int = 1
    num_parts: int = 1

    def count(self, length: int) -> int:
        """Units of a transfer of this length in tokens, including those of a partly filled last page."""
        return -(-length // self.tokens) * self.num_parts

    def num_target_pages(self, num_units: int) -> int:
        """Pages of the decode node that so many units fill, including a partly filled last one."""
        return -(-num_units // self.per_target)


def units_of(source_size: int, target_size: int, num_parts: int = 1) -> Units:
    """The units of pages of so many tokens; one size must be a multiple of the other."""
    tokens = min(source_size, target_size)
    assert max(source_size, target_size) % tokens == 0
    return Units(tokens, source_size // tokens * num_parts, target_size // tokens * num_parts, num_parts)


def units_conflict(ours: PageLayout, theirs: PageLayout, *, num_sources: int, num_targets: int) -> str:
    """Why the pages of two nodes would have too many units, as a sentence; empty if they do not.

    Args:
        ours, theirs: layouts of whole pages, between which there is no ``layout_conflict``.
        num_sources, num_targets: ranks of the two nodes.
    """
    num_parts = len(head_parts(ours.num_kv_heads, num_sources, num_targets))
    units = units_of(ours.page_size, theirs.page_size, num_parts)
    most = max(units.per_source, units.per_target)
    if most <= MAX_UNITS:
        return ""
    sizes = f"page_size {theirs.page_size} and num_ranks {num_targets} there, {ours.page_size} and {num_sources} here"
    return f"a page would come in {most} units ({sizes}), and {MAX_UNITS} is the most"


def target_units(
    layout: PageLayout, num_token_ranges: int, *, num_sources: int = 1, num_targets: int = 1
) -> list[PageSlice]:
    """The units of a page of the decode node, by their number in messages.

    Args:
        layout: of whole pages.
        num_token_ranges: into how many token ranges the writer divides a page.
        num_sources, num_targets: ranks of the two nodes.
    """
    parts = head_parts(layout.num_kv_heads, num_sources, num_targets)
    return _cut(layout, num_token_ranges, num_targets, [(part.target_rank, part.heads) for part in parts])


def _cut(layout: PageLayout, num_token_ranges: int, num_ranks: int, owned: list[tuple[int, range]]) -> list[PageSlice]:
    tokens = layout.page_size // num_token_ranges
    assert tokens * num_token_ranges == layout.page_size
    slices = []
    for number in range(num_token_ranges):
        for rank, heads in owned:
            first = kv_heads_of(rank, num_ranks, layout.num_kv_heads).start
            slices.append(PageSlice(number * tokens, tokens, heads.start - first, len(heads), rank))
    return slices


class PageMapping:
    """The prefill node's pages and those of one decode node.

    Args:
        ours, theirs: layouts of whole pages, with the heads of all ranks.
        num_sources, num_targets: ranks of the two nodes.

    Attributes:
        units: their common measure.
        slice_pairs: what a write moves of a unit, by the unit's number modulo their count; None: a whole page each.
    """

    def __init__(self, ours: PageLayout, theirs: PageLayout, *, num_sources: int = 1, num_targets: int = 1) -> None:
        parts = head_parts(ours.num_kv_heads, num_sources, num_targets)
        self.theirs = theirs
        self.units = units_of(ours.page_size, theirs.page_size, len(parts))
        owned = [(part.source_rank, part.heads) for part in parts]
        sources = _cut(ours, self.units.per_source // len(parts), num_sources, owned)
        num_token_ranges = self.units.per_target // len(parts)
        targets = target_units(theirs, num_token_ranges, num_sources=num_sources, num_targets=num_targets)
        count = max(len(sources), len(targets))  # the shorter one is repeated
        ours, theirs = rank_layout(ours, num_sources), rank_layout(theirs, num_targets)
        self.slice_pairs: tuple[SlicePair | None, ...] = tuple(
            SlicePair(ours, sources[number % len(sources)], theirs, targets[number % len(targets)])
            for number in range(count)
        )
        if count == 1:
            self.slice_pairs = (None,)

    def max_target_pages(self, length: int | None, max_source_pages: int) -> int:
        """Pages of the decode node that a transfer of this length in tokens can fill; None: the longest one."""
        if length is not None:
            return self.theirs.num_pages(length)
        return self.units.num_target_pages(max_source_pages * self.units.per_source)
