"""A step's rows as arrays, computed once per step and read by every layer.

A row extends one slot, which has ``starts`` cached tokens, by ``num_new`` tokens. The new tokens of all rows are packed
one after another. Indices are computed on the host and copied to the device together.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.device_copies import to_device

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Rows on the host: R rows with N new tokens in total and page tables of W entries.

    Attributes:
        starts: ``[R]`` cached tokens before the row's first new token.
        num_new: ``[R]`` new tokens, at least 1.
        page_table: ``[R, W]`` int32; entries past a row's own pages are stale.
        window_table: the page table of window layers that have pages of their own; None: all layers share one.
    """

    starts: Ints
    num_new: Ints
    page_table: NDArray[np.int32]
    page_size: int
    window_table: NDArray[np.int32] | None = None

    @property
    def lengths(self) -> Ints:
        """``[R]`` tokens per row after the step."""
        return self.starts + self.num_new

    @property
    def first_new(self) -> Ints:
        """``[R + 1]`` index of each row's first token among the packed tokens; the last entry is N."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.num_new)])

    @property
    def num_pages(self) -> Ints:
        """``[R]`` pages that each row's tokens occupy."""
        return -(-self.lengths // self.page_size)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Input of the model and of the attention backends for one step.

    Attributes:
        lengths, first_new: the rows' properties of the same names, computed once.
        positions: ``[N]`` int64 on the device, position of each new token in its request.
        token_pages, token_offsets: ``[N]`` int64 on the device, page and place in it of each new token's KV.
        page_table: ``[R, pages of the longest row]`` int32 on the device.
        windows: the same step for window layers that have pages of their own.
    """

    rows: RowArrays
    lengths: Ints
    first_new: Ints
    positions: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    page_table: torch.Tensor
    windows: "StepBatch | None" = None

    @property
    def num_rows(self) -> int:
        return len(self.rows.starts)

    @property
    def num_tokens(self) -> int:
        return int(self.first_new[-1])


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R rows of one new token each, of which the host knows only the number: all else is read on the device.

    Attributes:
        slots: ``[R]`` int64, the line of ``page_table`` of each row.
        positions: ``[R]`` int64, position of each new token in its request.
        token_pages, token_offsets: ``[R]`` int64, page and place in it of each new token's KV.
        page_table: ``[S, W]`` int32, the page tables of all slots; entries past a row's own pages are stale.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    page_table: torch.Tensor


def make_batch(rows: RowArrays, device: torch.device) -> StepBatch:
    """Compute the positions and KV places of all new tokens and copy them to the device."""
    first_new = rows.first_new
    row_of_token = np.repeat(np.arange(len(rows.starts)), rows.num_new)
    positions = np.arange(first_new[-1]) - np.repeat(first_new[:-1] - rows.starts, rows.num_new)
    token_pages = rows.page_table[row_of_token, positions // rows.page_size].astype(np.int64)
    placed = np.stack([positions, token_pages, positions % rows.page_size])
    on_device = to_device(placed, device)
    max_pages = int(rows.num_pages.max())
    windows = None
    if rows.window_table is not None:
        windows = make_batch(replace(rows, page_table=rows.window_table, window_table=None), device)
    return StepBatch(
        rows=rows,
        lengths=rows.lengths,
        first_new=first_new,
        positions=on_device[0],
        token_pages=on_device[1],
        token_offsets=on_device[2],
        page_table=to_device(np.ascontiguousarray(rows.page_table[:, :max_pages]), device),
        windows=windows,
    )


def cut_into_pieces(batch: StepBatch, rows: NDArray[np.intp], max_tokens: int) -> torch.Tensor:
    """Cut rows into pieces of at most ``max_tokens`` new tokens, longest context first, to balance threads.

    Returns:
        ``[P, 4]`` int64 on the host, the ``Piece`` of paged.h: row, first of the packed tokens, number of tokens,
        position of the first.
    """
    cut = [
        (row, batch.first_new[row] + first, min(max_tokens, num_new - first), batch.rows.starts[row] + first)
        for row, num_new in zip(rows.tolist(), batch.rows.num_new[rows].tolist(), strict=True)
        for first in range(0, num_new, max_tokens)
    ]
    cut.sort(key=lambda piece: -piece[3])
    return torch.from_numpy(np.array(cut, np.int64).reshape(-1, 4))
