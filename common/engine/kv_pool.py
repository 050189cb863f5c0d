"""The KV pool: all pages of one node in one allocation, page-major, so that a page is one contiguous run of bytes.

On the CPU the pool is anonymous shared memory (a memfd): another process on the host that holds the descriptor writes
pages directly into it, and the memory is freed with the last process. On CUDA the pool is on the device, and a memfd of
the same size, backed by memory only where pages arrive, receives pages until ``landed`` copies them to the device.

Copies use a separate CUDA stream, so that they do not wait for the running step, and the host waits for them. That
orders them with the steps, also when two steps are outstanding: a page is copied out when the host has seen the event
behind the step that computed it (``PendingStep.result``), and later steps write to other pages; a step that reads a
page which has landed is launched when the host has seen the event behind its copy.
"""

import errno
import math
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.cache.page_layout import PageLayout
from common.cache.window_pages import LayerGroups
from common.engine.cpu.huge_pages import advise_huge_pages
from common.engine.device_copies import current_device, to_device
from common.engine.pinned_memory import PinnedMemory

if TYPE_CHECKING:
    from common.engine.triton_kernels.pages import Runs

#: The number formats of weights and KV pages, by their names in configuration and messages.
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: The number formats of KV pages.
PAGE_DTYPES = TORCH_DTYPES | {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python names it from 3.14 on
_POPULATE_AT_ONCE = 32 << 20  # bytes; between two of these calls signals are handled and the time is checked
_MAX_RUNS = 1024  # lists of runs kept on the device; a pair of nodes has a few

ByteRuns = tuple[tuple[int, int], ...]


class LayerKV(NamedTuple):
    """One layer of a pool: strided views of its pages.

    Attributes:
        keys, values: ``[num_pages, kv_heads, page_size, head_dim]``, values with ``value_dim`` as the last. In a latent
            layout the values are a view into the keys.
        key_scales, value_scales: ``[num_pages, kv_heads, page_size]`` uint8; None in a format without scales.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @property
    def is_latent(self) -> bool:
        return bool(self.values.storage_offset() == self.keys.storage_offset())


class KVPool:
    """``num_pages`` pages of one layout on one device.

    Args:
        groups: of a model whose window layers have pages of their own; ``layout`` is then that of all layers, and
            ``num_pages`` counts pages of the layers that see all tokens.
        num_window_pages: pages of the window layers.

    Attributes:
        model_layout: of a page with all layers.
        layout, num_pages: of the pages that transfers move: with ``groups``, slabs.
        num_full_pages: pages that requests can have.
        fd: memfd of exactly ``layout.pool_bytes(num_pages)`` bytes: the pool itself, or on CUDA its landing area.
        memory: mapping of that memfd.
        pages: uint8 ``[num_pages, page_bytes]`` on the device.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        device: str | torch.device = "cpu",
        *,
        groups: LayerGroups | None = None,
        num_window_pages: int = 0,
    ) -> None:
        assert num_pages > 0
        assert not layout.is_latent or layout.value_dim <= layout.head_dim, "values that are longer than their keys"
        self.groups, self.num_full_pages, self.num_window_pages = groups, num_pages, num_window_pages
        self.num_layers = layout.num_layers
        self.model_layout = layout
        if groups is not None:
            layout, num_pages = groups.layout_of(layout), groups.num_slabs(num_pages, num_window_pages)
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        num_bytes = layout.pool_bytes(num_pages)
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        self.memory = mmap.mmap(self.fd, num_bytes)
        advise_huge_pages(self.memory)  # taken where the kernel allows it for shared memory
        shape = (num_pages, layout.page_bytes)
        self._landing: Tensor | None = torch.frombuffer(self.memory, dtype=torch.uint8).view(shape)
        on_cpu = self.device.type == "cpu"
        self.pages = self._landing if on_cpu else torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self._layers = self._all_views()
        self._moves = None if on_cpu else torch.cuda.Stream(self.device)
        self._pinned = None if on_cpu else PinnedMemory(self.memory, num_pages=num_pages, page_bytes=layout.page_bytes)
        self._runs: dict[ByteRuns, Runs] = {}  # a few for each layout that a peer has

    def _all_views(self) -> list[LayerKV]:
        if self.groups is None:
            return [layer_views(self.pages, self.layout, layer) for layer in range(self.num_layers)]
        views: dict[int, LayerKV] = {}
        num_full = self.num_full_pages * self.groups.full_slabs
        for layers, slabs in ((self.groups.full, self.pages[:num_full]), (self.groups.windowed, self.pages[num_full:])):
            layout = replace(self.layout, num_layers=len(layers))
            pages = slabs.reshape(-1, layout.page_bytes)
            views |= {layer: layer_views(pages, layout, place) for place, layer in enumerate(layers)}
        return [views[layer] for layer in range(self.num_layers)]

    @property
    def is_mapped(self) -> bool:
        """Whether ``memory`` is the pool itself."""
        return self.pages is self._landing

    is_in_place = is_mapped  # incoming pages then need no copy to the device

    @property
    def device_pages(self) -> Tensor | None:
        """``pages``; None if ``memory`` is the pool."""
        return None if self.is_mapped else self.pages

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]

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
        target = torch.frombuffer(into, dtype=torch.uint8)
        with current_device(self.device), torch.cuda.stream(self._moves):
            target.copy_(self.pages[page])

    def landed(self, pages: Sequence[int]) -> None:
        """Copy pages that have arrived in ``memory`` to the device; does nothing where ``memory`` is the pool."""
        assert self._landing is not None
        if self._pinned is None or not pages:
            return
        over = torch.cuda.Event(blocking=True)
        with current_device(self.device), torch.cuda.stream(self._moves):
            for page in pages:
                assert 0 <= page < self.num_pages
                self._pinned.pin(page)
                self.pages[page].copy_(self._landing[page], non_blocking=True)
            over.record()
            over.synchronize()  # memory and page may have other uses from here on

    @property
    def can_copy_runs(self) -> bool:
        """Whether ``gather`` and ``scatter`` work: on CUDA, where Triton is installed."""
        return self.device_pages is not None and find_spec("triton") is not None

    def gather(self, pages: Sequence[int], runs: ByteRuns, staging: torch.Tensor) -> None:
        """Copy parts of pages to contiguous memory on the device, in one launch on the current stream.

        Args:
            runs: (offset in the page, bytes) of each part, in the order in which they lie in ``staging``.
            staging: uint8 on the device; the parts of a page follow those of the page before it.
        """
        self._copy_runs(pages, runs, staging, is_gather=True)

    def scatter(self, pages: Sequence[int], runs: ByteRuns, staging: torch.Tensor) -> None:
        """Copy back what ``gather`` has copied, or what has come in the same order; each page occurs once."""
        self._copy_runs(pages, runs, staging, is_gather=False)

    def _copy_runs(self, pages: Sequence[int], runs: ByteRuns, staging: torch.Tensor, *, is_gather: bool) -> None:
        from common.engine.triton_kernels import pages as kernels  # imports triton

        pool = self.device_pages
        assert pool is not None and all(0 <= page < self.num_pages for page in pages)
        prepared = self._runs.get(runs)
        if prepared is None:
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            prepared = self._runs[runs] = kernels.Runs.make(runs, self.layout.page_bytes, pool.device)
        numbers = to_device(np.array(pages, np.int64), pool.device)
        (kernels.gather if is_gather else kernels.scatter)(pool, numbers, prepared, staging)

    def close(self) -> None:
        """Release the memory. Idempotent. Views keep the mapping alive, but not the descriptor."""
        if self._landing is None:
            return
        self._landing = None
        if self._pinned is not None:
            self._pinned.close()
        self.pages = torch.empty(0)
        self._layers = []
        os.close(self.fd)
        # mmap.close() would unmap under tensors made by frombuffer, and reading one would crash. Without it the mapping
        # ends with the last tensor.
        del self.memory


def layer_views(pages: Tensor, layout: PageLayout, layer: int) -> LayerKV:
    """Return one layer of pages, which are uint8 ``[num_pages, page_bytes]``."""
    keys, key_scales = _head_views(pages, layout, layout.head_dim, layout.offset(0, layer=layer))
    if layout.is_latent:
        return LayerKV(keys, keys[..., : layout.value_dim], key_scales, key_scales)
    values, value_scales = _head_views(pages, layout, layout.value_dim, layout.offset(0, layer=layer, value=True))
    return LayerKV(keys, values, key_scales, value_scales)


def _head_views(pages: Tensor, layout: PageLayout, dim: int, offset: int) -> tuple[Tensor, Tensor | None]:
    """Return one layer's keys or values of ``dim`` numbers, which begin at ``offset`` of a page, and their scales."""
    shape = (len(pages), layout.num_kv_heads, layout.page_size)

    def view(dtype: torch.dtype, inside: int, num_columns: int) -> Tensor:
        numbers = pages.view(dtype)
        item = dtype.itemsize
        strides = (layout.page_bytes // item, layout.head_bytes(dim) // item, num_columns, 1)
        first = numbers.storage_offset() + (offset + inside) // item
        return numbers.as_strided((*shape, num_columns), strides, first)

    (inside, _), *scales = layout.token_parts(dim)
    numbers = view(PAGE_DTYPES[layout.dtype], inside, dim)
    return numbers, view(torch.uint8, scales[0][0], 1)[..., 0] if scales else None
