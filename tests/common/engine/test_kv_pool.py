"""The KV pool: on the CPU one memfd with contiguous pages; on CUDA a memfd receives pages."""

import errno
import mmap
import os

import pytest
import torch
from support.engine.devices import DEVICES

from common.cache.page_layout import PageLayout
from common.engine.kv_pool import KVPool

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, head_dim=4, page_size=8, dtype="float32")


@pytest.mark.parametrize("device", DEVICES)
def test_the_descriptor_holds_exactly_the_pool(device: str) -> None:
    pool = KVPool(LAYOUT, 5, device)
    assert LAYOUT.page_bytes == 3 * 2 * 2 * 8 * 4 * 4
    assert os.fstat(pool.fd).st_size == len(pool.memory) == 5 * LAYOUT.page_bytes
    pool.close()


def test_every_element_lies_at_the_offset_of_the_layout() -> None:
    pool = KVPool(LAYOUT, 5)
    keys, values, _, _ = pool.layer(2)
    assert keys.shape == values.shape == (5, 2, 8, 4)
    keys[3, 1, 6, 2] = 1.5
    values[4, 0, 7, 3] = 2.5
    whole = torch.frombuffer(pool.memory, dtype=torch.float32)
    inside = (6 * 4 + 2) * 4
    assert whole[(LAYOUT.offset(3, layer=2, head=1) + inside) // 4] == 1.5
    inside = (7 * 4 + 3) * 4
    assert whole[(LAYOUT.offset(4, layer=2, value=True) + inside) // 4] == 2.5
    assert whole.count_nonzero() == 2
    pool.close()


def test_another_mapping_of_the_descriptor_writes_directly_into_the_pool() -> None:
    pool = KVPool(LAYOUT, 2)
    with mmap.mmap(pool.fd, 2 * LAYOUT.page_bytes) as other:
        other[LAYOUT.page_bytes : LAYOUT.page_bytes + 4] = b"\0\0\x80\x3f"
    pool.landed([1])
    assert pool.layer(0).keys[1, 0, 0, 0] == 1.0
    pool.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_page_exported_into_another_pool_is_the_same_page(device: str, dtype: str) -> None:
    layout = PageLayout(2, 2, 4, 8, dtype)
    source, target = KVPool(layout, 3, device), KVPool(layout, 4, device)
    source.pages.random_()
    if device != "cpu":
        torch.cuda.synchronize()  # as at the end of a step
    with memoryview(target.memory) as memory:
        with memory[3 * layout.page_bytes : 4 * layout.page_bytes] as place:
            source.export_page(1, place)
    target.landed([3])
    assert torch.equal(target.pages[3], source.pages[1])
    assert target.pages[:3].count_nonzero() == 0
    source.close()
    target.close()


def test_populate_allocates_all_memory_and_keeps_the_content() -> None:
    pool = KVPool(LAYOUT, 5)
    pool.pages[4].fill_(2)
    assert os.fstat(pool.fd).st_blocks * 512 < 5 * LAYOUT.page_bytes
    if not (taken := pool.populate()):
        pytest.skip("no kernel support for populating memory")
    assert taken == 5 * LAYOUT.page_bytes <= os.fstat(pool.fd).st_blocks * 512
    assert pool.pages[:4].count_nonzero() == 0 and (pool.pages[4] == 2).all()
    pool.close()


def test_populate_starts_with_the_first_page_and_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PageLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32")  # 1 KiB per page
    monkeypatch.setattr("common.engine.kv_pool._POPULATE_AT_ONCE", 64 << 10)
    pool = KVPool(layout, 1024)
    assert pool.populate(0.0) == 0
    instants = iter([0.0, 0.0, 1.0, 2.0])  # at the start, then before each piece
    monkeypatch.setattr("common.engine.kv_pool.time.monotonic", lambda: next(instants))
    assert pool.populate(2.0) in (0, 128 << 10)  # 0: no kernel support
    assert os.fstat(pool.fd).st_blocks * 512 in (0, 128 << 10)
    pool.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EFAULT])
def test_populate_does_nothing_without_kernel_support_and_raises_without_memory(number: int) -> None:
    class Memory(bytearray):
        def madvise(self, *asked: int) -> None:
            raise OSError(number, os.strerror(number))

    pool = KVPool(LAYOUT, 5)
    memory, pool.memory = pool.memory, Memory(5 * LAYOUT.page_bytes)
    if number == errno.EINVAL:
        assert not pool.populate()
    else:
        with pytest.raises(MemoryError, match=r"the machine has no 7680 bytes for KV pages"):
            pool.populate()
    pool.memory = memory
    pool.close()


def test_close_releases_the_descriptor_and_is_idempotent() -> None:
    pool = KVPool(LAYOUT, 2)
    view = pool.layer(0).keys
    fd = pool.fd
    pool.close()
    pool.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert view.count_nonzero() == 0  # a view handed out earlier stays readable


def test_a_pool_larger_than_memory_costs_nothing_until_it_is_written() -> None:
    """The pool is a sparse file of 64 GiB, so offsets exceed 32 bits."""
    layout = PageLayout(32, 8, 128, 16, "bfloat16")
    num_pages = (64 << 30) // layout.page_bytes
    pool = KVPool(layout, num_pages)
    keys = pool.layer(31).keys
    keys[num_pages - 1, 7, 15, 127] = 3.0
    offset = layout.offset(num_pages - 1, layer=31, head=7) + layout.head_bytes(128) - 2
    assert offset > 1 << 35
    assert pool.memory[offset : offset + 2] == b"\x40\x40"
    assert os.fstat(pool.fd).st_blocks * 512 < 64 << 20
    pool.close()
