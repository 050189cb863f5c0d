"""C kernels for the CPU. They do in one pass over memory what torch does in several.

The C files of this folder make one shared library for each target. A wheel carries them; in a checkout,
``compile_native.py`` compiles the one for this machine once. It is linked without an OpenMP runtime, so that it uses
the threads that torch has already started: two teams of threads on the same cores are ten times slower. If there is no
library, ``load_kernels`` logs a warning and returns None, and torch does the work.
"""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_float, c_int, c_int32, c_long, c_void_p
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.cpu.compile_native import BuildError, Library, build_library
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.targets import Target, own_target
from common.engine.models.quantization import QuantizedWeight

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
Pair = tuple[Tensor, Tensor]
LANES = 16  # every width must be a multiple of this: BLOCK in kernels.h
MAX_DIM = 256  # as in paged_attention.c
MAX_QUERIES = 16
LONG_TILE = 256  # tokens of a tile in long_attention.c
TILE_ROWS = 32  # that AMX multiplies together
MAX_GROUP = 1 << 16  # the sum of this many products of bytes fits into 32 bits

_FOLDER = Path(__file__).parent
#: The libraries of a wheel, one for each target. A checkout has none.
CARRIED = _FOLDER / "libraries"
LIBRARY = Library(
    "kernels",
    sources=tuple(
        _FOLDER / f"{name}.c"
        for name in (
            *("kernels", "pack", "linear", "float_linear", "quantized_linear", "paged_attention", "long_attention"),
            *("sampling", "layers"),
        )
    ),
    headers=tuple(_FOLDER / name for name in ("kernels.h", "paged.h", "parts.h", "dot_attention.h", "products.h")),
    # GCC warns of vectors that the target's calls cannot pass; the functions are inlined.
    flags=("-O3", "-fopenmp", "-Wno-psabi"),
    libraries=("-lm",),
)


class Rows(Structure):
    """Rows of numbers, ``stride`` numbers apart: the C struct of the same name."""

    _fields_ = (("at", c_void_p), ("stride", c_long))

    @classmethod
    def of(cls, tensor: Tensor) -> "Rows":
        """Return the rows of a tensor ``[rows, ...]``, of which each is contiguous.

        The stride of a single row says nothing: torch leaves that of the tensor from which it was taken.
        """
        return cls(tensor.data_ptr(), tensor.stride(0) if len(tensor) > 1 else tensor.numel())


class LayerCache(Structure):
    """Keys and values of one layer, and how it attends: the C struct of the same name."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
    )


class Paged(Structure):
    """Location of one layer's keys and values, strides in elements: the C struct of the same name."""

    _fields_ = (
        ("layer", LayerCache),
        ("page_table", c_void_p),
        ("table_width", c_long),
        ("page_size", c_long),
        ("page_stride", c_long),
        ("head_stride", c_long),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("groups", c_long),
        ("dim", c_long),
        ("dtype", c_int),
    )


class PackedWeight(Structure):
    """A quantized weight in the order in which the kernel reads it: the C struct ``QuantizedWeight``.

    Attributes:
        tensors: hold the memory that the struct points to.
    """

    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_long),
        ("outputs", c_long),
        ("group", c_long),
        ("bits", c_int),
    )
    tensors: tuple[Tensor | None, ...]


class QuantizedRows(Structure):
    """Memory for the rounded inputs of a product: the C struct of the same name."""

    _fields_ = (("values", c_void_p), ("scales", c_void_p), ("sums", c_void_p))


class NativeProduct(Structure):
    """A product for ``run_layers``: the C struct ``Product``."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("quantized", POINTER(PackedWeight)),
        ("inputs", c_long),
        ("outputs", c_long),
    )

    @property
    def num_groups(self) -> int:
        """Groups of inputs that are rounded together."""
        return self.inputs // self.quantized.contents.group if self.quantized else 0


class LongPieces(NamedTuple):
    """Pieces of rows for ``long_attention``.

    Attributes:
        pieces: ``[P, 4]`` int64, as for ``paged_attention``.
        scratch: ``[threads, bytes]``, memory of each thread for a copy of the keys and values of a row's head.
    """

    pieces: Tensor
    scratch: Tensor


class Groups(NamedTuple):
    """Groups of rows, each of which is multiplied by one weight.

    Attributes:
        weights: ``[groups]`` int64, the number of the weight of each group.
        ends: ``[groups]`` int64, the row after the last of each group; the next group begins there.
    """

    weights: Tensor
    ends: Tensor


class WeightTable:
    """Packed weights of one shape and format, of which a product takes some: see ``Kernels.linear_grouped``."""

    def __init__(self, packed: Sequence[Tensor | PackedWeight]) -> None:
        self.packed = packed
        places = [addressof(one) if isinstance(one, PackedWeight) else one.data_ptr() for one in packed]
        self.addresses = torch.tensor(places, dtype=torch.int64, device="cpu")


class Kernels:
    """The library's functions, for contiguous CPU tensors, whose widths are multiples of ``LANES`` if nothing is said.

    ``common.engine.models.layers.Operations`` describes the first three; ``norm_and_rotate`` works in place.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_rms_norm = library.baton_add_rms_norm
        self._add_rms_norm.argtypes = (Rows, Rows, c_void_p, Rows, c_long, c_long, c_float, c_int)
        self._norm_and_rotate = library.baton_norm_and_rotate
        self._norm_and_rotate.argtypes = (Rows, *(c_void_p,) * 4, *(c_long,) * 4, c_float, c_int)
        self._silu_and_multiply = library.baton_silu_and_multiply
        self._silu_and_multiply.argtypes = (Rows, Rows, c_long, c_long, c_int)
        self._pack_tiles = library.baton_pack_tiles
        self._pack_tiles.argtypes = (c_void_p, c_void_p, c_long, c_long)
        self._linear = library.baton_linear
        self._linear.argtypes = (Rows, c_void_p, c_void_p, Rows, c_void_p, *(c_long,) * 3, c_int, c_int)
        self._linear_quantized = library.baton_linear_quantized
        self._linear_quantized.argtypes = (
            *(POINTER(PackedWeight), POINTER(QuantizedRows), Rows, Rows, c_long, c_int, c_int),
        )
        self._linear_grouped = library.baton_linear_grouped
        self._linear_grouped.argtypes = (Rows, *(c_void_p,) * 3, c_long, Rows, c_void_p, c_long, c_long, c_int, c_int)
        self._linear_quantized_grouped = library.baton_linear_quantized_grouped
        self._linear_quantized_grouped.argtypes = (
            *(c_void_p, POINTER(QuantizedRows), Rows, c_void_p, c_void_p, c_long, Rows, c_int, c_int),
        )
        self._paged_attention = library.baton_paged_attention
        self._paged_attention.argtypes = (POINTER(Paged), c_void_p, c_long, Rows, Rows, c_int)
        self._long_attention = library.baton_long_attention
        self._long_attention.argtypes = (POINTER(Paged), c_void_p, c_long, c_void_p, c_long, Rows, Rows)
        self._write_kv = library.baton_write_kv
        self._write_kv.argtypes = (POINTER(Paged), c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_long, c_int)
        self._token_weights = library.baton_token_weights
        self._token_weights.argtypes = (c_void_p, c_void_p, c_long, c_long)
        self.run_layers = library.baton_run_layers
        self.run_layers.argtypes = (c_void_p, c_void_p, c_long, c_void_p)
        for function in vars(self).values():
            function.restype = None
        #: Whether processor and operating system have AMX.
        self.has_amx = bool(library.baton_has_amx())
        #: Formats of weights that ``linear`` multiplies.
        self.linear_dtypes = [dtype for dtype, number in DTYPES.items() if library.baton_can_multiply(number)]
        #: Whether ``long_attention`` computes anything: it needs what the products need.
        self.has_long_attention = torch.bfloat16 in self.linear_dtypes
        #: Whether the processor has a dot product of pairs of numbers, for attention to pages of bfloat16 and of int8.
        self.has_bfloat16_dot, self.has_int8_dot = (
            bool(library.baton_has_dots(DTYPES[dtype])) for dtype in (torch.bfloat16, torch.int8)
        )
        #: Whether ``linear_quantized`` computes anything.
        self.has_quantized_linear = bool(library.baton_can_multiply_quantized())

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous() and (delta is None or delta.is_contiguous())
        out = torch.empty_like(x)
        change = Rows() if delta is None else Rows.of(delta)
        self._add_rms_norm(Rows.of(x), change, weight.data_ptr(), Rows.of(out), *x.shape, eps, DTYPES[x.dtype])
        return out

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        assert qkv.is_contiguous()
        cos, sin = rotary
        q_norm, k_norm = (norm.data_ptr() for norm in norms) if norms else (None, None)
        rows, all_heads, dim = qkv.shape
        self._norm_and_rotate(
            *(Rows.of(qkv), q_norm, k_norm, cos.data_ptr(), sin.data_ptr()),
            *(rows, num_heads, (all_heads - num_heads) // 2, dim, eps, DTYPES[qkv.dtype]),
        )
        return qkv

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._silu_and_multiply(Rows.of(gate_up), Rows.of(out), rows, width, DTYPES[gate_up.dtype])
        return out

    def token_weights(self, scaled: Tensor, threshold: Tensor | None) -> Tensor:
        """``common.engine.sampling.weights.token_weights`` for a width of any size; ``scaled`` is overwritten."""
        assert scaled.is_contiguous() and (threshold is None or threshold.is_contiguous())
        self._token_weights(scaled.data_ptr(), None if threshold is None else threshold.data_ptr(), *scaled.shape)
        return scaled

    def can_multiply(self, weight: Tensor, *, in_float32: bool = False) -> bool:
        """Whether ``linear`` is the best product here with a weight ``[out, in]``.

        On processors with AMX, oneDNN's is faster in float16. It rounds results to the format of the weight, so that it
        does not compute ``in_float32``.
        """
        num_out, num_in = weight.shape
        is_ours = in_float32 or weight.dtype != torch.float16 or not self.has_amx
        is_best = is_ours and weight.dtype in self.linear_dtypes
        return is_best and num_out % LANES == 0 and num_in > 0 and num_in * weight.itemsize % 4 == 0

    def pack_linear(self, weight: Tensor, memory: HugePages) -> Tensor:
        """Return the weight in the order in which ``linear`` reads it; see linear.c and float_linear.c."""
        in_word = 4 // weight.itemsize
        packed = memory.empty((weight.shape[0] // LANES, weight.shape[1] // in_word, LANES, in_word), weight.dtype)
        self._copy_in_tiles(weight.contiguous(), packed)
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``x @ weight.T + bias`` for contiguous ``x`` ``[rows, in]``, in its dtype or in float32.

        ``x``, weight and bias have one dtype.
        """
        assert x.is_contiguous() and x.dtype == packed.dtype and x.shape[1] == _inputs(packed)
        width = packed.shape[0] * LANES
        out = x.new_empty(x.shape[0], width, dtype=dtype)
        copied = torch.empty(self.bytes_copied(*x.shape), dtype=torch.uint8, device="cpu")
        biases = None if bias is None else bias.data_ptr()
        self._linear(
            *(Rows.of(x), packed.data_ptr(), biases, Rows.of(out), copied.data_ptr()),
            *(*x.shape, width, DTYPES[x.dtype], DTYPES[dtype]),
        )
        return out

    def bytes_copied(self, rows: int, inputs: int) -> int:
        """Return the bytes for which ``linear`` needs memory if ``x`` has so many rows and inputs."""
        if torch.float32 in self.linear_dtypes:
            return 4 * rows * inputs
        return 2 * in_whole_tiles(rows) * inputs if self.has_amx else 0

    def can_multiply_quantized(self, weight: QuantizedWeight) -> bool:
        """Whether ``linear_quantized`` computes the product with this weight here."""
        size = weight.group_size
        return self.has_quantized_linear and len(weight.values) % LANES == 0 and size % LANES == 0 and size <= MAX_GROUP

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, memory: HugePages) -> PackedWeight:
        """Return the weight in the order that quantized_linear.c describes."""
        num_out, num_in = weight.values.shape
        values = weight.values.contiguous()
        if weight.bits == 4:
            halves = values.view(num_out, num_in // 8, 2, 4)
            values = (halves[:, :, 0] | halves[:, :, 1] << 4).view(num_out, num_in // 2)
        packed = memory.empty((num_out // LANES, values.shape[1] // 4, LANES, 4), values.dtype)
        self._copy_in_tiles(values, packed)
        scales, zeros = (
            numbers.view(num_out // LANES, LANES, -1).transpose(1, 2).contiguous()
            for numbers in (weight.scales, weight.zeros)
        )
        biases = None if bias is None else bias.data_ptr()
        found = PackedWeight(
            *(packed.data_ptr(), scales.data_ptr(), zeros.data_ptr(), biases),
            *(num_in, num_out, weight.group_size, weight.bits),
        )
        found.tensors = (packed, scales, zeros, bias)
        return found

    def _copy_in_tiles(self, rows: Tensor, packed: Tensor) -> None:
        assert rows.is_contiguous() and rows.nbytes == packed.nbytes
        self._pack_tiles(rows.data_ptr(), packed.data_ptr(), packed.shape[0], packed.shape[1])

    def linear_quantized(self, x: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """Return ``x @ weight.T + bias`` for contiguous ``x`` ``[rows, in]`` in the bias's dtype, as ``dtype``."""
        assert x.is_contiguous() and x.shape[1] == weight.inputs
        out = x.new_empty(x.shape[0], weight.outputs, dtype=dtype)
        rows, _memory = _scratch(x, weight)
        self._linear_quantized(
            *(weight, rows, Rows.of(x), Rows.of(out), x.shape[0], DTYPES[x.dtype], DTYPES[dtype]),
        )
        return out

    def linear_grouped(self, x: Tensor, weights: WeightTable, groups: Groups, dtype: torch.dtype) -> Tensor:
        """Return the products of groups of rows of contiguous ``x`` with a weight each, without biases, as ``dtype``.

        The rows have the bits that ``linear`` or ``linear_quantized`` returns.
        """
        first = weights.packed[0]
        assert x.is_contiguous() and x.shape[1] == _inputs(first)
        table = weights.addresses.data_ptr()
        chosen = (groups.weights.data_ptr(), groups.ends.data_ptr(), len(groups.ends))
        if isinstance(first, PackedWeight):
            out = x.new_empty(x.shape[0], first.outputs, dtype=dtype)
            rows, _memory = _scratch(x, first)
            self._linear_quantized_grouped(
                *(table, rows, Rows.of(x), *chosen, Rows.of(out), DTYPES[x.dtype], DTYPES[dtype]),
            )
            return out
        assert x.dtype == first.dtype
        out = x.new_empty(x.shape[0], first.shape[0] * LANES, dtype=dtype)
        copied = torch.empty(self.bytes_copied(*x.shape), dtype=torch.uint8, device="cpu")
        self._linear_grouped(
            *(Rows.of(x), table, *chosen, Rows.of(out), copied.data_ptr(), x.shape[1], out.shape[1]),
            *(DTYPES[x.dtype], DTYPES[dtype]),
        )
        return out

    def paged_attention(self, kv: Paged, pieces: Tensor, q: Tensor, out: Tensor) -> None:
        """Compute attention for ``pieces``: ``[P, 4]`` int64 of (row, first query, queries, position of the first)."""
        self._paged_attention(
            *(kv, pieces.data_ptr(), pieces.shape[0], Rows.of(q), Rows.of(out), DTYPES[q.dtype]),
        )

    def long_attention(self, kv: Paged, pieces: LongPieces, q: Tensor, out: Tensor) -> None:
        """Compute attention for long pieces in bfloat16; see long_attention.c for the supported shapes."""
        assert self.has_long_attention
        self._long_attention(
            *(kv, pieces.pieces.data_ptr(), len(pieces.pieces), pieces.scratch.data_ptr(), pieces.scratch.shape[1]),
            *(Rows.of(q), Rows.of(out)),
        )

    def write_kv(self, kv: Paged, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values ``[N, kv_heads, head_dim]`` to ``pages`` and ``offsets``, both ``[N]`` int64."""
        assert k.stride() == v.stride()
        self._write_kv(
            *(kv, pages.data_ptr(), offsets.data_ptr(), k.shape[0]),
            *(k.data_ptr(), v.data_ptr(), k.stride(0), DTYPES[k.dtype]),
        )


def in_whole_tiles(rows: int) -> int:
    """Return the rows for which a product with tiles needs memory."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def _inputs(packed: Tensor | PackedWeight) -> int:
    return packed.inputs if isinstance(packed, PackedWeight) else packed.shape[1] * packed.shape[3]


def _scratch(x: Tensor, weight: PackedWeight) -> tuple[QuantizedRows, Tensor]:
    """Return places for the rounded rows of ``x``, and the memory that they are in."""
    num_groups, num_values = x.numel() // weight.group, in_whole_tiles(len(x)) * weight.inputs
    memory = torch.empty(num_values + 8 * num_groups, dtype=torch.uint8, device="cpu")
    start = memory.data_ptr()
    return QuantizedRows(start, start + num_values, start + num_values + 4 * num_groups), memory


def library_for(target: Target) -> Library:
    """Return what the library of a target is compiled from."""
    return replace(LIBRARY, name=f"{LIBRARY.name}-{target.name}", flags=(*LIBRARY.flags, *target.flags))


def open_kernels(target: Target) -> Kernels:
    """Return the kernels of a target that this processor has, from the wheel or compiled.

    Raises:
        BuildError: they cannot be compiled.
        OSError: their library cannot be loaded.
    """
    library = library_for(target)
    carried = CARRIED / f"{library.name}.so"
    return Kernels(ctypes.CDLL(str(carried if carried.exists() else build_library(library))))


@cache
def load_kernels() -> Kernels | None:
    """Return the kernels for this processor; None if they cannot be compiled.

    Raises:
        ConfigError: ``BATON_CPU_TARGET`` names no target of this processor.
    """
    target = own_target()
    try:
        return open_kernels(target)
    except (BuildError, OSError, AttributeError) as error:
        remedy = "give GCC as CC, and a folder that can be written as XDG_CACHE_HOME"
        log.warning("cannot load the CPU kernels, using torch's, which are slower; %s: %s", remedy, error)
        return None
