"""The torch backend, for any device: gathers each row's pages, then calls torch's scaled-dot-product attention.

Rows of several new tokens run one by one. Decode rows run together, padded to the longest, with the padding masked.
Layers with sinks or a soft cap, which torch's attention lacks, compute scores and softmax one after the other.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.attention.protocol import AttentionParams, LayerParams, read_kv, write_kv
from common.engine.batch import StepBatch
from common.engine.device_copies import to_device
from common.engine.kv_pool import KVPool, LayerKV


class TorchAttention:
    def __init__(self, pool: KVPool, params: LayerParams) -> None:
        self.pool = pool
        self.params = params

    def prepare(self, batch: StepBatch) -> "TorchStep":
        return TorchStep(self, batch)


class TorchStep:
    """One step of ``TorchAttention``; page tables and masks are computed once for all layers."""

    def __init__(self, backend: TorchAttention, batch: StepBatch) -> None:
        self._backend = backend
        self._batch = batch
        device = batch.positions.device
        is_decode = batch.rows.num_new == 1
        self._extends = [ExtendRow(batch, int(row)) for row in np.flatnonzero(~is_decode)]
        decodes = np.flatnonzero(is_decode)
        self._decode_tokens = to_device(batch.first_new[:-1][decodes], device)
        self._has_decodes = len(decodes) > 0
        if self._has_decodes:
            num_pages = int(batch.rows.num_pages[decodes].max())
            # Entries past a row's own pages are stale: page 0 replaces them, and the mask hides it.
            own = np.arange(num_pages)[None, :] < batch.rows.num_pages[decodes, None]
            table = np.where(own, batch.rows.page_table[decodes, :num_pages], 0)
            self._decode_table = to_device(table.astype(np.int64), device)
            places = np.arange(num_pages * batch.rows.page_size)
            # Positive from the row's last token on backwards.
            self._decode_distance = to_device(batch.lengths[decodes, None] - places[None, :], device)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._backend.pool.layer(layer)
        params = self._backend.params[layer]
        write_kv(kv, k, v, self._batch)
        out = q.new_empty(*q.shape[:2], kv.values.shape[-1])
        for row in self._extends:
            out[row.first : row.end] = row.attend(q[row.first : row.end], kv, params)
        if self._has_decodes:
            out[self._decode_tokens] = self._decode(q[self._decode_tokens], kv, params)
        return out

    def _decode(self, q: Tensor, kv: LayerKV, params: AttentionParams) -> Tensor:
        """Return ``[D, heads, value_dim]`` for D decode rows; heads that share KV become query rows of one KV head."""
        num_rows, heads, head_dim = q.shape
        is_own = self._decode_distance > 0
        # Masked numbers must be finite: 0 * NaN is NaN.
        hidden = ~is_own[:, None, :, None]
        keys, values = (part.masked_fill(hidden, 0) for part in _gather(kv, self._decode_table, q.dtype))
        grouped = q.view(num_rows, keys.shape[1], heads // keys.shape[1], head_dim)
        is_seen = is_own if params.window is None else is_own & (self._decode_distance <= params.window)
        sinks = None if params.sinks is None else params.sinks.view(1, *grouped.shape[1:3], 1)
        return _attend(grouped, keys, values, is_seen[:, None, None, :], params, sinks).flatten(1, 2)


class ExtendRow:
    def __init__(self, batch: StepBatch, row: int) -> None:
        self.first, self.end = batch.first_new[row : row + 2].tolist()
        self._length = int(batch.lengths[row])
        self._start = int(batch.rows.starts[row])
        self._table = batch.page_table[row, : int(batch.rows.num_pages[row])].long()[None]
        self._masks: dict[int | None, Tensor] = {}  # by window; most models have one or two

    def attend(self, q: Tensor, kv: LayerKV, params: AttentionParams) -> Tensor:
        """Return ``[n, heads, value_dim]`` for the row's n new tokens, whose queries are ``q``."""
        keys, values = (part[:, :, : self._length] for part in _gather(kv, self._table, q.dtype))
        queries = q.transpose(0, 1)[None]
        if self._start == 0 and params.is_plain:
            scale = params.scale
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True, scale=scale)
        else:
            # With a mask and grouped heads torch uses its slow implementation on CUDA: repeat the heads instead.
            keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
            sinks = None if params.sinks is None else params.sinks.view(1, -1, 1, 1)
            out = _attend(queries, keys, values, self._mask(params.window), params, sinks)
        return out[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """Return ``[n, length]``: which tokens each new token sees."""
        if window not in self._masks:
            tokens = torch.arange(self._length, device=self._table.device)
            distance = tokens[self._start :, None] - tokens[None, :]
            is_seen = distance >= 0
            self._masks[window] = is_seen if window is None else is_seen & (distance < window)
        return self._masks[window]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor, params: AttentionParams, sinks: Tensor | None
) -> Tensor:
    """Return ``[rows, heads, n, value_dim]``; ``is_seen`` and ``sinks`` broadcast to ``[rows, heads, n, length]``."""
    if params.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=is_seen, scale=params.scale)
    scores = q.float() @ keys.float().mT * params.scale_for(q.shape[-1])
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(q.dtype)


def _gather(kv: LayerKV, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gather a layer's keys and values by ``table`` ``[rows, pages]``: ``[rows, kv_heads, tokens, head_dim]`` each."""
    keys, values = (part.transpose(1, 2).flatten(2, 3) for part in read_kv(kv, (table,), dtype))
    return keys, values
