"""Established Gloo pairs: where pages may land, invalid frames, and revoked permissions."""

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore
from support.kv.raw_gloo_peer import RawGlooPeer, attach, offer, threads
from support.kv.raw_tcp_peer import KEY, NUM_PAGES, SIZE
from support.waiting import until

from kv_transfer.transports.base import Attached, Fenced
from kv_transfer.transports.tcp.protocol import PAGE_FRAME_BYTES
from kv_transfer.transports.torch_distributed import GroupReader, GroupWriter
from kv_transfer.transports.torch_distributed import backend as group_backend
from kv_transfer.transports.torch_distributed.backend import Group, Pages
from kv_transfer.transports.torch_distributed.reader import GroupReceiveThread

# ---- permissions and frames --------------------------------------------------------------------------------------


def test_a_page_is_placed_once_where_it_is_permitted(gloo_peer: RawGlooPeer, store: MemfdStore) -> None:
    for page, value in ((2, 7), (4, 8), (3, 9), (2, 10)):
        gloo_peer.send(page, value)
    assert [gloo_peer.answer() for _ in range(4)] == [(1, 2), (0, 4), (1, 3), (0, 2)]
    assert [set(store.read(page)) for page in (2, 3, 4)] == [{7}, {9}, {0}]
    assert gloo_peer.reader.counters()["refused_pages"] == 2


def test_a_page_that_arrives_after_its_permission_was_revoked_is_discarded(
    gloo_peer: RawGlooPeer, store: MemfdStore
) -> None:
    gloo_peer.announce(2, 7)
    time.sleep(0.05)
    gloo_peer.reader.forbid([2])
    store.fill(2, 99)  # now another request's page
    gloo_peer.group.wait(gloo_peer.group.send(torch.full((SIZE,), 7, dtype=torch.uint8)))
    assert gloo_peer.answer() == (0, 2)
    assert set(store.read(2)) == {99}


@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_a_changed_page_is_discarded_and_ends_the_pair(gloo_peer: RawGlooPeer, store: MemfdStore, at: int) -> None:
    gloo_peer.send(3, 6)
    assert gloo_peer.answer() == (1, 3)
    gloo_peer.send(2, 7, changed=at)
    [fenced] = until(lambda: gloo_peer.reader.poll(0.0))
    assert "were changed on the way" in fenced.reason
    assert set(store.read(2)) == {0}
    assert gloo_peer.answer() is None


def test_a_permission_of_another_epoch_is_not_valid(gloo_peer: RawGlooPeer, store: MemfdStore) -> None:
    gloo_peer.reader.allow(PREFILL, 2, [2])
    gloo_peer.send(2, 7)
    assert gloo_peer.answer() == (0, 2)
    assert set(store.read(2)) == {0}


def test_revoking_a_permission_waits_for_the_copy_in_progress(
    gloo_peer: RawGlooPeer, store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, copy = threading.Event(), group_backend._copy

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        is_copying.set()
        time.sleep(0.2)
        copy(target, source)

    monkeypatch.setattr(group_backend, "_copy", slow)
    gloo_peer.send(2, 7)
    assert is_copying.wait(60)
    gloo_peer.reader.forbid([2])
    store.fill(2, 99)  # now another request's page
    assert gloo_peer.answer() == (1, 2)
    assert set(store.read(2)) == {99}


def test_withdrawing_is_a_fence_while_a_page_is_in_flight(
    gloo_peer: RawGlooPeer, store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late bytes of an old epoch do not reach the page, whichever request uses it by then."""
    gloo_peer.announce(2, 7)
    time.sleep(0.05)
    gloo_peer.reader.withdraw(PREFILL)
    assert gloo_peer.reader.poll(0.0) == [Fenced(PREFILL, 1, "the connection was closed on our side")]
    store.fill(2, 99)
    monkeypatch.setattr(group_backend, "STALL_S", 0.5)  # no bytes are taken
    with contextlib.suppress(ConnectionError):
        gloo_peer.group.wait(gloo_peer.group.send(torch.full((SIZE,), 7, dtype=torch.uint8)))
    until(lambda: not threads("receive-pages"))
    assert set(store.read(2)) == {99}


@pytest.mark.parametrize(
    "frame", [{"page": NUM_PAGES}, {"page": 2**63}, {"page": 2, "size": SIZE + 1}, {"page": 2, "number": 1}]
)
def test_an_invalid_frame_ends_the_pair(gloo_peer: RawGlooPeer, store: MemfdStore, frame: dict[str, Any]) -> None:
    gloo_peer.connection.sendall(gloo_peer.header(**frame))
    assert [(f.peer, f.epoch) for f in until(lambda: gloo_peer.reader.poll(0.0))] == [(PREFILL, 1)]
    assert set(store.memory[:]) == {0}


@settings(max_examples=10, deadline=None)
@given(noise=st.binary(min_size=PAGE_FRAME_BYTES, max_size=300))
def test_random_bytes_end_the_pair_and_change_no_page(noise: bytes) -> None:
    store, source = MemfdStore(NUM_PAGES), MemfdStore(NUM_PAGES)
    reader = GroupReader(store, "gloo", key=KEY)
    gloo_peer = RawGlooPeer(reader)
    try:
        gloo_peer.join(offer(reader), Pages(source, "gloo"))
        reader.allow(PREFILL, 1, range(NUM_PAGES))
        gloo_peer.connection.sendall(noise)
        assert until(lambda: reader.poll(0.0))
        assert set(store.memory[:]) == {0}
    finally:
        gloo_peer.group.close()
        reader.close()
        store.close()
        source.close()


def test_an_announced_page_that_never_arrives_ends_the_pair(
    reader: GroupReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemfdStore(NUM_PAGES)
    gloo_peer = RawGlooPeer(reader)
    gloo_peer.join(offer(reader), Pages(source, "gloo"))
    monkeypatch.setattr(group_backend, "STALL_S", 0.2)
    gloo_peer.announce(2, 7)
    [fenced] = until(lambda: reader.poll(0.0))
    assert fenced.reason == (
        "the gloo connection to the prefill node ended: Timed out waiting 200ms for recv operation to complete"
    )
    gloo_peer.group.close()


def test_detach_returns_false_while_pages_are_still_being_read(
    reader: GroupReader, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader receives nothing, and the backend cannot be interrupted."""
    is_over = threading.Event()
    monkeypatch.setattr(GroupReceiveThread, "_receive_pages", lambda thread, group: is_over.wait(60))
    attach(writer, reader)
    monkeypatch.setattr(Group, "abort", lambda group: None)
    tickets = [writer.write(DECODE, [(page, page)]) for page in range(2)]
    until(lambda: next(iter(writer._by_descriptor.values()))[1].thread._is_sending)  # type: ignore[union-attr]
    for _ in range(3):
        assert writer.detach(DECODE) is False
        assert (writer.poll(), writer.done()) == ([], [])
    monkeypatch.undo()
    is_over.set()
    until(lambda: writer.detach(DECODE))
    assert writer.done() == tickets
    assert writer.counters()["bytes_by_gloo"] == 0


# ---- threads that fail -------------------------------------------------------------------------------------------


def run_out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_writer_whose_thread_runs_out_of_memory_breaks_the_pair(
    reader: GroupReader, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer._pages, "staging", run_out_of_memory)
    writer.attach(DECODE, offer(reader))

    def problems() -> list[str]:
        reader.poll(0.0)
        return [attached.problem for attached in writer.poll() if attached.problem]

    [problem] = until(problems)
    assert problem.endswith("broke: CUDA out of memory")


def test_a_reader_whose_thread_runs_out_of_memory_breaks_the_pair(
    reader: GroupReader, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader._pages, "staging", run_out_of_memory)
    writer.attach(DECODE, offer(reader))

    def fences() -> list[Fenced]:
        writer.poll()
        return reader.poll(0.0)

    [fenced] = until(fences)
    assert fenced.reason.endswith("ended: CUDA out of memory")


def test_a_group_whose_proof_finds_no_memory_is_not_formed(
    reader: GroupReader, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "zeros_like", lambda tensor: run_out_of_memory())
    writer.attach(DECODE, offer(reader))
    fenced: list[Fenced] = []
    attached: list[Attached] = []

    def are_both_told() -> bool:
        fenced.extend(reader.poll(0.0))
        attached.extend(writer.poll())
        return bool(fenced and attached)

    until(are_both_told)
    assert attached[0].problem  # either end may first see that the other one closes the connection
