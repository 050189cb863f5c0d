"""How the pages of two pools correspond when one node's are some times as long as the other's. Pure index arithmetic.

The smaller page is the *unit* of shipping: unit ``u`` of a prompt holds its tokens ``u * tokens`` and on. It lies in
one page of either pool, and there it is all of the smaller page and one of several parts of the larger. Delivery is
told by (page of the decode node, part), and a page is received when all parts that the prompt has of it are there.
"""

from dataclasses import dataclass

from common.geometry import PageGeometry
from kv_transfer.pieces import Box, Piece, whole


@dataclass(frozen=True, slots=True)
class Units:
    """Attributes:
    tokens: of a unit.
    per_source, per_target: units of a page of the prefill node, and of one of the decode node. One of them is 1.
    """

    tokens: int
    per_source: int = 1
    per_target: int = 1

    def count(self, num_tokens: int) -> int:
        """Units of a prompt, the last one perhaps partly filled."""
        return -(-num_tokens // self.tokens)

    def num_target_pages(self, num_units: int) -> int:
        """Pages of the decode node that so many units fill, the last one perhaps partly."""
        return -(-num_units // self.per_target)

    def of_target(self, index: int) -> range:
        """Units that the decode node's page of this index has room for."""
        return range(index * self.per_target, (index + 1) * self.per_target)


def units_of(source_size: int, target_size: int) -> Units:
    """For pages of so many tokens; one must be a multiple of the other."""
    tokens = min(source_size, target_size)
    assert max(source_size, target_size) % tokens == 0
    return Units(tokens, source_size // tokens, target_size // tokens)


class Fit:
    """The prefill node's pages and those of one decode node.

    Attributes:
        units: their common measure.
        pieces: what a write moves of a unit, by its number modulo their count; None: a whole page each.
    """

    def __init__(self, ours: PageGeometry, theirs: PageGeometry) -> None:
        self.ours = ours
        self.theirs = theirs
        self.units = units_of(ours.page_size, theirs.page_size)
        num_pieces = max(self.units.per_source, self.units.per_target)
        self.pieces: tuple[Piece | None, ...] = (None,)
        if num_pieces > 1:
            self.pieces = tuple(self._piece(number) for number in range(num_pieces))

    def _piece(self, number: int) -> Piece:
        tokens = self.units.tokens
        source, target = (self._box(g, number * tokens % g.page_size) for g in (self.ours, self.theirs))
        return Piece(self.ours, source, self.theirs, target)

    def _box(self, geometry: PageGeometry, token: int) -> Box:
        all_of_it = whole(geometry)
        return Box(0, all_of_it.num_layers, 0, all_of_it.num_heads, token, self.units.tokens)

    def most_granted(self, num_tokens: int | None, num_source_pages: int) -> int:
        """Pages of the decode node that a prompt can fill: of so many tokens, or any with so many pages here."""
        if num_tokens is not None:
            return self.theirs.num_pages(num_tokens)
        return self.units.num_target_pages(num_source_pages * self.units.per_source)

    def number_of(self, unit: int) -> int:
        """Which of ``pieces`` moves this unit."""
        return unit % len(self.pieces)
