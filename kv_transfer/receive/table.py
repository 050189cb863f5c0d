"""The books of transfers to a decode node that are not over, and of the pages that each holds. Pure but for the books.

Pages come in as ``GRANT``. They leave with a ``Completed``, or on one path: freed as soon as no write can reach them
any more, in quarantine until then.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from common.cache.page_allocator import Owner, PageAllocator
from common.errors import invariant
from common.request import RequestKey
from common.wire.messages import PrefillDone
from kv_transfer.events import Completed, Event, PairLost, TransferFailed
from kv_transfer.send.session import ReceiveSession
from kv_transfer.states import ReceiveEvent, Receiving

#: A writer in sight answers long before that; taking pages back may break other pairs.
RECLAIM_S = 10.0


class Incoming:
    """Args:
        books: of the pool that pages come to.
        forbid: nobody may write these pages any more.

    Attributes:
        sessions: by key.
        handoffs: of those whose pages are missing, with the instant at which each came.
        events: that the role has not taken yet.
    """

    def __init__(self, books: PageAllocator, forbid: Callable[[Sequence[int]], None]) -> None:
        self._books = books
        self._forbid = forbid
        self.sessions: dict[RequestKey, ReceiveSession] = {}
        self.handoffs: dict[RequestKey, tuple[PrefillDone, float]] = {}
        self.events: list[Event] = []
        self._aside_since: dict[RequestKey, float | None] = {}  # when those in quarantine were seen there first
        self._totals: Counter[str] = Counter()

    def of(self, peer: str) -> list[ReceiveSession]:
        """Those of one prefill node."""
        return [session for session in self.sessions.values() if session.peer == peer]

    @property
    def num_quarantined(self) -> int:
        """Pages in quarantine now."""
        return sum(len(s.pages) for s in self.sessions.values() if s.state is Receiving.QUARANTINED)

    def complete(self, session: ReceiveSession) -> None:
        """Everything is here: the pages are the role's."""
        del self.sessions[session.key]
        self._forbid(session.pages)
        self._totals["transfers_received"] += 1
        handoff, handed_at = self.handoffs.pop(session.key)
        self.events.append(Completed(session.key, handoff, tuple(session.pages), handed_at))

    def give_up(self, session: ReceiveSession, event: ReceiveEvent, tell: Event | None) -> None:
        """The one place where pages of a transfer that does not complete change hands."""
        owner = Owner.QUARANTINE if session.state is Receiving.QUARANTINED else Owner.GRANT
        session.apply(event)
        self._forbid(session.pages)
        self.handoffs.pop(session.key, None)
        self._aside_since.pop(session.key, None)
        if session.state is Receiving.FREED:
            self._books.free(session.pages, owner)
            del self.sessions[session.key]
        else:
            self._books.move(session.pages, Owner.GRANT, Owner.QUARANTINE)
            self._aside_since[session.key] = None
            self._totals["pages_quarantined"] += len(session.pages)
        if tell is not None:
            self._totals["transfers_failed"] += isinstance(tell, TransferFailed)
            self.events.append(tell)

    def overdue(self, now: float) -> list[tuple[str, int]]:
        """(peer, epoch) of what has been in quarantine for so long that its writer may never say a word again."""
        since = {key: now if at is None else at for key, at in self._aside_since.items()}
        self._aside_since.update(since)
        late = [self.sessions[key] for key, at in since.items() if at <= now - RECLAIM_S]
        return [(session.peer, session.epoch) for session in late]

    def untell(self, key: RequestKey) -> None:
        """The role wants to hear nothing more of this key: what it has not been told goes, pages and all."""
        for event in [event for event in self.events if not isinstance(event, PairLost) and event.key == key]:
            self.events.remove(event)
            if isinstance(event, Completed):
                self._books.free(event.pages, Owner.GRANT)

    def counters(self) -> dict[str, float]:
        """Monotonic totals of pages and transfers."""
        names = ("pages_quarantined", "transfers_received", "transfers_failed")
        return {name: float(self._totals[name]) for name in names}

    def check(self) -> None:
        """Prove the books; raises ``InvariantError``."""
        for session in self.sessions.values():
            session.check()
            invariant(
                session.state not in (Receiving.COMPLETE, Receiving.FREED), "an ended transfer is still in the books"
            )
            invariant(
                (session.epoch > 0) == (session.state is not Receiving.RESERVED),
                "a transfer is granted without an epoch, or reserved under one",
            )
            if session.state is not Receiving.RESERVED:
                invariant(
                    (session.key in self.handoffs) == (session.state is Receiving.HANDED), "a handoff is misplaced"
                )
        pages = [page for session in self.sessions.values() for page in session.pages]
        invariant(len(pages) == len(set(pages)), "a page is in two transfers")
        quarantined = self.num_quarantined
        invariant(self._books.count(Owner.QUARANTINE) == quarantined, "quarantine is miscounted")
        invariant(self._books.count(Owner.GRANT) >= len(pages) - quarantined, "a granted page has another owner")
        invariant(self.handoffs.keys() <= self.sessions.keys(), "a handoff is left of an ended transfer")
