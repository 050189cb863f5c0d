"""Who has connected to a reader and has not shown yet who it is: let in, waited for, turned away.

Part of the reader's loop; nothing here blocks. Strangers can wait for a while, and push each other out, but no more: a
writer shows at once who it is. A process that has no descriptors left does not look at its listener for a while, which
would be readable all the time.
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

PATIENCE_S = 10.0  # whoever has not shown by then who it is is turned away
MAX_VISITORS = 64
REST_S = 1.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class Visitor:
    """A connection, and since when there is one, in seconds."""

    connection: socket.socket
    since: float


V = TypeVar("V", bound=Visitor)


class Visitors(Generic[V]):
    """Args:
        listener: not blocking, and closed here.
        epoll: the reader's, which tells of the listener and of visitors.
        place: what they visit, for people.
        make: of a new connection.
        screen: the reason for which a connection is turned away unheard; empty: none.

    Attributes:
        dropped: how many were turned away, by reason.
    """

    def __init__(
        self,
        listener: socket.socket,
        epoll: select.epoll,
        place: str,
        *,
        make: Callable[[socket.socket, float], V],
        screen: Callable[[socket.socket], str] = lambda _: "",
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._listener = listener
        self._epoll = epoll
        self._place = place
        self._make = make
        self._screen = screen
        self._present: dict[int, V] = {}  # by descriptor
        self._rests_until: float | None = None
        self._has_complained = False
        epoll.register(listener, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._present)

    def get(self, descriptor: int) -> V | None:
        return self._present.get(descriptor)

    def is_listener(self, descriptor: int) -> bool:
        return descriptor == self._listener.fileno()

    def let_in(self, now: float, hear: Callable[[V], None]) -> None:
        """The listener is readable: everybody who waits there is listened to at once."""
        for _ in range(MAX_VISITORS):
            try:
                connection, _address = self._listener.accept()
            except OSError as error:  # no more, but for the exhausted
                if error.errno in EXHAUSTED:
                    self._rest(now, error)
                return
            connection.setblocking(False)
            reason = self._screen(connection)
            if reason:
                self._count(reason)
                connection.close()
                continue
            if len(self._present) >= MAX_VISITORS:
                self.turn_away(next(iter(self._present.values())), "crowd")
            visitor = self._present[connection.fileno()] = self._make(connection, now)
            self._epoll.register(connection, select.EPOLLIN)
            hear(visitor)

    def _rest(self, now: float, error: OSError) -> None:
        self._epoll.unregister(self._listener)
        self._rests_until = now + REST_S
        if not self._has_complained:
            self._has_complained = True
            log.error("nobody new can reach %s, which is tried again every second: %s", self._place, error.strerror)

    def look_after(self, now: float) -> None:
        """To be called now and then, at least once a second."""
        if self._rests_until is not None and self._rests_until <= now:
            self._rests_until = None
            self._epoll.register(self._listener, select.EPOLLIN)
        for visitor in [visitor for visitor in self._present.values() if visitor.since + PATIENCE_S <= now]:
            self.turn_away(visitor, "silent")

    def turn_away(self, visitor: V, reason: str) -> None:
        self._count(reason)
        self.leave(visitor)
        visitor.connection.close()

    def leave(self, visitor: V) -> None:
        """It is a stranger no more: its connection is the caller's."""
        del self._present[visitor.connection.fileno()]
        self._epoll.unregister(visitor.connection)

    def _count(self, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            log.warning("turned a visitor of %s away (%s); further ones are only counted", self._place, reason)

    def counters(self) -> dict[str, float]:
        return {f"turned_away_{reason}": float(count) for reason, count in self.dropped.items()}

    def close(self) -> None:
        """Close every connection of theirs, and the listener. Idempotent."""
        for visitor in self._present.values():
            visitor.connection.close()
        self._present.clear()
        self._listener.close()
