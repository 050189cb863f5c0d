"""The prefill nodes that a decode node offers its pool to: what was agreed with each, and when to offer it anew.

A data connection may break while the control connection holds. As soon as it is proven that nothing can be written any
more under the epoch that broke, the pool is offered again under a new one, a few times, each after a longer pause; a
page that comes in between makes the count begin anew.
"""

from dataclasses import dataclass

from common.wire.messages import Connect
from kv_transfer.page_slices import PageSlice
from kv_transfer.transports.base import ReaderTransport, to_message

#: Tries without a page in between for which transfers wait, the pause before the first (which doubles up to a limit),
#: and how long an answer may take: to the first offer longer, since several transports may be tried, and since it may
#: wait for what is left of an earlier one.
MAX_TRIES = 4
BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
ANSWER_S = 10.0
FIRST_ANSWER_S = 30.0

#: Longer than all of it: a prefill node that has heard nothing by then ends what waits for a new connection.
RESUME_LEASE_S = 60.0


@dataclass(slots=True)
class Link:
    """Attributes:
    name: of the prefill node, for people.
    is_connected: it has attached under ``epoch``.
    parts: in which each of our pages comes.
    transport, why: by which, and why by that one.
    refusal: why transfers do not wait for a connection.
    problem: why no page can come now; empty: pages can, or that is not known yet.
    has_connected: it has attached at least once.
    num_tries: to connect again since the last page came.
    retry_at: when to try next.
    until: how long the answer to a try may take, or the proof that nothing is written any more.
    broken: the prefill node's word for why it has let go; it cannot vouch for the writes that were under way.
    """

    epoch: int
    name: str
    is_connected: bool = False
    parts: tuple[PageSlice, ...] = ()
    transport: str = ""
    why: str = ""
    refusal: str = ""
    problem: str = ""
    has_connected: bool = False
    num_tries: int = 0
    retry_at: float | None = None
    until: float | None = None
    broken: str = ""

    @property
    def is_awaited(self) -> bool:
        """Is an answer to the offer of this epoch awaited? Not of one that broke before its answer came."""
        return not self.is_connected and self.retry_at is None

    @property
    def is_open(self) -> bool:
        """Can pages be granted?"""
        return self.is_connected and not self.broken

    @property
    def is_resuming(self) -> bool:
        """Does it come back after a break?"""
        return self.has_connected and not self.is_connected

    def broke(self, why: str, now: float) -> bool:
        """Nothing comes by it any more, until it is tried again. False: transfers need not wait for that."""
        self.is_connected, self.until, self.broken, self.problem = False, None, "", why
        self.retry_at = now + min(BACKOFF_S * 2 ** min(self.num_tries, 30), MAX_BACKOFF_S)
        if self.num_tries >= MAX_TRIES:
            return False
        self.num_tries += 1
        return True

    def let_go(self, why: str, now: float) -> None:
        """The prefill node uses it no more, but for writes that cannot be called back."""
        self.until, self.broken, self.problem = now + ANSWER_S, why, why

    def refused(self, why: str) -> None:
        self.refusal, self.problem, self.until = why, why, None

    def try_again(self, epoch: int, now: float) -> None:
        """The pool is offered anew under this epoch."""
        self.epoch, self.retry_at, self.until = epoch, None, now + ANSWER_S

    def connected(self, parts: tuple[PageSlice, ...], transport: str, why: str) -> None:
        self.is_connected, self.parts, self.transport, self.why = True, parts, transport, why
        self.refusal, self.problem, self.until, self.has_connected = "", "", None, True


class Links:
    """Every prefill node that is offered our pool, by incarnation. Pure but for the transport.

    Args:
        transport: makes the offers.
        name, digest: of this node and its model.
        wants_checksums: one must come with every page.

    Attributes:
        by_peer: what was agreed with each.
        epoch: of the last offer; rises with every one, to anyone.
    """

    def __init__(self, transport: ReaderTransport, *, name: str, digest: str, wants_checksums: bool) -> None:
        self._transport = transport
        self._name = name
        self._digest = digest
        self._wants_checksums = wants_checksums
        self.by_peer: dict[str, Link] = {}
        self.epoch = 0

    def get(self, peer: str) -> Link | None:
        return self.by_peer.get(peer)

    def awaited(self, peer: str, epoch: int) -> Link | None:
        """The link whose offer of this epoch has not been answered yet."""
        link = self.by_peer.get(peer)
        return link if link is not None and link.epoch == epoch and link.is_awaited else None

    def offer(self, peer: str, name: str) -> Connect:
        """The pool is offered to a prefill node for the first time, or from scratch."""
        self.epoch += 1
        self.by_peer[peer] = Link(self.epoch, name)
        return self._connect(peer, resumes=False)

    def offer_again(self, now: float) -> list[tuple[str, Connect]]:
        """To those whose pause is over."""
        offers = []
        for peer, link in self.by_peer.items():
            if link.retry_at is not None and link.retry_at <= now:
                self.epoch += 1
                link.try_again(self.epoch, now)
                offers.append((peer, self._connect(peer, resumes=True)))
        return offers

    def unanswered(self, now: float) -> list[tuple[str, Link]]:
        """Those that have not answered in time, to an offer or with a proof."""
        for link in self.by_peer.values():
            if link.is_awaited and link.until is None and not link.refusal:
                link.until = now + FIRST_ANSWER_S
        return [(peer, link) for peer, link in self.by_peer.items() if link.until is not None and link.until <= now]

    def in_doubt(self) -> list[tuple[str, int]]:
        """(peer, epoch) of those that have let go with writes under way."""
        return [(peer, link.epoch) for peer, link in self.by_peer.items() if link.broken]

    def drop(self, peer: str) -> None:
        """Nothing is agreed with this one any more, and nothing that was offered holds."""
        self.by_peer.pop(peer, None)
        self._transport.withdraw(peer)

    def _connect(self, peer: str, *, resumes: bool) -> Connect:
        store = self._transport.store
        return Connect(
            name=self._name,
            digest=self._digest,
            epoch=self.epoch,
            geometry=to_message(store.geometry),
            num_pages=store.num_pages,
            transport=self._transport.name,
            endpoint=self._transport.offer(peer, self.epoch),
            wants_checksums=self._wants_checksums,
            resumes=resumes,
        )
