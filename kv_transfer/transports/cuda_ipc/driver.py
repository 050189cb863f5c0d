"""The few calls of NVIDIA's driver that CUDA IPC needs, by ctypes.

The driver's interface is stable and always there, whereas torch's own way to share tensors between processes counts
references in files of its own. Torch and this module share the primary context of the device, so addresses mean the
same to both.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from common.errors import BatonError, ConfigError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
UUID_BYTES = 16

_NON_BLOCKING = 1  # a stream that does not wait for the default stream
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # of an event: the host sleeps instead of polling
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


_Address = c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemAlloc_v2": (POINTER(_Address), c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemGetAddressRange_v2": (POINTER(_Address), POINTER(c_size_t), _Address),
    "cuMemcpyHtoDAsync_v2": (_Address, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _Address, c_size_t, c_void_p),
    "cuMemcpyAsync": (_Address, _Address, c_size_t, c_void_p),
    "cuIpcGetMemHandle": (POINTER(_Handle), _Address),
    "cuIpcOpenMemHandle_v2": (POINTER(_Address), _Handle, c_uint),
    "cuIpcCloseMemHandle": (_Address,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}


class DriverError(BatonError):
    """A call to the driver failed."""


class UnknownEndError(DriverError):
    """The driver does not say whether copies that have begun are over."""


class Allocation(NamedTuple):
    """Memory on the device that was allocated, or opened, as one."""

    at: int
    num_bytes: int


class CudaDriver:
    """The driver in one process, with one device and a stream of its own. One thread may call it at a time.

    Args:
        ordinal: of the device, among those that this process sees.

    Raises:
        ConfigError: there is no driver, or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, signature in _SIGNATURES.items():
                getattr(self._library, name).argtypes = signature
        except (OSError, AttributeError) as error:
            raise ConfigError(f"--transport cuda-ipc needs NVIDIA's driver: {error}") from error
        self._context = c_void_p()
        self._device = c_int()
        self._stream, self._event = c_void_p(), c_void_p()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", byref(self._device), ordinal)
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
            with self._current():
                self._call("cuStreamCreate", byref(self._stream), _NON_BLOCKING)
                self._call("cuEventCreate", byref(self._event), _BLOCKING_SYNC | _DISABLE_TIMING)
        except DriverError as error:
            raise ConfigError(f"--transport cuda-ipc cannot use GPU {ordinal}: {error}") from error
        self.uuid = self._uuid(self._device.value)

    def _call(self, name: str, *words: Any) -> None:
        status = getattr(self._library, name)(*words)
        if status:
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            raise DriverError(f"{name}: {(text.value or b'error %d' % status).decode(errors='replace')}")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context current in this thread, and afterwards the one that was current before."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _uuid(self, device: int) -> bytes:
        uuid = ctypes.create_string_buffer(UUID_BYTES)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw

    def uuids(self) -> list[bytes]:
        """Of all devices that this process sees."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        found = []
        for ordinal in range(count.value):
            device = c_int()
            self._call("cuDeviceGet", byref(device), ordinal)
            found.append(self._uuid(device.value))
        return found

    # ---- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        at = _Address()
        with self._current():
            self._call("cuMemAlloc_v2", byref(at), num_bytes)
        return at.value

    def free(self, at: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", at)

    def allocation_of(self, at: int) -> Allocation:
        """The allocation that this address is in."""
        base, num_bytes = _Address(), c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", byref(base), byref(num_bytes), at)
        return Allocation(base.value, num_bytes.value)

    def export(self, base: int) -> bytes:
        """The handle by which other processes open the allocation that begins here."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address of another process's allocation, which must be closed again."""
        at = _Address()
        with self._current():
            what = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", byref(at), what, _LAZY_ENABLE_PEER_ACCESS)
        return at.value

    def close_opened(self, at: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", at)

    # ---- copies, on the stream; each call waits for their end --------------------------------------------------------

    def put(self, at: int, data: bytes) -> None:
        """Copy from the host to the device."""
        with self._current(), self._waited_for():
            self._call("cuMemcpyHtoDAsync_v2", at, data, len(data), self._stream)

    def get(self, at: int, num_bytes: int) -> bytes:
        """Copy from the device to the host."""
        data = ctypes.create_string_buffer(num_bytes)
        with self._current(), self._waited_for():
            self._call("cuMemcpyDtoHAsync_v2", data, at, num_bytes, self._stream)
        return data.raw

    def copy(self, runs: Iterable[tuple[int, int, int]]) -> None:
        """Copy runs (source, target, bytes) from device to device.

        Raises:
            UnknownEndError: they may still be under way.
            DriverError: they are over, and some were not made.
        """
        with self._current(), self._waited_for():
            for source, target, num_bytes in runs:
                self._call("cuMemcpyAsync", target, source, num_bytes, self._stream)

    @contextlib.contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Wait for all that is queued meanwhile, also if queueing fails."""
        try:
            yield
        finally:
            try:
                self._call("cuEventRecord", self._event, self._stream)
                self._call("cuEventSynchronize", self._event)
            except DriverError as error:
                raise UnknownEndError(str(error)) from error

    def close(self) -> None:
        """Release stream and context; allocated and opened memory must have been given back."""
        with contextlib.suppress(DriverError):
            with self._current():
                self._call("cuEventDestroy_v2", self._event)
                self._call("cuStreamDestroy_v2", self._stream)
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)
