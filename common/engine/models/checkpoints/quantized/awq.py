"""AWQ in the packing of its GEMM kernel (arXiv 2306.00978; AutoAWQ's ``WQLinear_GEMM``).

``qweight`` ``[in, out / 8]`` and ``qzeros`` ``[groups, out / 8]`` hold eight outputs in a word, not in their order;
``scales`` are ``[groups, out]``.
"""

import torch
from torch import Tensor

from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.packing import Parts, spread, unpack_words

#: The output, among the eight of a word, that stands in each run of four bits, from the lowest bits on.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def decode_awq(parts: Parts, shape: tuple[int, ...], quantization: CheckpointQuantization) -> Tensor:
    """Return the matrix in float32."""
    num_out = shape[0]
    places = torch.tensor(ORDER).argsort()
    in_order = (torch.arange(0, num_out, 8)[:, None] + places).flatten()
    values, zeros = (unpack_words(parts[name], num_out, dim=1)[:, in_order].T for name in ("qweight", "qzeros"))
    return (values.float() - spread(zeros, shape)) * spread(parts["scales"].T, shape)
