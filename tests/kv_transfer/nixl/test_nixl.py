"""NIXL writers: watching a reader on the same host, threads that begin writes, and invalidation of pool access."""

import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.waiting import until

from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.nixl import handshake as nixl_handshake
from kv_transfer.transports.nixl import reader as nixl_reader
from kv_transfer.transports.nixl import writer as nixl_writer
from kv_transfer.transports.nixl.handshake import request_watch
from kv_transfer.transports.nixl.peer_state import Endpoint, PeerState, host_id, opened, sealed
from kv_transfer.transports.nixl.reader import NixlReader
from kv_transfer.transports.nixl.writer import NixlWriter

TOKEN = "5" * 64


@pytest.fixture
def name() -> str:
    return f"baton-{secrets.token_hex(16)}"


@pytest.fixture
def peer_state(name: str) -> Iterator[PeerState]:
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), 8, "nixl", "")
    peer_state = PeerState("d" * 32, connect, Endpoint("", 0, 0, f"{name}:{TOKEN}", "elsewhere"), 10.0)
    yield peer_state
    if peer_state.watch_socket is not None:
        peer_state.watch_socket.close()
    if peer_state.pidfd >= 0:
        os.close(peer_state.pidfd)


@pytest.fixture
def listener(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(0)
        yield listener


def test_a_reader_on_this_host_gets_the_token_and_is_watched(peer_state: PeerState, listener: socket.socket) -> None:
    assert request_watch(peer_state) is True
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(64).hex() == TOKEN
    assert select.select([peer_state.pidfd], [], [], 0)[0] == []
    assert peer_state.is_reader_dead is False


def test_a_reader_on_another_host_is_not_watched(peer_state: PeerState) -> None:
    assert request_watch(peer_state) is True
    assert (peer_state.watch_socket, peer_state.pidfd) == (None, -1)


@pytest.mark.parametrize("address", ["", f"baton-{'0' * 32}:{TOKEN}"])
def test_attaching_to_an_unreachable_watch_address_on_this_host_is_refused(peer_state: PeerState, address: str) -> None:
    """UCX could copy from process to process here, and such a copy does not end when the reader or the writer dies."""
    peer_state.endpoint = msgspec.structs.replace(peer_state.endpoint, watch_address=address, host=host_id())
    with pytest.raises(ConnectionError, match="another network namespace"):
        request_watch(peer_state)
    peer_state.endpoint = msgspec.structs.replace(peer_state.endpoint, host="elsewhere")
    assert request_watch(peer_state) is True


def test_a_rejected_watch_connection_is_not_mistaken_for_another_host(
    peer_state: PeerState, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader may close the connection before the writer reads the reader's credentials."""
    plain = nixl_handshake.peer_pidfd

    def late(watch_socket: socket.socket) -> int:
        listener.accept()[0].close()
        return plain(watch_socket)

    monkeypatch.setattr(nixl_handshake, "peer_pidfd", late)
    with pytest.raises(ConnectionError, match="another token or user"):
        request_watch(peer_state)
    assert (peer_state.watch_socket, peer_state.pidfd) == (None, -1)


def test_attaching_waits_while_the_backlog_is_full(peer_state: PeerState, name: str, listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(f"\0{name}")
        assert request_watch(peer_state) is False
        listener.accept()[0].close()
        assert request_watch(peer_state) is True
    assert peer_state.watch_socket is not None


@pytest.fixture
def writer() -> Iterator[NixlWriter]:
    """A writer attached to a reader in this process. Page ``i`` of its pool is filled with ``i + 1``."""
    stores = [MemfdStore(4), MemfdStore(4)]
    for page in range(4):
        stores[0].fill(page, page + 1)
    writer, reader = NixlWriter(stores[0]), NixlReader(stores[1])
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), 4, "nixl", reader.offer(PREFILL, 1))
    writer.attach(DECODE, connect)
    assert not until(lambda: reader.poll(time.monotonic()) or writer.poll())[0].problem
    yield writer
    writer.close()
    reader.close()
    assert [stores[1].read(page)[0] for page in (3, 2)] == [1, 2]
    for store in stores:
        store.close()


def write_all(writer: NixlWriter, *writes: list[tuple[int, int]]) -> None:
    done: list[int] = []
    with writer._agent.lock:  # otherwise the writer's thread begins a write if it calls NIXL at that moment
        tickets = [writer.write(DECODE, pages) for pages in writes]
    until(lambda: done.extend(writer.done()) or sorted(done) == tickets)


@pytest.fixture
def beginners(writer: NixlWriter, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that begin writes, in order."""
    found: list[str] = []
    transfer = writer._transfer
    monkeypatch.setattr(
        writer, "_transfer", lambda write: found.append(threading.current_thread().name) or transfer(write)
    )
    return found


def test_the_calling_thread_begins_writes_until_its_budget_is_spent(
    writer: NixlWriter, beginners: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small write costs less than waking a thread. The budget limits how long one turn may be blocked."""
    page_s = LAYOUT.page_bytes * writer._peers[DECODE].s_per_byte
    monkeypatch.setattr(nixl_writer, "HOLD_S", 2.5 * page_s)
    assert writer.done() == []  # the next turn
    here = threading.current_thread().name
    write_all(writer, *([(page, 3 - page)] for page in range(3)))
    assert beginners == [here, here, "nixl-send"]
    write_all(writer, [(0, 3), (1, 2)])
    write_all(writer, [(0, 3), (1, 2), (2, 1)])
    assert beginners[3:] == [here, "nixl-send"]
    until(lambda: writer.poll() == [] and not writer._spent)  # the write's handle is released
    assert writer.counters()["bytes_by_nixl"] == 8 * LAYOUT.page_bytes


def test_the_cost_of_a_write_is_measured_on_the_last_large_write(
    writer: NixlWriter, beginners: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_writer, "MIN_MEASURED_BYTES", 2 * LAYOUT.page_bytes)
    monkeypatch.setattr(nixl_writer, "HOLD_S", LAYOUT.page_bytes)  # too little for two pages at 1 s a byte
    peer_state = writer._peers[DECODE]
    peer_state.s_per_byte = guessed = 1e-9
    write_all(writer, [(0, 3)])
    assert peer_state.s_per_byte == guessed, "a small write changed the measured cost"
    peer_state.s_per_byte = 1.0
    write_all(writer, [(0, 3), (1, 2)])
    assert 0 < peer_state.s_per_byte < 0.4
    write_all(writer, [(0, 3), (1, 2)])
    assert beginners == [threading.current_thread().name, "nixl-send", threading.current_thread().name]


def test_a_small_write_that_fails_is_not_reported_as_ended(writer: NixlWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL may already have begun part of it."""
    write_all(writer, [(0, 3), (1, 2)])
    jobs: list[Any] = []
    with monkeypatch.context() as patch, writer._agent.lock:
        patch.setattr(writer, "_jobs", SimpleNamespace(put=jobs.append))
        patch.setattr(writer, "_transfer", lambda handle: "ERR")
        writer.write(DECODE, [(0, 3)])
    ((what, write),) = jobs
    assert (what, write.is_failed) == ("watch", True)
    writer._jobs.put(jobs[0])
    (news,) = writer.poll()
    assert news.problem == "the nixl connection to decode node decode-0 broke: a transfer ended in an error"
    assert (writer.done(), writer.detach(DECODE)) == ([], False)
    assert writer.counters()["stuck_writes"] == 1


def test_a_failed_write_of_a_detached_pair_is_reported_as_ended(peer_state: PeerState) -> None:
    """Without the report, the transfer would hold its source pages forever."""
    store = MemfdStore(2)
    writer = NixlWriter(store)
    writer._peers[peer_state.peer] = peer_state
    peer_state.num_open = 1  # one write is in progress
    ticket = writer.write(peer_state.peer, [(0, 0)])  # cannot begin: the peer's pages are unknown
    until(writer.poll)  # the connection breaks
    assert writer.done() == []
    assert writer.detach(peer_state.peer) is False
    assert writer.done() == [ticket]
    peer_state.num_open = 0
    assert writer.detach(peer_state.peer) is True
    writer.close()
    store.close()


# ---- invalidation -----------------------------------------------------------------------------------------------


@pytest.fixture
def reader() -> Iterator[NixlReader]:
    store = MemfdStore(4)
    reader = NixlReader(store)
    yield reader
    reader.close()
    store.close()


def offer(reader: NixlReader, peer: str, epoch: int) -> tuple[str, int]:
    """Agent of the offer, and the epoch up to which earlier writes are void."""
    endpoint = msgspec.json.decode(reader.offer(peer, epoch), type=Endpoint)
    return endpoint.agent, endpoint.voided


@pytest.mark.parametrize("change", [{"agent": "bmV3"}, {"pool_at": 1}, {"voided": 9}, {"seal": ""}, {"seal": "é"}, {}])
def test_an_endpoint_not_sealed_with_our_key_is_refused_before_nixl_reads_it(
    reader: NixlReader, change: dict[str, Any]
) -> None:
    """One wrong byte in an agent's metadata can crash NIXL or make it refuse the real agent permanently."""
    said = msgspec.json.decode(reader.offer(PREFILL, 1))
    assert opened(json.dumps(said), b"") == Endpoint(**said)
    key = b"" if change else b"another"
    with pytest.raises(ValueError, match="was changed, or sealed with another --cluster-key"):
        opened(json.dumps(said | change), key)


def test_an_offer_sealed_with_another_key_neither_attaches_nor_voids_writes(peer_state: PeerState) -> None:
    stores = MemfdStore(2), MemfdStore(2)
    writer, reader = NixlWriter(stores[0], key=b"ours"), NixlReader(stores[1], key=b"theirs")
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), 2, "nixl", reader.offer(PREFILL, 1))
    with pytest.raises(AttachError, match=r"the endpoint offered by decode-0 .* sealed with another --cluster-key"):
        writer.attach(DECODE, connect)
    writer._leaving[DECODE] = peer_state
    for key, is_voided in ((b"theirs", False), (b"ours", True)):
        writer.voided(DECODE, sealed(Endpoint("", 0, 0, "", voided=1), key))
        assert peer_state.is_voided is is_voided
    del writer._leaving[DECODE]
    writer.close()
    reader.close()
    for store in stores:
        store.close()


def test_an_agent_is_kept_until_attaching_writers_have_finished(reader: NixlReader) -> None:
    """Existing offers keep naming the old agent; new offers void the old epochs once that agent is released."""
    old = offer(reader, "p1", 1)
    assert reader.chosen("p1", 1, "nixl")
    assert offer(reader, "p2", 2) == old
    reader.reclaim("p1", 1)
    until(lambda: reader._old)
    time.sleep(0.1)
    assert reader.poll(0.0) == []
    new, voided = offer(reader, "p3", 3)
    assert (new != old[0], voided) == (True, 0)
    assert reader.chosen("p2", 2, "nixl")
    fenced = until(lambda: reader.poll(0.0))
    assert [(news.peer, news.epoch, news.is_dead) for news in fenced] == [("p1", 1, False), ("p2", 2, False)]
    assert offer(reader, "p1", 4) == (new, 2)
    assert reader.counters()["nixl_invalidations"] == 1


def test_no_agent_is_invalidated_while_a_process_on_this_host_is_watched(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process could have access to the pool without an agent."""
    for peer, epoch in (("far", 1), ("near", 2)):
        offer(reader, peer, epoch)
        assert reader.chosen(peer, epoch, "nixl")
    monkeypatch.setattr(reader._watch, "watched", lambda: {("near", 2)})
    reader.reclaim("far", 1)
    time.sleep(0.2)
    assert reader._old is None
    monkeypatch.setattr(reader._watch, "watched", lambda: {("near", 1)})
    reader.reclaim("far", 1)
    assert len(until(lambda: reader.poll(0.0))) == 2


def test_an_agent_that_nixl_does_not_release_is_no_fence(reader: NixlReader) -> None:
    offer(reader, "far", 1)
    assert reader.chosen("far", 1, "nixl")
    kept = reader._agent.nixl
    reader.reclaim("far", 1)
    until(lambda: reader._agent.nixl is not kept and reader._old is None)
    time.sleep(0.1)
    assert reader.poll(0.0) == []
    assert offer(reader, "far", 2)[1] == 0
    assert reader.chosen("far", 2, "nixl")
    reader.reclaim("far", 2)
    time.sleep(0.1)
    assert (reader.poll(0.0), reader._old) == ([], None), "a second invalidation began"


def test_repeated_failures_of_a_pair_do_not_invalidate_each_time(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each invalidation breaks every other pair too."""
    monkeypatch.setattr(nixl_reader, "RENEWAL_S", 600.0)
    for epoch in (1, 2):
        offer(reader, "far", epoch)
        assert reader.chosen("far", epoch, "nixl")
        reader.reclaim("far", epoch)
        if epoch == 1:
            assert until(lambda: reader.poll(0.0))
    time.sleep(0.1)
    assert (reader.poll(0.0), reader._old) == ([], None)
    monkeypatch.setattr(nixl_reader, "RENEWAL_S", 0.0)
    assert [news.epoch for news in until(lambda: reader.poll(0.0))] == [2]


def test_pages_that_were_never_granted_cause_no_invalidation(reader: NixlReader) -> None:
    offer(reader, "far", 1)
    reader.reclaim("far", 2)
    reader.reclaim("near", 1)
    time.sleep(0.1)
    assert reader._old is None


def test_a_reader_goes_on_after_an_error_of_nixl(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []
    agent = reader._agent

    def failing() -> None:
        calls.append(True)
        raise RuntimeError("the device is away")

    with monkeypatch.context() as patch:
        patch.setattr(agent.nixl, "get_new_notifs", failing)
        offer(reader, "far", 1)  # until it is chosen, the thread has something to do
        until(lambda: len(calls) > 3)
    assert reader._thread.is_alive()
    assert [record.message for record in caplog.records] == [
        "nixl reports an error, and is asked again: the device is away"
    ]
