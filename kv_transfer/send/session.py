"""One transfer, seen from its two ends: what each keeps track of. No I/O, no clock, no page books.

A transfer is known by (rid, attempt). The decode node grants destination pages for the prompt's page indices that it
lacks; the prefill node sends each unit (a page, or a part of one where pages are unequal, see ``fit``) once it is both
granted and computed, exactly once. ``SendSession`` knows which units are due, ``ReceiveSession`` which parts of which
pages are still missing. What can happen to either, and when, is in ``kv_transfer.states``.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from common.errors import invariant
from common.request import RequestKey
from common.state_machine import advance
from kv_transfer.page_mapping import Units
from kv_transfer.states import RECEIVE_TABLE, SEND_TABLE, ReceiveEvent, Receiving, SendEvent, Sending

#: How often the same part of a page may be sent again because it came with other bytes.
MAX_RESENDS = 3


class SendSession:
    """The prefill node's end: which units are granted, computed, on their way.

    Attributes:
        key, peer: whose transfer, and to whom (incarnation).
        epoch: of the pair, since the first grant; None before.
        units: of the pair, since the first grant.
        sources: our pages, as far as they are computed.
        targets: page index of the prompt, as the decode node counts them -> its page, as granted.
        num_tokens: of the prompt; None until it is computed.
        is_suspended: the pair's connection broke; nothing is granted until there is another.
        num_in_flight: writes (of one unit each) begun and not over.
        num_due: units that could be started now.
    """

    def __init__(self, key: RequestKey, peer: str, state: Sending = Sending.OPEN) -> None:
        self.key = key
        self.peer = peer
        self.state = state
        self.epoch: int | None = None
        self.units = Units(1)
        self.sources: list[int] = []
        self.targets: dict[int, int] = {}
        self.num_tokens: int | None = None
        self.is_suspended = False
        self._is_short = False  # of something that was granted before the connection broke
        self._in_flight: dict[int, None] = {}
        self._num_resends: dict[int, int] = {}
        self._due: deque[int] = deque()
        self._early: dict[int, None] = {}  # granted, not computed yet

    @property
    def is_granted(self) -> bool:
        return self.epoch is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_due(self) -> int:
        return len(self._due)

    @property
    def is_all_written(self) -> bool:
        return not self._is_short and not self._due and not self._early and not self._in_flight

    def accepts(self, event: SendEvent) -> bool:
        return (self.state, event) in SEND_TABLE

    def apply(self, event: SendEvent) -> None:
        self.state = advance(SEND_TABLE, self.state, event)

    def open(self) -> None:
        self.apply(SendEvent.OPEN)

    def is_repeated(self, epoch: int, first: int, pages: Sequence[int]) -> bool:
        """Is this, word for word, what has been granted before? Then hearing it again asks for nothing."""
        is_known = bool(pages) and self.epoch == epoch and not self.is_suspended
        return is_known and all(self.targets.get(index) == page for index, page in enumerate(pages, first))

    def grant(self, epoch: int, first: int, pages: Sequence[int], units: Units) -> None:
        """Destination pages of indices ``first`` and on; the caller has validated them."""
        self.apply(SendEvent.GRANT)
        assert self.epoch in (None, epoch) or (self.is_suspended and not self._in_flight)
        self.epoch = epoch
        self.units = units
        self.is_suspended = self._is_short = False
        for index, page in enumerate(pages, first):
            assert index not in self.targets
            self.targets[index] = page
            self._early.update(dict.fromkeys(units.of_target(index)))
        self._release()

    def compute(self, pages: Sequence[int]) -> None:
        """Source pages of indices ``0 .. len(pages)``; may repeat what is known, and grow."""
        self.apply(SendEvent.COMPUTE)
        self._grow(pages)

    def finish(self, pages: Sequence[int], num_tokens: int) -> None:
        """Source pages of the whole prompt, a partial last one included."""
        self.apply(SendEvent.FINISH)
        self.num_tokens = num_tokens
        self._grow(pages)

    def _grow(self, pages: Sequence[int]) -> None:
        num_known = len(self.sources)
        assert len(pages) >= num_known, "computed pages cannot become fewer"
        self.sources += pages[num_known:]
        self._release()

    def _release(self) -> None:
        """What is both granted and computed is due; room behind the prompt's end will never be."""
        num_computed = self._num_computed()
        if self.num_tokens is not None:
            behind = range(num_computed, self.units.num_target_pages(num_computed) * self.units.per_target)
            for unit in [unit for unit in self._early if unit in behind]:
                del self._early[unit]
        for unit in [unit for unit in self._early if unit < num_computed]:
            del self._early[unit]
            self._due.append(unit)

    def _num_computed(self) -> int:
        if self.num_tokens is not None:
            return self.units.count(self.num_tokens)
        return len(self.sources) * self.units.per_source

    def suspend(self, *, is_fenced: bool = True) -> None:
        """Nothing of what was granted can be written any more; where that is not known (``is_fenced``), what is under
        way may come or not. The peer grants anew what it has not received; if it has everything, it need not."""
        self.apply(SendEvent.SUSPEND)
        if not self.is_suspended:
            self._is_short = self.state is not Sending.HANDED or not self.is_all_written
        self.is_suspended = True
        for table in (self.targets, self._early, self._num_resends):
            table.clear()
        if is_fenced:
            self._in_flight.clear()
        self._due.clear()

    def retract(self) -> None:
        """Forget the source pages: nothing was granted, and they will be computed again."""
        assert not self.is_granted, "somebody waits for these pages"
        self.apply(SendEvent.RETRACT)
        self.sources.clear()
        self.num_tokens = None

    def has_ungrantable(self) -> bool:
        """With the prompt computed: is an index granted that the prompt does not have?"""
        return bool(self._early)

    def start(self, limit: int) -> list[int]:
        """Take at most ``limit`` due units, whose writes begin now."""
        self.apply(SendEvent.START)
        units = [self._due.popleft() for _ in range(min(limit, len(self._due)))]
        self._in_flight.update(dict.fromkeys(units))
        return units

    def way_of(self, unit: int) -> tuple[int, int]:
        """From which page of ours to which of the peer's."""
        return self.sources[unit // self.units.per_source], self.targets[unit // self.units.per_target]

    def written(self, units: Iterable[int]) -> None:
        """The writes of these are over."""
        self.apply(SendEvent.WRITTEN)
        for unit in units:
            del self._in_flight[unit]

    def is_written(self, units: Sequence[int]) -> bool:
        """Was each of these written, so that the peer may find it damaged?"""
        pending = {*self._due, *self._early, *self._in_flight}
        num_computed = self._num_computed()
        return len(set(units)) == len(units) and all(
            unit // self.units.per_target in self.targets and unit < num_computed and unit not in pending
            for unit in units
        )

    def num_resends(self, unit: int) -> int:
        """How often it has been asked for again."""
        return self._num_resends.get(unit, 0)

    def resend(self, units: Sequence[int]) -> bool:
        """Write these again. False: one of them has been written again too often already."""
        self.apply(SendEvent.RESEND)
        for unit in units:
            self._num_resends[unit] = self._num_resends.get(unit, 0) + 1
        self._due.extend(units)
        return all(self._num_resends[unit] <= MAX_RESENDS for unit in units)

    def end(self) -> None:
        """Nothing more starts."""
        self.apply(SendEvent.END)
        self._due.clear()
        self._early.clear()

    def sever(self) -> None:
        """The mapping is gone: what was under way never arrives."""
        if self.accepts(SendEvent.END):
            self.end()
        self._in_flight.clear()
        self.fence()

    def fence(self) -> None:
        assert self.num_in_flight == 0, "a write is still under way"
        self.apply(SendEvent.FENCE)

    def check(self) -> None:
        due = set(self._due)
        num_computed = len(self.sources) * self.units.per_source
        invariant(len(due) == len(self._due), "a unit is due twice")
        invariant(
            all(unit // self.units.per_target in self.targets for unit in due), "a unit is due and was not granted"
        )
        invariant(all(unit < num_computed for unit in due), "a unit is due before it is computed")
        invariant(not due & self._early.keys() and not due & self._in_flight.keys(), "a unit is in two queues")
        invariant(
            self.num_tokens is not None or all(unit >= num_computed for unit in self._early),
            "a unit waits to be computed and is computed",
        )
        num_granted = len(self.targets) * self.units.per_target
        num_in_flight = 0 if self.is_suspended else self.num_in_flight
        invariant(len(due) + len(self._early) + num_in_flight <= num_granted, "more is on its way than granted")
        invariant(self.state not in (Sending.CLOSING, Sending.CLOSED) or not due, "an ended transfer would still write")
        invariant(
            self.state is not Sending.HANDED or not self._early, "a page is granted that the prompt does not have"
        )
        invariant(not self.is_suspended or not self.targets, "pages are granted of a connection that broke")


class ReceiveSession:
    """The decode node's end: which pages are granted and which of them have arrived, by (index, part).

    A part is one of the writer's units within a page, and where several ranks write, one rank's share of it.

    Attributes:
        key, peer: whose transfer, and from whom (incarnation).
        first: index of the first page that is shipped.
        pages: destination of index ``first`` and on.
        num_tokens, num_pages: of the whole prompt.
        epoch: of the pair when the pages were granted; 0 before.
        num_units: in which a whole page comes, from every rank; known when the pages are granted.
    """

    def __init__(
        self, key: RequestKey, peer: str, *, first: int, num_tokens: int, page_size: int = 1, num_ranks: int = 1
    ) -> None:
        self.num_tokens = num_tokens
        self.num_pages = -(-num_tokens // page_size)
        assert 0 <= first <= self.num_pages and num_ranks >= 1
        self.key = key
        self.peer = peer
        self.state = Receiving.RESERVED
        self.first = first
        self.pages: list[int] = []
        self.epoch = 0
        self._page_size = page_size
        self._num_ranks = num_ranks
        self.num_units = 1  # of a whole page
        self._arrived: dict[int, set[int]] = {}  # index -> parts
        self._num_whole = 0
        self._num_corrupt: dict[tuple[int, int], int] = {}  # by (index, part)

    def accepts(self, event: ReceiveEvent) -> bool:
        return (self.state, event) in RECEIVE_TABLE

    def apply(self, event: ReceiveEvent) -> None:
        self.state = advance(RECEIVE_TABLE, self.state, event)

    def reserve(self, pages: Sequence[int]) -> None:
        """More destination pages, for the indices after those known so far."""
        assert self.first + len(self.pages) + len(pages) <= self.num_pages, "more pages than the prompt lacks"
        self.pages.extend(pages)

    def grant(self, epoch: int, num_units: int = 1) -> None:
        """The writer is told of the pages; it writes each in so many units."""
        self.apply(ReceiveEvent.GRANT)
        assert self.epoch in (0, epoch)
        self.epoch = epoch
        self.num_units = num_units
        if self.is_landed:
            self.apply(ReceiveEvent.LAND)

    def _num_parts(self, index: int) -> int:
        """Of this page: the prompt's last may have fewer."""
        num_tokens = min(self.num_tokens - index * self._page_size, self._page_size)
        return -(-num_tokens * self.num_units // self._page_size) * self._num_ranks

    def suspend(self) -> None:
        """The writer cannot write any more; pages that have not wholly arrived are to be granted anew."""
        self.apply(ReceiveEvent.SUSPEND)
        self.epoch = 0
        self._num_corrupt.clear()  # what was asked for again may not have been heard
        whole = {index for index, parts in self._arrived.items() if len(parts) == self._num_parts(index)}
        self._arrived = {index: parts for index, parts in self._arrived.items() if index in whole}

    def lacking(self) -> list[tuple[int, list[int]]]:
        """The pages that have not arrived, as consecutive ones together: (index of the first, pages)."""
        rows: list[tuple[int, list[int]]] = []
        for index in range(self.first, self.first + len(self.pages)):
            if index in self._arrived:
                continue
            if rows and sum((rows[-1][0], len(rows[-1][1]))) == index:
                rows[-1][1].append(self.page_of(index))
            else:
                rows.append((index, [self.page_of(index)]))
        return rows

    @property
    def is_landed(self) -> bool:
        return self._num_whole == self.num_pages - self.first

    def is_expected(self, indices: Sequence[int], part: int, num_resends: int | None = None) -> bool:
        """Could a peer truthfully say that this part of these pages has been written just now, for the how-manieth time
        after the first (None: any)? What it said before we asked for it again says nothing of what is there now."""
        end = self.first + len(self.pages)
        return (
            len(set(indices)) == len(indices)
            and all(self.first <= i < end and part < self._num_parts(i) for i in indices)
            and all(part not in self._arrived.get(i, ()) for i in indices)
            and (num_resends is None or all(self._num_corrupt.get((i, part), 0) == num_resends for i in indices))
        )

    def deliver(self, indices: Sequence[int], part: int) -> list[int]:
        """Note what has been written.

        Returns:
            The destination pages that are whole now.
        """
        assert self.is_expected(indices, part)
        self.apply(ReceiveEvent.DELIVER)
        whole = []
        for index in indices:
            parts = self._arrived.setdefault(index, set())
            parts.add(part)
            if len(parts) == self._num_parts(index):
                whole.append(self.page_of(index))
        self._num_whole += len(whole)
        if whole and self.is_landed:
            self.apply(ReceiveEvent.LAND)
        return whole

    def corrupt(self, indices: Sequence[int], part: int) -> bool:
        """This part of these pages came with other bytes. False: of one of them too often."""
        assert self.is_expected(indices, part)
        self.apply(ReceiveEvent.CORRUPT)
        for index in indices:
            self._num_corrupt[index, part] = self._num_corrupt.get((index, part), 0) + 1
        return all(self._num_corrupt[index, part] <= MAX_RESENDS for index in indices)

    def page_of(self, index: int) -> int:
        return self.pages[index - self.first]

    def check(self) -> None:
        whole = sum(len(parts) == self._num_parts(index) for index, parts in self._arrived.items())
        invariant(whole == self._num_whole, "arrived pages are miscounted")
        invariant(len(set(self.pages)) == len(self.pages), "a page is reserved twice")
        is_waiting = self.state in (Receiving.GRANTED, Receiving.HANDED)
        invariant(not (is_waiting and self.is_landed), "every page is here and nobody noticed")
        invariant(self.state is not Receiving.LANDED or self.is_landed, "a landed transfer lacks pages")
