"""Attention of models whose window layers have pages of their own: a layer attends through the table of its group."""

from collections.abc import Collection

from torch import Tensor

from common.engine.attention.protocol import AttentionBackend, Pair, RotatingAttention, StepAttention
from common.engine.batch import StepBatch


class GroupedAttention:
    """A backend over another one, with two page tables in each step.

    Args:
        backend: has all layers.
        windowed: indices of the layers with pages of their own.
    """

    def __init__(self, backend: AttentionBackend, windowed: Collection[int]) -> None:
        self._backend = backend
        self._windowed = frozenset(windowed)

    def prepare(self, batch: StepBatch) -> "GroupedStep":
        assert batch.windows is not None, "a step without the page table of window layers"
        return GroupedStep(self._backend.prepare(batch), self._backend.prepare(batch.windows), self._windowed)


class GroupedStep(RotatingAttention):
    def __init__(self, full: StepAttention, windows: StepAttention, windowed: frozenset[int]) -> None:
        self._full = full
        self._windows = windows
        self._windowed = windowed

    def _of(self, layer: int) -> StepAttention:
        return self._windows if layer in self._windowed else self._full

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._of(layer).extend(layer, q, k, v)

    @property
    def can_rotate(self) -> bool:
        return isinstance(self._full, RotatingAttention) and self._full.can_rotate

    def rotate_and_extend(self, layer: int, qkv: Tensor, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        step = self._of(layer)
        assert isinstance(step, RotatingAttention)
        return step.rotate_and_extend(layer, qkv, norms, rotary, eps)
