"""KV pages of one byte for each number, FP8 (E4M3) or int8: each key and each value of a token and head has a scale.

A scale is a power of two, stored as its biased exponent in one byte (E8M0, as in the OCP Microscaling formats). It
depends on the numbers that it scales and on nothing else, so that a page has the same bytes however its prompt was
chunked, batched, sent or computed again. Multiplying by it is exact: every backend reads the same numbers, which
bfloat16 holds exactly too.
"""

import torch
from torch import Tensor

#: Of each format, exponent and mantissa (among those of float32) of the greatest number that is not rounded beyond the
#: format's range: 448 = 1.75 * 2**8 in FP8, and in int8 the greatest below 127.5, which is rounded to 127.
_GREATEST = {torch.float8_e4m3fn: (8, 0x600000), torch.int8: (6, 0x7EFFFF)}


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``x`` ``[..., dim]`` as ``dtype``, and the scales of its rows, ``[...]`` uint8.

    The scale of a row is the least power of two with which its numbers do not exceed 448, or 127 in int8. That
    of a row with a number that is not finite is infinite in int8, which has no such numbers.
    """
    x = x.float()
    exponent, mantissa = _GREATEST[dtype]
    bits = x.abs().amax(-1).view(torch.int32)
    scales = ((bits >> 23) - exponent + ((bits & 0x7FFFFF) > mantissa)).clamp_(min=1)
    if dtype == torch.int8:
        scales.masked_fill_(bits >> 23 == 255, 255)
    scaled = x * _power_of_two(254 - scales)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales.to(torch.uint8)


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return ``[..., dim]`` float32 from what ``quantize`` has returned."""
    return numbers.float() * _power_of_two(scales.int())


def _power_of_two(biased: Tensor) -> Tensor:
    """Return ``2 ** (biased - 127)`` ``[..., 1]`` float32 for int32 from 1 to 254."""
    return (biased << 23).view(torch.float32)[..., None]
