"""Weights of 8 or 4 bits: their meaning, how a plain weight is rounded to them, and the product with them in torch.

A format of checkpoints that stores such weights makes a ``QuantizedWeight`` of them, and has every product then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.shared import WeightDtype
from common.errors import ConfigError

#: Inputs that share a scale and a zero point with 4 bits: the first of these that divides the number of inputs.
GROUP_SIZES = (128, 64, 32)
_SOME_OUTPUTS = 8192  # rounded at once, so that a large vocabulary takes no gigabytes of float32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """``weight[o, i] == (values[o, i] - zeros[o, g]) * scales[o, g]`` for group ``g = i // group_size``.

    Attributes:
        values: ``[out, in]`` uint8, below ``2 ** bits``.
        scales: ``[out, groups]`` float32.
        zeros: ``[out, groups]`` uint8.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]


def quantize_weight(weight: Tensor, dtype: WeightDtype) -> QuantizedWeight:
    """Round ``weight`` ``[out, in]`` to the nearest: int8 with a scale for each output, int4 with one for each group.

    With 8 bits zero stands in the middle. The 16 values of 4 bits reach from the least to the largest of each group.

    Raises:
        ConfigError: int4 with a number of inputs that no group size divides.
    """
    num_in = weight.shape[1]
    if dtype == "int8":
        parts = [_around_zero(part) for part in weight.split(_SOME_OUTPUTS)]
    else:
        size = next((size for size in GROUP_SIZES if num_in % size == 0), None)
        if size is None:
            raise ConfigError(
                f"--weight-dtype int4: a matrix of this model has {num_in} inputs, which is not a multiple of "
                f"{GROUP_SIZES[-1]}; use --weight-dtype int8"
            )
        parts = [_in_groups(part, size) for part in weight.split(_SOME_OUTPUTS)]
    values, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedWeight(values, scales, zeros, bits=8 if dtype == "int8" else 4)


def _around_zero(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales.clamp_min(1e-30)).round() + 128
    return values.to(torch.uint8), scales, torch.full_like(scales, 128, dtype=torch.uint8)


def _in_groups(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.float().view(len(weight), -1, size)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scales = (high - low) / 15
    divisors = scales.clamp_min(1e-30)
    zeros = (-low / divisors).round()
    values = ((groups / divisors[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return values.to(torch.uint8).view(weight.shape), scales, zeros.to(torch.uint8)


class TorchQuantizedProduct:
    """The product with a quantized weight on a CPU for which there is no kernel.

    As in the kernel, inputs are rounded to 8 bits for each row and group, and sums within a group are exact.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        middle = 2 ** (weight.bits - 1)
        centred = (weight.values.to(torch.int16) - middle).to(torch.int8)
        self._values = [part.contiguous() for part in centred.split(weight.group_size, dim=1)]
        self._zeros = (weight.zeros.to(torch.int32) - middle).T.contiguous()
        self._scales = weight.scales.T.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.zeros(len(x), self._scales.shape[1], dtype=torch.float32)
        groups = x.float().split(self._values[0].shape[1], dim=1)
        for inputs, values, zeros, scales in zip(groups, self._values, self._zeros, self._scales, strict=True):
            largest = inputs.abs().amax(1, keepdim=True)
            rounded = (inputs * torch.where(largest > 0, 127 / largest, 0)).round().to(torch.int8)
            sums = torch._int_mm(rounded, values.T) - rounded.sum(1, keepdim=True, dtype=torch.int32) * zeros
            y += sums.float() * (largest / 127) * scales
        return (y if self._bias is None else y + self._bias).to(dtype)
