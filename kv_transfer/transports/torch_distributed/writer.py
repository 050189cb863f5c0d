"""The prefill node's side of Gloo and NCCL: as TCP's, but the bytes go through a group. See the package's docstring."""

import contextlib
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from common.wire.messages import Connect
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.tcp.protocol import AuthenticatedConnection
from kv_transfer.transports.tcp.send_thread import Job, SendThread
from kv_transfer.transports.tcp.writer import PeerState, Stage, TcpConnection, TcpWriter
from kv_transfer.transports.torch_distributed.backend import Group, Pages, check_available, named_errors
from kv_transfer.transports.torch_distributed.reader import DEPTH, magic_of
from kv_transfer.transports.torch_distributed.rendezvous import WRITER, form


class GroupWriter(TcpWriter):
    """``WriterTransport`` of a prefill node, for use in ``NegotiatingWriter``, which waits where ``detach`` must.

    Args:
        backend: "gloo", or "nccl" for a pool on a CUDA device.

    Raises:
        ConfigError: torch does not have the backend, or the pool is not for it.
    """

    def __init__(self, store: PageStore, backend: str, *, key: bytes = b"") -> None:
        check_available(backend)
        self.name = backend
        self.magic = magic_of(backend)
        self._pages = Pages(store, backend)
        super().__init__(store, key=key)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._changed: deque[GroupSendThread] = deque()  # appended by threads whose group has formed, or has ended

    def attach(self, peer: str, connect: Connect) -> None:
        if not connect.endpoint.endswith(":1"):
            raise AttachError(f"the endpoint offered by {connect.name} is not one of {self.name}")
        super().attach(peer, connect)

    def _make_send_thread(self, authenticated: AuthenticatedConnection) -> SendThread:
        def join() -> Group:
            return form(authenticated, self.name, WRITER, self._pages)

        return GroupSendThread(authenticated, self.store, join=join, note_change=self._note_change)

    def _note_change(self, thread: "GroupSendThread") -> None:
        """Called in the thread of a connection."""
        self._changed.append(thread)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _mark_ready(self, peer_state: PeerState, connection: TcpConnection) -> None:
        """Wait for the group: until it has formed, only the thread reads from the connection."""
        connection.stage = Stage.OPENING
        self._epoll.unregister(connection.sock)

    def _process_events(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._changed:
            thread = self._changed.popleft()
            for peer_state, connection in list(self._by_descriptor.values()):
                if connection.thread is not thread or connection.stage is not Stage.OPENING or peer_state.is_broken:
                    continue
                if thread.is_formed:
                    self._epoll.register(connection.sock, select.EPOLLIN)
                    super()._mark_ready(peer_state, connection)
                else:
                    self._break(peer_state, thread.why)
        super()._process_events()

    def _stage(self, page: int) -> None:
        if self.name == "gloo":  # NCCL takes pages from where they are
            super()._stage(page)

    def close(self) -> None:
        if not self._epoll.closed:
            super().close()
            os.close(self._wake)


class GroupSendThread(SendThread):
    """Forms a group, and sends pages through it.

    Args:
        join: forms the group; blocks.
        note_change: called in the thread when the group has formed, and when the thread needs no page any more.
    """

    def __init__(
        self,
        authenticated: AuthenticatedConnection,
        store: PageStore,
        *,
        join: Callable[[], Group],
        note_change: Callable[["GroupSendThread"], None],
    ) -> None:
        super().__init__(authenticated, store)
        self.is_formed = False
        self._join = join
        self._note_change = note_change
        self._group: Group | None = None
        self._lock = threading.Lock()  # guards the next two
        self._is_stopped = False
        self._is_sending = False  # our pages are being read

    # ---- called by the loop -------------------------------------------------------------------------------------

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        self._jobs.put(None)
        group = self._group
        if group is not None:
            group.abort()

    @property
    def is_idle(self) -> bool:
        return not self._is_sending

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._is_sending = False
            self._note_change(self)

    def _serve(self, memory: memoryview) -> None:
        group = self._group = self._join()
        try:
            self.is_formed = True
            self._note_change(self)
            with named_errors(), group.pages.on_own_stream():
                self._send_pages(group)
        finally:
            group.close()

    def _send_pages(self, group: Group) -> None:
        """As ``SendThread._serve``, with up to ``DEPTH`` pages on their way at once."""
        going: deque[tuple[Any, Any]] = deque()  # what to wait for, and the memory that it occupies
        spare = [group.pages.staging() for _ in range(DEPTH)]
        number = 0
        while True:
            job = self._next(is_waiting=not going) if spare else ()
            if job is None or not self._may_send():
                return
            if job:
                source, target, slices = job
                room = spare.pop()
                header, part = self._header(target, slices, number), group.pages.gather(source, slices, room)
                self._connection.sendall(header)
                going.append((group.send(part), room))
                if (body := self._seal.body(header)) is not None:
                    body.add(group.pages.read(part))
                    self._connection.sendall(body.mac())
                number += 1
            else:
                work, room = going.popleft()
                group.wait(work)
                spare.append(room)
                self._is_sending = bool(going)

    def _next(self, *, is_waiting: bool) -> Job | tuple[()] | None:
        """The next job, () if there is none and none is waited for, or None for the end."""
        try:
            return self._jobs.get(block=is_waiting)
        except queue.Empty:
            return ()

    def _may_send(self) -> bool:
        with self._lock:
            self._is_sending = self._is_sending or not self._is_stopped
            return not self._is_stopped
