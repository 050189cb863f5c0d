"""Pools on a GPU, and for machines without one a fake of NVIDIA's driver library over host memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.kv.kv_fakes import LAYOUT, MemfdStore

from common.cache.page_layout import PageLayout
from common.engine.cpu.compile_native import Library, build_library
from kv_transfer.transports.cuda_ipc import driver
from kv_transfer.transports.cuda_ipc.driver import CudaDriver

SOURCE = Path(__file__).with_name("fake_libcuda.c")


def use_fake_driver() -> None:
    """Have this process load the fake instead of NVIDIA's library."""
    driver.LIBRARY = str(build_library(Library("fake-libcuda", (SOURCE,), (), ("-O1",), ("-pthread",))))


class _DevicePages:
    """As much of a tensor on a device as a transport looks at."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.device = self
        self.index = 0

    def data_ptr(self) -> int:
        return self._at


class DeviceStore(MemfdStore):
    """A store whose pool is on a device, in the middle of an allocation; ``memory`` is only a landing area."""

    is_mapped = is_in_place = False

    def __init__(self, num_pages: int, layout: PageLayout = LAYOUT) -> None:
        super().__init__(num_pages, layout)
        self.driver = CudaDriver(0)
        before, num_bytes = 3 * layout.page_bytes, layout.pool_bytes(num_pages)
        self._allocated_at = self.driver.allocate(before + num_bytes + 100)
        self._at = self._allocated_at + before
        self.driver.put(self._at, bytes(num_bytes))
        self.device_pages: Any = _DevicePages(self._at)

    def read(self, page: int) -> bytes:
        return self.driver.get(self._at + page * self.layout.page_bytes, self.layout.page_bytes)

    def put(self, page: int, data: bytes) -> None:
        assert len(data) == self.layout.page_bytes
        self.driver.put(self._at + page * self.layout.page_bytes, data)

    def landed(self, pages: Sequence[int]) -> None:
        super().landed(pages)
        for page in pages:
            self.put(page, super().read(page))

    def close(self) -> None:
        self.driver.free(self._allocated_at)
        self.driver.close()
        super().close()
