"""The rotary embedding, and the element-wise operations between a decoder's matrix products."""

import math
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.cpu.kernels import LANES, Pair, load_kernels
from common.engine.models.config import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the radians per position of each pair, ``[head_dim / 2]`` float32, with the scaling of ``rope``."""
    if isinstance(rope.scaling, YarnScaling):
        return _yarn(rope.theta, rope.scaling, head_dim)
    frequencies = 1.0 / _periods(rope.theta, head_dim)
    return frequencies if rope.scaling is None else _llama3(frequencies, rope.scaling)


def _periods(theta: float, head_dim: int) -> Tensor:
    """Return the positions per radian of each pair, ``[head_dim / 2]`` float32."""
    periods: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    return periods


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by ``factor``, keep high ones, blend between; ``apply_scaling`` of Llama 3.1's code."""
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * slowed + smooth * frequencies
    is_slow = wavelengths > scaling.original_context / scaling.low_freq_factor
    is_fast = wavelengths < scaling.original_context / scaling.high_freq_factor
    return torch.where(is_slow, slowed, torch.where(is_fast, frequencies, blended))


def _yarn(theta: float, scaling: YarnScaling, head_dim: int) -> Tensor:
    """Divide low frequencies by ``factor``, keep high ones, blend linearly between (arXiv 2309.00071, section 3.2).

    The order of operations is that of ``_compute_yarn_parameters`` in transformers, for equal float32 results.
    """

    def pair_turning(times: float) -> float:
        """Return the (fractional) pair that makes ``times`` rotations within the original context."""
        return head_dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = _periods(theta, head_dim)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def rotations(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines times ``factor``, each ``[N, head_dim / 2]`` float32, for ``positions`` ``[N]``."""
    angles = positions.float()[:, None] * frequencies
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


# ---- element-wise operations -----------------------------------------------------------------------------------------


class Operations(Protocol):
    """The operations between matrix products: in torch on any device, in Triton on CUDA, in C on CPUs.

    All implementations return the same; Triton and C read and write memory fewer times. ``x`` is changed in place, so
    that the residual stream of a decoder is one tensor from the embedding to the last norm.
    """

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``x += delta`` in place, then ``x / rms(x) * weight`` (Zhang and Sennrich, arXiv 1910.07467).

        Args:
            x, delta: ``[rows, width]``.
            weight: ``[width]``.
        """
        ...

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        """Normalise queries and keys per head, then rotate them to their positions.

        Args:
            qkv: ``[N, heads + 2 * kv_heads, head_dim]``; may be overwritten.
            norms: weights of the norms of queries and keys, ``[head_dim]`` each; None: do not normalise.
            rotary: cosines and sines, each ``[N, head_dim / 2]`` float32, for pairs (i, i + head_dim / 2).
        Returns:
            ``qkv`` with queries and keys replaced.
        """
        ...

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` ``[rows, width]`` from ``[rows, 2 * width]`` (SwiGLU, arXiv 2002.05202)."""
        ...


class TorchOperations:
    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x += delta
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = (self.add_rms_norm(part, None, weight, eps) for part, weight in zip((q, k), norms, strict=True))
        return torch.cat((_rotate(q, *rotary), _rotate(k, *rotary), v), dim=1)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[N, heads, head_dim]`` in float32 and round once."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def make_operations(config: ModelConfig, device: torch.device) -> Operations:
    """Return Triton's kernels on CUDA if the package is there, the C kernels on a CPU if they fit the model's widths.

    Torch's operations otherwise.
    """
    if device.type == "cuda" and find_spec("triton"):
        from common.engine.triton_kernels.elementwise import TritonOperations  # imports triton

        return TritonOperations()
    widths = [config.hidden_size, config.intermediate_size, config.head_dim // 2]
    if config.experts is not None:
        widths.append(config.experts.width)
    if device.type != "cpu" or any(width % LANES for width in widths):
        return TorchOperations()
    return load_kernels() or TorchOperations()
