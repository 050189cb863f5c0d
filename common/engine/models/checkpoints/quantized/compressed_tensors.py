"""compressed-tensors: integers of 8 bits, integers of 4 or 8 bits in words, or 8-bit floats; scales as in ``spread``.

Packed integers are stored plus half of their range: ``weight_packed`` ``[out, in / n]`` along the inputs, and packed
zero points ``[out / n, groups]`` along the outputs. ``weight_g_idx`` ``[in]`` is the group of each input.
"""

import torch
from torch import Tensor

from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.packing import Parts, bits_of, spread, unpack_words


def decode_compressed(parts: Parts, shape: tuple[int, ...], quantization: CheckpointQuantization) -> Tensor:
    """Return the matrix in float32."""
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    if "weight_packed" not in parts:
        values, middle = parts["weight"].float(), 0
    else:
        packed = parts["weight_packed"]
        middle = 1 << bits_of(packed.shape[1], shape[1]) - 1
        values = unpack_words(packed, shape[1], dim=1).float() - middle
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack_words(zeros, shape[0], dim=0).float() - middle
    if "weight_g_idx" in parts and (groups := parts["weight_g_idx"].long()).amin() >= 0:  # -1 where there is no order
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    if zeros is not None:
        values = values - spread(zeros, shape, quantization.block)
    return values * spread(scales, shape, quantization.block)
