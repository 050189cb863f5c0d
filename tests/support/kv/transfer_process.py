"""One end of transfers as a process: ``transport_process`` with a Sender or a Receiver on top.

The test acts as the control plane: it carries the messages and so decides how far a transfer gets. It also takes the
part of the role. Free pages of the decode node are filled with ``JUNK`` and verified by ``books``, which detects writes
after a release.
"""

import os
import random
import threading
import time
from functools import partial
from typing import Any

import msgspec
from support.kv.kv_fakes import JUNK, MemfdStore
from support.kv.rank_pools import RankPools
from support.kv.transport_process import LAYOUT, NUM_PAGES, make_store, set_timeouts

from common.cache.page_allocator import Owner, PageAllocator
from common.request import RequestKey
from common.wire.messages import FromDecode, FromPrefill, PrefillDone
from kv_transfer.events import Completed, PairLost
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import Attached
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer


def num_tokens(num_pages: int) -> int:
    """Return the length of a prompt of ``num_pages`` pages, the last one partial."""
    return num_pages * LAYOUT.page_size - 1


def content(key: RequestKey, index: int) -> bytes:
    return random.Random(f"{key} {index}").randbytes(LAYOUT.page_bytes)


class TransferEnd:
    """The part that both ends share; ``outgoing`` are messages that the test has not fetched yet, [peer, JSON]."""

    def __init__(self, settings: TransportSettings) -> None:
        num_ranks = int(os.environ.get("TEST_RANKS", 0))
        make = partial(make_store, settings.name)
        self.store: MemfdStore | RankPools = (
            RankPools(LAYOUT, num_ranks, make, set_timeouts) if num_ranks else make(LAYOUT)
        )
        self.allocator = PageAllocator(NUM_PAGES)
        self.outgoing: list[list[str]] = []

    def say(self, messages: list[tuple[str, Any]]) -> None:
        self.outgoing += [[peer, msgspec.json.encode(message).decode()] for peer, message in messages]

    def do_ranks(self) -> list[int]:
        """Process ids of the other ranks."""
        return self.store.pids if isinstance(self.store, RankPools) else []

    def do_messages(self) -> list[list[str]]:
        outgoing, self.outgoing = self.outgoing, []
        return outgoing


class SenderEnd(TransferEnd):
    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        is_divided = isinstance(self.store, RankPools)
        self.transport: Any = (
            self.store.open(settings, "writer").writer if is_divided else open_writer(self.store, settings)
        )
        self.sender = Sender(self.transport, digest="model")
        self.pages: dict[RequestKey, list[int]] = {}
        self.released: dict[str, bool] = {}

    def turn(self) -> None:
        """Pump without writing; only ``do_pump`` writes pages."""
        self.sender.pump(time.monotonic(), 0)
        self._settle()

    def _settle(self) -> None:
        messages, released = self.sender.take()
        self.say(messages)
        for release in released:
            assert release.key[0] not in self.released, "released twice"
            self.released[release.key[0]] = release.ok
            self.allocator.free(self.pages.pop(release.key), Owner.REQUEST)

    def do_hear(self, peer: str, message: str) -> None:
        self.sender.on_message(peer, msgspec.json.decode(message, type=FromDecode), time.monotonic())
        self._settle()

    def do_open(self, rid: str, peer: str, num_pages: int) -> None:
        """Open a request whose prompt is computed immediately."""
        key = (rid, 0)
        pages = self.allocator.alloc(num_pages, Owner.REQUEST)
        assert pages is not None
        self.pages[key] = pages
        for index, page in enumerate(pages):
            self.store.put(page, content(key, index))
        self.sender.open(key, peer)
        self.sender.finish(key, PrefillDone(*key, num_tokens(num_pages), 7), pages)
        self._settle()

    def do_pump(self, max_pages: int) -> None:
        self.sender.pump(time.monotonic(), max_pages)
        self._settle()

    def do_begin_write(self, max_pages: int) -> None:
        """As ``do_pump``, and wait until NIXL has begun to write."""
        [writer] = self.transport._transports
        transfer, has_begun = writer._transfer, threading.Event()

        def noted(write: Any) -> Any:
            state = transfer(write)
            has_begun.set()
            return state

        writer._transfer = noted
        self.do_pump(max_pages)
        assert has_begun.wait(60), "nothing was written"

    def do_abort(self, rid: str) -> None:
        self.sender.abort((rid, 0), "aborted")
        self._settle()

    def do_peer_lost(self, peer: str) -> None:
        self.sender.peer_lost(peer)
        self._settle()

    def do_carrier(self, peer: str) -> str:
        """The transport that carries pages to a peer; empty for none."""
        return next((pair.transport for pair in self.sender.pairs() if pair.incarnation == peer), "")

    def do_break_transport(self, peer: str) -> None:
        """Let the transport that carries pages to a peer report that it has failed."""
        attempt = self.transport._attempts[peer]
        transport: Any = attempt.current
        if transport.name == "shm":
            transport._attachments[peer].pool.problem = "a copy failed"
        else:
            transport._news.append(Attached(peer, attempt.connect.epoch, "the network failed"))

    def do_let_pass(self, seconds: float) -> None:
        """Let as much time pass for transports that have broken."""
        before = self.transport._clock
        self.transport._clock = lambda: before() + seconds

    def do_is_granted(self, rid: str) -> bool:
        return self.sender.is_granted((rid, 0))

    def do_page_counts(self) -> dict[str, Any]:
        self.sender.check()
        self.allocator.check()
        return {"free": self.allocator.num_free, "aside": 0, "ends": self.released}


class ReceiverEnd(TransferEnd):
    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        is_divided = isinstance(self.store, RankPools)
        self.transport = self.store.open(settings, "reader").reader if is_divided else open_reader(self.store, settings)
        self.receiver = Receiver(self.transport, self.allocator, name="decode-0", digest="model")
        self.ends: dict[str, str] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        self.is_clean = [False] * NUM_PAGES
        self._settle()

    def turn(self) -> None:
        self.receiver.poll(time.monotonic())
        self._settle()

    def _settle(self) -> None:
        messages, events = self.receiver.take()
        self.say(messages)
        for event in events:
            if isinstance(event, PairLost):
                self.receiver.peer_lost(event.peer)
                continue
            rid = event.key[0]
            assert rid not in self.ends, "ended twice"
            self.ends[rid] = type(event).__name__
            if isinstance(event, Completed):
                self.allocator.move(event.pages, Owner.GRANT, Owner.REQUEST)
                self.kept[rid] = event.pages
                self._look_at(rid)
            else:
                self.allocator.free(event.arrived, Owner.GRANT)
        messages, events = self.receiver.take()
        assert not events
        self.say(messages)
        for page in self.allocator._stack:
            if not self.is_clean[page]:
                self.store.fill(page, JUNK)
                self.is_clean[page] = True

    def _look_at(self, rid: str) -> None:
        for index, page in enumerate(self.kept[rid]):
            assert self.store.read(page) == content((rid, 0), index), f"page {index} of {rid} has other bytes"

    def do_connect(self, peer: str, num_ranks: int = 1) -> None:
        self.say([(peer, self.receiver.connect(peer, num_ranks=num_ranks))])

    def do_begin(self, rid: str, peer: str, num_pages: int) -> None:
        pages = self.allocator.alloc(num_pages, Owner.GRANT)
        assert pages is not None
        for page in pages:
            self.is_clean[page] = False
        self.receiver.begin((rid, 0), peer, first=0, pages=pages, length=num_tokens(num_pages))
        self._settle()

    def do_hear(self, peer: str, message: str) -> None:
        self.receiver.on_message(peer, msgspec.json.decode(message, type=FromPrefill), time.monotonic())
        self._settle()

    def do_cancel(self, rid: str) -> None:
        self.allocator.free(self.receiver.cancel((rid, 0)), Owner.GRANT)
        self._settle()

    def do_peer_lost(self, peer: str) -> None:
        self.receiver.peer_lost(peer)
        self._settle()

    def do_give_back(self, rid: str) -> None:
        """End the request, and assert that its pages have not changed."""
        self._look_at(rid)
        self.allocator.free(self.kept.pop(rid), Owner.REQUEST)
        self._settle()

    def do_page_counts(self) -> dict[str, Any]:
        self.receiver.check()
        self.allocator.check()
        junk = bytes([JUNK]) * LAYOUT.page_bytes
        for page in self.allocator._stack:
            assert self.store.read(page) == junk, f"page {page} is free and was written"
        return {"free": self.allocator.num_free, "aside": self.allocator.count(Owner.QUARANTINE), "ends": self.ends}
