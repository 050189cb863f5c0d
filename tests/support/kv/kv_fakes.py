"""Fakes for transfer tests: a pool in a memfd, and a prefill and a decode node joined by queues."""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from common.request import RequestKey
from common.wire.messages import Coverage, Message, PrefillDone
from kv_transfer.events import Completed, Event, PairLost, Released
from kv_transfer.page_slices import SlicePair
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from scripts.simulator.service.inprocess_transport import InProcessReader, InProcessWriter, Wire

PREFILL = "p" * 32
DECODE = "d" * 32
LAYOUT = PageLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4, dtype="float32")  # 64 bytes a page
JUNK = 0xEE  # fills pages that must not be read


def shape_of(layout: PageLayout) -> tuple[int, ...]:
    """The dimensions of a page whose keys and values have one size: layers, sides, heads, tokens, numbers."""
    assert layout.stored_dims == (layout.head_dim, layout.head_dim) and not layout.has_scales
    return (layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)


class MemfdStore:
    """A pool without a model: pages are plain bytes."""

    is_mapped = is_in_place = True
    device_pages = None

    def __init__(self, num_pages: int, layout: PageLayout = LAYOUT) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.fd = os.memfd_create("baton-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, layout.pool_bytes(num_pages))
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self.memory = mmap.mmap(self.fd, layout.pool_bytes(num_pages))
        self.num_landed = 0

    def export_page(self, page: int, into: memoryview) -> None:
        into[:] = self.read(page)

    def landed(self, pages: Sequence[int]) -> None:
        self.num_landed += len(pages)

    def read(self, page: int) -> bytes:
        size = self.layout.page_bytes
        return self.memory[page * size : (page + 1) * size]

    def put(self, page: int, data: bytes) -> None:
        size = self.layout.page_bytes
        self.memory[page * size : (page + 1) * size] = data

    def fill(self, page: int, value: int) -> None:
        self.put(page, bytes([value]) * self.layout.page_bytes)

    def close(self) -> None:
        self.memory.close()
        self._close_fd()


def content(key: RequestKey, index: int) -> int:
    """Return the byte that fills page ``index`` of this prompt; never ``JUNK``."""
    return (sum(key[0].encode()) * 31 + key[1] * 7 + index) % 200 + 1


def owner_of(allocator: PageAllocator, page: int, *candidates: Owner) -> Owner:
    """Return the owner of the page among the candidates; fail if it has another."""
    for owner in candidates[:-1]:
        try:
            allocator.move([page], owner, owner)
        except AssertionError:
            continue
        return owner
    allocator.move([page], candidates[-1], candidates[-1])
    return candidates[-1]


class WatchedWriter(InProcessWriter):
    """Asserts at each write that the source page is still held and the target page still reserved.

    Writes to a dropped peer may read any page.
    """

    def __init__(
        self, wire: Wire, store: MemfdStore, source_allocator: PageAllocator, target_allocator: PageAllocator
    ) -> None:
        super().__init__(wire, store)
        self.num_in_quarantine = 0
        self.written: list[int] = []
        self._source_allocator = source_allocator
        self._target_allocator = target_allocator

    def put(self, peer: str, source: int, target: int, slices: SlicePair | None = None) -> int:
        if peer not in self._leaving:
            owner_of(self._source_allocator, source, Owner.REQUEST)
        owner = owner_of(self._target_allocator, target, Owner.GRANT, Owner.QUARANTINE)
        self.num_in_quarantine += owner is Owner.QUARANTINE
        self.written.append(target)
        return super().put(peer, source, target, slices)


@dataclass
class TransferPair:
    """A sender and a receiver with their pools; a test delivers the messages between them.

    Source pages contain junk until they are computed and after their release. Pages of the decode node contain junk
    when they are granted, and the prompt when ``Completed`` arrives. ``WatchedWriter`` checks every write.
    """

    wire: Wire = field(default_factory=Wire)
    num_pages: int = 16
    checksums: tuple[Coverage, Coverage] = ("off", "off")  # the prefill node, the decode node

    def __post_init__(self) -> None:
        self.source = MemfdStore(self.num_pages)
        self.target = MemfdStore(self.num_pages)
        self.source_allocator = PageAllocator(self.num_pages)
        self.allocator = PageAllocator(self.num_pages)
        self.writer = WatchedWriter(self.wire, self.source, self.source_allocator, self.allocator)
        self.reader = InProcessReader(self.wire, self.target)
        self.sender = Sender(self.writer, digest="model", checksums=self.checksums[0])
        self.receiver = Receiver(
            self.reader, self.allocator, name="decode-0", digest="model", checksums=self.checksums[1]
        )
        self.to_decode: deque[Message] = deque()
        self.to_prefill: deque[Message] = deque()
        self.source_pages: dict[RequestKey, list[int]] = {}
        self.grants: dict[RequestKey, list[int]] = {}
        self.firsts: dict[RequestKey, int] = {}
        self.num_kept = 0  # pages that had arrived when their transfers ended early
        self.released: dict[RequestKey, Released] = {}
        self.events: dict[RequestKey, Event] = {}
        self.pairs_lost = 0
        self.now = 0.0
        for page in range(self.num_pages):
            self.source.fill(page, JUNK)
            self.target.fill(page, JUNK)

    # ---- the prefill node ---------------------------------------------------------------------------------------

    def open(self, key: RequestKey, num_pages: int) -> None:
        """Open a request of ``num_pages`` pages, the last one partial."""
        pages = self.source_allocator.alloc(num_pages, Owner.REQUEST)
        assert pages is not None
        self.source_pages[key] = pages
        self.sender.open(key, DECODE)
        self.settle()

    def compute(self, key: RequestKey, num_pages: int) -> None:
        """Compute the first ``num_pages`` pages."""
        pages = self.source_pages[key][:num_pages]
        for index, page in enumerate(pages):
            self.source.fill(page, content(key, index))
        self.sender.computed(key, pages)
        self.settle()

    def finish(self, key: RequestKey, token: int = 7) -> None:
        pages = self.source_pages[key]
        for index, page in enumerate(pages):
            self.source.fill(page, content(key, index))
        length = len(pages) * LAYOUT.page_size - 1
        self.sender.finish(key, PrefillDone(*key, length, token), pages)
        self.settle()

    def pump(self, max_pages: int = 64) -> bool:
        more = self.sender.pump(self.now, max_pages)
        self.settle()
        return more

    # ---- the decode node ----------------------------------------------------------------------------------------

    def begin(self, key: RequestKey, num_pages: int, first: int = 0) -> list[int]:
        """Expect a prompt of ``num_pages`` pages, the first ``first`` cached; return the reserved pages."""
        pages = self.allocator.alloc(num_pages - first, Owner.GRANT)
        assert pages is not None
        for page in pages:
            self.target.fill(page, JUNK)
        self.grants[key], self.firsts[key] = list(pages), first
        length = num_pages * LAYOUT.page_size - 1
        self.receiver.begin(key, PREFILL, first=first, pages=pages, length=length)
        self.settle()
        return pages

    def cancel(self, key: RequestKey) -> None:
        self._keep(key, self.receiver.cancel(key))
        self.settle()

    def poll(self) -> None:
        self.receiver.poll(self.now)
        self.settle()

    # ---- connections and messages --------------------------------------------------------------------------------

    def connect(self, *name: str) -> None:
        """Connect both ends, from the offer to the reply."""
        self.to_prefill.append(self.receiver.connect(PREFILL, *name))
        self.settle()
        self.run()

    def hear_prefill(self) -> None:
        """Deliver the next message to the decode node."""
        self.receiver.on_message(PREFILL, self.to_decode.popleft(), self.now)
        self.settle()

    def hear_decode(self) -> None:
        """Deliver the next message to the prefill node."""
        self.sender.on_message(DECODE, self.to_prefill.popleft(), self.now)
        self.settle()

    def drain_to_decode(self) -> None:
        """Deliver all messages to the decode node, including those that these cause."""
        while self.to_decode:
            self.hear_prefill()

    def drain_to_prefill(self) -> None:
        """Deliver all messages to the prefill node, including those that these cause."""
        while self.to_prefill:
            self.hear_decode()

    def disconnect(self) -> None:
        """Break the control connection: messages in flight are lost, and both ends notice."""
        self.to_decode.clear()
        self.to_prefill.clear()
        self.sender.peer_lost(DECODE)
        self.receiver.peer_lost(PREFILL)
        self.settle()

    def tick(self) -> None:
        self.wire.tick()
        self.check()

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(200):
            self.tick()
            for link in self.receiver._connections.by_peer.values():
                self.now = max(self.now, link.retry_at or 0.0)
            self.poll()
            is_more = self.pump() or self.to_decode or self.to_prefill or self.wire.num_in_flight
            is_more = is_more or self.reader._news or self.writer._news
            if not is_more and not any(link.retry_at for link in self.receiver._connections.by_peer.values()):
                return
            self.drain_to_decode()
            self.drain_to_prefill()
        raise AssertionError("not finished after 200 ticks")

    def settle(self) -> None:
        """Collect messages and events, release pages as the roles do, and check both ends."""
        messages, released = self.sender.take()
        assert all(peer == DECODE for peer, _ in messages)
        self.to_decode.extend(message for _, message in messages)
        for release in released:
            assert release.key not in self.released, "released twice"
            self.released[release.key] = release
            for page in self.source_pages[release.key]:
                self.source.fill(page, JUNK)
            self.source_allocator.free(self.source_pages[release.key], Owner.REQUEST)
        replies, events = self.receiver.take()
        assert all(peer == PREFILL for peer, _ in replies)
        self.to_prefill.extend(message for _, message in replies)
        for event in events:
            self._note(event)
        self.check()

    def _note(self, event: Event) -> None:
        if isinstance(event, PairLost):
            self.pairs_lost += 1
            return
        assert event.key not in self.events, "ended twice"
        self.events[event.key] = event
        if isinstance(event, Completed):
            assert list(event.pages) == self.grants[event.key]
            self.allocator.move(event.pages, Owner.GRANT, Owner.REQUEST)
            self._compare(event.key, event.pages)
        else:
            self._keep(event.key, event.arrived)

    def _compare(self, key: RequestKey, pages: Sequence[int]) -> None:
        for index, page in enumerate(pages, self.firsts[key]):
            assert set(self.target.read(page)) == {content(key, index)}, f"page {index} has other bytes"

    def _keep(self, key: RequestKey, arrived: Sequence[int]) -> None:
        """Take the pages that have arrived of a transfer that ended early, and free them: no write may reach them."""
        assert list(arrived) == self.grants.get(key, [])[: len(arrived)]
        self._compare(key, arrived)
        self.num_kept += len(arrived)
        self.allocator.free(arrived, Owner.GRANT)
        for page in arrived:
            self.target.fill(page, JUNK)

    def give_back(self, key: RequestKey) -> None:
        """Free the pages of a completed request at the decode node."""
        event = self.events[key]
        assert isinstance(event, Completed)
        self.allocator.free(event.pages, Owner.REQUEST)
        self.check()

    def check(self) -> None:
        self.sender.check()
        self.receiver.check()
        self.allocator.check()
        self.source_allocator.check()

    def assert_nothing_is_held(self) -> None:
        assert self.allocator.num_free == self.num_pages
        assert self.source_allocator.num_free == self.num_pages
        assert self.wire.num_in_flight == 0
        assert self.released.keys() == self.source_pages.keys(), "source pages are still held"

    def close(self) -> None:
        self.source.close()
        self.target.close()
