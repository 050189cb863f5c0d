"""An in-process transport whose time is advanced by hand, for tests and the simulator.

A write takes effect some ticks after it started, and a tick moves a limited number of bytes. The source is read and the
destination written at that moment. So, as on hardware, a source page that is reused too early, or a write that arrives
after its destination has a new owner, corrupts a page. Fence: ``detach`` drops undelivered writes (on a wire that can
recall them); the reader's ``poll`` reports a writer that a test has declared dead.

Faults are passed in page by page (``Fault``) or injected with ``arrive``, ``partition`` and ``die``; nothing here is
random.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.wire.messages import Connect
from kv_transfer.page_slices import SlicePair, copy
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, AttachError, Fenced, ReaderTransport, WriterTransport

FaultKind = Literal["drop", "duplicate", "reorder", "delay", "corrupt", "partition", "restart"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that happens to one page in flight.

    Attributes:
        kind: ``drop``: the page never arrives and the connection breaks. ``duplicate``: the page arrives twice, and its
            write ends with the second. ``reorder``: the page is late and later pages pass it. ``delay``: the page is
            late and holds up later pages. ``corrupt``: the page arrives with one byte changed, undetected by the wire.
            ``partition``: from now on nothing passes between the two ends for a while, without notice. ``restart``:
            the writer's process dies at this page.
        ticks: until the second copy, of lateness, or of the partition.
    """

    kind: FaultKind
    ticks: int = 1


@dataclass(slots=True, eq=False)
class _Page:
    writer: "InProcessWriter"
    peer: str
    ticket: int
    source: int
    target: int
    slices: SlicePair | None
    due_at: int = 0
    fault: FaultKind | None = None
    fault_ticks: int = 0

    @property
    def pair(self) -> tuple[str, str]:
        return (self.writer.incarnation, self.peer)


@dataclass(slots=True)
class Wire:
    """Connects writers and readers.

    Attributes:
        latency: ticks from the start of a write to its first byte; with 0, writes end when they start.
        bytes_per_tick: bytes that move in one tick, in whole pages and at least one; None for no limit.
        faults: by the number of the page, counted from 0 in the order in which pages start.
        can_recall: False if pages in flight still arrive after ``detach`` (which says so), as with remote memory
            access.
    """

    latency: int = 0
    bytes_per_tick: int | None = None
    faults: Mapping[int, Fault] = field(default_factory=dict)
    can_recall: bool = True
    num_ticks: int = 0
    num_begun: int = 0  # pages started
    num_ends: int = 0  # writers and readers made
    offers: dict[str, tuple["InProcessReader", str]] = field(default_factory=dict)  # endpoint -> reader, peer
    _pages: dict[int, _Page] = field(default_factory=dict)  # in flight, by number
    _partitions: dict[tuple[str, str], int] = field(default_factory=dict)  # pair -> tick at which pages pass again

    @property
    def num_in_flight(self) -> int:
        return len(self._pages)

    @property
    def is_instant(self) -> bool:
        return self.latency == 0 and self.bytes_per_tick is None

    @property
    def in_flight(self) -> Sequence[int]:
        """Numbers of the pages in flight, oldest first."""
        return list(self._pages)

    def tick(self) -> None:
        self.num_ticks += 1
        self._partitions = {p: t for p, t in self._partitions.items() if t > self.num_ticks}
        self.deliver()

    def deliver(self) -> None:
        """Deliver the pages that are due, within the bytes of one tick."""
        budget = self.bytes_per_tick
        held_up: set[tuple[str, str]] = set()
        for number, page in list(self._pages.items()):
            if budget is not None and budget <= 0:
                return
            if number not in self._pages or page.pair in held_up or page.pair in self._partitions:
                continue
            if page.due_at <= self.num_ticks:
                num_bytes = self.arrive(number)
                budget = None if budget is None else budget - num_bytes
            elif page.fault != "reorder":
                if not self.faults:
                    return  # no later page is due either
                held_up.add(page.pair)

    def arrive(self, number: int) -> int:
        """Deliver one page or apply its fault; return the bytes moved."""
        page = self._pages[number]
        kind, page.fault = page.fault, None
        if kind == "restart":
            page.writer.die()
        elif kind == "drop":
            page.writer.lose(page.peer, f"page {page.source} was lost")
        elif kind == "partition":
            self._partitions[page.pair] = self.num_ticks + page.fault_ticks
        else:
            num_bytes = page.writer.put(page.peer, page.source, page.target, page.slices)
            if kind == "corrupt":
                page.writer.spoil(page.peer, page.target, page.slices)
            if kind == "duplicate":
                page.due_at = self.num_ticks + page.fault_ticks
            else:
                del self._pages[number]
                page.writer.arrived(page.ticket)
            return num_bytes
        return 0

    def befall(self, number: int, kind: FaultKind, ticks: int = 0) -> None:
        self._pages[number].fault, self._pages[number].fault_ticks = kind, ticks

    def begin(self, page: _Page) -> None:
        number, page.due_at = self.num_begun, self.num_ticks + self.latency
        self.num_begun += 1
        self._pages[number] = page
        fault = self.faults.get(number)
        if fault is not None:
            self.befall(number, fault.kind, fault.ticks)
            page.due_at += fault.ticks if fault.kind in ("reorder", "delay") else 0

    def is_carrying(self, writer: "InProcessWriter", peer: str) -> bool:
        """Whether a page is in flight between the two."""
        return any(page.writer is writer and page.peer == peer for page in self._pages.values())

    def drop(self, writer: "InProcessWriter", peer: str) -> list[int]:
        """Drop all pages in flight to this peer; return the tickets of their writes."""
        found = [n for n, page in self._pages.items() if page.writer is writer and page.peer == peer]
        return list(dict.fromkeys(self._pages.pop(number).ticket for number in found))


class InProcessWriter(WriterTransport):
    """``WriterTransport`` over a wire. A ``peer`` is the incarnation of a reader."""

    name = "inprocess"

    def __init__(self, wire: Wire, store: PageStore, incarnation: str = "") -> None:
        wire.num_ends += 1
        self.store = store
        self.incarnation = incarnation or str(wire.num_ends)
        self.finished: list[int] = []
        self._wire = wire
        self._readers: dict[str, InProcessReader] = {}
        self._leaving: dict[str, None] = {}  # detached peers with pages in flight
        self._news: list[Attached] = []
        self._remaining: dict[int, int] = {}  # ticket -> pages in flight
        self._lost: dict[str, list[int]] = {}  # tickets of a broken connection, until `detach`
        self._num_tickets = 0

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._readers, "detach first"
        offer = self._wire.offers.pop(connect.endpoint, None)
        if offer is None:
            raise AttachError(f"there is no offer {connect.endpoint!r} in this process")
        reader, writer_name = offer
        reader.writers[self] = (writer_name, connect.epoch)
        self._readers[peer] = reader
        self._news.append(Attached(peer, connect.epoch))

    def poll(self) -> list[Attached]:
        news, self._news = self._news, []
        return news

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        assert peer in self._readers, "not attached"
        self._num_tickets += 1
        ticket = self._num_tickets
        self._remaining[ticket] = len(pages)
        if not pages:
            self._finish(ticket)
        for source, target in pages:
            self._wire.begin(_Page(self, peer, ticket, source, target, slices))
        if self._wire.is_instant:
            self._wire.deliver()
        return ticket

    def put(self, peer: str, source: int, target: int, slices: SlicePair | None = None) -> int:
        """Copy one page or a slice of it now; return the bytes copied."""
        reader = self._readers[peer]
        num_bytes = reader.store.layout.page_bytes
        with memoryview(reader.store.memory) as memory, memory[target * num_bytes : (target + 1) * num_bytes] as into:
            if slices is None:
                self.store.export_page(source, into)
                return num_bytes
            page = bytearray(self.store.layout.page_bytes)
            self.store.export_page(source, memoryview(page))
            copy(slices, memoryview(page), into)
            return slices.num_bytes

    def spoil(self, peer: str, target: int, slices: SlicePair | None = None) -> None:
        """Change one byte of the peer's page, or of a slice of it."""
        store = self._readers[peer].store
        at = 0 if slices is None else slices.runs[0][1]
        with memoryview(store.memory) as memory:
            memory[target * store.layout.page_bytes + at] ^= 0xFF

    def arrived(self, ticket: int) -> None:
        self._remaining[ticket] -= 1
        if not self._remaining[ticket]:
            self._finish(ticket)

    def _finish(self, ticket: int) -> None:
        del self._remaining[ticket]
        self.finished.append(ticket)

    def _drop(self, peer: str) -> None:
        """Drop the pages in flight to a peer. Writes that ``detach`` reported as unfinished count as finished."""
        for ticket in self._wire.drop(self, peer):
            if peer in self._leaving:
                self._finish(ticket)
            else:
                del self._remaining[ticket]
                self._lost.setdefault(peer, []).append(ticket)

    def done(self) -> list[int]:
        tickets, self.finished = self.finished, []
        return tickets

    def lose(self, peer: str, why: str) -> None:
        """Break the connection and drop its pages in flight."""
        self._drop(peer)
        if peer in self._leaving:
            return
        _, epoch = self._readers[peer].writers[self]
        self._news.append(Attached(peer, epoch, f"the wire to {peer} broke: {why}"))

    def detach(self, peer: str) -> bool:
        self._news = [news for news in self._news if news.peer != peer]
        if not self._wire.can_recall and self._wire.is_carrying(self, peer):
            self._leaving[peer] = None
            self.finished += self._lost.pop(peer, [])
            return False
        self._drop(peer)
        self._leaving.pop(peer, None)
        self._lost.pop(peer, None)
        reader = self._readers.pop(peer, None)
        if reader is not None:
            reader.gone(self, "the writer has detached")
        return True

    def die(self) -> None:
        """Stop as ``kill -9`` would."""
        for peer, reader in list(self._readers.items()):
            self._drop(peer)
            reader.gone(self, "the writer has died", is_dead=True)
        self._readers.clear()

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for peer in list(self._readers):
            self.detach(peer)


class InProcessReader(ReaderTransport):
    """``ReaderTransport`` over a wire."""

    name = "inprocess"

    def __init__(self, wire: Wire, store: PageStore, incarnation: str = "") -> None:
        wire.num_ends += 1
        self.store = store
        self.incarnation = incarnation or str(wire.num_ends)
        self.writers: dict[InProcessWriter, tuple[str, int]] = {}  # name, epoch
        self._wire = wire
        self._offers: dict[str, str] = {}  # peer -> endpoint
        self._news: list[Fenced] = []

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        endpoint = f"inprocess:{self.incarnation}:{peer}:{epoch}"
        assert endpoint not in self._wire.offers, "two readers of one name"
        self._offers[peer] = endpoint
        self._wire.offers[endpoint] = (self, peer)
        return endpoint

    def withdraw(self, peer: str) -> None:
        endpoint = self._offers.pop(peer, None)
        if endpoint is not None:
            self._wire.offers.pop(endpoint, None)

    def gone(self, writer: InProcessWriter, reason: str, *, is_dead: bool = False) -> None:
        self._news.append(Fenced(*self.writers.pop(writer), reason, is_dead))

    def poll(self, now: float) -> list[Fenced]:
        news, self._news = self._news, []
        return news

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def die(self) -> None:
        """Stop as ``kill -9`` would: withdraw all offers."""
        for peer in list(self._offers):
            self.withdraw(peer)

    def close(self) -> None:
        for peer in list(self._offers):
            self.withdraw(peer)
