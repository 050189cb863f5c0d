"""Linear layers. Their weights are packed once, in the order in which this machine's matrix product reads them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from common.engine.cpu.kernels import Kernels, load_kernels


class Linear:
    """``y = x @ weight.T + bias``; the weight may be packed once for this machine.

    Attributes:
        weight: ``[out, in]``; None once ``pack`` has replaced it by its packed form.
        bias: ``[out]`` or None.
    """

    __slots__ = ("_kernels", "_packed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self._packed: Tensor | None = None
        self._kernels: Kernels | None = None

    def pack(self, *, keep_weight: bool = False) -> None:
        """Pack the weight for our own kernel or for oneDNN, if one of them is faster here than the plain weight.

        Args:
            keep_weight: keep the plain weight too, for an embedding tied to the output.
        """
        if self.weight is None or self.weight.device.type != "cpu":
            return
        kernels = load_kernels()
        if kernels is not None and kernels.can_multiply(self.weight):
            self._kernels, self._packed = kernels, kernels.pack_linear(self.weight)
        elif _is_known_to_onednn(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        else:
            return
        if not keep_weight:
            self.weight = None

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """Map contiguous ``[rows, in]`` to ``[rows, out]`` of ``dtype``, by default that of ``x``.

        The result is written to ``out``, which has this dtype, if that is given.

        Our own kernel adds up each row in the same order whatever rows are beside it, and rounds its float32 sum once.
        """
        if self._packed is None:
            assert self.weight is not None
            y = F.linear(x, self.weight, self.bias)
        elif self._kernels is not None:
            y = self._kernels.linear(x, self._packed, self.bias, dtype or x.dtype)
        else:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y.to(dtype or x.dtype) if out is None else out.copy_(y)


def _is_known_to_onednn(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
