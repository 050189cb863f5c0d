"""One transfer at the decode node: which pages are granted, and which units of them have arrived. Pure.

A transfer is known by (rid, attempt). The decode node grants destination pages for the page indices of the prompt that
it lacks; the prefill node's end is ``kv_transfer.send.session``.
"""

from collections.abc import Sequence

from common.errors import invariant
from common.request import RequestKey
from common.state_machine import advance
from kv_transfer.states import MAX_RESENDS, RECEIVE_TABLE, ReceiveEvent, ReceiveState


class ReceiveSession:
    """The decode node's end of a transfer; arrivals are counted by (page index, unit).

    A unit of a page is a token range, and of those tokens some heads (``kv_transfer.page_mapping``).

    Attributes:
        key, peer: which transfer, and the incarnation of the prefill node.
        first: index of the first page that is shipped; of the first that is left after ``take_arrived``.
        num_cached: pages before it that were cached.
        pages: destinations of index ``first`` and on, up to the end of the prompt.
        length: of the transfer, in tokens: see ``PageAllocator.transfer_length``.
        num_pages: pages of that length.
        epoch: of the connection when the pages were granted; 0 before.
        num_token_ranges: token ranges in which a whole page comes; known when the pages are granted.
        num_parts: units of the same tokens, which hold different heads.
    """

    def __init__(
        self, key: RequestKey, peer: str, *, first: int, pages: Sequence[int], length: int, page_size: int
    ) -> None:
        self.length = length
        self.num_pages = -(-length // page_size)
        assert first >= 0 and first + len(pages) == self.num_pages, "one page for each that the prompt lacks"
        self.key = key
        self.peer = peer
        self.state = ReceiveState.RESERVED
        self.first = self.num_cached = first
        self.pages = list(pages)
        self.epoch = 0
        self.num_token_ranges = self.num_parts = 1
        self._page_size = page_size
        self._whole: set[int] = set()  # indices of pages that have arrived
        self._units: dict[int, set[int]] = {}  # of pages of which some units have arrived, by index
        self._num_corrupt: dict[tuple[int, int], int] = {}  # by (index, unit)

    def accepts(self, event: ReceiveEvent) -> bool:
        return (self.state, event) in RECEIVE_TABLE

    def apply(self, event: ReceiveEvent) -> None:
        self.state = advance(RECEIVE_TABLE, self.state, event)

    def grant(self, epoch: int, num_token_ranges: int = 1, num_parts: int = 1) -> None:
        """The writer is told of the pages; it writes each token range of a page in ``num_parts`` units."""
        self.apply(ReceiveEvent.GRANT)
        assert self.epoch in (0, epoch)
        self.epoch = epoch
        self.num_token_ranges, self.num_parts = num_token_ranges, num_parts
        if self.is_landed:
            self.apply(ReceiveEvent.LAND)

    @property
    def _most_units(self) -> int:
        """Units of a page that is full of tokens."""
        return self.num_token_ranges * self.num_parts

    def _num_units(self, index: int) -> int:
        """Units of the page with this index; the last page of a prompt may have fewer."""
        num_tokens = min(self.length - index * self._page_size, self._page_size)
        return -(-num_tokens * self.num_token_ranges // self._page_size) * self.num_parts

    def suspend(self) -> None:
        """The writer cannot write any more; pages that have not wholly arrived will be granted again."""
        self.apply(ReceiveEvent.SUSPEND)
        self.epoch = 0
        self._num_corrupt.clear()  # the writer may not have received what we asked for again
        self._units.clear()

    def lacking(self) -> list[tuple[int, list[int]]]:
        """Rows of pages that have not arrived, as (first index, pages)."""
        if not self._whole:
            return [(self.first, list(self.pages))] if self.pages else []
        rows: list[tuple[int, list[int]]] = []
        for index in range(self.first, self.num_pages):
            if index in self._whole:
                continue
            if rows and sum((rows[-1][0], len(rows[-1][1]))) == index:
                rows[-1][1].append(self.page_of(index))
            else:
                rows.append((index, [self.page_of(index)]))
        return rows

    @property
    def num_missing(self) -> int:
        """Pages that have not wholly arrived."""
        return self.num_pages - self.first - len(self._whole)

    @property
    def is_landed(self) -> bool:
        return len(self._whole) == self.num_pages - self.first

    def is_expected(self, indices: Sequence[int], unit: int, num_resends: int | None = None) -> bool:
        """Whether a peer could truthfully report that this unit of these pages has just been written.

        Args:
            num_resends: how often the unit has been written again by then; None: any number. A report from before
                we asked for a unit again says nothing about what the page holds now.
        """
        if not indices:
            return False
        if min(indices) < self.first or max(indices) >= self.num_pages or len(set(indices)) < len(indices):
            return False
        if unit >= self._most_units or not self._whole.isdisjoint(indices):
            return False
        if self._most_units > 1 and any(unit >= self._num_units(i) or unit in self._units.get(i, ()) for i in indices):
            return False
        if num_resends is None or not self._num_corrupt:
            return not num_resends
        return all(self._num_corrupt.get((i, unit), 0) == num_resends for i in indices)

    def deliver(self, indices: Sequence[int], unit: int) -> list[int]:
        """Record what has been written, which ``is_expected``; return the destination pages that are whole now."""
        assert self._whole.isdisjoint(indices), "a page arrives again"
        self.apply(ReceiveEvent.DELIVER)
        whole = indices if self._most_units == 1 else [index for index in indices if self._is_last(index, unit)]
        self._whole.update(whole)
        if whole and self.is_landed:
            self.apply(ReceiveEvent.LAND)
        pages, first = self.pages, self.first
        return [pages[index - first] for index in whole]

    def _is_last(self, index: int, unit: int) -> bool:
        """Record that this unit of a page has arrived; return whether the page is whole now."""
        units = self._units.setdefault(index, set())
        units.add(unit)
        is_whole = len(units) == self._num_units(index)
        if is_whole:
            del self._units[index]
        return is_whole

    def take_arrived(self) -> list[int]:
        """Give up the first pages, as far as they have arrived whole and are full of tokens; return them.

        Each of their units was written, reported and, where that is wanted, compared; it is not asked for again. So the
        writer is done with them, as with all pages of a complete transfer.
        """
        num_full = self.length // self._page_size
        end = self.first
        while end < num_full and end in self._whole:
            self._whole.remove(end)
            end += 1
        count = end - self.first
        taken, self.pages = self.pages[:count], self.pages[count:]
        self.first = end
        return taken

    def corrupt(self, indices: Sequence[int], unit: int) -> bool:
        """Record that this unit of these pages came with other bytes. False: too often to one of them."""
        assert self.is_expected(indices, unit)
        self.apply(ReceiveEvent.CORRUPT)
        for index in indices:
            self._num_corrupt[index, unit] = self._num_corrupt.get((index, unit), 0) + 1
        return all(self._num_corrupt[index, unit] <= MAX_RESENDS for index in indices)

    def page_of(self, index: int) -> int:
        return self.pages[index - self.first]

    def check(self) -> None:
        known = range(self.first, self.num_pages)
        invariant(all(index in known for index in (*self._whole, *self._units)), "a page has arrived of another prompt")
        invariant(self._whole.isdisjoint(self._units), "a page has arrived both whole and in part")
        invariant(len(set(self.pages)) == len(self.pages), "a page is reserved twice")
        is_waiting = self.state in (ReceiveState.GRANTED, ReceiveState.PREFILLED)
        invariant(not (is_waiting and self.is_landed), "every page is here and the state does not say so")
        invariant(self.state is not ReceiveState.LANDED or self.is_landed, "a landed transfer lacks pages")
