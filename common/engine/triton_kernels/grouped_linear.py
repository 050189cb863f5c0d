"""A Triton kernel for the products of experts: rows sorted by expert, in blocks that belong to one expert each.

The number of blocks follows from the shapes alone, and the host reads nothing, so that a step can be captured in a CUDA
graph: there are as many blocks as the worst distribution of tokens needs, and the rest of them ends at once. Weights of
experts without tokens are not read.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.triton_kernels.tiles import power_of_two

if TYPE_CHECKING:
    from common.engine.models.layers import Operations
    from common.engine.models.lora.expert_stack import ExpertAddition, ExpertStack
    from common.engine.models.routing import Routing

#: Rows of a block: the least that ``tl.dot`` takes, and the most, for many tokens per expert.
MIN_ROWS, MAX_ROWS = 16, 64
COLUMNS = 64
#: Bytes of an input row that are multiplied at once.
DEPTH_BYTES = 128


@triton.jit
def grouped_linear(
    x,
    weight,
    out,
    x_rows,
    out_rows,
    factors,
    block_experts,
    block_firsts,
    block_ends,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):
    """Multiply a block of pairs of token and expert with some outputs of the expert. Grid: (blocks, column blocks).

    Pair p reads row ``x_rows[p]`` of ``x`` and writes row ``out_rows[p]`` of ``out``, times ``factors[p]``.
    """
    block = tl.program_id(0)
    first = tl.load(block_firsts + block)
    end = tl.load(block_ends + block)
    if first < end:
        expert = tl.load(block_experts + block).to(tl.int64)
        pair = first + tl.arange(0, ROWS)
        is_pair = pair < end
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < NUM_OUT
        source = x + tl.load(x_rows + pair, mask=is_pair, other=0).to(tl.int64)[:, None] * NUM_IN
        matrix = weight + expert * NUM_OUT * NUM_IN + column.to(tl.int64)[None, :] * NUM_IN
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, NUM_IN, DEPTH):
            place = start + tl.arange(0, DEPTH)
            is_input = place < NUM_IN
            inputs = tl.load(source + place[None, :], mask=is_pair[:, None] & is_input[None, :], other=0.0)
            weights = tl.load(matrix + place[:, None], mask=is_input[:, None] & is_column[None, :], other=0.0)
            sums = tl.dot(inputs, weights, sums, input_precision="ieee")
        if HAS_FACTORS:
            factor = tl.load(factors + pair, mask=is_pair, other=0.0)[:, None]
            sums = tl.where(factor == 0.0, 0.0, sums * factor)  # inf times 0 would be NaN
        target = out + tl.load(out_rows + pair, mask=is_pair, other=0).to(tl.int64)[:, None] * NUM_OUT + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


class Blocks(NamedTuple):
    """Blocks of pairs sorted by expert, each ``[blocks]`` int64: the expert, the first pair, the end of its pairs.

    A block whose first pair is not below the end is empty.
    """

    experts: Tensor
    firsts: Tensor
    ends: Tensor


def make_blocks(taken: Tensor, num_experts: int, rows: int) -> Blocks:
    """Divide the pairs into blocks of ``rows``, none of which has pairs of two experts.

    Args:
        taken: ``[pairs]`` int64, the expert of each pair.
    """
    counts = torch.zeros(num_experts, dtype=torch.int64, device=taken.device)
    counts.scatter_add_(0, taken, torch.ones_like(taken))
    ends, num_blocks = counts.cumsum(0), (counts + rows - 1) // rows
    blocks_end = num_blocks.cumsum(0)
    numbers = torch.arange(len(taken) // rows + min(num_experts, len(taken)), device=taken.device)
    experts = torch.searchsorted(blocks_end, numbers, right=True).clamp_max(num_experts - 1)
    within = numbers - (blocks_end - num_blocks)[experts]
    return Blocks(experts, (ends - counts)[experts] + within * rows, ends[experts])


class Pairs(NamedTuple):
    """Pairs of token and expert, sorted by expert; arguments of ``grouped_linear``.

    Attributes:
        x_rows, out_rows: ``[pairs]`` int64.
        factors: ``[pairs]`` float32, or None.
    """

    x_rows: Tensor
    out_rows: Tensor
    factors: Tensor | None

    def times(self, factors: Tensor | None) -> "Pairs":
        """Multiply the factors with others; None: with 1."""
        if factors is None or self.factors is None:
            return self._replace(factors=self.factors if factors is None else factors)
        return self._replace(factors=self.factors * factors)


class GroupedExperts:
    """``common.engine.models.feed_forward.ExpertProduct`` in Triton.

    Args:
        gate_up: ``[experts, 2 * width, hidden]``, contiguous.
        down: ``[experts, hidden, width]``, contiguous.
        additions: what LoRA adapters add to the results.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, additions: "Sequence[ExpertAddition]" = ()) -> None:
        assert gate_up.is_contiguous() and down.is_contiguous()
        self._gate_up = gate_up
        self._down = down
        self._additions = additions

    def with_additions(self, additions: "Sequence[ExpertAddition]") -> "GroupedExperts":
        return GroupedExperts(self._gate_up, self._down, additions)

    def __call__(self, x: Tensor, routing: "Routing", operations: "Operations") -> Tensor:
        num_rows, num_per_token = routing.experts.shape
        num_experts = len(self._gate_up)
        taken = routing.experts.flatten()
        order = taken.argsort(stable=True)
        rows = min(MAX_ROWS, max(MIN_ROWS, power_of_two(-(-len(taken) // num_experts))))
        blocks = make_blocks(taken, num_experts, rows)
        in_order = torch.arange(len(taken), device=x.device)
        tokens = order // num_per_token
        having = [_having_it(one.tokens, tokens, num_rows) for one in self._additions]
        pairs = Pairs(tokens, in_order, None)
        gate_up = torch.empty(len(taken), self._gate_up.shape[1], dtype=x.dtype, device=x.device)
        _launch(x, self._gate_up, gate_up, pairs, blocks, rows)
        for one, has_it in zip(self._additions, having, strict=True):
            _add(x, one.gate_up, gate_up, pairs.times(has_it), blocks, rows)
        inner = operations.silu_and_multiply(gate_up)
        pairs = Pairs(in_order, order, routing.weights.flatten()[order])
        down = torch.empty(len(taken), x.shape[1], dtype=torch.float32, device=x.device)
        _launch(inner, self._down, down, pairs, blocks, rows)
        for one, has_it in zip(self._additions, having, strict=True):
            _add(inner, one.down, down, pairs.times(has_it), blocks, rows)
        return down.view(num_rows, num_per_token, -1).sum(dim=1).to(x.dtype)


def _having_it(which: Tensor | None, tokens: Tensor, num_tokens: int) -> Tensor | None:
    """Return 1.0 for each pair in ``tokens`` whose token is one of ``which``, and 0.0 for others; None: 1.0 for all."""
    if which is None:
        return None
    has_it = torch.zeros(num_tokens, dtype=torch.float32, device=tokens.device)
    return has_it.index_fill_(0, which, 1.0)[tokens]


def _add(x: Tensor, stack: "ExpertStack | None", out: Tensor, pairs: Pairs, blocks: Blocks, rows: int) -> None:
    """Add to ``out`` what an adapter adds to the product of the same arguments; nothing if ``stack`` is None."""
    if stack is None:
        return
    places = stack.places[blocks.experts]
    # Blocks of experts that the adapter does not change are empty.
    own = Blocks(places.clamp_min(0), blocks.firsts, torch.where(places < 0, blocks.firsts, blocks.ends))
    in_order = torch.arange(len(pairs.x_rows), device=x.device)
    low = torch.empty(len(in_order), stack.down.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, stack.down, low, Pairs(pairs.x_rows, in_order, None), own, rows)
    added = torch.zeros_like(out)
    _launch(low, stack.up, added, pairs._replace(x_rows=in_order), own, rows)
    out += added


def _launch(x: Tensor, weight: Tensor, out: Tensor, pairs: Pairs, blocks: Blocks, rows: int) -> None:
    """Launch ``grouped_linear``."""
    assert x.is_contiguous()
    _, num_out, num_in = weight.shape
    x_rows, out_rows, factors = pairs
    grouped_linear[(len(blocks.experts), -(-num_out // COLUMNS))](
        *(x, weight, out, x_rows, out_rows, out if factors is None else factors, *blocks),
        NUM_IN=num_in,
        NUM_OUT=num_out,
        ROWS=rows,
        COLUMNS=COLUMNS,
        DEPTH=min(DEPTH_BYTES // x.itemsize, max(16, power_of_two(num_in))),
        HAS_FACTORS=factors is not None,
        num_warps=4,
        num_stages=3,
    )
