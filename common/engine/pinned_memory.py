"""Host memory that a GPU reads by itself: page-locked piece by piece, as it comes into use.

A landing area is as large as the pool on the device, so all of it cannot be locked; most of its pages never receive
anything where transfers go from device to device.
"""

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Callable

log = logging.getLogger(__name__)

REGION_BYTES = 64 << 20  # at least; locking so much takes some ten milliseconds
#: Share of the machine's memory that one pool locks at most.
MAX_SHARE = 1 / 8
_PORTABLE = 1  # locked for every context


def register(at: int, num_bytes: int) -> str:
    """Lock memory for the device whose context is current.

    The driver is called directly: an error of the runtime's ``cudaHostRegister`` would show up again as an error of the
    next kernel that this thread launches.
    """
    status = _driver().cuMemHostRegister_v2(ctypes.c_void_p(at), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE))
    return f"cuMemHostRegister returned {status}" if status else ""


def unregister(at: int) -> None:
    _driver().cuMemHostUnregister(ctypes.c_void_p(at))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class PinnedMemory:
    """A mapping of ``num_pages`` pages of ``page_bytes``, of which regions are locked at their first use.

    A copy must not cross the border between memory that is locked and memory that is not, so regions are whole pages.

    Args:
        memory: the mapping.
        register: locks (address, bytes) and returns an empty string, or the reason if it cannot.
        unregister: undoes that for an address.
        max_bytes: no more are locked.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        num_pages: int,
        page_bytes: int,
        register: Callable[[int, int], str] = register,
        unregister: Callable[[int], None] = unregister,
        max_bytes: int | None = None,
    ) -> None:
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._num_bytes = num_pages * page_bytes
        self._page_bytes = page_bytes
        self._register, self._unregister = register, unregister
        self._left = machine_share() if max_bytes is None else max_bytes
        step = math.lcm(page_bytes, mmap.PAGESIZE)
        self._region_bytes = step * -(-REGION_BYTES // step)
        self._locked: dict[int, int] = {}  # region -> address

    def pin(self, page: int) -> None:
        """Lock the region of a page, if it is not locked and may be. Copies work either way."""
        region = page * self._page_bytes // self._region_bytes
        if region in self._locked:
            return
        start = region * self._region_bytes
        num_bytes = min(self._region_bytes, self._num_bytes - start)
        if num_bytes > self._left:
            return
        problem = self._register(self._at + start, num_bytes)
        if problem:
            log.warning("memory for incoming KV pages cannot be locked, so copies to the GPU are slower: %s", problem)
            self._left = 0
            return
        self._left -= num_bytes
        self._locked[region] = self._at + start

    def close(self) -> None:
        """Unlock everything. Idempotent."""
        for at in self._locked.values():
            self._unregister(at)
        self._locked.clear()
        self._left = 0


def machine_share() -> int:
    """Bytes that one pool may lock."""
    return int(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE * MAX_SHARE)
