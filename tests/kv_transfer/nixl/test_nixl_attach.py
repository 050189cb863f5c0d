"""Several concurrent NIXL attachments. Each attachment probes its route in a separate memory area."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
from support.kv.kv_fakes import LAYOUT, MemfdStore
from support.waiting import until

from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.nixl import reader as nixl_reader
from kv_transfer.transports.nixl import writer as nixl_writer
from kv_transfer.transports.nixl.agent import NUM_PROBE_AREAS
from kv_transfer.transports.nixl.reader import NixlReader
from kv_transfer.transports.nixl.writer import NixlWriter

ROUNDS = 10
PATIENCE_S = 120.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_reader(stack: ExitStack) -> NixlReader:
    reader = NixlReader(MemfdStore(4))
    stack.callback(reader.close)
    return reader


def open_writer(stack: ExitStack) -> NixlWriter:
    writer = NixlWriter(MemfdStore(4))
    stack.callback(writer.close)
    return writer


def connect_to(reader: NixlReader, peer: str, epoch: int) -> Connect:
    return Connect("decode", "model", epoch, LayoutMessage.of(LAYOUT), 4, "nixl", reader.offer(peer, epoch))


def wait_for_answers(writers: list[NixlWriter], readers: list[NixlReader], num_answers: int) -> list[str]:
    """Problems of the first ``num_answers`` attachments that end; empty strings for the attachments that succeed."""
    problems: list[str] = []
    ends_at = time.monotonic() + PATIENCE_S
    while len(problems) < num_answers:
        assert time.monotonic() < ends_at, f"only {len(problems)} of {num_answers} attachments have ended"
        for reader in readers:
            reader.poll(time.monotonic())
        for writer in writers:
            problems += [attached.problem for attached in writer.poll()]
        time.sleep(0.001)
    return problems


@pytest.mark.parametrize("num_readers", [2, 4])
def test_a_writer_attaches_to_several_readers_at_once(stack: ExitStack, num_readers: int) -> None:
    readers = [open_reader(stack) for _ in range(num_readers)]
    writer = open_writer(stack)
    peers = [f"{i}" * 32 for i in range(num_readers)]
    for epoch in range(1, ROUNDS + 1):
        for peer, reader in zip(peers, readers, strict=True):
            writer.attach(peer, connect_to(reader, "p" * 32, epoch))
        assert wait_for_answers([writer], readers, num_readers) == [""] * num_readers
        for peer in peers:
            assert writer.detach(peer)


def test_several_writers_attach_to_one_reader_at_once(stack: ExitStack) -> None:
    reader = open_reader(stack)
    writers = [open_writer(stack) for _ in range(2)]
    epoch = 0
    for _ in range(ROUNDS):
        for i, writer in enumerate(writers):
            epoch += 1
            writer.attach("d" * 32, connect_to(reader, f"{i}" * 32, epoch))
        assert wait_for_answers(writers, [reader], len(writers)) == [""] * len(writers)
        for writer in writers:
            assert writer.detach("d" * 32)


def test_a_pool_that_says_it_has_too_many_pages_is_refused_before_descriptors_are_made(stack: ExitStack) -> None:
    reader, writer = open_reader(stack), open_writer(stack)
    connect = msgspec.structs.replace(connect_to(reader, "p" * 32, 1), num_pages=nixl_writer.MAX_PAGES + 1)
    with pytest.raises(AttachError, match="num_pages of decode is 16777217, and nixl takes at most 16777216"):
        writer.attach("d" * 32, connect)
    assert writer.detach("d" * 32)
    writer.attach("d" * 32, connect_to(reader, "p" * 32, 2))
    assert wait_for_answers([writer], [reader], 1) == [""]


@pytest.mark.parametrize("endpoint", ["", "10.0.0.1:1", "{}", '{"agent": 1}'])
def test_an_endpoint_that_is_not_one_of_nixl_is_refused(stack: ExitStack, endpoint: str) -> None:
    reader, writer = open_reader(stack), open_writer(stack)
    connect = msgspec.structs.replace(connect_to(reader, "p" * 32, 1), endpoint=endpoint)
    with pytest.raises(AttachError, match="the endpoint offered by decode is not one of nixl"):
        writer.attach("d" * 32, connect)


def test_an_attachment_fails_even_if_a_call_to_nixl_does_not_return(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock, which the writer's thread needs for each of its calls, stands for such a call."""
    monkeypatch.setattr(nixl_writer, "ATTACH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(nixl_writer, "OVERDUE_S", 0.1)
    reader, writer = open_reader(stack), open_writer(stack)
    with writer._agent.lock:
        writer.attach("d" * 32, connect_to(reader, "p" * 32, 1))
        (problem,) = wait_for_answers([writer], [reader], 1)
        assert problem == "nixl cannot reach decode node decode: a call to it does not return"
        assert writer.detach("d" * 32)
        assert writer.poll() == []
    monkeypatch.setattr(nixl_writer, "ATTACH_TIMEOUT_S", 60.0)
    writer.attach("d" * 32, connect_to(reader, "p" * 32, 2))
    assert wait_for_answers([writer], [reader], 1) == [""]


def test_a_failed_probe_of_a_detached_peer_gives_its_memory_back(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every reader on another host that dies would cost an area, until none is left."""
    reader, writer = open_reader(stack), open_writer(stack)
    monkeypatch.setattr(writer._agent.nixl, "transfer", lambda handle: "ERR")
    peer, free = "d" * 32, writer._agent.probe._free
    writer.attach(peer, connect_to(reader, "p" * 32, 1))
    until(lambda: reader.poll(0.0) or writer._peers[peer].num_probes)
    assert len(free) == NUM_PROBE_AREAS - 1
    assert writer.detach(peer)
    until(lambda: len(free) == NUM_PROBE_AREAS)


def test_a_reader_whose_connection_has_broken_while_it_was_idle_is_attached_anew(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL raises an error as a probe begins. Its memory is given back, and the reader's agent is loaded again."""
    reader, writer = open_reader(stack), open_writer(stack)
    peer, free, known = "d" * 32, writer._agent.probe._free, writer._handshake._known

    def raise_error(handle: object) -> str:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    with monkeypatch.context() as patch:
        patch.setattr(writer._agent.nixl, "transfer", raise_error)
        writer.attach(peer, connect_to(reader, "p" * 32, 1))
        problems = wait_for_answers([writer], [reader], 1)
        assert problems == ["nixl cannot reach decode node decode: NIXL_ERR_REMOTE_DISCONNECT"]
        assert writer.detach(peer)
        until(lambda: reader.poll(0.0))  # the reader on this host hears of the end
        assert (len(free), len(known)) == (NUM_PROBE_AREAS, 0)
    writer.attach(peer, connect_to(reader, "p" * 32, 2))
    assert wait_for_answers([writer], [reader], 1) == [""]


def test_a_pair_breaks_if_a_call_to_nixl_does_not_return_while_pages_are_to_be_written(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_writer, "STALLED_S", 0.1)
    reader, writer = open_reader(stack), open_writer(stack)
    peer = "d" * 32
    writer.attach(peer, connect_to(reader, "p" * 32, 1))
    assert wait_for_answers([writer], [reader], 1) == [""]
    monkeypatch.setattr(writer, "_hold_budget_s", 0.0)  # so that the thread begins the write
    with writer._agent.lock:
        ticket = writer.write(peer, [(0, 1)])
        (problem,) = wait_for_answers([writer], [reader], 1)
        assert problem == "the nixl connection to decode node decode broke: a call to it does not return"
        assert not writer.detach(peer), "the write may still be under way"
        assert writer.poll() == [] and writer.done() == []
    ends_at = time.monotonic() + PATIENCE_S
    while not (over := writer.done()):
        assert time.monotonic() < ends_at, "the write is never over"
        time.sleep(0.001)
    assert over == [ticket]
    assert writer.detach(peer)


def test_either_end_closes_though_a_call_to_nixl_does_not_return(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (nixl_reader, nixl_writer):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    reader, writer = open_reader(stack), open_writer(stack)
    with writer._agent.lock, reader._agent.lock:
        writer.attach("d" * 32, connect_to(reader, "p" * 32, 1))
        writer.close()
        reader.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert writer._thread.is_alive() and reader._thread.is_alive()
    for thread in (writer._thread, reader._thread):
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the thread does not end although the call has returned"
