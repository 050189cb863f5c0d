"""Shared memory between processes: pages arrive, only DETACHED or death fences a writer, and nothing leaks."""

import contextlib
import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore, content
from support.kv.shm_ends import (
    KEY,
    NUM_PAGES,
    WriterProcess,
    attach,
    offer,
    open_descriptors,
    wait_for_news,
)
from support.waiting import until

from common.cache.page_allocator import Owner, PageAllocator
from common.errors import ErrorCode
from common.wire.messages import Connected, Grant, Message, Ping, PrefillDone
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.page_slices import SlicePair
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import Attached, AttachError, Fenced
from kv_transfer.transports.shm import ShmReader, ShmWriter, copy_thread
from kv_transfer.transports.shm.copy_thread import CopyThread, PeerPool
from scripts.chaos_harness.process_resources import ProcessResources

# ---- pages arrive -----------------------------------------------------------------------------------------------


def test_pages_of_another_process_arrive_unchanged(child: WriterProcess, reader: ShmReader, store: MemfdStore) -> None:
    assert child.attach(reader, offer(reader)) == ""
    assert child.ask(do="write", peer=DECODE, page=3, value=77) == 1
    assert child.ask(do="write", peer=DECODE, page=NUM_PAGES - 1, value=78) == 1
    filled = {page: set(store.read(page)) for page in range(NUM_PAGES)}
    assert filled == {**{page: {0} for page in range(NUM_PAGES)}, 3: {77}, NUM_PAGES - 1: {78}}


def test_a_whole_transfer_through_shared_memory(reader: ShmReader, store: MemfdStore, writer: ShmWriter) -> None:
    allocator = PageAllocator(NUM_PAGES)
    sender, receiver = Sender(writer, digest="model"), Receiver(reader, allocator, name="decode-0", digest="model")
    sender.on_message(DECODE, receiver.connect(PREFILL), 0.0)
    pages = allocator.alloc(3, Owner.GRANT)
    assert pages is not None
    receiver.begin(KEY, PREFILL, first=1, pages=pages, length=15)
    sender.open(KEY, DECODE)
    for index in range(4):
        assert isinstance(writer.store, MemfdStore)
        writer.store.fill(index, content(KEY, index))
    sender.finish(KEY, PrefillDone("r", 0, 15, 9), [0, 1, 2, 3])
    events, released = [], []
    ends = time.monotonic() + 60
    while not (events and released) and time.monotonic() < ends:
        select.select(writer.files(), [], [], 0.1)
        receiver.poll(0.0)
        sender.pump(0.0)
        messages, news = sender.take()
        released += news
        for _, message in messages:
            receiver.on_message(PREFILL, message, 0.0)
        messages, happened = receiver.take()
        events += happened
        for _, message in messages:
            sender.on_message(DECODE, message, 0.0)
    assert events == [Completed(KEY, PrefillDone("r", 0, 15, 9), tuple(pages))]
    assert [release.ok for release in released] == [True]
    assert [set(store.read(page)) for page in pages] == [{content(KEY, index)} for index in (1, 2, 3)]
    allocator.free(pages, Owner.GRANT)
    sender.peer_lost(DECODE)
    receiver.poll(0.0)
    assert not receiver.is_connected(PREFILL)


def test_a_page_has_its_memory_when_it_is_granted(reader: ShmReader, store: MemfdStore, writer: ShmWriter) -> None:
    sender = Sender(writer, digest="model")
    receiver = Receiver(reader, PageAllocator(NUM_PAGES), name="decode-0", digest="model")
    connect = receiver.connect(PREFILL)
    sender.on_message(DECODE, connect, 0.0)
    messages: list[Message] = []
    ends = time.monotonic() + 60
    while len(messages) < 2 and time.monotonic() < ends:
        receiver.poll(0.0)
        sender.pump(0.0)
        messages += [message for _, message in sender.take()[0]]
    assert [type(message) for message in messages] == [Ping, Connected]
    assert os.fstat(store.fd).st_blocks == 0, "the pool was touched before"
    sender.open(KEY, DECODE)
    sender.on_message(DECODE, Grant(*KEY, connect.epoch, 0, (3,)), 0.0)
    until(lambda: os.fstat(store.fd).st_blocks)
    assert set(store.read(3)) == {0}


def test_attaching_waits_for_a_busy_reader(reader: ShmReader, writer: ShmWriter) -> None:
    writer.attach(DECODE, offer(reader))
    assert writer.poll() == []
    assert writer.poll() == []
    assert select.select(writer.files(), [], [], 0)[0] == []
    assert select.select(reader.files(), [], [], 0)[0] == list(reader.files())
    reader.poll(0.0)
    assert select.select(writer.files(), [], [], 0)[0] == list(writer.files())
    assert writer.poll() == [Attached(DECODE, 1)]


def test_attaching_fails_if_no_descriptor_is_left(
    reader: ShmReader, writer: ShmWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    connect = offer(reader)
    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr("kv_transfer.transports.shm.writer.socket.socket", refuse)
        with pytest.raises(AttachError, match="cannot open a socket"):
            writer.attach(DECODE, connect)
    writer.attach(DECODE, connect)


def test_attaching_waits_while_the_backlog_is_full(store: MemfdStore, writer: ShmWriter) -> None:
    reader = ShmReader(store, DECODE)
    reader._pending._listener.listen(0)
    endpoint = offer(reader)
    crowd = []
    for _ in range(3):
        pending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            pending.connect(f"\0{reader._name}")
        crowd.append(pending)
    assert attach(reader, writer, endpoint) == ""
    for pending in crowd:
        pending.close()
    reader.close()


# ---- fences -----------------------------------------------------------------------------------------------------


def test_a_detached_writer_is_a_fence(child: WriterProcess, reader: ShmReader) -> None:
    child.attach(reader, offer(reader, epoch=4))
    child.ask(do="detach", peer=DECODE)
    assert wait_for_news(reader) == [Fenced(PREFILL, 4, "the prefill node has unmapped the pool")]


def test_a_killed_writer_is_proven_dead(child: WriterProcess, reader: ShmReader) -> None:
    child.attach(reader, offer(reader, epoch=4))
    assert reader.poll(0.0) == []
    child.kill()
    assert wait_for_news(reader) == [Fenced(PREFILL, 4, "the prefill node's process has died")]
    assert reader.poll(0.0) == []


def test_a_killed_writer_frees_the_quarantine_and_a_stopped_one_does_not(
    child: WriterProcess, reader: ShmReader
) -> None:
    allocator = PageAllocator(NUM_PAGES)
    receiver = Receiver(reader, allocator, name="decode-0", digest="model")
    connect = receiver.connect(PREFILL)
    assert child.attach(reader, connect) == ""
    receiver.on_message(PREFILL, Connected(connect.epoch, "shm"), 0.0)
    for rid in "ab":
        pages = allocator.alloc(2, Owner.GRANT)
        assert pages is not None
        receiver.begin((rid, 0), PREFILL, first=0, pages=pages, length=7)
    receiver.cancel(("a", 0))
    os.kill(child.process.pid, signal.SIGSTOP)
    receiver.peer_lost(PREFILL)  # the control connection appears to be lost too
    assert receiver.take()[1] == [
        TransferFailed(("b", 0), ErrorCode.NODE_LOST, "the connection to the prefill node was lost")
    ]
    for now in (0.0, 100.0, 1e6):
        receiver.poll(now)
        assert allocator.count(Owner.QUARANTINE) == 4
    os.kill(child.process.pid, signal.SIGCONT)  # the writer wakes up and writes
    assert child.ask(do="write", peer=DECODE, page=0, value=9) == 1
    receiver.poll(1e6)
    assert allocator.count(Owner.QUARANTINE) == 4
    child.kill()
    select.select(reader.files(), [], [], 60)
    receiver.poll(1e6)
    receiver.check()
    assert allocator.num_free == NUM_PAGES


def test_a_connection_closed_without_detached_is_no_fence(reader: ShmReader, writer: ShmWriter) -> None:
    attach(reader, writer, offer(reader))
    writer._attachments[DECODE].connection.close()
    assert wait_for_news(reader, 0.1) == []
    writer.write(DECODE, [(0, 2)])  # the pool is in fact still writable


def test_an_unknown_packet_is_no_fence(reader: ShmReader, writer: ShmWriter) -> None:
    attach(reader, writer, offer(reader))
    writer._attachments[DECODE].connection.send(b"detached!")
    assert wait_for_news(reader, 0.1) == []


def test_an_event_of_a_process_that_is_still_alive_is_no_fence(reader: ShmReader, writer: ShmWriter) -> None:
    """An event returned by epoll may belong to an earlier process whose descriptor number has been reused."""
    attach(reader, writer, offer(reader))
    (pidfd, process), *_ = [(fd, w) for fd, w in reader._writers.items() if fd == w.pidfd]
    reader._hear(pidfd, process)
    assert reader.poll(0.0) == []


def test_a_child_of_the_writer_does_not_inherit_the_pool(reader: ShmReader, writer: ShmWriter) -> None:
    def num_unforked() -> int:
        mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
        return sum("memfd:baton-test" in head and " dc" in tail for head, tail in pairwise(mappings))

    assert num_unforked() == 0
    attach(reader, writer, offer(reader))
    assert num_unforked() == 1


def test_a_pool_with_an_open_view_is_not_reported_as_detached(reader: ShmReader, writer: ShmWriter) -> None:
    attach(reader, writer, offer(reader))
    memory = writer._attachments[DECODE].pool.memory
    connection = writer._attachments[DECODE].connection
    view = memoryview(memory)
    with pytest.raises(BufferError):
        writer.detach(DECODE)
    assert reader.poll(0.0) == []
    view.release()
    memory.close()
    connection.close()


def test_a_page_beyond_the_pool_is_never_written(reader: ShmReader, writer: ShmWriter) -> None:
    attach(reader, writer, offer(reader))
    for page in (NUM_PAGES, 2**40):
        with pytest.raises(AssertionError):
            writer.write(DECODE, [(0, page)])


# ---- the copy thread ---------------------------------------------------------------------------------------------


class PreparedPool(PeerPool):
    """A pool that notes which of its pages are prepared. ``is_ready`` is set with the last of them."""

    def __init__(self, last: int) -> None:
        super().__init__(last + 1)
        self.prepared: list[int] = []
        self.is_ready = threading.Event()

    def prepare(self, page: int) -> None:
        self.prepared.append(page)
        if page == self.num_pages - 1:
            self.is_ready.set()

    def put(self, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> int:
        raise AssertionError("nothing is copied")

    def release(self) -> bool:
        return True


def test_a_peer_that_grants_many_pages_does_not_make_the_queue_of_pages_to_prepare_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_thread, "MAX_EXPECTED", 3)
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    thread, pool = CopyThread("shm", NUM_PAGES, wake), PreparedPool(9)
    thread.prepare(pool, range(10))
    assert pool.is_ready.wait(60)
    thread.close()
    os.close(wake)
    assert pool.prepared == [7, 8, 9]


class SlowStore(MemfdStore):
    """A store that copies pages out with a call, as on a device. The call waits for ``may_end`` and may fail."""

    is_mapped = False

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def export_page(self, page: int, into: memoryview) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        super().export_page(page, into)


@pytest.fixture
def slow(reader: ShmReader) -> Iterator[tuple[SlowStore, ShmWriter]]:
    """Attached writer with a write of three pages in flight, the first of which is being copied."""
    source = SlowStore(NUM_PAGES)
    writer = ShmWriter(source)
    for page in range(3):
        source.fill(page, 7)
    assert attach(reader, writer, offer(reader)) == ""
    writer.write(DECODE, [(0, 0), (1, 1), (2, 2)])
    assert source.has_begun.wait(60)
    yield source, writer
    source.may_end.set()
    writer.close()
    source.close()


def test_the_loop_runs_while_pages_are_copied_and_is_woken_when_they_are_in_place(
    slow: tuple[SlowStore, ShmWriter], store: MemfdStore
) -> None:
    source, writer = slow
    writer.done()
    assert select.select(writer.files(), [], [], 0)[0] == []
    source.may_end.set()
    assert select.select(writer.files(), [], [], 60)[0] == list(writer.files())
    assert writer.done() == [1]
    assert [set(store.read(page)) for page in range(4)] == [{7}, {7}, {7}, {0}]
    assert writer.counters() == {"bytes_by_shm": 3 * LAYOUT.page_bytes}
    assert select.select(writer.files(), [], [], 0)[0] == []


def test_detaching_waits_only_for_the_page_being_copied(
    reader: ShmReader, store: MemfdStore, slow: tuple[SlowStore, ShmWriter]
) -> None:
    source, writer = slow
    detached: list[bool] = []
    pool = writer._attachments[DECODE].pool
    detaching = threading.Thread(target=lambda: detached.append(writer.detach(DECODE)))
    detaching.start()
    until(lambda: not pool.is_open)
    detaching.join(0.1)
    assert detaching.is_alive()
    source.may_end.set()
    detaching.join()
    assert detached == [True]
    assert wait_for_news(reader)[0].epoch == 1
    for page in range(3):
        store.fill(page, 99)  # the target pages have another use by now, and so have the source pages
        source.fill(page, 13)
    assert attach(reader, writer, offer(reader, 2)) == ""
    writer.write(DECODE, [(3, 3)])  # runs after the other jobs in the thread's queue
    assert until(writer.done) == [2]
    assert [set(store.read(page)) for page in range(3)] == [{99}] * 3


def test_a_failed_copy_breaks_the_pair_with_an_error_that_names_it(
    reader: ShmReader, slow: tuple[SlowStore, ShmWriter]
) -> None:
    source, writer = slow
    source.error = RuntimeError("the device is lost")
    source.may_end.set()
    assert select.select(writer.files(), [], [], 60)[0]
    why = "writing into the shared memory of decode-0 failed: the device is lost"
    assert writer.poll() == [Attached(DECODE, 1, why)]
    assert (writer.poll(), writer.done()) == ([], [])
    source.error = None
    writer.write(DECODE, [(3, 3)])
    assert select.select(writer.files(), [], [], 60)[0]
    assert writer.done() == []
    assert writer.detach(DECODE) is True


# ---- clean-up ---------------------------------------------------------------------------------------------------


def test_every_descriptor_is_closed(store: MemfdStore) -> None:
    num_before = open_descriptors()
    source = MemfdStore(4)
    reader, writer = ShmReader(store, DECODE), ShmWriter(source)
    for epoch in range(1, 20):
        assert attach(reader, writer, offer(reader, epoch)) == ""
        writer.detach(DECODE)
        assert reader.poll(0.0) == [Fenced(PREFILL, epoch, "the prefill node has unmapped the pool")]
    attach(reader, writer, offer(reader, 20))
    writer.attach("x" * 32, offer(reader, 21, "y" * 32))
    writer.close()
    reader.close()
    source.close()
    assert open_descriptors() <= num_before
    assert reader.files() == writer.files() == ()


def test_detaching_before_being_attached_is_a_fence(reader: ShmReader, writer: ShmWriter) -> None:
    writer.attach(DECODE, offer(reader))
    writer.detach(DECODE)
    assert wait_for_news(reader) == [Fenced(PREFILL, 1, "the prefill node left before it had the pool")]


def test_killing_a_writer_leaves_nothing_behind(child: WriterProcess, reader: ShmReader) -> None:
    child.attach(reader, offer(reader))
    child.ask(do="write", peer=DECODE, page=1, value=5)
    resources = ProcessResources.of([child.process.pid])
    child.kill()
    assert not resources.left()
    sockets = Path("/proc/net/unix").read_text()
    name = reader._name
    assert f"@{name}" in sockets
    reader.close()
    assert f"@{name}" not in Path("/proc/net/unix").read_text()


def test_two_offers_and_two_writers_are_kept_apart(reader: ShmReader) -> None:
    first, second = WriterProcess(), WriterProcess()
    assert first.attach(reader, offer(reader, 1, "a" * 32)) == ""
    assert second.attach(reader, offer(reader, 2, "b" * 32)) == ""
    second.kill()
    assert wait_for_news(reader) == [Fenced("b" * 32, 2, "the prefill node's process has died")]
    assert first.ask(do="write", peer=DECODE, page=0, value=3) == 1
    first.kill()
    assert wait_for_news(reader) == [Fenced("a" * 32, 1, "the prefill node's process has died")]
    first.close()
    second.close()
