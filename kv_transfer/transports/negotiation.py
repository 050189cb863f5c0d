"""Choose the transport that carries the pages of a pair: the first that works of those that both nodes have.

The reader offers every transport that it has. The writer tries the transports that both ends have, best first, and
keeps the first that attaches; a transport attaches only once bytes have gone from process to process. ``Attached.why``
names the transports that were tried before and failed, with the reasons.

A transport that breaks after that rests for this pair, which continues with the next one that works. After a while
(``broken_transports``) the writer attaches by the better one again, while pages still use the other, and changes to it
once it works, at a moment at which nothing is under way.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from common.wire.messages import Connect
from kv_transfer.page_slices import PageSlice, SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transfer_stats import sums
from kv_transfer.transports.base import Attached, AttachError, Fenced, ReaderTransport, Transport, WriterTransport
from kv_transfer.transports.broken_transports import BrokenTransports

T = TypeVar("T", bound=Transport)

#: Seconds that a transport may take to attach a pair again while there are others to try. Some take longer to give up
#: than the decode node waits for the answer to such an offer (``kv_transfer.receive.connections.ANSWER_S``).
PATIENCE_S = 5.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """One peer's attachment.

    Attributes:
        left: transports that are still to be tried.
        failures: sentences about the transports that were tried before ``current``, or that rest.
        has_written: a write has begun since it was attached.
        begun_at: when ``current`` began to attach.
        due: a better transport that is tried again; empty: none is.
        better: the attempt to attach by it, once the peer has offered it again.
        better_until: by when that must have worked, and then by when nothing must be under way.
        is_ending: it ends in favour of a better transport once nothing is under way.
    """

    connect: Connect
    offers: dict[str, str]
    left: list[WriterTransport]
    failures: list[str]
    current: WriterTransport | None = None
    is_attached: bool = False
    has_written: bool = False
    begun_at: float = 0.0
    due: str = ""
    better: "_Attempt | None" = None
    better_until: float = 0.0
    is_ending: bool = False


class _Negotiating(Transport, Generic[T]):
    """What the two ends have in common. ``transports`` best first."""

    def __init__(self, transports: Sequence[T]) -> None:
        self.store = transports[0].store
        self.name = transports[0].name if len(transports) == 1 else "auto"
        self._transports = list(transports)

    @property
    def names(self) -> Sequence[str]:
        return [transport.name for transport in self._transports]

    def files(self) -> Sequence[int]:
        return [file for transport in self._transports for file in transport.files()]

    def counters(self) -> dict[str, float]:
        return sums(*(transport.counters() for transport in self._transports))

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class NegotiatingWriter(_Negotiating[WriterTransport], WriterTransport):
    """``WriterTransport`` over several.

    Args:
        clock: returns the instant in seconds.
    """

    def __init__(self, transports: Sequence[WriterTransport], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(transports)
        self._clock = clock
        self._broken = BrokenTransports()
        self._attempts: dict[str, _Attempt] = {}
        self._draining: dict[str, None] = {}  # detached peers with writes under way
        self._asked: list[str] = []  # peers for ``returns``
        self._replaced: dict[str, WriterTransport] = {}  # by a better transport, until the peer knows of it
        self._tickets: dict[tuple[str, int], tuple[int, str]] = {}  # (transport, its ticket) -> (our ticket, peer)
        self._num_tickets = 0

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._attempts, "detach first"
        try:
            offers = msgspec.json.decode(connect.endpoint, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise AttachError(f"the endpoint offered by {connect.name} cannot be understood") from error
        candidates = [transport for transport in self._transports if transport.name in offers]
        if not candidates:
            theirs, ours = ", ".join(offers) or "nothing", ", ".join(self.names)
            raise AttachError(f"{connect.name} takes pages by {theirs}, this prefill node sends by {ours}")
        if connect.resumes:
            self._broken.broke(peer, self._clock())
        attempt = self._new_attempt(peer, connect, offers, candidates)
        if peer in self._draining:
            for transport in candidates:
                transport.voided(peer, offers[transport.name])
        else:
            self._attach_next(peer, attempt)
        self._attempts[peer] = attempt

    def _new_attempt(
        self, peer: str, connect: Connect, offers: dict[str, str], candidates: list[WriterTransport]
    ) -> _Attempt:
        """An attempt that tries transports that rest after all others, and those before them that could not attach."""
        now = self._clock()
        resting = [one for one in candidates if self._broken.is_resting(peer, one.name, now)]
        others = [one for one in candidates if one not in resting]
        failures = [f"{one.name}: it has broken lately" for one in resting] if others else []
        if connect.resumes:
            others.sort(key=lambda one: self._broken.has_failed_lately(peer, one.name, now))
        return _Attempt(connect, offers, [*others, *resting], failures)

    def _attach_next(self, peer: str, attempt: _Attempt) -> None:
        """Begin to attach by the best transport that is left.

        Raises:
            AttachError: none is left; names all that were tried.
        """
        while attempt.left:
            transport = attempt.left.pop(0)
            endpoint = attempt.offers[transport.name]
            try:
                transport.attach(
                    peer, msgspec.structs.replace(attempt.connect, transport=transport.name, endpoint=endpoint)
                )
            except AttachError as error:
                self._note_failure(peer, attempt, transport, str(error))
                continue
            attempt.current, attempt.begun_at = transport, self._clock()
            return
        raise AttachError("; ".join(attempt.failures))

    def poll(self) -> list[Attached]:
        news = []
        for peer in list(self._draining):
            if self._detach(peer):
                del self._draining[peer]
                if peer in self._attempts:
                    news += self._continue_attaching(peer, self._attempts[peer])
        for transport in self._transports:
            for attached in transport.poll():
                attempt = self._attempts.get(attached.peer)
                if attempt is None:
                    continue
                if attempt.current is transport and attempt.connect.epoch == attached.epoch:
                    news += self._on_attached(attached, attempt, transport)
                elif attempt.better is not None and attempt.better.connect.epoch == attached.epoch:
                    self._on_better_attached(attached, attempt, attempt.better)
                elif attached.problem and self._replaced.get(attached.peer) is transport:
                    self._detach_replaced(attached.peer)
        return [*news, *self._give_up_slow(), *self._return_to_better()]

    def _give_up_slow(self) -> list[Attached]:
        """Try the next transport for a pair that must be attached again, if one does not answer soon."""
        news, until = [], self._clock() - PATIENCE_S
        for peer, attempt in list(self._attempts.items()):
            is_slow = attempt.connect.resumes and not attempt.is_attached and attempt.begun_at <= until
            if is_slow and attempt.left and attempt.current is not None and peer not in self._draining:
                problem = f"no answer within {PATIENCE_S:g} s"
                news += self._on_attached(Attached(peer, attempt.connect.epoch, problem), attempt, attempt.current)
        return news

    def _return_to_better(self) -> list[Attached]:
        """Return pairs to better transports whose rest is over.

        A page must have been written since, so that an idle pair stays with what works.
        """
        news, now = [], self._clock()
        for peer, attempt in list(self._attempts.items()):
            if not attempt.has_written or attempt.current is None:
                continue
            if not attempt.due:
                self._ask_for_better(peer, attempt, now)
            elif self.is_changing(peer) and all(owner != peer for _, owner in self._tickets.values()):
                if attempt.better is not None:
                    news.append(self._switch_to_better(peer, attempt, attempt.better))
                else:
                    news.append(self._break_for_better(peer, attempt))
            elif attempt.better_until <= now and not attempt.is_ending:
                self._give_up_better(peer, attempt)
        return news

    def _ask_for_better(self, peer: str, attempt: _Attempt, now: float) -> None:
        assert attempt.current is not None
        better = self._transports[: self._transports.index(attempt.current)]
        attempt.due = self._broken.due(peer, [one.name for one in better if one.name in attempt.offers], now)
        if attempt.due:
            attempt.better_until = now + PATIENCE_S
            self._asked.append(peer)

    def returns(self) -> list[str]:
        asked, self._asked = self._asked, []
        return [peer for peer in asked if peer in self._attempts]

    def attach_beside(self, peer: str, connect: Connect | None) -> bool:
        attempt = self._attempts.get(peer)
        if attempt is None or not attempt.due or attempt.better is not None or attempt.is_ending:
            return False
        if connect is None:
            attempt.is_ending = True
            return False
        transport = next(one for one in self._transports if one.name == attempt.due)
        try:
            offers = msgspec.json.decode(connect.endpoint, type=dict[str, str])
            endpoint = offers.get(attempt.due, "")
            transport.attach(peer, msgspec.structs.replace(connect, transport=attempt.due, endpoint=endpoint))
        except (AttachError, msgspec.DecodeError, UnicodeError):
            self._give_up_better(peer, attempt)
            return False
        attempt.better = _Attempt(connect, offers, [], [], transport)
        attempt.better_until = self._clock() + PATIENCE_S
        return True

    def is_changing(self, peer: str) -> bool:
        attempt = self._attempts.get(peer)
        if attempt is None:
            return False
        return attempt.is_ending or (attempt.better is not None and attempt.better.is_attached)

    def _on_better_attached(self, attached: Attached, attempt: _Attempt, better: _Attempt) -> None:
        if attached.problem:
            self._give_up_better(attached.peer, attempt)
        else:
            better.is_attached = True
            attempt.better_until = self._clock() + PATIENCE_S

    def _give_up_better(self, peer: str, attempt: _Attempt) -> None:
        """The better transport rests once more; the attachment has gone on."""
        if attempt.better is not None and attempt.better.current is not None:
            is_fenced = attempt.better.current.detach(peer)
            assert is_fenced, "nothing was written by it"
        self._broken.could_not_attach(peer, attempt.due, self._clock())
        attempt.due, attempt.better = "", None

    def _break_for_better(self, peer: str, attempt: _Attempt) -> Attached:
        """Report an attachment as broken whose peer cannot offer a better transport beside it but connects again."""
        assert attempt.current is not None
        self._broken.left(peer)
        attempt.has_written = attempt.is_ending = False
        instead = f"{attempt.due} is tried again instead of {attempt.current.name}"
        return Attached(peer, attempt.connect.epoch, f"pages to decode node {attempt.connect.name}: {instead}")

    def _switch_to_better(self, peer: str, attempt: _Attempt, better: _Attempt) -> Attached:
        """Use the better transport from now on.

        The other one stays attached until the peer has heard of that, since the peer would take its end for a break.
        """
        assert attempt.current is not None
        self._attempts[peer], self._replaced[peer] = better, attempt.current
        self._broken.attached(peer, attempt.due, self._clock())
        return Attached(peer, better.connect.epoch, "", attempt.due, "it works again")

    def _detach_replaced(self, peer: str) -> None:
        """Detach the transport that a better one has replaced; the peer knows of it."""
        transport = self._replaced.pop(peer, None)
        if transport is not None:
            is_fenced = transport.detach(peer)
            assert is_fenced, "nothing was under way"

    def _note_failure(self, peer: str, attempt: _Attempt, transport: WriterTransport, problem: str) -> None:
        attempt.failures.append(f"{transport.name}: {problem}")
        self._broken.could_not_attach(peer, transport.name, self._clock())

    def _on_attached(self, attached: Attached, attempt: _Attempt, transport: WriterTransport) -> list[Attached]:
        if attempt.is_attached:
            attempt.has_written = False  # it is over, and ``_return_to_better`` has no part in that
            return [attached]
        if not attached.problem:
            attempt.is_attached = True
            self._broken.attached(attached.peer, transport.name, self._clock())
            why = "; ".join(["it was asked for" if self.name != "auto" else "the first that worked", *attempt.failures])
            return [Attached(attached.peer, attached.epoch, "", transport.name, why)]
        self._note_failure(attached.peer, attempt, transport, attached.problem)
        if not transport.detach(attached.peer):
            self._draining[attached.peer] = None
            return []
        return self._continue_attaching(attached.peer, attempt)

    def _continue_attaching(self, peer: str, attempt: _Attempt) -> list[Attached]:
        try:
            self._attach_next(peer, attempt)
        except AttachError as error:
            del self._attempts[peer]
            return [Attached(peer, attempt.connect.epoch, str(error))]
        return []

    def prepare(self, peer: str, pages: Sequence[int]) -> None:
        attempt = self._attempts[peer]
        assert attempt.is_attached and attempt.current is not None
        self._detach_replaced(peer)  # the peer has granted these pages under the last epoch
        attempt.current.prepare(peer, pages)

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        attempt = self._attempts[peer]
        assert attempt.is_attached and attempt.current is not None
        attempt.has_written = True
        self._num_tickets += 1
        ticket = attempt.current.write(peer, pages, slices)
        self._tickets[attempt.current.name, ticket] = (self._num_tickets, peer)
        return self._num_tickets

    def done(self) -> list[int]:
        over = [(t.name, ticket) for t in self._transports for ticket in t.done()]
        return [self._tickets.pop(ticket)[0] for ticket in over if ticket in self._tickets]

    def late(self) -> list[str]:
        return [peer for transport in self._transports for peer in transport.late()]

    def detach(self, peer: str) -> bool:
        self._attempts.pop(peer, None)
        self._replaced.pop(peer, None)
        is_fenced = self._detach(peer)
        if is_fenced:  # none of its tickets is reported any more
            self._tickets = {ticket: known for ticket, known in self._tickets.items() if known[1] != peer}
        else:
            self._draining[peer] = None
        return is_fenced

    def _detach(self, peer: str) -> bool:
        return min([transport.detach(peer) for transport in self._transports])  # ask all of them


class NegotiatingReader(_Negotiating[ReaderTransport], ReaderTransport):
    """``ReaderTransport`` over several. A fence that one of them proves counts for epochs that it carries."""

    def __init__(self, transports: Sequence[ReaderTransport]) -> None:
        super().__init__(transports)
        self._offered: dict[str, int] = {}  # peer -> its newest epoch
        #: peer -> epoch and transport, until a fence is proven. A peer attaches again only when it has dropped its
        #: earlier attachment, so only the newest epoch needs proof.
        self._chosen: dict[str, tuple[int, ReaderTransport]] = {}
        self._stores: dict[str, PageStore] = {}  # of the transports that were chosen last, until ``forget``
        self._unasked: dict[str, dict[str, Fenced]] = {}  # fences of newest offers, proven before the choice
        self._news: list[Fenced] = []

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        self._offered[peer] = epoch
        return json.dumps({transport.name: transport.offer(peer, epoch) for transport in self._transports})

    def offer_beside(self, peer: str, epoch: int) -> str:
        _, current = self._chosen.get(peer, (0, None))
        better = self._transports[: self._transports.index(current)] if current is not None else []
        if not better:
            return ""
        self._offered[peer] = epoch
        self._unasked.pop(peer, None)
        return json.dumps({transport.name: transport.offer(peer, epoch) for transport in better})

    def withdraw(self, peer: str) -> None:
        self._offered.pop(peer, None)
        self._unasked.pop(peer, None)
        for transport in self._transports:
            transport.withdraw(peer)

    def forget(self, peer: str) -> None:
        self._stores.pop(peer, None)

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        named = [t for t in self._transports if t.name == transport]
        early = self._unasked.get(peer, {}).get(transport)
        if self._offered.get(peer) != epoch or not named:
            return False
        if early is None and not named[0].chosen(peer, epoch, transport):
            return False
        for other in self._transports:
            if other is not named[0]:
                other.withdraw(peer)
        self._chosen[peer] = (epoch, named[0])
        self._stores[peer] = named[0].store_of(peer)
        self._unasked.pop(peer, None)
        if early is not None:  # it attached and broke before the peer's message came; both count
            self._report(early)
        return True

    def store_of(self, peer: str) -> PageStore:
        return self._stores[peer]

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        chosen_epoch, transport = self._chosen.get(peer, (0, None))
        if transport is not None and chosen_epoch == epoch:
            transport.allow(peer, epoch, pages, again)

    def forbid(self, pages: Sequence[int]) -> None:
        for transport in self._transports:
            transport.forbid(pages)

    def reclaim(self, peer: str, epoch: int) -> None:
        chosen_epoch, transport = self._chosen.get(peer, (0, None))
        if transport is not None and chosen_epoch == epoch:
            transport.reclaim(peer, epoch)

    def poll(self, now: float) -> list[Fenced]:
        for transport in self._transports:
            for fenced in transport.poll(now):
                if self._chosen.get(fenced.peer) == (fenced.epoch, transport):
                    self._report(fenced)
                elif self._offered.get(fenced.peer) == fenced.epoch:
                    self._unasked.setdefault(fenced.peer, {})[transport.name] = fenced
        news, self._news = self._news, []
        return news

    def _report(self, fenced: Fenced) -> None:
        del self._chosen[fenced.peer]
        self._news.append(fenced)
