"""Chunks that a decode node computes itself: of local prompts and of retracted requests. Pure.

A step has the same budgets as on a prefill node (``PrefillAdder``). Requests that have begun come before others, but
short prompts get their share beside long ones, and a request that lacks a row may take that of a less urgent one.
"""

from collections.abc import Sequence

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.request import Request
from common.scheduling.in_batch_prefix_caching import InBatchPrefixes
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import AddResult, Chunk, PrefillAdder
from common.scheduling.skip_ahead import PASSING, SkipAhead
from decode_node.prealloc_queue import DecodeLimits, PreallocQueue
from decode_node.preemption import Preemptor
from decode_node.request_state import Event, State
from decode_node.request_table import RequestTable


class LocalPrefill:
    """Chooses the chunks of each step of one decode node.

    Args:
        queue: of the requests that wait for pages.
    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        table: RequestTable,
        *,
        limits: DecodeLimits,
        ordering: RequestOrdering,
        queue: PreallocQueue,
        preemptor: Preemptor,
    ) -> None:
        self._cache = cache
        self._allocator = allocator
        self._table = table
        self._limits = limits
        self._ordering = ordering
        self._queue = queue
        self._preemptor = preemptor
        self._long_prompts = queue.long_prompts

    def extend(self, now: float, received: Sequence[Request]) -> tuple[list[Chunk], list[Request]]:
        """Chunks of requests that are computed here, as far as the budgets reach, and the requests that begin.

        Args:
            received: requests that have their pages and still lack a slot.
        """
        table = self._table
        if not (table.extending or table.retracted or table.num_waiting_local):
            return [], []
        adder = self._adder()
        begun: list[Request] = []
        sharing = self._queue.sharing()
        skip_ahead = SkipAhead(self._limits.max_skip_ahead)
        lowest = self._preemptor.lowest_in_slots()
        begun_left = dict(table.extending)  # begun requests that may still get tokens of this step
        queue = self._queue.step_candidates(now, self._long_prompts.in_order(table.extending.values()))
        for request, most, is_reserved in self._long_prompts.turns(queue, adder, is_here=self._queue.is_computed_here):
            if table.states[request.key] is State.EXTENDING:
                if most is None:
                    begun_left.pop(request.key, None)
                if request.num_scheduled == request.num_tokens:
                    continue  # its last chunk is in a step that is not committed yet
                result = adder.add_chunked_req(request, most=most, is_reserved=is_reserved)
                if result is not AddResult.CONTINUE and most is None:
                    break
            elif skip_ahead.is_closed or not self._preemptor.can_have_slot(request, now, lowest=lowest):
                if not begun_left:
                    break
            elif not self._queue.is_computed_here(request):
                if request.key in self._queue.short and (table.has_holders or self._allocator.num_lingering):
                    skip_ahead.refuse(request)  # else it lacks pages because of a local prompt, which goes first
            elif self._waits_for_prefix(request, sharing, now):
                pass
            elif self._queue.is_slot_for_received(request, received):
                skip_ahead.close()
            elif (result := adder.add_one_req(request, most=most)) is AddResult.NO_TOKEN:
                skip_ahead.refuse(request)
                self._queue.decisions.note_wait(now, request.rid, "for room for {} tokens", request.num_tokens)
            elif result is AddResult.OTHER:
                if most is None:
                    break
            else:
                self._begin(request, now, has_passed=skip_ahead.admit(request))
                sharing.add(request)
                begun.append(request)
                lowest = min(lowest, self._ordering.priority(request))
                if most is not None:
                    begun_left[request.key] = request
        return adder.chunks, begun

    def _waits_for_prefix(self, request: Request, sharing: InBatchPrefixes, now: float) -> bool:
        """Whether the request waits for another one that computes its prefix here."""
        if not self._queue.may_share_prefix(request):
            return False
        holder = sharing.holder_of(request, self._cache)
        if holder is not None:
            self._queue.decisions.note_wait(now, request.rid, "for its prefix, which {} computes", holder.rid)
        return holder is not None

    def _begin(self, request: Request, now: float, *, has_passed: bool) -> None:
        """Put a request that the adder has admitted into a slot."""
        self._queue.totals["skipped_ahead"] += has_passed
        self._preemptor.free_slot(request, now)
        num_new = request.num_tokens - request.num_computed
        is_new = self._table.states[request.key] is State.WAITING
        if is_new:
            request.admitted_at = now
            self._ordering.admitted(request, num_input=num_new)
        action = "admit" if is_new else "resume"
        reason = "computes {} of {} tokens" + (PASSING if has_passed else "")
        self._queue.decisions.note(now, request.rid, action, reason, num_new, request.num_tokens)
        self._table.move(request, Event.EXTEND, with_slot=True)
        request.placed_at = now

    def _adder(self) -> PrefillAdder:
        holders = self._table.holders()
        total = (self._allocator.num_for_steps + self._cache.num_evictable_pages) * self._cache.page_size
        return PrefillAdder(
            self._cache,
            self._allocator,
            self._limits,
            total_tokens=total - self._queue.reserved(holders),
            reserve_output=True,
            reserved_tokens=self._limits.reserved_tokens,
            is_alone=not holders,
        )
