"""Tensors in huge pages are ordinary tensors, whatever their sizes, and do not overlap."""

import errno
import gc
import mmap
from unittest.mock import Mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.cpu.huge_pages import HugePages, advise_huge_pages

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
sizes = st.sampled_from([0, 1, 3, 63, 64, 1000, 70_000])


@settings(max_examples=20, deadline=None)
@given(
    wanted=st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), max_size=12), mapping_bytes=st.sampled_from([0, 90_000])
)
def test_tensors_keep_what_is_written_after_their_maker_is_gone(
    wanted: list[tuple[int, torch.dtype]], mapping_bytes: int
) -> None:
    memory = HugePages(mapping_bytes)
    tensors = [memory.empty((size, 3), dtype).fill_(number) for number, (size, dtype) in enumerate(wanted)]
    del memory
    gc.collect()
    for number, (tensor, (size, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
        assert tensor.is_contiguous()
        assert torch.equal(tensor, torch.full((size, 3), number, dtype=dtype))


def test_tensors_begin_at_cache_lines_of_the_same_huge_pages() -> None:
    memory = HugePages()
    first, second = memory.empty((33,), torch.bfloat16), memory.empty((5,), torch.float32)
    assert first.data_ptr() % (2 << 20) == 0
    assert second.data_ptr() == first.data_ptr() + 128


def test_a_kernel_without_huge_pages_is_no_error() -> None:
    memory = Mock(mmap.mmap)
    memory.madvise.side_effect = OSError(errno.EINVAL, "Invalid argument")
    advise_huge_pages(memory)
    memory.madvise.assert_called_once_with(mmap.MADV_HUGEPAGE)
