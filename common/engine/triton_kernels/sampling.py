"""Triton kernels that draw the tokens of a step: four launches for any number of rows, and no sort.

They draw the tokens that ``common.engine.sampling.sampler`` draws on the CPU, since the sums that decide are sums of
whole numbers (see ``weights``). A token's *key* is the bits of its scaled logit's absolute value, an integer that grows
as tokens become less likely. Equal logits have equal keys.

1. ``find_maxima``: the largest logit of each block of a row.
2. ``weigh_blocks``: how many tokens of each block have keys up to each of eight edges, and their weights.
3. ``gather_likely``: a row with top-k or top-p takes the first edge up to which there is all that may be kept, and the
   tokens up to there move together, in order of token id, if there is room for them.
4. ``draw``: finds the last kept key by bisection between keys that occur, then the token by running sums. It reads the
   gathered tokens, or the whole row if they are too many, as in a nearly flat distribution.

Every operation on floating-point numbers must be rounded by itself, so all launches have ``enable_fp_fusion=False``.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from common.engine.sampling.weights import LEAST_SCALED, POWER, WEIGHT_BITS, factor_of, least_kept_by_min_p
from common.engine.triton_kernels.tiles import SamplingTile, power_of_two, stored_sampling_tile
from common.sampling_params import SamplingParams

NUM_EDGES = 8
_NUM_EDGES = tl.constexpr(NUM_EDGES)
#: Scaled logits between two edges. Tokens beyond the last edge have the weight 0.
_EDGE_STEP = tl.constexpr(-LEAST_SCALED / NUM_EDGES)
_LEAST_SCALED = tl.constexpr(LEAST_SCALED)
_WEIGHT_BITS = tl.constexpr(WEIGHT_BITS)
_C5, _C4, _C3, _C2, _C1 = (tl.constexpr(coefficient) for coefficient in POWER)
#: Beyond the key of every number.
_NO_KEY = tl.constexpr(0x7FFFFFFF)
#: The lines of ``row_inputs``.
_FACTOR, _MIN_P_KEY, _TOP_K, _TOP_P, _UNIFORM = (tl.constexpr(line) for line in range(5))


@triton.jit
def _keys(logits, best, factor):
    return tl.abs((logits - best) * factor).to(tl.int32, bitcast=True)


@triton.jit
def _weights(keys):
    """Return the weights of keys in int64; the definition is ``torch_weights``."""
    scaled = tl.maximum(-keys.to(tl.float32, bitcast=True), _LEAST_SCALED)
    whole = scaled.to(tl.int32)
    whole -= (whole.to(tl.float32) > scaled).to(tl.int32)
    part = scaled - whole.to(tl.float32)
    power = part * _C5
    power = (power + _C4) * part
    power = (power + _C3) * part
    power = (power + _C2) * part
    power = (power + _C1) * part
    power = power + 1.0
    bits = power.to(tl.int32, bitcast=True) + ((whole + _WEIGHT_BITS) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _edge_keys(edge):
    return ((edge + 1).to(tl.float32) * _EDGE_STEP).to(tl.int32, bitcast=True)


@triton.jit
def _input(inputs, line, row):
    return tl.load(inputs + line * tl.num_programs(0) + row)


@triton.jit
def _is_ranked(inputs, row):
    """Whether a random row has top-k or top-p."""
    return (_input(inputs, _TOP_K, row) > 0) | (_input(inputs, _TOP_P, row) < 1)


@triton.jit
def _block_maxima(maxima, row, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.load(maxima + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=float("-inf"))


@triton.jit
def find_maxima(logits, maxima, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid of this and the next two kernels: (rows, blocks). ``maxima``: ``[rows, blocks]`` float32."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + place, mask=place < VOCAB, other=float("-inf"))
    tl.store(maxima + row * tl.num_programs(1) + block, tl.max(found, 0))


@triton.jit
def weigh_blocks(
    logits,
    inputs,
    maxima,
    counts,
    masses,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Count and weigh one block's tokens up to each edge: ``[rows, blocks, edges]`` int32 and int64.

    In rows without top-k and top-p the last edge is that of min-p.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    factor = _input(inputs, _FACTOR, row).to(tl.float32)
    best = tl.max(_block_maxima(maxima, row, NUM_BLOCKS, BLOCKS), 0)
    if (factor == 0) | (best == float("-inf")):
        return
    place = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + place, mask=place < VOCAB, other=float("-inf"))
    keys = _keys(found, best, factor)
    weights = _weights(keys)
    target = (row * NUM_BLOCKS + block) * _NUM_EDGES
    if _is_ranked(inputs, row):
        for edge in tl.static_range(_NUM_EDGES):
            is_within = keys <= _edge_keys(tl.full([], edge, tl.int32))
            tl.store(counts + target + edge, tl.sum(is_within.to(tl.int32), 0))
            tl.store(masses + target + edge, tl.sum(tl.where(is_within, weights, 0), 0))
    else:
        is_kept = keys <= _input(inputs, _MIN_P_KEY, row).to(tl.int32)
        tl.store(masses + target + _NUM_EDGES - 1, tl.sum(tl.where(is_kept, weights, 0), 0))


@triton.jit
def gather_likely(
    logits,
    inputs,
    maxima,
    counts,
    masses,
    edges,
    sizes,
    likely,
    likely_ids,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Choose the row's edge, and move one block's tokens up to it to ``likely`` and ``likely_ids``.

    These are ``[rows, CAPACITY]``. ``edges`` and ``sizes`` ``[rows]`` get the edge's key, and how many tokens are up to
    there.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    factor = _input(inputs, _FACTOR, row).to(tl.float32)
    best = tl.max(_block_maxima(maxima, row, NUM_BLOCKS, BLOCKS), 0)
    if (factor == 0) | (best == float("-inf")):
        return
    if not _is_ranked(inputs, row):
        return
    edge = tl.arange(0, _NUM_EDGES)
    blocks = tl.arange(0, BLOCKS)[:, None]
    cell = (row * NUM_BLOCKS + blocks) * _NUM_EDGES + edge[None, :]
    count = tl.load(counts + cell, mask=blocks < NUM_BLOCKS, other=0)
    mass = tl.load(masses + cell, mask=blocks < NUM_BLOCKS, other=0)
    counts_up_to, mass_up_to = tl.sum(count, 0), tl.sum(mass, 0)
    total = tl.max(mass_up_to, 0).to(tl.float64)
    top_k = _input(inputs, _TOP_K, row).to(tl.int32)
    has_enough = mass_up_to.to(tl.float64) >= _input(inputs, _TOP_P, row) * total
    has_enough = tl.where(top_k > 0, counts_up_to >= top_k, has_enough)
    chosen = tl.min(tl.where(has_enough, edge, _NUM_EDGES - 1), 0)
    size = tl.sum(tl.where(edge == chosen, counts_up_to, 0), 0)
    last_key = _edge_keys(chosen)
    if block == 0:
        tl.store(edges + row, last_key)
        tl.store(sizes + row, size)
    if size > CAPACITY:
        return
    start = tl.sum(tl.sum(tl.where((edge[None, :] == chosen) & (blocks < block), count, 0), 1), 0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + place, mask=place < VOCAB, other=float("-inf"))
    is_likely = _keys(found, best, factor) <= last_key
    target = row * CAPACITY + start + tl.cumsum(is_likely.to(tl.int32), 0) - 1
    tl.store(likely + target, found, mask=is_likely)
    tl.store(likely_ids + target, place, mask=is_likely)


@triton.jit
def _sums_up_to(values, size, best, factor, key, TILE: tl.constexpr):
    """Return the number and the weight of tokens with keys up to ``key``, and the keys that occur around it.

    Of these, the first is the last one up to ``key`` (-1: none), the second is the first one beyond it.
    """
    count = tl.zeros([TILE], dtype=tl.int32)
    mass = tl.zeros([TILE], dtype=tl.int64)
    below = tl.full([TILE], -1, dtype=tl.int32)
    above = tl.full([TILE], _NO_KEY, dtype=tl.int32)
    for first in range(0, size, TILE):
        place = first + tl.arange(0, TILE)
        keys = _keys(tl.load(values + place, mask=place < size, other=float("-inf")), best, factor)
        is_within = keys <= key
        count += is_within.to(tl.int32)
        mass += tl.where(is_within, _weights(keys), 0)
        below = tl.maximum(below, tl.where(is_within, keys, -1))
        above = tl.minimum(above, tl.where(is_within, _NO_KEY, keys))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _last_kept_key(values, size, best, factor, edge, total, top_k, top_p, TILE: tl.constexpr):
    """Return the last key that top-k, and top-p of what it leaves, keep: a key that occurs, or ``edge``.

    ``low`` never keeps enough and ``high`` always does.
    """
    kept_mass = total.to(tl.float64)
    high = edge + 1
    if top_k > 0:
        low = tl.full([], -1, tl.int32)
        while high - low > 1:
            count, mass, below, above = _sums_up_to(values, size, best, factor, low + (high - low) // 2, TILE)
            is_enough = count >= top_k
            high = tl.where(is_enough, below, high)
            low = tl.where(is_enough, low, above - 1)
        if high <= edge:  # else the rest of the tokens have no weight
            count, mass, below, above = _sums_up_to(values, size, best, factor, high - 1, TILE)
            kept_mass = (mass + (top_k - count) * _weights(high)).to(tl.float64)
    high = tl.minimum(high, edge)
    if top_p < 1:
        needed = top_p * kept_mass
        low = tl.full([], -1, tl.int32)
        while high - low > 1:
            count, mass, below, above = _sums_up_to(values, size, best, factor, low + (high - low) // 2, TILE)
            is_enough = mass.to(tl.float64) >= needed
            high = tl.where(is_enough, below, high)
            low = tl.where(is_enough, low, above - 1)
    return tl.maximum(high, 0)


@triton.jit
def draw(
    logits,
    inputs,
    maxima,
    masses,
    edges,
    sizes,
    likely,
    likely_ids,
    tokens,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Draw the token of one row. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    block_maxima = _block_maxima(maxima, row, NUM_BLOCKS, BLOCKS)
    best = tl.max(block_maxima, 0)
    block = tl.arange(0, BLOCKS)
    first_best = tl.min(tl.where(block_maxima == best, block, NUM_BLOCKS - 1), 0)
    place = first_best * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * row_stride + place, mask=place < VOCAB, other=float("-inf"))
    token = tl.min(tl.where(found == best, place, VOCAB - 1), 0)
    factor = _input(inputs, _FACTOR, row).to(tl.float32)
    if (factor == 0) | (best == float("-inf")):
        tl.store(tokens + row, token.to(tl.int64))
        return

    values = logits + row * row_stride
    size = tl.full([], VOCAB, tl.int32)
    is_gathered = tl.full([], 0, tl.int1)
    last_key = _input(inputs, _MIN_P_KEY, row).to(tl.int32)
    cells = (row * NUM_BLOCKS + block) * _NUM_EDGES + _NUM_EDGES - 1
    running = tl.cumsum(tl.load(masses + cells, mask=block < NUM_BLOCKS, other=0), 0)
    total = tl.max(running, 0)
    first = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int64)
    if _is_ranked(inputs, row):
        is_gathered = tl.load(sizes + row) <= CAPACITY
        if is_gathered:
            values = likely + row * CAPACITY
            size = tl.load(sizes + row)
        top_k = _input(inputs, _TOP_K, row).to(tl.int32)
        top_p = _input(inputs, _TOP_P, row)
        edge = tl.load(edges + row)
        kept = _last_kept_key(values, size, best, factor, edge, total, top_k, top_p, CAPACITY)
        last_key = tl.minimum(last_key, kept)
        _count, total, _below, _above = _sums_up_to(values, size, best, factor, last_key, CAPACITY)
        target = _input(inputs, _UNIFORM, row) * total.to(tl.float64)
    else:  # the token is in the block where the running sum exceeds the target
        target = _input(inputs, _UNIFORM, row) * total.to(tl.float64)
        is_before = (running.to(tl.float64) <= target) & (block < NUM_BLOCKS)
        first = tl.sum(is_before.to(tl.int32), 0) * BLOCK
        before = tl.max(tl.where(is_before, running, 0), 0)

    at = size
    while (first < size) & (at == size):
        entry = first + tl.arange(0, CAPACITY)
        mask = entry < size
        keys = _keys(tl.load(values + entry, mask=mask, other=float("-inf")), best, factor)
        sums = before + tl.cumsum(tl.where(keys <= last_key, _weights(keys), 0), 0)
        at = tl.min(tl.where((sums.to(tl.float64) > target) & mask, entry, size), 0)
        before = tl.max(sums, 0)
        first += CAPACITY
    if at < size:  # else rounding led past the last token with a weight
        token = at
        if is_gathered:
            token = tl.load(likely_ids + row * CAPACITY + at)
    tl.store(tokens + row, token.to(tl.int64))


def row_inputs(params: Sequence[SamplingParams], uniforms: NDArray[np.float64], vocab: int) -> NDArray[np.float64]:
    """Return what the kernels need of R rows' parameters, ``[5, R]``; a factor of 0 means greedy.

    Args:
        uniforms: ``[R]`` in [0, 1), the random number of each row.
    """
    factors = [0.0 if p.is_greedy else factor_of(p) for p in params]
    min_p_keys = np.abs(np.array([least_kept_by_min_p(p) for p in params], np.float32)).view(np.int32)
    top_ks = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    return np.array([factors, min_p_keys, top_ks, [p.top_p for p in params], uniforms], np.float64)


@cache
def _tile_on(device: torch.device) -> SamplingTile:
    return stored_sampling_tile(torch.cuda.get_device_name(device)) if device.type == "cuda" else SamplingTile()


def draw_tokens(logits: Tensor, inputs: Tensor, tile: SamplingTile | None = None) -> Tensor:
    """Return one token ``[R]`` int64 for each row of ``logits`` ``[R, vocab]`` float32, which stay as they are.

    Shapes and launches depend on R alone, so that CUDA graphs can hold this function.

    Args:
        inputs: ``[5, R]`` float64 of ``row_inputs``, on the same device.
        tile: None takes the one that was measured on this kind of device. The tokens do not depend on it.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and inputs.is_contiguous()
    tile = tile or _tile_on(logits.device)
    num_blocks = -(-vocab // tile.block)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    maxima = empty(torch.float32, num_blocks)
    counts, masses = (empty(dtype, num_blocks, NUM_EDGES) for dtype in (torch.int32, torch.int64))
    edges, sizes, tokens = empty(torch.int32), empty(torch.int32), empty(torch.int64)
    likely, likely_ids = empty(torch.float32, tile.capacity), empty(torch.int32, tile.capacity)
    row_stride = logits.stride(0)
    shape = {"VOCAB": vocab, "BLOCK": tile.block, "enable_fp_fusion": False}
    blocks = {"NUM_BLOCKS": num_blocks, "BLOCKS": power_of_two(num_blocks)}
    grid = (num_rows, num_blocks)
    find_maxima[grid](logits, maxima, row_stride, **shape)
    weigh_blocks[grid](logits, inputs, maxima, counts, masses, row_stride, **shape, **blocks)
    chosen = (edges, sizes, likely, likely_ids)
    gather_likely[grid](
        logits, inputs, maxima, counts, masses, *chosen, row_stride, **shape, **blocks, CAPACITY=tile.capacity
    )
    draw[(num_rows,)](
        *(logits, inputs, maxima, masses, *chosen, tokens, row_stride),
        **(shape | blocks),
        CAPACITY=tile.capacity,
        num_warps=tile.num_warps,
    )
    return tokens
