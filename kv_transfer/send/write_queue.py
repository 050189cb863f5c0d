"""The writes of one prefill node: which pages go next, what is under way, and how long it takes.

Sessions know which of their units are due and in flight. This queue knows the order among sessions, and which ticket of
the transport carries which units.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from common.clock import Clock
from common.errors import invariant
from common.request import RequestKey
from common.wire.messages import PagesWritten
from kv_transfer.checksums import is_covered
from kv_transfer.page_slices import SlicePair
from kv_transfer.send.connections import DecodeConnections
from kv_transfer.send.session import SendSession
from kv_transfer.states import SendState
from kv_transfer.transfer_stats import WriteTime
from kv_transfer.transports.base import WriterTransport

Sums = dict[int, int]  # unit -> checksum
#: At least so many due bytes are written at once, so that large transfers are not reported page by page.
LEAST_BYTES = 8 << 20
#: No further write to a peer begins while so many bytes are under way to it. What has begun cannot be called back when
#: its prompt is aborted, and a more urgent prompt cannot overtake it, which matters where a link is slow.
MOST_BYTES = 256 << 20
#: The most bytes of one write, so that others follow it before its end is reported.
WRITE_BYTES = MOST_BYTES // 4


class Write(NamedTuple):
    """A write under way.

    Attributes:
        sums: checksums of the units that travel with one.
        transport: which one carries it, and is timed; empty once the connection was dropped.
    """

    session: SendSession
    units: Sequence[int]
    sums: Sums
    transport: str
    num_bytes: int


class WriteQueue:
    """Due and running writes of all transfers.

    Args:
        transport: writes pages.
        clock: measures how long its calls take.
        connections: the peers, what a write to each of them moves, and which pages get checksums.
    """

    def __init__(self, transport: WriterTransport, clock: Clock, connections: DecodeConnections) -> None:
        self._clock = clock
        self._transport = transport
        self._page_bytes = transport.store.layout.page_bytes
        self._connections = connections
        self._due: dict[RequestKey, SendSession] = {}  # with pages to write, in the order in which they came due
        self._tickets: dict[int, Write] = {}
        self._bytes_under_way: dict[str, int] = {}  # by peer
        self._write_time = WriteTime()
        self._totals = Counter(pages_sent=0, bytes_sent=0, pages_overlapped=0)
        self._seconds = 0.0

    @property
    def has_due(self) -> bool:
        return any(map(self._may_begin, dict.fromkeys(session.peer for session in self._due.values())))

    def _may_begin(self, peer: str) -> bool:
        """Whether a write to a peer may begin now."""
        return self._bytes_under_way.get(peer, 0) < MOST_BYTES and not self._transport.is_changing(peer)

    def _next_share(self) -> int:
        """Units to write next: all due pages or, where they come with checksums, half of them, but at least 8 MB.

        The decode node can compare them while the others are on their way, and few are left to compare at the end.
        """
        num_due, smallest, is_compared = 0, LEAST_BYTES, False
        for session in self._due.values():
            num_due += session.num_due
            smallest = min(smallest, self._unit_bytes(self._slice_pairs(session)[0]))
            is_compared = is_compared or self._connections.by_peer[session.peer].checksums != "off"
        return max(num_due // 2, LEAST_BYTES // smallest) if is_compared else num_due

    def enqueue(self, session: SendSession) -> None:
        """Note that pages of this session may have come due."""
        if session.num_due and session.state in (SendState.OPEN, SendState.PREFILLED):
            self._due[session.key] = session

    def start(self, max_pages: int, rank: Callable[[RequestKey], float] | None = None) -> None:
        """Begin to write a share of the due pages, but at most so many (units, where page sizes differ).

        Args:
            rank: pages of the transfer with the lowest rank go first; None: first due, first written.
        """
        if not self._due:
            return
        max_pages = min(max_pages, self._next_share())
        due = list(self._due.values())
        if rank is not None:
            due.sort(key=lambda session: rank(session.key))
        for session in due:
            while max_pages > 0 and session.num_due and self._may_begin(session.peer):
                max_pages -= self._start(session, max_pages)

    def _start(self, session: SendSession, limit: int) -> int:
        """Begin one write for each slice pair that the units are of."""
        slice_pairs = self._slice_pairs(session)
        units = session.start(min(limit, max(WRITE_BYTES // self._unit_bytes(slice_pairs[0]), 1)))
        if len(slice_pairs) == 1:
            self._write(session, units, slice_pairs[0])
        else:
            by_pair: dict[int, list[int]] = {}
            for unit in units:
                by_pair.setdefault(unit % len(slice_pairs), []).append(unit)
            for number, some in sorted(by_pair.items()):
                self._write(session, some, slice_pairs[number])
        if not session.num_due:
            del self._due[session.key]
        return len(units)

    def _write(self, session: SendSession, units: Sequence[int], slices: SlicePair | None) -> None:
        begun_at = self._clock.now()
        pages = session.pages_of(units)
        ticket = self._transport.write(session.peer, pages, slices)
        self._seconds += self._clock.now() - begun_at
        connection = self._connections.by_peer[session.peer]
        sums: Sums = {}
        if connection.checksums != "off":
            sources = zip(units, pages, strict=True)
            covered = [(u, page) for u, (page, _) in sources if is_covered(connection.checksums, session.key[1], u)]
            found = self._transport.checksums([page for _, page in covered], slices) if covered else []
            sums = dict(zip([unit for unit, _ in covered], found, strict=True))
        num_bytes = len(units) * self._unit_bytes(slices)
        self._tickets[ticket] = Write(session, units, sums, connection.transport, num_bytes)
        self._bytes_under_way[session.peer] = self._bytes_under_way.get(session.peer, 0) + num_bytes
        self._write_time.begin(connection.transport, begun_at)

    def _slice_pairs(self, session: SendSession) -> Sequence[SlicePair | None]:
        return self._connections.by_peer[session.peer].mapping.slice_pairs

    def _unit_bytes(self, slices: SlicePair | None) -> int:
        return self._page_bytes if slices is None else slices.num_bytes

    def finished(self) -> list[tuple[SendSession, list[int], Sums]]:
        """Sessions with units whose writes are over now, and the checksums of those that have one."""
        if not (tickets := self._transport.done()):
            return []
        finished: dict[RequestKey, tuple[SendSession, list[int], Sums]] = {}
        for ticket in tickets:
            if ticket not in self._tickets:
                continue  # over before its connection was
            write = self._pop(ticket)
            session = write.session
            session.written(write.units)
            known = finished.setdefault(session.key, (session, [], {}))
            known[1].extend(write.units)
            known[2].update(write.sums)
            if write.transport:
                self._count(write)
        return list(finished.values())

    def _count(self, write: Write) -> None:
        num_units = len(write.units)
        self._totals["pages_sent"] += num_units
        self._totals["bytes_sent"] += write.num_bytes
        self._totals["pages_overlapped"] += num_units if write.session.state is SendState.OPEN else 0
        write.session.has_delivered = True

    def stop(self, session: SendSession) -> None:
        if self._due.get(session.key) is session:
            del self._due[session.key]

    def stop_timing(self, peer: str) -> None:
        """The connection was dropped with writes under way. They say no more of its transport; some may never end."""
        for ticket, write in self._tickets.items():
            if write.session.peer == peer and write.transport:
                self._write_time.end(write.transport, self._clock.now())
                self._tickets[ticket] = write._replace(transport="")

    def lose(self, session: SendSession) -> None:
        """Writes of this session never arrive: the transport has dropped its peer."""
        for ticket in [t for t, write in self._tickets.items() if write.session is session]:
            self._pop(ticket)

    def _pop(self, ticket: int) -> Write:
        write = self._tickets.pop(ticket)
        peer = write.session.peer
        self._bytes_under_way[peer] -= write.num_bytes
        if not self._bytes_under_way[peer]:
            del self._bytes_under_way[peer]
        if write.transport:
            self._write_time.end(write.transport, self._clock.now())
        return write

    def counters(self) -> dict[str, float]:
        totals = {name: float(count) for name, count in self._totals.items()}
        return {**totals, "write_seconds": self._seconds, **self._write_time.counters()}

    def check(self, sessions: Iterable[SendSession]) -> None:
        in_flight, num_bytes = Counter[int](), Counter[str]()
        for write in self._tickets.values():
            in_flight[id(write.session)] += len(write.units)
            num_bytes[write.session.peer] += write.num_bytes
        invariant(num_bytes == self._bytes_under_way, "bytes under way are miscounted")
        keys = []
        for session in sessions:
            keys.append(session.key)
            invariant(session.num_in_flight == in_flight.pop(id(session), 0), "a write is under way and not counted")
            is_due = bool(session.num_due) and session.state is not SendState.EARLY
            invariant(is_due == (self._due.get(session.key) is session), "due pages are missing from the queue")
        invariant(not in_flight, "a write is under way for no session")
        left = [key for key in self._due if key not in keys]
        invariant(not left, f"something is left of ended transfers: {left}")


def written_messages(session: SendSession, units: Sequence[int], sums: Sums) -> list[PagesWritten]:
    """The messages that report these units: one for each unit of a page, with and without checksums, and for each
    number of resends.
    """
    assert session.epoch is not None
    per_page = session.units.per_target
    if per_page == 1 and not sums and not session.has_resent:  # the usual case without checksums
        return [PagesWritten(*session.key, session.epoch, tuple(units))] if units else []
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for unit in units:
        alike.setdefault((unit % per_page, session.num_resends(unit), unit in sums), []).append(unit)
    messages = []
    for (unit_of_page, number, is_summed), some in sorted(alike.items()):
        indices = tuple(unit // per_page for unit in some)
        checksums = tuple(sums[unit] for unit in some) if is_summed else ()
        messages.append(PagesWritten(*session.key, session.epoch, indices, unit_of_page, checksums, number))
    return messages
