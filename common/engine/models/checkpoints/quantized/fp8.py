"""FP8: matrices of 8-bit floats with scales, by tensor, row or block.

``weight_scale_inv``, the name in DeepSeek's and Qwen's checkpoints, is a factor of the stored numbers like
``weight_scale`` (DeepSeek-V3, arXiv 2412.19437, section 3.3).
"""

from torch import Tensor

from common.engine.models.checkpoints.quantized.config import CheckpointQuantization
from common.engine.models.checkpoints.quantized.packing import Parts, spread


def decode_fp8(parts: Parts, shape: tuple[int, ...], quantization: CheckpointQuantization) -> Tensor:
    """Return the matrix in float32."""
    scales = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    return parts["weight"].float() * spread(scales, shape, quantization.block)
