"""The transports of a node process: those of rank 0 in this process, and those of its other ranks."""

import contextlib
import socket
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

from common.cache.page_layout import PageLayout
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import ReaderTransport, WriterTransport
from kv_transfer.transports.factory import TransportSettings, open_reader, open_writer
from kv_transfer.transports.ranks.reader import RanksReader
from kv_transfer.transports.ranks.remote import RemoteReader, RemoteWriter
from kv_transfer.transports.ranks.writer import RanksWriter

#: Makes a connection to the process of another rank, which serves it with ``serve_rank``.
ConnectRank = Callable[[], socket.socket]


class NodeTransports:
    """The ``TransportEnds`` of a node process, opened when they are first asked for.

    An end has descriptors and, with some transports, a thread and registered memory of its own.

    Args:
        store: the pool of this process, which is rank 0.
        first: the end that the role always needs, which is opened at once.
        layout: of whole pages; None: this is the only rank.
        others: the other ranks.

    Raises:
        ConfigError: as ``open_reader``.
    """

    def __init__(
        self,
        store: PageStore,
        settings: TransportSettings,
        *,
        first: Literal["reader", "writer"],
        layout: PageLayout | None = None,
        others: Sequence[ConnectRank] = (),
    ) -> None:
        self._store = store
        self._settings = settings
        self._layout = layout or store.layout
        self._others = others
        getattr(self, first)

    @cached_property
    def reader(self) -> ReaderTransport:
        """Raises as ``open_reader``."""
        with contextlib.ExitStack() as opened:
            ends: list[ReaderTransport] = [open_reader(self._store, self._settings)]
            opened.callback(ends[0].close)
            for rank, connect in enumerate(self._others, start=1):
                ends.append(RemoteReader(connect(), self._store, self._settings, rank))
                opened.callback(ends[-1].close)
            opened.pop_all()
        return RanksReader(ends, self._layout)

    @cached_property
    def writer(self) -> WriterTransport:
        """Raises as ``open_writer``."""
        with contextlib.ExitStack() as opened:
            ends: list[WriterTransport] = [open_writer(self._store, self._settings)]
            opened.callback(ends[0].close)
            for rank, connect in enumerate(self._others, start=1):
                ends.append(RemoteWriter(connect(), self._store, self._settings, rank))
                opened.callback(ends[-1].close)
            opened.pop_all()
        return RanksWriter(ends, self._layout)

    def close(self) -> None:
        """Close the ends that are open."""
        for name in ("reader", "writer"):
            if name in self.__dict__:
                getattr(self, name).close()
