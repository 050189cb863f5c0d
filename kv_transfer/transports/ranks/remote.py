"""The transports of another rank, as rank 0 uses them.

A call waits for its answer, since what it forbids or permits must hold when it returns. Attachments and writes are only
begun, so they do not wait.
"""

import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import Any, Literal

from common.errors import BatonError, ConfigError, RankLostError
from common.wire.messages import Connect
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, Fenced, ReaderTransport, Transport, WriterTransport
from kv_transfer.transports.factory import TransportSettings
from kv_transfer.transports.ranks.channel import Answer, Frame, FrameStream, News, Refusal, call_of

#: A rank that does not answer a call for so long is lost.
TIMEOUT_S = 60.0


class RankConnection:
    """The connection to one end of a rank's transports.

    The loss of the rank is raised once. The node ends then, and what it still calls has no effect.

    Args:
        rank: for error messages.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(TIMEOUT_S)
        self._rank = rank
        self._is_lost = False
        self._stream = FrameStream(connection)
        self._news: list[News] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # set while news have come in the course of a call
        self._epoll = select.epoll()
        self._epoll.register(connection, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)

    def files(self) -> Sequence[int]:
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def post(self, method: str, *arguments: Any) -> None:
        """Have a method called that has no result."""
        if self._is_lost:
            return
        try:
            self._stream.send(call_of(method, *arguments, is_post=True))
        except OSError as error:
            raise self._lost(error) from error

    def call(self, method: str, *arguments: Any) -> Any:
        """Have a method called, and return its result; None if the rank was lost before.

        Raises:
            ConfigError: the end cannot be opened.
            RankLostError: the rank has ended, or does not answer.
        """
        if self._is_lost:
            return None
        try:
            self._stream.send(call_of(method, *arguments))
            answer: Frame | None = None
            while answer is None:
                for frame in self._stream.receive(waits=True):
                    if isinstance(frame, News):
                        self._news.append(frame)
                        os.eventfd_write(self._wake, 1)
                    else:
                        answer = frame
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        if isinstance(answer, Refusal):
            raise ConfigError(answer.problem)
        assert isinstance(answer, Answer)
        return answer.result

    def news(self) -> list[News]:
        """What the rank has reported since the last call.

        Raises:
            RankLostError: the rank has ended.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            for frame in () if self._is_lost else self._stream.receive(waits=False):
                assert isinstance(frame, News)
                self._news.append(frame)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        news, self._news = self._news, []
        return news

    def _lost(self, error: Exception) -> RankLostError:
        self._is_lost = True
        why = str(error) or "it has ended"
        return RankLostError(f"the transfer endpoint of tensor-parallel rank {self._rank} does not answer: {why}")

    def close(self) -> None:
        """Have the end closed, unless the rank is lost. Idempotent."""
        if self._epoll.closed:
            return
        with contextlib.suppress(RankLostError):
            self.call("close")
        self._stream.close()
        self._epoll.close()
        os.close(self._wake)


class _RemoteEnd(Transport):
    """What the two ends have in common.

    Args:
        connection: to a process that serves ``serve_rank``.
        own: the pool of rank 0, which has the same size and layout as that of the other rank.
        rank: whose transports these are.

    Raises:
        ConfigError: the transport that was asked for is not available there.
        RankLostError: the rank does not answer.
    """

    def __init__(
        self,
        connection: socket.socket,
        own: PageStore,
        settings: TransportSettings,
        *,
        end: Literal["reader", "writer"],
        rank: int,
    ) -> None:
        self._connection = RankConnection(connection, rank)
        self.store = own
        try:
            opened: list[str] = self._connection.call(f"open_{end}", settings)
        except BatonError:
            self._connection.close()
            raise
        self.name, self._names = opened[0], opened[1:]

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def files(self) -> Sequence[int]:
        return self._connection.files()

    def counters(self) -> dict[str, float]:
        return dict(self._connection.call("counters") or {})

    def close(self) -> None:
        self._connection.close()


class RemoteWriter(_RemoteEnd, WriterTransport):
    """``WriterTransport`` of another rank."""

    def __init__(self, connection: socket.socket, own: PageStore, settings: TransportSettings, rank: int) -> None:
        super().__init__(connection, own, settings, end="writer", rank=rank)
        self._num_tickets = 0
        self._attached: list[Attached] = []
        self._done: list[int] = []

    def _hear(self) -> None:
        for news in self._connection.news():
            self._attached += news.attached
            self._done += news.done

    def attach(self, peer: str, connect: Connect) -> None:
        self._connection.post("attach", peer, connect)

    def poll(self) -> list[Attached]:
        self._hear()
        attached, self._attached = self._attached, []
        return attached

    def prepare(self, peer: str, pages: Sequence[int]) -> None:
        self._connection.post("prepare", peer, list(pages))

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        self._num_tickets += 1
        self._connection.post("write", self._num_tickets, peer, list(pages), slices)
        return self._num_tickets

    def done(self) -> list[int]:
        self._hear()
        done, self._done = self._done, []
        return done

    def detach(self, peer: str) -> bool:
        return bool(self._connection.call("detach", peer))

    def checksums(self, pages: Sequence[int], slices: SlicePair | None) -> list[int]:
        return list(self._connection.call("source_checksums", list(pages), slices))


class RemoteReader(_RemoteEnd, ReaderTransport):
    """``ReaderTransport`` of another rank."""

    def __init__(self, connection: socket.socket, own: PageStore, settings: TransportSettings, rank: int) -> None:
        super().__init__(connection, own, settings, end="reader", rank=rank)

    def offer(self, peer: str, epoch: int) -> str:
        return str(self._connection.call("offer", peer, epoch))

    def withdraw(self, peer: str) -> None:
        self._connection.call("withdraw", peer)

    def forget(self, peer: str) -> None:
        self._connection.post("forget", peer)

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        return bool(self._connection.call("chosen", peer, epoch, transport))

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        self._connection.call("allow", peer, epoch, list(pages), again)

    def forbid(self, pages: Sequence[int]) -> None:
        self._connection.call("forbid", list(pages))

    def reclaim(self, peer: str, epoch: int) -> None:
        self._connection.call("reclaim", peer, epoch)

    def landed(self, peer: str, pages: Sequence[int]) -> None:
        if not self.store.is_mapped:  # otherwise they are where they should be
            self._connection.call("landed", peer, list(pages))

    def checksums(self, peer: str, pages: Sequence[int], page_slice: PageSlice) -> list[int]:
        return list(self._connection.call("target_checksums", peer, list(pages), page_slice))

    def poll(self, now: float) -> list[Fenced]:
        return [fenced for news in self._connection.news() for fenced in news.fenced]
