"""The decode node's batch: which requests grow by a token, and who gives way when pages or rows run short. Pure.

A prompt comes from a prefill node, or is computed here, in chunks that ride in the same steps as the decode rows.
Each step takes up the requests whose prompts have arrived, gives every running one the page it is about to enter, and
adds chunks of local prompts and of retracted requests. When pages run short the cache is evicted first; then running
requests are retracted, and go to the front of the queue. The last one is never retracted. A more urgent request takes a
row from a less urgent one, which is paused and keeps its pages, or pages, from one that is retracted.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import cache_computed, release
from common.deadlines import Deadlines
from common.errors import ErrorCode, RequestError
from common.finish_reason import Finish, finish_reason
from common.request import LOWEST_PRIORITY, Request
from common.sampling_params import TokenLogprobs
from common.scheduling.in_batch_prefix_caching import Sharing
from common.scheduling.new_token_ratio import NewTokenRatio, expected_tokens
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import AddResult, Budgets, Chunk, PrefillAdder, admit_row, chunk_results
from common.scheduling.skip_ahead import PASSING, SkipAhead
from common.scheduling.waiting_queue import WaitingQueue
from common.step_plan import PageDelta, Row, StepPlan, StepResult
from decode_node.page_reservation import Admission
from decode_node.prealloc_queue import Limits as Limits
from decode_node.prealloc_queue import PageGrant as PageGrant
from decode_node.prealloc_queue import PreallocQueue
from decode_node.preemption import Preemptor
from decode_node.request_state import Event, State
from decode_node.request_table import Key, RequestTable


class Sampled(NamedTuple):
    """One more output token."""

    request: Request
    token: int
    logprobs: TokenLogprobs | None
    finish: Finish


class DecodeScheduler:
    """Owns every request of a decode node, from submission to its end."""

    def __init__(
        self,
        cache: RadixCache,
        books: PageAllocator,
        *,
        limits: Limits,
        order: RequestOrdering,
        ratio: NewTokenRatio,
        eos_token_ids: Collection[int],
    ) -> None:
        self._cache = cache
        self._books = books
        self._limits = limits
        self._order = order
        self.policy = order.policy
        self._ratio = ratio
        self._eos = frozenset(eos_token_ids)
        self.places = RequestTable(limits.max_running, WaitingQueue(order, cache))
        self._deadlines = Deadlines(self.places.requests)
        self.line = PreallocQueue(Admission(cache, books), self.places, order, limits=limits, expected=self._expected)
        self.decisions = self.line.decisions
        self.giving_way = Preemptor(
            cache, books, self.places, line=self.line, order=order, is_by_priority=limits.is_retracted_by_priority
        )
        self.totals = self.giving_way.totals
        self.totals.update(budget_rows=0, budget_rows_used=0)
        self._in_flight: dict[int, tuple[list[Request], list[Chunk]]] = {}
        self._joining: dict[Key, Request] = {}  # they have a row that no plan has told the executor of yet
        self._num_steps = 0
        self._were_chunks_alone = False
        self._capacity = books.num_pages * cache.page_size
        self._outgrown: list[Request] = []

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, request: Request, *, is_local: bool = False) -> None:
        """Take a request into the queue.

        Args:
            is_local: its prompt is computed here, not received.
        Raises:
            RequestError: the queue is full, or the request is beyond the context or the pool.
        """
        context, most = self._limits.context_length, len(request.prompt) + request.sampling.max_new_tokens
        if context is not None and most > context:
            message = f"prompt and output may have {most} tokens together, the context is {context}"
            raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="prompt")
        if len(request.prompt) + 1 > self._capacity:
            raise RequestError(
                ErrorCode.POOL_TOO_SMALL,
                f"the prompt has {len(request.prompt)} tokens, the decode node's pool holds {self._capacity}, output"
                " included (--max-total-tokens)",
                param="prompt",
            )
        bound = self._limits.max_queued
        if bound is not None and len(self.places.waiting) >= bound:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{bound} requests wait on the decode node already")
        if self._limits.reserved_tokens is not None:
            request.expected_output = 0
        self.places.add(request, is_local=is_local)
        self._deadlines.add(request)

    def received(self, key: Key, *, token: int) -> Request:
        """What a receiving request lacked is all here; ``token`` is its first output token, if it has none yet."""
        request = self.places.receiving[key]
        self.line.admission.settle(request)
        if not request.output:
            request.output.append(token)
        request.inherited_priority = LOWEST_PRIORITY
        self.places.move(request, Event.RECEIVED)
        return request

    def not_received(self, key: Key, now: float) -> None:
        """The prefill node does not compute this retracted request again: it is done here, then."""
        request = self.places.receiving[key]
        self.line.admission.withdraw(request)
        self.places.move(request, Event.LOSE)
        self.places.local[key] = None
        self.decisions.note(now, request.rid, "resume", "here, since no prefill node does")

    def end(self, key: Key) -> Request | None:
        """Finish, abort, failure: out of every queue, all pages given back. None if it is unknown.

        Pages granted to a transfer under way are not touched: they are the receiver's until its fence.
        """
        is_receiving = key in self.places.receiving
        request = self.places.remove(key)
        if request is None:
            return None
        if is_receiving:
            self.line.admission.withdraw(request)
        self.line.short.pop(key, None)
        release(self._cache, self._books, request, keep=True)
        return request

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed; each is told once."""
        return self._deadlines.passed(now)

    def reprioritize(self, key: Key, priority: int, now: float, *, priority_class: str | None = None) -> None:
        """From now on this request is so urgent, wherever it stands. An unknown one is ignored.

        Args:
            priority_class: which it belongs to from now on, and on whose account it is; None: as before.
        """
        request = self.places.requests.get(key)
        if request is not None:
            before = (request.priority, request.priority_class)
            self.decisions.note_change(now, request.rid, before, (priority, priority_class))
            self.places.waiting.change(request, priority, priority_class)
            self.line.changed()

    # ---- one step ---------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed now."""
        self._take_up(now)
        num_retractions = self.totals["retractions"]
        grown = self._grow(now)
        has_run_short = self.totals["retractions"] > num_retractions
        is_decodes_turn = self._were_chunks_alone and bool(self._rows())
        chunks, begun = ([], []) if is_decodes_turn else self._extend(now)
        chunks = [chunk for chunk in chunks if chunk.request.slot >= 0]
        self._order.explain(self.decisions, now)
        self._were_chunks_alone = bool(chunks) and not self._limits.is_mixed
        rows = [] if self._were_chunks_alone else self._rows()
        if not rows and not chunks:
            if not self.places.requests:
                self._ratio.reset()
            return None
        self._num_steps += 1
        self._in_flight[self._num_steps] = (rows, chunks)
        self._books.begin_step(self._num_steps)
        self.totals["budget_rows"] += self._limits.max_running
        self.totals["budget_rows_used"] += len(rows)
        if rows and not has_run_short:
            self._ratio.decoded()
        joining = [request for key, request in self._joining.items() if self.places.running.get(key) is request]
        self._joining.clear()
        begun = [request for request in begun if request.slot >= 0]
        fresh = {request.key for request in joining}
        grown = [request for request in grown if request.slot >= 0 and request.key not in fresh]
        return StepPlan(
            step=self._num_steps,
            admits=tuple([admit_row(r, last_token=r.output[-1]) for r in joining] + [admit_row(r) for r in begun]),
            pages=tuple(
                [PageDelta(r.slot, 0, tuple(r.pages)) for r in [*joining, *begun]]
                + [PageDelta(r.slot, len(r.pages) - 1, (r.pages[-1],)) for r in grown]
            ),
            rows=tuple([Row(r.slot, r.num_computed, None, True) for r in rows] + [chunk.to_row() for chunk in chunks]),
        )

    def _rows(self) -> list[Request]:
        """Running requests with room for a token."""
        page_size = self._cache.page_size
        running = self._order.by_standing(list(self.places.running.values()))
        return [r for r in running if len(r.pages) * page_size > r.num_computed]

    def _expected(self, requests: Sequence[Request]) -> int:
        return expected_tokens(requests, *self._expectation())

    def _expectation(self) -> tuple[float, int]:
        """Share and bound of what a request may still produce that is reserved for it."""
        reserved = self._limits.reserved_tokens
        return (self._ratio.value, self._limits.clip_tokens) if reserved is None else (1.0, reserved)

    def _take_up(self, now: float) -> None:
        """Finished transfers and paused requests join the batch, whoever else waits: they hold all they need."""
        for request in self._order.in_turn([*self.places.paused.values(), *self.places.ready.values()]):
            if not self.giving_way.can_have_row(request):
                break
            self.giving_way.free_row(request, now)
            if self.places.states[request.key] is State.PAUSED:
                self.decisions.note(now, request.rid, "resume", "in a row again, after {} tokens", request.num_tokens)
            self.places.move(request, Event.TAKE_UP, with_slot=True)
            self._joining[request.key] = request

    def _has_room(self, request: Request) -> bool:
        return len(request.pages) * self._cache.page_size > request.num_computed

    def _grow(self, now: float) -> list[Request]:
        """One more page for every running request whose last page is full; retracts where pages run short."""
        grown = []
        page_size = self._cache.page_size
        full = [r for r in self.places.running.values() if len(r.pages) * page_size <= r.num_computed]
        for request in self._order.by_standing(full):
            while request.key in self.places.running and not self._has_room(request):
                if pages := self._take_page():
                    request.pages += pages
                    request.own += pages
                    grown.append(request)
                elif victim := self.giving_way.victim():
                    self.giving_way.retract(victim, now, "a running request needs its {} pages", len(victim.pages))
                    self._ratio.retracted(list(self.places.running.values()))
                else:
                    break  # waits for what is being received or extended
        return grown

    def _take_page(self) -> list[int] | None:
        if not self._books.num_free:
            self._cache.evict(1)
        return self._books.alloc(1, Owner.REQUEST)

    def _extend(self, now: float) -> tuple[list[Chunk], list[Request]]:
        """Chunks of requests that are computed here, as far as the budgets reach, in line with those that wait."""
        places = self.places
        if not places.extending and not places.retracted and not places.local:
            return [], []
        adder = self._adder()
        begun: list[Request] = []
        sharing = self.line.sharing()
        skip_ahead = SkipAhead(self._limits.max_skip_ahead)
        lent: dict[Key, int] = {}
        num_begun = len(places.extending)
        for request in self.line.wanting(now):
            state = places.states[request.key]
            if state is State.EXTENDING:
                num_begun -= 1
                if adder.add_chunked_req(request) is not AddResult.CONTINUE:
                    break
            elif state is State.RECEIVING:
                skip_ahead.refuse(request)  # it has part of its pages
            elif skip_ahead.is_closed or not self.giving_way.can_have_row(request):
                if not num_begun:
                    break
                self._lend(request, sharing, lent, now)
            elif not self.line.is_computed_here(request):
                if request.key in self.line.short and places.has_holders:
                    skip_ahead.refuse(request)  # else it is short because of one of these, and need not be waited for
            elif self._lend(request, sharing, lent, now):
                pass
            elif (result := adder.add_one_req(request)) is AddResult.NO_TOKEN:
                skip_ahead.refuse(request)
                self.decisions.note_wait(now, request.rid, "for room for {} tokens", request.num_tokens)
            elif result is AddResult.OTHER:
                break
            else:
                has_passed = skip_ahead.admit(request)
                self.line.totals["skipped_ahead"] += has_passed
                self.giving_way.free_row(request, now)
                self._begin(request, now, PASSING if has_passed else "")
                sharing.add(request)
                begun.append(request)
        for request in places.extending.values():
            request.inherited_priority = lent.get(request.key, LOWEST_PRIORITY)
        return adder.chunks, begun

    def _lend(self, request: Request, sharing: Sharing, lent: dict[Key, int], now: float) -> bool:
        """Whether it waits for a prefix that is computed here now; whoever computes that is as urgent as it then."""
        if self.places.states[request.key] is not State.WAITING or not self.line.is_computed_here(request):
            return False
        holder = sharing.waits_for(request, self._cache)
        if holder is not None:
            self._order.lend(request, holder, lent)
            self.decisions.note_wait(now, request.rid, "for its prefix, which {} computes", holder.rid)
        return holder is not None

    def _begin(self, request: Request, now: float, passing: str) -> None:
        num_new = request.num_tokens - request.num_computed
        is_new = self.places.states[request.key] is State.WAITING
        if is_new:
            request.admitted_at = now
            self._order.admitted(request, num_input=num_new)
        action = "admit" if is_new else "resume"
        reason = "computes {} of {} tokens" + passing
        self.decisions.note(now, request.rid, action, reason, num_new, request.num_tokens)
        self.places.move(request, Event.EXTEND, with_slot=True)

    def _adder(self) -> PrefillAdder:
        page_size = self._cache.page_size
        holders = self.places.holders()
        total = (self._books.num_free + self._cache.num_evictable_pages) * page_size
        if holders:
            total -= self._expected(holders)
        else:
            total += 1  # alone, it may fill the pool to the last token
        ratio, clip = self._expectation()
        budgets = Budgets(total, self._limits.max_prefill_tokens, self._limits.chunk_tokens, self._limits.cut)
        return PrefillAdder(
            self._cache,
            self._books,
            budgets,
            max_requests=self._limits.max_requests,
            clip=clip,
            reserve_output=bool(holders),
            running=holders,
            ratio=ratio,
        )

    def take_outgrown(self) -> list[Request]:
        """Requests that ``commit`` has found to need more room than the whole pool has; each is returned once.

        No other request ever has to give way for one of these, and all others fit as soon as nobody else holds pages.
        """
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def commit(self, result: StepResult) -> list[Sampled]:
        """Take in what a step computed. Rows of requests that ended meanwhile are ignored."""
        rows, chunks = self._in_flight.pop(result.step)
        effects: list[Sampled] = []
        logprobs = result.logprobs or (None,) * len(result.tokens)
        running = self.places.running
        for request, token, logprob in zip(rows, result.tokens, logprobs, strict=False):
            if running.get(request.key) is request:
                request.num_computed += 1
                effects.append(self._sampled(request, token, logprob))
        for chunk, found in zip(chunks, chunk_results(chunks, result, num_before=len(rows)), strict=True):
            request = chunk.request
            if self.places.extending.get(request.key) is not request:
                continue
            request.num_computed = chunk.start + chunk.num_tokens
            request.prompt_logprobs += found.prompt_logprobs
            cache_computed(self._cache, request)
            if found.sampled is not None:
                request.inherited_priority = LOWEST_PRIORITY
                self.places.move(request, Event.SAMPLED)
                effects.append(self._sampled(request, *found.sampled))
        self._books.end_step(result.step)
        self._order.decoded([effect.request for effect in effects])
        return effects

    def _sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Sampled:
        request.output.append(token)
        finish = finish_reason(request.sampling, self._eos, token=token, num_output=len(request.output))
        if not finish and request.num_tokens > self._capacity:
            self._outgrown.append(request)
        return Sampled(request, token, logprobs, finish)

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """The chunks in a plan that has not been committed: prompts computed here, and what was retracted."""
        return self._in_flight[plan.step][1]

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every request is in exactly the place its state says, and what is reserved is being received."""
        self.places.check()
        assert self.line.admission.reservations.keys() == self.places.receiving.keys()
        self.line.admission.check(self.places.yielding())
