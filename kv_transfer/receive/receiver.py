"""The decode node's end of every transfer: pages are granted, written by a peer, and either complete or in quarantine.

The role reserves pages (``Owner.GRANT``) and hands them to ``begin``; they are granted once the pair is connected.
When every page and the handoff are here the role gets ``Completed`` and the pages with it. In all other cases the
pages are freed here, on one path, and only when the writer is fenced: by its own word (``Closed``, or ``Connected``
under a later epoch, which it says after it has let go of the earlier one), or by the transport's proof that it cannot
write (``poll``). Until then pages of a transfer that was cancelled, or whose peer is out of sight, are in quarantine.

Events must be taken right after the call that may have made them: pages of a failed transfer are no longer the
caller's.
"""

import logging
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
    Grant,
    Message,
    PagesWritten,
    PairState,
    PrefillDone,
    Refused,
    Resend,
    TransferAck,
)
from kv_transfer.checksums import Checksums
from kv_transfer.events import Event, Finished, PairLost, TransferFailed
from kv_transfer.page_mapping import parts_of
from kv_transfer.receive.connections import Link, Links
from kv_transfer.receive.table import Incoming
from kv_transfer.send.session import MAX_RESENDS, ReceiveSession
from kv_transfer.states import ReceiveEvent, Receiving
from kv_transfer.transports.base import ReaderTransport

log = logging.getLogger(__name__)

MAX_PROBLEM = 512  # characters of a problem that travel
CODES = {"aborted": ErrorCode.ABORTED, "cancelled": ErrorCode.ABORTED}


class Receiver:
    """All transfers to one decode node. Pure but for its transport and the books.

    Args:
        transport: offers our pool, and proves writers dead.
        books: of the pool. Pages come in as ``GRANT``; only the receiver moves any to ``QUARANTINE``.
        name, digest: of this node and its model, for ``Connect``.
        num_ranks: of the writer, each of which delivers its own part of every page.
        wants_checksums: one must come with every page. Those that come are always verified.
    """

    def __init__(
        self,
        transport: ReaderTransport,
        books: PageAllocator,
        *,
        name: str = "decode",
        digest: str = "-",
        num_ranks: int = 1,
        wants_checksums: bool = False,
    ) -> None:
        self._transport = transport
        self._incoming = Incoming(books, transport.forbid)
        self._name = name
        self._num_ranks = num_ranks
        self._wants_checksums = wants_checksums
        self._checksums = Checksums(transport.store)
        self._links = Links(transport, name=name, digest=digest, wants_checksums=wants_checksums)
        self._messages: list[tuple[str, Message]] = []
        self._totals: Counter[str] = Counter()

    # ---- what the role says -------------------------------------------------------------------------------------

    def connect(self, peer: str, name: str = "") -> Connect:
        """The message that offers our pool to a prefill node (by incarnation), under a new epoch. ``name``: for people.

        What an earlier epoch with it has granted fails, as in ``peer_lost``; what waits for a connection goes on
        waiting.
        """
        self._drop_link(peer, is_all=False)
        return self._links.offer(peer, name or peer[:8])

    def begin(self, key: RequestKey, peer: str, *, first: int, pages: Sequence[int], num_tokens: int) -> None:
        """Expect a prompt of ``num_tokens`` from this peer; its pages from index ``first`` on go to ``pages``.

        ``pages`` are owned as ``GRANT``, and granted to the peer as soon as the pair is connected.
        """
        assert key not in self._incoming.sessions, f"{key} has begun already"
        page_size = self._transport.store.geometry.page_size
        session = ReceiveSession(
            key, peer, first=first, num_tokens=num_tokens, page_size=page_size, num_ranks=self._num_ranks
        )
        session.reserve(pages)
        assert session.first + len(pages) == session.num_pages, f"{key} lacks pages"
        self._incoming.sessions[key] = session
        link = self._links.get(peer)
        if link is not None and link.refusal:
            failure = TransferFailed(key, ErrorCode.TRANSFER_FAILED, link.refusal)
            self._incoming.give_up(session, ReceiveEvent.CLOSE, failure)
        elif link is not None and link.is_open:
            self._grant(session)

    def cancel(self, key: RequestKey) -> None:
        """Not wanted any more, at any point; no event of this key comes after. Unknown and ended keys are ignored."""
        self._incoming.untell(key)
        session = self._incoming.sessions.get(key)
        if session is None or not session.accepts(ReceiveEvent.CANCEL):
            return
        if session.peer in self._links.by_peer:
            self._messages.append((session.peer, AbortTransfer(*key)))
        self._incoming.give_up(session, ReceiveEvent.CANCEL, None)

    def peer_lost(self, peer: str) -> None:
        """The control connection is gone. Transfers fail; what was granted stays in quarantine until the fence."""
        self._drop_link(peer, is_all=True)

    def _drop_link(self, peer: str, *, is_all: bool) -> None:
        self._links.drop(peer)
        self._messages = [(to, message) for to, message in self._messages if to != peer]
        for session in self._incoming.of(peer):
            if session.accepts(ReceiveEvent.LOSE) and (is_all or session.epoch):
                message = "the connection to the prefill node was lost"
                failure = TransferFailed(session.key, ErrorCode.NODE_LOST, message)
                self._incoming.give_up(session, ReceiveEvent.LOSE, failure)

    def poll(self, now: float) -> None:
        """Let writers attach, and take note of those that can write no more; have those fenced that nobody hears of."""
        for peer, epoch in (*self._incoming.overdue(now), *self._links.in_doubt()):
            self._transport.reclaim(peer, epoch)
        for fenced in self._transport.poll(now):
            link = self._links.get(fenced.peer)
            is_now = link is not None and link.epoch <= fenced.epoch
            if link is not None and is_now and not fenced.is_dead and link.retry_at is None:
                self._on_broken(fenced.peer, link, fenced.reason, now)
            self._fence(fenced.peer, fenced.epoch, fenced.reason)
            if is_now and fenced.is_dead:
                self._lose(fenced.peer, fenced.reason)
        offers = self._links.offer_again(now)
        self._totals["reconnects"] += len(offers)
        self._messages += offers
        for peer, link in self._links.unanswered(now):
            if link.broken:
                self._lose(peer, f"{link.broken}; some of its writes may still be under way")
            else:
                self._on_broken(peer, link, "it did not answer", now)

    def _on_broken(self, peer: str, link: Link, reason: str, now: float) -> None:
        """Nothing can be written under the link's epoch any more. Its transfers wait for another, if there is hope."""
        self._totals["broken_pairs"] += link.is_connected
        for session in self._incoming.of(peer):
            if session.accepts(ReceiveEvent.SUSPEND):
                session.suspend()
                self._transport.forbid(session.pages)
        if link.broke(reason, now):
            log.warning("pages of prefill node %s cannot come now and are soon tried again: %s", link.name, reason)
            return
        if not link.has_connected:
            why = f"prefill node {link.name} could not attach the pool of decode node {self._name}"
            self._refuse(peer, link, f"{why} in {link.num_tries} tries: {reason}")
            return
        why = f"{link.transport or self._transport.name} from prefill node {link.name} to decode node {self._name}"
        why += f" broke and could not be mended in {link.num_tries} tries: {reason}"
        for session in self._incoming.of(peer):
            if session.state is Receiving.RESERVED:
                failure = TransferFailed(session.key, ErrorCode.TRANSFER_FAILED, why)
                self._incoming.give_up(session, ReceiveEvent.LOSE, failure)
        self._lose(peer, why)

    def _lose(self, peer: str, why: str) -> None:
        self.peer_lost(peer)
        self._incoming.events.append(PairLost(peer, why))

    # ---- what a prefill node says -------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message, now: float = 0.0) -> None:
        """Handle a message of a prefill node; one that cannot be meant for this node is only counted."""
        if isinstance(message, Connected):
            is_ours = self._on_connected(peer, message)
        elif isinstance(message, AttachFailed):
            is_ours = self._on_attach_failed(peer, message, now)
        elif isinstance(message, Refused):
            is_ours = self._on_refused(peer, message, now)
        elif isinstance(message, PagesWritten | PrefillDone | Closed):
            session = self._incoming.sessions.get((message.rid, message.attempt))
            is_ours = session is not None and session.peer == peer and self._on_transfer(session, message, now)
        else:
            is_ours = False
        self._totals["stale_messages"] += not is_ours

    def _on_connected(self, peer: str, message: Connected) -> bool:
        link = self._links.awaited(peer, message.epoch)
        if link is None:
            return False
        if not self._transport.chosen(peer, message.epoch, message.transport):
            return False
        geometry = self._transport.store.geometry
        if geometry.page_size % message.num_units:
            self._refuse(peer, link, f"a page of {geometry.page_size} tokens cannot come in {message.num_units} parts")
            return True
        self._totals[f"pairs_by_{message.transport}"] += 1
        log.info(
            "pages of prefill node %s come by %s%s", link.name, message.transport, message.why and f": {message.why}"
        )
        link.connected(parts_of(geometry, message.num_units), message.transport, message.why)
        self._fence(peer, link.epoch - 1, "the prefill node has let go of the pages of an earlier connection")
        for session in self._incoming.of(peer):
            if session.state is Receiving.RESERVED:
                self._grant(session)
        return True

    def _on_attach_failed(self, peer: str, message: AttachFailed, now: float) -> bool:
        link = self._links.awaited(peer, message.epoch)
        if link is not None:
            self._on_broken(peer, link, message.reason, now)
        return link is not None

    def _on_refused(self, peer: str, message: Refused, now: float) -> bool:
        link = self._links.awaited(peer, message.epoch)
        if link is None:
            return self._on_let_go(peer, message, now)
        if link.is_resuming:
            self._on_broken(peer, link, message.reason, now)
            return True
        self._refuse(peer, link, message.reason or "the prefill node refuses to work with this decode node")
        return True

    def _on_let_go(self, peer: str, message: Refused, now: float) -> bool:
        """The transport will prove that nothing more is written; if it cannot do that soon, nobody waits for it."""
        link = self._links.get(peer)
        if link is None or link.epoch != message.epoch or not link.is_open:
            return False
        link.let_go(message.reason, now)
        return True

    def _refuse(self, peer: str, link: Link, why: str) -> None:
        log.warning("no pages of prefill node %s can come: %s", link.name, why)
        link.refused(why)
        for session in self._incoming.of(peer):
            if session.state is Receiving.RESERVED:
                failure = TransferFailed(session.key, ErrorCode.TRANSFER_FAILED, why)
                self._incoming.give_up(session, ReceiveEvent.CLOSE, failure)

    def _on_transfer(self, session: ReceiveSession, message: PagesWritten | PrefillDone | Closed, now: float) -> bool:
        if isinstance(message, Closed):
            return self._on_closed(session, message)
        if isinstance(message, PrefillDone):
            if message.num_tokens != session.num_tokens or not session.accepts(ReceiveEvent.HANDOFF):
                return False
            self._incoming.handoffs[session.key] = (message, now)
            session.apply(ReceiveEvent.HANDOFF)
        elif not self._on_delivered(session, message):
            return False
        if session.state is Receiving.COMPLETE:
            self._complete(session)
        return True

    def _on_delivered(self, session: ReceiveSession, message: PagesWritten) -> bool:
        is_now = message.epoch == session.epoch and session.accepts(ReceiveEvent.DELIVER)
        if not is_now or not session.is_expected(message.indices, message.part, message.num_resends):
            return False
        damaged = self._damaged(session, message) if self._wants_checksums or message.checksums else []
        if damaged and not self._ask_again(session, damaged, message.part, message.num_resends + 1):
            return True
        self._links.by_peer[session.peer].num_tries = 0
        whole = session.deliver([index for index in message.indices if index not in damaged], message.part)
        self._transport.store.landed(whole)
        self._totals["pages_received"] += len(whole)
        return True

    def _damaged(self, session: ReceiveSession, message: PagesWritten) -> list[int]:
        """Indices of pages that stand here with other bytes than they had, as far as we are told what they had."""
        part = self._links.by_peer[session.peer].parts[message.part % session.num_units]
        runs = part.runs(self._transport.store.geometry)
        told = dict(zip(message.indices, message.checksums, strict=False))
        found = {index: self._checksums.of_target(session.page_of(index), runs) for index in message.indices}
        damaged = [index for index in message.indices if told.get(index) != found[index]]
        self._totals["pages_verified"] += len(found)
        self._totals["checksum_mismatches"] += len(damaged)
        return damaged

    def _ask_again(self, session: ReceiveSession, indices: list[int], part: int, number: int) -> bool:
        """False: we have done so too often, and the transfer ends."""
        link = self._links.by_peer[session.peer]
        way = f"by {link.transport} from prefill node {link.name} to decode node {self._name}"
        if session.corrupt(indices, part):
            if self._totals["checksum_mismatches"] == len(indices):
                log.warning("a page came damaged %s and is asked for again; further ones are only counted", way)
            pages = [session.page_of(index) for index in indices]
            self._transport.allow(session.peer, session.epoch, pages, link.parts[part % session.num_units])
            self._messages.append((session.peer, Resend(*session.key, session.epoch, tuple(indices), part, number)))
            return True
        message = f"the same page came damaged {MAX_RESENDS + 1} times {way}"
        self._messages.append((session.peer, AbortTransfer(*session.key)))
        failure = TransferFailed(session.key, ErrorCode.TRANSFER_FAILED, message)
        self._incoming.give_up(session, ReceiveEvent.CANCEL, failure)
        return False

    def _on_closed(self, session: ReceiveSession, message: Closed) -> bool:
        event: Event | None = None
        if session.state is not Receiving.QUARANTINED:
            if message.reason == "finished":
                event = Finished(session.key)
            else:
                why = message.message or f"the prefill node has closed the transfer: {message.reason}"
                event = TransferFailed(session.key, CODES.get(message.reason, message.code), why)
        self._incoming.give_up(session, ReceiveEvent.CLOSE, event)
        return True

    # ---- what follows -------------------------------------------------------------------------------------------

    def _grant(self, session: ReceiveSession) -> None:
        """Tell the writer of every page that has not arrived; some may have, before a break."""
        link = self._links.by_peer[session.peer]
        session.grant(link.epoch, len(link.parts))
        for first, pages in session.lacking() or [(session.first, [])]:
            self._transport.allow(session.peer, link.epoch, pages)
            self._messages.append((session.peer, Grant(*session.key, link.epoch, first, tuple(pages))))
        if session.key in self._incoming.handoffs and session.accepts(ReceiveEvent.HANDOFF):  # it came before a break
            session.apply(ReceiveEvent.HANDOFF)
            if session.state is Receiving.COMPLETE:
                self._complete(session)

    def _complete(self, session: ReceiveSession) -> None:
        self._totals["bytes_saved_by_cache"] += session.first * self._transport.store.geometry.page_bytes
        self._messages.append((session.peer, TransferAck(*session.key)))
        self._incoming.complete(session)

    def _fence(self, peer: str, epoch: int, reason: str) -> None:
        """No write under epochs up to this one can come any more."""
        for session in self._incoming.of(peer):
            if not 0 < session.epoch <= epoch:
                continue
            is_told = session.state is Receiving.QUARANTINED
            failure = None if is_told else TransferFailed(session.key, ErrorCode.NODE_LOST, reason)
            self._incoming.give_up(session, ReceiveEvent.FENCE, failure)

    # ---- results ------------------------------------------------------------------------------------------------

    def take(self) -> tuple[list[tuple[str, Message]], list[Event]]:
        """What to send, as (peer, message) in order, and what has happened. Each is returned once."""
        messages, events = self._messages, self._incoming.events
        self._messages, self._incoming.events = [], []
        return messages, events

    def is_connected(self, peer: str) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_open

    @property
    def num_quarantined(self) -> int:
        """Pages in quarantine now."""
        return self._incoming.num_quarantined

    def counters(self) -> dict[str, float]:
        """Monotonic totals of pages, transfers and messages."""
        names = (
            "pages_received",
            "bytes_saved_by_cache",
            "pages_verified",
            "checksum_mismatches",
            "broken_pairs",
            "reconnects",
            "stale_messages",
        )
        chosen = {name: float(count) for name, count in self._totals.items() if name.startswith("pairs_by_")}
        totals = {name: float(self._totals[name]) for name in names}
        return {**totals, **chosen, **self._incoming.counters(), **self._transport.counters()}

    def transports(self) -> Sequence[str]:
        """Names of those that may carry pages here, best first."""
        return self._transport.names

    def files(self) -> Sequence[int]:
        """File descriptors whose input should wake the loop for ``poll``."""
        return self._transport.files()

    def pairs(self) -> list[PairState]:
        """Prefill nodes from which pages can come, or should and cannot; the latter have a problem."""
        return [
            PairState(link.name, peer, link.transport or self._transport.name, link.why, link.problem[:MAX_PROBLEM])
            for peer, link in self._links.by_peer.items()
            if link.is_open or link.problem
        ]

    def peers(self) -> Sequence[str]:
        """Prefill nodes that this node has offered its pool to."""
        return list(self._links.by_peer)

    def close(self) -> None:
        """Stop offering the pool."""
        for peer in self.peers():
            self.peer_lost(peer)
        self._transport.close()

    def check(self) -> None:
        """Prove the books; raises ``InvariantError``."""
        self._incoming.check()
        for session in self._incoming.sessions.values():
            link = self._links.get(session.peer)
            if session.state in (Receiving.GRANTED, Receiving.HANDED, Receiving.LANDED):
                invariant(link is not None and link.is_connected and link.epoch == session.epoch, "outlived its pair")
            if session.state is Receiving.RESERVED:
                invariant(link is None or not (link.is_open or link.refusal), "pages are reserved and never granted")
