"""The reference backend: attention by its definition, one row and one head at a time, in float32. It is slow."""

import torch
from torch import Tensor

from common.engine.attention.protocol import write_kv
from common.engine.batch import StepBatch
from common.engine.kv_pool import KVPool


class ReferenceAttention:
    """Tests compare all other backends with this one."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def prepare(self, batch: StepBatch) -> "ReferenceStep":
        return ReferenceStep(self._pool, batch)


class ReferenceStep:
    def __init__(self, pool: KVPool, batch: StepBatch) -> None:
        self._pool = pool
        self._batch = batch

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._pool.layer(layer)
        write_kv((keys, values), k, v, self._batch)
        out = torch.empty_like(q)
        group = q.shape[1] // k.shape[1]
        for row in range(self._batch.num_rows):
            first, end = self._batch.first_new[row : row + 2].tolist()
            start, length = int(self._batch.rows.starts[row]), int(self._batch.lengths[row])
            for head in range(q.shape[1]):
                row_keys = self._gather(keys, row, head // group, length)
                row_values = self._gather(values, row, head // group, length)
                scores = q[first:end, head].float() @ row_keys.T * q.shape[2] ** -0.5
                visible = torch.arange(length)[None, :] <= torch.arange(start, length)[:, None]
                scores = scores.masked_fill(~visible.to(q.device), float("-inf"))
                out[first:end, head] = (scores.softmax(dim=-1) @ row_values).to(q.dtype)
        return out

    def _gather(self, paged: Tensor, row: int, head: int, length: int) -> Tensor:
        """Read one KV head of one row token by token through its page table: ``[length, head_dim]`` float32."""
        size = paged.shape[2]
        table = self._batch.rows.page_table[row]
        return torch.stack([paged[int(table[t // size]), head, t % size] for t in range(length)]).float()
