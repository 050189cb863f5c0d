"""Experts of models of the library, multiplied by Baton's kernels.

The library's decorator ``use_experts_implementation`` notes at each class of experts how its weights lie; its own fast
implementations rely on these notes, as the ones here do.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from common.config.shared import WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import LANES, load_kernels
from common.engine.models.feed_forward import ExpertLoop, Mlp
from common.engine.models.layers import Operations, TorchOperations
from common.engine.models.linear import Linear
from common.engine.models.routing import Routing

#: Notes of the experts that are replaced: gate and up in one matrix, one below the other, and no biases.
_NOTES = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


def can_pack(module: nn.Module) -> bool:
    """Whether a module is experts with the activation and the weights of ``ExpertLoop``."""
    gate = getattr(type(module), "_apply_gate", None)
    return (
        all(getattr(module, name, None) is value for name, value in _NOTES.items())
        and getattr(gate, "__name__", "") == "_default_apply_gate"
        and isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
        and {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
    )


class PackedExperts(nn.Module):
    """Experts in the form in which this machine multiplies fastest; only those that got tokens are read.

    Args:
        experts: of the library, for which ``can_pack`` holds.
    """

    def __init__(self, experts: Any, dtype: WeightDtype, memory: HugePages) -> None:
        super().__init__()
        gate_up, down = experts.gate_up_proj.data, experts.down_proj.data
        pairs = zip(gate_up, down, strict=True)
        self._loop = ExpertLoop([Mlp(Linear(first), Linear(second)) for first, second in pairs])
        self._loop.pack(dtype, memory)
        experts.gate_up_proj = experts.down_proj = None  # their memory is free even if something holds the module
        kernels = None if down.shape[-1] % LANES else load_kernels()
        self._operations: Operations = kernels or TorchOperations()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = Routing(top_k_index.long(), top_k_weights.to(torch.float32))
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        return self._loop(x, routing, self._operations).view(hidden_states.shape)
