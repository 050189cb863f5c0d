"""Page checksums: damage is detected, counted and repaired by a resend, or ends the transfer in an error."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore, TransferPair, content
from support.kv.unequal_nodes import SIZES, Nodes

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from common.errors import ErrorCode
from common.wire.messages import Closed, Coverage, PagesWritten, PrefillDone, Resend
from kv_transfer.checksums import SAMPLED_EVERY, Checksums, is_covered
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.page_mapping import PageMapping, target_units
from kv_transfer.page_slices import copy
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.states import MAX_RESENDS
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from scripts.simulator.service.inprocess_transport import Fault, Wire

KEY = ("r", 0)
Asks = tuple[Coverage, Coverage]  # of the prefill node and of the decode node
ASKS: list[Asks] = [("all", "off"), ("off", "all"), ("all", "all"), ("sampled", "all")]


class DeviceStore(MemfdStore):
    """A page store whose pool is separate from ``memory``, which only stages pages."""

    is_mapped = is_in_place = False

    def __init__(self, num_pages: int, layout: PageLayout = LAYOUT) -> None:
        super().__init__(num_pages, layout)
        self.device = bytearray(layout.pool_bytes(num_pages))

    def export_page(self, page: int, into: memoryview) -> None:
        size = self.layout.page_bytes
        into[:] = self.device[page * size : (page + 1) * size]

    def landed(self, pages: Sequence[int]) -> None:
        super().landed(pages)
        size = self.layout.page_bytes
        for page in pages:
            self.device[page * size : (page + 1) * size] = self.read(page)


# ---- the checksums --------------------------------------------------------------------------------------------------


def half_of_the_hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 32


def test_a_page_has_half_of_the_hash_of_its_bytes() -> None:
    store = MemfdStore(3)
    store.memory[64:128] = bytes(range(64))
    whole = target_units(LAYOUT, 1)[0].runs(LAYOUT)
    expected = half_of_the_hash(bytes(range(64)))
    assert Checksums(store).of_source(1, None) == Checksums(store).of_target(1, whole) == expected


def test_the_checksum_of_a_device_page_follows_the_place_of_its_bytes() -> None:
    store = DeviceStore(3)
    store.device[64:128] = b"\5" * 64
    store.memory[64:128] = b"\6" * 64
    sums = Checksums(store)
    whole = target_units(LAYOUT, 1)[0].runs(LAYOUT)
    assert sums.of_source(1, None) == half_of_the_hash(b"\5" * 64)
    assert sums.of_target(1, whole) == half_of_the_hash(b"\6" * 64)
    store.is_in_place = True  # as for a transport that writes on the device
    assert sums.of_target(1, whole) == half_of_the_hash(b"\5" * 64)


@pytest.mark.parametrize(("source_size", "target_size"), [(2, 4), (4, 2), (4, 4)])
def test_both_ends_compute_the_same_checksum_of_a_slice_at_any_offset(source_size: int, target_size: int) -> None:
    ours, theirs = replace(LAYOUT, page_size=source_size), replace(LAYOUT, page_size=target_size)
    mapping = PageMapping(ours, theirs)
    source, target = MemfdStore(1, ours), MemfdStore(1, theirs)
    source.memory[:] = bytes(range(len(source.memory)))
    for number, slices in enumerate(mapping.slice_pairs):
        if slices is None:
            target.memory[:] = source.memory[:]
        else:
            copy(slices, memoryview(source.memory), memoryview(target.memory))
        runs = target_units(theirs, mapping.units.per_target)[number % mapping.units.per_target].runs(theirs)
        assert Checksums(source).of_source(0, slices) == Checksums(target).of_target(0, runs)


# ---- the protocol ---------------------------------------------------------------------------------------------------


def ship(pair: TransferPair, num_pages: int = 3) -> None:
    pair.connect()
    pair.open(KEY, num_pages)
    pair.begin(KEY, num_pages)
    pair.finish(KEY)
    pair.run()


@pytest.mark.parametrize("asks", ASKS)
def test_a_damaged_page_is_resent_and_everything_arrives(asks: Asks) -> None:
    pair = TransferPair(Wire(faults={1: Fault("corrupt")}), checksums=asks)
    ship(pair)
    assert isinstance(pair.events[KEY], Completed)  # TransferPair has compared every byte
    assert pair.released[KEY].ok
    decode, prefill = pair.receiver.counters(), pair.sender.counters()
    assert (decode["checksum_mismatches"], decode["pages_verified"], decode["pages_received"]) == (1, 4, 3)
    assert (prefill["pages_resent"], prefill["pages_sent"]) == (1, 4)
    pair.give_back(KEY)
    pair.assert_nothing_is_held()


def test_damage_goes_unnoticed_without_checksums() -> None:
    pair = TransferPair(Wire(faults={1: Fault("corrupt")}))
    with pytest.raises(AssertionError, match="has other bytes"):  # raised by TransferPair
        ship(pair)
    assert pair.receiver.counters()["pages_verified"] == 0


@pytest.mark.parametrize("asks", ASKS)
def test_a_page_that_is_always_damaged_ends_the_transfer_with_pair_and_transport_named(
    asks: Asks,
) -> None:
    faults = {1: Fault("corrupt")} | {3 + n: Fault("corrupt") for n in range(MAX_RESENDS)}
    pair = TransferPair(Wire(faults=faults), checksums=asks)
    pair.connect("prefill-7")
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.finish(KEY)
    pair.run()
    why = "the same page arrived damaged 4 times by inprocess from node prefill-7 to decode node decode-0"
    assert pair.events[KEY] == TransferFailed(KEY, ErrorCode.TRANSFER_FAILED, why)
    assert not pair.released[KEY].ok
    assert pair.receiver.counters()["checksum_mismatches"] == MAX_RESENDS + 1
    assert pair.sender.counters()["pages_resent"] == MAX_RESENDS
    pair.assert_nothing_is_held()


def test_temporary_damage_is_repaired_for_any_number_of_pages() -> None:
    pair = TransferPair(Wire(faults={n: Fault("corrupt") for n in range(5 * MAX_RESENDS)}), checksums=("all", "off"))
    ship(pair, 5)
    assert isinstance(pair.events[KEY], Completed)
    assert pair.sender.counters()["pages_resent"] == 5 * MAX_RESENDS


def test_a_source_page_that_changes_during_its_write_is_detected() -> None:
    pair = TransferPair(Wire(latency=2), checksums=("off", "all"))
    pair.connect()
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    pair.compute(KEY, 1)
    pair.pump()
    pair.source.fill(pair.source_pages[KEY][0], 99)  # against the contract
    pair.tick()
    pair.tick()
    pair.source.fill(pair.source_pages[KEY][0], content(KEY, 0))
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert pair.receiver.counters()["checksum_mismatches"] == 1


def test_a_page_without_the_requested_checksum_counts_as_damaged() -> None:
    """A transfer does not hang if the prefill node sends no checksums."""
    pair = TransferPair(checksums=("off", "all"))
    pair.connect()
    pair.open(KEY, 1)
    pair.begin(KEY, 1)
    pair.finish(KEY)
    for _ in range(200):
        pair.pump()
        pair.to_decode = type(pair.to_decode)(
            msgspec.structs.replace(m, checksums=()) if isinstance(m, PagesWritten) else m for m in pair.to_decode
        )
        pair.drain_to_decode()
        pair.drain_to_prefill()
    assert isinstance(pair.events[KEY], TransferFailed)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epoch": 2}, "another epoch"),
        ({"rid": "s"}, "another request"),
        ({"indices": (3,)}, "never granted"),
        ({"indices": (1,)}, "not written yet"),
        ({"indices": (0, 0)}, "twice"),
        ({"unit": 1}, "no such unit"),
        ({"number": 2}, "one that was never asked for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_resend_is_counted_and_ignored(change: dict[str, Any], why: str) -> None:
    pair = TransferPair(Wire(latency=1), checksums=("all", "all"))
    pair.connect()
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.hear_decode()
    pair.compute(KEY, 1)
    pair.run()
    message = msgspec.structs.replace(Resend("r", 0, 1, (0,), 0, 1), **change)
    pair.sender.on_message(DECODE, message, 0.0)
    pair.sender.on_message("x" * 32, Resend("r", 0, 1, (0,), 0, 1), 0.0)
    pair.settle()
    assert pair.sender.counters()["stale_messages"] == 2
    assert pair.sender.counters()["pages_resent"] == 0
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_decode_node_that_requests_too_many_resends_is_refused() -> None:
    pair = TransferPair(checksums=("all", "all"))
    pair.connect()
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.compute(KEY, 1)
    pair.run()
    for number in range(1, MAX_RESENDS + 1):
        pair.sender.on_message(DECODE, Resend("r", 0, 1, (0,), 0, number), 0.0)
        pair.sender.pump(0.0)
    pair.sender.on_message(DECODE, Resend("r", 0, 1, (0,), 0, MAX_RESENDS + 1), 0.0)
    pair.settle()
    assert isinstance(pair.to_decode[-1], Closed)
    assert not pair.released[KEY].ok


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.sampled_from(SIZES),
    prompts=st.lists(st.integers(1, 28), min_size=1, max_size=3),
    damaged=st.sets(st.integers(0, 60), max_size=12),
)
def test_damage_to_any_parts_of_pages_of_any_size_is_repaired(
    sizes: tuple[int, int], prompts: list[int], damaged: set[int]
) -> None:
    nodes = Nodes(*sizes, checksums="all", faults={number: Fault("corrupt") for number in damaged})
    for num_tokens in prompts:
        key = nodes.open(num_tokens)
        nodes.begin(key, 0, nodes.target.layout.num_pages(num_tokens))
        nodes.finish(key)
    nodes.run()
    if nodes.failed:
        assert all("the same page arrived damaged 4 times" in event.message for event in nodes.failed)
    else:
        nodes.assert_all_arrived()
        num_hit = sum(number < nodes.wire.num_begun for number in damaged)
        assert nodes.receiver.counters()["checksum_mismatches"] == num_hit
        assert nodes.sender.counters()["pages_resent"] == num_hit
    nodes.close()


# ---- all transports -------------------------------------------------------------------------------------------------


class Ends:
    """A sender and a receiver over a real transport. A test may damage pages before ``PagesWritten`` is delivered."""

    def __init__(self, transport: str, source: MemfdStore, target: MemfdStore) -> None:
        self.source, self.target = source, target
        self.allocator = PageAllocator(target.num_pages)
        self.reader = open_reader(target, TransportSettings(transport, DECODE))
        self.writer = open_writer(source, TransportSettings(transport, PREFILL))
        self.sender = Sender(self.writer, digest="model")
        self.receiver = Receiver(self.reader, self.allocator, name="decode-0", digest="model", checksums="all")
        self.events: list[Any] = []
        self.released: list[Any] = []
        self.damage: Callable[[PagesWritten], None] = lambda delivered: None
        self.sender.on_message(DECODE, self.receiver.connect(PREFILL, "prefill-0"), 0.0)
        self.until(lambda: self.receiver.is_connected(PREFILL))

    def turn(self) -> None:
        self.receiver.poll(0.0)
        self.sender.pump(0.0)
        messages, released = self.sender.take()
        self.released += released
        for _, message in messages:
            if isinstance(message, PagesWritten):
                self.damage(message)
            self.receiver.on_message(PREFILL, message, 0.0)
        replies, events = self.receiver.take()
        self.events += events
        for _, message in replies:
            self.sender.on_message(DECODE, message, 0.0)
        self.sender.check()
        self.receiver.check()
        self.allocator.check()

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < end, "the expected state was not reached"
            self.turn()
            time.sleep(0.001)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


@pytest.mark.parametrize("is_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo", "nixl"])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 4), (4, 2)], ids=["equal", "longer", "shorter"])
def test_pages_damaged_on_any_transport_are_resent(transport: str, sizes: tuple[int, int], is_device: bool) -> None:
    make = DeviceStore if is_device else MemfdStore
    source = make(16, replace(LAYOUT, page_size=sizes[0]))
    target = make(16, replace(LAYOUT, page_size=sizes[1]))
    pool: Any = source.device if isinstance(source, DeviceStore) else source.memory
    pool[:] = bytes(index % 251 + 1 for index in range(len(pool)))
    ends = Ends(transport, source, target)
    num_tokens, hits = 15, [0]
    pages = ends.allocator.alloc(target.layout.num_pages(num_tokens), Owner.GRANT)
    assert pages is not None

    def damage(delivered: PagesWritten) -> None:
        hits[0] += 1
        if hits[0] <= 2:
            runs = target_units(target.layout, max(1, sizes[1] // sizes[0]))[delivered.unit].runs(target.layout)
            page = pages[delivered.indices[0]]
            target.memory[page * target.layout.page_bytes + sum(runs[-1]) - 1] ^= 1

    ends.damage = damage
    try:
        ends.receiver.begin(KEY, PREFILL, first=0, pages=pages, length=num_tokens)
        ends.sender.open(KEY, DECODE)
        num_source = source.layout.num_pages(num_tokens)
        ends.sender.computed(KEY, list(range(num_source - 1)))
        ends.sender.finish(KEY, PrefillDone(*KEY, num_tokens, 9), list(range(num_source)))
        ends.until(lambda: bool(ends.events and ends.released))
        assert isinstance(ends.events[0], Completed)
        assert ends.receiver.counters()["checksum_mismatches"] == ends.sender.counters()["pages_resent"] == 2
        arrived = tokens_of(target, pages, num_tokens)
        assert arrived == tokens_of(source, range(num_source), num_tokens)
    finally:
        ends.close()


def tokens_of(store: MemfdStore, pages: Sequence[int], num_tokens: int) -> bytes:
    """Keys, then values, of a prompt with one layer and one head: 8 bytes per token."""
    pool = store.device if isinstance(store, DeviceStore) else store.memory
    size, half = store.layout.page_bytes, store.layout.page_bytes // 2
    sides = [b"".join(bytes(pool[p * size + at : p * size + at + half]) for p in pages) for at in (0, half)]
    return b"".join(side[: num_tokens * 8] for side in sides)


def test_a_resend_of_a_part_that_the_pair_does_not_have_is_ignored() -> None:
    """If page sizes are equal, unit 1 of page 0 would be page 1."""
    pair = TransferPair(checksums=("all", "all"))
    pair.connect()
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.compute(KEY, 2)
    pair.run()
    pair.sender.on_message(DECODE, Resend("r", 0, 1, (0,), 1, 1), 0.0)
    pair.settle()
    assert pair.sender.counters()["stale_messages"] == 1
    assert pair.sender.counters()["pages_resent"] == 0


# ---- samples --------------------------------------------------------------------------------------------------------


def test_a_sample_covers_each_page_in_one_of_sixteen_attempts() -> None:
    for unit in range(40):
        covered = [attempt for attempt in range(SAMPLED_EVERY) if is_covered("sampled", attempt, unit)]
        assert len(covered) == 1
    assert all(is_covered("all", 0, unit) and not is_covered("off", 0, unit) for unit in range(40))


def test_a_damaged_page_of_the_sample_is_sent_again_and_others_are_not_verified() -> None:
    pair = TransferPair(Wire(faults={0: Fault("corrupt")}), checksums=("sampled", "off"))
    ship(pair)  # of attempt 0, whose sample begins at page 0
    assert pair.receiver.counters()["pages_verified"] == 2  # the page, and again
    assert pair.receiver.counters()["checksum_mismatches"] == 1
    assert pair.receiver.counters()["pages_received"] > 1
