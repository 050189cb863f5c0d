"""Authenticated TCP connections: where a writer can put bytes, invalid frames, and revoked permissions."""

import contextlib
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.kv.raw_tcp_peer import (
    KEY,
    NUM_PAGES,
    SIZE,
    WHOLE,
    RawTcpPeer,
    join,
    offer,
)
from support.waiting import until

from kv_transfer.page_mapping import PageMapping
from kv_transfer.page_slices import PageSlice
from kv_transfer.transports.base import Fenced
from kv_transfer.transports.tcp import TcpReader, TcpWriter, protocol
from kv_transfer.transports.tcp.protocol import MAC_BYTES, PAGE_FRAME_BYTES
from kv_transfer.transports.tcp.receive_thread import ReceiveThread

# ---- permissions and frames --------------------------------------------------------------------------------------


def test_a_page_is_placed_only_where_it_is_permitted(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    raw_peer.page(2, 7)
    raw_peer.page(4, 8)
    raw_peer.page(3, 9)
    assert [raw_peer.answer() for _ in range(3)] == [(1, 2), (0, 4), (1, 3)]
    assert [set(store.read(page)) for page in (2, 3, 4)] == [{7}, {9}, {0}]
    assert raw_peer.reader.counters()["refused_pages"] == 1
    assert raw_peer.reader.counters()["bytes_by_tcp"] == 2 * SIZE


def test_a_page_can_be_written_once_per_grant(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    raw_peer.page(2, 7)
    raw_peer.page(2, 8)
    assert [raw_peer.answer(), raw_peer.answer()] == [(1, 2), (0, 2)]
    assert set(store.read(2)) == {7}


def test_a_page_that_arrives_after_its_permission_was_revoked_is_discarded(
    raw_peer: RawTcpPeer, store: MemfdStore
) -> None:
    raw_peer.reader.forbid([2])
    raw_peer.page(2, 7)
    assert raw_peer.answer() == (0, 2)
    assert set(store.read(2)) == {0}


def send_half(raw_peer: RawTcpPeer, store: MemfdStore) -> bytes:
    """Send half of page 2, and return the rest of its frame once that has arrived."""
    frame = raw_peer.frame(2, 7)
    half = PAGE_FRAME_BYTES + SIZE // 2
    raw_peer.connection.sendall(frame[:half])
    until(lambda: store.read(2)[SIZE // 2 - 1] == 7)
    return frame[half:]


def test_a_permission_can_be_revoked_in_the_middle_of_a_page(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    rest = send_half(raw_peer, store)
    raw_peer.reader.forbid([2])
    store.fill(2, 99)  # now another request's page
    raw_peer.connection.sendall(rest)
    assert raw_peer.answer() == (0, 2)
    assert set(store.read(2)) == {99}


def test_revoking_permissions_does_not_search_the_pages_for_each_connection(raw_peer: RawTcpPeer) -> None:
    class Pages(list[int]):
        def __contains__(self, page: object) -> bool:
            raise AssertionError(f"page {page} was searched")

    raw_peer.reader.forbid(Pages([2, 3]))
    raw_peer.page(2, 7)
    assert raw_peer.answer() == (0, 2)


def test_a_permission_of_another_epoch_is_not_valid(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    raw_peer.reader.allow(PREFILL, 2, [2])
    raw_peer.page(2, 7)
    assert raw_peer.answer() == (0, 2)
    assert set(store.read(2)) == {0}


def test_revoking_a_permission_waits_for_the_copy_in_progress(
    raw_peer: RawTcpPeer, store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, receive = threading.Event(), ReceiveThread._receive

    def slow(thread: ReceiveThread, into: list[memoryview]) -> int:
        if thread._lock.locked():  # a page, not a header
            is_copying.set()
            until(lambda: 2 not in thread._permissions._by_page)
            time.sleep(0.1)
        return receive(thread, into)

    monkeypatch.setattr(ReceiveThread, "_receive", slow)
    raw_peer.page(2, 7)
    assert is_copying.wait(60)
    raw_peer.reader.forbid([2])
    store.fill(2, 99)  # now another request's page
    assert raw_peer.answer() == (0, 2)
    assert set(store.read(2)) == {99}


def test_withdrawing_is_a_fence_even_in_the_middle_of_a_page(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    rest = send_half(raw_peer, store)
    raw_peer.reader.withdraw(PREFILL)
    store.fill(2, 99)
    with contextlib.suppress(OSError):
        raw_peer.connection.sendall(rest)
    time.sleep(0.05)
    assert set(store.read(2)) == {99}
    assert raw_peer.reader.poll(0.0) == [Fenced(PREFILL, 1, "the connection was closed on our side")]


@pytest.mark.parametrize(
    "frame",
    [
        {"page": NUM_PAGES},
        {"page": 2**63},
        {"page": 2, "size": SIZE + 1},
        {"page": 2, "size": 2**32 - 1},
        {"page": 2, "size": 0},
        {"page": 2, "number": 1},
        {"page": 2, "magic": b"done"},
        {"page": 2, "page_slice": PageSlice(1, 4, 0, 1)},
        {"page": 2, "page_slice": PageSlice(0, 8, 0, 1), "size": 2 * SIZE},
        {"page": 2, "page_slice": PageSlice(0, 0, 0, 1), "size": 0},
        {"page": 2, "page_slice": PageSlice(0, 2, 0, 1)},
    ],
)
def test_an_invalid_frame_ends_the_connection(raw_peer: RawTcpPeer, store: MemfdStore, frame: dict[str, Any]) -> None:
    raw_peer.connection.sendall(raw_peer.header(**frame) + b"\7" * SIZE)
    news = until(lambda: raw_peer.reader.poll(0.0))
    assert [(fenced.peer, fenced.epoch) for fenced in news] == [(PREFILL, 1)]
    assert set(store.memory[:]) == {0}
    assert raw_peer.answer() is None


def test_each_part_of_a_page_is_placed_once_at_its_offset(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    """A page has 4 tokens: 32 bytes of keys and 32 bytes of values."""
    first, last = PageSlice(0, 3, 0, 1), PageSlice(3, 1, 0, 1)
    raw_peer.part(2, 7, last)
    assert raw_peer.answer() == (1, 2)
    raw_peer.part(2, 9, first)
    assert raw_peer.answer() == (1, 2)
    keys_then_values = (b"\x09" * 24 + b"\x07" * 8) * 2
    assert store.read(2) == keys_then_values
    for again in (last, first, WHOLE):
        raw_peer.part(2, 5, again)
        assert raw_peer.answer() == (0, 2)
    assert store.read(2) == keys_then_values
    raw_peer.reader.allow(PREFILL, 1, [2])
    raw_peer.part(2, 5, last)
    assert raw_peer.answer() == (1, 2)
    assert store.read(2) == (b"\x09" * 24 + b"\x05" * 8) * 2
    assert raw_peer.reader.counters()["bytes_by_tcp"] == SIZE + 16
    assert raw_peer.reader.counters()["refused_pages"] == 3


def test_a_new_permission_does_not_cover_a_page_already_in_flight(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    rest = send_half(raw_peer, store)
    raw_peer.reader.forbid([2])
    store.fill(2, 99)
    raw_peer.reader.allow(PREFILL, 1, [2])
    raw_peer.connection.sendall(rest)
    assert raw_peer.answer() == (0, 2)
    assert set(store.read(2)) == {99}


def test_a_replayed_frame_ends_the_connection(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    frame = raw_peer.frame(2, 7)
    raw_peer.connection.sendall(frame)
    assert raw_peer.answer() == (1, 2)
    raw_peer.reader.allow(PREFILL, 1, [2])
    store.fill(2, 99)
    raw_peer.connection.sendall(frame)
    assert "frame 1 was expected" in until(lambda: raw_peer.reader.poll(0.0))[0].reason
    assert set(store.read(2)) == {99}


def test_a_header_without_the_key_ends_the_connection(raw_peer: RawTcpPeer, store: MemfdStore) -> None:
    header = raw_peer.header(2)
    raw_peer.connection.sendall(header[:-MAC_BYTES] + bytes(MAC_BYTES) + b"\7" * SIZE)
    assert "not a page of this writer" in until(lambda: raw_peer.reader.poll(0.0))[0].reason
    assert set(store.read(2)) == {0}


@pytest.mark.parametrize("at", [PAGE_FRAME_BYTES, PAGE_FRAME_BYTES + SIZE // 2, -MAC_BYTES - 1, -MAC_BYTES, -1])
def test_a_changed_page_is_not_acknowledged_and_ends_the_connection(raw_peer: RawTcpPeer, at: int) -> None:
    raw_peer.page(3, 6)
    assert raw_peer.answer() == (1, 3)
    frame = bytearray(raw_peer.frame(2, 7))
    frame[at] ^= 1
    raw_peer.connection.sendall(frame)
    [fenced] = until(lambda: raw_peer.reader.poll(0.0))
    assert (fenced.peer, fenced.epoch) == (PREFILL, 1)
    assert "were changed on the way" in fenced.reason
    assert raw_peer.answer() is None
    assert raw_peer.reader.counters()["bytes_by_tcp"] == SIZE


def test_the_last_few_bytes_of_a_page_are_received_without_delay(raw_peer: RawTcpPeer) -> None:
    frame = raw_peer.frame(2, 7)
    for begin, end in ((0, 1), (1, -MAC_BYTES - SIZE + 1), (-MAC_BYTES - SIZE + 1, -MAC_BYTES), (-MAC_BYTES, -1)):
        raw_peer.connection.sendall(frame[begin:end])
        time.sleep(0.05)  # the reader waits for at least the bytes that must follow
    raw_peer.connection.sendall(frame[-1:])
    assert raw_peer.answer() == (1, 2)


def test_bytes_of_one_page_are_not_accepted_for_another(raw_peer: RawTcpPeer) -> None:
    two, three = raw_peer.frame(2, 7), raw_peer.frame(3, 8)
    raw_peer.connection.sendall(two[:PAGE_FRAME_BYTES] + three[PAGE_FRAME_BYTES:])
    assert "were changed on the way" in until(lambda: raw_peer.reader.poll(0.0))[0].reason


def test_slices_are_authenticated_with_a_cluster_key(reader: TcpReader, store: MemfdStore) -> None:
    ours = replace(LAYOUT, page_size=2 * LAYOUT.page_size)
    source = MemfdStore(NUM_PAGES, ours)
    writer = TcpWriter(source, key=KEY)
    try:
        join(writer, reader)
        reader.allow(PREFILL, 1, [3, 4])
        half = SIZE // 2
        source.memory[: 2 * SIZE] = b"a" * half + b"b" * half + b"c" * half + b"d" * half  # keys, then values
        for target, slices in zip((3, 4), PageMapping(ours, LAYOUT).slice_pairs, strict=True):
            writer.write(DECODE, [(0, target)], slices)
        done: list[int] = []
        until(lambda: done.extend(writer.done()) or len(done) == 2)
        assert store.read(3) == b"a" * half + b"c" * half
        assert store.read(4) == b"b" * half + b"d" * half
    finally:
        writer.close()
        source.close()


def test_each_part_of_a_page_is_authenticated_separately(raw_peer: RawTcpPeer) -> None:
    first, second = PageSlice(0, 1, 0, 1), PageSlice(1, 1, 0, 1)
    raw_peer.part(2, 7, first)
    assert raw_peer.answer() == (1, 2)
    size = second.num_bytes(LAYOUT)
    frame, other = (raw_peer.frame(2, value, size=size, page_slice=second) for value in (8, 9))
    raw_peer.connection.sendall(frame[:-MAC_BYTES] + other[-MAC_BYTES:])
    assert "were changed on the way" in until(lambda: raw_peer.reader.poll(0.0))[0].reason


@pytest.mark.parametrize(
    "num_bytes", [0, 1, PAGE_FRAME_BYTES - 1, PAGE_FRAME_BYTES, PAGE_FRAME_BYTES + 5, -MAC_BYTES, -1]
)
def test_a_connection_cut_at_any_byte_is_a_fence(raw_peer: RawTcpPeer, num_bytes: int) -> None:
    raw_peer.connection.sendall(raw_peer.frame(2, 7)[:num_bytes])
    raw_peer.connection.close()
    assert [(f.peer, f.epoch) for f in until(lambda: raw_peer.reader.poll(0.0))] == [(PREFILL, 1)]


@settings(max_examples=examples(40), deadline=None)
@given(noise=st.binary(min_size=PAGE_FRAME_BYTES, max_size=300))
def test_random_bytes_end_the_connection_and_change_no_page(noise: bytes) -> None:
    store = MemfdStore(NUM_PAGES)
    reader = TcpReader(store, key=KEY, num_connections=1)
    raw_peer = RawTcpPeer(reader)
    try:
        assert len(raw_peer.handshake(offer(reader))) == 32
        reader.allow(PREFILL, 1, range(NUM_PAGES))
        raw_peer.connection.sendall(noise)
        assert until(lambda: reader.poll(0.0))
        assert set(store.memory[:]) == {0}
    finally:
        raw_peer.connection.close()
        reader.close()
        store.close()


# ---- socket options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_granted", [True, False])
def test_buffers_are_enlarged_only_where_the_machine_grants_it(
    monkeypatch: pytest.MonkeyPatch, is_granted: bool
) -> None:
    monkeypatch.setattr(protocol, "grants_large_buffers", lambda: is_granted)
    monkeypatch.setattr(protocol, "SOCKET_BUFFER_BYTES", 100_000)
    with socket.socket() as tuned, socket.socket() as plain:
        protocol.tune(tuned)
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            size = tuned.getsockopt(socket.SOL_SOCKET, name)
            assert size == (200_000 if is_granted else plain.getsockopt(socket.SOL_SOCKET, name))
