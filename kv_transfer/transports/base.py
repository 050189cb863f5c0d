"""What a transport must do, and nothing about how.

A *writer* (prefill node) attaches to a peer's pool and puts pages into it by number; a *reader* (decode node) offers
its pool. Each transport declares its *fence*, the proof that no write can reach the pool any more, and that proof
comes from one of two sides: ``WriterTransport.detach`` returns only when this process cannot write to that peer any
more, and ``ReaderTransport.poll`` reports writers that are proven unable to. Silence, a closed connection and a
timeout prove nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import BatonError
from common.geometry import PageGeometry
from common.messages import Connect, Geometry


class AttachError(BatonError):
    """This peer's pool cannot be written to; the message is a sentence for the peer's operator."""


class PageStore(Protocol):
    """A pool of KV pages as transfers see it.

    ``fd`` is a memfd of exactly ``geometry.pool_bytes(num_pages)`` bytes in which a writer of the same host puts
    pages, and ``memory`` is our own mapping of it.
    """

    @property
    def geometry(self) -> PageGeometry: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def fd(self) -> int: ...

    @property
    def memory(self) -> Any: ...  # a writable buffer

    def export_page(self, page: int, into: memoryview) -> None:
        """Copy a page's bytes out. Keeps no reference to ``into``."""
        ...

    def landed(self, pages: Sequence[int]) -> None:
        """The bytes of these pages have arrived in ``memory``."""
        ...


@dataclass(frozen=True, slots=True)
class Attached:
    """How an attachment ended. ``problem`` is empty if pages can be written now, else a sentence."""

    peer: str
    epoch: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Proven: under epochs up to ``epoch`` this peer can write into our pool no more."""

    peer: str
    epoch: int
    reason: str


class WriterTransport(Protocol):
    """The prefill node's side."""

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> PageStore: ...

    def attach(self, peer: str, connect: Connect) -> None:
        """Begin to attach to a peer's pool; never blocks. ``poll`` tells how it ended.

        Raises:
            AttachError: it cannot work, and that is known at once.
        """
        ...

    def poll(self) -> list[Attached]:
        """Attachments that have succeeded or failed since the last call."""
        ...

    def write(self, peer: str, pages: Sequence[tuple[int, int]]) -> int:
        """Begin to copy pages (ours, the attached peer's).

        Returns:
            A ticket that ``done`` returns when all of them are in place.
        """
        ...

    def done(self) -> list[int]:
        """Tickets whose writes are over, oldest first, each once."""
        ...

    def detach(self, peer: str) -> None:
        """Let go of a peer's pool, attached or attaching or neither. The fence: after it, no write reaches that pool.

        Of tickets of that peer, ``done`` may yet return those that were over before, and no others.
        """
        ...

    def files(self) -> Sequence[int]:
        """File descriptors whose input should wake the loop for ``poll``. Stays the same."""
        ...

    def close(self) -> None: ...


class ReaderTransport(Protocol):
    """The decode node's side."""

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> PageStore: ...

    def offer(self, peer: str, epoch: int) -> str:
        """The endpoint through which this peer alone may attach under this epoch, once. Ends earlier offers to it."""
        ...

    def withdraw(self, peer: str) -> None:
        """Offers to this peer end. What is attached stays attached: see ``poll``."""
        ...

    def poll(self, now: float) -> list[Fenced]:
        """Let waiting writers in; report those that can write no more. ``now`` in seconds."""
        ...

    def files(self) -> Sequence[int]:
        """File descriptors whose input should wake the loop for ``poll``. Stays the same."""
        ...

    def close(self) -> None: ...


def to_message(geometry: PageGeometry) -> Geometry:
    """A page's shape as it travels."""
    return Geometry(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        dtype=geometry.dtype,  # type: ignore[arg-type]  # one of the three names that PageGeometry knows
    )
