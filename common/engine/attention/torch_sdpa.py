"""The torch backend, for any device: gathers each row's pages, then calls torch's scaled-dot-product attention.

Of a layer with a window, only the pages within the window are gathered.

Rows of several new tokens run one by one. Decode rows run together, padded to the longest, with the padding masked.
Layers with sinks or a soft cap, which torch's attention lacks, compute scores and softmax one after the other.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.cache.page_layout import ITEM_BYTES, PageLayout
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
        self._decodes = decodes
        self._seen_pages: dict[int | None, tuple[Tensor, Tensor]] = {}  # by window; most models have one or two

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._backend.pool.layer(layer)
        params = self._backend.params[layer]
        write_kv(kv, k, v, self._batch)
        out = q.new_empty(*q.shape[:2], kv.values.shape[-1])
        for row in self._extends:
            out[row.first : row.end] = row.attend(q[row.first : row.end], kv, params)
        if len(self._decodes):
            out[self._decode_tokens] = self._decode(q[self._decode_tokens], kv, params)
        return out

    def _decode(self, q: Tensor, kv: LayerKV, params: AttentionParams) -> Tensor:
        """Return ``[D, heads, value_dim]`` for D decode rows; heads that share KV become query rows of one KV head."""
        num_rows, heads, head_dim = q.shape
        table, distance = self._pages_seen(params.window)
        is_own = distance > 0
        # Masked numbers must be finite: 0 * NaN is NaN.
        hidden = ~is_own[:, None, :, None]
        keys, values = (part.masked_fill(hidden, 0) for part in _gather(kv, table, q.dtype))
        grouped = q.view(num_rows, keys.shape[1], heads // keys.shape[1], head_dim)
        is_seen = is_own if params.window is None else is_own & (distance <= params.window)
        sinks = None if params.sinks is None else params.sinks.view(1, *grouped.shape[1:3], 1)
        return _attend(grouped, keys, values, is_seen[:, None, None, :], params, sinks).flatten(1, 2)

    def _pages_seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Pages ``[D, pages]`` that the decode rows see, and the distance ``[D, tokens]`` of each of their tokens: 1 is
        the row's last token, and places without a token are not positive.
        """
        if window not in self._seen_pages:
            rows, lengths = self._batch.rows, self._batch.lengths[self._decodes]
            first = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // rows.page_size
            num_pages = rows.num_pages[self._decodes]
            indices = first[:, None] + np.arange((num_pages - first).max())
            # Entries past a row's own pages are stale: page 0 replaces them, and the mask hides it.
            is_own = indices < num_pages[:, None]
            last = rows.page_table.shape[1] - 1
            table = np.where(is_own, rows.page_table[self._decodes[:, None], np.minimum(indices, last)], 0)
            places = first[:, None] * rows.page_size + np.arange(indices.shape[1] * rows.page_size)
            device = self._batch.positions.device
            distance = to_device(lengths[:, None] - places, device)
            self._seen_pages[window] = to_device(table.astype(np.int64), device), distance
        return self._seen_pages[window]


def gathered_bytes(layout: PageLayout, num_heads: int) -> int:
    """Return the bytes that ``ExtendRow`` copies for each token that it reads: the KV heads, then all query heads."""
    item_bytes = ITEM_BYTES["float32" if layout.has_scales else layout.dtype]  # pages with scales: at most
    return (layout.num_kv_heads + num_heads) * (layout.head_dim + layout.value_dim) * item_bytes


class ExtendRow:
    def __init__(self, batch: StepBatch, row: int) -> None:
        self.first, self.end = batch.first_new[row : row + 2].tolist()
        self._length = int(batch.lengths[row])
        self._start = int(batch.rows.starts[row])
        self._table = batch.page_table[row, : int(batch.rows.num_pages[row])].long()[None]
        self._page_size = batch.rows.page_size
        self._masks: dict[int | None, Tensor] = {}  # by window

    def attend(self, q: Tensor, kv: LayerKV, params: AttentionParams) -> Tensor:
        """Return ``[n, heads, value_dim]`` for the row's n new tokens, whose queries are ``q``."""
        page = self._first_seen(params.window) // self._page_size
        num_tokens = self._length - page * self._page_size
        keys, values = (part[:, :, :num_tokens] for part in _gather(kv, self._table[:, page:], q.dtype))
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

    def _first_seen(self, window: int | None) -> int:
        """The first token that a new token sees."""
        return 0 if window is None else max(0, self._start - window + 1)

    def _mask(self, window: int | None) -> Tensor:
        """Return ``[n, tokens]``: which tokens each new token sees, from the first page that any of them sees."""
        if window not in self._masks:
            first = self._first_seen(window) // self._page_size * self._page_size
            tokens = torch.arange(first, self._length, device=self._table.device)
            distance = tokens[self._start - first :, None] - tokens[None, :]
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
