"""The interface between the model and attention backends.

A backend is built once per pool. It turns a step's batch into a ``StepAttention``, which holds what all layers of that
step share. Page size, dtype and the mixture of rows are values in the batch; they do not multiply backends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from common.engine.batch import DecodeRows, StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """How one layer attends. A token always sees itself and never a later token.

    Attributes:
        scale: factor of the scores q . k; None means ``head_dim ** -0.5``.
        window: tokens that a token sees, itself included; None means all.
        soft_cap: after scaling, a score s becomes ``soft_cap * tanh(s / soft_cap)``; None leaves it.
        sinks: ``[heads]`` float32 on the pool's device: one more score for each query head, after the soft cap, which
            counts in the softmax and whose value is zero; None without sinks.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1
        assert self.soft_cap is None or self.soft_cap > 0

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def is_plain(self) -> bool:
        """Whether the weights are the softmax of all scaled scores."""
        return self.window is None and self.soft_cap is None and self.sinks is None


#: The parameters of each layer; an entry for every layer of the pool.
LayerParams = Sequence[AttentionParams]


class StepAttention(Protocol):
    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write new keys and values into the pool, then compute causal attention over all tokens of each row.

        ``AttentionParams`` of the layer tell how. Query head h reads KV head ``h // (heads / kv_heads)``.

        Args:
            q: ``[N, heads, head_dim]``.
            k, v: ``[N, kv_heads, head_dim]``.
        Returns:
            ``[N, heads, head_dim]`` in q's dtype.
        """
        ...


class AttentionBackend(Protocol):
    def prepare(self, batch: StepBatch) -> StepAttention: ...


@runtime_checkable
class GraphSafeAttention(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in CUDA graphs."""

    def prepare_decode(self, rows: DecodeRows) -> StepAttention:
        """Return the attention of rows of one new token each.

        This and the step's ``extend`` read nothing on the host and copy nothing to the device, and their launches
        depend on the number of rows alone.
        """
        ...


def write_kv(kv: tuple[Tensor, Tensor], k: Tensor, v: Tensor, batch: StepBatch | DecodeRows) -> None:
    """Write a step's keys and values into their pages.

    Args:
        kv: one layer's keys and values, ``[pages, kv_heads, page_size, head_dim]`` each.
        k, v: new keys and values, ``[N, kv_heads, head_dim]`` each.
        batch: the step, with the page and place of each of the N tokens.
    """
    for target, new in zip(kv, (k, v), strict=True):
        target[batch.token_pages, :, batch.token_offsets] = new.to(target.dtype)
