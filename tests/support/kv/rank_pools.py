"""The pools of a node with several ranks: rank 0 is this process, and the others are forked from it.

The test's process has the memory of all pools, so that it can fill and read whole pages. It asks this module alone for
the numbers of ranks: ``TEST_RANKS`` says how many this node has.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Literal

import numpy as np
from support.kv.kv_fakes import MemfdStore, shape_of

from common.cache.page_layout import PageLayout, kv_heads_of
from kv_transfer.page_mapping import rank_layout
from kv_transfer.transports.factory import TransportSettings
from kv_transfer.transports.ranks.endpoint import serve_rank
from kv_transfer.transports.ranks.node_transports import NodeTransports

_PR_SET_PDEATHSIG = 1


class RankPools:
    """Pools that look like one with whole pages.

    Args:
        make: makes the pool of one rank, whose memory forked processes share.
        prepare: called in each forked process before it serves.

    Attributes:
        pids: of the other ranks.
    """

    def __init__(
        self, layout: PageLayout, num_ranks: int, make: Callable[[PageLayout], MemfdStore], prepare: Callable[[], None]
    ) -> None:
        self.layout = layout
        self.stores = [make(rank_layout(layout, num_ranks)) for _ in range(num_ranks)]
        self._heads = [kv_heads_of(rank, num_ranks, layout.num_kv_heads) for rank in range(num_ranks)]
        self._ends: list[socket.socket] = []
        self.pids = [self._fork(store, prepare) for store in self.stores[1:]]

    def _fork(self, store: MemfdStore, prepare: Callable[[], None]) -> int:
        """Fork a process that serves one end of a rank. This process has one thread, and nothing of a transport yet."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._ends.append(ours)
            return pid
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for end in (ours, *self._ends):
                end.close()
            with open(os.devnull) as nothing:
                for number in (0, 1):  # the commands and answers of rank 0
                    os.dup2(nothing.fileno(), number)
            prepare()
            if os.getppid() == parent:
                serve_rank(theirs, store)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    def open(self, settings: TransportSettings, end: Literal["reader", "writer"]) -> NodeTransports:
        others = [iter([connection]).__next__ for connection in self._ends]
        return NodeTransports(self.stores[0], settings, first=end, layout=self.layout, others=others)

    def _page(self, rank: int, page: int) -> np.ndarray:
        """[layer][side][head][token][head_dim] of one rank."""
        store = self.stores[rank]
        return np.frombuffer(store.read(page), np.int32).reshape(shape_of(store.layout))

    def put(self, page: int, data: bytes) -> None:
        whole = np.frombuffer(data, np.int32).reshape(shape_of(self.layout))
        for rank, heads in enumerate(self._heads):
            self.stores[rank].put(page, whole[:, :, heads.start : heads.stop].tobytes())

    def read(self, page: int) -> bytes:
        """The bytes of a whole page; where several ranks have the same heads, they must be equal."""
        whole = np.zeros(shape_of(self.layout), np.int32)
        for rank, heads in enumerate(self._heads):
            whole[:, :, heads.start : heads.stop] = self._page(rank, page)
        for rank, heads in enumerate(self._heads):
            assert (whole[:, :, heads.start : heads.stop] == self._page(rank, page)).all(), f"rank {rank} differs"
        return whole.tobytes()

    def fill(self, page: int, value: int) -> None:
        self.put(page, bytes([value]) * self.layout.page_bytes)

    def close(self) -> None:
        for store in self.stores:
            with contextlib.suppress(BufferError):
                store.close()
