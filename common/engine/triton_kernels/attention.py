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

#: Splits that ``merge_splits`` can merge; a power of two.
MAX_SPLITS = 64
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv(
    k,
    v,
    keys,
    values,
    token_pages,
    token_offsets,
    k_stride,
    v_stride,
    page_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Write the keys and values of one token into its page. Grid: (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    dim = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (head < KV_HEADS) & (dim < HEAD_DIM)
    page = tl.load(token_pages + token)
    target = page * page_stride + head * head_stride + tl.load(token_offsets + token) * HEAD_DIM + dim
    source = head * HEAD_DIM + dim
    tl.store(keys + target, tl.load(k + token * k_stride + source, mask=mask), mask=mask)
    tl.store(values + target, tl.load(v + token * v_stride + source, mask=mask), mask=mask)


@triton.jit
def _attend_block(
    total,
    best,
    weight,
    query,
    positions,
    keys,
    values,
    table,
    first_key,
    end_key,
    page_stride,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the keys from ``first_key`` on to the running softmax: weighted sum, greatest score, sum of weights.

    Without ``IS_MASKED`` every query of the tile sees every key of the block.
    """
    tokens = first_key + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM_BLOCK)
    # The table's entries past the row's pages are stale, and slots past its last token may hold NaN.
    if IS_MASKED:
        pages = tl.load(table + tokens // PAGE_SIZE, mask=tokens < end_key, other=0).to(tl.int64)
    else:
        pages = tl.load(table + tokens // PAGE_SIZE).to(tl.int64)
    places = (pages * page_stride + (tokens % PAGE_SIZE) * HEAD_DIM)[:, None] + dim[None, :]
    if IS_MASKED:
        loaded = (tokens < end_key)[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + places, mask=loaded, other=0.0)
        value = tl.load(values + places, mask=loaded, other=0.0)
    elif HEAD_DIM == DIM_BLOCK:
        key = tl.load(keys + places)
        value = tl.load(values + places)
    else:
        key = tl.load(keys + places, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(values + places, mask=(dim < HEAD_DIM)[None, :], other=0.0)

    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if HAS_SOFT_CAP:
        scores = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / soft_cap)))  # tanh, which has no portable name
    scores = scores * _LOG2_E
    if IS_MASKED:
        is_seen = (tokens[None, :] <= positions[:, None]) & (tokens < end_key)[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))

    new_best = tl.maximum(best, tl.max(scores, 1))
    # A query may see no key of this block and of those before it; -inf minus -inf would be NaN.
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - shift[:, None])
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
    out,
    pieces,
    page_table,
    sinks,
    partial_out,
    partial_lse,
    q_stride,
    out_stride,
    page_stride,
    head_stride,
    table_stride,
    num_splits,
    window,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend for one piece, one KV head and one split. Grid: (pieces, KV heads, splits).

    ``pieces`` holds four int64 each: row, first packed token, tokens (0: skip the piece), position of the first. The
    grid depends on no length: programs of splits past the end of a short row store only that they are empty.
    """
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(pieces + piece * 4)
    first_token = tl.load(pieces + piece * 4 + 1)
    count = tl.load(pieces + piece * 4 + 2).to(tl.int32)
    start = tl.load(pieces + piece * 4 + 3).to(tl.int32)
    if count == 0:
        return

    line = tl.arange(0, BLOCK_M)  # lines of the tile: the query heads of the first token, then those of the second
    token = line // GROUP
    head = kv_head * GROUP + line % GROUP
    positions = start + token
    dim = tl.arange(0, DIM_BLOCK)
    is_line = token < count
    mask = is_line[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(
        q + (first_token + token)[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0
    )

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

    total = tl.zeros([BLOCK_M, DIM_BLOCK], dtype=tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:
        if split == 0:  # a sink is one more key, whose value is 0
            best = tl.load(sinks + head).to(tl.float32) * _LOG2_E
            weight = tl.full([BLOCK_M], 1.0, dtype=tl.float32)

    keys += kv_head * head_stride
    values += kv_head * head_stride
    table = page_table + row * table_stride
    for first_key in range(first, full, BLOCK_N):
        total, best, weight = _attend_block(
            total, best, weight, query, positions, keys, values, table, first_key, end_key, page_stride,
            scale, soft_cap, window, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFT_CAP, False,
        )  # fmt: skip
    for first_key in range(full, end, BLOCK_N):
        total, best, weight = _attend_block(
            total, best, weight, query, positions, keys, values, table, first_key, end_key, page_stride,
            scale, soft_cap, window, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFT_CAP, True,
        )  # fmt: skip

    is_empty = weight == 0.0
    divisor = tl.where(is_empty, 1.0, weight)
    result = total / divisor[:, None]
    if IS_SPLIT:
        part = ((piece * tl.num_programs(1) + kv_head) * num_splits + split).to(tl.int64) * BLOCK_M + line
        tl.store(partial_lse + part, tl.where(is_empty, float("-inf"), best + tl.log2(divisor)), mask=is_line)
        tl.store(partial_out + part[:, None] * HEAD_DIM + dim[None, :], result, mask=mask & ~is_empty[:, None])
    else:
        target = (first_token + token)[:, None] * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    out,
    pieces,
    partial_out,
    partial_lse,
    out_stride,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge the splits of one line of ``paged_attention``'s tile. Grid: (pieces, KV heads, lines)."""
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    line = tl.program_id(2)
    first_token = tl.load(pieces + piece * 4 + 1)
    count = tl.load(pieces + piece * 4 + 2).to(tl.int32)
    token = line // GROUP
    if token >= count:
        return
    split = tl.arange(0, _MAX_SPLITS)
    dim = tl.arange(0, DIM_BLOCK)
    part = ((piece * tl.num_programs(1) + kv_head) * num_splits + split).to(tl.int64) * BLOCK_M + line
    lse = tl.load(partial_lse + part, mask=split < num_splits, other=float("-inf"))
    # Empty splits have stored no result.
    loaded = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    results = tl.load(partial_out + part[:, None] * HEAD_DIM + dim[None, :], mask=loaded, other=0.0)
    weights = tl.exp2(lse - tl.max(lse, 0))
    result = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    target = (first_token + token) * out_stride + (kv_head * GROUP + line % GROUP) * HEAD_DIM + dim
    tl.store(out + target, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
