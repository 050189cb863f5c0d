"""The prefill node's side of CUDA IPC: open a peer's pool, try it out, and copy pages from device to device."""

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence

from common.cache.page_layout import PageLayout
from common.errors import ConfigError
from common.wire.messages import Connect
from kv_transfer.page_slices import SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.cuda_ipc.driver import Allocation, CudaDriver, DriverError, UnknownEndError
from kv_transfer.transports.cuda_ipc.protocol import NONCE_BYTES, PROBE_BYTES, SharedPool, echo_offset
from kv_transfer.transports.cuda_ipc.reader import HOST_POOL
from kv_transfer.transports.shm.copy_thread import PeerPool
from kv_transfer.transports.shm.writer import LocalWriter


class DevicePool(PeerPool):
    """A peer's pool on a GPU, opened in this process.

    Args:
        allocation: what was opened.
        at: address of the pool in it.
    """

    pages_at_once = 32  # queued before they are waited for

    def __init__(
        self, driver: CudaDriver, ours: PageStore, theirs: PageLayout, allocation: Allocation, at: int
    ) -> None:
        super().__init__((allocation.at + allocation.num_bytes - at) // theirs.page_bytes)
        self._driver = driver
        self._our_layout, self._their_layout = ours.layout, theirs
        self._our_at, self._at = ours.device_pages.data_ptr(), at
        self._opened_at = allocation.at
        self._is_end_known = True

    def put(self, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> int:
        runs = list(joined(self._runs(pages, slices)))
        try:
            self._driver.copy(runs)
        except UnknownEndError:
            self._is_end_known = False
            raise
        return sum(num_bytes for _, _, num_bytes in runs)

    def _runs(self, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> Iterator[tuple[int, int, int]]:
        parts = ((0, 0, self._our_layout.page_bytes),) if slices is None else slices.runs
        for source, target in pages:
            ours = self._our_at + source * self._our_layout.page_bytes
            theirs = self._at + target * self._their_layout.page_bytes
            for at, to, num_bytes in parts:
                yield ours + at, theirs + to, num_bytes

    def release(self) -> bool:
        if not self._is_end_known:
            return False
        with contextlib.suppress(DriverError):  # what could have been written through it has been
            self._driver.close_opened(self._opened_at)
        return True


def joined(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join runs (source, target, bytes) where one begins at both ends where the one before it ends."""
    last: tuple[int, int, int] | None = None
    for source, target, num_bytes in runs:
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (source, target):
            last = (last[0], last[1], last[2] + num_bytes)
            continue
        if last is not None:
            yield last
        last = (source, target, num_bytes)
    if last is not None:
        yield last


class CudaIpcWriter(LocalWriter):
    """``WriterTransport`` of a prefill node whose pool is on a GPU.

    Raises:
        ConfigError: the pool is in host memory, or there is no driver.
    """

    name = "cuda-ipc"
    place = "GPU memory"

    def __init__(self, store: PageStore) -> None:
        if store.device_pages is None:
            raise ConfigError(HOST_POOL)
        ordinal = store.device_pages.device.index or 0
        self._opener = CudaDriver(ordinal)  # for the loop
        self._copier = CudaDriver(ordinal)  # for the thread that copies
        super().__init__(store)

    def _open(self, connect: Connect, pool_info: bytes, descriptors: Sequence[int]) -> DevicePool:
        who = connect.name
        try:
            shared = SharedPool.decode(pool_info)
        except ValueError as error:
            raise AttachError(f"what {who} sent over its socket is not a pool of cuda-ipc: {error}") from error
        if descriptors:
            raise AttachError(f"{who} handed over a file with its pool")
        try:
            if shared.device not in self._opener.uuids():
                raise AttachError(f"this prefill node does not see the GPU of {who}; check CUDA_VISIBLE_DEVICES")
            self._try_out(shared, connect)
            return self._opened(shared, connect)
        except DriverError as error:
            raise AttachError(f"the GPU memory of {who} cannot be opened: {error}") from error

    def _try_out(self, shared: SharedPool, connect: Connect) -> None:
        """Find what the reader has written, and read back what is written here."""
        sent = secrets.token_bytes(NONCE_BYTES)
        allocation = self._open_allocation(shared.probe)
        try:
            if allocation.num_bytes < PROBE_BYTES:
                raise AttachError(f"{connect.name} has {allocation.num_bytes} bytes to try out its GPU memory")
            area = allocation.at + echo_offset(shared.area)
            found = self._opener.get(allocation.at, NONCE_BYTES)
            self._opener.put(area, sent)
            if found != shared.nonce or self._opener.get(area, NONCE_BYTES) != sent:
                raise AttachError(f"the bytes read from the GPU memory of {connect.name} are not those stored there")
        finally:
            self._opener.close_opened(allocation.at)

    def _opened(self, shared: SharedPool, connect: Connect) -> DevicePool:
        layout = connect.layout.layout()
        allocation = self._open_allocation(shared.pool)
        if shared.offset + layout.pool_bytes(connect.num_pages) > allocation.num_bytes:
            self._opener.close_opened(allocation.at)
            raise AttachError(f"the pool of {connect.name} reaches beyond its GPU memory")
        pool = Allocation(allocation.at, shared.offset + layout.pool_bytes(connect.num_pages))
        return DevicePool(self._copier, self.store, layout, pool, allocation.at + shared.offset)

    def _open_allocation(self, handle: bytes) -> Allocation:
        at = self._opener.open(handle)
        try:
            return Allocation(at, self._opener.allocation_of(at).num_bytes)
        except DriverError:
            self._opener.close_opened(at)
            raise

    def close(self) -> None:
        if not self._epoll.closed:
            super().close()
            self._opener.close()
            self._copier.close()
