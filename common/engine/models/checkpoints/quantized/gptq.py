"""GPTQ (arXiv 2210.17323) in the packing of AutoGPTQ and GPTQModel.

``qweight`` ``[in / n, out]`` holds n inputs in a word, ``qzeros`` ``[groups, out / n]`` n outputs; ``scales`` are
``[groups, out]``. ``g_idx`` ``[in]`` is the group of each input, which act-order sorts by importance. The first format
stores zero points less 1, modulo the number of values; ``gptq_v2`` stores them as they are.
"""

import torch
from torch import Tensor

from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.packing import Parts, bits_of, unpack_words


def decode_gptq(parts: Parts, shape: tuple[int, ...], quantization: CheckpointQuantization) -> Tensor:
    """Return the matrix in float32."""
    num_out, num_in = shape
    values = unpack_words(parts["qweight"], num_in, dim=0)
    zeros = unpack_words(parts["qzeros"], num_out, dim=1)
    if quantization.has_zeros_less_one:
        zeros = zeros + 1 & (1 << bits_of(len(parts["qweight"]), num_in)) - 1
    scales = parts["scales"].float()
    size = -(-num_in // len(scales))
    groups = parts["g_idx"].long() if "g_idx" in parts else torch.arange(num_in) // size
    return ((values.float() - zeros.float()[groups]) * scales[groups]).T
