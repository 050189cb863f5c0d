"""C kernels for the CPU, compiled once per machine. They do in one pass over memory what torch does in several.

``compile_native.py`` compiles the C files of this folder into one shared library. It is linked without an OpenMP
runtime, so that it uses the threads that torch has already started: two teams of threads on the same cores are ten
times slower. If the library cannot be built, ``load_kernels`` logs a warning and returns None, and torch does the work.
"""

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from common.engine.cpu.compile_native import BuildError, Library, build_library

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
Pair = tuple[Tensor, Tensor]
LANES = 16  # every width must be a multiple of this
MAX_DIM = 256  # as in paged_attention.c
MAX_QUERIES = 16

_FOLDER = Path(__file__).parent
LIBRARY = Library(
    "kernels",
    sources=tuple(
        _FOLDER / name for name in ("kernels.c", "linear.c", "paged_attention.c", "amx_attention.c", "sampling.c")
    ),
    headers=tuple(_FOLDER / name for name in ("kernels.h", "paged.h", "dot_attention.h")),
    flags=("-O3", "-march=native", "-fopenmp"),
    libraries=("-lm",),
)


class Paged(Structure):
    """Location of one layer's keys and values, strides in elements: the C struct of the same name."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("page_table", c_void_p),
        ("table_width", c_long),
        ("page_size", c_long),
        ("page_stride", c_long),
        ("head_stride", c_long),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("dim", c_long),
    )


class Kernels:
    """The library's functions, for contiguous CPU tensors, whose widths are multiples of ``LANES`` if nothing is said.

    ``common.engine.models.layers.Operations`` describes the first three; ``norm_and_rotate`` works in place.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_rms_norm = library.baton_add_rms_norm
        self._add_rms_norm.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_long, c_float, c_int)
        self._norm_and_rotate = library.baton_norm_and_rotate
        self._norm_and_rotate.argtypes = (*(c_void_p,) * 5, *(c_long,) * 4, c_float, c_int)
        self._silu_and_multiply = library.baton_silu_and_multiply
        self._silu_and_multiply.argtypes = (c_void_p, c_void_p, c_long, c_long, c_int)
        self._linear_bf16 = library.baton_linear_bf16
        self._linear_bf16.argtypes = (*(c_void_p,) * 4, *(c_long,) * 3, c_int)
        self._paged_attention = library.baton_paged_attention
        self._paged_attention.argtypes = (
            *(POINTER(Paged), c_void_p, c_long, c_void_p, c_long, c_void_p, c_float, c_int),
        )
        self._write_kv = library.baton_write_kv
        self._write_kv.argtypes = (POINTER(Paged), c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_long, c_int)
        self._token_weights = library.baton_token_weights
        self._token_weights.argtypes = (c_void_p, c_void_p, c_long, c_long)
        for function in vars(self).values():
            function.restype = None
        self._amx_attention = library.baton_amx_attention
        self._amx_attention.argtypes = (POINTER(Paged), c_void_p, c_long, c_void_p, c_long, c_void_p, c_float)
        self._amx_attention.restype = c_int
        #: Whether processor and kernel support ``amx_attention``.
        self.has_amx = bool(library.baton_has_amx())
        self._has_bf16_dot = bool(library.baton_has_bf16_dot())

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous() and (delta is None or delta.is_contiguous())
        out = torch.empty_like(x)
        change = None if delta is None else delta.data_ptr()
        self._add_rms_norm(x.data_ptr(), change, weight.data_ptr(), out.data_ptr(), *x.shape, eps, DTYPES[x.dtype])
        return out

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        assert qkv.is_contiguous()
        cos, sin = rotary
        q_norm, k_norm = (norm.data_ptr() for norm in norms) if norms else (None, None)
        rows, all_heads, dim = qkv.shape
        self._norm_and_rotate(
            *(qkv.data_ptr(), q_norm, k_norm, cos.data_ptr(), sin.data_ptr()),
            *(rows, num_heads, (all_heads - num_heads) // 2, dim, eps, DTYPES[qkv.dtype]),
        )
        return qkv

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._silu_and_multiply(gate_up.data_ptr(), out.data_ptr(), rows, width, DTYPES[gate_up.dtype])
        return out

    def token_weights(self, scaled: Tensor, threshold: Tensor | None) -> Tensor:
        """``common.engine.sampling.weights.token_weights`` for a width of any size; ``scaled`` is overwritten."""
        assert scaled.is_contiguous() and (threshold is None or threshold.is_contiguous())
        self._token_weights(scaled.data_ptr(), None if threshold is None else threshold.data_ptr(), *scaled.shape)
        return scaled

    def can_multiply(self, weight: Tensor) -> bool:
        """Whether ``linear`` is the fastest product here with a weight ``[out, in]``: with AMX, oneDNN's is."""
        is_fast = self._has_bf16_dot and not self.has_amx
        return is_fast and weight.dtype == torch.bfloat16 and weight.shape[0] % LANES == 0 and weight.shape[1] % 2 == 0

    def pack_linear(self, weight: Tensor) -> Tensor:
        """Return the weight in the order in which ``linear`` reads it, ``[out / 16, in / 2, 16, 2]``."""
        num_out, num_in = weight.shape
        return weight.view(num_out // LANES, LANES, num_in // 2, 2).permute(0, 2, 1, 3).contiguous()

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``x @ weight.T + bias`` for contiguous ``x`` ``[rows, in]`` bfloat16, as bfloat16 or float32."""
        assert x.is_contiguous() and x.dtype == torch.bfloat16
        width = len(packed) * LANES
        out = x.new_empty(len(x), width, dtype=dtype)
        biases = None if bias is None else bias.data_ptr()
        self._linear_bf16(x.data_ptr(), packed.data_ptr(), biases, out.data_ptr(), *x.shape, width, DTYPES[dtype])
        return out

    def paged_attention(self, kv: Paged, pieces: Tensor, q: Tensor, out: Tensor, scale: float) -> None:
        """Compute attention for ``pieces``: ``[P, 4]`` int64 of (row, first query, queries, position of the first)."""
        self._paged_attention(
            *(kv, pieces.data_ptr(), len(pieces), q.data_ptr(), q.stride(0)), *(out.data_ptr(), scale, DTYPES[q.dtype])
        )

    def amx_attention(self, kv: Paged, pieces: Tensor, q: Tensor, out: Tensor, scale: float) -> None:
        """Compute attention for long pieces in bfloat16; see amx_attention.c for the supported shapes."""
        assert self.has_amx
        is_done = self._amx_attention(
            *(kv, pieces.data_ptr(), len(pieces), q.data_ptr(), q.stride(0), out.data_ptr(), scale)
        )
        if not is_done:
            raise MemoryError("no memory for a copy of one row's values in attention")

    def write_kv(self, kv: Paged, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values ``[N, kv_heads, head_dim]`` to ``pages`` and ``offsets``, both ``[N]`` int64."""
        assert k.stride() == v.stride()
        self._write_kv(
            *(kv, pages.data_ptr(), offsets.data_ptr(), len(k)),
            *(k.data_ptr(), v.data_ptr(), k.stride(0), DTYPES[k.dtype]),
        )


@cache
def load_kernels() -> Kernels | None:
    """Return the kernels, compiled at the first call on a machine; None if they cannot be compiled."""
    try:
        return Kernels(ctypes.CDLL(str(build_library(LIBRARY))))
    except (BuildError, OSError, AttributeError) as error:
        log.warning("cannot compile the CPU kernels, using torch's, which are slower: %s", error)
        return None
