"""What a model of the library transformers calls instead of the library's own attention. Imports transformers."""

import copy
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from common.engine.models.base_config import LENGTH_DEPENDENT_ROPE


class LayerCalls(Protocol):
    """Gets the calls of the attention function in one forward pass."""

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Return ``[1, N, heads, value_dim]``.

        Args:
            module: the layer's attention, whose ``layer_idx`` is the number of the layer.
            q, k, v: ``[1, heads, N, head_dim]``, keys and values with their own numbers of heads and sizes.
            mask: None, unless the class makes masks itself.
            options: the other keywords of attention functions of the library.
        """
        ...


class AttentionHook:
    """The attention function of one model, registered with the library under a name of its own.

    The library has no function for masks of this name, and then makes none. Not every class hands keywords on to the
    attention function, so that those of a step are kept here and not in a keyword.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.name = f"baton-{next(self._numbers)}"
        self._calls: LayerCalls | None = None
        AttentionInterface.register(self.name, self._attend)

    def run(self, layers: Any, tokens: Tensor, positions: Tensor, calls: LayerCalls) -> Tensor:
        """Run the library's model without its head on ``tokens`` ``[N]``; return ``[N, hidden]``, after the last norm.

        Args:
            calls: gets the calls of the attention function.
        """
        self._calls = calls
        try:
            hidden: Tensor = layers(input_ids=tokens[None], position_ids=positions[None], use_cache=False)[0]
        finally:
            self._calls = None
        return hidden[0]

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Attention as the library calls it."""
        assert self._calls is not None, "attention outside of a step"
        return self._calls(module, query, key, value, attention_mask, options), None


def freeze_rope(model: nn.Module) -> None:
    """Keep the frequencies of rotary embeddings as they are made, for positions of the original context.

    The library computes those of some kinds again in each step, from the step's greatest position: a request would
    depend on the requests beside it, and on CUDA the host would wait for the device. ``TransformersConfig`` limits the
    context so that they never change.
    """
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layer: _frozen(one) for layer, one in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = _frozen(kind)
            # The rotary embedding of a checkpoint's own code may have no configuration.
            rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            if "short_mscale" in rope:
                # Phi 3.5 MoE computes both again by its configuration, whatever ``rope_type`` is.
                module.config = copy.copy(module.config)
                module.config.rope_parameters = {**rope, "rope_type": "default"}
                module.rope_init_fn = functools.partial(_kept_rope, module, rope["short_mscale"])


def _kept_rope(module: Any, factor: float, _: object) -> tuple[Tensor, float]:
    """Return the frequencies of a rotary embedding, and what multiplies cosines and sines."""
    return module.inv_freq, factor


def _frozen(kind: str) -> str:
    return "default" if kind in LENGTH_DEPENDENT_ROPE else kind
