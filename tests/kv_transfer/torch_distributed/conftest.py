"""A reader and a writer of Gloo, and a peer that sends frames by hand."""

from collections.abc import Iterator

import pytest
from support.kv.kv_fakes import PREFILL, MemfdStore
from support.kv.raw_gloo_peer import RawGlooPeer, offer
from support.kv.raw_tcp_peer import KEY, NUM_PAGES

from kv_transfer.transports.torch_distributed import GroupReader, GroupWriter
from kv_transfer.transports.torch_distributed.backend import Pages


@pytest.fixture
def reader(store: MemfdStore) -> Iterator[GroupReader]:
    reader = GroupReader(store, "gloo", key=KEY)
    yield reader
    reader.close()


@pytest.fixture
def writer() -> Iterator[GroupWriter]:
    store = MemfdStore(NUM_PAGES)
    writer = GroupWriter(store, "gloo", key=KEY)
    yield writer
    writer.close()
    store.close()


@pytest.fixture
def gloo_peer(reader: GroupReader) -> Iterator[RawGlooPeer]:
    """A peer in a group under epoch 1 that may write pages 2 and 3."""
    source = MemfdStore(NUM_PAGES)
    gloo_peer = RawGlooPeer(reader)
    gloo_peer.join(offer(reader), Pages(source, "gloo"))
    reader.allow(PREFILL, 1, [2, 3])
    yield gloo_peer
    gloo_peer.group.close()
    source.close()
