"""All layers of a decoder in one native call: see layers.c.

Python between the kernels takes up to a tenth of a decode step. It is spared where each part of every layer is one of
our kernels. The results have the same bits.
"""

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from common.engine.attention.cpu import CpuStep
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import DTYPES, Kernels, NativeProduct, Paged, Pair, QuantizedRows, Rows, in_whole_tiles
from common.engine.models.config import ModelConfig
from common.engine.models.feed_forward import Mlp
from common.engine.models.layer_weights import LayerWeights

#: Numbers after each row of an array between the products. Rows that are a power of two apart share few lines of the
#: caches; without these numbers prompts take 5 % more time where AMX multiplies.
PADDING = 32


class Layer(Structure):
    """Weights of one layer: the C struct of the same name."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, NativeProduct) for name in ("qkv", "o", "gate_up", "down")),
    )


class Step(Structure):
    """Inputs of a step and memory for what it computes: the C struct of the same name."""

    _fields_ = (
        *((name, Rows) for name in ("x", "normed", "qkv", "attended", "delta", "gate_up", "gated")),
        ("copied", c_void_p),
        ("rounded", QuantizedRows),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv", Paged),
        *((name, c_void_p) for name in ("pieces", "long_pieces", "scratch", "pages", "offsets", "keep")),
        ("kept", Rows),
        *((name, c_long) for name in ("rows", "num_pieces", "num_long", "scratch_bytes", "num_kept")),
        ("eps", c_float),
        ("dtype", c_int),
    )


class NativeLayers:
    """The layers of one model.

    Args:
        products: of ``weights``: qkv, o, gate_up and down of each layer.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: Sequence[LayerWeights],
        products: Sequence[Sequence[NativeProduct]],
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._weights = weights  # holds the memory that the structs point to
        layers = [
            Layer(*(_address(norm) for norm in (one.input_norm, one.q_norm, one.k_norm, one.post_norm)), *parts)
            for one, parts in zip(weights, products, strict=True)
        ]
        self._layers = (Layer * len(layers))(*layers)
        #: Numbers of a row, with padding, in each array between the products: normed, qkv, attended, gate_up, gated.
        qkv, o, gate_up, down = products[0]
        widths = (qkv.inputs, qkv.outputs, o.inputs, gate_up.outputs, down.inputs)
        self._strides = [width + PADDING for width in widths]
        #: Holds the arrays of every step: the operating system would provide new memory page by page.
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        every = [product for parts in products for product in parts]
        self._max_inputs = max(product.inputs for product in every)
        self._max_groups = max(product.num_groups for product in every)

    def run(self, x: Tensor, rotary: Pair, attention: CpuStep, keep: Tensor | None) -> Tensor:
        """Return ``Decoder.hidden_states`` for embedded tokens ``x`` ``[N, hidden]``, which are overwritten."""
        assert x.is_contiguous() and attention.is_native
        hidden = x.shape[1]
        kept = x if keep is None else x.new_empty(len(keep), hidden)
        delta = x.new_empty(len(x), hidden + PADDING)
        step = Step(
            x=Rows.of(x),
            delta=Rows.of(delta),
            cos=rotary[0].data_ptr(),
            sin=rotary[1].data_ptr(),
            kv=attention.paged(self._config.num_heads),
            pieces=attention.pieces.data_ptr(),
            pages=attention.batch.token_pages.data_ptr(),
            offsets=attention.batch.token_offsets.data_ptr(),
            keep=None if keep is None else keep.data_ptr() or x.data_ptr(),  # null, as of no rows, would mean all
            kept=Rows.of(kept),
            rows=len(x),
            num_pieces=len(attention.pieces),
            num_kept=len(kept),
            eps=self._config.rms_norm_eps,
            dtype=DTYPES[x.dtype],
        )
        if attention.long_pieces is not None:
            pieces, scratch = attention.long_pieces
            step.long_pieces, step.num_long = pieces.data_ptr(), len(pieces)
            step.scratch, step.scratch_bytes = scratch.data_ptr(), scratch.shape[1]
        self._place_arrays(step, x)
        self._kernels.run_layers(self._layers, attention.caches, len(self._layers), byref(step))
        return kept + delta[: len(kept), :hidden]

    def _place_arrays(self, step: Step, x: Tensor) -> None:
        """Let ``step`` point to memory for the arrays between the products."""
        rows, item = len(x), x.dtype.itemsize
        names = ("normed", "qkv", "attended", "gate_up", "gated")
        sizes = [rows * stride * item for stride in self._strides]
        sizes.append(self._kernels.bytes_copied(rows, self._max_inputs + PADDING))
        sizes += [in_whole_tiles(rows) * self._max_inputs, *(4 * rows * self._max_groups,) * 2]
        if sum(sizes) > len(self._memory):
            self._memory = HugePages(0).empty((sum(sizes),), torch.uint8)
        at = self._memory.data_ptr()
        addresses = [at + sum(sizes[:index]) for index in range(len(sizes))]
        for name, address, stride in zip(names, addresses, self._strides, strict=False):
            setattr(step, name, Rows(address, stride))
        step.copied, *rounded = addresses[len(names) :]
        step.rounded = QuantizedRows(*rounded)


def native_layers(operations: object, config: ModelConfig, weights: Sequence[LayerWeights]) -> NativeLayers | None:
    """Return the layers for native calls; None if a part of one is not computed by our kernels.

    Args:
        operations: those of the decoder.
    """
    if not isinstance(operations, Kernels):
        return None
    products = []
    for layer in weights:
        if not isinstance(layer.mlp, Mlp):
            return None
        parts = [linear.native for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
        products.append([part for part in parts if part is not None])
    is_ours = all(len(parts) == 4 for parts in products)
    return NativeLayers(operations, config, weights, products) if products and is_ours else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
