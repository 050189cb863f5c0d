"""Memory in huge pages for what every step reads from end to end: weights, KV pages, and arrays between products.

Small pages cost a translation for every 4 KiB that is read, and end the processor's prefetching; huge ones have 2 MiB.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20
_ALIGNED = 64  # bytes, a cache line


class HugePages:
    """Makes tensors that stand one behind the other in mappings of huge pages, where the kernel grants them.

    A mapping takes memory only where tensors are written, and exists as long as one of its tensors.

    Args:
        mapping_bytes: size of a mapping; a larger tensor has one of its own.
    """

    def __init__(self, mapping_bytes: int = 64 << 20) -> None:
        self._mapping_bytes = mapping_bytes
        self._rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor on the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._rest):
            self._rest = _mapped(max(num_bytes, self._mapping_bytes))
        taken = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // _ALIGNED) * _ALIGNED :]
        return taken.view(dtype).view(shape)


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages behind a mapping; where Linux has none it refuses, which changes nothing."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _mapped(num_bytes: int) -> Tensor:
    """Return new memory that begins at a huge page. The advice must come before the first write."""
    size = -(-num_bytes // _HUGE) * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping as long as a tensor over it exists
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + size]
