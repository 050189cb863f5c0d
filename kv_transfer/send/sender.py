"""The prefill node's end of every transfer: pages leave as soon as they are computed and granted.

The role says what is computed (``open``, ``computed``, ``finish``, ``abort``), decode nodes say where it goes
(``on_message``), ``pump`` lets the transport write, and ``take`` returns messages to send and transfers whose source
pages may go. Source pages belong to the role, which keeps them until it gets ``Released``; that comes exactly once for
every opened key.

A transfer ends for the peer with one ``Closed`` or with its own ``TransferAck``. ``Closed`` is the writer's fence: it
is sent when nothing is under way any more, and it leaves a tombstone, so that neither a late grant nor a late request
revives the key. Everything that a peer sends is checked before it counts; what cannot be true is refused and counted.

Where a connection is dropped and its writes cannot be called back, no report may ever come that they are over, since
their decode node can have died on another host. Their source pages are released all the same. Such writes still read
these pages, and put what they read into pages that the decode node keeps out of use until it hears from us that the
writes are over, or has made sure of that itself; and none of these pages is reported as written. So only ``Closed`` and
the next connection wait for them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from common.clock import Clock, MonotonicClock
from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import (
    AbortTransfer,
    AttachFailed,
    Closed,
    CloseReason,
    Connect,
    Coverage,
    Grant,
    Message,
    OfferBeside,
    PairState,
    Ping,
    PrefillDone,
    Refused,
    Resend,
    TransferAck,
)
from kv_transfer.events import Released
from kv_transfer.send.connections import DecodeConnections
from kv_transfer.send.session import STAGES, SendSession
from kv_transfer.send.table import SendTable
from kv_transfer.send.tombstones import TransferEnd
from kv_transfer.send.write_queue import WriteQueue, written_messages
from kv_transfer.states import MAX_RESENDS, SendEvent, SendState
from kv_transfer.transfer_stats import failure_counter, no_failures, stage_gauges
from kv_transfer.transports.base import WriterTransport

log = logging.getLogger(__name__)


class Sender:
    """All transfers of one prefill node. Pure but for its transport.

    Args:
        transport: writes pages; also knows our own pool.
        digest: of our model; a decode node with another is refused. Empty: not compared.
        checksums: which pages get one; more of them if the decode node wants more.
        clock: measures how long writes take.
        max_pages: of the longest prompt; 0: as many as the pool has.
    """

    def __init__(
        self,
        transport: WriterTransport,
        *,
        digest: str = "",
        checksums: Coverage = "off",
        clock: Clock | None = None,
        max_pages: int = 0,
    ) -> None:
        self._transport = transport
        self._max_pages = max_pages or transport.store.num_pages
        self._connections = DecodeConnections(transport, digest, checksums=checksums)
        self._queue = WriteQueue(transport, clock or MonotonicClock(), self._connections)
        self._table = SendTable()
        self._messages: list[tuple[str, Message]] = []
        self._released: list[Released] = []
        self._totals: Counter[str] = Counter(stale_messages=0, refused_grants=0, broken_pairs=0, pages_resent=0)
        self._totals.update(no_failures())
        self._now = 0.0

    # ---- connections --------------------------------------------------------------------------------------------

    def _on_connect(self, peer: str, connect: Connect) -> None:
        """A decode node offers its pool under a new epoch.

        Transfers that the last epoch granted end or, where the decode node says that it will grant them again, wait for
        that. ``Connected``, ``Refused`` or ``AttachFailed`` comes out of ``take`` as soon as attaching has worked or
        failed. ``Connected`` also says that no write of an earlier epoch is under way. Until then, a ``Ping`` says that
        this node lives: attaching takes longer than a decode node waits for a node that may not be there.
        """
        if self._connections.is_stale(peer, connect):
            self._totals["stale_messages"] += 1
            return
        if connect.beside:
            self._totals["stale_messages"] += not self._connections.attach_beside(peer, connect)
            return
        connection = self._connections.by_peer.get(peer)
        if connect.resumes and connection is not None and connection.is_attached:
            self._totals["broken_pairs"] += 1
            how = connection.transport
            log.warning("decode node %s offers its pool again, in place of the %s connection", connection.name, how)
        end = TransferEnd("failed", "the decode node has connected again")
        self._sever(peer, end, is_resumed=connect.resumes)
        refused = self._connections.attach(peer, connect)
        if refused is not None:
            self._messages.append((peer, refused))
        self._poll_connections()
        pending = self._connections.by_peer.get(peer)
        if pending is not None and not pending.is_attached:
            self._messages.append((peer, Ping()))

    def _poll_connections(self) -> None:
        answers, broken, changed = self._connections.poll()
        if answers:
            self._settle_writes()  # a peer that is connected again may grant again, and nothing of before is under way
        for peer in changed:
            end = TransferEnd("failed", "pages go by another transport")
            self._end_grants(peer, end, is_resumed=True, is_fenced=True)
        self._messages += answers
        for peer, why in broken:
            self._totals["broken_pairs"] += 1
            log.warning("%s", why)
            connection = self._connections.by_peer.get(peer)
            is_fenced = self._sever(peer, TransferEnd("failed", why), is_resumed=True)
            if connection is not None:  # the decode node's own transport may not report the break
                said = AttachFailed(connection.epoch, why) if is_fenced else Refused(why, connection.epoch)
                self._messages.append((peer, said))

    def peer_lost(self, peer: str) -> None:
        """The decode node is gone: its transfers end, and its pool is out of reach from here on."""
        end = TransferEnd("failed", "the decode node was lost", ErrorCode.NODE_LOST)
        self._sever(peer, end, is_resumed=False)
        for ungranted in self._table.to(peer):
            self._end(ungranted, end)
        self._messages = [(to, message) for to, message in self._messages if to != peer]

    def _sever(self, peer: str, why: TransferEnd, *, is_resumed: bool) -> bool:
        """Drop a peer's pool.

        Granted transfers to it end without a message, except those whose writes cannot be called back, which linger.

        Args:
            is_resumed: granted transfers do not end but wait until they are granted again.

        Returns:
            Whether nothing is under way any more.
        """
        is_fenced = self._connections.drop(peer)
        self._end_grants(peer, why, is_resumed=is_resumed, is_fenced=is_fenced)
        return is_fenced

    def _end_grants(self, peer: str, why: TransferEnd, *, is_resumed: bool, is_fenced: bool) -> None:
        """Void the grants of a peer after its pool was dropped or is reached by another transport; see ``_sever``.

        Args:
            is_fenced: nothing is under way any more.
        """
        if not is_fenced:
            self._queue.stop_timing(peer)
        for session in [s for s in self._table.to(peer) if s.is_granted]:
            if is_fenced:
                self._queue.lose(session)
            if is_resumed and session.accepts(SendEvent.SUSPEND):
                self._table.suspend(session, why.message, self._now, is_fenced=is_fenced)
                self._queue.stop(session)
            elif session.num_in_flight and not is_fenced:
                self._end(session, why)
            else:
                end = session.transfer_end or why
                session.sever(end)
                self._forget(session, end, is_ok=False)
        for session in [s for s in self._table.lingering if s.peer == peer and is_fenced]:
            self._queue.lose(session)
            self._table.lingering.remove(session)
        self._table.sever_early(peer, why, self._now, is_resumed=is_resumed)

    # ---- what the role says -------------------------------------------------------------------------------------

    def open(self, key: RequestKey, peer: str) -> None:
        """The request will be computed for this decode node (by incarnation), connected or not."""
        end = self._table.open(key, peer, self._now)
        if end is not None:
            self._release(key, end, is_ok=False)

    def reject(self, key: RequestKey, peer: str, message: str, code: ErrorCode) -> None:
        """The request will not be computed for this decode node, which is told; a grant that follows gets the same
        answer.
        """
        session = self._table.of_peer(peer, key)
        if session is not None:
            self._end(session, TransferEnd("failed", message, code))
        else:
            self._answer_and_remember(peer, key, TransferEnd("failed", message, code))

    def computed(self, key: RequestKey, pages: Sequence[int]) -> None:
        """``pages`` hold indices ``0 .. len(pages) - 1`` of the prompt, whole and final. They grow; a closed key is
        ignored.
        """
        session = self._table.active(key)
        if session is not None:
            session.compute(pages)
            self._queue.enqueue(session)

    def finish(self, key: RequestKey, prefill_done: PrefillDone, pages: Sequence[int]) -> None:
        """The prompt is computed. ``pages``: all of its source pages, including a partial last one."""
        session = self._table.active(key)
        if session is None:
            return
        num_pages = self._transport.store.layout.num_pages(prefill_done.length)
        assert len(pages) == num_pages, f"{prefill_done.length} tokens are on {num_pages} pages, not on {len(pages)}"
        session.finish(pages, prefill_done.length)
        if session.has_ungrantable():
            self._refuse(session, "pages are granted that the prompt does not have")
            return
        if session.is_granted and not session.is_suspended:
            self._messages.append((session.peer, prefill_done))
        else:
            self._table.prefill_dones[key] = prefill_done
        self._queue.enqueue(session)

    def is_granted(self, key: RequestKey) -> bool:
        """Whether the decode node has reserved pages for this transfer."""
        session = self._table.sessions.get(key)
        return session is not None and session.is_granted

    def retract(self, key: RequestKey) -> None:
        """Take the source pages of an ungranted transfer for another use; the request is computed again later."""
        session = self._table.active(key)
        assert session is not None, f"{key} is over"
        session.retract()
        self._table.prefill_dones.pop(key, None)

    def abort(
        self, key: RequestKey, reason: CloseReason, message: str = "", code: ErrorCode = ErrorCode.TRANSFER_FAILED
    ) -> None:
        """Start no further write. ``Closed`` and ``Released`` follow when nothing is under way. Idempotent."""
        session = self._table.active(key)
        if session is not None:
            self._end(session, TransferEnd(reason, message, code))

    # ---- what a decode node says --------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message, now: float) -> None:
        """Handle a message of a decode node; one that cannot be meant for this node is only counted."""
        self._now = now
        if isinstance(message, Grant):
            self._on_grant(peer, message)
        elif isinstance(message, Resend):
            self._on_resend(peer, message)
        elif isinstance(message, TransferAck):
            self._on_transfer_ack(peer, (message.rid, message.attempt))
        elif isinstance(message, AbortTransfer):
            self._on_abort_transfer(peer, (message.rid, message.attempt))
        elif isinstance(message, Connect):
            self._on_connect(peer, message)
        else:
            self._totals["stale_messages"] += 1

    def _on_grant(self, peer: str, grant: Grant) -> None:
        key = (grant.rid, grant.attempt)
        connection = self._connections.usable(peer, grant.epoch)
        if connection is None:
            self._totals["stale_messages"] += 1
            return
        tombstone = self._table.tombstones.get(peer, key)
        if tombstone is not None:
            self._answer_closed(peer, key, tombstone)
            return
        session = self._table.for_grant(peer, key, self._now)
        if isinstance(session, TransferEnd):
            self._totals["refused_grants"] += 1
            self._answer_and_remember(peer, key, session)
            return
        if session.state is SendState.CLOSING:
            return  # answered when its last write is over
        if session.is_repeated(grant.epoch, grant.first, grant.pages):
            self._totals["stale_messages"] += 1
            return
        problem, code = connection.problem(session, grant, self._max_pages)
        if problem:
            self._refuse(session, problem, code)
            return
        session.grant(grant.epoch, grant.first, grant.pages, connection.mapping.units)
        connection.granted.update(grant.pages)
        self._transport.prepare(peer, grant.pages)
        self._table.resume(session)
        prefill_done = self._table.prefill_dones.pop(key, None)
        if prefill_done is not None:
            self._messages.append((peer, prefill_done))
        self._queue.enqueue(session)

    def _on_resend(self, peer: str, message: Resend) -> None:
        session = self._table.sessions.get((message.rid, message.attempt))
        is_ours = session is not None and session.peer == peer and session.epoch == message.epoch
        if session is None or not is_ours or not session.accepts(SendEvent.RESEND):
            self._totals["stale_messages"] += 1
            return
        per_page = session.units.per_target
        units = [index * per_page + message.unit for index in message.indices]
        is_next = all(session.num_resends(unit) + 1 == message.number for unit in units)
        if not units or message.unit >= per_page or not session.is_written(units) or not is_next:
            self._totals["stale_messages"] += 1
            return
        self._totals["pages_resent"] += len(units)
        if session.resend(units):
            self._queue.enqueue(session)
        else:
            why = f"the same page arrived damaged at the decode node {MAX_RESENDS + 1} times"
            self._end(session, TransferEnd("failed", why))

    def _on_transfer_ack(self, peer: str, key: RequestKey) -> None:
        session = self._table.sessions.get(key)
        is_ours = session is not None and session.peer == peer and session.accepts(SendEvent.ACKNOWLEDGED)
        if session is None or not is_ours or not session.is_granted or not session.is_all_written:
            self._totals["stale_messages"] += 1
            return
        session.apply(SendEvent.ACKNOWLEDGED)
        self._forget(session, TransferEnd("finished", ""), is_ok=True)

    def _on_abort_transfer(self, peer: str, key: RequestKey) -> None:
        session = self._table.of_peer(peer, key)
        if session is not None:
            self._end(session, TransferEnd("cancelled", "the decode node does not want it any more"))
            return
        tombstone = self._table.tombstones.get(peer, key)
        self._answer_and_remember(
            peer, key, tombstone or TransferEnd("cancelled", "cancelled before the request was known")
        )

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _refuse(self, session: SendSession, problem: str, code: ErrorCode = ErrorCode.TRANSFER_FAILED) -> None:
        self._totals["refused_grants"] += 1
        self._end(session, TransferEnd("failed", f"the decode node's grant is refused: {problem}", code))

    def _end(self, session: SendSession, end: TransferEnd) -> None:
        """Start no further write, and close now, or when the last write under way is over."""
        if session.accepts(SendEvent.END):
            pages = session.end(end)
            connection = self._connections.usable(session.peer, session.epoch or 0)
            if connection is not None:
                connection.granted.difference_update(pages)
            self._queue.stop(session)
        self._close_if_idle(session)

    def _close_if_idle(self, session: SendSession) -> None:
        """Close a transfer that has nothing under way. The role does not wait for writes to a dropped peer; the peer's
        answer does.
        """
        if session.state is not SendState.CLOSING:
            return
        end, is_idle = session.transfer_end, not session.num_in_flight
        assert end is not None
        is_awaited = not is_idle and self._connections.usable(session.peer, session.epoch or 0) is not None
        if not is_awaited and session not in self._table.lingering:
            self._forget(session, end, is_ok=end.reason == "finished")
            self._table.lingering.append(session)
        if is_idle:
            session.fence()
            self._queue.stop(session)
            self._table.lingering.remove(session)
            self._answer_closed(session.peer, session.key, end)

    def _forget(self, session: SendSession, end: TransferEnd, *, is_ok: bool) -> None:
        """The one place where a transfer leaves the table; source pages go back to the role, if it opened the key."""
        key, peer = session.key, session.peer
        connection = self._connections.by_peer.get(peer)
        if connection is not None and connection.epoch == session.epoch:
            connection.granted.difference_update(session.targets.values())
        self._queue.stop(session)
        if not is_ok and end.reason in ("failed", "unknown"):
            self._totals[failure_counter(end.code)] += 1
        if self._table.forget(session, end, self._now):
            self._release(key, end, is_ok=is_ok)

    def _release(self, key: RequestKey, end: TransferEnd, *, is_ok: bool) -> None:
        reason = end.message or ("the decode node has it" if is_ok else f"the transfer was {end.reason}")
        self._released.append(Released(key, is_ok, reason, end.code, is_told=end.reason == "cancelled"))

    def _answer_and_remember(self, peer: str, key: RequestKey, end: TransferEnd) -> None:
        self._table.tombstones.add(peer, key, end, now=self._now)
        self._answer_closed(peer, key, end)

    def _answer_closed(self, peer: str, key: RequestKey, end: TransferEnd) -> None:
        if not self._table.is_lingering(peer, key):  # otherwise the peer is told after the last write
            self._messages.append((peer, Closed(*key, end.reason, end.message, end.code)))

    # ---- writing ------------------------------------------------------------------------------------------------

    def pump(self, now: float, max_pages: int = 64, *, rank: Callable[[RequestKey], float] | None = None) -> bool:
        """Begin to write due pages, as ``WriteQueue.start`` does; report writes that are over, and end transfers whose
        lease is over. Return whether more pages could be written at once.
        """
        self._now = now
        self._poll_connections()
        known = self._connections.by_peer
        if late := self._transport.late():
            self._messages += [(peer, Ping()) for peer in late if peer in known]
        if asked := self._transport.returns():
            self._messages += [(peer, OfferBeside(known[peer].epoch)) for peer in asked if peer in known]
        for expired, end in self._table.expired(now):
            self._end(expired, end)
        self._settle_writes()  # which may let others begin
        self._queue.start(max_pages, rank)
        self._settle_writes()
        return self._queue.has_due

    def _settle_writes(self) -> None:
        for session, units, sums in self._queue.finished():
            if session.state is SendState.CLOSING:
                self._close_if_idle(session)
            elif not session.is_suspended:  # otherwise their fate is that of their connection
                self._messages += [(session.peer, message) for message in written_messages(session, units, sums)]

    # ---- results ------------------------------------------------------------------------------------------------

    def take(self) -> tuple[list[tuple[str, Message]], list[Released]]:
        """Messages to send, as (peer, message) in order, and transfers whose source pages may go. Each is returned
        once.
        """
        messages, released = self._messages, self._released
        self._messages, self._released = [], []
        return messages, released

    def has_delivered(self, key: RequestKey) -> bool:
        """Whether a page of this open transfer has been written already."""
        session = self._table.sessions.get(key)
        return session is not None and session.has_delivered

    def gauges(self) -> dict[str, float]:
        """Transfers by stage and transport."""
        transports = {peer: connection.transport for peer, connection in self._connections.by_peer.items()}
        transfers = [(session.stage, transports.get(session.peer, "")) for session in self._table.sessions.values()]
        return stage_gauges(STAGES, transports.values(), transfers)

    def counters(self) -> dict[str, float]:
        return {
            **self._queue.counters(),
            **{name: float(count) for name, count in self._totals.items()},
            **{f"pairs_by_{name}": float(count) for name, count in self._connections.num_attached.items()},
            **self._transport.counters(),
        }

    def transports(self) -> Sequence[str]:
        return self._transport.names

    def files(self) -> Sequence[int]:
        return self._transport.files()

    def pairs(self) -> list[PairState]:
        """Decode nodes to which pages can go, by which transport, and why."""
        return self._connections.states()

    def peers(self) -> Sequence[str]:
        """Decode nodes that have offered their pool; only these can be lost."""
        return list(dict.fromkeys([*self._connections.by_peer, *self._table.peers()]))

    def check(self) -> None:
        self._table.check()
        sessions = self._table.all()
        self._queue.check(sessions)
        self._connections.check(sessions)
