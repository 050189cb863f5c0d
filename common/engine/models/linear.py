"""Linear layers. Their weights are packed once, in the order in which this machine's matrix product reads them."""

from collections.abc import Sequence
from ctypes import pointer
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from common.config.shared import WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import Groups, Kernels, NativeProduct, PackedWeight, WeightTable, load_kernels
from common.engine.models.quantization import (
    QuantizedWeight,
    TorchQuantizedProduct,
    quantize_weight,
)

#: Numbers of a weight that ``_WidenedProduct`` widens at a time: 2 MB in float32.
WIDENED_NUMBERS = 1 << 19


class Product(Protocol):
    """``x @ weight.T + bias`` with a weight in one of the forms that weights are kept in.

    The result for a row does not depend on the rows beside it, except in products of oneDNN and torch.
    """

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map contiguous ``[rows, in]`` to ``[rows, out]`` of ``dtype``."""
        ...


class Linear:
    """``y = x @ weight.T + bias``; the weight may be packed once for this machine.

    Attributes:
        weight: ``[out, in]``; None once ``pack`` has replaced it by its packed form.
        bias: ``[out]`` or None.
    """

    __slots__ = ("_product", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self._product: Product | None = None

    def pack(
        self,
        dtype: WeightDtype = "auto",
        *,
        memory: HugePages | None = None,
        keep_weight: bool = False,
        in_float32: bool = False,
    ) -> None:
        """Round the weight to ``dtype``, and pack it if something here multiplies faster than with the plain one.

        Args:
            memory: for the packed weight, beside those of other layers; None: the weight has memory of its own.
            keep_weight: keep the plain weight too, for an embedding tied to the output.
            in_float32: results are asked for in float32, and must not be rounded before: for the logits, of which the
                largest two would often be equal.
        """
        if self.weight is None or self.weight.device.type != "cpu":
            return
        memory = memory or HugePages(0)
        if dtype == "auto":
            self._product = _plain_product(self.weight, self.bias, memory, in_float32=in_float32)
        else:
            self._product = quantized_product(quantize_weight(self.weight, dtype), self.bias, memory)
        if not keep_weight and self._product is not None:
            self.weight = None

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """Map contiguous ``[rows, in]`` to ``[rows, out]`` of ``dtype``, by default that of ``x``.

        The result is written to ``out``, which has this dtype, if that is given.
        """
        dtype = dtype or x.dtype
        if self._product is not None:
            y = self._product(x, dtype)
        else:
            assert self.weight is not None
            if dtype != x.dtype and self.weight.device.type != "cpu":  # F.linear would round the sums to 16 bits first
                y = torch.mm(x, self.weight.T, out_dtype=dtype, out=out)
                return y if self.bias is None else y.add_(self.bias)
            y = F.linear(x, self.weight, self.bias)
        return y.to(dtype) if out is None else out.copy_(y)

    @property
    def native(self) -> NativeProduct | None:
        """The product for native calls; None if it is none of our kernels."""
        return self._product.native if isinstance(self._product, _PlainProduct | _QuantizedProduct) else None


class GroupedLinear:
    """The products of several linear layers of one shape, each with its own rows, in one call of our kernels."""

    def __init__(self, kernels: Kernels, table: WeightTable) -> None:
        self._kernels = kernels
        self._table = table

    def __call__(self, x: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        """Map contiguous ``[rows, in]``, in groups, to ``[rows, out]`` of ``dtype``."""
        return self._kernels.linear_grouped(x, self._table, groups, dtype)


def group_linears(linears: Sequence[Linear]) -> GroupedLinear | None:
    """Return the products of packed linear layers without biases; None if they are not computed by our kernels."""
    for kind in (_PlainProduct, _QuantizedProduct):
        products = [linear._product for linear in linears if isinstance(linear._product, kind)]
        if products and len(products) == len(linears):
            return GroupedLinear(products[0]._kernels, WeightTable([product._weight for product in products]))
    return None


def quantized_product(weight: QuantizedWeight, bias: Tensor | None, memory: HugePages) -> Product:
    """Return the fastest product with a quantized weight on this CPU."""
    kernels = load_kernels()
    if kernels is not None and kernels.can_multiply_quantized(weight):
        return _QuantizedProduct(kernels, kernels.pack_quantized(weight, bias, memory))
    return TorchQuantizedProduct(weight, bias)


def _plain_product(weight: Tensor, bias: Tensor | None, memory: HugePages, *, in_float32: bool) -> Product | None:
    """Return the fastest product with this weight on this CPU; None for ``F.linear``."""
    kernels = load_kernels()
    if kernels is not None and kernels.can_multiply(weight, in_float32=in_float32):
        return _PlainProduct(kernels, kernels.pack_linear(weight, memory), bias)
    if in_float32 and weight.dtype != torch.float32:
        return _WidenedProduct(weight, bias)
    return _OneDnnProduct(weight, bias) if _is_known_to_onednn(weight.dtype) else None


class _PlainProduct:
    """Our own kernel: it adds up each row in the same order whatever rows are beside it, and rounds the sum once."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias, dtype)

    @property
    def native(self) -> NativeProduct:
        bias = None if self._bias is None else self._bias.data_ptr()
        blocks, words, lanes, in_word = self._weight.shape
        return NativeProduct(self._weight.data_ptr(), bias, None, words * in_word, blocks * lanes)


class _QuantizedProduct:
    """Our own kernel: it rounds the inputs of each row to 8 bits, and multiplies integers."""

    def __init__(self, kernels: Kernels, weight: PackedWeight) -> None:
        self._kernels = kernels
        self._weight = weight

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._kernels.linear_quantized(x, self._weight, dtype)

    @property
    def native(self) -> NativeProduct:
        return NativeProduct(None, None, pointer(self._weight), self._weight.inputs, self._weight.outputs)


class _WidenedProduct:
    """torch's product in float32: a part of the weight at a time is widened, which stays in the cache meanwhile.

    On CPUs torch has no product of numbers of 16 bits that returns sums which are not rounded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._parts = weight.split(max(1, WIDENED_NUMBERS // max(1, weight.shape[1])))
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rows = x.float()
        y = torch.cat([F.linear(rows, part.float()) for part in self._parts], dim=1)
        return (y if self._bias is None else y + self._bias).to(dtype)


class _OneDnnProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y.to(dtype)


def _is_known_to_onednn(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
