"""The transfer endpoint in the process of another rank: its own transports over its own pool, as rank 0 says."""

import logging
import select
import socket
import time
from typing import Any

from common.errors import ConfigError
from common.wire.messages import Connect
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, AttachError, ReaderTransport, Transport, WriterTransport
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from kv_transfer.transports.ranks.channel import Answer, Call, FrameStream, News, Refusal, arguments_of

log = logging.getLogger(__name__)

_POLL_MS = 1_000


def serve_rank(connection: socket.socket, store: PageStore) -> None:
    """Open the reader or the writer that rank 0 asks for, and serve it until rank 0 closes the connection.

    Rank 0 takes an end without a ``close`` before it as the loss of this rank, so that no error here remains unnoticed.
    """
    endpoint = RankEndpoint(FrameStream(connection), store)
    try:
        while endpoint.turn():
            pass
    except (EOFError, ConnectionError):
        pass  # rank 0 has ended
    except Exception:
        log.exception("the transfer endpoint of this rank failed")
    finally:
        endpoint.close()


class RankEndpoint:
    """One end of this rank's transports."""

    def __init__(self, stream: FrameStream, store: PageStore) -> None:
        self._stream = stream
        self._store = store
        self._reader: ReaderTransport | None = None
        self._writer: WriterTransport | None = None
        self._tickets: dict[int, tuple[int, str]] = {}  # of the transport -> rank 0's, and the peer
        self._failed: list[Attached] = []
        self._poller = select.poll()
        self._poller.register(stream.connection, select.POLLIN)

    @property
    def _transport(self) -> Transport:
        transport = self._reader or self._writer
        assert transport is not None
        return transport

    def turn(self) -> bool:
        """Wait for something to do, and do it. False: rank 0 has closed this end.

        Raises:
            EOFError: rank 0 has ended.
        """
        ready = {descriptor for descriptor, _ in self._poller.poll(_POLL_MS)}
        if self._stream.connection.fileno() in ready:
            for call in self._stream.receive(waits=False):
                assert isinstance(call, Call)
                self._perform(call)
                if call.method == "close":
                    return False
        self._report()
        return True

    def _perform(self, call: Call) -> None:
        try:
            result = getattr(self, f"_{call.method}")(*arguments_of(call))
        except ConfigError as error:
            self._stream.send(Refusal(str(error)))
            return
        if not call.is_post:
            self._stream.send(Answer(result))

    def _report(self) -> None:
        news = News()
        if self._writer is not None:
            attached, self._failed = [*self._failed, *self._writer.poll()], []
            for peer in self._writer.returns():
                self._writer.attach_beside(peer, None)
            over = [self._tickets.pop(ticket)[0] for ticket in self._writer.done() if ticket in self._tickets]
            news = News(attached, over)
        elif self._reader is not None:
            news = News(fenced=self._reader.poll(time.monotonic()))
        if news != News():
            self._stream.send(news)

    def close(self) -> None:
        """Close the transports and the connection. Idempotent."""
        self._close()
        self._stream.close()

    # ---- both ends --------------------------------------------------------------------------------------------------

    def _open_reader(self, settings: TransportSettings) -> list[str]:
        self._reader = open_reader(self._store, settings)
        return self._opened()

    def _open_writer(self, settings: TransportSettings) -> list[str]:
        self._writer = open_writer(self._store, settings)
        return self._opened()

    def _opened(self) -> list[str]:
        for descriptor in self._transport.files():
            self._poller.register(descriptor, select.POLLIN)
        return [self._transport.name, *self._transport.names]

    def _close(self) -> None:
        if self._reader is not None or self._writer is not None:
            self._transport.close()
        self._reader = self._writer = None

    def _counters(self) -> dict[str, float]:
        return self._transport.counters()

    # ---- the writer -------------------------------------------------------------------------------------------------

    def _attach(self, peer: str, connect: Connect) -> None:
        assert self._writer is not None
        try:
            self._writer.attach(peer, connect)
        except AttachError as error:
            self._failed.append(Attached(peer, connect.epoch, str(error)))

    def _prepare(self, peer: str, pages: list[int]) -> None:
        assert self._writer is not None
        self._writer.prepare(peer, pages)

    def _write(self, ticket: int, peer: str, pages: list[tuple[int, int]], slices: SlicePair | None) -> None:
        assert self._writer is not None
        self._tickets[self._writer.write(peer, pages, slices)] = (ticket, peer)

    def _detach(self, peer: str) -> bool:
        assert self._writer is not None
        is_fenced = self._writer.detach(peer)
        if is_fenced:
            self._tickets = {ticket: known for ticket, known in self._tickets.items() if known[1] != peer}
        return is_fenced

    def _source_checksums(self, pages: list[int], slices: SlicePair | None) -> list[int]:
        assert self._writer is not None
        return self._writer.checksums(pages, slices)

    # ---- the reader -------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Methods that the reader has under the same name."""
        if name not in ("_offer", "_withdraw", "_forget", "_chosen", "_allow", "_forbid", "_reclaim", "_landed"):
            raise AttributeError(name)
        return getattr(self._reader, name.removeprefix("_"))

    def _target_checksums(self, peer: str, pages: list[int], page_slice: PageSlice) -> list[int]:
        assert self._reader is not None
        return self._reader.checksums(peer, pages, page_slice)
