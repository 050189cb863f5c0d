"""One connection's receiving end: a thread that places pages, each byte only while its page may be written.

``Leave`` is who may write which page now; the loop gives and takes it, inlets ask. An inlet asks before each single
``recv_into`` and holds its lock from the question to the last byte copied, without ever waiting for data meanwhile. So
once leave is taken and the lock was free for a moment, no byte reaches the page any more.
"""

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence

from kv_transfer.transports.base import PageStore
from kv_transfer.transports.tcp_wire import DONE, DONE_MAGIC, FRAME_BYTES, PAGE, PAGE_MAGIC, Seal

log = logging.getLogger(__name__)

_SCRATCH_BYTES = 64 << 10
_WORTHWHILE_BYTES = 256 << 10


class Leave:
    """Which peer may write which page, under which epoch. Single dict operations, so safe between threads."""

    def __init__(self) -> None:
        self.num_bytes = 0  # placed
        self.num_refused = 0  # pages
        self._owners: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()  # of the totals

    def give(self, peer: str, epoch: int, pages: Sequence[int]) -> None:
        owner = (peer, epoch)
        for page in pages:
            self._owners[page] = owner

    def take(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owners.pop(page, None)

    def revoke(self, peer: str) -> None:
        """All of this peer's."""
        for page in [page for page, owner in list(self._owners.items()) if owner[0] == peer]:
            self._owners.pop(page, None)

    def has(self, owner: tuple[str, int], page: int) -> bool:
        return self._owners.get(page) == owner

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.num_refused += not num_bytes


class Inlet:
    """Args:
    owner: (peer, epoch) whose connection this is.
    seals: of page headers, which come, and of acknowledgements, which go.
    on_end: called in the thread when the connection ends.
    """

    def __init__(
        self,
        connection: socket.socket,
        owner: tuple[str, int],
        seals: tuple[Seal, Seal],
        store: PageStore,
        leave: Leave,
        on_end: "Callable[[Inlet], None]",
    ) -> None:
        self.peer = owner[0]
        self.why = ""
        self._connection = connection
        self._owner = owner
        self._page_seal, self._done_seal = seals
        self._store = store
        self._page_bytes = store.geometry.page_bytes
        self._leave = leave
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_open = True
        self._page = -1  # being received
        self._at_least = 1  # bytes that must have arrived for the connection to count as readable
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._scratch = bytearray(min(_SCRATCH_BYTES, self._page_bytes))
        self._thread = threading.Thread(target=self._run, name="tcp-receive", daemon=True)

    def start(self) -> None:
        self._connection.setblocking(True)
        self._thread.start()

    # ---- called by the loop -------------------------------------------------------------------------------------

    def wait_out(self, pages: Sequence[int]) -> None:
        """Leave for these was taken: return when no byte is on its way into them. Waits for one copy at most."""
        if self._page in pages:
            with self._lock:
                pass

    def shut(self) -> None:
        """Nothing is placed any more from here on. The thread ends soon; ``collect`` it."""
        with self._lock:
            self._is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def collect(self) -> bool:
        """Has the thread ended? Then nothing is left of this connection."""
        if self._thread.is_alive():
            return False
        self._connection.close()
        return True

    def join(self) -> None:
        self._thread.join()
        self._connection.close()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        header = bytearray(FRAME_BYTES)
        number = 0
        try:
            with memoryview(self._store.memory) as memory, memoryview(header) as view:
                while self._fill(view):
                    page = self._understood(bytes(header), number)
                    is_placed = self._place(memory, page)
                    self._acknowledge(is_placed, page, number)
                    number += 1
                self.why = self.why or "it was closed at the other end"
        except OSError as error:
            self.why = error.strerror or str(error)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._on_end(self)

    def _fill(self, into: memoryview) -> bool:
        """Read a header. False if the connection ends before one begins."""
        at = 0
        while at < len(into):
            num_bytes = self._connection.recv_into(into[at:])
            if not num_bytes:
                if at:
                    raise ConnectionError("it was cut within a frame")
                return False
            at += num_bytes
        return True

    def _understood(self, frame: bytes, number: int) -> int:
        """The page that is to follow. Raises ConnectionError for anything but the next page of a writer we know."""
        header = frame[: PAGE.size]
        magic, num_bytes, page, given = PAGE.unpack(header)
        if magic != PAGE_MAGIC or not self._page_seal.is_mine(header, frame[PAGE.size :]):
            raise ConnectionError("something came that is no page of this writer")
        if given != number:
            raise ConnectionError(f"page number {number} was to come, and {given} came")
        if num_bytes != self._page_bytes or page >= self._store.num_pages:
            raise ConnectionError(f"a page came that this pool does not have: number {page}, {num_bytes} bytes")
        return int(page)

    def _place(self, memory: memoryview, page: int) -> bool:
        """Receive a page's bytes, into the pool as long as that is allowed, else into nowhere. Was it placed whole?"""
        base, at, is_allowed = page * self._page_bytes, 0, True
        self._page = page
        while at < self._page_bytes:
            with self._lock:
                if not self._is_open:
                    raise ConnectionError("it was closed on our side")
                is_allowed = is_allowed and self._leave.has(self._owner, page)
                into = memory[base + at : base + self._page_bytes] if is_allowed else memoryview(self._scratch)
                with into[: self._page_bytes - at] as room:
                    num_bytes = self._receive(room)
                into.release()
            if not num_bytes:
                raise ConnectionError("it was cut within a page")
            at += max(num_bytes, 0)
            if at < self._page_bytes:
                self._wait(self._page_bytes - at)
        with self._lock:
            is_allowed = is_allowed and self._leave.has(self._owner, page)
            if is_allowed:
                self._leave.take((page,))  # once
        self._page = -1
        self._leave.count(self._page_bytes if is_allowed else 0)
        return is_allowed

    def _wait(self, num_missing: int) -> None:
        """Until a good part of what is missing has arrived, so that few calls fetch much; or the connection ends."""
        at_least = min(num_missing, _WORTHWHILE_BYTES)
        if at_least != self._at_least:
            self._at_least = at_least
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_least)
        self._readable.poll()

    def _receive(self, into: memoryview) -> int:
        """What is there, without waiting. -1: nothing yet; 0: the other end closed."""
        try:
            return self._connection.recv_into(into, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return -1

    def _acknowledge(self, is_placed: bool, page: int, number: int) -> None:
        header = DONE.pack(DONE_MAGIC, is_placed, page, number)
        self._connection.sendall(header + self._done_seal.mac(header))
