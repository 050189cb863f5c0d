"""Put a step's new keys and values into their pages, for all rows at once."""

from torch import Tensor

from common.engine.batch import StepBatch


def write_kv(kv: tuple[Tensor, Tensor], k: Tensor, v: Tensor, batch: StepBatch) -> None:
    """``k`` and ``v`` ``[N, kv_heads, head_dim]`` into one layer's views ``[pages, kv_heads, page_size, head_dim]``."""
    for target, new in zip(kv, (k, v), strict=True):
        target[batch.token_pages, :, batch.token_offsets] = new.to(target.dtype)
