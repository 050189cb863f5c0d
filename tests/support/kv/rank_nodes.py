"""A prefill and a decode node with several ranks each: rank 0 in the test's thread, the others in threads of their own.

The transports are those of node processes, with real sockets; so is the connection between the ranks.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore, shape_of

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout, kv_heads_of
from common.request import RequestKey
from common.wire.messages import Coverage, Message, PrefillDone
from kv_transfer.events import Completed, PairLost, Released, TransferFailed
from kv_transfer.page_mapping import rank_layout
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.factory import TransportSettings
from kv_transfer.transports.ranks.endpoint import serve_rank
from kv_transfer.transports.ranks.node_transports import NodeTransports

NUM_PAGES = 12


class RankStores:
    """The pools of a node, of numbers that differ, and its transports."""

    def __init__(
        self, layout: PageLayout, num_ranks: int, settings: TransportSettings, first: Literal["reader", "writer"]
    ) -> None:
        self.layout = layout
        self.num_ranks = num_ranks
        self.stores = [MemfdStore(NUM_PAGES, rank_layout(layout, num_ranks)) for _ in range(num_ranks)]
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        others = [self._connector(store) for store in self.stores[1:]]
        self.transports = NodeTransports(self.stores[0], settings, first=first, layout=layout, others=others)

    def _connector(self, store: MemfdStore) -> Callable[[], socket.socket]:
        def connect() -> socket.socket:
            ours, theirs = socket.socketpair()
            self._threads.append(threading.Thread(target=serve_rank, args=(theirs, store)))
            self._threads[-1].start()
            self._sockets.append(theirs)
            return ours

        return connect

    def lose_rank(self) -> None:
        """End the connection to rank 1 from its side, as its death does."""
        self._sockets[0].shutdown(socket.SHUT_RDWR)

    def pages(self, rank: int) -> np.ndarray:
        """[page][layer][side][head][token][head_dim] of one rank."""
        store = self.stores[rank]
        return np.frombuffer(store.memory, np.float32).reshape(NUM_PAGES, *shape_of(store.layout))

    def heads(self, rank: int) -> slice:
        heads = kv_heads_of(rank, self.num_ranks, self.layout.num_kv_heads)
        return slice(heads.start, heads.stop)

    def close(self) -> None:
        self.transports.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def kv(layout: PageLayout, key: RequestKey, num_tokens: int) -> np.ndarray:
    """[layer][side][head][token][head_dim] of a prompt; every number another one, none of them 0."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
    return (10_000.0 * (key[1] + 1) + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


class RankNodes:
    """The two nodes, and the control messages between them."""

    def __init__(
        self,
        ranks: tuple[int, int],
        *,
        transport: str = "tcp",
        sizes: tuple[int, int] = (4, 4),
        num_kv_heads: int = 4,
        checksums: Coverage = "off",
    ) -> None:
        self.layouts = [PageLayout(2, num_kv_heads, 2, size, "float32") for size in sizes]
        settings = [TransportSettings(transport, incarnation) for incarnation in (PREFILL, DECODE)]
        self.source = RankStores(self.layouts[0], ranks[0], settings[0], "writer")
        self.target = RankStores(self.layouts[1], ranks[1], settings[1], "reader")
        self.source_allocator, self.allocator = PageAllocator(NUM_PAGES), PageAllocator(NUM_PAGES)
        self.sender = Sender(self.source.transports.writer)
        self.receiver = Receiver(self.target.transports.reader, self.allocator, checksums=checksums)
        self.to_prefill: deque[Message] = deque()
        self.to_decode: deque[Message] = deque()
        self.sizes: dict[RequestKey, int] = {}
        self.sources: dict[RequestKey, list[int]] = {}
        self.completed: dict[RequestKey, Completed] = {}
        self.failed: dict[RequestKey, TransferFailed] = {}
        self.released: dict[RequestKey, Released] = {}
        self.lost: list[PairLost] = []
        self.connect()

    def connect(self) -> None:
        self.to_prefill.append(self.receiver.connect(PREFILL, num_ranks=self.source.num_ranks))

    def begin(self, num_tokens: int) -> RequestKey:
        """Both nodes know the request, and the decode node has reserved its pages."""
        key = ("r", len(self.sizes))
        self.sizes[key] = num_tokens
        pages = self.source_allocator.alloc(self.layouts[0].num_pages(num_tokens), Owner.REQUEST)
        targets = self.allocator.alloc(self.layouts[1].num_pages(num_tokens), Owner.GRANT)
        assert pages is not None
        assert targets is not None
        self.sources[key] = pages
        self.sender.open(key, DECODE)
        self.receiver.begin(key, PREFILL, first=0, pages=targets, length=num_tokens)
        return key

    def finish(self, key: RequestKey) -> None:
        """The prompt is computed: every rank has its heads of it."""
        prompt, size = kv(self.layouts[0], key, self.sizes[key]), self.layouts[0].page_size
        for rank in range(self.source.num_ranks):
            pages = self.source.pages(rank)
            for index, page in enumerate(self.sources[key]):
                tokens = prompt[:, :, self.source.heads(rank), index * size : (index + 1) * size]
                pages[page][..., : tokens.shape[3], :] = tokens
        self.sender.finish(key, PrefillDone(*key, self.sizes[key], 7), self.sources[key])

    def turn(self, *, delivers: bool = True, max_pages: int = 64) -> None:
        """One turn of both loops; without ``delivers``, control messages wait."""
        while delivers and self.to_prefill:
            self.sender.on_message(DECODE, self.to_prefill.popleft(), time.monotonic())
        self.sender.pump(time.monotonic(), max_pages)
        messages, released = self.sender.take()
        self.to_decode.extend(message for _, message in messages)
        for release in released:
            assert release.key not in self.released
            self.released[release.key] = release
            self.source_allocator.free(self.sources[release.key], Owner.REQUEST)
        while delivers and self.to_decode:
            self.receiver.on_message(PREFILL, self.to_decode.popleft(), time.monotonic())
        self.receiver.poll(time.monotonic())
        said, events = self.receiver.take()
        self.to_prefill.extend(message for _, message in said)
        for event in events:
            if isinstance(event, Completed):
                self.completed[event.key] = event
                self.allocator.move(event.pages, Owner.GRANT, Owner.REQUEST)
            elif isinstance(event, TransferFailed):
                self.failed[event.key] = event
                self.allocator.free(event.arrived, Owner.GRANT)
            else:
                assert isinstance(event, PairLost)
                self.lost.append(event)
        for checked in (self.sender, self.receiver, self.allocator, self.source_allocator):
            checked.check()

    def until(self, look: Callable[[], object], *, delivers: bool = True, max_pages: int = 64) -> None:
        end = time.monotonic() + 60
        while not look():
            assert time.monotonic() < end, "it never came"
            self.turn(delivers=delivers, max_pages=max_pages)
            time.sleep(0.001)

    def serve(self, num_tokens: int) -> None:
        """A request from its beginning to its end; every rank of the decode node then has its heads of the prompt."""
        key = self.begin(num_tokens)
        self.finish(key)
        self.until(lambda: key in self.completed and key in self.released)
        self.compare(key)
        self.allocator.free(self.completed[key].pages, Owner.REQUEST)

    def compare(self, key: RequestKey) -> None:
        prompt = kv(self.layouts[1], key, self.sizes[key])
        for rank in range(self.target.num_ranks):
            pages = self.target.pages(rank)
            arrived = np.concatenate([pages[page] for page in self.completed[key].pages], axis=3)
            assert (arrived[..., : self.sizes[key], :] == prompt[:, :, self.target.heads(rank)]).all(), f"rank {rank}"

    def assert_balanced(self) -> None:
        """Wait until every page of both nodes is free."""
        self.until(lambda: self.allocator.num_free == self.source_allocator.num_free == NUM_PAGES)

    def close(self) -> None:
        self.source.close()
        self.target.close()
        for store in (*self.source.stores, *self.target.stores):
            store.close()
