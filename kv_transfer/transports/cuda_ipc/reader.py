"""The decode node's side of CUDA IPC: export the pool, hand its handle to permitted processes, and watch them."""

import contextlib
import secrets
from dataclasses import replace

from common.errors import ConfigError
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import InPlace
from kv_transfer.transports.cuda_ipc.driver import CudaDriver, DriverError
from kv_transfer.transports.cuda_ipc.protocol import NONCE_BYTES, NUM_ECHO_AREAS, PROBE_BYTES, SharedPool
from kv_transfer.transports.shm.reader import ShmReader

#: The driver may put smaller allocations into one that it shares with others, and a handle is of the whole.
MIN_ALLOCATION_BYTES = 2 << 20
HOST_POOL = "--transport cuda-ipc moves pages between GPUs, and this pool is in host memory: leave out --device cpu"


class CudaIpcReader(ShmReader):
    """``ReaderTransport`` of a decode node whose pool is on a GPU. Pages arrive in the pool itself.

    Raises:
        ConfigError: the pool is in host memory or cannot be exported, or this kernel has no pidfds.
    """

    name = "cuda-ipc"

    def __init__(self, store: PageStore, incarnation: str = "") -> None:
        if store.device_pages is None:
            raise ConfigError(HOST_POOL)
        self._driver = CudaDriver(store.device_pages.device.index or 0)
        self._probe_at = 0
        try:
            self._shared = self._share(store)
            super().__init__(store, incarnation, is_shared=False)
        except DriverError as error:
            self._close_driver()
            raise ConfigError(
                f"--transport cuda-ipc cannot export the GPU's memory ({error}): leave expandable_segments out of "
                "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or use another --transport"
            ) from error
        except ConfigError:
            self._close_driver()
            raise
        self.store = InPlace(store)

    def _share(self, store: PageStore) -> SharedPool:
        driver, at = self._driver, store.device_pages.data_ptr()
        nonce = secrets.token_bytes(NONCE_BYTES)
        base, _ = driver.allocation_of(at)
        pool = driver.export(base)
        self._probe_at = driver.allocate(max(PROBE_BYTES, MIN_ALLOCATION_BYTES))
        driver.put(self._probe_at, nonce)
        return SharedPool(driver.uuid, pool, at - base, driver.export(self._probe_at), nonce, area=0)

    def _pool_info(self) -> bytes:
        self._shared = replace(self._shared, area=(self._shared.area + 1) % NUM_ECHO_AREAS)
        return self._shared.encode()

    def close(self) -> None:
        """Close every descriptor. Writers that have the pool open keep it."""
        if self._epoll.closed:
            return
        # A writer closes the probe memory before it reports that it has attached.
        may_be_open = not all(writer.is_chosen for writer in self._writers.values())
        super().close()
        self._close_driver(may_be_open=may_be_open)

    def _close_driver(self, *, may_be_open: bool = False) -> None:
        if self._probe_at and not may_be_open:  # memory that is freed while another process has it open is undefined
            with contextlib.suppress(DriverError):
                self._driver.free(self._probe_at)
        self._driver.close()
