"""Triton kernels for attention over paged KV: write new tokens, attend with split keys, merge the splits.

One kernel serves prompts and decode rows. A program computes one piece (some new tokens of one row) for all query heads
that share one KV head, over one split of the row's keys, with the running softmax of flash attention (Dao et al.,
arXiv 2205.14135). Tokens and query heads form the rows of one tile, so that a decode row with grouped heads is a matrix
product too. Splits (Flash-Decoding) keep all multiprocessors busy when there are few pieces. Scores are in units of
log 2, because exp2 is the processor's instruction.

Page numbers are multiplied in 64 bits: pools are larger than 2**31 elements.
"""

import triton
import triton.language as tl

from common.engine.triton_kernels.fp8 import dequantize, quantize

#: Splits that ``merge_splits`` can merge; a power of two.
MAX_SPLITS = 64
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _write_part(
    new,
    numbers,
    scales,
    page,
    offset,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Write the keys, or the values, of one token, which begin at ``new``."""
    heads = tl.arange(0, HEADS_BLOCK)
    head = heads[:, None]
    dim = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (head < HEADS) & (dim < DIM)
    x = tl.load(new + head * DIM + dim, mask=mask, other=0.0)
    target = page * page_stride + head * head_stride + offset * DIM + dim
    if HAS_SCALES:  # a number has one byte, as a scale has: their strides are equal
        x, scale = quantize(x.to(tl.float32))
        tl.store(scales + page * page_stride + heads * head_stride + offset, scale, mask=heads < HEADS)
    tl.store(numbers + target, x, mask=mask)


@triton.jit
def write_kv(
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    token_pages,
    token_offsets,
    k_stride,
    v_stride,
    page_stride,
    key_head_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Write the keys and values of one token into its page. Grid: (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(token_pages + token)
    offset = tl.load(token_offsets + token)
    _write_part(
        k + token * k_stride, keys, key_scales, page, offset, page_stride, key_head_stride,
        KV_HEADS, HEAD_DIM, HEADS_BLOCK, HAS_SCALES, DIM_BLOCK,
    )  # fmt: skip
    if not IS_LATENT:
        _write_part(
            v + token * v_stride, values, value_scales, page, offset, page_stride, value_head_stride,
            KV_HEADS, VALUE_DIM, HEADS_BLOCK, HAS_SCALES, VALUE_BLOCK,
        )  # fmt: skip


@triton.jit
def _load_tile(
    numbers,
    scales,
    is_there,
    like,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Load ``DIM`` numbers, from number ``FIRST`` on, of each row that ``numbers`` points at, in the dtype of ``like``.

    With ``IS_MASKED``, rows that are not there become 0.
    """
    dim = tl.arange(0, DIM_BLOCK)
    places = numbers[:, None] + FIRST + dim[None, :]
    if IS_MASKED:
        tile = tl.load(places, mask=is_there[:, None] & (dim < DIM)[None, :], other=0)
    elif DIM == DIM_BLOCK:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(dim < DIM)[None, :], other=0)
    if HAS_SCALES:
        if IS_MASKED:
            scale = tl.load(scales, mask=is_there, other=0)
        else:
            scale = tl.load(scales)
        tile = dequantize(tile, scale).to(like.dtype)
    return tile


@triton.jit
def _attend_block(
    total,
    best,
    weight,
    query,
    query_rest,
    positions,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    first_key,
    end_key,
    page_stride,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the keys from ``first_key`` on to the running softmax: weighted sum, greatest score, sum of weights.

    Without ``IS_MASKED`` every query of the tile sees every key of the block.
    """
    tokens = first_key + tl.arange(0, BLOCK_N)
    # The table's entries past the row's pages are stale, and slots past its last token may hold NaN. Those before the
    # window name pages that have other tokens, or none.
    is_there = tokens < end_key
    if HAS_WINDOW:
        is_there = is_there & (tokens > tl.min(positions, 0) - window)
    if IS_MASKED:
        pages = tl.load(table + tokens // PAGE_SIZE, mask=is_there, other=0).to(tl.int64)
    else:
        pages = tl.load(table + tokens // PAGE_SIZE).to(tl.int64)
    bases = pages * page_stride
    offsets = tokens % PAGE_SIZE
    row, key_scale = keys + bases + offsets * HEAD_DIM, key_scales + bases + offsets
    key = _load_tile(row, key_scale, is_there, query, 0, MAIN_DIM, MAIN_BLOCK, IS_MASKED, HAS_SCALES)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HEAD_DIM > MAIN_DIM:
        rest = _load_tile(
            row, key_scale, is_there, query, MAIN_DIM, HEAD_DIM - MAIN_DIM, REST_BLOCK, IS_MASKED, HAS_SCALES
        )
        scores += tl.dot(query_rest, tl.trans(rest), input_precision="ieee")
    if IS_LATENT:
        value = key
    else:
        row, value_scale = values + bases + offsets * VALUE_DIM, value_scales + bases + offsets
        value = _load_tile(row, value_scale, is_there, query, 0, VALUE_DIM, VALUE_BLOCK, IS_MASKED, HAS_SCALES)

    factor = scale * _LOG2_E
    if HAS_SOFT_CAP:
        scores = scores * scale
        scores = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / soft_cap)))  # tanh, which has no portable name
        factor = _LOG2_E
    if IS_MASKED:
        is_seen = (tokens[None, :] <= positions[:, None]) & (tokens < end_key)[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))

    # ``factor`` is positive: the greatest score stays the greatest, and the product is part of one multiply-add.
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    # A query may see no key of this block and of those before it; -inf minus -inf would be NaN.
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores * factor - shift[:, None])
    kept = tl.exp2(best - shift)
    total = total * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    weight = weight * kept + tl.sum(weights, 1)
    return total, new_best, weight


# The other integers are the same in every step and layer; these would compile the kernel again when they become 1 or a
# multiple of 16.
@triton.jit(do_not_specialize=["table_stride", "num_splits", "window"])
def paged_attention(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    pieces,
    page_table,
    sinks,
    partial_out,
    partial_lse,
    q_stride,
    out_stride,
    page_stride,
    key_head_stride,
    value_head_stride,
    table_stride,
    num_splits,
    window,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend for one piece, one group of query heads and one split. Grid: (pieces, groups, splits).

    A group has ``GROUP`` query heads of one KV head, which ``PROGRAMS`` groups share. A key is read in two parts, its
    first ``MAIN_DIM`` numbers and the rest: in a latent layout the first part is the value.

    ``pieces`` holds four int64 each: row, first packed token, tokens (0: skip the piece), position of the first. The
    grid depends on no length: programs of splits past the end of a short row store only that they are empty.
    """
    piece = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(pieces + piece * 4)
    first_token = tl.load(pieces + piece * 4 + 1)
    count = tl.load(pieces + piece * 4 + 2).to(tl.int32)
    start = tl.load(pieces + piece * 4 + 3).to(tl.int32)
    if count == 0:
        return

    line = tl.arange(0, BLOCK_M)  # lines of the tile: the query heads of the first token, then those of the second
    token = line // GROUP
    head = group * GROUP + line % GROUP
    positions = start + token
    is_line = token < count
    lines = q + (first_token + token) * q_stride + head * HEAD_DIM
    query = _load_tile(lines, lines, is_line, q, 0, MAIN_DIM, MAIN_BLOCK, True, False)
    query_rest = query
    if HEAD_DIM > MAIN_DIM:
        query_rest = _load_tile(lines, lines, is_line, q, MAIN_DIM, HEAD_DIM - MAIN_DIM, REST_BLOCK, True, False)

    # The keys of this split: whole blocks, from the first that the window of the first token reaches.
    end_key = start + count
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(start - window + 1, 0) // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(tl.cdiv(end_key - first_seen, BLOCK_N), num_splits)
    first = first_seen + split * blocks * BLOCK_N
    end = tl.minimum(first + blocks * BLOCK_N, end_key)
    # Every query sees all keys before ``full``; within a window, each block may hide some.
    full = first
    if not HAS_WINDOW:
        full = tl.maximum(tl.minimum((start + 1) // BLOCK_N * BLOCK_N, end), first)

    total = tl.zeros([BLOCK_M, VALUE_BLOCK], dtype=tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        if split == 0:  # a sink is one more key, whose value is 0
            best = tl.load(sinks + head).to(tl.float32) * _LOG2_E
            weight = tl.full([BLOCK_M], 1.0, dtype=tl.float32)

    kv_head = group // PROGRAMS
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    key_scales += kv_head * key_head_stride
    value_scales += kv_head * value_head_stride
    table = page_table + row * table_stride
    for first_key in range(first, full, BLOCK_N):
        total, best, weight = _attend_block(
            total, best, weight, query, query_rest, positions, keys, values, key_scales, value_scales, table,
            first_key, end_key, page_stride, scale, soft_cap, window, HEAD_DIM, VALUE_DIM, MAIN_DIM, MAIN_BLOCK,
            REST_BLOCK, VALUE_BLOCK, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFT_CAP, IS_LATENT, HAS_SCALES, False,
        )  # fmt: skip
    for first_key in range(full, end, BLOCK_N):
        total, best, weight = _attend_block(
            total, best, weight, query, query_rest, positions, keys, values, key_scales, value_scales, table,
            first_key, end_key, page_stride, scale, soft_cap, window, HEAD_DIM, VALUE_DIM, MAIN_DIM, MAIN_BLOCK,
            REST_BLOCK, VALUE_BLOCK, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFT_CAP, IS_LATENT, HAS_SCALES, True,
        )  # fmt: skip

    is_empty = weight == 0.0
    divisor = tl.where(is_empty, 1.0, weight)
    result = total / divisor[:, None]
    dim = tl.arange(0, VALUE_BLOCK)
    mask = is_line[:, None] & (dim < VALUE_DIM)[None, :]
    if IS_SPLIT:
        part = ((piece * tl.num_programs(1) + group) * num_splits + split).to(tl.int64) * BLOCK_M + line
        tl.store(partial_lse + part, tl.where(is_empty, float("-inf"), best + tl.log2(divisor)), mask=is_line)
        tl.store(partial_out + part[:, None] * VALUE_DIM + dim[None, :], result, mask=mask & ~is_empty[:, None])
    else:
        target = (first_token + token)[:, None] * out_stride + head[:, None] * VALUE_DIM + dim[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge_splits(
    out,
    pieces,
    partial_out,
    partial_lse,
    out_stride,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Merge the splits of ``LINES`` lines of ``paged_attention``'s tile. Grid: (pieces, groups, blocks of lines)."""
    piece = tl.program_id(0)
    group = tl.program_id(1)
    line = tl.program_id(2) * LINES + tl.arange(0, LINES)
    first_token = tl.load(pieces + piece * 4 + 1)
    count = tl.load(pieces + piece * 4 + 2).to(tl.int32)
    token = line // GROUP
    is_line = token < count
    dim = tl.arange(0, VALUE_BLOCK)
    is_dim = dim < VALUE_DIM
    split = (piece * tl.num_programs(1) + group) * SPLITS + tl.arange(0, SPLITS)
    part = split.to(tl.int64)[:, None] * BLOCK_M + line[None, :]
    lse = tl.load(partial_lse + part, mask=is_line[None, :], other=float("-inf"))
    # Empty splits have stored no result.
    loaded = (lse > float("-inf"))[:, :, None] & is_dim[None, None, :]
    results = tl.load(partial_out + part[:, :, None] * VALUE_DIM + dim[None, None, :], mask=loaded, other=0.0)
    best = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(is_line, best, 0.0)[None, :])
    result = tl.sum(results * weights[:, :, None], 0) / tl.where(is_line, tl.sum(weights, 0), 1.0)[:, None]
    target = (first_token + token)[:, None] * out_stride + (group * GROUP + line % GROUP)[:, None] * VALUE_DIM
    tl.store(out + target + dim[None, :], result.to(out.dtype.element_ty), mask=is_line[:, None] & is_dim[None, :])
