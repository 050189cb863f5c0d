"""A reader of a shared-memory pool, with writers in this process and in another one."""

from collections.abc import Iterator

import pytest
from support.kv.kv_fakes import DECODE, MemfdStore
from support.kv.shm_ends import NUM_PAGES, WriterProcess

from kv_transfer.transports.shm import ShmReader, ShmWriter


@pytest.fixture
def child() -> Iterator[WriterProcess]:
    child = WriterProcess()
    yield child
    child.close()


@pytest.fixture
def reader(store: MemfdStore) -> Iterator[ShmReader]:
    reader = ShmReader(store, DECODE)
    yield reader
    reader.close()


@pytest.fixture
def writer() -> Iterator[ShmWriter]:
    store = MemfdStore(NUM_PAGES)
    writer = ShmWriter(store)
    yield writer
    writer.close()
    store.close()
