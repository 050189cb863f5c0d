"""Whole transfers between pools whose pages have different sizes: any order of events, and every token arrives."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import Connected, Grant, Message, PagesWritten, PrefillDone
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.page_mapping import Units
from kv_transfer.receive.receiver import Receiver
from kv_transfer.receive.session import PageDelivery, ReceiveSession
from kv_transfer.send.sender import Sender
from kv_transfer.send.session import SendSession
from scripts.simulator.inprocess_transport import Fault, InProcessReader, InProcessWriter, Wire

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
        wants_checksums: bool = False,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        self.source = MemfdStore(POOL_TOKENS // source_size, replace(LAYOUT, page_size=source_size))
        self.target = MemfdStore(POOL_TOKENS // target_size, replace(LAYOUT, page_size=target_size))
        self.allocator = PageAllocator(self.target.num_pages)
        self.source_allocator = PageAllocator(self.source.num_pages)
        self.wire = Wire(latency=latency, faults=faults or {})
        self.sender = Sender(InProcessWriter(self.wire, self.source))
        reader = InProcessReader(self.wire, self.target)
        self.receiver = Receiver(reader, self.allocator, wants_checksums=wants_checksums)
        self.to_prefill: deque[Message] = deque([self.receiver.connect(PREFILL)])
        self.to_decode: deque[Message] = deque()
        self.sizes: dict[RequestKey, int] = {}
        self.sources: dict[RequestKey, list[int]] = {}
        self.grants: dict[RequestKey, tuple[int, list[int]]] = {}
        self.completed: dict[RequestKey, Completed] = {}
        self.failed: list[TransferFailed] = []

    def pages(self, store: MemfdStore) -> np.ndarray:
        return np.frombuffer(store.memory, np.float32).reshape(store.num_pages, *store.layout.shape)

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
        self.receiver.begin(key, PREFILL, first=first, pages=pages, num_tokens=self.sizes[key])
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
            self.receiver.on_message(PREFILL, self.to_decode.popleft())
        self.settle()

    def settle(self) -> None:
        self.to_decode.extend(message for _, message in self.sender.take()[0])
        messages, events = self.receiver.take()
        self.to_prefill.extend(message for _, message in messages)
        for event in events:
            if isinstance(event, TransferFailed):
                self.failed.append(event)
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
            written_unreported = kv(key, num_tokens)[..., first * size :, :]
            if pages:
                arrived = np.concatenate([view[page] for page in pages], axis=3)[..., : written_unreported.shape[3], :]
                assert (arrived == written_unreported).all(), f"{key}: other numbers"
        granted = [page for _, pages in self.grants.values() for page in pages]
        rest = [page for page in range(self.target.num_pages) if page not in granted]
        assert not view[rest].any(), "a page was written that was never granted"


SIZES = [(s, t) for s in (1, 2, 3, 4, 6, 12) for t in (1, 2, 3, 4, 6, 12) if s % t == 0 or t % s == 0]
actions = st.lists(
    st.tuples(st.sampled_from(["compute", "grant", "pump", "tick", "hear"]), st.integers(0, 99)), max_size=40
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.sampled_from(SIZES),
    prompts=st.lists(st.integers(1, 28), min_size=1, max_size=3),
    history=actions,
    held=st.integers(0, 3),
    latency=st.integers(0, 2),
)
def test_every_token_of_every_prompt_arrives_whatever_the_order(
    sizes: tuple[int, int], prompts: list[int], history: list[tuple[str, int]], held: int, latency: int
) -> None:
    nodes = Nodes(*sizes, latency)
    keys = [nodes.open(num_tokens) for num_tokens in prompts]
    num_targets = [nodes.target.layout.num_pages(num_tokens) for num_tokens in prompts]
    num_computed = [0] * len(keys)
    for action, number in history:
        key, which = keys[number % len(keys)], number % len(keys)
        if action == "compute" and num_computed[which] < len(nodes.sources[key]) - 1:
            num_computed[which] += 1 + number // 7 % (len(nodes.sources[key]) - 1 - num_computed[which])
            nodes.computed(key, num_computed[which])
        elif action == "grant" and key not in nodes.grants:
            first = min(held, num_targets[which])
            nodes.begin(key, first, num_targets[which] - first)
        elif action in ("pump", "hear"):
            getattr(nodes, action)()
        elif action == "tick":
            nodes.wire.tick()
    for which, key in enumerate(keys):
        if key not in nodes.grants:
            nodes.begin(key, 0, num_targets[which])
        nodes.finish(key)
        nodes.pump()
    nodes.run()
    nodes.assert_all_arrived()
    assert nodes.receiver.counters()["stale_messages"] == nodes.sender.counters()["stale_messages"] == 0
    pages = [page for _, pages in nodes.grants.values() for page in pages]
    assert nodes.allocator.count(Owner.REQUEST) == len(pages)
    nodes.close()


def test_a_longer_page_is_received_when_all_parts_that_the_prompt_has_of_it_are_there() -> None:
    """Pages of 2 tokens go into pages of 6; the prompt has 9 tokens: parts 0 to 2 of page 0, 0 and 1 of page 1."""
    nodes = Nodes(2, 6)
    nodes.join()
    key = nodes.open(9)
    nodes.begin(key, 0, 2)
    nodes.hear()
    nodes.computed(key, 4)
    nodes.pump()
    told = [(m.indices, m.part) for m in nodes.to_decode if isinstance(m, PagesWritten)]
    assert told == [((0,), 0), ((0,), 1), ((0,), 2)]
    nodes.pump()
    assert nodes.to_decode[-1] == PagesWritten("r", 0, 1, (1,), 0)
    nodes.hear()
    assert nodes.receiver.counters()["pages_received"] == 1
    nodes.finish(key)
    nodes.run()
    assert nodes.receiver.counters()["pages_received"] == 2
    assert nodes.sender.counters()["pages_sent"] == 5
    nodes.assert_all_arrived()


def test_a_longer_page_fills_several_but_none_behind_the_prompts_end() -> None:
    """Pages of 6 tokens go into pages of 2; of the prompt's 8 tokens the last page here holds 2."""
    nodes = Nodes(6, 2)
    nodes.join()
    key = nodes.open(8)
    nodes.begin(key, 1, 3)
    nodes.hear()
    nodes.computed(key, 1)
    nodes.run()
    assert nodes.receiver.counters()["pages_received"] == 2
    nodes.finish(key)
    nodes.run()
    assert nodes.sender.counters()["bytes_sent"] == 3 * nodes.target.layout.page_bytes
    nodes.assert_all_arrived()


@pytest.mark.parametrize("sizes", [(2, 6), (6, 2)])
def test_a_grant_beyond_what_the_prompt_can_fill_is_refused(sizes: tuple[int, int]) -> None:
    nodes = Nodes(*sizes)
    nodes.join()
    key = nodes.open(9)
    num_pages = nodes.target.num_pages
    nodes.sender.on_message(DECODE, Grant(*key, 1, num_pages, (0,)), 0.0)
    ((_, closed),), _ = nodes.sender.take()
    assert f"the prompt has at most {num_pages}" in closed.message  # type: ignore[attr-defined]
    other = nodes.open(9)
    nodes.finish(other)
    end = nodes.target.layout.num_pages(9)
    nodes.sender.on_message(DECODE, Grant(*other, 1, end, (0,)), 0.0)
    ((_, closed),), _ = nodes.sender.take()
    assert f"the prompt has at most {end}" in closed.message  # type: ignore[attr-defined]


def test_a_number_of_parts_that_does_not_divide_a_page_is_refused() -> None:
    nodes = Nodes(2, 6)
    key = nodes.open(9)
    pages = nodes.allocator.alloc(2, Owner.GRANT)
    nodes.receiver.begin(key, PREFILL, first=0, pages=pages or (), num_tokens=9)
    nodes.receiver.on_message(PREFILL, Connected(1, "inprocess", 4))
    why = "a page of 6 tokens cannot come in 4 parts"
    assert nodes.receiver.take()[1] == [TransferFailed(key, ErrorCode.TRANSFER_FAILED, why)]
    assert nodes.allocator.num_free == nodes.allocator.num_pages


def test_units_behind_the_prompts_end_are_never_due() -> None:
    session = SendSession(("r", 0), "peer")
    session.grant(1, 0, [4, 5], Units(2, 1, 3))  # pages of 6 tokens, told before the prompt is computed
    session.compute([0, 1, 2])
    session.finish([0, 1, 2, 3, 4], 9)
    assert not session.has_ungrantable()
    assert session.start(9) == [0, 1, 2, 3, 4]
    assert session.pages_of(4) == (4, 5)
    session.check()


def test_parts_of_a_page_behind_the_prompts_end_are_not_expected() -> None:
    delivery = PageDelivery(page_size=6)
    session = ReceiveSession(("r", 0), "peer", first=0, pages=[4, 5], num_tokens=9, delivery=delivery)
    session.grant(1, 3)
    assert session.is_expected([0, 1], 1)
    assert session.is_expected([0], 2)
    assert not session.is_expected([1], 2)
