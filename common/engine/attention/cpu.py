"""The CPU backend: C kernels that read pages in place.

Memory bandwidth limits decode rows and short extends: one kernel reads every key and value once, without gathering.
Arithmetic limits long extends. In bfloat16 a second kernel computes them by tiles; in other formats torch's flash
attention does, row by row. Pages of int8 are read by the first kernel, and by torch for long extends on processors
without dot products of integers.
"""

from ctypes import Array

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.cache.page_layout import PageLayout
from common.engine.attention.protocol import AttentionBackend, AttentionParams, LayerParams
from common.engine.attention.torch_sdpa import ExtendRow, TorchAttention, gathered_bytes
from common.engine.batch import StepBatch, cut_into_pieces
from common.engine.cpu.kernels import (
    DTYPES,
    LANES,
    LONG_TILE,
    MAX_DIM,
    MAX_QUERIES,
    Kernels,
    LayerCache,
    LongPieces,
    Paged,
    load_kernels,
)
from common.engine.kv_pool import PAGE_DTYPES, KVPool, LayerKV

#: New tokens from which on matrix instructions or flash attention are faster for a row; without such instructions,
#: queries of a group from which on ``long_attention`` is.
LONG_EXTEND, LONG_QUERIES = 32, 32
NEVER = 1 << 62
NO_WINDOW = 2**31 - 1
#: The fewest and the most new tokens of a long row in one unit of work for a thread.
MIN_PIECE, MAX_PIECE = 128, 1024
PIECES_PER_THREAD = 4


class CpuAttention:
    """``AttentionBackend`` on compiled kernels; ``num_heads`` counts the model's query heads."""

    def __init__(self, pool: KVPool, num_heads: int, params: LayerParams, kernels: Kernels) -> None:
        self.pool = pool
        self.params = params
        self.kernels = kernels
        layers = [pool.layer(index) for index in range(len(params))]
        #: Each layer for the kernels, found once, since views of tensors take long to make.
        self.caches = (LayerCache * len(layers))(
            *(_layer_cache(one, how, pool.layout.head_dim) for one, how in zip(layers, params, strict=True))
        )
        self.page_strides = [layer.keys.stride(0) for layer in layers]
        self.head_stride = layers[0].keys.stride(1)
        self.num_groups = num_groups(num_heads, pool.layout.num_kv_heads)
        #: Query heads that are computed together.
        self.group = num_heads // self.num_groups
        self.has_long_attention = _has_long_attention(pool.layout, kernels)
        #: New tokens from which on a row is long.
        self.long_extend = LONG_EXTEND
        if _has_int8_attention(pool.layout, kernels):
            self.long_extend = NEVER
        elif self.has_long_attention and not kernels.has_bfloat16_dot:
            self.long_extend = -(-LONG_QUERIES // self.group)

    def prepare(self, batch: StepBatch) -> "CpuStep":
        return CpuStep(self, batch)


class CpuStep:
    """One step of ``CpuAttention``; rows are cut into pieces once for all layers.

    Attributes:
        pieces: of the rows that ``paged_attention`` computes, ``[P, 4]`` int64.
        long_pieces: of the rows that ``long_attention`` computes; None if there are none.
    """

    def __init__(self, backend: CpuAttention, batch: StepBatch) -> None:
        self._backend = backend
        self.batch = batch
        is_long = batch.rows.num_new >= backend.long_extend
        longs = np.flatnonzero(is_long)
        self.pieces = cut_into_pieces(batch, np.flatnonzero(~is_long), MAX_QUERIES // backend.group)
        self.long_pieces = _long_pieces(batch, longs, backend) if backend.has_long_attention and len(longs) else None
        self._rest = [] if backend.has_long_attention else [ExtendRow(batch, int(row)) for row in longs]
        #: Whether our kernels compute all rows.
        self.is_native = not self._rest

    @property
    def caches(self) -> Array[LayerCache]:
        return self._backend.caches

    def paged(self, num_heads: int, layer: int = 0) -> Paged:
        """Return a layer for the kernels."""
        cache, backend = self._backend.caches[layer], self._backend
        table, layout = self.batch.page_table, backend.pool.layout
        return Paged(
            *(cache, table.data_ptr(), table.shape[1]),
            *(layout.page_size, backend.page_strides[layer], backend.head_stride),
            *(num_heads, layout.num_kv_heads, backend.num_groups, layout.head_dim),
            DTYPES[PAGE_DTYPES[layout.dtype]],
        )

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernels, params = self._backend.kernels, self._backend.params[layer]
        paged = self.paged(q.shape[1], layer)
        kernels.write_kv(paged, self.batch.token_pages, self.batch.token_offsets, k, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.pieces.shape[0]:
            kernels.paged_attention(paged, self.pieces, q, out)
        if self.long_pieces is not None:
            kernels.long_attention(paged, self.long_pieces, q, out)
        for row in self._rest:
            out[row.first : row.end] = row.attend(q[row.first : row.end], self._backend.pool.layer(layer), params)
        return out


def _layer_cache(kv: LayerKV, params: AttentionParams, head_dim: int) -> LayerCache:
    """Describe a layer to the kernels, which keep no reference to the sinks."""
    sinks = params.sinks
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    return LayerCache(
        *(kv.keys.data_ptr(), kv.values.data_ptr(), None if sinks is None else sinks.data_ptr()),
        *(params.scale_for(head_dim), params.soft_cap or 0.0, min(params.window or NO_WINDOW, NO_WINDOW)),
    )


def _long_pieces(batch: StepBatch, rows: NDArray[np.intp], backend: CpuAttention) -> LongPieces:
    """Cut long rows into pieces, of which each thread gets several, unless they become so short that copying counts."""
    threads, layout = torch.get_num_threads(), backend.pool.layout
    fair = int(batch.rows.num_new[rows].sum()) * layout.num_kv_heads // (PIECES_PER_THREAD * threads)
    pieces = cut_into_pieces(batch, rows, min(max(fair, MIN_PIECE), MAX_PIECE))
    length = -(-int(batch.lengths[rows].max()) // LONG_TILE) * LONG_TILE
    return LongPieces(pieces, torch.empty(threads, length * _unpacked_bytes(layout), dtype=torch.uint8))


def _unpacked_bytes(layout: PageLayout) -> int:
    """Return the bytes of a token's key and value of one head, in float32 at most, which a thread copies."""
    return 2 * layout.head_dim * 4


def _fits_vectors(layout: PageLayout) -> bool:
    return layout.head_dim % (2 * LANES) == 0


def _has_long_attention(layout: PageLayout, kernels: Kernels) -> bool:
    return layout.dtype == "bfloat16" and _fits_vectors(layout) and kernels.has_long_attention


def _has_int8_attention(layout: PageLayout, kernels: Kernels) -> bool:
    """Return whether long extends read pages of int8 in place."""
    return layout.dtype == "int8" and _fits_vectors(layout) and kernels.has_int8_dot


def copied_bytes(layout: PageLayout, num_heads: int, num_threads: int) -> int:
    """Return the bytes that ``cpu_attention`` copies for each token that a long extend reads, on all threads."""
    kernels = load_kernels()
    if kernels is not None and _has_int8_attention(layout, kernels):
        return 0
    if kernels is not None and _has_long_attention(layout, kernels):
        return num_threads * _unpacked_bytes(layout)
    return gathered_bytes(layout, num_heads)


def cpu_conflict(layout: PageLayout) -> str:
    """Return why no kernel can read this layout, with the fix; empty if one can."""
    if layout.dtype == "fp8_e4m3":
        return "cannot read KV pages in FP8: give auto or torch, or --kv-cache-dtype int8"
    if layout.is_latent or layout.value_dim != layout.head_dim:
        return "needs keys and values of one size, which this model has not: give auto or torch"
    if layout.head_dim % LANES or layout.head_dim > MAX_DIM:
        sizes = f"needs heads of a multiple of {LANES} numbers, at most {MAX_DIM}"
        return f"{sizes}, and this model has {layout.head_dim}: give auto or torch"
    return ""


def num_groups(num_heads: int, num_kv_heads: int) -> int:
    """Return how many groups of query heads the kernels compute, each with one KV head.

    The query heads of a KV head are one group, or several of one size if they are more than ``MAX_QUERIES``: each group
    reads the keys and values.
    """
    heads = num_heads // num_kv_heads
    parts = next(parts for parts in range(1, heads + 1) if heads % parts == 0 and heads // parts <= MAX_QUERIES)
    return num_kv_heads * parts


def cpu_attention(pool: KVPool, num_heads: int, params: LayerParams) -> AttentionBackend:
    """Return ``CpuAttention``; ``TorchAttention`` without a compiler."""
    kernels = load_kernels()
    return CpuAttention(pool, num_heads, params, kernels) if kernels else TorchAttention(pool, params)
