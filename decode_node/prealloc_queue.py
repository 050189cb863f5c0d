"""The queue for pages of a decode node, and the grants to its requests. Pure.

One queue holds every request that lacks pages, wherever its prompt is computed: retracted requests first, then the
waiting ones in the policy's order; with priorities, the more urgent before all. A request never takes pages that a
request ahead of it needs, except up to ``max_skip_ahead`` requests. The same number may overtake a request that waits
for a prefix in transfer; after that, only requests that leave it room may.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from common.cache.tree_node import TreeNode
from common.decision_log import DecisionLog
from common.request import Request, RequestKey
from common.scheduling.in_batch_prefix_caching import InBatchPrefixes
from common.scheduling.long_prompts import LongPrompts
from common.scheduling.ordering import RequestOrdering
from common.scheduling.output_reserve import RESERVED_TOKENS, reserved_tokens
from common.scheduling.prefill_adder import PrefillLimits
from common.scheduling.skip_ahead import PASSING, SkipAhead
from decode_node.page_reservation import PageReservations, Reservation
from decode_node.request_state import Event, State
from decode_node.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class DecodeLimits(PrefillLimits):
    """Bounds of a decode node, which also computes prompts.

    Attributes:
        is_mixed: chunks are computed in the same steps as decode rows; otherwise both take turns.
        is_retracted_by_priority: when the batch outgrows the pool, the least urgent request is retracted; otherwise the
            one with the shortest output, whose loss costs the least work.
        resume_tokens: a retracted request that lacks more tokens than this is computed again by its prefill node; None
            computes it here in any case.
        reserved_tokens: room kept for each request's further output.
    """

    is_mixed: bool = False
    is_retracted_by_priority: bool = False
    resume_tokens: int | None = None
    reserved_tokens: int = RESERVED_TOKENS


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages are reserved for a request's prompt: its transfer can begin.

    Attributes:
        is_resumed: the request was retracted, so its prefill node must be asked to compute it again.
    """

    request: Request
    reservation: Reservation
    is_resumed: bool


@dataclass(slots=True)
class _KeptRoom:
    """The room that one pass over the queue keeps for other requests. It is added up once, and not for each request.

    Attributes:
        for_holders: tokens that are kept for requests with pages; None without such requests.
        for_those_ahead: tokens that requests ahead without pages need; None without such requests.
        num_windowed: window pages that these need.
        num_blocking: how many of ``SkipAhead.blocking`` are counted.
    """

    for_holders: int | None
    for_those_ahead: int | None = None
    num_windowed: int = 0
    num_blocking: int = 0


class PreallocQueue:
    """Requests that wait for pages, and the reservations for them.

    Args:
        is_connected: whether a prefill node (by incarnation) can be asked to compute a request again.

    Attributes:
        long_prompts: how the prompts that are computed here share its steps.
        short: waiting requests for which there were not enough pages at the last attempt.
    """

    def __init__(
        self,
        reservations: PageReservations,
        table: RequestTable,
        ordering: RequestOrdering,
        *,
        limits: DecodeLimits,
        is_connected: Callable[[str], bool],
    ) -> None:
        self.decisions = DecisionLog()
        self.totals: Counter[str] = Counter(skipped_ahead=0, resumed_remotely=0)
        self.short: dict[RequestKey, Request] = {}
        self.long_prompts = LongPrompts(limits, ordering, reservations.page_size)
        self._reservations = reservations
        self._table = table
        self._ordering = ordering
        self._limits = limits
        self._is_connected = is_connected
        self._last_try: tuple[int, ...] = ()

    # ---- the order --------------------------------------------------------------------------------------------------

    def sort(self, now: float, begun: Sequence[Request] = ()) -> Sequence[Request]:
        """``begun``, retracted and waiting requests in the order in which they are served.

        Held requests that wait come last, or not at all if they would be computed here: computed requests have slots.
        """
        table = self._table
        retracted = sorted(table.not_held(table.retracted.values()), key=lambda request: request.arrived_at)
        in_order = self._ordering.merge([*begun, *retracted], table.not_held(table.waiting.values()), now)
        if not table.held:
            return in_order
        held = [r for r in table.waiting.values() if r.key in table.held and r.key not in table.local]
        return [*in_order, *held]

    def step_candidates(self, now: float, begun: Sequence[Request]) -> list[Request]:
        """Requests that the next step may compute a chunk of, in order, and requests that are short of pages.

        All other requests wait for a prefill node and take no part in a step.
        """
        table, short = self._table, self.short
        if not (begun or table.retracted or table.num_waiting_local or short):
            return []
        return [
            request
            for request in self.sort(now, begun)
            if table.states[request.key] is not State.WAITING or request.key in table.local or request.key in short
        ]

    def is_computed_here(self, request: Request) -> bool:
        """Whether the request's KV is computed by this node, and not received from a prefill node."""
        if request.key in self._table.local:
            return True
        if self._table.states[request.key] is not State.RETRACTED:
            return False
        limit = self._limits.resume_tokens
        if limit is None or not self._is_connected(self._table.sources[request.key]):
            return True
        return request.num_decodable - self._reservations.match(request, is_here=True).num_tokens <= limit

    def is_slot_for_others(self, received: Request) -> bool:
        """Whether requests that are computed here claim every free slot before ``received``, which has its pages."""
        return self._are_slots_claimed(self._is_before(local, received) for local in self._to_compute_here())

    def is_slot_for_received(self, local: Request, received: Iterable[Request]) -> bool:
        """Whether requests of ``received``, which have their pages, claim every free slot before ``local``."""
        return self._are_slots_claimed(not self._is_before(local, other) for other in received)

    def _are_slots_claimed(self, claims: Iterable[bool]) -> bool:
        count = max(self._table.num_free_slots, 1)  # without a free slot, a less urgent request may lose its own
        return sum(islice(filter(None, claims), count)) == count

    def _to_compute_here(self) -> Iterator[Request]:
        """Requests that begin here as soon as they have pages and a slot."""
        table = self._table
        yield from filter(self.is_computed_here, table.not_held(table.retracted.values()))
        if table.num_waiting_local:
            yield from (request for request in table.not_held(table.waiting.values()) if request.key in table.local)

    def _is_before(self, local: Request, received: Request) -> bool:
        """Whether a request that is computed here comes before one that has its pages, where both lack a slot.

        If priorities decide nothing, a retracted request comes first, and else the order in which they waited for pages
        counts.
        """
        found = self._ordering.comes_first(local, received)
        if found is not None:
            return found
        is_retracted = self._table.states[local.key] is State.RETRACTED
        return is_retracted or local.key in self._table.passed.get(received.key, ())

    def may_share_prefix(self, request: Request) -> bool:
        """Whether the request is new and is computed here with the cache, so that it may use another one's prefix."""
        if self._table.states[request.key] is not State.WAITING or not self.is_computed_here(request):
            return False
        return self._reservations.kv_window.is_cached(request.num_tokens)

    def sharing(self) -> InBatchPrefixes:
        """The prefixes that are being computed here and that other requests may wait for."""
        computing, comes_first = self._table.extending.values(), self._ordering.comes_first
        return InBatchPrefixes(self._reservations.page_size, self._limits.sharing, computing, comes_first=comes_first)

    # ---- grants -----------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Note a change that ``grant`` does not notice by itself."""
        self._last_try = ()

    def grant(self, now: float) -> list[PageGrant]:
        """Reserve pages for requests that a prefill node computes, in order, as far as there are pages.

        Called after every event. It does nothing while nothing has changed since the last call.
        """
        table = self._table
        if len(table.waiting) == table.num_waiting_local and (
            not table.retracted or all(map(self.is_computed_here, table.not_held(table.retracted.values())))
        ):
            return []
        if self._state() == self._last_try:
            return []
        granted = self._grant_in_order(now)
        self._last_try = () if granted else self._state()  # pages may have been evicted, and be free later
        return granted

    def _state(self) -> tuple[int, ...]:
        """What decides whether requests get pages, apart from their order."""
        table = self._table
        num_outputs = sum(len(request.output) for request in table.running.values())
        num_connected = sum(self._is_connected(table.sources[key]) for key in table.retracted if key in table.sources)
        return (table.num_moves, num_outputs, num_connected, *self._reservations.room)

    def is_full_for(self, request: Request) -> bool:
        """Whether requests no less urgent than this one, which have pages or are receiving them, claim every slot."""
        ahead = self._table.not_held([*self._table.receiving.values(), *self._table.ready.values()])
        if len(ahead) < self._limits.max_running or not self._ordering.rules.is_enabled:
            return len(ahead) >= self._limits.max_running
        priority = self._ordering.effective_priority(request)
        return sum(self._ordering.effective_priority(other) >= priority for other in ahead) >= self._limits.max_running

    def _grant_in_order(self, now: float) -> list[PageGrant]:
        granted: list[PageGrant] = []
        skip_ahead = SkipAhead(self._limits.max_skip_ahead)
        ahead: list[Request] = []  # computed here; no later request may take their pages, or slots before them
        kept = self._kept_for_holders()
        self.short.clear()
        self._reservations.begin_pass()
        for request in self.sort(now):
            if skip_ahead.is_closed or self.is_full_for(request):
                break
            if self.is_computed_here(request):
                ahead.append(request)
                self._keep_for(request, kept)
                continue
            for overtaken in skip_ahead.blocking[kept.num_blocking :]:
                self._keep_for(overtaken, kept)
            kept.num_blocking = len(skip_ahead.blocking)
            found = self._reservations.reserve(
                request, spare_tokens=self._spare_tokens(request, kept), spare_windowed=kept.num_windowed
            )
            if isinstance(found, TreeNode):
                other = self._reservations.receiver_of(found)
                self.decisions.note_wait(now, request.rid, "for its prefix, which comes for {}", other and other[0])
                skip_ahead.defer(request)
            elif found is None:
                self.short[request.key] = request
                skip_ahead.refuse(request)
                num_pages = self._reservations.num_pages(request)
                self.decisions.note_wait(now, request.rid, "for {} pages", num_pages)
            else:
                self._table.passed[request.key] = frozenset([other.key for other in ahead])
                granted.append(self._grant(request, found, now, PASSING if skip_ahead.admit(request) else ""))
                kept.for_holders = self._room_with(request, kept)
        return granted

    def _grant(self, request: Request, reservation: Reservation, now: float, passing: str) -> PageGrant:
        is_resumed = self._table.states[request.key] is State.RETRACTED
        if is_resumed:
            self.totals["resumed_remotely"] += 1
        else:
            request.admitted_at = now
            num_cached = reservation.num_cached * self._reservations.page_size
            self._ordering.admitted(request, num_input=request.num_decodable - num_cached)
        self._table.move(request, Event.GRANT)
        request.placed_at = now
        self.totals["skipped_ahead"] += bool(passing)
        num_pages = (len(reservation.pages), reservation.num_pages)
        self.decisions.note(now, request.rid, "grant", "{} of {} pages" + passing, *num_pages)
        return PageGrant(request, reservation, is_resumed)

    # ---- room -------------------------------------------------------------------------------------------------------

    def reserved(self, requests: Sequence[Request]) -> int:
        """Tokens of room that are kept for the further output of these requests."""
        return reserved_tokens(requests, self._limits.reserved_tokens, self._reservations.kv_window)

    def _kept_for_holders(self) -> _KeptRoom:
        """The room that is kept for requests with pages."""
        holders = self._table.holders()
        return _KeptRoom(self.reserved(holders) if holders else None)

    def _keep_for(self, request: Request, kept: _KeptRoom) -> None:
        """Keep room for a request that is ahead of the following ones and gets no pages now."""
        kept.for_those_ahead = (kept.for_those_ahead or 0) + self._need_here(request)
        kept.num_windowed += self._reservations.num_windowed(request, is_here=self.is_computed_here(request))

    def _room_with(self, request: Request, kept: _KeptRoom) -> int:
        """The room that is kept for requests with pages, and this one."""
        return (kept.for_holders or 0) + self.reserved([request])

    def _spare_tokens(self, request: Request, kept: _KeptRoom) -> int:
        """Tokens that must stay available beyond the prompt's pages if ``request`` gets them.

        Requests ahead of it that are computed here must still find the room to be admitted. Without competition only
        the next token counts: a lone request may use the whole pool.
        """
        if kept.for_holders is None and kept.for_those_ahead is None:
            return 1
        room = self._room_with(request, kept)
        if kept.for_those_ahead is not None:
            room += -request.num_decodable % self._reservations.page_size + kept.for_those_ahead
        return room

    def _need_here(self, request: Request) -> int:
        """Tokens that must be available, cached ones included, for ``PrefillAdder`` to admit the request here.

        For a request that waits for a prefix in transfer: for it to be received once the prefix is there.
        """
        page_size, kv_window = self._reservations.page_size, self._reservations.kv_window
        num_tokens = kv_window.num_pages(request.num_tokens) * page_size - self._num_outside(request)
        if not self.is_computed_here(request):
            num_tokens -= self._reservations.num_pending(request) * page_size
        return num_tokens + self.reserved([request]) + 1

    def _num_outside(self, request: Request) -> int:
        """Tokens for which the request needs no pages at its admission, in whole pages."""
        kv_window = self._reservations.kv_window
        if not kv_window.is_bounded or kv_window.is_cached(request.num_tokens):
            return 0
        num_pages = kv_window.first_held(request.num_decodable)
        if self.is_computed_here(request):
            num_pages = kv_window.num_pages(request.num_tokens) - kv_window.pages_to_compute(request.num_tokens)
        return num_pages * self._reservations.page_size

    def lacks_pages(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether the request would be refused now for lack of pages.

        Args:
            without: requests whose pages count as free.
        """
        gone = {request.key, *(other.key for other in without)}
        others = [other for other in self._table.holders() if other.key not in gone]
        if not others:
            num_tokens = request.num_decodable - self._num_outside(request) + 1
        elif self.is_computed_here(request):
            num_tokens = self._need_here(request) + self.reserved(others)
        else:
            num_tokens = request.num_decodable - self._num_outside(request) + self.reserved([*others, request])
        return self._reservations.lacks(request, num_tokens, without, is_here=self.is_computed_here(request))

    def waits_for_prefix(self, request: Request) -> bool:
        """Whether the request's prefix is being received for another request."""
        return self._reservations.match(request).pending is not None
