"""The interface between the model and attention backends.

A backend is built once per pool. It turns a step's batch into a ``StepAttention``, which holds what all layers of that
step share. Page size, dtype and the mixture of rows are values in the batch; they do not multiply backends.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from common.engine.attention.scaled_formats import dequantize, quantize
from common.engine.batch import DecodeRows, StepBatch
from common.engine.kv_pool import LayerKV

Pair = tuple[Tensor, Tensor]


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
            k: ``[N, kv_heads, head_dim]``.
            v: ``[N, kv_heads, value_dim]``; not read in a latent layout, where values are the first numbers of keys.
        Returns:
            ``[N, heads, value_dim]`` in q's dtype.
        """
        ...


class RotatingAttention(ABC):
    """A ``StepAttention`` that also normalises and rotates, in the launch that writes keys and values."""

    @property
    @abstractmethod
    def can_rotate(self) -> bool:
        """Whether it can with this pool's pages."""

    @abstractmethod
    def rotate_and_extend(self, layer: int, qkv: Tensor, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        """Return what ``extend`` returns after ``Operations.norm_and_rotate``, which has the same arguments."""


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


def write_kv(kv: LayerKV, k: Tensor, v: Tensor, batch: StepBatch | DecodeRows) -> None:
    """Write a step's keys and values into their pages.

    Args:
        kv: one layer's pages.
        k, v: new keys and values, ``[N, kv_heads, head_dim]`` and ``[N, kv_heads, value_dim]``.
        batch: the step, with the page and place of each of the N tokens.
    """
    places = (batch.token_pages, slice(None), batch.token_offsets)
    new_parts = ((kv.keys, kv.key_scales, k), (kv.values, kv.value_scales, v))
    for target, target_scales, new in new_parts[: 1 if kv.is_latent else 2]:
        if target_scales is None:
            target[places] = new.to(target.dtype)
        else:
            target[places], target_scales[places] = quantize(new, target.dtype)


def read_kv(kv: LayerKV, places: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values as ``dtype``, indexed by ``places`` among ``[pages, kv_heads, page_size]``."""
    if kv.key_scales is None or kv.value_scales is None:
        return kv.keys[places].to(dtype), kv.values[places].to(dtype)
    keys = dequantize(kv.keys[places], kv.key_scales[places])
    return keys.to(dtype), dequantize(kv.values[places], kv.value_scales[places]).to(dtype)
