"""``scripts.measure_tiles`` stores the fastest tile."""

import math

import pytest
import torch

from common.engine.triton_kernels.tiles import TileShape, candidates, default_tile, fastest_tile

SHAPE = TileShape(True, torch.bfloat16, 128, 4)


def test_the_default_is_kept_unless_another_tile_is_faster() -> None:
    assert fastest_tile(SHAPE, lambda _: 1.0) == default_tile(SHAPE)
    other = candidates(SHAPE)[-1]
    assert fastest_tile(SHAPE, lambda tile: 0.5 if tile == other else math.inf) == other


def test_without_a_gpu_nothing_is_measured() -> None:
    pytest.importorskip("triton")
    from scripts.measure_tiles import main

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main([]) == "measure_tiles: torch finds no CUDA device"
