"""How the pages of two pools correspond when page sizes differ by a whole factor. Pure index arithmetic.

The smaller page is the *unit* of shipping: unit ``u`` of a prompt holds its tokens ``u * tokens`` and on. It lies in
one page of either pool: it is all of the smaller page, and one of several parts of the larger. Delivery is reported by
(page of the decode node, part), and a page is received when all parts that the prompt has of it are there.
"""

from dataclasses import dataclass

from common.cache.page_layout import PageLayout
from kv_transfer.page_slices import PageSlice, SlicePair


@dataclass(frozen=True, slots=True)
class Units:
    """The common measure of two page sizes.

    Attributes:
        tokens: of a unit.
        per_source, per_target: units of a page of the prefill node, and of a page of the decode node. One of them
            is 1.
    """

    tokens: int
    per_source: int = 1
    per_target: int = 1

    def count(self, num_tokens: int) -> int:
        """Units of a prompt, including a partly filled last one."""
        return -(-num_tokens // self.tokens)

    def num_target_pages(self, num_units: int) -> int:
        """Pages of the decode node that so many units fill, including a partly filled last one."""
        return -(-num_units // self.per_target)

    def of_target(self, index: int) -> range:
        """Units that fit into the decode node's page of this index."""
        return range(index * self.per_target, (index + 1) * self.per_target)


def parts_of(layout: PageLayout, num_units: int) -> tuple[PageSlice, ...]:
    """The slices of a page that is cut into so many units, in order."""
    tokens = layout.page_size // num_units
    assert tokens * num_units == layout.page_size
    return tuple(PageSlice(number * tokens, tokens) for number in range(num_units))


def units_of(source_size: int, target_size: int) -> Units:
    """The units of pages of so many tokens; one size must be a multiple of the other."""
    tokens = min(source_size, target_size)
    assert max(source_size, target_size) % tokens == 0
    return Units(tokens, source_size // tokens, target_size // tokens)


class PageMapping:
    """The prefill node's pages and those of one decode node.

    Attributes:
        units: their common measure.
        slice_pairs: what a write moves of a unit, by the unit's number modulo their count; None: a whole page each.
    """

    def __init__(self, ours: PageLayout, theirs: PageLayout) -> None:
        self.ours = ours
        self.theirs = theirs
        self.units = units_of(ours.page_size, theirs.page_size)
        sources, targets = parts_of(ours, self.units.per_source), parts_of(theirs, self.units.per_target)
        self.slice_pairs: tuple[SlicePair | None, ...] = (None,)
        if len(sources) + len(targets) > 2:
            pairs = [(source, target) for source in sources for target in targets]  # one of the two has one only
            self.slice_pairs = tuple(SlicePair(ours, source, theirs, target) for source, target in pairs)

    def max_target_pages(self, num_tokens: int | None, num_source_pages: int) -> int:
        """Pages of the decode node that a prompt can fill: of ``num_tokens`` or, if None, of any that fits here."""
        if num_tokens is not None:
            return self.theirs.num_pages(num_tokens)
        return self.units.num_target_pages(num_source_pages * self.units.per_source)
