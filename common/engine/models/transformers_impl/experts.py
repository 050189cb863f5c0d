"""Experts of models of the library, multiplied by Baton's kernels.

The library's decorator ``use_experts_implementation`` notes at each class of experts how its weights lie; its own fast
implementations rely on these notes, as the ones here do.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from common.config.shared import WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import LANES, Groups, load_kernels
from common.engine.models.feed_forward import ExpertLoop, Mlp
from common.engine.models.layers import Operations, TorchOperations
from common.engine.models.linear import Linear
from common.engine.models.lora.adapters import AdaptedExpertLoop, ExpertMatrix, Share
from common.engine.models.routing import Routing

#: Notes of most experts: gate and up in one matrix, one below the other, and no biases.
_NOTES = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
#: Notes of those of gpt-oss: gate and up alternate, and every product has a bias.
_GPT_OSS_NOTES = {**_NOTES, "has_bias": True, "is_transposed": True, "is_concatenated": False}
_WEIGHTS = {"gate_up_proj", "down_proj"}


def can_pack(module: nn.Module) -> bool:
    """Whether a module is experts with the activation and the weights of one of the loops here."""
    weights = {name for name, _ in module.named_parameters()}
    if _has_notes(module, _GPT_OSS_NOTES):
        return weights == _WEIGHTS | {f"{name}_bias" for name in _WEIGHTS} and _clamped_gate(module) is not None
    gate = getattr(type(module), "_apply_gate", None)
    return (
        _has_notes(module, _NOTES)
        and getattr(gate, "__name__", "") == "_default_apply_gate"
        and isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
        and weights == _WEIGHTS
    )


def _has_notes(module: nn.Module, notes: dict[str, bool]) -> bool:
    # Before transformers 5.20 no experts had a norm, and there was no note of it.
    return all(getattr(module, name, False) is value for name, value in notes.items())


class PackedExperts(nn.Module):
    """Experts in the form in which this machine multiplies fastest; only those that got tokens are read.

    Args:
        experts: of the library, for which ``can_pack`` holds.
    """

    def __init__(self, experts: Any, dtype: WeightDtype, memory: HugePages) -> None:
        super().__init__()
        packed = []
        for expert in _experts_of(experts):
            expert.pack(dtype, memory)  # one at a time: some are copies
            packed.append(expert)
        inputs, outputs = (1, 2) if experts.is_transposed else (2, 1)
        hidden, width = (experts.down_proj.shape[dim] for dim in (outputs, inputs))
        #: Outputs and inputs of an expert's matrices, in the order of the library's parameters.
        shapes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
        self._shapes = {name: shapes[name] for name, _ in experts.named_parameters() if name in shapes}
        self._is_alternating = not experts.is_concatenated
        self._operations: Operations = (None if width % LANES else load_kernels()) or TorchOperations()
        self._loop = ExpertLoop(packed)
        if (gate := _clamped_gate(experts)) is not None:
            self._operations = gate
            self._loop = _BiasedExpertLoop(packed, _divided(experts.gate_up_proj_bias), experts.down_proj_bias)
        self._loop.pack(dtype, memory)
        self._step_loop = self._loop
        for name, _ in list(experts.named_parameters()):
            setattr(experts, name, None)  # their memory is free even if something holds the module

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = Routing(top_k_index.long(), top_k_weights.to(torch.float32))
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        return self._step_loop(x, routing, self._operations).view(hidden_states.shape)

    @contextlib.contextmanager
    def adapted(self, name: str, shares: Sequence[Share]) -> Iterator[None]:
        """Add for a while what adapters change.

        Args:
            name: of this module in the model.
        """
        self._step_loop = AdaptedExpertLoop(self._loop, name, shares)
        try:
            yield
        finally:
            self._step_loop = self._loop

    def parameters_of(self, name: str) -> dict[str, list[list[str]]]:
        """Return the matrices in the library's parameters, as ``Adaptable`` has them."""
        experts = range(len(self._loop.experts))
        return {
            parameter: [list(self._parts(f"{name}.{number}", parameter)) for number in experts]
            for parameter in self._shapes
        }

    def matrices_of(self, name: str) -> dict[str, ExpertMatrix]:
        """Return the matrices by their names in ``AdaptedExpertLoop``."""
        order = _divided(torch.arange(self._shapes["gate_up_proj"][0])) if self._is_alternating else None
        return {
            f"experts.{number}.{parameter.removesuffix('_proj')}": ExpertMatrix(
                self._parts(f"{name}.{number}", parameter), order if parameter == "gate_up_proj" else None
            )
            for number in range(len(self._loop.experts))
            for parameter in self._shapes
        }

    def _parts(self, expert: str, parameter: str) -> dict[str, tuple[int, int]]:
        """Return the matrices of an expert in a parameter; older releases of the library had gate and up apart."""
        outputs, inputs = self._shapes[parameter]
        if parameter == "gate_up_proj" and not self._is_alternating:
            return {f"{expert}.{part}": (outputs // 2, inputs) for part in ("gate_proj", "up_proj")}
        return {f"{expert}.{parameter}": (outputs, inputs)}


def _experts_of(experts: Any) -> Iterator[Mlp]:
    for gate_up, down in zip(experts.gate_up_proj.data, experts.down_proj.data, strict=True):
        if experts.is_transposed:
            yield Mlp(Linear(_divided(gate_up).T.contiguous()), Linear(down.T.contiguous()))
        else:
            yield Mlp(Linear(gate_up), Linear(down))


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


class _BiasedExpertLoop(ExpertLoop):
    """The products of experts with biases.

    Args:
        gate_up_bias: ``[experts, 2 * width]``, gate and then up.
        down_bias: ``[experts, hidden]``.
    """

    def __init__(self, experts: list[Mlp], gate_up_bias: Tensor, down_bias: Tensor) -> None:
        super().__init__(experts)
        self._gate_up_bias = gate_up_bias
        self._down_bias = down_bias

    def _multiply(self, x: Tensor, groups: Groups, tokens: Tensor, dtype: torch.dtype, *, is_down: bool) -> Tensor:
        y = super()._multiply(x, groups, tokens, dtype, is_down=is_down)
        counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        return y.add_((self._down_bias if is_down else self._gate_up_bias)[groups.weights.repeat_interleave(counts)])


def _divided(alternating: Tensor) -> Tensor:
    """Return the gates of ``[..., 2 * width]`` and then the ups."""
    return torch.cat([alternating[..., ::2], alternating[..., 1::2]], dim=-1)


class _ClampedGate(TorchOperations):
    """The activation of gpt-oss: both halves are limited, the gate's sigmoid is steeper, and 1 is added to up."""

    def __init__(self, alpha: float, limit: float) -> None:
        self._alpha = alpha
        self._limit = limit

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._alpha))


def _clamped_gate(experts: Any) -> _ClampedGate | None:
    """Return the activation of experts; None if theirs is another one, by what it makes of a few numbers."""
    alpha, limit = (getattr(experts, name, None) for name in ("alpha", "limit"))
    if not isinstance(alpha, int | float) or not isinstance(limit, int | float):
        return None
    gate = _ClampedGate(alpha, limit)
    sample = torch.linspace(-2 * limit, 2 * limit, 32, dtype=torch.float32, device="cpu")
    sample = torch.cartesian_prod(sample, sample).flatten()
    is_equal = torch.allclose(experts._apply_gate(sample), gate.silu_and_multiply(_divided(sample)), rtol=1e-5)
    return gate if is_equal else None
