"""Fake transports that attach, fail and detach on a test's command."""

from collections.abc import Sequence
from typing import Any

from support.kv.kv_fakes import MemfdStore

from common.wire.messages import Connect
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.transports.base import Attached, AttachError, Fenced, ReaderTransport, WriterTransport


class FakeWriter(WriterTransport):
    """A writer that attaches, fails and detaches on a test's command; ``refuses`` is the error of every attachment."""

    def __init__(self, name: str, store: MemfdStore) -> None:
        self.name = name
        self.store = store
        self.refuses = ""
        self.attached: list[tuple[str, str]] = []
        self.news: list[Attached] = []
        self.finished: list[int] = []
        self.is_draining = False
        self.num_detached = 0
        self.voided_by: list[tuple[str, str]] = []
        self._ticket = 0

    def attach(self, peer: str, connect: Connect) -> None:
        if self.refuses:
            raise AttachError(self.refuses)
        self.attached.append((peer, connect.endpoint))

    def poll(self) -> list[Attached]:
        news, self.news = self.news, []
        return news

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        self._ticket += 1
        return self._ticket

    def done(self) -> list[int]:
        finished, self.finished = self.finished, []
        return finished

    def voided(self, peer: str, endpoint: str) -> None:
        self.voided_by.append((peer, endpoint))

    def detach(self, peer: str) -> bool:
        self.num_detached += 1
        return not self.is_draining

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {f"bytes_by_{self.name}": 1.0, "all": 1.0}

    def close(self) -> None:
        pass


class FakeReader(ReaderTransport):
    def __init__(self, name: str, store: MemfdStore) -> None:
        self.name = name
        self.store = store
        self.news: list[Fenced] = []
        self.calls: list[Any] = []
        self.is_over = False

    def offer(self, peer: str, epoch: int) -> str:
        return f"{self.name}-{epoch}"

    def withdraw(self, peer: str) -> None:
        self.calls.append("withdraw")

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        return not self.is_over

    def store_of(self, peer: str) -> MemfdStore:
        return self.store

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        self.calls.append(("allow", *pages))

    def reclaim(self, peer: str, epoch: int) -> None:
        self.calls.append(("reclaim", epoch))

    def forbid(self, pages: Sequence[int]) -> None:
        self.calls.append(("forbid", *pages))

    def poll(self, now: float) -> list[Fenced]:
        news, self.news = self.news, []
        return news

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
