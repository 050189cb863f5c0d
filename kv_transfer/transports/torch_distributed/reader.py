"""The decode node's side of Gloo and NCCL: as TCP's, but the bytes come through a group and are copied into the pool
here.

A page is copied at one moment, if it may be written then.
"""

import hmac
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kv_transfer.page_slices import PageSlice
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import InPlace
from kv_transfer.transports.tcp.protocol import PAGE_FRAME_BYTES, AuthenticatedConnection, PayloadMac
from kv_transfer.transports.tcp.reader import TcpReader
from kv_transfer.transports.tcp.receive_thread import ReceiveThread, WritePermissions
from kv_transfer.transports.torch_distributed.backend import Group, Pages, check_available, named_errors
from kv_transfer.transports.torch_distributed.rendezvous import READER, form

DEPTH = 4  # pages under way in a group


class GroupReader(TcpReader):
    """``ReaderTransport`` of a decode node.

    Args:
        backend: "gloo", or "nccl" for a pool on a CUDA device.

    Raises:
        ConfigError: torch does not have the backend, the pool is not for it, or the address is not ours.
    """

    def __init__(self, store: PageStore, backend: str, *, host: str = "127.0.0.1", key: bytes = b"") -> None:
        check_available(backend)
        self.name = backend
        self.magic = magic_of(backend)
        self._pages = Pages(store, backend)
        super().__init__(store, host=host, key=key, num_connections=1)
        if backend == "nccl":
            self.store = InPlace(store)

    def _make_receive_thread(self, authenticated: AuthenticatedConnection, owner: tuple[str, int]) -> ReceiveThread:
        def join() -> Group:
            return form(authenticated, self.name, READER, self._pages)

        return GroupReceiveThread(authenticated, owner, self.store, self._permissions, self._on_end, join=join)


class _Coming(NamedTuple):
    """A page, or a slice of one, that is being received.

    Attributes:
        room: memory into which it is received.
        work: to wait for.
        body, mac: the expected mac, with a cluster key.
    """

    page: int
    page_slice: PageSlice
    number: int
    room: Any
    work: Any
    body: PayloadMac | None
    mac: bytes


class GroupReceiveThread(ReceiveThread):
    """Receives into memory of its own, and copies from there under its lock, for which ``forbid`` waits.

    Args:
        join: forms the group; blocks.
    """

    def __init__(
        self,
        authenticated: AuthenticatedConnection,
        owner: tuple[str, int],
        store: PageStore,
        permissions: WritePermissions,
        on_end: Callable[[ReceiveThread], None],
        *,
        join: Callable[[], Group],
    ) -> None:
        super().__init__(authenticated, owner, store, permissions, on_end)
        self._join = join
        self._group: Group | None = None

    def shut(self) -> None:
        super().shut()
        group = self._group
        if group is not None:
            group.abort()

    def _serve(self, memory: memoryview) -> None:
        group = self._group = self._join()
        try:
            with self._lock:
                if not self._is_open:  # ``shut`` may have come before there was a group to abort
                    raise ConnectionError("it was closed on our side")
            with named_errors(), group.pages.on_own_stream():
                self._receive_pages(group)
        finally:
            group.close()

    def _receive_pages(self, group: Group) -> None:
        """As ``ReceiveThread._serve``, with up to ``DEPTH`` pages on their way at once."""
        header = bytearray(PAGE_FRAME_BYTES)
        coming: deque[_Coming] = deque()
        spare = [group.pages.staging() for _ in range(DEPTH)]
        number = 0
        with memoryview(header) as view:
            while True:
                while spare and (not coming or self._readable.poll(0)):
                    if not self._fill(view):
                        return
                    page, page_slice = self._understood(bytes(header), number)
                    room, num_bytes = spare.pop(), page_slice.num_bytes(self._store.layout)
                    work = group.receive(room[:num_bytes])
                    body = self._page_seal.body(bytes(header))
                    coming.append(_Coming(page, page_slice, number, room, work, body, self._mac_after(body)))
                    number += 1
                first = coming.popleft()
                group.wait(first.work)
                self._acknowledge(self._put(group.pages, first), first.page, first.number)
                spare.append(first.room)

    def _put(self, pages: Pages, came: _Coming) -> bool:
        """Copy what has come whole into the pool, if that is permitted; return whether it was.

        Raises:
            ConnectionError: it is not what the writer sent.
        """
        num_bytes = came.page_slice.num_bytes(self._store.layout)
        if came.body is not None:
            came.body.add(pages.read(came.room[:num_bytes]))
            if not hmac.compare_digest(came.body.mac(), came.mac):
                raise ConnectionError("the bytes of a page were changed on the way")
        grant = self._permissions.claim(self._owner, came.page, came.page_slice)
        self._page = came.page
        with self._lock:
            if not self._is_open:
                raise ConnectionError("it was closed on our side")
            is_allowed = self._permissions.holds(self._owner, grant, came.page)
            if is_allowed:
                pages.scatter(came.page, self._runs_of(came.page_slice), came.room)
        self._page = -1
        self._permissions.count(num_bytes if is_allowed else 0)
        return is_allowed


def magic_of(backend: str) -> bytes:
    return f"bato{backend}".encode()
