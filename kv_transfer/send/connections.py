"""The prefill node's connections to decode nodes: which nodes fit, under which epoch, and which pages they have
granted.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.cache.page_layout import layout_conflict
from common.errors import ErrorCode, invariant
from common.wire.messages import (
    MAX_SENTENCE,
    AttachFailed,
    Connect,
    Connected,
    Coverage,
    Grant,
    Message,
    PairState,
    Refused,
)
from kv_transfer.checksums import wider
from kv_transfer.page_mapping import PageMapping, units_conflict
from kv_transfer.send.session import SendSession
from kv_transfer.states import SendState
from kv_transfer.transports.base import Attached, AttachError, WriterTransport

log = logging.getLogger(__name__)

MAX_PEERS = 1_024


@dataclass(slots=True)
class DecodeConnection:
    """The connection to one decode node, usable once attached.

    Attributes:
        num_pages, num_ranks: of the decode node.
        checksums: which pages are sent with a checksum.
        transport, why: the transport that carries pages, and why that one; set once attached.
        beside: epoch under which a better transport is attached meanwhile; 0: none is.
        granted: pages of the decode node that some transfer may write.
    """

    name: str
    epoch: int
    num_pages: int
    num_ranks: int
    mapping: PageMapping
    checksums: Coverage
    is_attached: bool = False
    transport: str = ""
    why: str = ""
    beside: int = 0
    granted: set[int] = field(default_factory=set)

    def is_of(self, connect: Connect) -> bool:
        """Whether an offer is of the pool that was offered when the connection was made."""
        offered = (connect.layout.layout(), connect.num_pages, connect.num_ranks)
        return offered == (self.mapping.theirs, self.num_pages, self.num_ranks)

    def problem(self, session: SendSession, grant: Grant, max_source_pages: int) -> tuple[str, ErrorCode]:
        """Why this grant cannot be meant, as a sentence that is empty if it can, and the client's error."""
        end = grant.first + len(grant.pages)
        most = self.mapping.max_target_pages(session.length, max_source_pages)
        if session.length is None and end > most:
            bound = f"the prompt has at most {most}, what the prefill node's pool can serve (--max-total-tokens)"
            return f"pages {grant.first} to {end} are granted, {bound}", ErrorCode.POOL_TOO_SMALL
        return self._contradiction(session, grant, end, most), ErrorCode.TRANSFER_FAILED

    def _contradiction(self, session: SendSession, grant: Grant, end: int, most: int) -> str:
        if grant.first < 0 or end > most:
            return f"pages {grant.first} to {end} are granted, the prompt has at most {most}"
        if grant.pages and not 0 <= min(grant.pages) <= max(grant.pages) < self.num_pages:
            return f"a page is granted that a pool of {self.num_pages} pages does not have"
        if len(set(grant.pages)) < len(grant.pages) or not self.granted.isdisjoint(grant.pages):
            return "a page is granted twice"
        if session.targets and not session.targets.keys().isdisjoint(range(grant.first, end)):
            return "two pages are granted for one page of the prompt"
        return ""


class DecodeConnections:
    """The connections to all decode nodes, by incarnation.

    Args:
        digest: of our model; empty: models are not compared.
        checksums: which pages get a checksum on every connection; more of them where a decode node wants more.
    """

    def __init__(self, transport: WriterTransport, digest: str, *, checksums: Coverage = "off") -> None:
        self._transport = transport
        self._digest = digest
        self._checksums = checksums
        self.by_peer: dict[str, DecodeConnection] = {}
        self.num_attached: Counter[str] = Counter()  # attachments so far, by transport

    def is_stale(self, peer: str, connect: Connect) -> bool:
        """Whether there is a connection of this epoch or a later one already."""
        connection = self.by_peer.get(peer)
        return connection is not None and connect.epoch <= connection.epoch

    def usable(self, peer: str, epoch: int) -> DecodeConnection | None:
        """The connection, if pages can be granted under this epoch."""
        connection = self.by_peer.get(peer)
        return connection if connection is not None and connection.is_attached and connection.epoch == epoch else None

    def attach(self, peer: str, connect: Connect) -> Refused | AttachFailed | None:
        """Begin to attach to a peer that was dropped before. ``poll`` reports how that ended, unless this returns a
        refusal.
        """
        problem = self._mismatch(connect)
        if problem:
            log.warning("cannot send pages to decode node %s: %s", connect.name, problem)
            return Refused(problem, connect.epoch)
        try:
            if len(self.by_peer) >= MAX_PEERS:
                raise AttachError(f"this prefill node already writes to {MAX_PEERS} decode nodes")
            self._transport.attach(peer, connect)
        except AttachError as error:
            return self._attach_failed(connect.name, connect.epoch, str(error))
        mapping = PageMapping(
            self._transport.store.layout,
            connect.layout.layout(),
            num_sources=self._transport.num_ranks,
            num_targets=connect.num_ranks,
        )
        checksums = wider(self._checksums, connect.checksums)
        self.by_peer[peer] = DecodeConnection(
            connect.name, connect.epoch, connect.num_pages, connect.num_ranks, mapping, checksums
        )
        return None

    def attach_beside(self, peer: str, connect: Connect) -> bool:
        """Attach by a better transport, if the peer offers one, while the connection goes on.

        Returns:
            False: the peer has no such connection, or offers another pool than that of the connection.
        """
        connection = self.usable(peer, connect.beside)
        if connection is None or not connection.is_of(connect):
            return False
        if self._transport.attach_beside(peer, connect if connect.endpoint else None):
            connection.beside = connect.epoch
        return True

    def _mismatch(self, connect: Connect) -> str:
        """Why this decode node does not fit, as a sentence; empty if it does."""
        ours, theirs = self._transport.store.layout, connect.layout.layout()
        names = (connect.transport, self._transport.name)
        if "auto" not in names and names[0] != names[1]:
            return f"the decode node transfers by {connect.transport!r}, this prefill node by {self._transport.name!r}"
        if self._digest and connect.digest != self._digest:
            return f"{connect.name} serves a model with digest {connect.digest}, this prefill node {self._digest}"
        num_ranks = self._transport.num_ranks
        problem = layout_conflict(theirs, ours) or units_conflict(
            ours, theirs, num_sources=num_ranks, num_targets=connect.num_ranks
        )
        if problem:
            return f"{connect.name} and this prefill node cannot share pages: {problem}"
        if connect.num_peer_ranks != num_ranks:
            return (
                f"{connect.name} expects pages of {connect.num_peer_ranks} ranks, and this prefill node has {num_ranks}"
            )
        return ""

    def _attach_failed(self, name: str, epoch: int, problem: str) -> AttachFailed:
        log.warning("the pool of decode node %s cannot be attached now: %s", name, problem)
        return AttachFailed(epoch, problem)

    def poll(self) -> tuple[list[tuple[str, Message]], list[tuple[str, str]], list[str]]:
        """Collect what became of attachments.

        Returns:
            Answers to peers whose attachment has succeeded or failed by now; (peer, why) of attached peers whose
            connection has broken, still to be dropped; and peers whose transfers wait for new grants, since a better
            transport carries their pages from now on.
        """
        answers: list[tuple[str, Message]] = []
        broken: list[tuple[str, str]] = []
        changed: list[str] = []
        for news in self._transport.poll():
            connection = self.by_peer.get(news.peer)
            if connection is None or news.epoch not in (connection.epoch, connection.beside):
                continue
            if news.epoch == connection.beside:
                connection.epoch, connection.beside = news.epoch, 0
                connection.granted.clear()
                changed.append(news.peer)
            if news.problem and connection.is_attached:
                broken.append((news.peer, news.problem))
            elif news.problem:
                self.drop(news.peer)
                answers.append((news.peer, self._attach_failed(connection.name, connection.epoch, news.problem)))
            else:
                self._attached(connection, news)
                units = connection.mapping.units
                num_token_ranges = units.per_target // units.num_parts
                answers.append(
                    (news.peer, Connected(connection.epoch, connection.transport, num_token_ranges, connection.why))
                )
        return answers, broken, changed

    def _attached(self, connection: DecodeConnection, news: Attached) -> None:
        connection.is_attached = True
        connection.transport = news.transport or self._transport.name
        connection.why = news.why[:MAX_SENTENCE]
        self.num_attached[connection.transport] += 1
        log.info(
            "sending pages to decode node %s by %s%s",
            connection.name,
            connection.transport,
            connection.why and f": {connection.why}",
        )

    def states(self) -> list[PairState]:
        """Connections over which pages can travel."""
        return [
            PairState(connection.name, peer, connection.transport, connection.why)
            for peer, connection in self.by_peer.items()
            if connection.is_attached
        ]

    def drop(self, peer: str) -> bool:
        """Drop a peer's pool, known or not. False: writes are under way; see ``WriterTransport.detach``."""
        self.by_peer.pop(peer, None)
        return self._transport.detach(peer)

    def check(self, sessions: Iterable[SendSession]) -> None:
        """Prove the granted pages against all transfers that are not over."""
        granted: dict[str, list[int]] = {}
        for session in sessions:
            if not session.is_granted:
                continue
            connection = self.by_peer.get(session.peer)
            if connection is not None and connection.epoch == session.epoch:
                granted.setdefault(session.peer, []).extend(session.targets.values())
            else:
                is_over = session.state is SendState.CLOSING
                invariant(is_over or session.is_suspended, "a transfer outlived its connection")
        for peer, connection in self.by_peer.items():
            pages = granted.get(peer, [])
            invariant(len(pages) == len(set(pages)), "two transfers may write one page")
            invariant(set(pages) == connection.granted, "granted pages are miscounted")
