"""Measures the tile sizes of the Triton kernels on this GPU and keeps the fastest for later nodes.

Usage: ``python -m scripts.measure_tiles [--heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 --vocab 151936]``. A
node of the same kind of GPU reads them at its start: those of attention if it has the same head size and heads per KV
head, and those of sampling.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from common.cache.page_layout import PageLayout
from common.engine.attention.protocol import AttentionParams
from common.engine.attention.triton_backend import TritonAttention
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.kv_pool import TORCH_DTYPES, KVPool
from common.engine.triton_kernels.tiles import (
    SAMPLING,
    SamplingTile,
    Tile,
    TileShape,
    candidates,
    default_tile,
    shared_bytes_of,
    store_tiles,
)
from common.sampling_params import SamplingParams

PAGE_SIZE = 16
CONTEXT = 4096
DECODE_ROWS = 32
SAMPLED_ROWS = 33


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


def sampling_ms(vocab: int) -> dict[SamplingTile, float]:
    """Return the time of drawing the tokens of a step by tile, the default first; logits are as peaked as a model's."""
    import triton

    from common.engine.triton_kernels.sampling import draw_tokens, row_inputs

    kinds = (SamplingParams(), SamplingParams(top_p=0.95), SamplingParams(top_k=20, top_p=0.95))
    params = [kinds[row % len(kinds)] for row in range(SAMPLED_ROWS)]
    logits = torch.from_numpy(np.random.default_rng(0).gumbel(0, 2, (SAMPLED_ROWS, vocab)).astype(np.float32)).cuda()
    inputs = torch.from_numpy(row_inputs(params, np.full(SAMPLED_ROWS, 0.5), vocab)).cuda()
    tiles = [  # one size changes at a time, since every tile is compiled
        SamplingTile(),
        *(SamplingTile(block=block) for block in (1024, 4096)),
        *(SamplingTile(capacity=capacity) for capacity in (2048, 8192)),
        *(SamplingTile(num_warps=num_warps) for num_warps in (4, 16)),
    ]
    return {
        tile: float(triton.testing.do_bench(partial(draw_tokens, logits, inputs, tile), warmup=20, rep=60))
        for tile in tiles
    }


def main(arguments: list[str] | None = None) -> int | str:
    """Return an exit status, or why nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=32, help="query heads of a layer (%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads of a layer (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head (%(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="of tensors (%(default)s)")
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens of the vocabulary (%(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        return "measure_tiles: torch finds no CUDA device"
    fastest = {}
    for is_decode in (True, False):
        measured = make_measured(options, is_decode=is_decode)
        group = options.heads // options.kv_heads
        shape = TileShape(is_decode, TORCH_DTYPES[options.dtype], options.head_dim, group)
        shared_bytes = shared_bytes_of(measured.pool.device)
        times = {tile: measured.run_ms(shape, tile) for tile in candidates(shape, shared_bytes)}
        fastest[shape.name] = tile = min(times, key=times.__getitem__)
        default_ms = times[default_tile(shape, shared_bytes)]
        print(f"{shape.name}: {tile}, {times[tile]:.3f} ms; the default needs {default_ms:.3f} ms")
        measured.pool.close()
    of_sampling = sampling_ms(options.vocab)
    best = min(of_sampling, key=of_sampling.__getitem__)
    print(f"{SAMPLING}: {best}, {of_sampling[best]:.3f} ms; the default needs {of_sampling[SamplingTile()]:.3f} ms")
    print(f"stored in {store_tiles(torch.cuda.get_device_name(), {**fastest, SAMPLING: best})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
