"""Plans the steps of a prefill node: which chunks of which prompts are computed next. Pure.

A request waits until its grammar is compiled, if it has one, and then for its turn. It is admitted with all pages of
its prompt, and is extended chunk by chunk; ``PrefillAdder`` fills every step to the chunk budget. After a chunk, its
whole pages enter the radix cache and are ready to leave. The sample of the last chunk is the first output token. The
slot is free then; the pages stay with the request until ``release``.

A second step may be planned before the first is committed: ``plan`` reads ``num_scheduled``, which it advances itself.
Calls queue what follows from them as effects, for the role to take and perform.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from common.cache.kv_window import KVWindow
from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import cache_computed, packed_tokens, release
from common.cache.tree_node import TreeNode
from common.decision_log import DecisionLog
from common.errors import ErrorCode, RequestError, invariant
from common.finish_reason import Finish, finish_reason
from common.request import Request, RequestKey
from common.sampling_params import TokenLogprobs
from common.scheduling.deadlines import Deadlines
from common.scheduling.in_batch_prefix_caching import InBatchPrefixes
from common.scheduling.long_prompts import LongPrompts
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import (
    AddResult,
    Chunk,
    ChunkResult,
    PrefillAdder,
    PrefillLimits,
    SamplingFailed,
    admit_row,
    chunk_results,
)
from common.scheduling.skip_ahead import PASSING, SkipAhead
from common.scheduling.slots import OutstandingSteps
from common.scheduling.victim_selection import has_room, victims_for
from common.scheduling.waiting_queue import WaitingQueue
from common.step_plan import PageDelta, StepPlan, StepResult
from prefill_node.request_state import Event, State
from prefill_node.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token of a request.

    Attributes:
        is_repeat: the prompt was retracted after its first token and computed again; the token is the same.
    """

    token: int
    logprobs: TokenLogprobs | None
    finish: Finish
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk of ``num_tokens`` is computed, and the first ``num_pages`` pages of the prompt may leave.

    These are whole pages until ``first`` is set; then they are all pages, including a partly filled last one.
    """

    request: Request
    num_tokens: int
    num_pages: int
    first: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class Retracted:
    """The pages of a request have gone to a more urgent one. It waits to be computed again."""

    key: RequestKey


Effect = Computed | Retracted | SamplingFailed


class PrefillScheduler:
    """Owns every request of a prefill node, from submission until its pages are back.

    Args:
        is_granted: whether a decode node holds pages for a request.

    Attributes:
        grammars: grammars of the requests; the role takes and performs its effects.
    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        *,
        limits: PrefillLimits,
        ordering: RequestOrdering,
        eos_token_ids: Collection[int],
        is_granted: Callable[[RequestKey], bool],
    ) -> None:
        self.policy = ordering.policy
        self._table = RequestTable(limits.max_running, WaitingQueue(ordering, cache))
        self.requests = self._table.requests
        self.grammars = self._table.grammars
        self.decisions = DecisionLog()
        self._totals: Counter[str] = Counter(
            retractions=0, preemptions=0, skipped_ahead=0, budget_tokens=0, budget_tokens_used=0
        )
        self._cache = cache
        self._allocator = allocator
        self._limits = limits
        self._ordering = ordering
        self._long_prompts = LongPrompts(limits, ordering, cache.page_size)
        self._eos = frozenset(eos_token_ids)
        self._is_granted = is_granted
        self._deadlines = Deadlines(self.requests)
        self._first: dict[RequestKey, FirstToken] = {}  # survive a retraction
        self._steps: OutstandingSteps[list[Chunk]] = OutstandingSteps(allocator)
        self._effects: list[Effect] = []
        self._kv_window = limits.kv_window or KVWindow(cache.page_size)
        self._made_room_for: RequestKey = ("", 0)  # the request that pages were last taken for

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, request: Request, *, is_resumed: bool = False) -> None:
        """Queue a request.

        Args:
            is_resumed: it was retracted on a decode node, and comes before all that wait, among equals.
        Raises:
            RequestError: the queue is full, or the prompt exceeds the context or the pool.
        """
        context = self._limits.context_length
        if context is not None and len(request.prompt) >= context:
            message = f"the prompt has {len(request.prompt)} tokens, the context is {context}, output included"
            raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="prompt")
        capacity = self._kv_window.max_tokens(self._allocator.num_pages)
        if len(request.prompt) > capacity:
            message = f"the prompt has {len(request.prompt)} tokens and the prefill node's pool holds {capacity}"
            raise RequestError(ErrorCode.POOL_TOO_SMALL, message + " (--max-total-tokens)", param="prompt")
        bound = self._limits.max_queued
        if bound is not None and self.num_waiting >= bound:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{bound} requests wait on the prefill node already")
        self._table.add(request, is_first=is_resumed)
        self._deadlines.add(request)

    def grammar_compiled(self, grammar: str) -> None:
        """Queue the requests that have waited for this grammar."""
        for request in self.grammars.compiled(grammar):
            self._table.move(request, Event.COMPILED)

    def abort(self, key: RequestKey) -> bool:
        """Stop computing a request; its pages stay until ``release``. False if it is unknown or has ended already."""
        request = self.requests.get(key)
        if request is None or self.is_closing(key):
            return False
        self._table.move(request, Event.CLOSE, with_slot=False)
        return True

    def release(self, key: RequestKey) -> None:
        """Forget a request and give its pages back: the transfer does not read them any more."""
        request = self.requests[key]
        self._table.remove(request, Event.RELEASED)
        self._first.pop(key, None)
        release(self._cache, self._allocator, request)

    def take_effects(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._table.waiting) + len(self._table.compiling)

    def is_closing(self, key: RequestKey) -> bool:
        """Whether the request has ended, and only its pages are still here."""
        return key in self._table.closing

    def has_first_token(self, key: RequestKey) -> bool:
        """Whether the first token was sampled, even if the request was retracted since."""
        return key in self._first

    @property
    def has_priorities(self) -> bool:
        """Whether priorities come before the policy's order."""
        return self._ordering.rules.is_enabled

    def rank(self, key: RequestKey) -> float:
        """The order in which pages of different requests leave, lowest first."""
        request = self.requests.get(key)
        return math.inf if request is None else -self._ordering.effective_priority(request)

    def reprioritize(self, key: RequestKey, priority: int, now: float, *, priority_class: str | None = None) -> None:
        """Change the priority of a request, and its class unless that is None. Unknown keys are ignored."""
        request = self.requests.get(key)
        if request is not None:
            before = (request.priority, request.priority_class)
            self.decisions.note_change(now, request.rid, before, (priority, priority_class))
            self._table.waiting.reprioritize(request, priority, priority_class)

    def totals(self) -> dict[str, float]:
        """Monotonic totals of what was scheduled and preempted."""
        return {**self._totals, **self.policy.totals()}

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed and that have not ended; each is returned once."""
        return [request for request in self._deadlines.expired(now) if not self.is_closing(request.key)]

    # ---- planning a step --------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. Preempts requests for a more urgent one first."""
        if not self._table.extending and not self._table.waiting:
            return None
        granted = [request for request in self._table.waiting.values() if self._is_granted(request.key)]
        urgent = self._preempt(granted, now)
        adder = self._adder()
        admitted = self._fill(adder, urgent, granted, now)
        if not adder.chunks and not self._table.extending and (urgent := self._make_room_for_ending_here(now)):
            adder = self._adder()
            admitted = self._fill(adder, urgent, granted, now)
        if not adder.chunks:
            return None
        self._totals["budget_tokens"] += self._limits.chunk_tokens or self._limits.max_prefill_tokens
        self._totals["budget_tokens_used"] += sum(chunk.num_tokens for chunk in adder.chunks)
        return StepPlan(
            step=self._steps.begin(adder.chunks),
            admits=tuple(admit_row(request) for request in admitted),
            pages=tuple(PageDelta(request.slot, 0, tuple(request.pages)) for request in admitted),
            rows=tuple(chunk.to_row() for chunk in adder.chunks),
            windows=self._allocator.window_deltas(admitted, [chunk.request for chunk in adder.chunks]),
        )

    def _adder(self) -> PrefillAdder:
        num_available = self._allocator.num_for_steps + self._cache.num_evictable_pages
        return PrefillAdder(
            self._cache,
            self._allocator,
            self._limits,
            total_tokens=num_available * self._cache.page_size + 1,
            reserve_output=False,
        )

    def _queue(self, urgent: Request | None, now: float) -> list[Request]:
        """Extending and waiting requests in one order; ``urgent`` before all waiting ones."""
        begun = self._long_prompts.in_order(self._table.extending.values())
        queue = list(self._ordering.merge(begun, list(self._table.waiting.values()), now))
        if urgent is not None:
            queue.remove(urgent)
            queue.insert(next((i for i, r in enumerate(queue) if r.key in self._table.waiting), len(queue)), urgent)
        return queue

    def _fill(
        self, adder: PrefillAdder, urgent: Request | None, granted: Sequence[Request], now: float
    ) -> list[Request]:
        """Add chunks as far as the budgets reach. Return the requests that were admitted.

        A prompt with granted pages may overtake any number of prompts that lack pages: the pages that it gives back at
        its end may be the ones that they lack. So may a prompt that ends here, as long as it passes none of its kind.
        """
        sharing = self._sharing()
        skip_ahead = SkipAhead(self._limits.max_skip_ahead)
        admitted: list[Request] = []
        begun_left = dict(self._table.extending)  # begun prompts that may still get tokens of this step
        may_pass = {request.key for request in granted}
        ending_here = {request.key for request in self._table.waiting.values() if _ends_here(request)} - may_pass
        may_pass |= ending_here
        for request, most, is_reserved in self._long_prompts.turns(self._queue(urgent, now), adder, urgent=urgent):
            if request.key in self._table.extending:
                if most is None:
                    begun_left.pop(request.key, None)
                if request.num_scheduled == request.num_tokens:
                    continue  # its last chunk is in a step that is not committed yet
                result = adder.add_chunked_req(request, most=most, is_reserved=is_reserved)
                if result is not AddResult.CONTINUE and most is None:
                    break
            elif not self._table.num_free_slots or skip_ahead.is_closed_to(request.key in may_pass):
                may_pass.discard(request.key)
                if not begun_left and not may_pass:
                    break
            elif holder := sharing.holder_of(request, self._cache):
                self.decisions.note_wait(now, request.rid, "for its prefix, which {} computes", holder.rid)
            elif (result := adder.add_one_req(request, most=most)) is AddResult.NO_TOKEN:
                skip_ahead.refuse(request)
                self.decisions.note_wait(now, request.rid, "for room for {} tokens", request.num_tokens)
                if request is urgent:
                    skip_ahead.close()
                if request.key in ending_here:
                    may_pass -= ending_here
            elif result is AddResult.OTHER:
                if most is None:
                    break
            else:
                self._admit(request, now, PASSING if skip_ahead.admit(request) else "")
                sharing.add(request)
                admitted.append(request)
                if most is not None:
                    begun_left[request.key] = request
        return admitted

    def _admit(self, request: Request, now: float, passing: str) -> None:
        self._table.move(request, Event.ADMIT, with_slot=True)
        if request.key == self._made_room_for:
            self._made_room_for = ("", 0)
        request.placed_at = now
        request.admitted_at = request.admitted_at or now  # once: what is computed again is no time in the queue
        request.stages.resume(now)
        self._ordering.admitted(request, num_input=request.num_tokens - request.num_computed)
        self._totals["skipped_ahead"] += bool(passing)
        reason = "computes {} of {} tokens" + passing
        self.decisions.note(now, request.rid, "admit", reason, request.num_to_compute, request.num_tokens)

    def _sharing(self) -> InBatchPrefixes:
        computing, comes_first = self._table.extending.values(), self._ordering.comes_first
        return InBatchPrefixes(self._cache.page_size, self._limits.sharing, computing, comes_first=comes_first)

    def chunks(self, plan: StepPlan) -> list[Chunk]:
        """The chunks of the plan that was made last."""
        return self._steps.newest(plan.step)

    # ---- preemption -------------------------------------------------------------------------------------------------

    def _preempt(self, granted: Sequence[Request], now: float) -> Request | None:
        """Retract prompts without granted pages, so that a more important one fits.

        A decode node keeps the pages that it has granted until the transfer is over. So a prompt with granted pages
        must not wait for prompts that wait for decode nodes: two nodes of each kind could wait in a circle. Such a
        prompt is returned if it fits only by taking pages from others, now or in an earlier plan; it is admitted first,
        and no other prompt before it. Each plan tries again until it fits, since all candidates of an earlier plan
        together may not have had enough pages. It waits for a prefix that another prompt with granted pages computes
        before it takes any.
        """
        urgent = max(granted, key=self._ordering.effective_priority, default=None)
        kept = self._table.waiting.get(self._made_room_for)
        for request in (urgent, kept):
            if request is None or self._fits(request) or self._is_prefix_granted(request):
                continue
            self._retract_for(request, self._ungranted(), now, "pages are granted to {} already")
            self._made_room_for = request.key
            return request
        if kept is not None:
            return kept
        if not self._ordering.rules.is_enabled or not self._table.waiting:
            return None
        ungranted = self._ungranted()
        if self._ordering.may_preempt_any(self._table.waiting.values(), ungranted):
            first = self._ordering.sort(list(self._table.waiting.values()), now)[0]
            weaker = [victim for victim in ungranted if self._ordering.may_preempt(first, victim, now)]
            if weaker and self._lacks_only_room(first):
                self._preempt_for_first(first, weaker, now)
        return None

    def _is_prefix_granted(self, request: Request) -> bool:
        """Whether a waiting request waits for a prefix that a prompt with granted pages computes."""
        holder = self._sharing().holder_of(request, self._cache)
        return holder is not None and self._is_granted(holder.key)

    def _make_room_for_ending_here(self, now: float) -> Request | None:
        """Retract computed prompts that wait for decode nodes, so that a prompt fits that needs none; return it.

        Call it when the node is idle, which it would stay for as long as the decode nodes are full.
        """
        waiting = self._ordering.sort(list(self._table.waiting.values()), now)
        request = next(filter(_ends_here, waiting), None)
        if request is None or not self._lacks_only_room(request):
            return None
        candidates = [victim for victim in self._ungranted() if not self._ordering.is_more_urgent(victim, request)]
        return request if self._retract_for(request, candidates, now, "its pages go to {}, which ends here") else None

    def _lacks_only_room(self, request: Request) -> bool:
        """Whether a waiting request would begin now if it had a slot and pages."""
        may_begin = self._long_prompts.may_begin(request, self._table.extending.values())
        return may_begin and self._sharing().holder_of(request, self._cache) is None

    def _ungranted(self) -> list[Request]:
        """Requests that may be retracted, least urgent first."""
        states, holding = self._table.states, (State.EXTENDING, State.SENDING)
        holders = [r for key, r in self.requests.items() if states[key] in holding and not self._is_granted(key)]
        return self._ordering.in_preemption_order(holders)

    def _preempt_for_first(self, first: Request, weaker: list[Request], now: float) -> None:
        """Take a slot, pages, or both from less urgent requests for the first in the queue, if it lacks them."""
        extending = [victim for victim in weaker if victim.key in self._table.extending]
        if not self._table.num_free_slots and not extending:
            return
        victims: Sequence[Request] = ()
        if not self._fits(first):
            if not self._table.num_free_slots:  # at least one victim must have a slot
                weaker = [extending[0], *(victim for victim in weaker if victim is not extending[0])]
            victims = self._retract_for(first, weaker, now, "its pages go to the more urgent {}")
        elif not self._table.num_free_slots:
            victims = extending[:1]
            self._retract(extending[0], now, "its slot goes to the more urgent {}", first)
        for victim in victims:
            victim.num_preempted += 1
        self._totals["preemptions"] += len(victims)

    def _retract_for(self, request: Request, candidates: list[Request], now: float, reason: str) -> Sequence[Request]:
        """Retract as many candidates as it takes, or none if all of them would not be enough; return them."""
        num_pages, prefix = self._needs(request)
        victims = victims_for(
            self._cache,
            self._allocator,
            num_pages=num_pages,
            num_windowed=self._needs_windowed(request),
            keep=prefix,
            candidates=candidates,
        )
        for victim in victims:
            self._retract(victim, now, reason, request)
        return victims

    def _fits(self, request: Request) -> bool:
        num_pages, prefix = self._needs(request)
        num_windowed = self._needs_windowed(request)
        return has_room(self._cache, self._allocator, num_pages=num_pages, num_windowed=num_windowed, keep=prefix)

    def _needs_windowed(self, request: Request) -> int:
        """Window pages that the request would reserve."""
        window_pages = self._allocator.window_pages
        return 0 if window_pages is None else window_pages.needs(request, decodes=False)

    def _needs(self, request: Request) -> tuple[int, TreeNode]:
        """Pages that a request needs beside those of its cached prefix, and the tree node at which that prefix ends.

        A request that would be computed in a ring needs the pages of the ring, and has no prefix.
        """
        match = self._cache.match(packed_tokens(request, request.num_cacheable), request.salt)
        num_tokens = request.num_tokens
        if self._kv_window.prefers_ring(num_tokens, match, self._allocator.num_pages):
            return self._kv_window.pages_to_compute(num_tokens), TreeNode()
        return self._kv_window.num_pages(num_tokens) - len(match.pages), match.node

    def _retract(self, request: Request, now: float, reason: str, other: Request) -> None:
        """Take the pages back and queue the request first again. Its KV stays cached while there is room."""
        release(self._cache, self._allocator, request)
        request.stages.interrupt("retracted", now)
        request.output.clear()
        request.prompt_logprobs.clear()
        self._table.move(request, Event.RETRACT, with_slot=False, is_first=True)
        self._totals["retractions"] += 1
        self._effects.append(Retracted(request.key))
        self.decisions.note(now, request.rid, "retract", reason, other.rid)

    # ---- taking in a step -------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Effect]:
        """Take in the result of the oldest outstanding step; return the effects, as ``take_effects``.

        Rows of requests that have left the slot they were planned for are ignored.
        """
        chunks = self._steps.oldest(result.step)
        for chunk, found in zip(chunks, chunk_results(chunks, result), strict=True):
            if chunk.is_current:
                self._effects.append(self._commit_chunk(chunk, found))
        self._steps.end()
        return self.take_effects()

    def _commit_chunk(self, chunk: Chunk, result: ChunkResult) -> Computed | SamplingFailed:
        request = chunk.request
        request.num_computed = chunk.start + chunk.num_tokens
        request.prompt_logprobs += result.prompt_logprobs
        cache_computed(self._cache, request)
        if result.error:
            return SamplingFailed(request, result.error)
        if result.sampled is None:
            return Computed(request, chunk.num_tokens, request.num_computed // self._cache.page_size)
        first = self._first_token(request, *result.sampled)
        request.output.append(first.token)
        self._table.move(request, Event.SAMPLED, with_slot=False)
        if self._allocator.window_pages is not None:
            self._allocator.window_pages.settle(request, len(request.prompt), decodes=False)
        if first.finish:
            self.abort(request.key)
        return Computed(request, chunk.num_tokens, len(request.pages), first)

    def _first_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> FirstToken:
        """The token just sampled, or the one that was sampled before the request was retracted."""
        known = self._first.get(request.key)
        if known is not None:
            return replace(known, is_repeat=True)
        finish = finish_reason(request.sampling, self._eos, token=token, num_output=1)
        first = self._first[request.key] = FirstToken(token, logprobs, finish)
        return first

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every request is where its state says; raises ``InvariantError``."""
        self._table.check()
        for request in self._table.extending.values():
            invariant(request.num_computed <= request.num_scheduled <= request.num_tokens, "tokens are miscounted")


def _ends_here(request: Request) -> bool:
    """Whether the first token ends the output, so that the request never waits for a decode node."""
    return request.sampling.max_new_tokens == 1
