"""The decode node's batch: which requests grow by a token, and who gives way when pages run short. Pure.

A prompt comes from a prefill node, or is computed here, in chunks that ride in the same steps as the decode rows.
Each step takes up the requests whose prompts have arrived, gives every running one the page it is about to enter, and
adds chunks of local prompts and of retracted requests. When pages run short the cache is evicted first; then running
requests are retracted, least work lost first, and go to the front of the queue. The last one is never retracted.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import ErrorCode, RequestError
from common.finish import Finish, finish_reason
from common.lifecycle import advance
from common.new_token_ratio import NewTokenRatio, expected_tokens
from common.order import Order
from common.pages import Owner, PageBooks
from common.prefill_adder import AddResult, Budgets, Chunk, PrefillAdder, admit_row, chunk_results
from common.radix import RadixCache
from common.request import Request
from common.request_pages import cache_computed, release
from common.sampling import TokenLogprobs
from common.sharing import Sharing, SharingLimits
from common.step import PageDelta, Row, StepPlan, StepResult
from common.waiting import WaitingQueue
from decode_node.admission import Admission, Refusal, Reservation
from decode_node.lifecycle import TABLE, Event, State

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a decode node. None means no bound.

    Attributes:
        max_running: slots, that is rows of the largest batch.
        max_queued: requests waiting for pages; one more is refused.
        max_prefill_tokens: tokens computed again in one step.
        chunk_tokens: tokens of one step after which a request that is computed again is cut.
        sharing: which local prompts wait for a prefix that is just being computed.
        clip_tokens: a request is expected to need at most so many further tokens.
    """

    max_running: int
    max_queued: int | None = None
    max_prefill_tokens: int = 16_384
    chunk_tokens: int | None = None
    sharing: SharingLimits = field(default_factory=SharingLimits)
    clip_tokens: int = 4_096


@dataclass(frozen=True, slots=True)
class Granted:
    """Pages were reserved for a request's prompt; the transfer can begin."""

    request: Request
    reservation: Reservation


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
        books: PageBooks,
        *,
        limits: Limits,
        order: Order,
        ratio: NewTokenRatio,
        eos_token_ids: Collection[int],
    ) -> None:
        self._cache = cache
        self._books = books
        self._limits = limits
        self._order = order
        self._ratio = ratio
        self._eos = frozenset(eos_token_ids)
        self._admission = Admission(cache, books)
        self.requests: dict[Key, Request] = {}
        self.states: dict[Key, State] = {}
        self.waiting = WaitingQueue(order, cache)
        self.local = WaitingQueue(order, cache)  # waiting too, but to be computed here
        self.receiving: dict[Key, Request] = {}
        self.ready: dict[Key, Request] = {}
        self.retracted: dict[Key, Request] = {}
        self.extending: dict[Key, Request] = {}
        self.running: dict[Key, Request] = {}
        self.num_retractions = 0
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._in_flight: dict[int, tuple[list[Request], list[Chunk]]] = {}
        self._num_steps = 0

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, request: Request, *, is_local: bool = False) -> None:
        """Take a request into the queue.

        Args:
            is_local: its prompt is computed here, not received.
        Raises:
            RequestError: the queue is full, or the prompt is larger than the pool.
        """
        capacity = self._books.num_pages * self._cache.page_size
        if len(request.prompt) + 1 > capacity:
            raise RequestError(
                ErrorCode.POOL_TOO_SMALL,
                f"the prompt has {len(request.prompt)} tokens, a decode node's pool {capacity} with the output",
                param="prompt",
            )
        bound = self._limits.max_queued
        if bound is not None and len(self.waiting) + len(self.local) >= bound:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{bound} requests wait on the decode node already")
        assert request.key not in self.requests
        self.requests[request.key] = request
        (self.local if is_local else self.waiting)[request.key] = request
        self.states[request.key] = State.WAITING

    def received(self, key: Key, *, token: int) -> Request:
        """The prompt of a receiving request is all here; ``token`` is its first output token."""
        request = self.receiving.pop(key)
        self._admission.settle(request)
        request.output.append(token)
        self._move(request, Event.RECEIVED, self.ready)
        return request

    def end(self, key: Key) -> Request | None:
        """Finish, abort, failure: out of every queue, all pages given back. None if it is unknown.

        Pages granted to a transfer under way are not touched: they are the receiver's until its fence.
        """
        request = self.requests.pop(key, None)
        if request is None:
            return None
        if self.receiving.pop(key, None) is not None:
            self._admission.withdraw(request)
        self._leave_batch(request)
        self.states[key] = advance(TABLE, self.states[key], Event.END)
        del self.states[key]
        release(self._cache, self._books, request, keep=True)
        return request

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed."""
        return [request for request in self.requests.values() if request.deadline_at <= now]

    def _leave_batch(self, request: Request) -> None:
        for queue in (self.waiting, self.local, self.ready, self.retracted, self.extending, self.running):
            queue.pop(request.key, None)
        if request.slot >= 0:
            self._slots.append(request.slot)
            request.slot = -1

    def _move(self, request: Request, event: Event, queue: dict[Key, Request]) -> None:
        self.states[request.key] = advance(TABLE, self.states[request.key], event)
        queue[request.key] = request

    # ---- admission --------------------------------------------------------------------------------------------------

    def admit(self, now: float) -> list[Granted]:
        """Reserve pages for waiting requests, in order, as far as pages reach; none while retracted requests wait."""
        granted: list[Granted] = []
        if not self.waiting or self.retracted:
            return granted
        for request in self._order.sort(list(self.waiting.values()), now):
            if len(self.receiving) + len(self.ready) >= self._limits.max_running:
                break
            reservation = self._admission.reserve(request, spare_tokens=self._spare_tokens(request))
            if reservation is Refusal.PREFIX_PENDING:
                continue  # others need not wait for it
            if reservation is Refusal.SHORT_OF_PAGES:
                break
            del self.waiting[request.key]
            request.admitted_at = now
            self._order.admitted(request, num_input=len(request.prompt) - request.num_cached)
            self._move(request, Event.GRANT, self.receiving)
            granted.append(Granted(request, reservation))
        return granted

    def _holders(self) -> list[Request]:
        """Requests that hold pages now."""
        return [*self.running.values(), *self.ready.values(), *self.receiving.values(), *self.extending.values()]

    def _spare_tokens(self, request: Request) -> int:
        """Tokens that must stay available beyond the prompts' pages if ``request`` is let in.

        Prompts that have waited longer for being computed here are left room. With nobody to compete with, only the
        next token counts: a lone request may use the whole pool.
        """
        page_size = self._cache.page_size
        ahead = [other for other in self.local.values() if other.arrived_at <= request.arrived_at]
        holders = [*self._holders(), *ahead]
        room = sum(-(-other.num_tokens // page_size) * page_size for other in ahead)
        return room + self._expected([*holders, request]) if holders else 1

    def _expected(self, requests: list[Request]) -> int:
        return expected_tokens(requests, self._ratio.value, self._limits.clip_tokens)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed now (see ``stuck``)."""
        joining = self._take_up()
        grown = self._grow()
        chunks, begun = self._extend(now)
        page_size = self._cache.page_size
        rows = [r for r in self.running.values() if len(r.pages) * page_size > r.num_computed]
        if not rows and not chunks:
            self._ratio.reset()
            return None
        self._num_steps += 1
        self._in_flight[self._num_steps] = (rows, chunks)
        self._books.begin_step(self._num_steps)
        if rows:
            self._ratio.decoded()
        joining = [request for request in joining if request.slot >= 0]
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

    def _take_up(self) -> list[Request]:
        """Finished transfers join the batch, whoever else waits: they already hold all they need."""
        joining = []
        for request in list(self.ready.values()):
            if not self._slots:
                break
            del self.ready[request.key]
            request.slot = self._slots.pop()
            self._move(request, Event.TAKE_UP, self.running)
            joining.append(request)
        return joining

    def _has_room(self, request: Request) -> bool:
        return len(request.pages) * self._cache.page_size > request.num_computed

    def _grow(self) -> list[Request]:
        """One more page for every running request whose last page is full; retracts where pages run short."""
        grown = []
        page_size = self._cache.page_size
        for request in [r for r in self.running.values() if len(r.pages) * page_size <= r.num_computed]:
            while request.key in self.running and not self._has_room(request):
                if pages := self._take_page():
                    request.pages += pages
                    request.own += pages
                    grown.append(request)
                elif victim := self._victim():
                    self._retract(victim)
                else:
                    break  # waits for what is being received or extended, or is stuck
        return grown

    def _take_page(self) -> list[int] | None:
        if not self._books.num_free:
            self._cache.evict(1)
        return self._books.alloc(1, Owner.REQUEST)

    def _victim(self) -> Request | None:
        """Least work lost: fewest output tokens, then longest input. Never the last that could run."""
        if len(self.running) + len(self.ready) < 2:
            return None
        return min(self.running.values(), key=lambda r: (len(r.output), -len(r.prompt)))

    def _retract(self, request: Request) -> None:
        """Take the pages; their KV stays in the cache as long as nobody needs the room."""
        self._leave_batch(request)
        self._ratio.retracted(list(self.running.values()))
        release(self._cache, self._books, request, keep=True)
        self._move(request, Event.RETRACT, self.retracted)
        self.num_retractions += 1

    def _extend(self, now: float) -> tuple[list[Chunk], list[Request]]:
        """Chunks of requests that are computed here, as far as the budgets reach: begun, then retracted, then new."""
        if not self.extending and not self.retracted and not self.local:
            return [], []
        adder = self._adder()
        for request in self.extending.values():
            if adder.add_chunked_req(request) is not AddResult.CONTINUE:
                break
        begun: list[Request] = []
        sharing = Sharing(self._cache.page_size, self._limits.sharing, self.extending.values())
        retracted = sorted(self.retracted.values(), key=lambda r: r.arrived_at)
        for request in [*retracted, *self._order.sort(list(self.local.values()), now)]:
            if not self._slots:
                break
            if request.key in self.local and sharing.waits_for(request, self._cache):
                continue
            num_chunks = len(adder.chunks)
            result = adder.add_one_req(request)
            if len(adder.chunks) > num_chunks:
                sharing.add(request)
                if self.local.pop(request.key, None) is None:
                    del self.retracted[request.key]
                else:
                    request.admitted_at = now
                    self._order.admitted(request, num_input=request.num_tokens - request.num_computed)
                request.slot = self._slots.pop()
                self._move(request, Event.EXTEND, self.extending)
                begun.append(request)
            if result is not AddResult.CONTINUE:
                break
        return adder.chunks, begun

    def _adder(self) -> PrefillAdder:
        page_size = self._cache.page_size
        holders = self._holders()
        total = (self._books.num_free + self._cache.num_evictable_pages) * page_size
        if holders:
            total -= self._expected(holders)
        else:
            total += 1  # alone, it may fill the pool to the last token
        budgets = Budgets(total, self._limits.max_prefill_tokens, self._limits.chunk_tokens)
        return PrefillAdder(
            self._cache,
            self._books,
            page_size,
            budgets,
            clip=self._limits.clip_tokens,
            reserve_output=bool(holders),
            running=holders,
            ratio=self._ratio.value,
        )

    def stuck(self) -> Request | None:
        """The request that can never go on, once ``plan`` gave nothing: nobody holds pages that could come back."""
        if self.receiving or self.ready or self.extending or self._in_flight or self._books.count(Owner.QUARANTINE):
            return None
        return next(iter([*self.running.values(), *self.retracted.values(), *self.local.values()]), None)

    def commit(self, result: StepResult) -> list[Sampled]:
        """Take in what a step computed. Rows of requests that ended meanwhile are ignored."""
        rows, chunks = self._in_flight.pop(result.step)
        effects: list[Sampled] = []
        logprobs = result.logprobs or (None,) * len(result.tokens)
        running = self.running
        for request, token, logprob in zip(rows, result.tokens, logprobs, strict=False):
            if running.get(request.key) is request:
                request.num_computed += 1
                effects.append(self._sampled(request, token, logprob))
        for chunk, found in zip(chunks, chunk_results(chunks, result, num_before=len(rows)), strict=True):
            request = chunk.request
            if self.extending.get(request.key) is not request:
                continue
            request.num_computed = chunk.start + chunk.num_tokens
            request.prompt_logprobs += found.prompt_logprobs
            cache_computed(self._cache, self._books, request)
            if found.sampled is not None:
                del self.extending[request.key]
                self._move(request, Event.SAMPLED, self.running)
                effects.append(self._sampled(request, *found.sampled))
        self._books.end_step(result.step)
        self._order.decoded(effect.request for effect in effects)
        return effects

    def _sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Sampled:
        request.output.append(token)
        finish = finish_reason(request.sampling, self._eos, token=token, num_output=len(request.output))
        return Sampled(request, token, logprobs, finish)

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """The chunks in a plan that has not been committed: prompts computed here, and what was retracted."""
        return self._in_flight[plan.step][1]

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every request is in exactly the place its state says, and every slot is in one place."""
        places = {
            State.WAITING: {**self.waiting, **self.local},
            State.RECEIVING: self.receiving,
            State.READY: self.ready,
            State.RUNNING: self.running,
            State.RETRACTED: self.retracted,
            State.EXTENDING: self.extending,
        }
        for key in self.requests:
            homes = [state for state, place in places.items() if key in place]
            assert homes == [self.states[key]], f"{key} is {self.states[key]} but stands in {homes}"
        assert sum(map(len, places.values())) == len(self.requests) == len(self.states)
        assert self._admission.reservations.keys() == self.receiving.keys()
        taken = [request.slot for request in [*self.running.values(), *self.extending.values()]]
        assert sorted(self._slots + taken) == list(range(self._limits.max_running)), "a slot is lost or taken twice"
