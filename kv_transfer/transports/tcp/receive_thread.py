"""The thread that receives pages over one connection and places each byte only while its page may be written.

``WritePermissions`` records which peer may write which page; the loop grants and revokes permissions, and threads claim
them. A thread checks the permission before each ``recv_into`` and holds its lock from the check to the last byte
copied, without waiting for data meanwhile. So once a permission is revoked and the lock was free for a moment, no byte
reaches the page any more.
"""

import contextlib
import hmac
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kv_transfer.page_slices import PageSlice
from kv_transfer.page_store import PageStore
from kv_transfer.transports.silence import LATE_S, LOOK_PAUSE_S, LOST, has_silent, is_waiting
from kv_transfer.transports.tcp.protocol import (
    DONE,
    DONE_MAGIC,
    MAC_BYTES,
    PAGE,
    PAGE_FRAME_BYTES,
    PAGE_MAGIC,
    AuthenticatedConnection,
    PayloadMac,
)
from kv_transfer.transports.threads import start_thread

_SCRATCH_BYTES = 64 << 10
_WORTHWHILE_BYTES = 256 << 10
MAX_BUFFERS = 64  # filled by one call, which copies for at most a tenth of a millisecond


class WritePermission:
    """Permission of one peer to write one page under one epoch, granted once.

    ``claimed``: slices that have come, or are coming.
    """

    __slots__ = ("claimed", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.claimed: list[PageSlice] = []


class WritePermissions:
    """Which peers may write which page, under which epoch. Single dict operations, so thread-safe.

    A page has several where the ranks of one node write parts of it.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # placed
        self.num_refused = 0  # pages, or parts of some
        self._by_page: dict[int, dict[str, WritePermission]] = {}
        self._lock = threading.Lock()  # guards the totals and the claims

    def give(self, peer: str, epoch: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._by_page.setdefault(page, {})[peer] = WritePermission(epoch)

    def give_again(self, owner: tuple[str, int], pages: Sequence[int], page_slice: PageSlice) -> None:
        """Permit a slice that has come to be written once more."""
        for page in pages:
            grant = self._permission(owner, page)
            with self._lock:
                if grant is not None and page_slice in grant.claimed:
                    grant.claimed.remove(page_slice)

    def _permission(self, owner: tuple[str, int], page: int) -> WritePermission | None:
        peer, epoch = owner
        grant = self._by_page.get(page, {}).get(peer)
        return grant if grant is not None and grant.epoch == epoch else None

    def take(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._by_page.pop(page, None)

    def revoke(self, peer: str) -> None:
        for page, grants in list(self._by_page.items()):
            if grants.pop(peer, None) is not None and not grants:
                self._by_page.pop(page, None)

    def claim(self, owner: tuple[str, int], page: int, page_slice: PageSlice) -> WritePermission | None:
        """The permission under which this slice of the page may come; None if there is none. Each byte comes once."""
        grant = self._permission(owner, page)
        with self._lock:
            if grant is None or any(page_slice.overlaps(other) for other in grant.claimed):
                return None
            grant.claimed.append(page_slice)
        return grant

    def holds(self, owner: tuple[str, int], grant: WritePermission | None, page: int) -> bool:
        """Whether the permission is still in force: neither taken back nor replaced since."""
        return grant is not None and self._by_page.get(page, {}).get(owner[0]) is grant

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.num_refused += not num_bytes


class Destination:
    """The memory where the next bytes of a page go: runs of one page, filled in order.

    Attributes:
        num_bytes: size of all runs.
        num_missing: bytes that have not come yet.
    """

    def __init__(self, memory: memoryview, base: int, runs: list[tuple[int, int]]) -> None:
        self.num_bytes = self.num_missing = sum(length for _, length in runs)
        self._memory = memory
        self._base = base
        self._runs = runs
        self._first = 0  # run that is being filled
        self._at = 0  # bytes that it has already

    def buffers(self) -> list[memoryview]:
        """The next runs, as many as one call should fill."""
        at, places = self._at, []
        for offset, length in self._runs[self._first : self._first + MAX_BUFFERS]:
            begin = self._base + offset
            places.append(self._memory[begin + at : begin + length])
            at = 0
        return places

    def next(self, num_bytes: int) -> list[memoryview]:
        """The memory of the next ``num_bytes`` bytes."""
        places = []
        for place in self.buffers() if num_bytes else ():
            places.append(place[:num_bytes])
            num_bytes -= len(places[-1])
        return places

    def filled(self, num_bytes: int) -> None:
        self.num_missing -= num_bytes
        self._at += num_bytes
        while self._first < len(self._runs) and self._at >= self._runs[self._first][1]:
            self._at -= self._runs[self._first][1]
            self._first += 1


class ReceiveThread:
    """One connection's receiving thread.

    Args:
        owner: (peer, epoch) to which the connection belongs.
        on_end: called in the thread when the connection ends.
    """

    def __init__(
        self,
        authenticated: AuthenticatedConnection,
        owner: tuple[str, int],
        store: PageStore,
        permissions: WritePermissions,
        on_end: "Callable[[ReceiveThread], None]",
    ) -> None:
        self.peer = owner[0]
        self.why = "its thread has failed"  # unless it is set
        self._connection = authenticated.connection
        self._owner = owner
        self._page_seal, self._done_seal = authenticated.seal(b"pages"), authenticated.seal(b"acknowledgements")
        self._store = store
        self._page_bytes = store.layout.page_bytes
        self._permissions = permissions
        self._on_end = on_end
        self._last_runs: tuple[PageSlice, list[tuple[int, int]]] | None = None  # the last slice that came, and its runs
        self._lock = threading.Lock()
        self._is_open = True
        self._page = -1  # the page that is being received
        self._at_least = 1  # bytes that must have arrived for the connection to count as readable
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self._scratch = bytearray(min(_SCRATCH_BYTES, self._page_bytes))
        self._thread = threading.Thread(target=self._run, name="receive-pages", daemon=True)

    def start(self) -> None:
        """Raises OSError: this process may have no further thread."""
        self._connection.setblocking(True)
        start_thread(self._thread)

    # ---- called by the loop -------------------------------------------------------------------------------------

    def wait_out(self, pages: frozenset[int]) -> None:
        """After permissions for these pages were taken back: return when no byte is on its way into them.

        Waits for one copy at most.
        """
        if self._page in pages:
            with self._lock:
                pass

    def shut(self) -> None:
        """Place nothing from here on. The thread ends soon; see ``collect``."""
        with self._lock:
            self._is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def collect(self) -> bool:
        """Release what is left of the connection if its thread has ended; return whether it has."""
        if self._thread.is_alive():
            return False
        self._connection.close()
        return True

    def join(self) -> None:
        self._thread.join()
        self._connection.close()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with memoryview(self._store.memory) as memory:
                self._serve(memory)
                self.why = "it was closed at the other end"
        except OSError as error:
            self.why = error.strerror or str(error)
        finally:  # whatever has ended it, no page comes any more
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._on_end(self)

    def _serve(self, memory: memoryview) -> None:
        """Receive page after page until the other end closes.

        Raises:
            OSError: the connection ended within a page, or something else than a page came.
        """
        header = bytearray(PAGE_FRAME_BYTES)
        number = 0
        with memoryview(header) as view:
            while self._fill(view):
                page, page_slice = self._understood(bytes(header), number)
                is_placed = self._place(memory, page, page_slice, self._page_seal.body(bytes(header)))
                self._acknowledge(is_placed, page, number)
                number += 1

    def _fill(self, into: memoryview) -> bool:
        """Read a header. False if the connection ends before one begins."""
        at = 0
        while at < len(into):
            num_bytes = self._receive([into[at:]])
            if num_bytes < 0:
                self._wait(len(into) - at)  # wait for these bytes only: no more may come before an acknowledgement
                continue
            if not num_bytes:
                if at:
                    raise ConnectionError("it was cut within a frame")
                return False
            at += num_bytes
        return True

    def _understood(self, frame: bytes, number: int) -> tuple[int, PageSlice]:
        """The page that follows a header, and which slice of it.

        Raises:
            ConnectionError: it is not the next page of a writer that we know.
        """
        header = frame[: PAGE.size]
        magic, num_bytes, page, given, *numbers = PAGE.unpack(header)
        if magic != PAGE_MAGIC or not self._page_seal.is_mine(header, frame[PAGE.size :]):
            raise ConnectionError("received a frame that is not a page of this writer")
        if given != number:
            raise ConnectionError(f"received frame {given} where frame {number} was expected")
        page_slice, layout = PageSlice(*numbers), self._store.layout
        if (
            page >= self._store.num_pages
            or not page_slice.is_within(layout)
            or num_bytes != page_slice.num_bytes(layout)
        ):
            raise ConnectionError(
                f"a page came that this pool does not have: page {page}, {num_bytes} bytes, {page_slice}"
            )
        return page, page_slice

    def _place(self, memory: memoryview, page: int, page_slice: PageSlice, body: PayloadMac | None) -> bool:
        """Receive the bytes of a page, into the pool while that is permitted and into scratch memory otherwise; return
        whether all were placed.

        Raises:
            ConnectionError: they were, and are not the bytes that the writer sent.
        """
        room = Destination(memory, page * self._page_bytes, self._runs_of(page_slice))
        grant = self._permissions.claim(self._owner, page, page_slice)
        is_allowed = grant is not None
        self._page = page
        while room.num_missing:
            with self._lock:
                if not self._is_open:
                    raise ConnectionError("it was closed on our side")
                is_allowed = is_allowed and self._permissions.holds(self._owner, grant, page)
                num_bytes = self._receive(
                    room.buffers() if is_allowed else [memoryview(self._scratch)[: room.num_missing]]
                )
            if not num_bytes:
                raise ConnectionError("it was cut within a page")
            num_bytes = max(num_bytes, 0)
            if body is not None and is_allowed:
                self._hash(body, room.next(num_bytes))
            room.filled(num_bytes)
            if room.num_missing:
                self._wait(room.num_missing)
        mac = self._mac_after(body)
        with self._lock:
            is_allowed = is_allowed and self._permissions.holds(self._owner, grant, page)
        self._page = -1
        if is_allowed and body is not None and not hmac.compare_digest(body.mac(), mac):
            raise ConnectionError("the bytes of a page were changed on the way")
        self._permissions.count(room.num_bytes if is_allowed else 0)
        return is_allowed

    @staticmethod
    def _hash(body: PayloadMac, places: list[memoryview]) -> None:
        """Add bytes in place: nothing else writes there while the page is permitted; otherwise the mac is unused."""
        for place in places:
            body.add(place)
            place.release()

    def _mac_after(self, body: PayloadMac | None) -> bytes:
        mac = bytearray(MAC_BYTES if body is not None else 0)
        with memoryview(mac) as view:
            if view and not self._fill(view):
                raise ConnectionError("it was cut within a page")
        return bytes(mac)

    def _runs_of(self, page_slice: PageSlice) -> list[tuple[int, int]]:
        """As ``PageSlice.runs``; cached, since the same slice comes many times in a row."""
        if self._last_runs is None or self._last_runs[0] != page_slice:
            self._last_runs = (page_slice, page_slice.runs(self._store.layout))
        return self._last_runs[1]

    def _wait(self, num_missing: int) -> None:
        """Wait until much of what is missing has arrived, so that few calls fetch it, or until the connection ends."""
        at_least = min(num_missing, _WORTHWHILE_BYTES)
        if at_least != self._at_least:
            self._at_least = at_least
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_least)
        began_at, pause_s = time.monotonic(), LATE_S
        while not self._readable.poll(pause_s * 1_000 if pause_s < math.inf else None):
            pause_s = self._look_for_silence(time.monotonic() - began_at)

    def _look_for_silence(self, waited_s: float) -> float:
        """Nothing has come for a while. Return how soon to look again; infinite if nothing of ours is under way.

        Raises:
            ConnectionError: our acknowledgements vanish (``silence``).
        """
        if not is_waiting(self._connection):
            return math.inf
        if has_silent([self._connection], waited_s):
            raise ConnectionError(LOST)
        return LOOK_PAUSE_S

    def _receive(self, into: list[memoryview]) -> int:
        """Read what is there, without waiting. -1: nothing yet; 0: the other end closed."""
        try:
            return self._connection.recvmsg_into(into, 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return -1
        finally:
            for buffer in into:
                buffer.release()

    def _acknowledge(self, is_placed: bool, page: int, number: int) -> None:
        header = DONE.pack(DONE_MAGIC, is_placed, page, number)
        self._connection.sendall(header + self._done_seal.mac(header))
