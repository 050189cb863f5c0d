"""A Triton kernel that copies pages, or slices of pages, between a pool and contiguous memory, in one launch.

A slice, such as some tokens or heads of every layer, is a list of runs: contiguous bytes of the page. In the staging
memory the runs of a page follow one another, and pages follow one another.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.device_copies import current_device
from common.engine.triton_kernels.tiles import power_of_two

#: Most words that one program copies.
BLOCK = 4096
#: Integers by their bytes, the longest first.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def copy_runs(
    pool,
    staging,
    pages,
    offsets,
    places,
    lengths,
    page_words,
    slice_words,
    IS_GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one run of one page between pool and staging memory. Grid: (pages, runs, blocks of the longest run)."""
    number, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < tl.load(lengths + run)
    in_pool = pool + tl.load(pages + number) * page_words + tl.load(offsets + run) + word
    in_staging = staging + number * slice_words + tl.load(places + run) + word
    if IS_GATHER:
        tl.store(in_staging, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=mask), mask=mask)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a slice, on a device; they are made once and serve many copies.

    Attributes:
        table: ``[3, runs]`` int64: offsets in the page, places in the slice, lengths, in words.
        word_bytes: bytes of a word, which divide all of these and the size of a page.
        longest, num_words: words of the longest run, and of all of them.
    """

    table: Tensor
    word_bytes: int
    longest: int
    num_words: int

    @classmethod
    def make(cls, runs: tuple[tuple[int, int], ...], page_bytes: int, device: torch.device) -> "Runs":
        """Prepare (offset in the page, bytes) of each run, in the order in which they follow one another."""
        offsets, lengths = np.array(runs, np.int64).T
        assert len(runs) and (lengths > 0).all() and (offsets + lengths <= page_bytes).all()
        word_bytes = math.gcd(8, page_bytes, *offsets.tolist(), *lengths.tolist())
        places = np.cumsum(lengths) - lengths
        table = np.stack([offsets, places, lengths]) // word_bytes
        on_device = torch.from_numpy(table).to(device)  # waits, since another stream may be the next to read it
        return cls(on_device, word_bytes, int(table[2].max()), int(table[2].sum()))

    @property
    def num_bytes(self) -> int:
        return self.num_words * self.word_bytes


def gather(pool: Tensor, pages: Tensor, runs: Runs, staging: Tensor) -> None:
    """Copy the runs of some pages into staging memory.

    Args:
        pool: uint8 ``[num_pages, page_bytes]``, contiguous.
        pages: int64 ``[n]``, on the same device.
        staging: uint8, contiguous, on the same device: at least ``n * runs.num_bytes`` bytes, aligned to 8.
    """
    _launch(pool, pages, runs, staging, is_gather=True)


def scatter(pool: Tensor, pages: Tensor, runs: Runs, staging: Tensor) -> None:
    """Copy staging memory into the runs of some pages, each of which occurs once; arguments as for ``gather``."""
    _launch(pool, pages, runs, staging, is_gather=False)


def _launch(pool: Tensor, pages: Tensor, runs: Runs, staging: Tensor, *, is_gather: bool) -> None:
    assert pool.dtype == staging.dtype == torch.uint8 and pool.is_contiguous() and staging.is_contiguous()
    assert staging.numel() >= len(pages) * runs.num_bytes
    word = _WORDS[runs.word_bytes]
    words = staging.view(-1)[: len(pages) * runs.num_bytes].view(word)
    block = min(BLOCK, max(128, power_of_two(runs.longest)))
    with current_device(pool.device):
        copy_runs[(len(pages), runs.table.shape[1], -(-runs.longest // block))](
            *(pool.view(word), words, pages, *runs.table, pool.shape[1] // runs.word_bytes, runs.num_words),
            IS_GATHER=is_gather,
            BLOCK=block,
        )
