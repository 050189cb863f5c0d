"""Copy pages into the pools of other processes in a thread, so that a node's loop never waits for memory.

The thread releases the interpreter's lock while it copies a page. Every pool has a lock of its own, which is held from
the check that the pool is still open to the last byte of one page. Once ``MappedPool.shut`` has returned, nothing more
is written to that pool, and no page of ours is read for it.
"""

import ctypes
import logging
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence

from kv_transfer.page_slices import SlicePair, copy
from kv_transfer.transports.base import PageStore, address_of, stage

log = logging.getLogger(__name__)


class MappedPool:
    """A peer's pool in our address space. ``page_bytes`` is the size of one of its pages."""

    def __init__(self, memory: mmap.mmap, page_bytes: int) -> None:
        self.memory = memory
        self.page_bytes = page_bytes
        self.num_pages = len(memory) // page_bytes
        self.at = address_of(memory)
        self.lock = threading.Lock()
        self.is_open = True
        self.problem = ""  # why a copy failed

    def shut(self) -> None:
        """Wait for at most one page, then unmap the pool; nothing is copied into it afterwards."""
        self.is_open = False  # set before the lock is taken: the thread could take it again and again
        with self.lock:
            self.memory.close()  # raises while a view of it exists, and then DETACHED is not sent


class CopyThread:
    """Copies page after page, ticket after ticket, and writes to the eventfd ``wake`` after each ticket."""

    def __init__(self, store: PageStore, wake: int) -> None:
        self.num_bytes = 0  # copied
        self._store = store
        self._wake = wake
        self._at = address_of(store.memory) if store.is_mapped else 0
        self._jobs: queue.SimpleQueue[tuple[MappedPool, int, Sequence[tuple[int, int]], SlicePair | None] | None] = (
            queue.SimpleQueue()
        )
        self._done: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, name="shm-copy", daemon=True)
        self._thread.start()

    # ---- called by the loop -------------------------------------------------------------------------------------

    def begin(self, pool: MappedPool, ticket: int, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> None:
        """Copy pages (ours, theirs). The ticket is never reported if the pool is shut first or a copy fails."""
        assert all(0 <= s < self._store.num_pages and 0 <= t < pool.num_pages for s, t in pages), "no such page"
        self._jobs.put((pool, ticket, pages, slices))

    def done(self) -> list[int]:
        """Tickets whose pages are all in place, each once."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """End after the copies that were begun; shut the pools first."""
        self._jobs.put(None)
        self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            pool, ticket, pages, slices = job
            try:
                is_whole = all(self._copy(pool, source, target, slices) for source, target in pages)
            except Exception as error:  # for example the device's; the loop must learn of it
                log.exception("a page could not be copied")
                pool.problem = str(error) or type(error).__name__
                is_whole = False
            if is_whole:
                self._done.append(ticket)
            os.eventfd_write(self._wake, 1)

    def _copy(self, pool: MappedPool, source: int, target: int, slices: SlicePair | None) -> bool:
        """Copy one page. False: the pool is shut, or an earlier copy into it failed."""
        with pool.lock:
            if not pool.is_open or pool.problem:
                return False
            if slices is None and self._at:
                num_bytes = pool.page_bytes
                ctypes.memmove(pool.at + target * num_bytes, self._at + source * num_bytes, num_bytes)
            else:
                num_bytes = self._copy_view(pool, source, target, slices)
            self.num_bytes += num_bytes
        return True

    def _copy_view(self, pool: MappedPool, source: int, target: int, slices: SlicePair | None) -> int:
        """Copy from a device, or slice by slice; returns the number of bytes."""
        begin = target * pool.page_bytes
        with memoryview(pool.memory) as theirs, theirs[begin : begin + pool.page_bytes] as into:
            if slices is None:
                self._store.export_page(source, into)
                return pool.page_bytes
            stage(self._store, (source,))
            size = self._store.layout.page_bytes
            with memoryview(self._store.memory) as ours, ours[source * size : (source + 1) * size] as page:
                copy(slices, page, into)
            return slices.num_bytes
