"""The KV pool: all pages of one node in one allocation, page-major, so that a page is one contiguous run of bytes.

On the CPU the pool is anonymous shared memory (a memfd): another process on the host that holds the descriptor writes
pages directly into it, and the memory is freed with the last process. On CUDA the pool is on the device, and a memfd of
the same size, backed by memory only where pages arrive, receives pages until ``landed`` copies them to the device.

Copies use a separate CUDA stream, so that they do not wait for the running step, and the host waits for them. That
orders them with the steps, also when two steps are outstanding: a page is copied out when the host has seen the event
behind the step that computed it (``PendingStep.result``), and later steps write to other pages; a step that reads a
page which has landed is launched when the host has seen the event behind its copy.
"""

import copy
import errno
import math
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.cache.page_layout import PageLayout
from common.engine.pinned_memory import PinnedMemory

#: The number formats of weights and KV pages, by their names in configuration and messages.
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python names it from 3.14 on
_POPULATE_AT_ONCE = 32 << 20  # bytes; between two of these calls signals are handled and the time is checked


class KVPool:
    """``num_pages`` pages of one layout on one device.

    Attributes:
        fd: memfd of exactly ``layout.pool_bytes(num_pages)`` bytes: the pool itself, or on CUDA its landing area.
        memory: mapping of that memfd.
        tensor: ``[num_pages, layers, 2, kv_heads, page_size, head_dim]`` on the device.

    Args:
        fd: of a pool of the same size in another process, which becomes this one too; None makes a new one.
    """

    def __init__(
        self, layout: PageLayout, num_pages: int, device: str | torch.device = "cpu", *, fd: int | None = None
    ) -> None:
        assert num_pages > 0
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        num_bytes = layout.pool_bytes(num_pages)
        if fd is None:
            fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
        self.fd = fd
        self.memory = mmap.mmap(self.fd, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)  # a hint: taken where the kernel allows it for shared memory
        shape = (num_pages, *layout.shape)
        dtype = TORCH_DTYPES[layout.dtype]
        self._landing: torch.Tensor | None = torch.frombuffer(self.memory, dtype=dtype).view(shape)
        on_cpu = self.device.type == "cpu"
        self.tensor = self._landing if on_cpu else torch.zeros(shape, dtype=dtype, device=self.device)
        self._moves = None if on_cpu else torch.cuda.Stream(self.device)
        self._pinned = None if on_cpu else PinnedMemory(self.memory, num_pages=num_pages, page_bytes=layout.page_bytes)

    @property
    def is_mapped(self) -> bool:
        """Whether ``memory`` is the pool itself."""
        return self.tensor is self._landing

    is_in_place = is_mapped  # incoming pages then need no copy to the device

    @property
    def device_pages(self) -> torch.Tensor | None:
        """The device's pool as uint8 ``[num_pages, page_bytes]``; None if ``memory`` is the pool."""
        if self.is_mapped:
            return None
        return self.tensor.view(torch.uint8).view(self.num_pages, self.layout.page_bytes)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer: strided views ``[num_pages, kv_heads, page_size, head_dim]``."""
        return self.tensor[:, index, 0], self.tensor[:, index, 1]

    def of_heads(self, heads: range) -> "KVPool":
        """Return a pool that is these KV heads of every page of this one, for the attention of one rank."""
        view = copy.copy(self)
        view.layout = replace(self.layout, num_kv_heads=len(heads))
        view.tensor = self.tensor[:, :, :, heads.start : heads.stop]
        return view

    def populate(self, max_s: float = math.inf) -> int:
        """Allocate the memory behind the pages, first page first, for at most ``max_s`` seconds.

        The first use of a page would otherwise cost more than copying it.

        Returns:
            The number of bytes allocated; 0 on CUDA and on kernels without ``MADV_POPULATE_WRITE``.
        Raises:
            MemoryError: the machine has too little memory.
        """
        if not self.is_mapped:
            return 0
        num_bytes, until, start = len(self.memory), time.monotonic() + max_s, 0
        try:
            while start < num_bytes and time.monotonic() < until:
                length = min(_POPULATE_AT_ONCE, num_bytes - start)
                self.memory.madvise(_MADV_POPULATE_WRITE, start, length)
                start += length
        except OSError as error:
            if error.errno == errno.EINVAL:
                return 0
            raise MemoryError(f"the machine has no {num_bytes} bytes for KV pages") from error
        return start

    def export_page(self, page: int, into: memoryview) -> None:
        """Copy one page into ``into``, which is writable and has ``layout.page_bytes`` bytes.

        The step that computed the page must be over: ``PendingStep.result`` has returned.
        """
        assert 0 <= page < self.num_pages
        assert into.nbytes == self.layout.page_bytes
        target = torch.frombuffer(into, dtype=self.tensor.dtype).view(self.layout.shape)
        with torch.cuda.stream(self._moves):
            target.copy_(self.tensor[page])

    def landed(self, pages: Sequence[int]) -> None:
        """Copy pages that have arrived in ``memory`` to the device; does nothing where ``memory`` is the pool."""
        assert self._landing is not None
        if self._pinned is None or not pages:
            return
        over = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._moves):
            for page in pages:
                assert 0 <= page < self.num_pages
                self._pinned.pin(page)
                self.tensor[page].copy_(self._landing[page], non_blocking=True)
            over.record()
        over.synchronize()  # memory and page may have other uses from here on

    def close(self) -> None:
        """Release the memory. Idempotent. Views keep the mapping alive, but not the descriptor."""
        if self._landing is None:
            return
        self._landing = None
        if self._pinned is not None:
            self._pinned.close()
        self.tensor = torch.empty(0)
        os.close(self.fd)
        # mmap.close() would unmap under tensors made by frombuffer, and reading one would crash. Without it the mapping
        # ends with the last tensor.
        del self.memory
