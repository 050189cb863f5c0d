"""The decode node's end of every transfer: grant pages, and see them either complete or in quarantine.

The role reserves pages (``Owner.GRANT``) and gives them to ``begin``; they are granted to the prefill node once it is
connected. When every page and ``PrefillDone`` are here, the role gets ``Completed`` and the pages with it. In all other
cases the role gets the first pages, as far as they have arrived: no write to them is left. The other pages are freed
here, on one path, and only when the writer is fenced: by its own word (``Closed``, or
``Connected`` under a later epoch, which it says after it has dropped the earlier connection), or by the transport's
proof that it cannot write (``poll``). Until then the pages of a transfer that was cancelled, or whose peer is out of
reach, are in quarantine.

Pages of a request that moves come from another decode node, which is its prefill node here.

Take events right after the call that may have made them: the pages of a failed transfer no longer belong to the caller.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence

from common.cache.page_allocator import PageAllocator
from common.errors import ErrorCode, invariant
from common.request import RequestKey
from common.wire.messages import (
    AbortTransfer,
    AttachFailed,
    Closed,
    Connect,
    Connected,
    Coverage,
    Grant,
    Message,
    OfferBeside,
    PagesWritten,
    PairState,
    Ping,
    PrefillDone,
    Refused,
    Resend,
    TransferAck,
)
from kv_transfer.events import Event, PairLost
from kv_transfer.page_mapping import target_units
from kv_transfer.receive.connections import MAX_TRIES, PrefillConnection, PrefillConnections
from kv_transfer.receive.session import ReceiveSession
from kv_transfer.receive.table import ReceiveTable
from kv_transfer.states import MAX_RESENDS, ReceiveEvent, ReceiveState
from kv_transfer.transfer_stats import stage_gauges
from kv_transfer.transports.base import ReaderTransport

log = logging.getLogger(__name__)

#: Totals of the receiver itself, beside a ``pairs_by_NAME`` for each transport that was chosen. Here and in all totals
#: of transfers, pages are those of the layout: slabs, where window layers have a pool of their own.
COUNTERS = (
    "pages_received",
    "bytes_saved_by_cache",
    "pages_verified",
    "checksum_mismatches",
    "broken_pairs",
    "reconnects",
    "stale_messages",
)
#: Stages of transfers, as operators see them.
STAGES = {
    ReceiveState.RESERVED: "waiting_for_connection",
    ReceiveState.GRANTED: "receiving",
    ReceiveState.PREFILLED: "receiving",
    ReceiveState.LANDED: "receiving",
    ReceiveState.QUARANTINED: "quarantined",
}
CODES = {"aborted": ErrorCode.ABORTED, "cancelled": ErrorCode.ABORTED}
#: What a node that sends pages says of itself when it ends, and what this node, which goes on, reports instead.
ENDS_OF_SENDER = {
    ErrorCode.SHUTTING_DOWN: ErrorCode.TRANSFER_FAILED,
    ErrorCode.INTERNAL: ErrorCode.NODE_LOST,
}


class Receiver:
    """All transfers to one decode node. Pure but for its transport and the page allocator.

    Args:
        transport: offers our pool, and proves that writers can write no more.
        allocator: of the pool. Pages come in as ``GRANT``; only the receiver moves any to ``QUARANTINE``.
        name, digest: of this node and its model, for ``Connect``.
        checksums: which pages come with one, at least. Checksums that come are always verified.
    """

    def __init__(
        self,
        transport: ReaderTransport,
        allocator: PageAllocator,
        *,
        name: str = "decode",
        digest: str = "-",
        checksums: Coverage = "off",
    ) -> None:
        self._transport = transport
        self._table = ReceiveTable(allocator, transport.forbid)
        self._name = name
        self._page_size = transport.store.layout.page_size
        self._are_checksums_due = checksums == "all"
        self._connections = PrefillConnections(transport, name=name, digest=digest, checksums=checksums)
        self._connections_due_at = -math.inf  # as of the last poll; -inf: the next one looks again
        self._messages: list[tuple[str, Message]] = []
        self._totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    # ---- what the role says -------------------------------------------------------------------------------------

    def connect(self, peer: str, name: str = "", num_ranks: int = 1) -> Connect:
        """The message that offers our pool to a prefill node (by incarnation) of so many ranks under a new epoch.

        Transfers that an earlier epoch with it has granted fail, as in ``peer_lost``; transfers that wait for a
        connection go on waiting. ``name`` is for people.
        """
        self._drop_connection(peer, is_all=False)
        self._connections_due_at = -math.inf
        return self._connections.offer(peer, name or peer[:8], num_ranks)

    def begin(
        self,
        key: RequestKey,
        peer: str,
        *,
        first: int,
        pages: Sequence[int],
        length: int,
        num_cached: int | None = None,
    ) -> None:
        """Expect a transfer from this peer; its pages from index ``first`` on go to ``pages``.

        ``pages`` are owned as ``GRANT``, one for each that the prompt lacks. They are granted as soon as the prefill
        node is connected.

        Args:
            length: of the transfer, in tokens: see ``PageAllocator.transfer_length``.
            num_cached: how many of the pages before ``first`` are cached here; None: all.
        """
        assert key not in self._table.sessions, f"{key} has begun already"
        session = ReceiveSession(key, peer, first=first, pages=pages, length=length, page_size=self._page_size)
        self._table.sessions[key] = session
        if num_cached is not None:
            session.num_cached = num_cached
        connection = self._connections.by_peer.get(peer)
        if connection is not None and connection.refusal:
            self._table.fail(session, ReceiveEvent.CLOSE, ErrorCode.TRANSFER_FAILED, connection.refusal)
        elif connection is not None and connection.is_usable:
            self._grant(session)

    def cancel(self, key: RequestKey) -> tuple[int, ...]:
        """End a transfer at any point; no event of this key comes after. Unknown and ended keys are ignored.

        Returns:
            The pages that have arrived, as in ``TransferFailed``.
        """
        self._table.drop_events(key)
        session = self._table.sessions.get(key)
        if session is None or not session.accepts(ReceiveEvent.CANCEL):
            return ()
        if session.peer in self._connections.by_peer:
            self._messages.append((session.peer, AbortTransfer(*key)))
        return self._table.release(session, ReceiveEvent.CANCEL)

    def peer_lost(self, peer: str) -> None:
        """The control connection is gone: transfers fail, and granted pages stay in quarantine until the fence."""
        self._drop_connection(peer, is_all=True)

    def _drop_connection(self, peer: str, *, is_all: bool) -> None:
        self._connections.drop(peer)
        self._messages = [(to, message) for to, message in self._messages if to != peer]
        for session in self._table.of(peer):
            if session.accepts(ReceiveEvent.LOSE) and (is_all or session.epoch):
                message = "the connection to the prefill node was lost"
                self._table.fail(session, ReceiveEvent.LOSE, ErrorCode.NODE_LOST, message)

    def poll(self, now: float) -> None:
        """Let writers attach, act on fences, offer the pool again, and have silent writers fenced."""
        is_due = self._table.has_quarantined or now >= self._connections_due_at
        if is_due:
            for peer, epoch in (*self._table.overdue(now), *self._connections.in_doubt()):
                self._transport.reclaim(peer, epoch)
        news = self._transport.poll(now)
        if not (is_due or news):
            return
        for fenced in news:
            connection = self._connections.by_peer.get(fenced.peer)
            is_now = connection is not None and connection.epoch <= fenced.epoch
            if connection is not None and is_now and not fenced.is_dead and connection.retry_at is None:
                self._on_broken(fenced.peer, connection, fenced.reason, now)
            self._fence(fenced.peer, fenced.epoch, fenced.reason)
            if is_now and fenced.is_dead:
                self._lose(fenced.peer, fenced.reason)
        for peer, connection in self._connections.overdue(now):
            if connection.drop_reason:
                self._lose(peer, f"{connection.drop_reason}; some of its writes may still be under way")
            else:
                self._on_broken(peer, connection, "it did not answer", now)
        offers = self._connections.due_offers(now)
        self._totals["reconnects"] += len(offers)
        self._messages += offers
        self._connections_due_at = self._connections.due_at

    def may_end(self, message: Message) -> bool:
        """Whether a transfer may end with this message; False is always right."""
        if not isinstance(message, PagesWritten | PrefillDone):
            return True
        session = self._table.sessions.get((message.rid, message.attempt))
        if session is None or isinstance(message, PrefillDone):
            return session is None or session.is_landed
        return session.num_missing <= len(message.indices)

    @property
    def due_at(self) -> float:
        """Before this instant, ``poll`` does nothing unless the transport has news."""
        return min(self._table.due_at, self._connections.due_at)

    def _on_broken(self, peer: str, connection: PrefillConnection, reason: str, now: float) -> None:
        """Nothing can be written under the connection's epoch any more; its transfers wait for the next one."""
        self._totals["broken_pairs"] += connection.is_attached
        self._suspend(peer)
        if connection.broke(reason, now):
            log.warning("cannot receive pages from node %s now, retrying soon: %s", connection.name, reason)
            return
        why = f"node {connection.name} could not attach the pool of decode node {self._name}"
        if connection.was_attached:
            why = f"{connection.transport} from node {connection.name} to decode node {self._name} broke"
            why += " and could not be mended"
        self._refuse(peer, connection, f"{why} in {MAX_TRIES} tries: {reason}")

    def _suspend(self, peer: str) -> None:
        """Transfers that were granted wait for the next connection."""
        for session in self._table.of(peer):
            if session.accepts(ReceiveEvent.SUSPEND):
                session.suspend()
                self._transport.forbid(session.pages)

    def _lose(self, peer: str, why: str) -> None:
        self.peer_lost(peer)
        self._table.events.append(PairLost(peer, why))

    # ---- what a prefill node says -------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message, now: float) -> None:
        """Handle a message of a prefill node; one that cannot be meant for this node is only counted."""
        if isinstance(message, PagesWritten | PrefillDone | Closed):
            session = self._table.sessions.get((message.rid, message.attempt))
            is_ours = session is not None and session.peer == peer and self._on_transfer(session, message, now)
        else:
            is_ours = self._on_connection(peer, message, now)
            self._connections_due_at = -math.inf
        self._totals["stale_messages"] += not is_ours

    def _on_connection(self, peer: str, message: Message, now: float) -> bool:
        if isinstance(message, Connected):
            return self._on_connected(peer, message, now)
        if isinstance(message, OfferBeside):
            if self._connections.usable(peer, message.epoch) is None:
                return False
            self._messages.append((peer, self._connections.offer_beside(peer)))
            return True
        if isinstance(message, AttachFailed):
            return self._on_attach_failed(peer, message, now)
        if isinstance(message, Refused):
            return self._on_refused(peer, message, now)
        return isinstance(message, Ping)

    def _on_connected(self, peer: str, message: Connected, now: float) -> bool:
        connection = self._connections.awaited(peer, message.epoch)
        changed = self._connections.taken_up(peer, message.epoch)
        if connection is None and changed is None:
            return False
        is_chosen = changed is None or changed.beside == message.epoch
        if not is_chosen or not self._transport.chosen(peer, message.epoch, message.transport):
            if changed is not None:
                self._on_broken(peer, changed, f"{message.transport} is not offered any more", now)
            return False
        if changed is not None:  # nothing is under way by the transport before
            self._suspend(peer)
            changed.changed()
        connection = connection or changed
        assert connection is not None
        page_size = self._page_size
        if page_size % message.num_token_ranges:
            why = f"a page of {page_size} tokens cannot come in {message.num_token_ranges} token ranges"
            self._refuse(peer, connection, why)
        else:
            self._attach(peer, connection, message)
        return True

    def _attach(self, peer: str, connection: PrefillConnection, message: Connected) -> None:
        """Grant the pages that wait for the connection, since the prefill node has attached the pool."""
        self._totals[f"pairs_by_{message.transport}"] += 1
        log.info(
            "receiving pages from node %s by %s%s",
            connection.name,
            message.transport,
            message.why and f": {message.why}",
        )
        ranks = {"num_sources": connection.num_ranks, "num_targets": self._transport.num_ranks}
        units = target_units(self._transport.store.layout, message.num_token_ranges, **ranks)
        connection.attached(message.num_token_ranges, units, message.transport, message.why)
        self._fence(peer, connection.epoch - 1, "the prefill node has dropped the earlier connection")
        for session in self._table.of(peer):
            if session.state is ReceiveState.RESERVED:
                self._grant(session)

    def _on_attach_failed(self, peer: str, message: AttachFailed, now: float) -> bool:
        """The pool cannot be attached, or not any more; nothing is written under this epoch."""
        connection = self._connections.by_peer.get(peer)
        if connection is None or connection.epoch != message.epoch:
            return False
        if connection.retry_at is None:  # otherwise the break is known
            self._on_broken(peer, connection, message.reason, now)
        return True

    def _on_refused(self, peer: str, message: Refused, now: float) -> bool:
        connection = self._connections.by_peer.get(peer)
        if connection is None or connection.epoch != message.epoch:
            return False
        if connection.is_awaited and connection.is_reconnecting:
            self._on_broken(peer, connection, message.reason, now)
        elif connection.is_awaited:
            self._refuse(peer, connection, message.reason or "the prefill node refuses to work with this decode node")
        elif connection.is_usable:  # no page comes, but only the transport can prove that
            connection.note_dropped(message.reason, now)
        else:
            return False
        return True

    def _refuse(self, peer: str, connection: PrefillConnection, why: str) -> None:
        log.warning("cannot receive pages from node %s: %s", connection.name, why)
        connection.refused(why)
        for session in self._table.of(peer):
            if session.state is ReceiveState.RESERVED:
                self._messages.append((peer, AbortTransfer(*session.key)))  # it may wait to be granted again
                self._table.fail(session, ReceiveEvent.CLOSE, ErrorCode.TRANSFER_FAILED, why)

    def _on_transfer(self, session: ReceiveSession, message: PagesWritten | PrefillDone | Closed, now: float) -> bool:
        if isinstance(message, Closed):
            return self._on_closed(session, message)
        if isinstance(message, PrefillDone):
            if message.length != session.length or not session.accepts(ReceiveEvent.PREFILL_DONE):
                return False
            self._table.prefill_dones[session.key] = (message, now)
            session.apply(ReceiveEvent.PREFILL_DONE)
        elif not self._on_pages_written(session, message):
            return False
        if session.state is ReceiveState.COMPLETE:
            self._complete(session)
        return True

    def _on_pages_written(self, session: ReceiveSession, message: PagesWritten) -> bool:
        is_now = message.epoch == session.epoch and session.accepts(ReceiveEvent.DELIVER)
        if not is_now or not session.is_expected(message.indices, message.unit, message.num_resends):
            return False
        damaged = self._damaged(session, message) if self._are_checksums_due or message.checksums else []
        if damaged and not self._ask_again(session, damaged, message.unit, message.num_resends + 1):
            return True
        self._connections.by_peer[session.peer].page_came()
        arrived = [index for index in message.indices if index not in damaged] if damaged else message.indices
        whole = session.deliver(arrived, message.unit)
        self._transport.landed(session.peer, whole)
        self._totals["pages_received"] += len(whole)
        return True

    def _damaged(self, session: ReceiveSession, message: PagesWritten) -> list[int]:
        """Indices of pages whose bytes here do not have the checksums that came with them."""
        page_slice = self._connections.by_peer[session.peer].units[message.unit]
        told = dict(zip(message.indices, message.checksums, strict=False))
        pages = [session.page_of(index) for index in message.indices]
        sums = self._transport.checksums(session.peer, pages, page_slice)
        found = dict(zip(message.indices, sums, strict=True))
        damaged = [index for index in message.indices if told.get(index) != found[index]]
        self._totals["pages_verified"] += len(found)
        self._totals["checksum_mismatches"] += len(damaged)
        return damaged

    def _ask_again(self, session: ReceiveSession, indices: list[int], unit: int, number: int) -> bool:
        """Ask for these pages again. False: that has happened too often, and the transfer ends."""
        connection = self._connections.by_peer[session.peer]
        way = f"by {connection.transport} from node {connection.name} to decode node {self._name}"
        if session.corrupt(indices, unit):
            if self._totals["checksum_mismatches"] == len(indices):
                log.warning("a page arrived damaged %s and is requested again; further ones are only counted", way)
            pages = [session.page_of(index) for index in indices]
            self._transport.allow(session.peer, session.epoch, pages, connection.units[unit])
            self._messages.append((session.peer, Resend(*session.key, session.epoch, tuple(indices), unit, number)))
            return True
        message = f"the same page arrived damaged {MAX_RESENDS + 1} times {way}"
        self._messages.append((session.peer, AbortTransfer(*session.key)))
        self._table.fail(session, ReceiveEvent.CANCEL, ErrorCode.TRANSFER_FAILED, message)
        return False

    def _on_closed(self, session: ReceiveSession, message: Closed) -> bool:
        if session.state is ReceiveState.QUARANTINED:
            self._table.release(session, ReceiveEvent.CLOSE)
        elif message.reason == "finished":
            self._table.finish(session)
        else:
            why = message.message or f"the prefill node has closed the transfer: {message.reason}"
            code = message.code if message.code is ErrorCode.TAKEN_OVER else CODES.get(message.reason, message.code)
            self._table.fail(session, ReceiveEvent.CLOSE, ENDS_OF_SENDER.get(code, code), why)
        return True

    # ---- what follows -------------------------------------------------------------------------------------------

    def _grant(self, session: ReceiveSession) -> None:
        """Tell the writer of all pages that have not arrived yet."""
        connection = self._connections.by_peer[session.peer]
        num_ranges = connection.num_token_ranges
        session.grant(connection.epoch, num_ranges, len(connection.units) // num_ranges)
        for first, pages in session.lacking() or [(session.first, [])]:
            self._transport.allow(session.peer, connection.epoch, pages)
            self._messages.append((session.peer, Grant(*session.key, connection.epoch, first, tuple(pages))))
        # PrefillDone may have come before the last break.
        if session.key in self._table.prefill_dones and session.accepts(ReceiveEvent.PREFILL_DONE):
            session.apply(ReceiveEvent.PREFILL_DONE)
            if session.state is ReceiveState.COMPLETE:
                self._complete(session)

    def _complete(self, session: ReceiveSession) -> None:
        self._totals["bytes_saved_by_cache"] += session.num_cached * self._transport.store.layout.page_bytes
        self._messages.append((session.peer, TransferAck(*session.key)))
        self._table.complete(session)

    def _fence(self, peer: str, epoch: int, reason: str) -> None:
        """No write under epochs up to this one can come any more."""
        for session in self._table.of(peer):
            if not 0 < session.epoch <= epoch:
                continue
            if session.state is ReceiveState.QUARANTINED:
                self._table.release(session, ReceiveEvent.FENCE)
            else:
                self._table.fail(session, ReceiveEvent.FENCE, ErrorCode.NODE_LOST, reason)

    # ---- results ------------------------------------------------------------------------------------------------

    def take(self) -> tuple[list[tuple[str, Message]], list[Event]]:
        """Messages to send, as (peer, message) in order, and events. Each is returned once."""
        messages, events = self._messages, self._table.events
        self._messages, self._table.events = [], []
        return messages, events

    def has_transfers(self, peer: str) -> bool:
        """Whether a transfer from this prefill node is in progress, or its pages are in quarantine."""
        return bool(self._table.of(peer))

    def is_connected(self, peer: str) -> bool:
        connection = self._connections.by_peer.get(peer)
        return connection is not None and connection.is_usable

    def gauges(self) -> dict[str, float]:
        """Transfers by stage and transport."""
        transports = {peer: connection.transport for peer, connection in self._connections.by_peer.items()}
        transfers = [
            (STAGES[session.state], transports.get(session.peer, "")) for session in self._table.sessions.values()
        ]
        return stage_gauges(tuple(dict.fromkeys(STAGES.values())), transports.values(), transfers)

    def counters(self) -> dict[str, float]:
        totals = {name: float(count) for name, count in self._totals.items()}
        return {**totals, **self._table.counters(), **self._transport.counters()}

    def transports(self) -> Sequence[str]:
        return self._transport.names

    def files(self) -> Sequence[int]:
        return self._transport.files()

    def pairs(self) -> list[PairState]:
        """Prefill nodes from which pages can come, or should and cannot; the latter have a problem."""
        return self._connections.states()

    def check(self) -> None:
        self._table.check()
        for session in self._table.sessions.values():
            connection = self._connections.by_peer.get(session.peer)
            if session.state in (ReceiveState.GRANTED, ReceiveState.PREFILLED, ReceiveState.LANDED):
                invariant(
                    connection is not None and connection.is_attached and connection.epoch == session.epoch,
                    "outlived its pair",
                )
            if session.state is ReceiveState.RESERVED:
                invariant(
                    connection is None or not (connection.is_usable or connection.refusal),
                    "pages are reserved and never granted",
                )
