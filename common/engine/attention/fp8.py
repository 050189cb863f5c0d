"""KV pages in FP8 (E4M3): each key and each value of a token and head has a scale of its own.

A scale is a power of two, stored as its biased exponent in one byte (E8M0, as in the OCP Microscaling formats). It
depends on the numbers that it scales and on nothing else, so that a page has the same bytes however its prompt was
chunked, batched, sent or computed again. Multiplying by it is exact: every backend reads the same numbers, which
bfloat16 holds exactly too.
"""

import torch
from torch import Tensor

#: Exponent of the greatest number of E4M3, 448 = 1.75 * 2**8, and its mantissa among those of float32.
_EXPONENT, _MANTISSA = 8, 0x600000


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` ``[..., dim]`` as float8_e4m3fn, and the scales of its rows, ``[...]`` uint8.

    The scale of a row is the least power of two with which its numbers do not exceed 448.
    """
    x = x.float()
    bits = x.abs().amax(-1).view(torch.int32)
    scales = ((bits >> 23) - _EXPONENT + ((bits & 0x7FFFFF) > _MANTISSA)).clamp_(min=1)
    return (x * _power_of_two(254 - scales)).to(torch.float8_e4m3fn), scales.to(torch.uint8)


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return ``[..., dim]`` float32 from what ``quantize`` has returned."""
    return numbers.float() * _power_of_two(scales.int())


def _power_of_two(biased: Tensor) -> Tensor:
    """Return ``2 ** (biased - 127)`` ``[..., 1]`` float32 for int32 from 1 to 254."""
    return (biased << 23).view(torch.float32)[..., None]
