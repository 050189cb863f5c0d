"""Measures the tile sizes of the Triton attention kernels on this GPU and keeps the fastest for later nodes.

Usage: ``python -m scripts.measure_tiles [--heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16]``. A node of the same
kind of GPU, with the same head size and heads per KV head, reads them at its start.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import torch

from common.cache.page_layout import PageLayout
from common.engine.attention.protocol import AttentionParams
from common.engine.attention.triton_backend import TritonAttention
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.kv_pool import TORCH_DTYPES, KVPool
from common.engine.triton_kernels.tiles import Tile, TileShape, candidates, default_tile, store_tiles

PAGE_SIZE = 16
CONTEXT = 4096
DECODE_ROWS = 32


@dataclass(frozen=True)
class Measured:
    """A step whose attention is timed: decode rows, or one prompt."""

    pool: KVPool
    num_heads: int
    batch: StepBatch
    qkv: tuple[torch.Tensor, ...]

    def run_ms(self, shape: TileShape, tile: Tile) -> float:
        """Return the time of the step's attention with a tile; infinity if the GPU lacks memory or threads for it."""
        import triton

        backend = TritonAttention(self.pool, self.num_heads, (AttentionParams(),), tiles={shape.name: tile})
        step = backend.prepare(self.batch)
        try:
            return float(triton.testing.do_bench(lambda: step.extend(0, *self.qkv), warmup=20, rep=60))
        except triton.runtime.errors.OutOfResources:
            return float("inf")


def make_measured(options: argparse.Namespace, *, is_decode: bool) -> Measured:
    heads, kv_heads, head_dim = options.heads, options.kv_heads, options.head_dim
    num_rows = DECODE_ROWS if is_decode else 1
    width = CONTEXT // PAGE_SIZE
    pool = KVPool(PageLayout(1, kv_heads, head_dim, PAGE_SIZE, options.dtype), num_rows * width, "cuda")
    pool.pages.view(TORCH_DTYPES[options.dtype]).normal_()
    table = np.random.default_rng(0).permutation(num_rows * width).astype(np.int32).reshape(num_rows, width)
    num_new = np.full(num_rows, 1 if is_decode else CONTEXT)
    batch = make_batch(RowArrays(CONTEXT - num_new, num_new, table, PAGE_SIZE), pool.device)
    qkv = torch.randn(batch.num_tokens, heads + 2 * kv_heads, head_dim).to(
        pool.pages.device, TORCH_DTYPES[options.dtype]
    )
    return Measured(pool, heads, batch, qkv.split([heads, kv_heads, kv_heads], dim=1))


def main(arguments: list[str] | None = None) -> int | str:
    """Return an exit status, or why nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        return "measure_tiles: torch finds no CUDA device"
    fastest = {}
    for is_decode in (True, False):
        measured = make_measured(options, is_decode=is_decode)
        group = options.heads // options.kv_heads
        shape = TileShape(is_decode, TORCH_DTYPES[options.dtype], options.head_dim, group)
        times = {tile: measured.run_ms(shape, tile) for tile in candidates(shape)}
        fastest[shape.name] = tile = min(times, key=times.__getitem__)
        default_ms = times[default_tile(shape)]
        print(f"{shape.name}: {tile}, {times[tile]:.3f} ms; the default needs {default_ms:.3f} ms")
        measured.pool.close()
    print(f"stored in {store_tiles(torch.cuda.get_device_name(), fastest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
