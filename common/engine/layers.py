"""The pieces of a decoder that outlast a step: linear layers, and the frequencies of the rotary embedding."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.model_config import RopeConfig


class Linear:
    """``y = x @ weight.T + bias``; the weight may be repacked once for the machine it runs on.

    Attributes:
        weight: ``[out, in]``; gone after ``pack`` where the packed form took its place.
        bias: ``[out]`` or None.
    """

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self._packed: Tensor | None = None

    def pack(self, *, keep_weight: bool = False) -> None:
        """Give the weight to oneDNN in its own layout, where that is the faster one: on CPUs.

        Args:
            keep_weight: the plain weight is read elsewhere too (an embedding tied to the output).
        """
        if self.weight is None or self.weight.device.type != "cpu" or not torch._C._has_mkldnn:
            return
        if self.weight.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return
        if self.weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if not keep_weight:
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        if self._packed is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return y
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, ``[head_dim / 2]`` float32.

    ``llama3`` keeps fast pairs, slows those whose wavelength exceeds the original context by ``factor``, and blends in
    between (Llama 3.1's reference code, ``apply_scaling``).
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.type == "default":
        return frequencies
    assert rope.type == "llama3"
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / rope.factor
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * slowed + smooth * frequencies
    is_slow = wavelengths > rope.original_context / rope.low_freq_factor
    is_fast = wavelengths < rope.original_context / rope.high_freq_factor
    return torch.where(is_slow, slowed, torch.where(is_fast, frequencies, blended))


def rotations(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``[N, head_dim / 2]`` float32, for the positions of one step."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()
