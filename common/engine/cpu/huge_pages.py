"""Memory in huge pages for the weights that every step reads from end to end.

Small pages cost a translation for every 4 KiB that is read; huge ones, of 2 MiB, one for 512 times as much.
"""

import math
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in huge pages where the kernel grants them.

    The advice must come before the first write, which is when the kernel chooses the size of a page. A tensor of less
    than a huge page, and the rest of a larger one, stay in small pages, so that no memory is wasted.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping as long as a tensor over it exists
    first = -whole.data_ptr() % _HUGE
    memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes // _HUGE * _HUGE)
    return whole[first : first + num_bytes].view(dtype).view(shape)
