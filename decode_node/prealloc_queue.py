"""Who gets pages next on a decode node: one line of all that lack them, wherever their prompts are computed. Pure.

Retracted requests stand at its front, then the rest by policy, and with priorities on the more urgent before everybody.
Nobody takes pages that somebody before it in the line is short of, but for the few that skip-ahead lets pass. Who waits
for a prefix that is on its way is passed by as many; then only by those that leave it room.

The first that is short of pages begins with part of them, so that they fill while it waits for the others: what is left
when everybody has been tried and running requests have room for all they may still say (or will, as far as that is
predicted), so that nobody has to give way for what lies idle. From then on it stands before its equals until it has
all, and gets whatever else is left over, but what those before it in the line still wait for. Only when nothing is left
on this node that could end does it get its pages before everybody: they are there then (see ``admission``), and nothing
else would move. Those who can get theirs only after it lend it their urgency.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from common.decision_log import Decisions
from common.request import Request
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.in_batch_prefix_caching import Sharing, SharingLimits
from common.scheduling.new_token_ratio import expected_left
from common.scheduling.ordering import RequestOrdering
from common.scheduling.skip_ahead import MAX_SKIP_AHEAD, PASSING, SkipAhead
from decode_node.page_reservation import Admission, AllocationFailure, Contention, Reservation
from decode_node.priority_inheritance import Loans
from decode_node.request_state import Event, State
from decode_node.request_table import Key, RequestTable


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a decode node. None means no bound.

    Attributes:
        max_running: slots, that is rows of the largest batch.
        max_queued: requests waiting for pages; one more is refused.
        context_length: of the model; prompt and output together may have so many tokens.
        max_prefill_tokens: tokens computed again in one step.
        chunk_tokens: tokens of one step after which a request that is computed again is cut.
        cut: where prompts are cut.
        max_requests: prompts of one step.
        is_mixed: chunks ride in the same steps as decode rows; otherwise both take turns.
        sharing: which local prompts wait for a prefix that is just being computed.
        clip_tokens: a request is expected to need at most so many further tokens.
        max_skip_ahead: smaller requests that may pass one for which pages are short.
        is_retracted_by_priority: when pages run short, the least urgent gives way; otherwise the one with the shortest
            output, whose loss costs the least work.
        resume_tokens: a retracted request that lacks more than so many tokens is computed again by its prefill node;
            None: always here.
        reserved_tokens: room kept for each request's further output; None: as much as it is expected to need.
    """

    max_running: int
    max_queued: int | None = None
    context_length: int | None = None
    max_prefill_tokens: int = 16_384
    chunk_tokens: int | None = None
    cut: ChunkAlignment = field(default_factory=ChunkAlignment)
    max_requests: int | None = None
    is_mixed: bool = False
    sharing: SharingLimits = field(default_factory=SharingLimits)
    clip_tokens: int = 4_096
    max_skip_ahead: int = MAX_SKIP_AHEAD
    is_retracted_by_priority: bool = False
    resume_tokens: int | None = None
    reserved_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages were reserved for a request's prompt; the transfer can begin, or go on.

    Attributes:
        pages: those of ``reservation`` that are new.
        is_begin: they are the first.
    """

    request: Request
    reservation: Reservation
    pages: tuple[int, ...]
    is_begin: bool = True


class PreallocQueue:
    """Those that wait for pages, and the grants to them.

    Args:
        expected: output tokens that all of some requests are still expected to need.

    Attributes:
        can_resume: whether the prefill node that a request came from can be asked to compute it again; the role says.
        short: waiting requests for which pages were short when they were tried last.
        loans: priorities that transfers have of those who wait for them.
    """

    def __init__(
        self,
        admission: Admission,
        places: RequestTable,
        order: RequestOrdering,
        *,
        limits: Limits,
        expected: Callable[[Sequence[Request]], int],
    ) -> None:
        self.admission = admission
        self.decisions = Decisions()
        self.totals: Counter[str] = Counter(skipped_ahead=0, resumed_remotely=0, partial_grants=0)
        self.short: dict[Key, Request] = {}
        self.loans = Loans(admission, places, order)
        self._places = places
        self._order = order
        self._limits = limits
        self._expected = expected
        self.can_resume: Callable[[Key], bool] = lambda key: False
        self._last_try: tuple[int, ...] = ()

    def sort(self, now: float, begun: Sequence[Request] = ()) -> Sequence[Request]:
        """Requests in the order in which they get pages: ``begun``, retracted ones, the one with part of its pages,
        then the waiting ones by policy. With priorities on, a more urgent request comes before all of these."""
        retracted = sorted(self._places.retracted.values(), key=lambda request: request.arrived_at)
        partial = [] if self.partial is None else [self.partial]
        return self._order.merge([*begun, *retracted, *partial], list(self._places.waiting.values()), now)

    def wanting(self, now: float) -> Iterator[Request]:
        """In line: who is computed here, who would be, and who was short of pages just now. Others that wait want
        neither a row yet nor any of what a step computes."""
        places, short = self._places, self.short
        num_left = len(places.extending) + len(places.retracted) + (self.partial is not None)
        num_left += places.num_waiting_here + sum(key in places.waiting for key in short)
        for request in self.sort(now, list(places.extending.values())) if num_left else ():
            key = request.key
            if places.states[key] is not State.WAITING or key in places.local or key in short:
                num_left -= 1
                yield request
            if not num_left:
                return

    @property
    def partial(self) -> Request | None:
        """The one that has part of its pages and waits for the others."""
        return self.admission.partial

    def is_computed_here(self, request: Request) -> bool:
        """Rather than received from a prefill node."""
        if request.key in self._places.local:
            return True
        if self._places.states[request.key] is not State.RETRACTED:
            return False
        limit = self._limits.resume_tokens
        if limit is None or not self.can_resume(request.key):
            return True
        return request.num_decodable - self.admission.match(request).num_tokens <= limit

    def sharing(self) -> Sharing:
        """Who computes here what others may wait for."""
        return Sharing(self.admission.page_size, self._limits.sharing, self._places.extending.values())

    def changed(self) -> None:
        """Something that ``admit`` cannot see by itself: try again."""
        self._last_try = ()

    def admit(self, now: float) -> list[PageGrant]:
        """Reserve pages for those that a prefill node computes, as far as pages reach and nobody before them lacks any.

        Called after every event; while nothing has changed since the last time, it does nothing.
        """
        places = self._places
        num_awaiting = len(places.waiting) - places.num_waiting_here
        is_idle = not num_awaiting and self.partial is None and not self.loans.are_any
        if is_idle and all(self.is_computed_here(request) for request in places.retracted.values()):
            return []
        num_outputs = sum(len(request.output) for request in places.running.values())
        state = (self.admission.num_available, places.num_moves, num_outputs)
        if state == self._last_try:
            return []
        granted = self._admit(now)
        self._last_try = () if granted else state
        return granted

    def is_full_for(self, request: Request) -> bool:
        """As many transfers no less urgent than this are under way, or waiting for a row, as there are rows."""
        ahead = [*self._places.receiving.values(), *self._places.ready.values()]
        ahead = [other for other in ahead if other is not self.partial]  # it will be long until it wants a row
        if len(ahead) < self._limits.max_running or not self._order.rules.is_enabled:
            return len(ahead) >= self._limits.max_running
        standing = self._order.standing(request)
        return sum(self._order.standing(other) >= standing for other in ahead) >= self._limits.max_running

    def _admit(self, now: float) -> list[PageGrant]:
        granted: list[PageGrant] = []
        skip_ahead = SkipAhead(self._limits.max_skip_ahead)
        ahead: list[Request] = []  # to be computed here, and before whom no later one may take the pages
        prior: list[Request] = []  # whom the one with part of its pages leaves room
        num_before = 0  # of ``ahead``, those before the first that is short
        partial = self.partial
        self.short.clear()
        line = iter(self.sort(now))
        behind: Iterator[Request] = iter(())
        tried: dict[Key, Request] = {}
        for request in line:
            if request is partial:
                tried[request.key] = request
                partial = None
                if more := self._complete(request, [*prior, *self._patient(skip_ahead)], now):
                    self.totals["skipped_ahead"] += skip_ahead.admit(request)
                    granted.append(more)
                else:
                    skip_ahead.refuse(request)
                continue
            if skip_ahead.is_closed or self.is_full_for(request):
                behind = chain([request], line)
                break
            tried[request.key] = request
            if self.is_computed_here(request):
                ahead.append(request)
                prior.append(request)
                continue
            spare_tokens = self._spare_tokens(request, [*ahead, *skip_ahead.patient])
            reservation = self.admission.reserve(request, spare_tokens=spare_tokens, others=self._others(request))
            if reservation is AllocationFailure.PREFIX_PENDING:
                key = self.loans.lend(request)
                self.decisions.note_wait(now, request.rid, "for its prefix, which comes for {}", key and key[0])
                skip_ahead.wait(request)
            elif reservation is AllocationFailure.SHORT_OF_PAGES:
                num_before = num_before if self.short else len(ahead)
                self.short[request.key] = request
                skip_ahead.refuse(request)
                self.decisions.note_wait(now, request.rid, "for {} pages", self.admission.num_pages(request))
                if partial is not None:
                    prior.append(request)
            else:
                assert isinstance(reservation, Reservation)
                granted.append(self._grant(request, reservation, now, PASSING if skip_ahead.admit(request) else ""))
        patient = self._patient(skip_ahead)
        granted += self._share_out([*prior, *patient], [*ahead[:num_before], *patient], now)
        first_behind = self.loans.lend_behind(behind, tried, self.is_computed_here)
        self.loans.lend_to_partial([*ahead, *patient, *self.short.values(), *first_behind], self._must_wait)
        self.loans.settle()
        return granted

    def _patient(self, skip_ahead: SkipAhead) -> list[Request]:
        """Those whose prefix is on its way and whom nobody passes for want of room; not if it is the partial one's."""
        partial = self.partial
        patient = skip_ahead.patient
        return [other for other in patient if partial is None or self.admission.pending_for(other) != partial.key]

    def _grant(self, request: Request, reservation: Reservation, now: float, passing: str = "") -> PageGrant:
        if request.output:
            self.totals["resumed_remotely"] += 1
        else:
            request.admitted_at = now
            self._order.admitted(request, num_input=len(request.prompt) - request.num_cached)
        self._places.move(request, Event.GRANT)
        if reservation.num_lacking:
            self.totals["partial_grants"] += 1
            reason = "{} of {} pages, and {} more when there is room"
        else:
            reason = "{} of {} pages" + passing
        self.totals["skipped_ahead"] += bool(passing)
        num_pages = (len(reservation.pages), reservation.num_pages, reservation.num_lacking)
        self.decisions.note(now, request.rid, "grant", reason, *num_pages)
        return PageGrant(request, reservation, tuple(reservation.pages))

    # ---- the one that has part of its pages ------------------------------------------------------------------------

    def _complete(self, request: Request, prior: Sequence[Request], now: float) -> PageGrant | None:
        """The rest of its pages, if there is room for what everybody is expected to need beside them."""
        is_last = not self._places.yielding()  # nobody's end will bring it pages, and those that it lacks are here
        spare_tokens = 0 if is_last else self._expected(self._places.holders()) + self._room_for(prior)
        pages = self.admission.complete(request, spare_tokens=spare_tokens)
        if not pages:
            return None
        if not request.output:
            request.admitted_at = now
        reservation = self.admission.reservations[request.key]
        self.decisions.note(now, request.rid, "grant", "the last {} of {} pages", len(pages), reservation.num_pages)
        return PageGrant(request, reservation, tuple(pages), is_begin=False)

    def _share_out(self, prior: Sequence[Request], before: Sequence[Request], now: float) -> list[PageGrant]:
        """What is left over goes to the one that has part of its pages, or to the first that is short, as its first.

        Args:
            prior: those before it in the line, and those computed here that may pass it.
            before: those computed here before the first that is short.
        """
        if self.partial is not None:
            more = self._complete(self.partial, prior, now) or self._extend(self.partial, prior)
            return [more] if more else []
        request = next(iter(self.short.values()), None)
        if request is None or self.is_full_for(request):
            return []
        prior = [other for other in prior if other is not request]
        others = self._others(request)
        if before:  # they must have room beside all of it, or they would take its pages back
            room = self._room_for(before) + self._expected([request])
            others = Contention(others.yielding, others.num_grown + -(-room // self.admission.page_size))
        num_kept = self._num_kept(self._places.holders(), prior)
        begun = self.admission.reserve_part(request, num_kept=num_kept, others=others)
        return [] if begun is None else [self._grant(request, begun, now)]

    def _extend(self, request: Request, prior: Sequence[Request]) -> PageGrant | None:
        holders = [holder for holder in self._places.holders() if holder is not request]
        pages = self.admission.extend(request, num_kept=self._num_kept(holders, prior))
        reservation = self.admission.reservations[request.key]
        return PageGrant(request, reservation, tuple(pages), is_begin=False) if pages else None

    def _others(self, request: Request) -> Contention:
        """Who holds pages beside this one, as admission needs to know it."""
        receiving = self._places.receiving
        grown = [*receiving.values(), request] if receiving else []
        return Contention(self._places.yielding(), sum(map(self._num_to_grow, grown)))

    def _must_wait(self, request: Request) -> bool:
        """It can get its pages only after the one with part of its own has all, whoever else gave way."""
        return self.admission.must_wait(request, self._others(request))

    def _room_for(self, prior: Sequence[Request]) -> int:
        """Tokens that others need who can have them before the one with part of its pages has its own."""
        return sum(self._need_here(request) for request in prior if not self._must_wait(request))

    def _num_kept(self, holders: Sequence[Request], prior: Sequence[Request]) -> int:
        """Pages that are not left over: those that these may still grow by, and room for the others."""
        return sum(map(self._num_to_grow, holders)) + -(-self._room_for(prior) // self.admission.page_size)

    def _num_to_grow(self, request: Request) -> int:
        """Pages that it may need beyond those that it has or lacks now; that it will, where its output is predicted."""
        num_left = self._left_of(request)
        num_had = max(len(request.pages), self.admission.num_pages(request))
        # The last token of an output never gets KV.
        return max(0, -(-(request.num_tokens + num_left - 1) // self.admission.page_size) - num_had)

    # ---- room --------------------------------------------------------------------------------------------------------

    def _spare_tokens(self, request: Request, ahead: Sequence[Request]) -> int:
        """Tokens that must stay available beyond the prompts' pages if ``request`` is let in.

        Those before it that are computed here are left what they need to be admitted, with this one beside them. With
        nobody to compete with, only the next token counts: a lone request may use the whole pool.
        """
        holders = self._places.holders()
        if not holders and not ahead:
            return 1
        room = self._expected([*holders, request])
        if ahead:
            in_last_page = -request.num_decodable % self.admission.page_size
            room += in_last_page + sum(self._need_here(other) for other in ahead)
        return room

    def _need_here(self, request: Request) -> int:
        """Tokens that must be available, cached ones included, for ``PrefillAdder`` to admit this one, or for it to be
        received as soon as the prefix is here that it waits for."""
        page_size = self.admission.page_size
        num_tokens = -(-request.num_tokens // page_size) * page_size
        if not self.is_computed_here(request):
            num_tokens -= self.admission.num_pending(request) * page_size
        return num_tokens + self._left_of(request) + 1

    def _left_of(self, request: Request) -> int:
        """Output tokens that are expected of it at most, by whichever bound allows more."""
        clip = max(self._limits.clip_tokens, self._limits.reserved_tokens or 0)
        return math.ceil(expected_left(request, 1.0, clip))

    def lacks_pages(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Would it be refused now for want of pages?

        Args:
            without: asked as if these held none.
        """
        if request is not self.partial and self._must_wait(request):
            return True
        gone = {request.key, *(other.key for other in without)}
        others = [other for other in self._places.holders() if other.key not in gone]
        if not others:
            num_tokens = request.num_tokens + 1
        elif self.is_computed_here(request):
            num_tokens = self._need_here(request) + self._expected(others)
        else:
            num_tokens = request.num_tokens + self._expected([*others, request])
        return self.admission.lacks(request, num_tokens, without)
