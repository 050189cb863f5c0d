"""The triton backend: own kernels over paged KV, for CUDA; in Triton's interpreter also for the CPU, to test them.

A step needs one launch to write its keys and values, one for rows of several tokens, and two for decode rows. Nothing
waits for the device, and the grids of a step depend on the number of its pieces, not on the lengths of decode rows.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.protocol import LayerParams
from common.engine.batch import DecodeRows, StepBatch, cut_into_pieces
from common.engine.device_copies import to_device
from common.engine.kv_pool import KVPool
from common.engine.triton_kernels.attention import MAX_SPLITS, merge_splits, paged_attention, write_kv
from common.engine.triton_kernels.tiles import Tile, TileShape, choose_tile, power_of_two, stored_tiles

#: Keys from which on one more split pays.
MIN_SPLIT_KEYS = 256


class TritonAttention:
    """``AttentionBackend`` in Triton; ``num_heads`` counts the model's query heads.

    Args:
        num_programs: programs that keep the device busy; keys are split until there are as many.
        tiles: tile sizes by ``TileShape.name``; None takes those measured on this kind of device.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        params: LayerParams,
        *,
        num_programs: int | None = None,
        tiles: dict[str, Tile] | None = None,
    ) -> None:
        layout, is_cuda = pool.layout, pool.device.type == "cuda"
        self.pool = pool
        self.params = params
        self.group = num_heads // layout.num_kv_heads
        if tiles is None:
            tiles = stored_tiles(torch.cuda.get_device_name(pool.device)) if is_cuda else {}
        dtype = pool.tensor.dtype
        self.extend_tile, self.decode_tile = (
            choose_tile(TileShape(is_decode, dtype, layout.head_dim, self.group), tiles) for is_decode in (False, True)
        )
        if num_programs is None:
            num_programs = 2 * torch.cuda.get_device_properties(pool.device).multi_processor_count if is_cuda else 16
        self._num_programs = num_programs

    def prepare(self, batch: StepBatch) -> "TritonStep":
        is_short = batch.rows.num_new <= self.decode_tile.block_m // self.group
        shorts, longs = np.flatnonzero(is_short), np.flatnonzero(~is_short)
        passes = []
        if len(shorts):
            passes.append(self._pass(batch, shorts, self.decode_tile, self._capacity))
        if len(longs):
            passes.append(self._pass(batch, longs, self.extend_tile, int(batch.lengths[longs].max())))
        return TritonStep(self, batch, passes)

    def prepare_decode(self, rows: DecodeRows) -> "TritonStep":
        first = torch.arange(len(rows.slots), device=rows.slots.device)
        pieces = torch.stack((rows.slots, first, torch.ones_like(first), rows.positions), dim=1)
        one = AttentionPass(self, rows.page_table, pieces, self.decode_tile, self._capacity, num_lines=self.group)
        return TritonStep(self, rows, [one])

    def _pass(self, batch: StepBatch, rows: np.ndarray, tile: Tile, max_tokens: int) -> "AttentionPass":
        """The pass of some rows of a batch, which have at most ``max_tokens`` tokens."""
        pieces = cut_into_pieces(batch, rows, tile.block_m // self.group)
        num_lines = int(pieces[:, 2].max()) * self.group
        on_device = to_device(pieces.numpy(), batch.positions.device)
        return AttentionPass(self, batch.page_table, on_device, tile, max_tokens, num_lines=num_lines)

    @property
    def _capacity(self) -> int:
        """Tokens of the pool, which bound every length, so that the number of splits is the same in every step."""
        return self.pool.num_pages * self.pool.layout.page_size

    def num_splits(self, num_pieces: int, max_tokens: int) -> int:
        """Return into how many splits the keys of every piece are divided: a power of two."""
        wanted = -(-self._num_programs // (num_pieces * self.pool.layout.num_kv_heads))
        useful = max(1, max_tokens // MIN_SPLIT_KEYS)
        return min(power_of_two(wanted), power_of_two(useful + 1) // 2, MAX_SPLITS)


class TritonStep:
    """One step of ``TritonAttention``; rows are cut into pieces once for all layers."""

    def __init__(
        self, backend: TritonAttention, batch: StepBatch | DecodeRows, passes: "Sequence[AttentionPass]"
    ) -> None:
        self._backend = backend
        self._batch = batch
        self._passes = passes

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._write(layer, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for one in self._passes:
            one.attend(layer, q, out)
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self._backend.pool.layer(layer)
        num_tokens, kv_heads, head_dim = k.shape
        assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
        write_kv[(num_tokens,)](
            *(k, v, keys, values, self._batch.token_pages, self._batch.token_offsets),
            *(k.stride(0), v.stride(0), keys.stride(0), keys.stride(1)),
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HEADS_BLOCK=power_of_two(kv_heads),
            DIM_BLOCK=power_of_two(head_dim),
        )


class AttentionPass:
    """The launches of one step and layer for rows that share a tile.

    Args:
        page_table: int32 on the device; its lines are those that the pieces name.
        pieces: ``[P, 4]`` int64 on the device, as in ``cut_into_pieces``.
        max_tokens: bound of the rows' lengths.
        num_lines: lines of the fullest piece.
    """

    def __init__(
        self,
        backend: TritonAttention,
        page_table: Tensor,
        pieces: Tensor,
        tile: Tile,
        max_tokens: int,
        *,
        num_lines: int,
    ) -> None:
        self._backend = backend
        self._tile = tile
        self._page_table = page_table
        self._pieces = pieces
        self._num_splits = backend.num_splits(len(pieces), max_tokens)
        self._num_lines = num_lines

    @cached_property
    def _partial(self) -> tuple[Tensor, Tensor]:
        """Results and log-sum-exp of each split; the layers of a step use the same memory one after another."""
        layout, device = self._backend.pool.layout, self._pieces.device
        num_parts = len(self._pieces) * layout.num_kv_heads * self._num_splits * self._tile.block_m
        return (
            torch.empty(num_parts, layout.head_dim, dtype=torch.float32, device=device),
            torch.empty(num_parts, dtype=torch.float32, device=device),
        )

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Write the attention of this pass's rows into ``out``; both are ``[N, heads, head_dim]``."""
        keys, values = self._backend.pool.layer(layer)
        params, layout = self._backend.params[layer], self._backend.pool.layout
        head_dim = layout.head_dim
        assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous()
        is_split = self._num_splits > 1
        partial_out, partial_lse = self._partial if is_split else (out, out)  # unused without splits
        shape = {
            "GROUP": self._backend.group,
            "HEAD_DIM": head_dim,
            "DIM_BLOCK": max(16, power_of_two(head_dim)),
            "BLOCK_M": self._tile.block_m,
        }
        paged_attention[(len(self._pieces), layout.num_kv_heads, self._num_splits)](
            *(q, keys, values, out, self._pieces, self._page_table),
            *(out if params.sinks is None else params.sinks, partial_out, partial_lse),
            *(q.stride(0), out.stride(0), keys.stride(0), keys.stride(1), self._page_table.stride(0)),
            *(self._num_splits, params.window or 0, params.scale_for(head_dim), params.soft_cap or 1.0),
            **shape,
            PAGE_SIZE=layout.page_size,
            BLOCK_N=self._tile.block_n,
            HAS_WINDOW=params.window is not None,
            HAS_SINKS=params.sinks is not None,
            HAS_SOFT_CAP=params.soft_cap is not None,
            IS_SPLIT=is_split,
            num_warps=self._tile.num_warps,
            num_stages=self._tile.num_stages,
        )
        if is_split:
            merge_splits[(len(self._pieces), layout.num_kv_heads, self._num_lines)](
                *(out, self._pieces, partial_out, partial_lse, out.stride(0), self._num_splits), **shape
            )
