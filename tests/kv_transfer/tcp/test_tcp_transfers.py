"""Whole transfers over TCP with a real sender and receiver, including connections that are cut."""

import socket
import time
from typing import Any

import pytest
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore, content
from support.kv.raw_tcp_peer import NUM_PAGES
from support.waiting import until

from common.cache.page_allocator import Owner, PageAllocator
from common.errors import ErrorCode
from common.wire.messages import PrefillDone
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.receive import connections as links
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.tcp import TcpReader, TcpWriter


class Node:
    """A sender and a receiver in one process, joined by queues that deliver at once."""

    def __init__(self, reader: TcpReader, writer: TcpWriter) -> None:
        self.allocator = PageAllocator(NUM_PAGES)
        self.sender = Sender(writer, digest="model")
        self.receiver = Receiver(reader, self.allocator, name="decode-0", digest="model")
        self.events: list[Any] = []
        self.released: list[Any] = []

    def connect(self) -> None:
        self.sender.on_message(DECODE, self.receiver.connect(PREFILL), 0.0)
        until(lambda: self.turn() or self.receiver.is_connected(PREFILL))

    def turn(self) -> None:
        self.receiver.poll(time.monotonic())
        self.sender.pump(time.monotonic())
        messages, released = self.sender.take()
        self.released += released
        for _, message in messages:
            self.receiver.on_message(PREFILL, message, time.monotonic())
        replies, events = self.receiver.take()
        self.events += events
        for _, message in replies:
            self.sender.on_message(DECODE, message, time.monotonic())
        self.sender.check()
        self.receiver.check()
        self.allocator.check()


def test_a_whole_transfer_over_tcp(reader: TcpReader, writer: TcpWriter, store: MemfdStore) -> None:
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.allocator.alloc(3, Owner.GRANT)
    assert pages is not None and isinstance(writer.store, MemfdStore)
    node.receiver.begin(key, PREFILL, first=1, pages=pages, length=15)
    node.sender.open(key, DECODE)
    for index in range(4):
        writer.store.fill(index, content(key, index))
    node.sender.finish(key, PrefillDone("r", 0, 15, 9), [0, 1, 2, 3])
    until(lambda: node.turn() or (node.events and node.released))
    assert node.events == [Completed(key, PrefillDone("r", 0, 15, 9), tuple(pages))]
    assert [release.ok for release in node.released] == [True]
    assert [set(store.read(page)) for page in pages] == [{content(key, index)} for index in (1, 2, 3)]
    node.allocator.free(pages, Owner.GRANT)


def test_pages_come_back_at_once_when_the_peer_is_lost(reader: TcpReader, writer: TcpWriter) -> None:
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.allocator.alloc(2, Owner.GRANT)
    assert pages is not None
    node.receiver.begin(key, PREFILL, first=0, pages=pages, length=7)
    node.turn()
    node.receiver.peer_lost(PREFILL)
    assert node.allocator.count(Owner.QUARANTINE) == 2
    node.receiver.poll(0.0)  # without a message from the writer
    assert node.allocator.num_free == NUM_PAGES
    assert isinstance(node.receiver.take()[1][0], TransferFailed)


def cut(writer: TcpWriter) -> None:
    for peer_state in writer._peers.values():
        peer_state.connections[0].sock.shutdown(socket.SHUT_RDWR)


def test_a_cut_connection_is_restored_and_its_transfers_continue(
    reader: TcpReader, writer: TcpWriter, store: MemfdStore
) -> None:
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.allocator.alloc(3, Owner.GRANT)
    assert pages is not None and isinstance(writer.store, MemfdStore)
    for index in range(3):
        writer.store.fill(index, content(key, index))
    node.sender.open(key, DECODE)
    node.receiver.begin(key, PREFILL, first=0, pages=pages, length=11)
    node.sender.computed(key, [0])
    until(lambda: node.turn() or node.receiver.counters()["pages_received"] == 1)
    cut(writer)
    until(lambda: node.turn() or not node.receiver.is_connected(PREFILL))
    node.sender.finish(key, PrefillDone("r", 0, 11, 9), [0, 1, 2])
    until(lambda: node.turn() or (node.released and node.events))
    assert node.events == [Completed(key, PrefillDone("r", 0, 11, 9), tuple(pages))]
    assert [set(store.read(page)) for page in pages] == [{content(key, index)} for index in range(3)]
    assert node.receiver.counters()["reconnects"] == node.sender.counters()["broken_pairs"] == 1
    assert node.sender.counters()["pages_sent"] == 3


def test_a_connection_that_is_cut_repeatedly_ends_its_transfers_with_pair_and_transport_named(
    reader: TcpReader, writer: TcpWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "BACKOFF_S", 0.01)
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.allocator.alloc(2, Owner.GRANT)
    assert pages is not None
    node.sender.open(key, DECODE)
    node.receiver.begin(key, PREFILL, first=0, pages=pages, length=7)

    def turn() -> bool:
        node.turn()
        if node.receiver.is_connected(PREFILL):
            cut(writer)
        return bool(node.events)

    until(turn)
    [failed] = node.events
    assert isinstance(failed, TransferFailed)
    assert failed.code is ErrorCode.TRANSFER_FAILED
    assert failed.message.startswith("tcp from node pppppppp to decode node decode-0 broke and could not be")
    assert "in 4 tries" in failed.message
    assert node.receiver.counters()["reconnects"] == 4
    assert node.allocator.num_free == NUM_PAGES
    node.sender.peer_lost(DECODE)  # the role closes the connection
    node.turn()
    assert [release.ok for release in node.released] == [False]
    node.connect()
