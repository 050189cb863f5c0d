"""One connection's sending end: a thread that only sends pages, or pieces of them, straight from the pool."""

import contextlib
import logging
import queue
import socket
from typing import Any

from kv_transfer.pieces import Piece, whole
from kv_transfer.transports.base import PageStore
from kv_transfer.transports.tcp_wire import PAGE, PAGE_MAGIC, Seal

log = logging.getLogger(__name__)

MAX_BUFFERS = 512  # of one call; systems allow 1,024

Job = tuple[int, int, Piece | None]  # our page, the peer's page, what of it


class Outlet:
    """What the thread of one connection does: frame after frame, straight from the pool."""

    def __init__(
        self, connection: socket.socket, jobs: "queue.SimpleQueue[Job | None]", seal: Seal, store: PageStore
    ) -> None:
        self._connection = connection
        self._jobs = jobs
        self._seal = seal
        self._memory: Any = store.memory
        self._page_bytes = store.geometry.page_bytes
        self._whole = whole(store.geometry)

    def run(self) -> None:
        try:
            with memoryview(self._memory) as memory:
                number = 0
                while (job := self._jobs.get()) is not None:
                    source, target, piece = job
                    box = self._whole if piece is None else piece.target
                    num_bytes = self._page_bytes if piece is None else piece.num_bytes
                    header = PAGE.pack(PAGE_MAGIC, num_bytes, target, number, *box)
                    with memory[source * self._page_bytes : (source + 1) * self._page_bytes] as page:
                        if piece is None:
                            self._send(header + self._seal.mac(header), page)
                        else:
                            self._gather(header + self._seal.mac(header), page, piece)
                    number += 1
        except OSError as error:
            log.debug("a page connection ends: %s", error)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # the loop hears of it

    def _send(self, header: bytes, page: memoryview) -> None:
        num_sent = self._connection.sendmsg((header, page))
        if num_sent < len(header):
            self._connection.sendall(header[num_sent:])
            num_sent = len(header)
        at = num_sent - len(header)
        while at < len(page):
            with page[at:] as rest:
                at += self._connection.send(rest)

    def _gather(self, header: bytes, page: memoryview, piece: Piece) -> None:
        """Send the runs of a piece, many to a call."""
        buffers = [memoryview(header), *(page[at : at + length] for at, _, length in piece.runs)]
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
