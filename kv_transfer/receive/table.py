"""The transfers to a decode node that are not over, and the pages that each holds. Pure but for the page allocator.

Pages come in as ``GRANT``. They leave with a ``Completed``, or on one path: freed as soon as no write can reach them
any more, and in quarantine until then.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from common.cache.page_allocator import Owner, PageAllocator
from common.errors import ErrorCode, invariant
from common.request import RequestKey
from common.wire.messages import PrefillDone
from kv_transfer.events import Completed, Event, Finished, PairLost, TransferFailed
from kv_transfer.receive.session import ReceiveSession
from kv_transfer.states import ReceiveEvent, ReceiveState
from kv_transfer.transfer_stats import failure_counter, no_failures

#: Seconds in quarantine after which pages are taken back. A reachable writer answers long before, and taking pages back
#: may break other connections.
RECLAIM_S = 10.0


class ReceiveTable:
    """All transfers of a decode node that are not over.

    Args:
        allocator: of the pool to which pages come.
        forbid: withdraws every permission to write these pages.

    Attributes:
        sessions: by key.
        prefill_dones: the messages that came before all pages of their transfers, with the instant at which each
            came.
        events: what the role has not taken yet.
    """

    def __init__(self, allocator: PageAllocator, forbid: Callable[[Sequence[int]], None]) -> None:
        self._allocator = allocator
        self._forbid = forbid
        self.sessions: dict[RequestKey, ReceiveSession] = {}
        self.prefill_dones: dict[RequestKey, tuple[PrefillDone, float]] = {}
        self.events: list[Event] = []
        self._quarantined_since: dict[RequestKey, float | None] = {}  # None: not seen yet
        self._totals: Counter[str] = Counter(pages_quarantined=0, pages_kept=0, transfers_received=0)
        self._totals.update(no_failures())

    def of(self, peer: str) -> list[ReceiveSession]:
        return [session for session in self.sessions.values() if session.peer == peer]

    def complete(self, session: ReceiveSession) -> None:
        """Everything is here: the pages go to the role."""
        del self.sessions[session.key]
        self._forbid(session.pages)
        self._totals["transfers_received"] += 1
        prefill_done, prefill_done_at = self.prefill_dones.pop(session.key)
        self.events.append(Completed(session.key, prefill_done, tuple(session.pages), prefill_done_at))

    def release(self, session: ReceiveSession, event: ReceiveEvent) -> tuple[int, ...]:
        """The one place where the pages of a transfer that does not complete change hands.

        Returns:
            The first pages, as far as they have arrived. They stay ``GRANT`` and are the role's.
        """
        is_quarantined = session.state is ReceiveState.QUARANTINED
        owner = Owner.QUARANTINE if is_quarantined else Owner.GRANT
        session.apply(event)
        arrived = () if is_quarantined else tuple(session.take_arrived())
        self._totals["pages_kept"] += len(arrived)
        self.prefill_dones.pop(session.key, None)
        self._quarantined_since.pop(session.key, None)
        if session.state is ReceiveState.FREED:
            self._forbid((*arrived, *session.pages))
            self._allocator.free(self._allocator.from_transfer(session.pages), owner)
            del self.sessions[session.key]
        else:
            if arrived:  # the others are still expected: over NIXL, writes under way end only as long as they are
                self._forbid(arrived)
            self._allocator.move(self._allocator.from_transfer(session.pages), Owner.GRANT, Owner.QUARANTINE)
            self._quarantined_since[session.key] = None
            self._totals["pages_quarantined"] += len(session.pages)
        return arrived

    def fail(self, session: ReceiveSession, event: ReceiveEvent, code: ErrorCode, message: str) -> None:
        """Release the pages of a transfer, and tell the role why it failed."""
        arrived = self.release(session, event)
        if code not in (ErrorCode.ABORTED, ErrorCode.TAKEN_OVER):
            self._totals[failure_counter(code)] += 1
        self.events.append(TransferFailed(session.key, code, message, arrived))

    def finish(self, session: ReceiveSession) -> None:
        """Release the pages of a transfer that needs them no more, since the request has ended."""
        self.events.append(Finished(session.key, self.release(session, ReceiveEvent.CLOSE)))

    def overdue(self, now: float) -> list[tuple[str, int]]:
        """(peer, epoch) of pages that have been in quarantine for long and whose writer may never report."""
        since = {key: now if at is None else at for key, at in self._quarantined_since.items()}
        self._quarantined_since.update(since)
        late = [self.sessions[key] for key, at in since.items() if at <= now - RECLAIM_S]
        return [(session.peer, session.epoch) for session in late]

    @property
    def has_quarantined(self) -> bool:
        """Whether any pages are in quarantine."""
        return bool(self._quarantined_since)

    @property
    def due_at(self) -> float:
        """Before this instant, no pages are overdue."""
        return min(
            (-math.inf if at is None else at + RECLAIM_S for at in self._quarantined_since.values()), default=math.inf
        )

    def drop_events(self, key: RequestKey) -> None:
        """Drop events of a key that the role has not taken, and free their pages."""
        for event in [event for event in self.events if not isinstance(event, PairLost) and event.key == key]:
            self.events.remove(event)
            pages = event.pages if isinstance(event, Completed) else event.arrived
            self._allocator.free(self._allocator.from_transfer(pages), Owner.GRANT)

    def counters(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._totals.items()}

    def check(self) -> None:
        for session in self.sessions.values():
            session.check()
            invariant(
                session.state not in (ReceiveState.COMPLETE, ReceiveState.FREED),
                "an ended transfer is still in the table",
            )
            invariant(
                (session.epoch > 0) == (session.state is not ReceiveState.RESERVED),
                "a transfer is granted without an epoch, or reserved under one",
            )
            if session.state is not ReceiveState.RESERVED:
                invariant(
                    (session.key in self.prefill_dones) == (session.state is ReceiveState.PREFILLED),
                    "a PrefillDone is kept for the wrong transfer",
                )
        pages = [page for session in self.sessions.values() for page in session.pages]
        invariant(len(pages) == len(set(pages)), "a page is in two transfers")
        num_pages = len(self._allocator.from_transfer(pages))
        quarantined = sum(
            len(self._allocator.from_transfer(session.pages))
            for session in self.sessions.values()
            if session.state is ReceiveState.QUARANTINED
        )
        invariant(self._allocator.count(Owner.QUARANTINE) == quarantined, "quarantine is miscounted")
        invariant(self._allocator.count(Owner.GRANT) >= num_pages - quarantined, "a granted page has another owner")
        invariant(self.prefill_dones.keys() <= self.sessions.keys(), "a PrefillDone is kept for an ended transfer")
