"""The contract of a transport.

A *writer* (prefill node) attaches to a peer's pool and puts pages into it by number; a *reader* (decode node) offers
its pool. Each transport declares its *fence*, the proof that no write can reach the pool any more. That proof comes
from one of two sides: the writer's word, given once its transport has nothing under way (``done``, ``detach``), or
``ReaderTransport.poll``, which reports writers that are proven unable to write. Silence, a timeout, and a connection
that the other end closed prove nothing.

Where the reader places the bytes itself (TCP) it is the fence: it writes only into pages that are permitted at that
moment, and ``forbid`` and ``withdraw`` take effect before they return.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from common.errors import BatonError
from common.wire.messages import Connect
from kv_transfer.checksums import Checksums
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.page_store import PageStore


class AttachError(BatonError):
    """This peer's pool cannot be written to; the message is a sentence for the peer's operator."""


@runtime_checkable
class RunCopier(Protocol):
    """A ``PageStore`` whose device copies runs of pages, (offset in the page, bytes) each, in one launch."""

    @property
    def can_copy_runs(self) -> bool: ...

    def gather(self, pages: Sequence[int], runs: tuple[tuple[int, int], ...], staging: Any) -> None:
        """Put the runs of each page one after another into ``staging``, a uint8 tensor on the device."""
        ...

    def scatter(self, pages: Sequence[int], runs: tuple[tuple[int, int], ...], staging: Any) -> None:
        """Put back into the pages what ``gather`` would take from them."""
        ...


class InPlace:
    """A store whose pages arrive on their device, so that nothing is left to do when they have landed."""

    is_in_place = True

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def landed(self, pages: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Attached:
    """How an attachment ended, or that one which had worked has failed.

    Attributes:
        problem: empty if pages can be written now, else a sentence; then the peer must still be detached.
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
    """Proof that under epochs up to ``epoch`` this peer cannot write into our pool. ``is_dead``: it never will."""

    peer: str
    epoch: int
    reason: str
    is_dead: bool = field(default=False, compare=False)


class Transport(Protocol):
    """What both sides have in common.

    ``num_ranks``: processes among which this node divides its pages. ``store`` is then that of all together, with the
    layout of whole pages.
    """

    name: str
    store: PageStore
    num_ranks: int = 1

    @property
    def names(self) -> Sequence[str]:
        """Transports that may carry pages, best first; one that carries them itself names itself."""
        return (self.name,)

    def files(self) -> Sequence[int]:
        """File descriptors whose input should wake the loop for ``poll``. They stay the same."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals, by name; a writer's ``bytes_by_NAME`` is the page payload that this transport moved."""
        ...

    def close(self) -> None: ...


class WriterTransport(Transport, Protocol):
    """The prefill node's side."""

    def checksums(self, pages: Sequence[int], slices: SlicePair | None) -> list[int]:
        """Checksums of our pages as they stand in the pool, or of the source slices of them."""
        return Checksums(self.store).of_sources(pages, slices)

    def attach(self, peer: str, connect: Connect) -> None:
        """Begin to attach to a peer's pool, without waiting for the peer.

        ``poll`` goes on with it, and reports how it ended. It may open the pool, and move a few bytes to try it out.

        Raises:
            AttachError: it cannot work, and that is known at once.
        """
        ...

    def poll(self) -> list[Attached]:
        """Attachments that have succeeded or failed since the last call; one that had succeeded may fail later."""
        ...

    def prepare(self, peer: str, pages: Sequence[int]) -> None:
        """These pages of the attached peer will be written later. By default nothing is done with that."""
        return

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        """Begin to copy pages (ours, the attached peer's), or a slice of each; None: whole pages to whole pages.

        Returns:
            A ticket that ``done`` returns when all pages are in place; if they are already, ``files`` may not
            signal it.
        """
        ...

    def done(self) -> list[int]:
        """Tickets whose writes are over, oldest first, each once."""
        ...

    def returns(self) -> list[str]:
        """Attached peers for which a better transport should be tried again, each once: ask each for an offer beside
        the attachment, and answer with ``attach_beside``. By default there are none.
        """
        return []

    def attach_beside(self, peer: str, connect: Connect | None) -> bool:
        """Begin to attach by a better transport under a later epoch, while the attachment goes on; as ``attach``.

        As soon as it works and nothing is under way, ``poll`` reports ``Attached`` under the later epoch, which then is
        the peer's only one. If it does not work, that is not reported.

        Args:
            connect: None: the peer cannot offer its pool beside the attachment.

        Returns:
            False: that was not asked for, or is known not to work; the offer is not used.
        """
        return False

    def is_changing(self, peer: str) -> bool:
        """Whether an attached peer changes its transport as soon as nothing is under way, so that no write should
        begin.
        """
        return False

    def late(self) -> list[str]:
        """Attached peers to which something has been under way for longer than usual since the last call.

        They are sent something on the control plane: if they acknowledge that, and nothing that they are sent here,
        packets of this transport are lost (``kv_transfer.transports.silence``). By default nothing is known of that.
        """
        return []

    def detach(self, peer: str) -> bool:
        """Drop a peer's pool, attached or attaching or neither; nothing new is written to it. Never blocks.

        Returns:
            True: nothing is under way either, and of this peer's tickets ``done`` may yet return those that were
                over before, and no others. False: writes that cannot be called back still read our pages and may
                reach the peer's; ``done`` returns every ticket of that peer when it is over, if ever, including one
                that failed before, and attaching to this peer waits for that. Our pages may change meanwhile: see
                ``Sender``.
        """
        ...

    def voided(self, peer: str, endpoint: str) -> None:
        """A detached peer with writes under way makes this new offer. If the offer says that these writes cannot reach
        its pool any more, they are over. By default no offer says so.
        """
        return


class ReaderTransport(Transport, Protocol):
    """The decode node's side."""

    def landed(self, peer: str, pages: Sequence[int]) -> None:
        """All units of these pages of this peer have arrived. When this returns, they can be read in the pool."""
        self.store_of(peer).landed(pages)

    def checksums(self, peer: str, pages: Sequence[int], page_slice: PageSlice) -> list[int]:
        """Checksums of one slice of pages that have come from this peer, where it has come to."""
        return Checksums(self.store_of(peer)).of_targets(pages, page_slice)

    def expect(self, peer: str, num_ranks: int) -> None:
        """This peer divides its pages among so many ranks; said before each offer to it."""
        assert num_ranks == 1, "only the transports of a node in several ranks can do more"

    def offer(self, peer: str, epoch: int) -> str:
        """The endpoint through which this peer alone may attach under this epoch, once. Earlier offers to it end."""
        ...

    def offer_beside(self, peer: str, epoch: int) -> str:
        """As ``offer``, by better transports than the one by which the peer is attached, which stays attached until
        ``chosen`` is called for this epoch. Empty: there are none. By default there are none.
        """
        return ""

    def withdraw(self, peer: str) -> None:
        """End offers to this peer.

        Where the reader places the bytes, what is attached ends at once, too; elsewhere it stays attached. Either way
        ``poll`` reports when the peer can write no more.
        """
        ...

    def forget(self, peer: str) -> None:
        """Nothing is asked about pages of this peer any more until it gets a new offer. It is withdrawn."""
        return

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        """The peer reports the transport by which it attached. False: that was not offered."""
        return transport == self.name

    def store_of(self, peer: str) -> PageStore:
        """The store as the pages of this peer arrive in it: with some transports on the device, with others beside it.

        The peer has reported its transport and has not been forgotten since: pages that have come are read, and count,
        until its end is proven.
        """
        return self.store

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        """Permit this peer to write these pages under this epoch, each byte once; or the slice ``again`` of them, which
        has come already, once more. Only a reader that places the bytes itself can permit and forbid.
        """
        return

    def forbid(self, pages: Sequence[int]) -> None:
        """Take back every permission to write these pages. Where the reader places the bytes, none reaches them after
        this; elsewhere no write to them is under way any more.
        """
        return

    def reclaim(self, peer: str, epoch: int) -> None:
        """Pages granted to this peer under this epoch have been in quarantine for long, or the peer has dropped them
        with writes under way.

        Fence it from this side if that is possible, though other pairs may break; ``poll`` reports it. May be called
        repeatedly. By default this cannot be done.
        """
        return

    def poll(self, now: float) -> list[Fenced]:
        """Accept waiting writers; report writers that can write no more. ``now`` in seconds."""
        ...


class TransportEnds(Protocol):
    """Both ends of a node's transports over its pool.

    A prefill node writes. A decode node reads and, when a request moves to another decode node, writes.
    """

    @property
    def reader(self) -> ReaderTransport: ...

    @property
    def writer(self) -> WriterTransport: ...


def node_of(peer: str) -> str:
    """The incarnation in the name of a peer; a transport of ranks calls them ``INCARNATION/RANK``."""
    return peer.partition("/")[0]


def stage(store: PageStore, pages: Iterable[int]) -> None:
    """Make sure that the bytes of these pages stand in ``store.memory``, wherever the pool is."""
    if store.is_mapped:
        return
    size = store.layout.page_bytes
    with memoryview(store.memory) as memory:
        for page in pages:
            with memory[page * size : (page + 1) * size] as into:
                store.export_page(page, into)


def address_of(memory: Any) -> int:
    """The address of a writable buffer, which must outlive the use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
