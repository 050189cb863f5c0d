"""The prefill node's end of every transfer: pages leave as soon as they are computed and granted.

The role says what is computed (``open``, ``computed``, ``finish``, ``abort``), decode nodes say where it goes
(``on_message``), ``pump`` lets the transport write, and ``take`` returns what to send and whose source pages may go.
Source pages are the role's; it keeps them until it gets ``Released``, which comes exactly once for every opened key.

A transfer ends for the peer with one ``Closed`` or with its own ``TransferAck``. ``Closed`` is the writer's fence:
it is
sent when nothing is under way any more, and it leaves a tombstone, so that neither a late grant nor a late request
revives the key. Whatever a peer sends is checked before it counts; what cannot be true is refused and counted.

Where a pair is let go of and its writes cannot be called back, nobody may ever say that they are over: their decode
node can have died far away. Their source pages are released all the same. What such writes still read goes to pages
that the decode node has in no request's use until it hears from us that they are over, or has made sure of that itself;
and that these pages have come is said of none of them. So only ``Closed``, and the connection's successor, wait.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from common.clock import Clock, MonotonicClock
from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import (
    AbortTransfer,
    Closed,
    Connect,
    Grant,
    Message,
    PairState,
    PrefillDone,
    Refused,
    Resend,
    TransferAck,
)
from kv_transfer.events import Released
from kv_transfer.send.connections import Pairs
from kv_transfer.send.session import MAX_RESENDS, SendSession
from kv_transfer.send.table import Outgoing
from kv_transfer.send.tombstones import End
from kv_transfer.send.tombstones import Reason as Reason
from kv_transfer.send.write_queue import Writes, delivered
from kv_transfer.states import SendEvent, Sending
from kv_transfer.transports.base import WriterTransport

log = logging.getLogger(__name__)


class Sender:
    """All transfers of one prefill node. Pure but for its transport.

    Args:
        transport: writes pages; also knows our own pool.
        digest: of our model; a decode node with another is refused. Empty: not compared.
        wants_checksums: one goes with every page, even if the decode node did not ask for it.
        clock: measures how long writes take.
    """

    def __init__(
        self,
        transport: WriterTransport,
        *,
        digest: str = "",
        wants_checksums: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._transport = transport
        self._pairs = Pairs(transport, digest, wants_checksums=wants_checksums)
        self._writes = Writes(transport, clock or MonotonicClock(), self._pairs)
        self._outgoing = Outgoing()
        self._messages: list[tuple[str, Message]] = []
        self._released: list[Released] = []
        self._totals: Counter[str] = Counter()
        self._now = 0.0

    def order_by(self, rank: Callable[[RequestKey], float]) -> None:
        """From now on, pages of the transfer with the lowest rank go first, not those that were due first."""
        self._writes.rank = rank

    # ---- pairs --------------------------------------------------------------------------------------------------

    def connect(self, peer: str, connect: Connect) -> None:
        """A decode node offers its pool, under a new epoch; what the last epoch granted ends, or, where the decode node
        says that it will grant it anew, waits for that.

        ``Connected``, ``Refused`` or ``AttachFailed`` (the latter two with a sentence) comes out of ``take`` as soon as
        attaching has worked or failed.
        ``Connected`` also says that no write of an earlier epoch is under way.
        """
        if self._pairs.is_stale(peer, connect):
            self._totals["stale_messages"] += 1
            return
        end = End("failed", "the decode node has connected anew")
        self._sever(peer, end, is_all=False, is_resumed=connect.resumes)
        refused = self._pairs.offer(peer, connect)
        if refused is not None:
            self._messages.append((peer, refused))
        self._settle_pairs()

    def _settle_pairs(self) -> None:
        answers, broken = self._pairs.settle()
        if answers:
            self._settle_writes()  # who is connected anew may grant anew, and nothing of before is under way
        self._messages += answers
        for peer, why in broken:
            self._totals["broken_pairs"] += 1
            log.warning("%s", why)
            pair = self._pairs.by_peer.get(peer)
            if not self._sever(peer, End("failed", why), is_all=False, is_resumed=True) and pair is not None:
                self._messages.append((peer, Refused(why, pair.epoch)))  # it may hear of the break from nobody else

    def peer_lost(self, peer: str) -> None:
        """The decode node is gone, or as good as: its transfers end, and its pool is out of reach from here on."""
        self._sever(peer, End("failed", "the decode node was lost", ErrorCode.NODE_LOST), is_all=True)
        self._messages = [(to, message) for to, message in self._messages if to != peer]

    def _sever(self, peer: str, why: End, *, is_all: bool, is_resumed: bool = False) -> bool:
        """Let go of a peer's pool. Transfers to it end without a word, but for those with writes that cannot be called
        back, which linger; if not ``is_all``, ungranted ones go on. If ``is_resumed``, granted ones wait until they are
        granted anew. Returns whether nothing is under way any more."""
        is_fenced = self._pairs.drop(peer)
        for session in [s for s in self._outgoing.to(peer) if is_all or s.is_granted]:
            if is_fenced:
                self._writes.lose(session)
            if is_resumed and session.accepts(SendEvent.SUSPEND):
                self._outgoing.suspend(session, why.message, self._now, is_fenced=is_fenced)
                self._writes.stop(session)
            elif session.num_in_flight and not is_fenced:
                self._end(session, why)
            else:
                session.sever()
                self._forget(session, self._outgoing.ends.get(session.key, why), is_ok=False)
        for session in [s for s, _ in self._outgoing.lingering if s.peer == peer and is_fenced]:
            self._writes.lose(session)
            self._outgoing.unlinger(session)
        self._outgoing.sever_early(peer, why, self._now, is_resumed=is_resumed)
        return is_fenced

    # ---- what the role says -------------------------------------------------------------------------------------

    def open(self, key: RequestKey, peer: str) -> None:
        """The request is known now and will be computed for this decode node (by incarnation), connected or not."""
        opened = self._outgoing.open(key, peer, self._now)
        if isinstance(opened, End):
            self._release(key, opened, is_ok=False)

    def reject(self, key: RequestKey, peer: str, message: str, code: ErrorCode) -> None:
        """The request will not be computed for this decode node, which is told; so is a grant that follows."""
        session = self._outgoing.of_peer(peer, key)
        if session is not None:
            self._end(session, End("failed", message, code))
        else:
            self._bury_and_answer(peer, key, End("failed", message, code))

    def computed(self, key: RequestKey, pages: Sequence[int]) -> None:
        """``pages`` hold indices ``0 .. len(pages)`` of the prompt, whole and final. Grows; a closed key is ignored."""
        session = self._outgoing.live(key)
        if session is not None:
            session.compute(pages)
            self._writes.note_due(session)

    def finish(self, key: RequestKey, handoff: PrefillDone, pages: Sequence[int]) -> None:
        """The prompt is computed. ``pages``: all of its source pages, the partial last one included."""
        session = self._outgoing.live(key)
        if session is None:
            return
        num_pages = self._transport.store.geometry.num_pages(handoff.num_tokens)
        assert len(pages) == num_pages, f"{handoff.num_tokens} tokens are on {num_pages} pages, not on {len(pages)}"
        session.finish(pages, handoff.num_tokens)
        if session.has_ungrantable():
            self._refuse(session, "pages are granted that the prompt does not have")
            return
        if session.is_granted and not session.is_suspended:
            self._messages.append((session.peer, handoff))
        else:
            self._outgoing.handoffs[key] = handoff
        self._writes.note_due(session)

    def is_granted(self, key: RequestKey) -> bool:
        """Has the decode node set pages aside for this transfer?"""
        session = self._outgoing.sessions.get(key)
        return session is not None and session.is_granted

    def retract(self, key: RequestKey) -> None:
        """The source pages of a transfer without grants go to another use; the request is computed again later."""
        session = self._outgoing.live(key)
        assert session is not None, f"{key} is over"
        session.retract()
        self._outgoing.handoffs.pop(key, None)

    def abort(
        self, key: RequestKey, reason: Reason, message: str = "", code: ErrorCode = ErrorCode.TRANSFER_FAILED
    ) -> None:
        """No page leaves any more. ``Closed`` and ``Released`` follow when nothing is under way; idempotent."""
        session = self._outgoing.live(key)
        if session is not None:
            self._end(session, End(reason, message, code))

    # ---- what a decode node says --------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message, now: float) -> None:
        """A ``Grant``, ``Resend``, ``TransferAck``, ``AbortTransfer`` or ``Connect`` of this peer; anything else
        is counted."""
        self._now = now
        if isinstance(message, Grant):
            self._on_grant(peer, message)
        elif isinstance(message, Resend):
            self._on_resend(peer, message)
        elif isinstance(message, TransferAck):
            self._on_received(peer, (message.rid, message.attempt))
        elif isinstance(message, AbortTransfer):
            self._on_cancel(peer, (message.rid, message.attempt))
        elif isinstance(message, Connect):
            self.connect(peer, message)
        else:
            self._totals["stale_messages"] += 1

    def _on_grant(self, peer: str, grant: Grant) -> None:
        key = (grant.rid, grant.attempt)
        pair = self._pairs.attached(peer, grant.epoch)
        if pair is None:
            self._totals["stale_messages"] += 1
            return
        tomb = self._outgoing.tombs.get(peer, key)
        if tomb is not None:
            self._answer_closed(peer, key, tomb)
            return
        session = self._outgoing.granted(peer, key, self._now)
        if isinstance(session, End):
            self._totals["refused_grants"] += 1
            self._bury_and_answer(peer, key, session)
            return
        if session.state is Sending.CLOSING:
            return  # answered when its last write is over
        if session.is_repeated(grant.epoch, grant.first, grant.pages):
            self._totals["stale_messages"] += 1
            return
        num_pages = self._transport.store.num_pages
        problem = pair.problem(session, grant, num_pages)
        if problem:
            is_large = session.num_tokens is None and not pair.can_be_computed(grant, num_pages)
            self._refuse(session, problem, ErrorCode.POOL_TOO_SMALL if is_large else ErrorCode.TRANSFER_FAILED)
            return
        session.grant(grant.epoch, grant.first, grant.pages, pair.fit.units)
        pair.granted.update(grant.pages)
        self._outgoing.resume(session)
        handoff = self._outgoing.handoffs.pop(key, None)
        if handoff is not None:
            self._messages.append((peer, handoff))
        self._writes.note_due(session)

    def _on_resend(self, peer: str, message: Resend) -> None:
        session = self._outgoing.sessions.get((message.rid, message.attempt))
        is_ours = session is not None and session.peer == peer and session.epoch == message.epoch
        if session is None or not is_ours or not session.accepts(SendEvent.RESEND):
            self._totals["stale_messages"] += 1
            return
        per_page = session.units.per_target
        units = [index * per_page + message.part for index in message.indices]
        is_next = all(session.num_resends(unit) + 1 == message.number for unit in units)
        if message.part >= per_page or not session.is_written(units) or not is_next:
            self._totals["stale_messages"] += 1
            return
        self._totals["pages_resent"] += len(units)
        if session.resend(units):
            self._writes.note_due(session)
        else:
            why = f"the same page came damaged to the decode node {MAX_RESENDS + 1} times"
            self._end(session, End("failed", why))

    def _on_received(self, peer: str, key: RequestKey) -> None:
        session = self._outgoing.sessions.get(key)
        is_true = (
            session is not None
            and session.peer == peer
            and session.accepts(SendEvent.RECEIVED)
            and session.is_granted
            and session.is_all_written
        )
        if session is None or not is_true:
            self._totals["stale_messages"] += 1
            return
        session.apply(SendEvent.RECEIVED)
        self._forget(session, End("finished", ""), is_ok=True)

    def _on_cancel(self, peer: str, key: RequestKey) -> None:
        session = self._outgoing.of_peer(peer, key)
        if session is not None:
            self._end(session, End("cancelled", "the decode node does not want it any more"))
            return
        tomb = self._outgoing.tombs.get(peer, key)
        self._bury_and_answer(peer, key, tomb or End("cancelled", "cancelled before the request was known"))

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _refuse(self, session: SendSession, problem: str, code: ErrorCode = ErrorCode.TRANSFER_FAILED) -> None:
        self._totals["refused_grants"] += 1
        self._end(session, End("failed", f"the decode node's grant is refused: {problem}", code))

    def _end(self, session: SendSession, end: End) -> None:
        """No write starts any more; close now, or when the last one under way is over."""
        if session.accepts(SendEvent.END):
            session.end()
            self._writes.stop(session)
            self._outgoing.ends[session.key] = end
        self._close_if_still(session)

    def _close_if_still(self, session: SendSession) -> None:
        """The role need not wait for writes to a peer that was let go of; the peer's answer does."""
        if session.state is not Sending.CLOSING:
            return
        is_still = not session.num_in_flight
        end = self._outgoing.ends.get(session.key)
        if end is not None and (is_still or self._pairs.attached(session.peer, session.epoch or 0) is None):
            self._forget(session, end, is_ok=end.reason == "finished")
            self._outgoing.lingering.append((session, end))
        if is_still:
            session.fence()
            self._writes.forget(session)
            self._answer_closed(session.peer, session.key, self._outgoing.unlinger(session))

    def _forget(self, session: SendSession, end: End, *, is_ok: bool) -> None:
        """The one place where a transfer leaves the books; source pages go back to the role, if it opened the key."""
        key, peer = session.key, session.peer
        pair = self._pairs.by_peer.get(peer)
        if pair is not None and pair.epoch == session.epoch:
            pair.granted.difference_update(session.targets.values())
        self._writes.forget(session)
        if self._outgoing.forget(session, end, self._now):
            self._release(key, end, is_ok=is_ok)

    def _release(self, key: RequestKey, end: End, *, is_ok: bool) -> None:
        reason = end.message or ("the decode node has it" if is_ok else f"the transfer was {end.reason}")
        self._released.append(Released(key, is_ok, reason, end.code, is_told=end.reason == "cancelled"))

    def _bury_and_answer(self, peer: str, key: RequestKey, end: End) -> None:
        self._outgoing.tombs.bury(peer, key, end, now=self._now)
        self._answer_closed(peer, key, end)

    def _answer_closed(self, peer: str, key: RequestKey, end: End) -> None:
        if not self._outgoing.is_lingering(peer, key):  # else it is told after the last write
            self._messages.append((peer, Closed(*key, end.reason, end.message, end.code)))

    # ---- writing ------------------------------------------------------------------------------------------------

    def pump(self, now: float, max_pages: int = 64) -> bool:
        """Begin to write up to ``max_pages`` pages, report those that are over, let leases run out.

        Returns:
            Whether more pages could be written at once.
        """
        self._now = now
        self._settle_pairs()
        for late, end in self._outgoing.late(now):
            self._end(late, end)
        self._writes.start(max_pages)
        self._settle_writes()
        return self._writes.has_due

    def _settle_writes(self) -> None:
        for session, units, sums in self._writes.settle():
            if session.state is Sending.CLOSING:
                self._close_if_still(session)
            elif not session.is_suspended:  # else they failed or not, with their connection
                self._messages += [(session.peer, message) for message in delivered(session, units, sums)]

    # ---- results ------------------------------------------------------------------------------------------------

    def take(self) -> tuple[list[tuple[str, Message]], list[Released]]:
        """What to send, as (peer, message) in order, and whose source pages may go. Each is returned once."""
        messages, released = self._messages, self._released
        self._messages, self._released = [], []
        return messages, released

    def has_delivered(self, key: RequestKey) -> bool:
        """Has a page of this open transfer been written already?"""
        return key in self._writes.begun

    def counters(self) -> dict[str, float]:
        """Monotonic totals: pages, bytes, seconds, messages."""
        names = ("stale_messages", "refused_grants", "broken_pairs", "pages_resent")
        return {
            **self._writes.counters(),
            **{name: float(self._totals[name]) for name in names},
            **{f"pairs_by_{name}": float(count) for name, count in self._pairs.num_attached.items()},
            **self._transport.counters(),
        }

    def transports(self) -> Sequence[str]:
        """Names of those that may carry pages here, best first."""
        return self._transport.names

    def files(self) -> Sequence[int]:
        """File descriptors whose input should wake the loop for ``pump``."""
        return self._transport.files()

    def pairs(self) -> list[PairState]:
        """Decode nodes that pages can go to, by which transport, and why."""
        return self._pairs.states()

    def peers(self) -> Sequence[str]:
        """Decode nodes that have offered their pool; only these can be lost."""
        return list(dict.fromkeys([*self._pairs.by_peer, *self._outgoing.peers()]))

    def close(self) -> None:
        """Let go of every pool."""
        for peer in self.peers():
            self.peer_lost(peer)
        self._transport.close()

    def check(self) -> None:
        """Prove the books; raises ``AssertionError``."""
        self._outgoing.check()
        sessions = self._outgoing.all()
        self._writes.check(sessions)
        self._pairs.check(sessions)
