"""The small steps between a layer's matrix products: in torch anywhere, in C where this machine has them compiled.

Both take and give the same; they differ in how often a number goes through memory. ``x`` is changed in place, so that
the running sum of a decoder (its residual stream) is one tensor from embedding to last norm.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.kernels import LANES, Kernels, load_kernels
from common.engine.model_config import ModelConfig

Pair = tuple[Tensor, Tensor]


class Operations(Protocol):
    """What the decoder asks for between its products."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``x += delta`` in place, then ``x / rms(x) * weight`` (Zhang and Sennrich, arXiv 1910.07467).

        Args:
            x, delta: ``[rows, width]``.
            weight: ``[width]``.
        """
        ...

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, turn: Pair, eps: float) -> Tensor:
        """Normalise queries and keys per head (``norms``: their weights), then turn them to their positions.

        Args:
            qkv: ``[N, heads + 2 * kv_heads, head_dim]``; may be overwritten.
            turn: cosines and sines, each ``[N, head_dim / 2]`` float32, for pairs (i, i + head_dim / 2).
        Returns:
            ``qkv`` with queries and keys replaced.
        """
        ...

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's middle (arXiv 2002.05202): ``[rows, 2 * width]``, gate before up, to ``[rows, width]``."""
        ...


class TorchOperations:
    """In torch, on any device."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x += delta
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, turn: Pair, eps: float) -> Tensor:
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = (self.add_rms_norm(part, None, weight, eps) for part, weight in zip((q, k), norms, strict=True))
        return torch.cat((_rotate(q, *turn), _rotate(k, *turn), v), dim=1)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[N, heads, head_dim]``; float32 inside, rounded once."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def make_operations(config: ModelConfig, device: torch.device) -> Operations:
    """C on a CPU for models whose widths it takes, torch otherwise."""
    widths = (config.hidden_size, config.intermediate_size, config.head_dim // 2)
    if device.type != "cpu" or any(width % LANES for width in widths):
        return TorchOperations()
    kernels: Kernels | None = load_kernels()
    return kernels or TorchOperations()
