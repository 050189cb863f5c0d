"""The interface between the model and attention backends.

A backend is built once per pool. It turns a step's batch into a ``StepAttention``, which holds what all layers of that
step share. Page size, dtype and the mixture of rows are values in the batch; they do not multiply backends.
"""

from typing import Protocol

from torch import Tensor

from common.engine.batch import StepBatch


class StepAttention(Protocol):
    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write new keys and values into the pool, then compute causal attention over all tokens of each row.

        Scores are scaled by ``head_dim ** -0.5``. Query head h reads KV head ``h // (heads / kv_heads)``.

        Args:
            q: ``[N, heads, head_dim]``.
            k, v: ``[N, kv_heads, head_dim]``.
        Returns:
            ``[N, heads, head_dim]`` in q's dtype.
        """
        ...


class AttentionBackend(Protocol):
    def prepare(self, batch: StepBatch) -> StepAttention: ...


def write_kv(kv: tuple[Tensor, Tensor], k: Tensor, v: Tensor, batch: StepBatch) -> None:
    """Write a step's keys and values into their pages.

    Args:
        kv: one layer's keys and values, ``[pages, kv_heads, page_size, head_dim]`` each.
        k, v: new keys and values, ``[N, kv_heads, head_dim]`` each.
        batch: the step, with the page and place of each of the N tokens.
    """
    for target, new in zip(kv, (k, v), strict=True):
        target[batch.token_pages, :, batch.token_offsets] = new.to(target.dtype)
