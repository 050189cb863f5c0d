"""The decode nodes whose pools a prefill node may write to: who fits, under which epoch, which pages are granted."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.cache.page_layout import layout_conflict
from common.errors import invariant
from common.wire.messages import AttachFailed, Connect, Connected, Grant, Message, PairState, Refused
from kv_transfer.page_mapping import Fit
from kv_transfer.send.session import SendSession
from kv_transfer.states import Sending
from kv_transfer.transports.base import Attached, AttachError, WriterTransport, from_message

log = logging.getLogger(__name__)

MAX_PEERS = 1_024
MAX_WHY = 512  # characters of a reason that travel


@dataclass(slots=True)
class Pair:
    """A decode node's offer, of use once attached.

    Attributes:
        has_checksums: it is told one with every page.
        transport, why: by which its pages are written, and why by that one; once attached.
        granted: its pages that some transfer may write.
    """

    name: str
    epoch: int
    num_pages: int
    fit: Fit
    has_checksums: bool
    is_attached: bool = False
    transport: str = ""
    why: str = ""
    granted: set[int] = field(default_factory=set)

    def can_be_computed(self, grant: Grant, num_source_pages: int) -> bool:
        """Whether a prompt of which so much is granted fits into our own pool."""
        return grant.first + len(grant.pages) <= self.fit.most_granted(None, num_source_pages)

    def problem(self, session: SendSession, grant: Grant, num_source_pages: int) -> str:
        """Why this grant cannot be meant, as a sentence; empty if it can."""
        end = grant.first + len(grant.pages)
        most = self.fit.most_granted(session.num_tokens, num_source_pages)
        if grant.first < 0 or end > most:
            bound = "" if session.num_tokens else ", the prefill node's whole pool (--max-total-tokens)"
            return f"pages {grant.first} to {end} are granted, the prompt has at most {most}{bound}"
        if any(not 0 <= page < self.num_pages for page in grant.pages):
            return f"a page is granted that a pool of {self.num_pages} pages does not have"
        if len(set(grant.pages)) < len(grant.pages) or not self.granted.isdisjoint(grant.pages):
            return "a page is granted twice"
        if any(index in session.targets for index in range(grant.first, end)):
            return "two pages are granted for one page of the prompt"
        return ""


class Pairs:
    """Every pair of one prefill node, by the peer's incarnation. ``digest`` empty: models are not compared.

    ``wants_checksums``: every pair has them; otherwise those whose decode node wants them.
    """

    def __init__(self, transport: WriterTransport, digest: str, *, wants_checksums: bool = False) -> None:
        self._transport = transport
        self._digest = digest
        self._wants_checksums = wants_checksums
        self.by_peer: dict[str, Pair] = {}
        self.num_attached: Counter[str] = Counter()  # pairs so far, by transport

    def is_stale(self, peer: str, connect: Connect) -> bool:
        """Is there a pair of this epoch or a later one already?"""
        pair = self.by_peer.get(peer)
        return pair is not None and connect.epoch <= pair.epoch

    def attached(self, peer: str, epoch: int) -> Pair | None:
        """The pair, if pages can be granted under this epoch."""
        pair = self.by_peer.get(peer)
        return pair if pair is not None and pair.is_attached and pair.epoch == epoch else None

    def offer(self, peer: str, connect: Connect) -> Refused | AttachFailed | None:
        """Begin to attach to a peer that was dropped before; ``settle`` tells how it ended, if not this does."""
        problem = self._mismatch(connect)
        if problem:
            log.warning("no pages go to decode node %s: %s", connect.name, problem)
            return Refused(problem, connect.epoch)
        try:
            if len(self.by_peer) >= MAX_PEERS:
                raise AttachError(f"this prefill node already writes to {MAX_PEERS} decode nodes")
            self._transport.attach(peer, connect)
        except AttachError as error:
            return self._failed(connect.name, connect.epoch, str(error))
        fit = Fit(self._transport.store.geometry, from_message(connect.geometry))
        has_checksums = self._wants_checksums or connect.wants_checksums
        self.by_peer[peer] = Pair(connect.name, connect.epoch, connect.num_pages, fit, has_checksums)
        return None

    def _mismatch(self, connect: Connect) -> str:
        """Why this decode node does not fit, as a sentence; empty if it does."""
        ours, theirs = self._transport.store.geometry, from_message(connect.geometry)
        names = (connect.transport, self._transport.name)
        if "auto" not in names and names[0] != names[1]:
            return f"the decode node transfers by {connect.transport!r}, this prefill node by {self._transport.name!r}"
        if self._digest and connect.digest != self._digest:
            return f"{connect.name} serves a model with digest {connect.digest}, this prefill node {self._digest}"
        problem = layout_conflict(theirs, ours)
        if problem:
            return f"{connect.name} and this prefill node cannot share pages: {problem}"
        return ""

    def _failed(self, name: str, epoch: int, problem: str) -> AttachFailed:
        log.warning("the pool of decode node %s cannot be attached now: %s", name, problem)
        return AttachFailed(epoch, problem)

    def settle(self) -> tuple[list[tuple[str, Message]], list[tuple[str, str]]]:
        """News of attachments.

        Returns:
            Answers to peers whose attachment has succeeded or failed by now; and (peer, why) of those that had
            succeeded and failed now, still to be dropped.
        """
        answers: list[tuple[str, Message]] = []
        broken: list[tuple[str, str]] = []
        for news in self._transport.poll():
            pair = self.by_peer.get(news.peer)
            if pair is None or pair.epoch != news.epoch:
                continue
            if news.problem and pair.is_attached:
                broken.append((news.peer, news.problem))
            elif news.problem:
                self.drop(news.peer)
                answers.append((news.peer, self._failed(pair.name, pair.epoch, news.problem)))
            else:
                self._attached(pair, news)
                num_units = pair.fit.units.per_target
                answers.append((news.peer, Connected(pair.epoch, pair.transport, num_units, pair.why)))
        return answers, broken

    def _attached(self, pair: Pair, news: Attached) -> None:
        pair.is_attached = True
        pair.transport = news.transport or self._transport.name
        pair.why = news.why[:MAX_WHY]
        self.num_attached[pair.transport] += 1
        log.info("pages go to decode node %s by %s%s", pair.name, pair.transport, pair.why and f": {pair.why}")

    def states(self) -> list[PairState]:
        """Those in which pages can travel."""
        return [
            PairState(pair.name, peer, pair.transport, pair.why)
            for peer, pair in self.by_peer.items()
            if pair.is_attached
        ]

    def drop(self, peer: str) -> bool:
        """Let go of a peer's pool, known or not. False: some writes are under way; see ``WriterTransport.detach``."""
        self.by_peer.pop(peer, None)
        return self._transport.detach(peer)

    def check(self, sessions: Iterable[SendSession]) -> None:
        """Prove what is granted against all transfers that are not over; raises ``InvariantError``."""
        granted: dict[str, list[int]] = {}
        for session in sessions:
            if not session.is_granted:
                continue
            pair = self.by_peer.get(session.peer)
            if pair is not None and pair.epoch == session.epoch:
                granted.setdefault(session.peer, []).extend(session.targets.values())
            else:
                is_over = session.state is Sending.CLOSING
                invariant(is_over or session.is_suspended, "a transfer outlived its pair")
        for peer, pair in self.by_peer.items():
            pages = granted.get(peer, [])
            invariant(len(pages) == len(set(pages)), "two transfers may write one page")
            invariant(set(pages) == pair.granted, "granted pages are miscounted")
