"""The torch backend, for any device: gathers each row's pages, then calls torch's scaled-dot-product attention.

Rows of several new tokens run one by one. Decode rows run together, padded to the longest, with the padding masked.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.attention.protocol import write_kv
from common.engine.batch import StepBatch
from common.engine.kv_pool import KVPool


class TorchAttention:
    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def prepare(self, batch: StepBatch) -> "TorchStep":
        return TorchStep(self._pool, batch)


class TorchStep:
    """One step of ``TorchAttention``; page tables and masks are computed once for all layers."""

    def __init__(self, pool: KVPool, batch: StepBatch) -> None:
        self._pool = pool
        self._batch = batch
        device = batch.positions.device
        is_decode = batch.rows.num_new == 1
        self._extends = [ExtendRow(batch, int(row)) for row in np.flatnonzero(~is_decode)]
        decodes = np.flatnonzero(is_decode)
        self._decode_tokens = torch.from_numpy(batch.first_new[:-1][decodes]).to(device)
        self._has_decodes = len(decodes) > 0
        if self._has_decodes:
            num_pages = int(batch.rows.num_pages[decodes].max())
            # Entries past a row's own pages are stale: page 0 replaces them, and the mask hides it.
            own = np.arange(num_pages)[None, :] < batch.rows.num_pages[decodes, None]
            table = np.where(own, batch.rows.page_table[decodes, :num_pages], 0)
            self._decode_table = torch.from_numpy(table.astype(np.int64)).to(device)
            places = np.arange(num_pages * batch.rows.page_size)
            visible = places[None, :] < batch.lengths[decodes, None]
            self._decode_visible = torch.from_numpy(visible).to(device)[:, None, None, :]

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._pool.layer(layer)
        write_kv(kv, k, v, self._batch)
        out = torch.empty_like(q)
        for row in self._extends:
            out[row.first : row.end] = row.attend(q[row.first : row.end], kv)
        if self._has_decodes:
            out[self._decode_tokens] = self._decode(q[self._decode_tokens], kv)
        return out

    def _decode(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``[D, heads, head_dim]`` for D decode rows; heads that share KV become query rows of one KV head."""
        num_rows, heads, head_dim = q.shape
        # Masked numbers must be finite: 0 * NaN is NaN.
        hidden = ~self._decode_visible.mT
        keys, values = (_gather(paged, self._decode_table).masked_fill(hidden, 0) for paged in kv)
        grouped = q.view(num_rows, keys.shape[1], heads // keys.shape[1], head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._decode_visible)
        return out.reshape(q.shape)


class ExtendRow:
    def __init__(self, batch: StepBatch, row: int) -> None:
        self.first, self.end = batch.first_new[row : row + 2].tolist()
        self._length = int(batch.lengths[row])
        start = int(batch.rows.starts[row])
        device = batch.positions.device
        self._table = batch.page_table[row, : int(batch.rows.num_pages[row])].long()[None]
        self._visible: Tensor | None = None
        if start:
            old_and_new = torch.arange(self._length, device=device)
            self._visible = old_and_new[None, :] <= old_and_new[start:, None]

    def attend(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``[n, heads, head_dim]`` for the row's n new tokens, whose queries are ``q``."""
        keys, values = (_gather(paged, self._table)[:, :, : self._length] for paged in kv)
        queries = q.transpose(0, 1)[None]
        if self._visible is None:
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            # With a mask and grouped heads torch uses its slow implementation on CUDA: repeat the heads instead.
            keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (keys, values))
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._visible)
        return out[0].transpose(0, 1)


def _gather(paged: Tensor, table: Tensor) -> Tensor:
    """Gather a layer's keys or values by ``table`` ``[rows, pages]``: ``[rows, kv_heads, tokens, head_dim]``."""
    return paged[table].transpose(1, 2).flatten(2, 3)
