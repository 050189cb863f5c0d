"""The reference backend: attention by its definition, one row and one head at a time, in float32. It is slow."""

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.protocol import AttentionParams, LayerParams, read_kv, write_kv
from common.engine.batch import StepBatch
from common.engine.kv_pool import KVPool, LayerKV


class ReferenceAttention:
    """Tests compare all other backends with this one."""

    def __init__(self, pool: KVPool, params: LayerParams) -> None:
        self.pool = pool
        self.params = params

    def prepare(self, batch: StepBatch) -> "ReferenceStep":
        return ReferenceStep(self, batch)


class ReferenceStep:
    def __init__(self, backend: ReferenceAttention, batch: StepBatch) -> None:
        self._backend = backend
        self._batch = batch

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self._backend.pool.layer(layer)
        params = self._backend.params[layer]
        write_kv(kv, k, v, self._batch)
        out = q.new_empty(*q.shape[:2], kv.values.shape[-1])
        group = q.shape[1] // k.shape[1]
        for row in range(self._batch.num_rows):
            first, end = self._batch.first_new[row : row + 2].tolist()
            length = int(self._batch.lengths[row])
            for head in range(q.shape[1]):
                first_seen = 0 if params.window is None else max(0, length - (end - first) - params.window + 1)
                keys, values = self._gather(kv, row, head // group, range(first_seen, length))
                sink = None if params.sinks is None else params.sinks[head].float()
                attended = _attend(q[first:end, head].float(), keys, values, params, sink)
                out[first:end, head] = attended.to(q.dtype)
        return out

    def _gather(self, kv: LayerKV, row: int, head: int, places: range) -> tuple[Tensor, Tensor]:
        """Read keys and values of one KV head, at these places of one row, through its page table.

        Both are ``[length, head_dim]`` float32.
        """
        tokens, page_size = np.array(places), kv.keys.shape[2]
        pages = self._batch.rows.page_table[row][tokens // page_size].astype(np.int64)
        return read_kv(kv, (torch.from_numpy(pages), head, torch.from_numpy(tokens % page_size)), torch.float32)


def _attend(q: Tensor, keys: Tensor, values: Tensor, params: AttentionParams, sink: Tensor | None) -> Tensor:
    """Return ``[n, value_dim]`` for the last n of the tokens of one row and one head that ``keys`` has."""
    num_new, length = len(q), len(keys)
    scores = q @ keys.T * params.scale_for(q.shape[1])
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    distance = torch.arange(length - num_new, length)[:, None] - torch.arange(length)[None, :]
    is_hidden = distance < 0
    if params.window is not None:
        is_hidden |= distance >= params.window
    scores = scores.masked_fill(is_hidden.to(q.device), float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink.expand(num_new, 1)), dim=1)
    return scores.softmax(dim=1)[:, :length] @ values
