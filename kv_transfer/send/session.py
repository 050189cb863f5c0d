"""One transfer at the prefill node: which units are granted, computed, and on their way. Pure.

A transfer is known by (rid, attempt). The decode node grants destination pages for the page indices of the prompt that
it lacks. The prefill node sends each unit (a page or, where page sizes differ, a part of one; see
``kv_transfer.page_mapping``) exactly once, as soon as it is both granted and computed. The decode node's end is
``kv_transfer.receive.session``.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from common.errors import invariant
from common.request import RequestKey
from common.state_machine import advance
from kv_transfer.page_mapping import Units
from kv_transfer.send.tombstones import TransferEnd
from kv_transfer.states import MAX_RESENDS, SEND_TABLE, SendEvent, SendState

#: What a transfer may wait for: pages of the decode node, the prefill, a turn to write, the end of its writes, and the
#: decode node's word that everything has arrived.
STAGES = ("waiting_for_grant", "computing", "waiting_to_write", "writing", "waiting_for_ack")


@dataclass(slots=True, frozen=True, eq=False)
class PagePairs(Sequence[tuple[int, int]]):
    """Pairs of our page and the peer's page, made on demand."""

    sources: Sequence[int]
    targets: Sequence[int]

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, place: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, place: slice) -> "PagePairs": ...
    def __getitem__(self, place: int | slice) -> "tuple[int, int] | PagePairs":
        if isinstance(place, slice):
            return PagePairs(self.sources[place], self.targets[place])
        return self.sources[place], self.targets[place]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.sources, self.targets, strict=True)


class SendSession:
    """The prefill node's end of a transfer.

    Attributes:
        key, peer: which transfer, and the incarnation of the decode node.
        epoch: of the connection, since the first grant; None before.
        units: of the connection, since the first grant.
        sources: our pages, as far as they are computed.
        targets: the decode node's page for each page index of the prompt that it has granted.
        length: of the transfer, in tokens: see ``PageAllocator.transfer_length``; None until the prompt is computed.
        is_suspended: the connection broke; nothing is granted until there is another.
        num_in_flight: writes (of one unit each) begun and not over.
        num_due: units that could be started now.
        has_delivered: a page has been written.
        transfer_end: how it has ended; None until then.
    """

    def __init__(self, key: RequestKey, peer: str, state: SendState = SendState.OPEN) -> None:
        self.key = key
        self.peer = peer
        self.state = state
        self.epoch: int | None = None
        self.units = Units(1)
        self.sources: list[int] = []
        self.targets: dict[int, int] = {}
        self.length: int | None = None
        self.is_suspended = self.has_delivered = False
        self.transfer_end: TransferEnd | None = None
        self._is_short = False  # pages granted before the connection broke may not have been written
        self._in_flight: set[int] = set()
        self._num_resends: dict[int, int] = {}
        self._due: deque[Sequence[int]] = deque()  # runs of units
        self._uncomputed: list[range] = []  # granted, not computed yet

    @property
    def is_granted(self) -> bool:
        return self.epoch is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_due(self) -> int:
        return sum(map(len, self._due))

    @property
    def is_all_written(self) -> bool:
        return not self._is_short and not self._due and not self._uncomputed and not self._in_flight

    @property
    def stage(self) -> str:
        """One of ``STAGES``."""
        if self._in_flight:
            return "writing"
        if not self.is_granted or self.is_suspended:
            return "waiting_for_grant"
        if self._due:
            return "waiting_to_write"
        return "computing" if self.state is SendState.OPEN else "waiting_for_ack"

    def accepts(self, event: SendEvent) -> bool:
        return (self.state, event) in SEND_TABLE

    def apply(self, event: SendEvent) -> None:
        self.state = advance(SEND_TABLE, self.state, event)

    def open(self) -> None:
        self.apply(SendEvent.OPEN)

    def is_repeated(self, epoch: int, first: int, pages: Sequence[int]) -> bool:
        """Whether exactly these pages have been granted before; then the grant asks for nothing."""
        is_known = bool(pages) and self.epoch == epoch and not self.is_suspended
        return is_known and all(self.targets.get(index) == page for index, page in enumerate(pages, first))

    def grant(self, epoch: int, first: int, pages: Sequence[int], units: Units) -> None:
        """Destination pages of indices ``first`` and on; the caller has validated them."""
        self.apply(SendEvent.GRANT)
        assert self.epoch in (None, epoch) or (self.is_suspended and not self._in_flight)
        self.epoch = epoch
        self.units = units
        self.is_suspended = self._is_short = False
        indices = range(first, first + len(pages))
        assert not self.targets or self.targets.keys().isdisjoint(indices)
        self.targets.update(zip(indices, pages, strict=True))
        if pages:
            self._uncomputed.append(range(first * units.per_target, indices.stop * units.per_target))
        self._release()

    def compute(self, pages: Sequence[int]) -> None:
        """Source pages of indices ``0 .. len(pages) - 1``; may repeat known pages, and grow."""
        self.apply(SendEvent.COMPUTE)
        self._grow(pages)

    def finish(self, pages: Sequence[int], length: int) -> None:
        """Source pages of the whole prompt, including a partial last one."""
        self.apply(SendEvent.FINISH)
        self.length = length
        self._grow(pages)

    def _grow(self, pages: Sequence[int]) -> None:
        num_known = len(self.sources)
        assert len(pages) >= num_known, "computed pages cannot become fewer"
        self.sources += pages[num_known:]
        self._release()

    def _release(self) -> None:
        """Make units due that are both granted and computed, and drop those behind the end of the prompt."""
        if not self._uncomputed:
            return
        num_computed = self._num_computed()
        ends_at = num_computed  # of what is due or dropped
        if self.length is not None:
            ends_at = self.units.num_target_pages(num_computed) * self.units.per_target
        uncomputed, self._uncomputed = self._uncomputed, []
        for run in uncomputed:
            if run.start < num_computed:
                self._due.append(range(run.start, min(run.stop, num_computed)))
            if run.stop > ends_at:
                self._uncomputed.append(range(max(run.start, ends_at), run.stop))

    def _num_computed(self) -> int:
        if self.length is not None:
            return self.units.count(self.length)
        return len(self.sources) * self.units.per_source

    def suspend(self, *, is_fenced: bool = True) -> None:
        """Nothing that was granted can be written any more.

        The peer grants again what it has not received; if it has everything, it need not.

        Args:
            is_fenced: False: writes under way may still arrive.
        """
        self.apply(SendEvent.SUSPEND)
        if not self.is_suspended:
            self._is_short = self.state is not SendState.PREFILLED or not self.is_all_written
        self.is_suspended = True
        for table in (self.targets, self._uncomputed, self._num_resends):
            table.clear()
        if is_fenced:
            self._in_flight.clear()
        self._due.clear()

    def retract(self) -> None:
        """Forget the source pages: nothing was granted, and they will be computed again."""
        assert not self.is_granted, "a decode node waits for these pages"
        self.apply(SendEvent.RETRACT)
        self.sources.clear()
        self.length = None

    def has_ungrantable(self) -> bool:
        """Whether an index is granted that the prompt, now computed, does not have."""
        return bool(self._uncomputed)

    def start(self, limit: int) -> Sequence[int]:
        """Take at most ``limit`` due units, whose writes begin now."""
        self.apply(SendEvent.START)
        units: Sequence[int] = ()
        while self._due and len(units) < limit:
            run, num_left = self._due.popleft(), limit - len(units)
            if len(run) > num_left:
                self._due.appendleft(run[num_left:])
                run = run[:num_left]
            units = [*units, *run] if units else run
        self._in_flight.update(units)
        return units

    def pages_of(self, units: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Our page and the peer's page between which each unit moves."""
        per_source, per_target = self.units.per_source, self.units.per_target
        sources, targets = self.sources, self.targets
        if per_source == per_target == 1 and isinstance(units, range):
            return PagePairs(sources[units.start : units.stop], list(map(targets.__getitem__, units)))
        return [(sources[unit // per_source], targets[unit // per_target]) for unit in units]

    def written(self, units: Sequence[int]) -> None:
        self.apply(SendEvent.WRITTEN)
        num_left = len(self._in_flight) - len(units)
        self._in_flight.difference_update(units)
        assert len(self._in_flight) == num_left, "a unit was written that was not under way"

    def is_written(self, units: Sequence[int]) -> bool:
        """Whether each of these units was written, so that the peer may find it damaged."""
        pending = {*chain(*self._due, *self._uncomputed), *self._in_flight}
        num_computed = self._num_computed()
        return len(set(units)) == len(units) and all(
            unit // self.units.per_target in self.targets and unit < num_computed and unit not in pending
            for unit in units
        )

    @property
    def has_resent(self) -> bool:
        """Whether a unit was to be written again."""
        return bool(self._num_resends)

    def num_resends(self, unit: int) -> int:
        return self._num_resends.get(unit, 0)

    def resend(self, units: Sequence[int]) -> bool:
        """Write these units again. False: one of them has been written again too often already."""
        self.apply(SendEvent.RESEND)
        for unit in units:
            self._num_resends[unit] = self._num_resends.get(unit, 0) + 1
        self._due.append(units)
        return all(self._num_resends[unit] <= MAX_RESENDS for unit in units)

    def end(self, transfer_end: TransferEnd) -> list[int]:
        """Begin no further write.

        Returns:
            The peer's pages to which no write is under way. The peer may grant them again for another transfer, at once
            if they had arrived.
        """
        self.apply(SendEvent.END)
        self.transfer_end = transfer_end
        self._due.clear()
        self._uncomputed.clear()
        awaited = {unit // self.units.per_target for unit in self._in_flight}
        return [self.targets.pop(index) for index in list(self.targets) if index not in awaited]

    def sever(self, transfer_end: TransferEnd) -> None:
        """The connection is gone: units under way never arrive."""
        if self.accepts(SendEvent.END):
            self.end(transfer_end)
        self._in_flight.clear()
        self.fence()

    def fence(self) -> None:
        assert self.num_in_flight == 0, "a write is still under way"
        self.apply(SendEvent.FENCE)

    def check(self) -> None:
        due, uncomputed = set(chain(*self._due)), set(chain(*self._uncomputed))
        num_computed = len(self.sources) * self.units.per_source
        invariant(len(due) == self.num_due, "a unit is due twice")
        invariant(len(uncomputed) == sum(map(len, self._uncomputed)), "a unit waits twice to be computed")
        invariant(
            all(unit // self.units.per_target in self.targets for unit in due), "a unit is due and was not granted"
        )
        invariant(all(unit < num_computed for unit in due), "a unit is due before it is computed")
        invariant(not due & uncomputed and not due & self._in_flight, "a unit is in two queues")
        invariant(
            self.length is not None or all(unit >= num_computed for unit in uncomputed),
            "a unit waits to be computed and is computed",
        )
        num_granted = len(self.targets) * self.units.per_target
        num_in_flight = 0 if self.is_suspended else self.num_in_flight
        invariant(len(due) + len(uncomputed) + num_in_flight <= num_granted, "more is on its way than granted")
        invariant(
            self.state not in (SendState.CLOSING, SendState.CLOSED) or not due, "an ended transfer would still write"
        )
        invariant(
            self.state is not SendState.PREFILLED or not self._uncomputed,
            "a page is granted that the prompt does not have",
        )
        invariant(not self.is_suspended or not self.targets, "pages are granted of a connection that broke")
