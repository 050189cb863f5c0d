"""The flash-attn backend: the package's kernels over paged KV, where the extra ``flash-attn`` is installed (CUDA).

Decode rows use ``flash_attn_with_kvcache``, rows of several tokens ``flash_attn_varlen_func``, both with a block table
(flash-attn 2.7). The package reads pages of ``[page_size, kv_heads, head_dim]`` with any strides but the last, so that
the pool's views serve as they are. Its windows count the tokens before the query.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.cache.page_layout import PageLayout
from common.engine.attention.protocol import AttentionParams, LayerParams, write_kv
from common.engine.batch import DecodeRows, StepBatch
from common.engine.device_copies import to_device
from common.engine.kv_pool import KVPool

#: The package's pages are multiples of this.
PAGE_MULTIPLE = 256
MAX_HEAD_DIM = 256


def flash_attn_conflict(layout: PageLayout, params: LayerParams) -> str:
    """Return why flash-attn cannot serve this layout and these layers, with the fix; empty if it can."""
    if layout.page_size % PAGE_MULTIPLE:
        return f"needs pages of a multiple of {PAGE_MULTIPLE} tokens: give --page-size {PAGE_MULTIPLE}, or triton"
    if layout.has_scales:
        return f"cannot read KV pages in {layout.dtype}: give --kv-cache-dtype auto, or triton"
    if layout.is_latent or layout.value_dim != layout.head_dim:
        return "needs keys and values of one size, which this model has not: give triton"
    if layout.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 or float16, not in {layout.dtype}: give --dtype bfloat16, or triton"
    if layout.head_dim % 8 or layout.head_dim > MAX_HEAD_DIM:
        return f"needs heads of a multiple of 8, at most {MAX_HEAD_DIM}, not of {layout.head_dim}: give triton"
    if any(one.sinks is not None for one in params):
        return "has no attention sinks, which this model has: give triton"
    return ""


class FlashAttention:
    """``AttentionBackend`` on the package flash-attn.

    Args:
        attend_decode: ``flash_attn_with_kvcache``.
        attend_extend: ``flash_attn_varlen_func``.
    """

    def __init__(
        self,
        pool: KVPool,
        params: LayerParams,
        attend_decode: Callable[..., Tensor],
        attend_extend: Callable[..., Tensor],
    ) -> None:
        self.pool = pool
        self.params = params
        self.attend_decode = attend_decode
        self.attend_extend = attend_extend

    def prepare(self, batch: StepBatch) -> "FlashStep":
        return FlashStep(self, batch)

    def prepare_decode(self, rows: DecodeRows) -> "FlashDecodeStep":
        return FlashDecodeStep(self, rows)


class FlashStep:
    """One step of ``FlashAttention``; lengths and block tables are copied to the device once for all layers."""

    def __init__(self, backend: FlashAttention, batch: StepBatch) -> None:
        self._backend = backend
        self._batch = batch
        is_decode = batch.rows.num_new == 1
        self._decodes = RowGroup(batch, np.flatnonzero(is_decode)) if is_decode.any() else None
        self._extends = RowGroup(batch, np.flatnonzero(~is_decode)) if not is_decode.all() else None

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._backend.pool.layer(layer)
        params = self._backend.params[layer]
        write_kv(kv, k, v, self._batch)
        keys, values = kv.keys.transpose(1, 2), kv.values.transpose(1, 2)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decodes is not None:
            rows = self._decodes
            out[rows.tokens] = self._backend.attend_decode(
                q=q[rows.tokens][:, None],
                k_cache=keys,
                v_cache=values,
                cache_seqlens=rows.lengths,
                block_table=rows.block_table,
                **_options(params, q.shape[2]),
            )[:, 0]
        if self._extends is not None:
            rows = self._extends
            out[rows.tokens] = self._backend.attend_extend(
                q=q[rows.tokens],
                k=keys,
                v=values,
                cu_seqlens_q=rows.first_new,
                cu_seqlens_k=rows.first_key,
                max_seqlen_q=rows.max_new,
                max_seqlen_k=rows.max_length,
                block_table=rows.block_table,
                **_options(params, q.shape[2]),
            )
        return out


class FlashDecodeStep:
    """One step of ``FlashAttention`` of which the host knows only the number of its rows."""

    def __init__(self, backend: FlashAttention, rows: DecodeRows) -> None:
        self._backend = backend
        self._rows = rows
        self._lengths = (rows.positions + 1).to(torch.int32)
        self._block_table = rows.page_table[rows.slots]

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._backend.pool.layer(layer)
        write_kv(kv, k, v, self._rows)
        keys, values = (part.transpose(1, 2) for part in kv[:2])
        attended = self._backend.attend_decode(
            q=q[:, None],
            k_cache=keys,
            v_cache=values,
            cache_seqlens=self._lengths,
            block_table=self._block_table,
            **_options(self._backend.params[layer], q.shape[2]),
        )
        return attended[:, 0]


class RowGroup:
    """Arguments for some rows of a batch.

    Attributes:
        tokens: ``[n]`` int64, the rows' tokens among the packed tokens.
        lengths: ``[r]`` int32, tokens of each row after the step.
        first_new, first_key: ``[r + 1]`` int32, cumulated new tokens and cumulated lengths.
    """

    def __init__(self, batch: StepBatch, rows: NDArray[np.intp]) -> None:
        device = batch.positions.device
        num_new, lengths = batch.rows.num_new[rows], batch.lengths[rows]
        self.max_new, self.max_length = int(num_new.max()), int(lengths.max())
        tokens = [np.arange(batch.first_new[row], batch.first_new[row + 1]) for row in rows.tolist()]
        self.tokens = to_device(np.concatenate(tokens), device)
        self.lengths = to_device(lengths.astype(np.int32), device)
        self.first_new, self.first_key = (
            to_device(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), device)
            for counts in (num_new, lengths)
        )
        self.block_table = batch.page_table[to_device(rows, device)]


def _options(params: AttentionParams, head_dim: int) -> dict[str, Any]:
    """Return the keyword arguments that both functions take."""
    return {
        "softmax_scale": params.scale_for(head_dim),
        "causal": True,
        "window_size": (-1, -1) if params.window is None else (params.window - 1, 0),
        "softcap": params.soft_cap or 0.0,
    }
