"""Triton kernels for the operations between a decoder's matrix products; each reads and writes its numbers once.

Numbers are computed in float32 and rounded once, except that the residual stream is rounded before its norm, as in the
other implementations of ``common.engine.models.layers.Operations``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.triton_kernels.tiles import power_of_two

Pair = tuple[Tensor, Tensor]
#: Numbers that one program of ``silu_and_multiply`` computes.
BLOCK = 1024


@triton.jit
def add_rms_norm(
    x,
    delta,
    weight,
    out,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Add ``delta`` to one row of ``x`` in place, and store the norm of the sum. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_BLOCK)
    mask = column < WIDTH
    number = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        number += tl.load(delta + row * delta_stride + column, mask=mask, other=0.0).to(tl.float32)
        rounded = number.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + column, rounded, mask=mask)
        number = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(number * number, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (number * scale * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_and_rotate(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    keys,
    values,
    token_pages,
    token_offsets,
    token_stride,
    page_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
):
    """Normalise and rotate the queries and keys of one token in place. Grid: (tokens).

    With ``HAS_PAGES`` the keys and the values are written into the token's page, and the keys in ``qkv`` stay.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS + KV_HEADS) & (pair < HALF)
    place = qkv + token * token_stride + head * (2 * HALF) + pair
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_query = mask & (head < HEADS)
        is_key = mask & (head >= HEADS)
        # Each of the two loads gives 0 where the other gives a factor.
        first_factor = tl.load(q_norm + pair + head * 0, mask=is_query, other=0.0).to(tl.float32)
        first_factor += tl.load(k_norm + pair + head * 0, mask=is_key, other=0.0).to(tl.float32)
        second_factor = tl.load(q_norm + HALF + pair + head * 0, mask=is_query, other=0.0).to(tl.float32)
        second_factor += tl.load(k_norm + HALF + pair + head * 0, mask=is_key, other=0.0).to(tl.float32)
        first = first * scale * first_factor
        second = second * scale * second_factor
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
    turned_first = (first * c - second * s).to(qkv.dtype.element_ty)
    turned_second = (second * c + first * s).to(qkv.dtype.element_ty)
    if HAS_PAGES:
        in_page = tl.load(token_pages + token) * page_stride + tl.load(token_offsets + token) * (2 * HALF)
        target = in_page + (head - HEADS) * head_stride + pair
        is_key = mask & (head >= HEADS)
        tl.store(keys + target, turned_first, mask=is_key)
        tl.store(keys + target + HALF, turned_second, mask=is_key)
        source = place + KV_HEADS * 2 * HALF  # where a line of the tile has a key, this is its value
        tl.store(values + target, tl.load(source, mask=is_key), mask=is_key)
        tl.store(values + target + HALF, tl.load(source + HALF, mask=is_key), mask=is_key)
        mask = mask & (head < HEADS)
    tl.store(place, turned_first, mask=mask)
    tl.store(place + HALF, turned_second, mask=mask)


@triton.jit
def silu_and_multiply(gate_up, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    # tl.sigmoid would compute exp(-gate), which overflows for large negative numbers; this form never does.
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * WIDTH + column, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class KVPlaces:
    """Where a step writes the keys and values of one layer.

    Attributes:
        keys, values: the layer's pages, ``[pages, kv_heads, page_size, head_dim]`` each, with the same strides.
        token_pages, token_offsets: ``[N]`` int64, page and place in it of each token.
    """

    keys: Tensor
    values: Tensor
    token_pages: Tensor
    token_offsets: Tensor


def launch_norm_and_rotate(
    qkv: Tensor, num_heads: int, norms: Pair | None, rotary: Pair, eps: float, *, places: KVPlaces | None = None
) -> None:
    """Normalise and rotate as in ``Operations``, in place; with ``places`` write keys and values, and only those there.

    Args:
        qkv, norms, rotary, eps: as for ``Operations.norm_and_rotate``.
    """
    num_tokens, all_heads, head_dim = qkv.shape
    cos, sin = rotary
    assert qkv.stride()[1:] == (head_dim, 1) and cos.is_contiguous() and sin.is_contiguous()
    q_norm, k_norm = norms or (cos, cos)  # unused without norms
    num_kv_heads = (all_heads - num_heads) // 2
    strides = (0, 0)
    written = (qkv, qkv, qkv, qkv)  # unused without places
    if places is not None:
        keys, values = places.keys, places.values
        assert keys.shape == values.shape and keys.stride() == values.stride() and keys.dtype == qkv.dtype
        assert keys.stride()[2:] == (head_dim, 1)
        strides = (keys.stride(0), keys.stride(1))
        written = (keys, values, places.token_pages, places.token_offsets)
    norm_and_rotate[(num_tokens,)](
        *(qkv, q_norm, k_norm, cos, sin, *written, qkv.stride(0), *strides, eps),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEADS_BLOCK=power_of_two(num_heads + num_kv_heads),
        HALF=head_dim // 2,
        HALF_BLOCK=power_of_two(head_dim // 2),
        HAS_NORMS=norms is not None,
        HAS_PAGES=places is not None,
    )


class TritonOperations:
    """``common.engine.models.layers.Operations`` in Triton; ``norm_and_rotate`` works in place."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        assert x.stride(1) == 1 and (delta is None or delta.stride(1) == 1)
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        block = power_of_two(width)
        add_rms_norm[(rows,)](
            *(x, x if delta is None else delta, weight, out),
            *(x.stride(0), 0 if delta is None else delta.stride(0), eps),
            WIDTH=width,
            WIDTH_BLOCK=block,
            HAS_DELTA=delta is not None,
            num_warps=min(max(block // 256, 4), 16),
        )
        return out

    def norm_and_rotate(self, qkv: Tensor, num_heads: int, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        launch_norm_and_rotate(qkv, num_heads, norms, rotary, eps)
        return qkv

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
        columns = min(BLOCK, power_of_two(width))
        silu_and_multiply[(rows, -(-width // columns))](gate_up, out, WIDTH=width, COLUMNS=columns)
        return out
