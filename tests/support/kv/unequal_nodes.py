"""A prefill and a decode node whose pages have different sizes."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore, shape_of

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from common.request import RequestKey
from common.wire.messages import Coverage, Message, PrefillDone
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from scripts.simulator.service.inprocess_transport import Fault, InProcessReader, InProcessWriter, Wire

LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, head_dim=1, page_size=4, dtype="float32")
POOL_TOKENS = 144


def kv(key: RequestKey, num_tokens: int) -> np.ndarray:
    """[layer][side][head][token][head_dim] of a prompt; every number another one, none of them 0."""
    shape = (2, 2, 2, num_tokens, 1)
    return (1000.0 * (key[1] + 1) + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape).astype(np.float32)


class Nodes:
    """A prefill and a decode node, their messages delivered when a test says so."""

    def __init__(
        self,
        source_size: int,
        target_size: int,
        latency: int = 0,
        *,
        checksums: Coverage = "off",
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        self.source = MemfdStore(POOL_TOKENS // source_size, replace(LAYOUT, page_size=source_size))
        self.target = MemfdStore(POOL_TOKENS // target_size, replace(LAYOUT, page_size=target_size))
        self.allocator = PageAllocator(self.target.num_pages)
        self.source_allocator = PageAllocator(self.source.num_pages)
        self.wire = Wire(latency=latency, faults=faults or {})
        self.sender = Sender(InProcessWriter(self.wire, self.source))
        reader = InProcessReader(self.wire, self.target)
        self.receiver = Receiver(reader, self.allocator, checksums=checksums)
        self.to_prefill: deque[Message] = deque([self.receiver.connect(PREFILL)])
        self.to_decode: deque[Message] = deque()
        self.sizes: dict[RequestKey, int] = {}
        self.sources: dict[RequestKey, list[int]] = {}
        self.grants: dict[RequestKey, tuple[int, list[int]]] = {}
        self.completed: dict[RequestKey, Completed] = {}
        self.failed: list[TransferFailed] = []

    def pages(self, store: MemfdStore) -> np.ndarray:
        return np.frombuffer(store.memory, np.float32).reshape(store.num_pages, *shape_of(store.layout))

    def open(self, num_tokens: int) -> RequestKey:
        key = ("r", len(self.sizes))
        self.sizes[key] = num_tokens
        pages = self.source_allocator.alloc(self.source.layout.num_pages(num_tokens), Owner.REQUEST)
        assert pages is not None
        self.sources[key] = pages
        self.sender.open(key, DECODE)
        return key

    def compute(self, key: RequestKey, num_pages: int) -> None:
        size = self.source.layout.page_size
        prompt, view = kv(key, self.sizes[key]), self.pages(self.source)
        for index, page in enumerate(self.sources[key][:num_pages]):
            tokens = prompt[..., index * size : (index + 1) * size, :]
            view[page][..., : tokens.shape[3], :] = tokens

    def computed(self, key: RequestKey, num_pages: int) -> None:
        self.compute(key, num_pages)
        self.sender.computed(key, self.sources[key][:num_pages])
        self.settle()

    def finish(self, key: RequestKey) -> None:
        self.compute(key, len(self.sources[key]))
        self.sender.finish(key, PrefillDone(*key, self.sizes[key], 1), self.sources[key])
        self.settle()

    def begin(self, key: RequestKey, first: int, count: int) -> None:
        pages = self.allocator.alloc(count, Owner.GRANT)
        assert pages is not None
        self.grants[key] = (first, list(pages))
        self.receiver.begin(key, PREFILL, first=first, pages=pages, length=self.sizes[key])
        self.settle()

    def pump(self) -> None:
        self.sender.pump(0.0, 3)
        self.settle()

    def join(self) -> None:
        for _ in range(3):
            self.hear()

    def close(self) -> None:
        self.source.close()
        self.target.close()

    def hear(self) -> None:
        while self.to_prefill:
            self.sender.on_message(DECODE, self.to_prefill.popleft(), 0.0)
        while self.to_decode:
            self.receiver.on_message(PREFILL, self.to_decode.popleft(), 0.0)
        self.settle()

    def settle(self) -> None:
        self.to_decode.extend(message for _, message in self.sender.take()[0])
        messages, events = self.receiver.take()
        self.to_prefill.extend(message for _, message in messages)
        for event in events:
            if isinstance(event, TransferFailed):
                self.failed.append(event)
                self.allocator.free(event.arrived, Owner.GRANT)
                continue
            assert isinstance(event, Completed)
            self.completed[event.key] = event
            self.allocator.move(event.pages, Owner.GRANT, Owner.REQUEST)
        self.sender.check()
        self.receiver.check()
        self.allocator.check()

    def run(self) -> None:
        for _ in range(100):
            self.wire.tick()
            self.pump()
            self.hear()

    def assert_all_arrived(self) -> None:
        assert not self.failed
        size, view = self.target.layout.page_size, self.pages(self.target)
        for key, num_tokens in self.sizes.items():
            first, pages = self.grants[key]
            assert self.completed[key].pages == tuple(pages)
            expected = kv(key, num_tokens)[..., first * size :, :]
            if pages:
                arrived = np.concatenate([view[page] for page in pages], axis=3)[..., : expected.shape[3], :]
                assert (arrived == expected).all(), f"{key}: other numbers"
        granted = [page for _, pages in self.grants.values() for page in pages]
        rest = [page for page in range(self.target.num_pages) if page not in granted]
        assert not view[rest].any(), "a page was written that was never granted"


SIZES = [(s, t) for s in (1, 2, 3, 4, 6, 12) for t in (1, 2, 3, 4, 6, 12) if s % t == 0 or t % s == 0]
