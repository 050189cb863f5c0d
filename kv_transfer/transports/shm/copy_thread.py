"""Copy pages into the pools of other processes in a thread, so that a node's loop never waits for memory.

Every pool has a lock of its own, which is held from the check that the pool is still open until the last byte of one
piece of a write is in place. Once ``PeerPool.shut`` has returned True, nothing more is written to that pool, and no
page of ours is read for it.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from kv_transfer.page_slices import SlicePair, copy
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import address_of, stage
from kv_transfer.transports.threads import start_thread

log = logging.getLogger(__name__)

#: Pages that are prepared later; if more are granted, those that were granted first are left out.
MAX_EXPECTED = 65_536
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels refuse it, and pages are provided when they are written
_libc = ctypes.CDLL(None)  # mmap.madvise would keep the interpreter's lock


class PeerPool(ABC):
    """A peer's pool that this process can write.

    Attributes:
        pages_at_once: pages that are copied under one hold of the lock, for which ``shut`` may have to wait.
        problem: why a copy failed.
    """

    pages_at_once = 1

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.lock = threading.Lock()
        self.is_open = True
        self.problem = ""

    @abstractmethod
    def put(self, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> int:
        """Copy pages (ours, theirs) and return the number of bytes. All of them are in place then."""

    def prepare(self, page: int) -> None:
        """Make the first write to a page faster, if that is possible; its bytes stay as they are."""
        return

    @abstractmethod
    def release(self) -> bool:
        """Give the memory back. False: copies may still be under way, and nothing can be done about them."""

    def shut(self) -> bool:
        """Wait for at most ``pages_at_once`` pages, then release the pool; nothing is copied into it afterwards."""
        self.is_open = False  # set before the lock is taken: the thread could take it again and again
        with self.lock:
            return self.release()


class MappedPool(PeerPool):
    """A peer's pool in our address space. Copies release the interpreter's lock."""

    def __init__(self, store: PageStore, memory: mmap.mmap, page_bytes: int) -> None:
        super().__init__(len(memory) // page_bytes)
        self.memory = memory
        self._store = store
        self._page_bytes = page_bytes
        self._at = address_of(memory)
        self._our_at = address_of(store.memory) if store.is_mapped else 0

    def put(self, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> int:
        return sum(self._copy(source, target, slices) for source, target in pages)

    def prepare(self, page: int) -> None:
        """Have the operating system provide and map the page's memory, which takes longer than to copy it."""
        first = page * self._page_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        length = (page + 1) * self._page_bytes - first
        _libc.madvise(ctypes.c_void_p(self._at + first), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def _copy(self, source: int, target: int, slices: SlicePair | None) -> int:
        if slices is not None or not self._our_at:
            return self._copy_view(source, target, slices)
        num_bytes = self._page_bytes
        ctypes.memmove(self._at + target * num_bytes, self._our_at + source * num_bytes, num_bytes)
        return num_bytes

    def _copy_view(self, source: int, target: int, slices: SlicePair | None) -> int:
        """Copy from a device, or slice by slice."""
        begin = target * self._page_bytes
        with memoryview(self.memory) as theirs, theirs[begin : begin + self._page_bytes] as into:
            if slices is None:
                self._store.export_page(source, into)
                return self._page_bytes
            stage(self._store, (source,))
            size = self._store.layout.page_bytes
            with memoryview(self._store.memory) as ours, ours[source * size : (source + 1) * size] as page:
                copy(slices, page, into)
            return slices.num_bytes

    def release(self) -> bool:
        self.memory.close()  # raises while a view of it exists, and then DETACHED is not sent
        return True


_Job = tuple[PeerPool, int, Sequence[tuple[int, int]], SlicePair | None]  # with a ticket
_PREPARE = 0  # instead of a ticket


class CopyThread:
    """Copies piece after piece, ticket after ticket, and writes to the eventfd ``wake`` after each ticket.

    While there is nothing to copy, it prepares pages that will be written later, one after the other.

    Raises OSError: this process may have no further thread.
    """

    def __init__(self, name: str, num_pages: int, wake: int) -> None:
        self.num_bytes = 0  # copied
        self._num_pages = num_pages  # of our own pool
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._expected: deque[tuple[PeerPool, int]] = deque(maxlen=MAX_EXPECTED)  # pages to prepare; of the thread
        self._done: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, name=f"{name}-copy", daemon=True)
        start_thread(self._thread)

    # ---- called by the loop -------------------------------------------------------------------------------------

    def begin(self, pool: PeerPool, ticket: int, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> None:
        """Copy pages (ours, theirs). The ticket is never reported if the pool is shut first or a copy fails."""
        assert all(0 <= s < self._num_pages and 0 <= t < pool.num_pages for s, t in pages), "no such page"
        self._jobs.put((pool, ticket, pages, slices))

    def prepare(self, pool: PeerPool, pages: Sequence[int]) -> None:
        """Prepare a pool's pages when there is nothing to copy."""
        self._jobs.put((pool, _PREPARE, [(0, page) for page in pages], None))

    def done(self) -> list[int]:
        """Tickets whose pages are all in place, each once."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """End after the copies that were begun; shut the pools first."""
        self._jobs.put(None)
        self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            pool, ticket, pages, slices = job
            if ticket == _PREPARE:
                self._expected.extend((pool, page) for _, page in pages)
                continue
            pieces = [pages[at : at + pool.pages_at_once] for at in range(0, len(pages), pool.pages_at_once)]
            try:
                is_whole = all(self._copy(pool, piece, slices) for piece in pieces)
            except Exception as error:  # for example the device's; the loop must learn of it
                log.exception("a page could not be copied")
                pool.problem = str(error) or type(error).__name__
                is_whole = False
            if is_whole:
                self._done.append(ticket)
            os.eventfd_write(self._wake, 1)

    def _next(self) -> _Job | None:
        """Wait for a job, and prepare pages meanwhile."""
        while self._expected:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get_nowait()
            pool, page = self._expected.popleft()
            with pool.lock:
                if pool.is_open:
                    pool.prepare(page)
        return self._jobs.get()

    def _copy(self, pool: PeerPool, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> bool:
        """Copy one piece of a write. False: the pool is shut, or an earlier copy into it failed."""
        with pool.lock:
            if not pool.is_open or pool.problem:
                return False
            self.num_bytes += pool.put(pages, slices)
        return True
