"""The CPU backend: C straight over the pages for decode rows and short extends, torch's flash attention for long ones.

The C kernel reads every key and value once, where it lies, and is bound by memory when few queries share the reading.
A long extend is bound by arithmetic; there torch's kernel with its matrix instructions wins, gathering included.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.protocol import AttentionBackend
from common.engine.attention.torch_sdpa import ExtendRow, TorchAttention
from common.engine.batch import StepBatch
from common.engine.kernels import LANES, MAX_DIM, MAX_QUERIES, Kernels, Paged, load_kernels
from common.engine.kv_pool import KVPool

#: From so many new tokens on, a row is torch's.
LONG_EXTEND = 32


class CpuAttention:
    """See the file's docstring.

    Args:
        kernels: the compiled functions.
    """

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        self._pool = pool
        self._kernels = kernels

    def prepare(self, batch: StepBatch) -> "CpuStep":
        return CpuStep(self._pool, self._kernels, batch)


class CpuStep:
    """One step of ``CpuAttention``: its rows cut into pieces, once for all layers."""

    def __init__(self, pool: KVPool, kernels: Kernels, batch: StepBatch) -> None:
        self._pool = pool
        self._kernels = kernels
        self._batch = batch
        is_long = batch.rows.num_new >= LONG_EXTEND
        self._long = [ExtendRow(batch, int(row)) for row in np.flatnonzero(is_long)]
        self._short = np.flatnonzero(~is_long)
        self._pieces: Tensor | None = None

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        paged = self._paged(layer, q.shape[1])
        self._kernels.write_kv(paged, self._batch.token_pages, self._batch.token_offsets, k, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        if len(self._short):
            if self._pieces is None:
                self._pieces = pieces(self._batch, self._short, MAX_QUERIES // (q.shape[1] // k.shape[1]))
            self._kernels.paged_attention(paged, self._pieces, q, out, q.shape[2] ** -0.5)
        for row in self._long:
            out[row.first : row.end] = row.attend(q[row.first : row.end], self._pool.layer(layer))
        return out

    def _paged(self, layer: int, num_heads: int) -> Paged:
        keys, values = self._pool.layer(layer)
        table = self._batch.page_table
        return Paged(
            keys=ctypes.c_void_p(keys.data_ptr()),
            values=ctypes.c_void_p(values.data_ptr()),
            page_table=ctypes.c_void_p(table.data_ptr()),
            table_width=table.shape[1],
            page_size=keys.shape[2],
            page_stride=keys.stride(0),
            head_stride=keys.stride(1),
            heads=num_heads,
            kv_heads=keys.shape[1],
            dim=keys.shape[3],
        )


def pieces(batch: StepBatch, rows: np.ndarray[tuple[int], np.dtype[np.int64]], most: int) -> Tensor:
    """``[P, 4]`` int64: new tokens, at most ``most`` together; longest context first, to even out threads."""
    cut = [
        (row, batch.first_new[row] + first, min(most, num_new - first), batch.rows.starts[row] + first)
        for row, num_new in zip(rows.tolist(), batch.rows.num_new[rows].tolist(), strict=True)
        for first in range(0, num_new, most)
    ]
    cut.sort(key=lambda piece: -piece[3])
    return torch.tensor(np.array(cut, np.int64))


def cpu_attention(pool: KVPool, num_heads: int) -> AttentionBackend:
    """``CpuAttention``, or torch's where there is no compiler or the C kernel does not take heads of this shape."""
    geometry = pool.geometry
    is_taken = geometry.head_dim % LANES == 0 and geometry.head_dim <= MAX_DIM
    kernels = load_kernels() if is_taken and num_heads // geometry.num_kv_heads <= MAX_QUERIES else None
    return CpuAttention(pool, kernels) if kernels else TorchAttention(pool)
