"""The KV pool: all pages of one node in one piece of memory, page-major, so that a page ships as one contiguous run.

On the CPU the pool *is* anonymous shared memory (a memfd): another process on the host that holds the descriptor writes
pages straight into place, and nothing survives the death of both. On CUDA the pool lives on the device, and a memfd of
the same size, touched only where pages land, takes what others write until ``landed`` copies it up. Pages go up and
down on a stream of their own, so that whoever moves them does not wait for the step that the engine is in: what is
moved was computed, and waited for, before; or is read later.
"""

import errno
import math
import mmap
import os
import time
from collections.abc import Sequence

import torch

from common.cache.page_layout import PageLayout
from common.engine.dtypes import TORCH_DTYPES

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python names it from 3.14 on
_POPULATE_AT_ONCE = 32 << 20  # bytes; between two of these a signal is heard, and the time looked at


class KVPool:
    """``num_pages`` pages of one geometry on one device.

    Attributes:
        fd: memfd of exactly ``geometry.pool_bytes(num_pages)`` bytes: the pool itself, or on CUDA its landing ground.
        memory: that memfd, mapped.
        tensor: ``[num_pages, layers, 2, kv_heads, page_size, head_dim]`` on the device.
    """

    def __init__(self, geometry: PageLayout, num_pages: int, device: str | torch.device = "cpu") -> None:
        assert num_pages > 0
        self.geometry = geometry
        self.num_pages = num_pages
        self.device = torch.device(device)
        num_bytes = geometry.pool_bytes(num_pages)
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        self.memory = mmap.mmap(self.fd, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)  # a hint: taken where the kernel allows it for shared memory
        shape = (num_pages, *geometry.shape)
        dtype = TORCH_DTYPES[geometry.dtype]
        self._landing: torch.Tensor | None = torch.frombuffer(self.memory, dtype=dtype).view(shape)
        on_cpu = self.device.type == "cpu"
        self.tensor = self._landing if on_cpu else torch.zeros(shape, dtype=dtype, device=self.device)
        self._moves = None if on_cpu else torch.cuda.Stream(self.device)
        self._is_open = True

    @property
    def is_mapped(self) -> bool:
        """Is ``memory`` the pool itself?"""
        return self.tensor is self._landing

    @property
    def is_in_place(self) -> bool:
        """Do pages that come in need no copy up to the device?"""
        return self.is_mapped

    @property
    def device_pages(self) -> torch.Tensor | None:
        """The pool on its device as bytes, uint8 ``[num_pages, page_bytes]``; None where ``memory`` is the pool."""
        if self.is_mapped:
            return None
        return self.tensor.view(torch.uint8).view(self.num_pages, self.geometry.page_bytes)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: strided views ``[num_pages, kv_heads, page_size, head_dim]``."""
        return self.tensor[:, index, 0], self.tensor[:, index, 1]

    def populate(self, most_s: float = math.inf) -> int:
        """Take the memory now, from the first page on, since its first use costs more than a copy. Returns the bytes
        that were taken within that time; the rest is left to first use, as all is on devices and kernels that cannot.

        Raises:
            MemoryError: there is not enough.
        """
        if not self.is_mapped:
            return 0
        num_bytes, until, start = len(self.memory), time.monotonic() + most_s, 0
        try:
            while start < num_bytes and time.monotonic() < until:
                length = min(_POPULATE_AT_ONCE, num_bytes - start)
                self.memory.madvise(_MADV_POPULATE_WRITE, start, length)
                start += length
        except OSError as error:
            if error.errno == errno.EINVAL:
                return 0
            raise MemoryError(f"{num_bytes} bytes for KV pages are not to be had") from error
        return start

    def export_page(self, page: int, into: memoryview) -> None:
        """Copy one page's bytes out; ``into`` is writable, ``geometry.page_bytes`` long. The step that computed them is
        over: ``Executor.run`` has returned."""
        assert 0 <= page < self.num_pages
        assert into.nbytes == self.geometry.page_bytes
        target = torch.frombuffer(into, dtype=self.tensor.dtype).view(self.geometry.shape)
        with torch.cuda.stream(self._moves):
            target.copy_(self.tensor[page])

    def landed(self, pages: Sequence[int]) -> None:
        """The bytes of these pages have arrived in ``memory``: make them part of the pool."""
        assert self._landing is not None
        if self.tensor is self._landing:
            return
        with torch.cuda.stream(self._moves):
            for page in pages:
                assert 0 <= page < self.num_pages
                self.tensor[page].copy_(self._landing[page])

    def close(self) -> None:
        """Let go of the memory. Views handed out earlier keep the mapping alive, never the descriptor. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._landing = None
        self.tensor = torch.empty(0)
        os.close(self.fd)
        # Not closed by force: tensors made by frombuffer do not stop that, and a view still read would then crash.
        # The mapping goes with the last of them.
        del self.memory
