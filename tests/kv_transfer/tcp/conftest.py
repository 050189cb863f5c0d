"""A reader and a writer of TCP, and a peer that sends frames by hand."""

from collections.abc import Iterator

import pytest
from support.kv.kv_fakes import PREFILL, MemfdStore
from support.kv.raw_tcp_peer import KEY, NUM_PAGES, RawTcpPeer, offer

from kv_transfer.transports.tcp import TcpReader, TcpWriter


@pytest.fixture
def reader(store: MemfdStore) -> Iterator[TcpReader]:
    reader = TcpReader(store, key=KEY, num_connections=2)
    yield reader
    reader.close()


@pytest.fixture
def writer() -> Iterator[TcpWriter]:
    store = MemfdStore(NUM_PAGES)
    writer = TcpWriter(store, key=KEY)
    yield writer
    writer.close()
    store.close()


@pytest.fixture
def raw_peer(store: MemfdStore) -> Iterator[RawTcpPeer]:
    """A peer accepted under epoch 1, over one connection, that may write pages 2 and 3."""
    reader = TcpReader(store, key=KEY, num_connections=1)
    raw_peer = RawTcpPeer(reader)
    assert len(raw_peer.handshake(offer(reader))) == 32
    reader.allow(PREFILL, 1, [2, 3])
    yield raw_peer
    raw_peer.connection.close()
    reader.close()
