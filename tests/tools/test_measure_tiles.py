"""``scripts.measure_tiles`` needs a GPU."""

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    pytest.importorskip("triton")
    from scripts.measure_tiles import main

    assert main([]) == "measure_tiles: torch finds no CUDA device"
