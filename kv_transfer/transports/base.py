"""What a transport must do, and nothing about how.

A *writer* (prefill node) attaches to a peer's pool and puts pages into it by number; a *reader* (decode node) offers
its pool. Each transport declares its *fence*, the proof that no write can reach the pool any more, and that proof
comes from one of two sides: the writer's word, given once its transport has nothing under way (``done``, ``detach``),
and ``ReaderTransport.poll``, which reports writers that are proven unable to. Silence, a timeout, and a connection
that the other end closed prove nothing.

Where the reader places the bytes itself (TCP) it is the fence: it writes only into pages that are allowed at that
moment, and ``forbid`` and ``withdraw`` take effect before they return.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.cache.page_layout import PageLayout
from common.errors import BatonError
from common.wire.messages import Connect, Geometry
from kv_transfer.page_slices import PageSlice, Piece


class AttachError(BatonError):
    """This peer's pool cannot be written to; the message is a sentence for the peer's operator."""


class PageStore(Protocol):
    """A pool of KV pages as transfers see it.

    ``fd`` is a memfd of exactly ``geometry.pool_bytes(num_pages)`` bytes in which a writer of the same host puts
    pages, and ``memory`` is our own mapping of it. ``is_mapped``: that memory is the pool itself; otherwise (the pool
    is on a device) it is a place beside it, where pages come and go. ``is_in_place``: pages come into the pool itself.

    ``device_pages``: the pool's bytes on its device, a uint8 tensor ``[num_pages, page_bytes]`` for transports that
    move device memory; None where there is no device.
    """

    @property
    def is_mapped(self) -> bool: ...

    @property
    def is_in_place(self) -> bool: ...

    @property
    def geometry(self) -> PageLayout: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def fd(self) -> int: ...

    @property
    def memory(self) -> Any: ...  # a writable buffer

    @property
    def device_pages(self) -> Any: ...

    def export_page(self, page: int, into: memoryview) -> None:
        """Copy a page's bytes out. Keeps no reference to ``into``."""
        ...

    def landed(self, pages: Sequence[int]) -> None:
        """The bytes of these pages have arrived in ``memory``."""
        ...


class InPlace:
    """A store whose pages arrive on its device: when they have landed, nothing is left to be done."""

    is_in_place = True

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def landed(self, pages: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Attached:
    """How an attachment ended, be it soon or after having worked for a while.

    Attributes:
        problem: empty if pages can be written now, else a sentence; then the peer is still to be detached.
        transport: which one carries the pages; empty: the one that was asked.
        why: why this one, for people.
    """

    peer: str
    epoch: int
    problem: str = ""
    transport: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Proven: under epochs up to ``epoch`` this peer can write into our pool no more. ``is_dead``: nor ever again."""

    peer: str
    epoch: int
    reason: str
    is_dead: bool = field(default=False, compare=False)


class Transport(Protocol):
    """What both sides have in common."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> Sequence[str]:
        """Transports that may carry pages, best first; one that carries them itself names itself."""
        ...

    @property
    def store(self) -> PageStore: ...

    def files(self) -> Sequence[int]:
        """File descriptors whose input should wake the loop for ``poll``. Stays the same."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals, by name; among a writer's ``bytes_by_NAME``, the page payload that this transport moved."""
        ...

    def close(self) -> None: ...


class WriterTransport(Transport, Protocol):
    """The prefill node's side."""

    def attach(self, peer: str, connect: Connect) -> None:
        """Begin to attach to a peer's pool; never blocks. ``poll`` tells how it ended.

        Raises:
            AttachError: it cannot work, and that is known at once.
        """
        ...

    def poll(self) -> list[Attached]:
        """Attachments that have succeeded or failed since the last call; one that had succeeded may fail later."""
        ...

    def write(self, peer: str, pages: Sequence[tuple[int, int]], piece: Piece | None = None) -> int:
        """Begin to copy pages (ours, the attached peer's), or this piece of each; None: all of it, to all of it.

        Returns:
            A ticket that ``done`` returns when all of them are in place; if they are already, ``files`` may not tell.
        """
        ...

    def done(self) -> list[int]:
        """Tickets whose writes are over, oldest first, each once."""
        ...

    def detach(self, peer: str) -> bool:
        """Let go of a peer's pool, attached or attaching or neither; nothing new is written to it. Never blocks.

        Returns:
            True: nothing is under way either, and of tickets of that peer, ``done`` may yet return those that were
            over before, and no others. False: writes that cannot be called back still read our pages and may reach
            the peer's; ``done`` returns every ticket of that peer when it is over, if ever, one that failed before
            included, and attaching to this peer waits for that. Our pages may meanwhile change: see ``Sender``.
        """
        ...

    def voided(self, peer: str, endpoint: str) -> None:
        """A peer that was detached from, with writes under way, makes this new offer. If it says that they cannot reach
        its pool any more, they are over."""
        ...


class ReaderTransport(Transport, Protocol):
    """The decode node's side."""

    def offer(self, peer: str, epoch: int) -> str:
        """The endpoint through which this peer alone may attach under this epoch, once. Ends earlier offers to it."""
        ...

    def withdraw(self, peer: str) -> None:
        """Offers to this peer end. Where the reader places the bytes, so does what is attached, here and now; else it
        stays attached. Either way ``poll`` tells when the peer can write no more."""
        ...

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        """The peer says by which transport it attached. False: that was not offered."""
        ...

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        """This peer may write these pages under this epoch, each byte once; or this part of them, which has come
        already, once more. Binding where the reader places the bytes."""
        ...

    def forbid(self, pages: Sequence[int]) -> None:
        """Nobody may write these pages any more. Where the reader places the bytes, no byte reaches them after this."""
        ...

    def reclaim(self, peer: str, epoch: int) -> None:
        """Pages that this peer was granted under this epoch have been in quarantine for long, or it has let go of them
        with writes under way. Fence it from this side if that can be done, though it may break other pairs; ``poll``
        tells. May be said again and again."""
        ...

    def poll(self, now: float) -> list[Fenced]:
        """Let waiting writers in; report those that can write no more. ``now`` in seconds."""
        ...


def to_message(geometry: PageLayout) -> Geometry:
    """A page's shape as it travels."""
    return Geometry.of(geometry)


def from_message(geometry: Geometry) -> PageLayout:
    """A page's shape as it has come."""
    return geometry.layout()


def stage(store: PageStore, pages: Iterable[int]) -> None:
    """Make the bytes of these pages stand in ``store.memory``, wherever the pool is."""
    if store.is_mapped:
        return
    size = store.geometry.page_bytes
    with memoryview(store.memory) as memory:
        for page in pages:
            with memory[page * size : (page + 1) * size] as into:
                store.export_page(page, into)


def address_of(memory: Any) -> int:
    """Where a writable buffer lies. It must outlive the use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
