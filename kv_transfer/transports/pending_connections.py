"""Connections that have been accepted and have not authenticated themselves yet.

Their number and the time that they may take are bounded, so that strangers cannot use up a reader's descriptors. There
is always room for those that are awaited, since many peers may connect at once when a reader starts. When the process
runs out of descriptors or memory, the listener is left alone for a second.
"""

import errno
import logging
import select
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # a connection that has not authenticated itself by then is rejected
MAX_PENDING = 64  # beside those that are awaited
PAUSE_S = 1.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class PendingConnection:
    """An accepted socket that has not authenticated itself, and the instant at which it was accepted, in seconds."""

    connection: socket.socket
    since: float


V = TypeVar("V", bound=PendingConnection)


class PendingConnections(Generic[V]):
    """Accepts connections and keeps them until they have authenticated themselves.

    Args:
        listener: not blocking, and closed here.
        epoll: the reader's, which reports input of the listener and of pending connections.
        place: what the peers connect to, for log lines.
        make: builds the entry of a new connection.
        screen: the reason for which a connection is rejected unheard; empty: none.
        num_awaited: how many connections of peers are awaited.

    Attributes:
        dropped: rejected connections, by reason.
    """

    def __init__(
        self,
        listener: socket.socket,
        epoll: select.epoll,
        place: str,
        *,
        make: Callable[[socket.socket, float], V],
        screen: Callable[[socket.socket], str] = lambda _: "",
        num_awaited: Callable[[], int] = lambda: 0,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._listener = listener
        self._epoll = epoll
        self._place = place
        self._make = make
        self._screen = screen
        self._num_awaited = num_awaited
        self._by_descriptor: dict[int, V] = {}
        self._paused_until: float | None = None
        self._has_logged = False
        epoll.register(listener, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def get(self, descriptor: int) -> V | None:
        return self._by_descriptor.get(descriptor)

    def is_listener(self, descriptor: int) -> bool:
        return descriptor == self._listener.fileno()

    def accept(self, now: float, hear: Callable[[V], None]) -> None:
        """Accept every connection that waits at the listener, and read what it has sent."""
        most = MAX_PENDING + self._num_awaited()
        for _ in range(MAX_PENDING):
            try:
                connection, _address = self._listener.accept()
            except OSError as error:  # none waits, or the process has run out of descriptors or memory
                if error.errno in EXHAUSTED:
                    self._pause(now, error)
                return
            connection.setblocking(False)
            reason = self._screen(connection)
            if reason:
                self._count(reason)
                connection.close()
                continue
            if len(self._by_descriptor) >= most:
                self.reject(next(iter(self._by_descriptor.values())), "crowded")
            pending = self._by_descriptor[connection.fileno()] = self._make(connection, now)
            self._epoll.register(connection, select.EPOLLIN)
            hear(pending)

    def _pause(self, now: float, error: OSError) -> None:
        self._epoll.unregister(self._listener)
        self._paused_until = now + PAUSE_S
        if not self._has_logged:
            self._has_logged = True
            log.error("%s cannot accept connections and retries every second: %s", self._place, error.strerror)

    def expire(self, now: float) -> None:
        """Reject connections that stay silent, and listen again after a pause. Call at least once a second."""
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            self._epoll.register(self._listener, select.EPOLLIN)
        for pending in [pending for pending in self._by_descriptor.values() if pending.since + PATIENCE_S <= now]:
            self.reject(pending, "silent")

    def reject(self, pending: V, reason: str) -> None:
        self._count(reason)
        self.promote(pending)
        pending.connection.close()

    def promote(self, pending: V) -> None:
        """The connection has authenticated itself and belongs to the caller from here on."""
        del self._by_descriptor[pending.connection.fileno()]
        self._epoll.unregister(pending.connection)

    def _count(self, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            log.warning("rejected a connection to %s (%s); further ones are only counted", self._place, reason)

    def counters(self) -> dict[str, float]:
        return {f"rejected_{reason}": float(count) for reason, count in self.dropped.items()}

    def close(self) -> None:
        """Close every pending connection and the listener. Idempotent."""
        for pending in self._by_descriptor.values():
            pending.connection.close()
        self._by_descriptor.clear()
        self._listener.close()
