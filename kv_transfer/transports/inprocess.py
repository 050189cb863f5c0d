"""Writers and readers of one process, joined by a wire whose time is turned by hand. For tests and the simulator.

A write takes effect some ticks after it began, and a tick moves only so many bytes; the source is read and the
destination written at that moment and no earlier. So a source page given away too soon, or a write that arrives after
its destination went to someone else, corrupts pages here just as it would on hardware. Fence: ``detach`` drops what
has not been delivered; a writer that a test declares dead is reported by the reader's ``poll``.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.messages import Connect
from kv_transfer.pieces import Piece, copy
from kv_transfer.transports.base import Attached, AttachError, Fenced, PageStore


@dataclass(slots=True)
class _Write:
    writer: "InProcessWriter"
    peer: str
    ticket: int
    pages: deque[tuple[int, int]]
    due_at: int
    piece: Piece | None = None


@dataclass(slots=True)
class Wire:
    """Joins writers and readers.

    Attributes:
        latency: ticks between the beginning of a write and its first byte. With 0, writes are over when they begin.
        bytes_per_tick: how much moves in one tick, whole pages only but at least one; None: any amount.
    """

    latency: int = 0
    bytes_per_tick: int | None = None
    num_ticks: int = 0
    offers: dict[str, tuple["InProcessReader", str]] = field(default_factory=dict)  # endpoint -> reader, for whom
    _writes: deque[_Write] = field(default_factory=deque)

    @property
    def num_in_flight(self) -> int:
        """Pages begun and not delivered."""
        return sum(len(write.pages) for write in self._writes)

    def tick(self) -> None:
        """Time goes on by one tick."""
        self.num_ticks += 1
        self.deliver()

    def deliver(self) -> None:
        budget = self.bytes_per_tick
        while self._writes and self._writes[0].due_at <= self.num_ticks:
            write = self._writes[0]
            while write.pages:
                if budget is not None and budget <= 0:
                    return
                num_bytes = write.writer.put(write.peer, *write.pages.popleft(), write.piece)
                budget = None if budget is None else budget - num_bytes
            self._writes.popleft()
            write.writer.finished.append(write.ticket)

    def begin(self, write: _Write) -> None:
        self._writes.append(write)
        if self.latency == 0 and self.bytes_per_tick is None:
            self.deliver()

    def drop(self, writer: "InProcessWriter", peer: str) -> None:
        """Writes to this peer that have not happened never will."""
        self._writes = deque(w for w in self._writes if w.writer is not writer or w.peer != peer)


class InProcessWriter:
    """``WriterTransport`` over a wire. ``peer`` arguments are the readers' incarnations."""

    name = "inprocess"
    names: Sequence[str] = ("inprocess",)

    def __init__(self, wire: Wire, store: PageStore) -> None:
        self.store = store
        self.finished: list[int] = []
        self._wire = wire
        self._readers: dict[str, InProcessReader] = {}
        self._news: list[Attached] = []
        self._num_tickets = 0

    def attach(self, peer: str, connect: Connect) -> None:
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

    def write(self, peer: str, pages: Sequence[tuple[int, int]], piece: Piece | None = None) -> int:
        assert peer in self._readers, "not attached"
        self._num_tickets += 1
        due_at = self._wire.num_ticks + self._wire.latency
        self._wire.begin(_Write(self, peer, self._num_tickets, deque(pages), due_at, piece))
        return self._num_tickets

    def put(self, peer: str, source: int, target: int, piece: Piece | None = None) -> int:
        """Copy one page now, or a piece of it; returns its bytes."""
        reader = self._readers[peer]
        num_bytes = reader.store.geometry.page_bytes
        with memoryview(reader.store.memory) as memory, memory[target * num_bytes : (target + 1) * num_bytes] as into:
            if piece is None:
                self.store.export_page(source, into)
                return num_bytes
            page = bytearray(self.store.geometry.page_bytes)
            self.store.export_page(source, memoryview(page))
            copy(piece, memoryview(page), into)
            return piece.num_bytes

    def done(self) -> list[int]:
        tickets, self.finished = self.finished, []
        return tickets

    def detach(self, peer: str) -> bool:
        self._news = [news for news in self._news if news.peer != peer]
        self._wire.drop(self, peer)
        reader = self._readers.pop(peer, None)
        if reader is not None:
            reader.gone(self, "the writer has let go")
        return True

    def die(self) -> None:
        """What kill -9 would do."""
        for peer, reader in list(self._readers.items()):
            self._wire.drop(self, peer)
            reader.gone(self, "the writer has died")
        self._readers.clear()

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for peer in list(self._readers):
            self.detach(peer)


class InProcessReader:
    """``ReaderTransport`` over a wire."""

    name = "inprocess"
    names: Sequence[str] = ("inprocess",)

    def __init__(self, wire: Wire, store: PageStore) -> None:
        self.store = store
        self.writers: dict[InProcessWriter, tuple[str, int]] = {}  # who, under which epoch
        self._wire = wire
        self._offers: dict[str, str] = {}  # peer -> endpoint
        self._news: list[Fenced] = []

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        endpoint = f"inprocess:{id(self)}:{peer}:{epoch}"
        self._offers[peer] = endpoint
        self._wire.offers[endpoint] = (self, peer)
        return endpoint

    def withdraw(self, peer: str) -> None:
        endpoint = self._offers.pop(peer, None)
        if endpoint is not None:
            self._wire.offers.pop(endpoint, None)

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        return transport == self.name

    def allow(self, peer: str, epoch: int, pages: Sequence[int]) -> None:
        pass

    def forbid(self, pages: Sequence[int]) -> None:
        pass

    def gone(self, writer: InProcessWriter, reason: str) -> None:
        self._news.append(Fenced(*self.writers.pop(writer), reason))

    def poll(self, now: float) -> list[Fenced]:
        news, self._news = self._news, []
        return news

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for peer in list(self._offers):
            self.withdraw(peer)
