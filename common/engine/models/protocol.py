"""The interface between the executor and the implementations of a model."""

from typing import Protocol

from torch import Tensor

from common.engine.attention.protocol import LayerParams, StepAttention
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.lora.adapters import LoraWeights, StepAdapters
from common.engine.models.lora.checkpoint import Adaptable, AdapterCheckpoint


class CausalModel(Protocol):
    """A decoder-only model: the native one, or that of the library transformers."""

    @property
    def config(self) -> BaseModelConfig: ...

    @property
    def attention_params(self) -> LayerParams:
        """The parameters of each layer's attention."""
        ...

    @property
    def adaptable(self) -> Adaptable:
        """What LoRA adapters may change: of the whole model, also if this is one rank's part of it."""
        ...

    def make_lora(self, adapter: AdapterCheckpoint) -> LoraWeights:
        """Pack an adapter for this model, or for this part of it, onto its device."""
        ...

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        keep: Tensor | None = None,
        *,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Run all layers on ``tokens`` ``[N]`` at ``positions`` ``[N]`` and write their KV.

        Args:
            tokens, positions: int64 on the device, of all rows of a step one after another.
            attention: writes new KV into the pool and reads cached KV from it.
            keep: ``[K]`` int64, indices of the tokens to return; None returns all.
            adapters: what LoRA adapters add for some of the tokens; None without any.
        Returns:
            ``[K, hidden]``, which only ``logits`` of the same model understands.
        """
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map hidden states ``[rows, hidden]`` to float32 logits ``[rows, vocab]``, in ``out`` if that is given."""
        ...
