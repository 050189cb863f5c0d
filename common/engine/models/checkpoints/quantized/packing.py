"""What the formats have in common: numbers packed into 32-bit words, and scales for groups or blocks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from common.errors import ConfigError

#: The tensors of a matrix by the last parts of their names.
Parts = Mapping[str, Tensor]


def bits_of(num_words: int, num_numbers: int) -> int:
    """Return how many bits each of ``num_numbers`` has that are packed into ``num_words`` words of 32 bits.

    Raises:
        ConfigError: it is neither 4 nor 8.
    """
    for bits in (4, 8):
        if -(-num_numbers * bits // 32) == num_words:
            return bits
    raise ConfigError(f"{num_words} words do not hold {num_numbers} numbers of 4 or of 8 bits")


def unpack_words(words: Tensor, num_numbers: int, dim: int) -> Tensor:
    """Return the numbers that are packed along ``dim`` of a matrix of int32 words, the first in the lowest bits.

    Args:
        num_numbers: packed along ``dim``; the number of bits follows from it.
    Returns:
        uint8, with ``num_numbers`` along ``dim``.
    """
    bits = bits_of(words.shape[dim], num_numbers)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    rows = words if dim == 1 else words.T
    numbers = (rows[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)[:, :num_numbers]
    return numbers if dim == 1 else numbers.T


def spread(scales: Tensor, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> Tensor:
    """Return scales as float32 that fit a matrix of ``shape``.

    Args:
        scales: for the whole matrix, for each row (``[out]`` or ``[out, 1]``), for each group of inputs
            (``[out, groups]``), or for each ``block`` (rows, columns).
    Raises:
        ConfigError: they do not fit.
    """
    scales = scales.float()
    num_out, num_in = shape
    if scales.numel() == 1:
        return scales.view(1, 1)
    if scales.dim() == 1:
        scales = scales[:, None]
    if block is not None and scales.shape == (-(-num_out // block[0]), -(-num_in // block[1])):
        rows = scales.repeat_interleave(block[0], dim=0)[:num_out]
        return rows.repeat_interleave(block[1], dim=1)[:, :num_in]
    if scales.dim() != 2 or scales.shape[0] != num_out or num_in % scales.shape[1]:
        raise ConfigError(f"scales {list(scales.shape)} do not fit a matrix {list(shape)}")
    return scales.repeat_interleave(num_in // scales.shape[1], dim=1)
