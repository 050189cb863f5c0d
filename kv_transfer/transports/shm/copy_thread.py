"""The thread that copies pages into the pools of other processes, so that a node's loop never waits for memory.

It lets go of the interpreter's lock while a page is copied. A pool is fenced by its own lock, which is held from the
question whether it is still open to the last byte of one page: once ``Pool.shut`` has returned, nothing is written any
more, and neither is one of our pages read for it.
"""

import ctypes
import logging
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence

from kv_transfer.page_slices import Piece, copy
from kv_transfer.transports.base import PageStore, address_of, stage

log = logging.getLogger(__name__)


class Pool:
    """A peer's pool, mapped. ``page_bytes``: of its pages."""

    def __init__(self, memory: mmap.mmap, page_bytes: int) -> None:
        self.memory = memory
        self.page_bytes = page_bytes
        self.num_pages = len(memory) // page_bytes
        self.at = address_of(memory)
        self.lock = threading.Lock()
        self.is_open = True
        self.problem = ""  # why a copy into it failed

    def shut(self) -> None:
        """Waits for one page at most. After it nothing is copied, and the mapping is gone."""
        self.is_open = False  # before the lock is asked for: the thread could have it again and again
        with self.lock:
            self.memory.close()  # raises if somebody still has a view of it, and then nothing is said


class Copier:
    """Copies page after page, ticket after ticket. ``wake``: an eventfd of the owner's, written when one is over."""

    def __init__(self, store: PageStore, wake: int) -> None:
        self.num_bytes = 0  # copied
        self._store = store
        self._wake = wake
        self._at = address_of(store.memory) if store.is_mapped else 0
        self._jobs: queue.SimpleQueue[tuple[Pool, int, Sequence[tuple[int, int]], Piece | None] | None] = (
            queue.SimpleQueue()
        )
        self._done: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, name="shm-copy", daemon=True)
        self._thread.start()

    # ---- called by the loop -------------------------------------------------------------------------------------

    def begin(self, pool: Pool, ticket: int, pages: Sequence[tuple[int, int]], piece: Piece | None) -> None:
        """Copy pages (ours, theirs). The ticket is never heard of if the pool is shut first, or a copy fails."""
        assert all(0 <= s < self._store.num_pages and 0 <= t < pool.num_pages for s, t in pages), "no such page"
        self._jobs.put((pool, ticket, pages, piece))

    def done(self) -> list[int]:
        """Tickets whose pages are all in place, each once."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Ends after what was begun; shut the pools first."""
        self._jobs.put(None)
        self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            pool, ticket, pages, piece = job
            try:
                is_whole = all(self._copy(pool, source, target, piece) for source, target in pages)
            except Exception as error:  # a device's, say; the loop must hear of it
                log.exception("a page could not be copied")
                pool.problem = str(error) or type(error).__name__
                is_whole = False
            if is_whole:
                self._done.append(ticket)
            os.eventfd_write(self._wake, 1)

    def _copy(self, pool: Pool, source: int, target: int, piece: Piece | None) -> bool:
        """One page. False: the pool is shut, or a copy into it has failed."""
        with pool.lock:
            if not pool.is_open or pool.problem:
                return False
            if piece is None and self._at:
                num_bytes = pool.page_bytes
                ctypes.memmove(pool.at + target * num_bytes, self._at + source * num_bytes, num_bytes)
            else:
                num_bytes = self._copy_view(pool, source, target, piece)
            self.num_bytes += num_bytes
        return True

    def _copy_view(self, pool: Pool, source: int, target: int, piece: Piece | None) -> int:
        """From a device, or in pieces; returns the bytes."""
        begin = target * pool.page_bytes
        with memoryview(pool.memory) as theirs, theirs[begin : begin + pool.page_bytes] as into:
            if piece is None:
                self._store.export_page(source, into)
                return pool.page_bytes
            stage(self._store, (source,))
            size = self._store.geometry.page_bytes
            with memoryview(self._store.memory) as ours, ours[source * size : (source + 1) * size] as page:
                copy(piece, page, into)
            return piece.num_bytes
