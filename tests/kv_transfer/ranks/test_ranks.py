"""Transfers between nodes with several ranks: every rank sends and receives its own part of each page."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kv.fake_transports import FakeWriter
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore
from support.kv.rank_nodes import NUM_PAGES, RankNodes
from support.kv.shm_ends import open_descriptors

from common.cache.page_allocator import Owner
from common.cache.page_layout import PageLayout
from common.errors import ConfigError, RankLostError
from common.request import RequestKey
from common.wire.messages import Connect, LayoutMessage, PagesWritten, Refused
from kv_transfer.transports.base import Attached, AttachError
from kv_transfer.transports.factory import TransportSettings
from kv_transfer.transports.ranks import RanksReader, RanksWriter
from kv_transfer.transports.ranks.endpoint import serve_rank
from kv_transfer.transports.ranks.remote import RemoteWriter

Make = Callable[..., RankNodes]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RankNodes] = []

    def build(*arguments: Any, **named: Any) -> RankNodes:
        made.append(RankNodes(*arguments, **named))
        return made[-1]

    yield build
    for nodes in made:
        nodes.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4), (2, 2)])
def test_every_rank_gets_its_heads_of_every_page(make: Make, ranks: tuple[int, int], transport: str) -> None:
    nodes = make(ranks, transport=transport, checksums="all")
    nodes.serve(10)
    nodes.serve(NUM_PAGES * 4)
    nodes.assert_balanced()
    received, sent = nodes.receiver.counters(), nodes.sender.counters()
    assert received["pages_received"] == 3 + NUM_PAGES
    assert received["pages_verified"] == sent["pages_sent"] == (3 + NUM_PAGES) * max(ranks)
    assert sent["bytes_sent"] == sent[f"bytes_by_{transport}"] == (3 + NUM_PAGES) * nodes.layouts[0].page_bytes
    assert received["stale_messages"] == sent["stale_messages"] == 0
    assert nodes.sender.pairs()[0].transport == transport


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_memory_of_granted_pages_is_provided_before_they_are_computed(make: Make, ranks: tuple[int, int]) -> None:
    nodes = make(ranks, transport="shm")
    key = nodes.begin(8)
    assert not any(os.fstat(store.fd).st_blocks for store in nodes.target.stores)
    nodes.until(lambda: all(os.fstat(store.fd).st_blocks for store in nodes.target.stores))
    nodes.finish(key)
    nodes.until(lambda: key in nodes.completed and key in nodes.released)
    nodes.compare(key)


@pytest.mark.parametrize(("ranks", "sizes"), [((1, 2), (4, 8)), ((2, 1), (8, 4)), ((4, 2), (2, 4)), ((2, 4), (8, 2))])
def test_ranks_and_page_sizes_may_both_differ(make: Make, ranks: tuple[int, int], sizes: tuple[int, int]) -> None:
    nodes = make(ranks, sizes=sizes, checksums="all")
    for num_tokens in (1, 9, 15):
        nodes.serve(num_tokens)
    nodes.assert_balanced()


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (4, 1), (1, 4)])
def test_ranks_beyond_the_number_of_heads_have_the_same_ones(make: Make, ranks: tuple[int, int]) -> None:
    nodes = make(ranks, num_kv_heads=2, transport="auto")
    nodes.serve(13)
    nodes.assert_balanced()


def send_all(nodes: RankNodes) -> RequestKey:
    """Send the two pages of a request; what is said about them is not delivered."""
    key = nodes.begin(8)
    nodes.finish(key)
    nodes.until(lambda: nodes.sender.is_granted(key), max_pages=0)
    nodes.until(lambda: nodes.sender.counters()["pages_sent"] == 4, delivers=False)
    return key


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_a_page_is_received_when_all_of_its_parts_are(make: Make, ranks: tuple[int, int]) -> None:
    nodes = make(ranks)
    key = send_all(nodes)
    told = [(m.indices, m.unit) for m in nodes.to_decode if isinstance(m, PagesWritten)]
    assert sorted(told) == [((0, 1), 0), ((0, 1), 1)]
    last = nodes.to_decode.pop()
    assert isinstance(last, PagesWritten)
    nodes.turn()
    assert nodes.receiver.counters()["pages_received"] == 0
    assert key not in nodes.completed
    nodes.to_decode.append(last)
    nodes.until(lambda: key in nodes.completed and key in nodes.released)
    nodes.compare(key)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_a_damaged_part_alone_is_sent_again(make: Make, ranks: tuple[int, int]) -> None:
    nodes = make(ranks, checksums="all")
    key = send_all(nodes)
    first = next(page for page in range(NUM_PAGES) if nodes.target.pages(ranks[1] - 1)[page].any())
    nodes.target.pages(ranks[1] - 1)[first][0, 0, -1, 0, 0] = -1
    nodes.until(lambda: key in nodes.completed and key in nodes.released)
    nodes.compare(key)
    assert nodes.receiver.counters()["checksum_mismatches"] == 1
    assert nodes.sender.counters()["pages_resent"] == 1


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_pages_stay_in_quarantine_until_no_rank_can_write_them(
    make: Make, ranks: tuple[int, int], transport: str
) -> None:
    """The control connection is lost on the decode node's side alone. With shared memory, the pages of the transfer are
    free only when every pair of ranks is detached; with TCP, the decode node's ranks have ended the connections.
    """
    nodes = make(ranks, transport=transport)
    key = nodes.begin(10)
    nodes.until(lambda: nodes.sender.is_granted(key))
    nodes.receiver.peer_lost(PREFILL)
    nodes.to_prefill.clear()
    nodes.turn(delivers=False)
    if transport == "shm":
        assert nodes.allocator.count(Owner.QUARANTINE) == 3
    nodes.sender.peer_lost(DECODE)
    nodes.until(lambda: nodes.allocator.num_free == NUM_PAGES)
    nodes.until(lambda: key in nodes.released)
    assert nodes.failed[key]
    nodes.connect()
    nodes.serve(NUM_PAGES * 4)
    nodes.assert_balanced()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 4)])
def test_a_pair_of_ranks_that_breaks_is_mended_and_the_transfer_goes_on(make: Make, ranks: tuple[int, int]) -> None:
    nodes = make(ranks)
    key = nodes.begin(10)
    nodes.until(lambda: nodes.sender.is_granted(key))
    reader = nodes.target.transports.reader
    reader._ends[0]._transports[0].withdraw(f"{PREFILL}/0")  # type: ignore[attr-defined]
    nodes.finish(key)
    nodes.until(lambda: key in nodes.completed and key in nodes.released)
    nodes.compare(key)
    assert nodes.receiver.counters()["reconnects"] == 1
    nodes.allocator.free(nodes.completed[key].pages, Owner.REQUEST)
    nodes.assert_balanced()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_pages_that_came_before_a_pair_of_ranks_ended_are_read_and_count(make: Make, ranks: tuple[int, int]) -> None:
    """One pair can write no more, and the end of the other is not proven when the message about its pages comes."""
    nodes = make(ranks, transport="auto", checksums="all")
    key = send_all(nodes)
    reader, writer = nodes.target.transports.reader, nodes.source.transports.writer
    assert isinstance(reader, RanksReader) and isinstance(writer, RanksWriter)
    writer._ends[0].detach(f"{DECODE}/{ranks[1] - 1}")
    nodes.until(lambda: reader._writers[PREFILL].epoch == 0, delivers=False)
    nodes.until(lambda: key in nodes.completed)
    nodes.compare(key)
    nodes.allocator.free(nodes.completed[key].pages, Owner.REQUEST)
    nodes.assert_balanced()


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_rank_whose_endpoint_ends_is_reported_as_lost(make: Make, end: str) -> None:
    nodes = make((2, 2))
    nodes.serve(4)
    getattr(nodes, end).lose_rank()
    with pytest.raises(RankLostError, match="rank 1 does not answer"):
        nodes.until(lambda: False)
    nodes.to_prefill.clear()
    nodes.to_decode.clear()


def test_an_end_that_cannot_be_opened_at_another_rank_leaves_no_descriptor() -> None:
    store = MemfdStore(2)

    def connect() -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    num_before = open_descriptors()
    with pytest.raises(RankLostError) as lost:
        RemoteWriter(connect(), store, TransportSettings(), rank=1)
    assert open_descriptors() <= num_before, lost
    store.close()


def test_a_rank_that_cannot_open_its_end_reports_why_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    store = MemfdStore(2)
    ours, theirs = socket.socketpair()
    rank_1 = threading.Thread(target=serve_rank, args=(theirs, store))
    rank_1.start()
    with pytest.raises(ConfigError, match="this pool is in host memory"):
        RemoteWriter(ours, store, TransportSettings("cuda-ipc"), rank=1)
    rank_1.join()
    assert not caplog.records
    store.close()


def test_a_node_with_other_ranks_than_the_decode_node_knows_refuses_it(make: Make) -> None:
    nodes = make((2, 1))
    nodes.turn()
    nodes.sender.on_message(DECODE, nodes.receiver.connect("q" * 32, num_ranks=1), 0.0)
    [refused] = [message for _, message in nodes.sender.take()[0] if isinstance(message, Refused)]
    assert refused.reason == "decode expects pages of 1 ranks, and this prefill node has 2"


def test_a_prefill_node_that_registers_with_other_ranks_while_it_may_still_write_is_offered_the_pool(
    make: Make,
) -> None:
    """The decode node learns the number from the gateway, which has it from the prefill node."""
    nodes = make((2, 1), transport="shm")
    key = nodes.begin(10)
    nodes.until(lambda: nodes.sender.is_granted(key))
    nodes.receiver.peer_lost(PREFILL)
    nodes.to_prefill.clear()
    nodes.turn(delivers=False)
    assert nodes.allocator.count(Owner.QUARANTINE) == 3
    nodes.sender.on_message(DECODE, nodes.receiver.connect(PREFILL, num_ranks=1), 0.0)
    assert [message for _, message in nodes.sender.take()[0] if isinstance(message, Refused)]


def test_parts_that_would_come_to_one_rank_by_two_transports_are_refused() -> None:
    """A page of a GPU's pool cannot come partly in the pool and partly beside it."""
    layout = PageLayout(1, 2, 2, 4, "float32")
    store = MemfdStore(2, layout.of_heads(1))
    ends = [FakeWriter("auto", store) for _ in range(2)]
    writer = RanksWriter(ends, layout)
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(layout), 2, "auto", '["one", "two"]', num_peer_ranks=2)
    writer.attach(DECODE, connect)
    assert [end.attached for end in ends] == [[(f"{DECODE}/0", "one")], [(f"{DECODE}/0", "two")]]
    for end, name in zip(ends, ("shm", "tcp"), strict=True):
        end.news.append(Attached(f"{DECODE}/0", 1, "", name))
    [attached] = writer.poll()
    assert attached.problem == "rank 0 would get its pages by shm and tcp: name one with --transport"
    assert writer.detach(DECODE)
    store.close()


@pytest.mark.parametrize("endpoint", ["", "{}", '["one"]', '["one", "two", "three"]'])
def test_an_endpoint_without_one_offer_for_each_pair_of_ranks_is_refused(endpoint: str) -> None:
    layout = PageLayout(1, 2, 2, 4, "float32")
    store = MemfdStore(2, layout.of_heads(1))
    writer = RanksWriter([FakeWriter("auto", store) for _ in range(2)], layout)
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(layout), 2, "auto", endpoint, num_peer_ranks=2)
    with pytest.raises(AttachError, match="decode-0"):
        writer.attach(DECODE, connect)
    store.close()
