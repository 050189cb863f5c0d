"""The thread that sends pages, or slices of them, over one connection, straight from the pool."""

import contextlib
import logging
import queue
import socket
import threading
from typing import Any

from kv_transfer.page_slices import SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.tcp.protocol import PAGE, PAGE_MAGIC, AuthenticatedConnection
from kv_transfer.transports.threads import start_thread

log = logging.getLogger(__name__)

MAX_BUFFERS = 512  # in one call; Linux allows 1,024
JOIN_S = 5.0  # a thread ends well within this time after it was stopped

Job = tuple[int, int, SlicePair]  # our page, the peer's page, and which slices of them


class SendThread:
    """One connection's sending thread, and the queue through which the loop feeds it."""

    def __init__(self, authenticated: AuthenticatedConnection, store: PageStore) -> None:
        self.why = ""  # why the thread ended by itself
        self._connection = authenticated.connection
        self._seal = authenticated.seal(b"pages")
        self._memory: Any = store.memory
        self._page_bytes = store.layout.page_bytes
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="send-pages", daemon=True)

    # ---- called by the loop -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises OSError: this process may have no further thread."""
        self._connection.setblocking(True)  # for the thread; the loop says MSG_DONTWAIT
        start_thread(self._thread)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Send nothing more; the connection has been shut down. ``is_idle`` says when that holds."""
        self._jobs.put(None)
        self._thread.join()  # returns at once, since the socket accepts nothing more

    @property
    def is_idle(self) -> bool:
        """Whether the thread has been stopped and reads none of our pages."""
        return self.is_over

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(JOIN_S)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with memoryview(self._memory) as memory:
                self._serve(memory)
        except OSError as error:
            self.why = error.strerror or str(error)
            log.debug("a page connection ends: %s", error)
        finally:  # whatever has ended it, no page leaves any more
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the loop

    def _serve(self, memory: memoryview) -> None:
        number = 0
        while (job := self._jobs.get()) is not None:
            source, target, slices = job
            header = self._header(target, slices, number)
            with memory[source * self._page_bytes : (source + 1) * self._page_bytes] as page:
                self._send(header, page, slices)
                self._sign(header, page, slices)
            number += 1

    def _sign(self, header: bytes, page: memoryview, slices: SlicePair) -> None:
        """Send the mac of a page after its bytes, so that the bytes travel while the mac is computed."""
        body = self._seal.body(header)
        if body is None:
            return
        for at, _, length in slices.runs:
            with page[at : at + length] as run:
                body.add(run)
        self._connection.sendall(body.mac())

    def _header(self, target: int, slices: SlicePair, number: int) -> bytes:
        header = PAGE.pack(PAGE_MAGIC, slices.num_bytes, target, number, *slices.target[:4])
        return header + self._seal.mac(header)

    def _send(self, header: bytes, page: memoryview, slices: SlicePair) -> None:
        """Send the runs of a slice, many to a call."""
        buffers = [memoryview(header), *(page[at : at + length] for at, _, length in slices.runs)]
        first = 0
        while first < len(buffers):
            num_sent = self._connection.sendmsg(buffers[first : first + MAX_BUFFERS])
            while first < len(buffers) and num_sent >= len(buffers[first]):
                num_sent -= len(buffers[first])
                buffers[first].release()
                first += 1
            if num_sent:
                rest = buffers[first][num_sent:]
                buffers[first].release()
                buffers[first] = rest
