"""Tensors in huge pages are ordinary tensors, whatever their size."""

import gc

import pytest
import torch

from common.engine.cpu.huge_pages import empty_in_huge_pages


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20, 1), (3, 1_000_003)])
def test_a_tensor_keeps_what_is_written_after_its_maker_is_gone(shape: tuple[int, ...]) -> None:
    written = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    tensor = empty_in_huge_pages(shape, torch.int32).copy_(written)
    gc.collect()
    assert tensor.is_contiguous()
    assert torch.equal(tensor, written)


def test_a_large_tensor_begins_at_a_huge_page() -> None:
    assert empty_in_huge_pages((1 << 20,), torch.bfloat16).data_ptr() % (2 << 20) == 0
