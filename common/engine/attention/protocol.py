"""What the model asks of attention, and what a backend is.

A backend is made once per pool; it turns a step's batch into a ``StepAttention``, which holds whatever it has worked
out for all layers of that step. Features (page size, dtype, mixture of rows) are values in the batch, never other
backends.
"""

from typing import Protocol

from torch import Tensor

from common.engine.batch import StepBatch


class StepAttention(Protocol):
    """Attention of one step."""

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new keys and values into the pool, then attend causally over all of each row's tokens.

        Args:
            layer: index of the layer.
            q: ``[N, heads, head_dim]``.
            k, v: ``[N, kv_heads, head_dim]``; query head h reads KV head ``h // (heads / kv_heads)``.
        Returns:
            ``[N, heads, head_dim]`` in q's dtype, scaled by ``head_dim ** -0.5``.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute attention over one pool."""

    def prepare(self, batch: StepBatch) -> StepAttention: ...


def write_kv(kv: tuple[Tensor, Tensor], k: Tensor, v: Tensor, batch: StepBatch) -> None:
    """``k`` and ``v`` ``[N, kv_heads, head_dim]`` into one layer's views ``[pages, kv_heads, page_size, head_dim]``."""
    for target, new in zip(kv, (k, v), strict=True):
        target[batch.token_pages, :, batch.token_offsets] = new.to(target.dtype)
