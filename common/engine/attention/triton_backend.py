"""The triton backend: own kernels over paged KV, for CUDA; in Triton's interpreter also for the CPU, to test them.

A layer needs one launch to normalise, rotate and write its keys and values, and one each for short and long rows; a
further one merges the results where their keys are split. Nothing waits for the device, and the grids of a step depend
on the number of its pieces, not on the lengths of short rows, as decode rows are.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.protocol import LayerParams, Pair, RotatingAttention
from common.engine.batch import DecodeRows, StepBatch, cut_into_pieces
from common.engine.device_copies import to_device
from common.engine.kv_pool import PAGE_DTYPES, KVPool, LayerKV
from common.engine.triton_kernels.attention import MAX_SPLITS, merge_splits, paged_attention, write_kv
from common.engine.triton_kernels.elementwise import KVPlaces, launch_norm_and_rotate
from common.engine.triton_kernels.tiles import (
    SHARED_BYTES,
    Tile,
    TileShape,
    block_of,
    choose_tile,
    heads_of_a_program,
    power_of_two,
    shared_bytes_of,
    stored_tiles,
)

#: Keys from which on one more split pays.
MIN_SPLIT_KEYS = 256
#: The most results of splits that one program merges at once, unless one line alone has more.
MERGED_AT_ONCE = 16


class TritonAttention:
    """``AttentionBackend`` in Triton; ``num_heads`` counts the model's query heads.

    Args:
        num_programs: programs that keep the device busy; keys of decode rows are split until there are as many, those
            of prompts as long as there are at most half as many.
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
        assert all(one.scale_for(layout.head_dim) > 0 for one in params), "the greatest score must stay the greatest"
        self.pool = pool
        self.params = params
        # A wide value leaves registers for few query heads.
        self.group = heads_of_a_program(num_heads // layout.num_kv_heads, layout.value_dim)
        self.num_groups = num_heads // self.group
        if tiles is None:
            tiles = stored_tiles(torch.cuda.get_device_name(pool.device)) if is_cuda else {}
        shared_bytes = shared_bytes_of(pool.device) if is_cuda else SHARED_BYTES
        dtype = PAGE_DTYPES[layout.dtype]
        self.extend_tile, self.decode_tile = (
            choose_tile(TileShape(is_decode, dtype, layout.head_dim, self.group, layout.value_dim), tiles, shared_bytes)
            for is_decode in (False, True)
        )
        if num_programs is None:
            num_programs = 2 * torch.cuda.get_device_properties(pool.device).multi_processor_count if is_cuda else 16
        self._num_programs = num_programs

    @property
    def can_rotate(self) -> bool:
        """Whether keys and values have one size and the model's number format."""
        layout = self.pool.layout
        return layout.stored_dims == (layout.head_dim, layout.head_dim) and not layout.has_scales

    def prepare(self, batch: StepBatch) -> "TritonStep":
        is_short = batch.rows.num_new <= self.decode_tile.block_m // self.group
        shorts, longs = np.flatnonzero(is_short), np.flatnonzero(~is_short)
        passes: list[Pass] = []
        if len(shorts):
            passes.append(self._pass(batch, shorts, is_decode=True))
        if len(longs):
            passes.append(self.extend_pass(batch, longs))
        return TritonStep(self, batch, passes)

    def extend_pass(self, batch: StepBatch, rows: np.ndarray) -> "Pass":
        """The pass of rows with more new tokens than a tile of decode rows holds."""
        return self._pass(batch, rows, is_decode=False)

    def prepare_decode(self, rows: DecodeRows) -> "TritonStep":
        first = torch.arange(len(rows.slots), device=rows.slots.device)
        pieces = torch.stack((rows.slots, first, torch.ones_like(first), rows.positions), dim=1)
        num_splits = self.num_splits(len(pieces), self._capacity, is_decode=True)
        one = AttentionPass(self, rows.page_table, pieces, self.decode_tile, num_splits, num_lines=self.group)
        return TritonStep(self, rows, [one])

    def _pass(self, batch: StepBatch, rows: np.ndarray, *, is_decode: bool) -> "AttentionPass":
        """The pass of some rows of a batch."""
        tile = self.decode_tile if is_decode else self.extend_tile
        max_tokens = self._capacity if is_decode else int(batch.lengths[rows].max())
        pieces = cut_into_pieces(batch, rows, tile.block_m // self.group)
        num_lines = int(pieces[:, 2].max()) * self.group
        num_splits = self.num_splits(len(pieces), max_tokens, is_decode=is_decode)
        on_device = to_device(pieces.numpy(), batch.positions.device)
        return AttentionPass(self, batch.page_table, on_device, tile, num_splits, num_lines=num_lines)

    @property
    def _capacity(self) -> int:
        """Tokens of the pool, which bound every length, so that the number of splits is the same in every step."""
        return self.pool.num_pages * self.pool.layout.page_size

    def num_splits(self, num_pieces: int, max_tokens: int, *, is_decode: bool) -> int:
        """Return into how many splits the keys of every piece are divided: a power of two."""
        num_programs = num_pieces * self.num_groups
        if is_decode:
            wanted = power_of_two(-(-self._num_programs // num_programs))
        else:  # a large tile keeps a multiprocessor busy by itself, and its splits are large to merge
            wanted = power_of_two(self._num_programs // 2 // num_programs + 1) // 2
        useful = max(1, max_tokens // MIN_SPLIT_KEYS)
        return max(1, min(wanted, power_of_two(useful + 1) // 2, MAX_SPLITS))


class TritonStep(RotatingAttention):
    """One step of ``TritonAttention``; rows are cut into pieces once for all layers."""

    def __init__(self, backend: TritonAttention, batch: StepBatch | DecodeRows, passes: "Sequence[Pass]") -> None:
        self._backend = backend
        self._batch = batch
        self._passes = passes

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._write(layer, k, v)
        return self._attend(layer, q)

    @property
    def can_rotate(self) -> bool:
        return self._backend.can_rotate

    def rotate_and_extend(self, layer: int, qkv: Tensor, norms: Pair | None, rotary: Pair, eps: float) -> Tensor:
        keys, values, _, _ = self._backend.pool.layer(layer)
        num_heads = self._backend.group * self._backend.num_groups
        places = KVPlaces(keys, values, self._batch.token_pages, self._batch.token_offsets)
        launch_norm_and_rotate(qkv, num_heads, norms, rotary, eps, places=places)
        return self._attend(layer, qkv[:, :num_heads])

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        out = torch.empty(*q.shape[:2], self._backend.pool.layout.value_dim, dtype=q.dtype, device=q.device)
        for one in self._passes:
            one.attend(layer, q, out)
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        layout, kv = self._backend.pool.layout, PagePointers.of(self._backend.pool.layer(layer))
        num_tokens, kv_heads, head_dim = k.shape
        assert k.stride()[1:] == (head_dim, 1)
        assert layout.is_latent or v.stride()[1:] == (layout.value_dim, 1)
        write_kv[(num_tokens,)](
            *(k, v, *kv.parts, self._batch.token_pages, self._batch.token_offsets),
            *(k.stride(0), v.stride(0), *kv.strides),
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=layout.value_dim,
            HEADS_BLOCK=power_of_two(kv_heads),
            DIM_BLOCK=power_of_two(head_dim),
            VALUE_BLOCK=power_of_two(layout.value_dim),
            IS_LATENT=layout.is_latent,
            HAS_SCALES=layout.has_scales,
        )


class PagePointers(NamedTuple):
    """Arguments by which kernels find one layer's pages.

    Attributes:
        parts: keys, values and their scales; numbers in FP8 as bytes, and anything in place of scales without them.
        strides: of a page, of a head's keys, and of a head's values, in elements.
    """

    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, kv: LayerKV) -> "PagePointers":
        keys, values, key_scales, value_scales = kv
        strides = (keys.stride(0), keys.stride(1), values.stride(1))
        if key_scales is None or value_scales is None:
            return cls((keys, values, keys, values), strides)
        return cls((keys.view(torch.uint8), values.view(torch.uint8), key_scales, value_scales), strides)


class Pass(Protocol):
    """The launches of one step and layer for some of its rows."""

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Write the attention of this pass's rows into ``out`` ``[N, heads, value_dim]``."""
        ...


class AttentionPass:
    """The launches of one step and layer for rows that share a tile.

    Args:
        page_table: int32 on the device; its lines are those that the pieces name.
        pieces: ``[P, 4]`` int64 on the device, as in ``cut_into_pieces``.
        num_splits: into which the keys of every piece are divided.
        num_lines: lines of the fullest piece.
    """

    def __init__(
        self,
        backend: TritonAttention,
        page_table: Tensor,
        pieces: Tensor,
        tile: Tile,
        num_splits: int,
        *,
        num_lines: int,
    ) -> None:
        self._backend = backend
        self._tile = tile
        self._page_table = page_table
        self._pieces = pieces
        self._num_splits = num_splits
        self._num_lines = num_lines

    @cached_property
    def _partial(self) -> tuple[Tensor, Tensor]:
        """Results and log-sum-exp of each split; the layers of a step use the same memory one after another."""
        layout, device = self._backend.pool.layout, self._pieces.device
        num_parts = len(self._pieces) * self._backend.num_groups * self._num_splits * self._tile.block_m
        return (
            torch.empty(num_parts, layout.value_dim, dtype=torch.float32, device=device),
            torch.empty(num_parts, dtype=torch.float32, device=device),
        )

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        kv = PagePointers.of(self._backend.pool.layer(layer))
        params, layout = self._backend.params[layer], self._backend.pool.layout
        head_dim, value_dim, num_groups = layout.head_dim, layout.value_dim, self._backend.num_groups
        main_dim = min(head_dim, value_dim)
        assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous()
        is_split = self._num_splits > 1
        partial_out, partial_lse = self._partial if is_split else (out, out)  # unused without splits
        shape = {
            "GROUP": self._backend.group,
            "VALUE_DIM": value_dim,
            "VALUE_BLOCK": block_of(value_dim),
            "BLOCK_M": self._tile.block_m,
        }
        paged_attention[(len(self._pieces), num_groups, self._num_splits)](
            *(q, *kv.parts, out, self._pieces, self._page_table),
            *(out if params.sinks is None else params.sinks, partial_out, partial_lse),
            *(q.stride(0), out.stride(0), *kv.strides, self._page_table.stride(0)),
            *(self._num_splits, params.window or 0, params.scale_for(head_dim), params.soft_cap or 1.0),
            **shape,
            PROGRAMS=num_groups // layout.num_kv_heads,
            HEAD_DIM=head_dim,
            MAIN_DIM=main_dim,
            MAIN_BLOCK=block_of(main_dim),
            REST_BLOCK=block_of(head_dim - main_dim),
            PAGE_SIZE=layout.page_size,
            BLOCK_N=self._tile.block_n,
            HAS_WINDOW=params.window is not None,
            HAS_SINKS=params.sinks is not None,
            HAS_SOFT_CAP=params.soft_cap is not None,
            IS_LATENT=layout.is_latent,
            HAS_SCALES=layout.has_scales,
            IS_SPLIT=is_split,
            num_warps=self._tile.num_warps,
            num_stages=self._tile.num_stages,
        )
        if is_split:
            lines = min(power_of_two(self._num_lines), max(1, MERGED_AT_ONCE // self._num_splits))
            merge_splits[(len(self._pieces), num_groups, -(-self._num_lines // lines))](
                *(out, self._pieces, partial_out, partial_lse, out.stride(0)),
                **shape,
                SPLITS=self._num_splits,
                LINES=lines,
                num_warps=max(4, shape["VALUE_BLOCK"] // 32),
            )
