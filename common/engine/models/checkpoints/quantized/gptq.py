"""GPTQ (arXiv 2210.17323) in the packing of AutoGPTQ and GPTQModel.

``qweight`` ``[in / n, out]`` holds n inputs in a word, ``qzeros`` ``[groups, out / n]`` n outputs; ``scales`` are
``[groups, out]``. ``g_idx`` ``[in]`` is the group of each input, which act-order sorts by importance. The first format
stores zero points less 1; ``gptq_v2`` stores them as they are. GPTQModel subtracts 1 from all zero points of a word as
from one number, so that a zero point of 0 borrows from the next one.

Some files differ. The zero points of a symmetric checkpoint are all in the middle, and some store the middle itself in
the first format. A ``g_idx`` of zeros alone stands in some files without act-order, whose groups are in order.
"""

import torch
from torch import Tensor

from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.packing import Parts, bits_of, unpack_words


def decode_gptq(parts: Parts, shape: tuple[int, ...], quantization: CheckpointQuantization) -> Tensor:
    """Return the matrix in float32."""
    num_out, num_in = shape
    values = unpack_words(parts["qweight"], num_in, dim=0)
    bits = bits_of(len(parts["qweight"]), num_in)
    words = parts["qzeros"]
    zeros = unpack_words(words, num_out, dim=1)
    is_middle = quantization.is_symmetric and bool((zeros == 1 << bits - 1).all())
    if quantization.has_zeros_less_one and not is_middle:
        words = words + sum(1 << shift for shift in range(0, 32, bits))  # int32, which wraps around
        zeros = unpack_words(words, num_out, dim=1)
    scales = parts["scales"].float()
    if "g_idx" in parts and parts["g_idx"].any():
        groups = parts["g_idx"].long()
    else:
        groups = torch.arange(len(scales)).repeat_interleave(num_in // len(scales))
    return ((values.float() - zeros.float()[groups]) * scales[groups]).T
