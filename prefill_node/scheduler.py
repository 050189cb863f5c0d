"""Which chunks of which prompts the next step computes. Pure: integers in, plans and effects out.

A request waits, is admitted with all pages of its prompt, and is extended chunk by chunk; every step is filled to the
chunk budget by ``PrefillAdder``. After a chunk its whole pages enter the radix cache and are ready to leave. The sample
of the last chunk is the first output token; the slot is free then, the pages stay until ``release``.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache, TreeNode
from common.cache.request_kv import cache_computed, packed_tokens, release
from common.deadlines import Deadlines
from common.decision_log import Decisions
from common.errors import ErrorCode, RequestError
from common.finish_reason import Finish, finish_reason
from common.request import LOWEST_PRIORITY, Request
from common.sampling_params import TokenLogprobs
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.in_batch_prefix_caching import Sharing, SharingLimits
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import (
    AddResult,
    Budgets,
    Chunk,
    ChunkResult,
    PrefillAdder,
    admit_row,
    chunk_results,
)
from common.scheduling.skip_ahead import MAX_SKIP_AHEAD, PASSING, SkipAhead
from common.scheduling.victim_selection import has_room, victims_for
from common.scheduling.waiting_queue import WaitingQueue
from common.state_machine import advance
from common.step_plan import PageDelta, StepPlan, StepResult
from prefill_node.request_state import TABLE, Event, State

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a prefill node. None means no bound.

    Attributes:
        max_running: slots, that is requests being extended at once.
        max_queued: requests waiting; one more is refused.
        context_length: of the model; a prompt must be shorter.
        max_prefill_tokens: input tokens of one step.
        chunk_tokens: tokens of one step after which a prompt is cut; None leaves prompts whole.
        cut: where prompts are cut.
        max_requests: requests of one step.
        sharing: which prompts wait for a prefix that is just being computed.
        max_skip_ahead: smaller prompts that may pass one for which pages are short.
    """

    max_running: int
    max_queued: int | None = None
    context_length: int | None = None
    max_prefill_tokens: int = 16_384
    chunk_tokens: int | None = None
    cut: ChunkAlignment = field(default_factory=ChunkAlignment)
    max_requests: int | None = None
    sharing: SharingLimits = field(default_factory=SharingLimits)
    max_skip_ahead: int = MAX_SKIP_AHEAD


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk of ``num_tokens`` is computed; the first ``num_pages`` pages of the prompt may leave now.

    Those are whole pages, until ``first`` is set: then they are all, also a partial last one.
    """

    request: Request
    num_tokens: int
    num_pages: int
    first: "FirstToken | None" = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: int
    logprobs: TokenLogprobs | None
    finish: Finish


class PrefillScheduler:
    """Owns every request of a prefill node, from submission until its pages are back."""

    def __init__(
        self,
        cache: RadixCache,
        books: PageAllocator,
        *,
        limits: Limits,
        order: RequestOrdering,
        eos_token_ids: Collection[int],
        is_granted: Callable[[Key], bool],
    ) -> None:
        self._cache = cache
        self._books = books
        self._limits = limits
        self._order = order
        self.policy = order.policy
        self._eos = frozenset(eos_token_ids)
        self._is_granted = is_granted
        self.requests: dict[Key, Request] = {}  # every request that may hold pages
        self.states: dict[Key, State] = {}
        self._deadlines = Deadlines(self.requests)
        self.waiting = WaitingQueue(order, cache)
        self.extending: dict[Key, Request] = {}
        self._first: dict[Key, FirstToken] = {}  # of retracted requests; what was said once is not said otherwise
        self.retracted: list[Key] = []
        self.decisions = Decisions()
        self.totals: Counter[str] = Counter(preemptions=0, skipped_ahead=0, budget_tokens=0, budget_tokens_used=0)
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._in_flight: dict[int, list[Chunk]] = {}
        self._num_steps = 0

    # ---- requests come and go ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request into the queue, or raise ``RequestError``: the queue is full, the prompt too long."""
        context = self._limits.context_length
        if context is not None and len(request.prompt) >= context:
            message = f"the prompt has {len(request.prompt)} tokens, the context is {context}, output included"
            raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="prompt")
        capacity = self._books.num_pages * self._cache.page_size
        if len(request.prompt) > capacity:
            message = f"the prompt has {len(request.prompt)} tokens and the prefill node's pool holds {capacity}"
            raise RequestError(ErrorCode.POOL_TOO_SMALL, message + " (--max-total-tokens)", param="prompt")
        bound = self._limits.max_queued
        if bound is not None and len(self.waiting) >= bound:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{bound} requests wait on the prefill node already")
        assert request.key not in self.requests
        self.requests[request.key] = self.waiting[request.key] = request
        self.states[request.key] = State.WAITING
        self._deadlines.add(request)

    def close(self, key: Key) -> bool:
        """Stop computing a request. Its pages stay until ``release``. False if it is unknown or closing already."""
        if self.states.get(key) in (None, State.CLOSING):
            return False
        self._leave_batch(key)
        self._advance(key, Event.CLOSE)
        return True

    def release(self, key: Key) -> None:
        """Nothing reads the request's pages any more: the one place where they are given back."""
        request = self.requests.pop(key)
        self._leave_batch(key)
        self._advance(key, Event.RELEASED)
        del self.states[key]
        self._first.pop(key, None)
        release(self._cache, self._books, request, keep=False)  # whole pages went to the cache chunk by chunk

    @property
    def has_priorities(self) -> bool:
        """Whether some requests come before others whatever the policy."""
        return self._order.rules.is_enabled

    def rank(self, key: Key) -> float:
        """The lower, the sooner this request's pages should leave."""
        request = self.requests.get(key)
        return math.inf if request is None else -self._order.standing(request)

    def reprioritize(self, key: Key, priority: int, now: float, *, priority_class: str | None = None) -> None:
        """From now on this request, if it is here, is so urgent and on this class's account (None: as before)."""
        request = self.requests.get(key)
        if request is not None:
            before = (request.priority, request.priority_class)
            self.decisions.note_change(now, request.rid, before, (priority, priority_class))
            self.waiting.change(request, priority, priority_class)

    def lend(self, key: Key, priority: int, now: float) -> None:
        """So urgent is who waits on another node for this request, if it is here; LOWEST_PRIORITY: nobody does."""
        request = self.requests.get(key)
        if request is not None:
            reason = "{} by one that waits elsewhere" if priority > LOWEST_PRIORITY else "nothing any more"
            self.decisions.note(now, request.rid, "lend", reason, priority)
            here = request.inherited_priority if key in self.extending else LOWEST_PRIORITY  # until the next plan
            request.lent_priority, request.inherited_priority = priority, max(priority, here)

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed and that are not closing yet; each is told once."""
        return [request for request in self._deadlines.passed(now) if self.states[request.key] is not State.CLOSING]

    def _leave_batch(self, key: Key) -> None:
        self.waiting.pop(key, None)
        request = self.extending.pop(key, None)
        if request is not None:
            self._slots.append(request.slot)
            request.slot, request.inherited_priority = -1, request.lent_priority

    def _advance(self, key: Key, event: Event) -> None:
        self.states[key] = advance(TABLE, self.states[key], event)

    # ---- one step -------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed now."""
        if not self.extending and not self.waiting:
            return None
        granted = [request for request in self.waiting.values() if self._is_granted(request.key)]
        urgent = self._make_room(granted, now)
        adder = PrefillAdder(
            self._cache,
            self._books,
            Budgets(
                total_tokens=(self._books.num_free + self._cache.num_evictable_pages) * self._cache.page_size + 1,
                input_tokens=self._limits.max_prefill_tokens,
                chunk_tokens=self._limits.chunk_tokens,
                cut=self._limits.cut,
            ),
            max_requests=self._limits.max_requests,
            reserve_output=False,
        )
        admitted = self._fill(adder, urgent, granted, now)
        self._order.explain(self.decisions, now)
        if not adder.chunks:
            return None
        self._num_steps += 1
        self.totals["budget_tokens"] += self._limits.chunk_tokens or self._limits.max_prefill_tokens
        self.totals["budget_tokens_used"] += sum(chunk.num_tokens for chunk in adder.chunks)
        self._in_flight[self._num_steps] = adder.chunks
        self._books.begin_step(self._num_steps)
        return StepPlan(
            step=self._num_steps,
            admits=tuple(admit_row(request) for request in admitted),
            pages=tuple(PageDelta(r.slot, 0, tuple(r.pages)) for r in admitted),
            rows=tuple(chunk.to_row() for chunk in adder.chunks),
        )

    def _fill(
        self, adder: PrefillAdder, urgent: Request | None, granted: Sequence[Request], now: float
    ) -> list[Request]:
        """Chunks of begun and of waiting requests, in one order, as far as the budgets reach. Returns the admitted.

        A prompt for which a decode node holds pages passes whoever does not fit, however many have done so: those who
        do not fit may be waiting for what it will give back there.
        """
        queue = list(self._order.merge(list(self.extending.values()), list(self.waiting.values()), now))
        if urgent is not None:
            queue.remove(urgent)
            queue.insert(next((i for i, r in enumerate(queue) if r.key in self.waiting), len(queue)), urgent)
        sharing = Sharing(self._cache.page_size, self._limits.sharing, self.extending.values())
        skip_ahead = SkipAhead(self._limits.max_skip_ahead)
        lent: dict[Key, int] = {}
        admitted: list[Request] = []
        num_begun = len(self.extending)
        may_pass = {request.key for request in granted}
        for request in queue:
            if self.states[request.key] is State.EXTENDING:
                num_begun -= 1
                if adder.add_chunked_req(request) is not AddResult.CONTINUE:
                    break
            elif not self._slots or skip_ahead.is_closed_to(request.key in may_pass):
                may_pass.discard(request.key)
                if not num_begun and not may_pass:
                    break
                if self.has_priorities and (holder := sharing.waits_for(request, self._cache)):
                    self._order.lend(request, holder, lent)
            elif holder := sharing.waits_for(request, self._cache):
                self._order.lend(request, holder, lent)
                self.decisions.note_wait(now, request.rid, "for its prefix, which {} computes", holder.rid)
            elif (result := adder.add_one_req(request)) is AddResult.NO_TOKEN:
                skip_ahead.refuse(request)
                self.decisions.note_wait(now, request.rid, "for room for {} tokens", request.num_tokens)
                if request is urgent:
                    skip_ahead.close()
            elif result is AddResult.OTHER:
                break
            else:
                self._admit(request, now, PASSING if skip_ahead.admit(request) else "")
                sharing.add(request)
                admitted.append(request)
        for request in self.extending.values():
            request.inherited_priority = max(request.lent_priority, lent.get(request.key, LOWEST_PRIORITY))
        return admitted

    def _admit(self, request: Request, now: float, passing: str) -> None:
        del self.waiting[request.key]
        self.extending[request.key] = request
        request.slot = self._slots.pop()
        request.admitted_at = now
        self._order.admitted(request, num_input=request.num_tokens - request.num_computed)
        self._advance(request.key, Event.ADMIT)
        self.totals["skipped_ahead"] += bool(passing)
        num_tokens, reason = request.num_tokens, "computes {} of {} tokens" + passing
        self.decisions.note(now, request.rid, "admit", reason, num_tokens - request.num_cached, num_tokens)

    # ---- who gives way ----------------------------------------------------------------------------------------------

    def _make_room(self, granted: Sequence[Request], now: float) -> Request | None:
        """Retract prompts for which no decode node holds pages yet, so that one that matters more fits.

        A decode node keeps what it has granted until the transfer is over, so a prompt for which pages are granted must
        not wait for others that wait for decode nodes: two nodes of each kind could then wait for one another for ever.
        Returns such a prompt, if it fits only by taking from others; it comes first.
        """
        urgent = max(granted, key=self._order.standing, default=None)
        if urgent is not None and not self._fits(urgent):
            self._retract_for(urgent, self._ungranted(), now, "pages are granted to {} already")
            return urgent
        if not self._order.rules.is_enabled or not self.waiting:
            return None
        ungranted = self._ungranted()
        if self._order.may_beat(max(map(self._order.priority, self.waiting.values())), ungranted):
            first = self._order.most_urgent(self.waiting.values())
            weaker = [victim for victim in ungranted if self._order.beats(first, victim)]
            if weaker and not self._is_held_back(first):
                self._preempt(first, weaker, now)
        return None

    def _ungranted(self) -> list[Request]:
        """Those that may be retracted, least urgent first."""
        states = (State.EXTENDING, State.SENDING)
        holders = [r for key, r in self.requests.items() if self.states[key] in states and not self._is_granted(key)]
        return self._order.least_first(holders)

    def _is_held_back(self, request: Request) -> bool:
        sharing = Sharing(self._cache.page_size, self._limits.sharing, self.extending.values())
        return sharing.waits_for(request, self._cache) is not None

    def _preempt(self, first: Request, weaker: list[Request], now: float) -> None:
        """The first in line takes the place of less urgent ones, short of a slot, of pages, or of both."""
        extending = [victim for victim in weaker if self.states[victim.key] is State.EXTENDING]
        if not self._slots and not extending:
            return
        num_retracted = len(self.retracted)
        if not self._fits(first):
            if not self._slots:  # one of those in a slot in any case
                weaker = [extending[0], *(victim for victim in weaker if victim is not extending[0])]
            self._retract_for(first, weaker, now, "its pages go to the more urgent {}")
        elif not self._slots:
            self._retract(extending[0], now, "its slot goes to the more urgent {}", first)
        self.totals["preemptions"] += len(self.retracted) - num_retracted

    def _retract_for(self, request: Request, candidates: list[Request], now: float, reason: str) -> None:
        num_pages, prefix = self._needs(request)
        for victim in victims_for(self._cache, self._books, num_pages=num_pages, keep=prefix, candidates=candidates):
            self._retract(victim, now, reason, request)

    def _fits(self, request: Request) -> bool:
        """Whether there are pages for it now."""
        num_pages, prefix = self._needs(request)
        return has_room(self._cache, self._books, num_pages=num_pages, keep=prefix)

    def _needs(self, request: Request) -> tuple[int, TreeNode]:
        """Pages that a request needs beside those of its cached prefix, and the node at which that ends."""
        match = self._cache.match(packed_tokens(request, request.num_cacheable), request.salt)
        return -(-request.num_tokens // self._cache.page_size) - len(match.pages), match.node

    def _retract(self, request: Request, now: float, reason: str, other: Request) -> None:
        """Take the pages back; their KV stays in the cache as long as there is room. It is next in line again."""
        self._leave_batch(request.key)
        release(self._cache, self._books, request, keep=True)
        request.output.clear()
        request.prompt_logprobs.clear()
        self._advance(request.key, Event.RETRACT)
        self.waiting.put_first(request)
        self.retracted.append(request.key)
        self.decisions.note(now, request.rid, "retract", reason, other.rid)

    def commit(self, result: StepResult) -> list[Computed]:
        """Take in what a step computed. Rows of requests that were closed meanwhile are ignored."""
        chunks = self._in_flight.pop(result.step)
        effects: list[Computed] = []
        for chunk, sampled in zip(chunks, chunk_results(chunks, result), strict=True):
            if self.extending.get(chunk.request.key) is chunk.request:
                effects.append(self._commit_chunk(chunk, sampled))
        self._books.end_step(result.step)
        return effects

    def _commit_chunk(self, chunk: Chunk, result: ChunkResult) -> Computed:
        request = chunk.request
        request.num_computed = chunk.start + chunk.num_tokens
        request.prompt_logprobs += result.prompt_logprobs
        cache_computed(self._cache, request)
        if result.sampled is None:
            return Computed(request, chunk.num_tokens, request.num_computed // self._cache.page_size)
        token, logprobs = result.sampled
        finish = finish_reason(request.sampling, self._eos, token=token, num_output=1)
        first = self._first.setdefault(request.key, FirstToken(token, logprobs, finish))
        request.output.append(first.token)
        self._leave_batch(request.key)
        self._advance(request.key, Event.SAMPLED)
        return Computed(request, chunk.num_tokens, len(request.pages), first)

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """The chunks behind the rows of a plan that has not been committed."""
        return self._in_flight[plan.step]

    # ---- proof ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every request is in the place its state says, and every slot is in one place."""
        for key in self.requests:
            state = self.states[key]
            assert (key in self.waiting) == (state is State.WAITING), f"{key} is {state}"
            assert (key in self.extending) == (state is State.EXTENDING), f"{key} is {state}"
        assert self.states.keys() == self.requests.keys()
        slots = sorted(self._slots + [request.slot for request in self.extending.values()])
        assert slots == list(range(self._limits.max_running)), "a slot is lost or taken twice"
