"""Plans the steps of a decode node: which requests grow by a token, and which prompts are computed here. Pure.

A request waits until its grammar is compiled, if it has one, and then for pages. Its prompt comes from a prefill node,
or is computed here in chunks: in steps that alternate with those of decode rows, or in the same steps with
``--enable-mixed-chunk``. A plan first preempts requests for a more urgent one. Then requests whose prompts have arrived
join the batch, every running request gets the page that it is about to enter, and chunks of local prompts and of
retracted requests are added. A slot is left for a local prompt that comes before a prompt that has arrived; if it
cannot begin yet, the other one joins. When pages run short, the cache is evicted first; then running requests are
retracted to the front of the queue, but never the last one that could run.

A second step may be planned before the first is committed: ``plan`` reads ``num_scheduled`` and ``num_sampling``, which
it advances itself, and a row needs no token from the host. A request is scheduled beyond a token that turns out to end
it; that row is ignored. Calls queue what follows from them as effects, for the role to take and perform.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from common.cache.kv_window import KVWindow, reuse_page
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import cache_computed, release
from common.errors import ErrorCode, RequestError
from common.finish_reason import Finish, finish_reason
from common.request import Request, RequestKey
from common.sampling_params import TokenLogprobs
from common.scheduling.deadlines import Deadlines
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import Chunk, SamplingFailed, admit_row, chunk_results
from common.scheduling.slots import OutstandingSteps
from common.scheduling.waiting_queue import WaitingQueue
from common.step_plan import PageDelta, Row, StepPlan, StepResult
from decode_node.local_prefill import LocalPrefill
from decode_node.page_reservation import PageReservations
from decode_node.prealloc_queue import DecodeLimits as DecodeLimits
from decode_node.prealloc_queue import PageGrant as PageGrant
from decode_node.prealloc_queue import PreallocQueue
from decode_node.preemption import Preemptor
from decode_node.repeated_steps import Repeatable, Repeated, growth_instants, most_with_pages, num_before_end
from decode_node.request_state import TABLE, Event, State
from decode_node.request_table import RequestTable


class Sampled(NamedTuple):
    """One more output token. With ``finish`` set, the request has ended and its pages are back."""

    request: Request
    token: int
    logprobs: TokenLogprobs | None
    finish: Finish


class Outgrown(NamedTuple):
    """A request needs more tokens than the whole pool holds.

    No other request is retracted for it, and all others fit once no other request holds pages.
    """

    request: Request


class Stopped(NamedTuple):
    """A request that is to move is in no step any more.

    Attributes:
        has_pages: its pages stay as they are until ``abort``; otherwise it has none that are complete.
    """

    request: Request
    has_pages: bool


Effect = PageGrant | Sampled | Outgrown | SamplingFailed | Stopped


class Step(NamedTuple):
    """The rows of an outstanding step: decode rows, each with its request's admission number, then chunks."""

    rows: list[Request]
    admissions: list[int]
    chunks: list[Chunk]


class DecodeScheduler:
    """Owns every request of a decode node, from submission to its end.

    Args:
        is_connected: whether a prefill node (by incarnation) can be asked to compute a request again.

    Attributes:
        grammars: grammars of the requests; the role takes and performs its effects.
    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        *,
        limits: DecodeLimits,
        ordering: RequestOrdering,
        eos_token_ids: Collection[int],
        is_connected: Callable[[str], bool],
    ) -> None:
        self.policy = ordering.policy
        self._cache = cache
        self._allocator = allocator
        self._limits = limits
        self._ordering = ordering
        self._eos = frozenset(eos_token_ids)
        self._kv_window = limits.kv_window or KVWindow(cache.page_size)
        self._capacity = self._kv_window.max_tokens(allocator.num_pages)
        self._table = RequestTable(limits.max_running, WaitingQueue(ordering, cache))
        self.grammars = self._table.grammars
        self._deadlines = Deadlines(self._table.requests)
        self._reservations = PageReservations(cache, allocator, self._kv_window)
        self._queue = PreallocQueue(self._reservations, self._table, ordering, limits=limits, is_connected=is_connected)
        self._preemptor = Preemptor(
            cache,
            allocator,
            self._table,
            queue=self._queue,
            ordering=ordering,
            is_by_priority=limits.is_retracted_by_priority,
        )
        self._local = LocalPrefill(
            cache,
            allocator,
            self._table,
            limits=limits,
            ordering=ordering,
            queue=self._queue,
            preemptor=self._preemptor,
        )
        self.decisions = self._queue.decisions
        self._totals = dict.fromkeys(
            ("budget_rows", "budget_rows_used", "resumed_tokens_computed", "prompt_tokens_computed"), 0
        )
        self._steps: OutstandingSteps[Step] = OutstandingSteps(allocator)
        self._joining: dict[RequestKey, Request] = {}  # in slots that no plan has told the executor of yet
        self._stopping: dict[RequestKey, Request] = {}  # to be taken out of the batch; no further step computes them
        self._were_chunks_alone = False
        self._effects: list[Effect] = []

    # ---- requests come and go ---------------------------------------------------------------------------------------

    def submit(self, request: Request, *, source: str | None) -> None:
        """Queue a request.

        Args:
            source: the prefill node (by incarnation) that computes its prompt; None computes it here.
        Raises:
            RequestError: the queue is full, or the request exceeds the context or the pool.
        """
        context, most = self._limits.context_length, len(request.prompt) + request.sampling.max_new_tokens
        if context is not None and most > context:
            message = f"prompt and output may have {most} tokens together, the context is {context}"
            raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="prompt")
        if request.num_decodable + 1 > self._capacity:
            raise RequestError(
                ErrorCode.POOL_TOO_SMALL,
                f"prompt and output so far have {request.num_tokens} tokens, the decode node's pool holds"
                f" {self._capacity}, further output included (--max-total-tokens)",
                param="prompt",
            )
        if request.output and self._finish(request, request.output[-1]):
            raise RequestError(ErrorCode.INVALID_REQUEST, "the output has ended and cannot be continued")
        bound = self._limits.max_queued
        if bound is not None and len(self._table.waiting) + len(self._table.compiling) >= bound:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{bound} requests wait on the decode node already")
        self._table.enter(request, source=source)
        self._deadlines.add(request)

    def grammar_compiled(self, grammar: str) -> None:
        """Queue the requests that have waited for this grammar."""
        for request in self.grammars.compiled(grammar):
            self._table.move(request, Event.COMPILED)

    def grant(self, now: float) -> None:
        """Queue a ``PageGrant`` for every waiting request that can have its pages now; call it after every event."""
        self._effects += self._queue.grant(now)

    def received(self, key: RequestKey, *, token: int) -> None:
        """The pages of a request have arrived. ``token`` is its first output token, unless it has output already."""
        request = self._table.receiving[key]
        self._reservations.settle(request)
        if not request.output:
            request.output.append(token)
        self._table.move(request, Event.RECEIVED)

    def not_received(self, key: RequestKey, now: float, arrived: Sequence[int] = ()) -> None:
        """The prefill node does not compute this retracted request again; it is computed here instead.

        Args:
            arrived: the leading granted pages that have arrived.
        """
        request = self._table.receiving[key]
        self._reservations.withdraw(request, arrived)
        self._table.move(request, Event.TRANSFER_LOST)
        self._table.local[key] = None
        self.decisions.note(now, request.rid, "resume", "here, since no prefill node does")

    def abort(self, key: RequestKey, arrived: Sequence[int] = ()) -> None:
        """Forget a request and give its pages back. Unknown keys are ignored.

        Pages granted to a transfer in progress stay with the receiver, which frees them after its fence, except for
        the first ones that have ``arrived``.
        """
        request = self._table.requests.get(key)
        if request is None:
            return
        is_receiving = key in self._table.receiving
        self._table.remove(request, Event.END)
        if is_receiving:
            self._reservations.withdraw(request, arrived)
        self._queue.short.pop(key, None)
        self._stopping.pop(key, None)
        release(self._cache, self._allocator, request)

    def stop_decoding(self, key: RequestKey) -> None:
        """Take a request out of the batch, and queue ``Stopped`` once every step that it is in is committed.

        Effects must be taken before ``grant`` is called: it could give pages to a request that has none.
        """
        self._stopping[key] = self._table.requests[key]
        self._take_out_stopping()

    def _take_out_stopping(self) -> None:
        for key, request in list(self._stopping.items()):
            if any(row is request for step in self._steps for row in step.rows):
                continue  # even if the row's result will be ignored, the step still writes to the request's last page
            del self._stopping[key]
            has_pages = (self._table.states[key], Event.MOVE) in TABLE
            if has_pages:
                self._table.move(request, Event.MOVE, with_slot=False)
            self._effects.append(Stopped(request, has_pages))

    def take_effects(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def next_deadline_at(self) -> float:
        """No deadline of a request is earlier."""
        return self._deadlines.next_at

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed; each is returned once."""
        return self._deadlines.expired(now)

    def reprioritize(self, key: RequestKey, priority: int, now: float, *, priority_class: str | None = None) -> None:
        """Change the priority of a request, and its class unless that is None. Unknown keys are ignored."""
        request = self._table.requests.get(key)
        if request is not None:
            before = (request.priority, request.priority_class)
            self.decisions.note_change(now, request.rid, before, (priority, priority_class))
            self._table.waiting.reprioritize(request, priority, priority_class)
            self._queue.changed()

    def set_paused(self, key: RequestKey, *, is_paused: bool) -> None:
        """Keep a request out of the batch from the next plan on, or let it go on. Unknown keys are ignored."""
        request = self._table.requests.get(key)
        if request is not None:
            (self._table.hold if is_paused else self._table.let_go)(request)

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def moving(self) -> Mapping[RequestKey, Request]:
        """Requests that have left the batch with their pages; see ``stop_decoding``."""
        return self._table.moving

    @property
    def requests(self) -> Mapping[RequestKey, Request]:
        """Every request, in order of arrival."""
        return self._table.requests

    @property
    def num_waiting(self) -> int:
        """Requests without pages: waiting, for a grammar or for pages, or retracted."""
        return len(self._table.compiling) + len(self._table.waiting) + len(self._table.retracted)

    def is_receiving(self, key: RequestKey) -> bool:
        """Whether a transfer of the request's pages is in progress."""
        return key in self._table.receiving

    def source(self, key: RequestKey) -> str | None:
        """The prefill node that the request's prompt comes from."""
        return self._table.sources.get(key)

    def waiting_for(self, source: str) -> list[Request]:
        """Requests that wait for a grammar or for pages, and whose prompts come from this prefill node."""
        compiling = [r for r in self._table.compiling.values() if self._table.sources.get(r.key) == source]
        return [*compiling, *self.waiting_for_pages(source)]

    def waiting_for_pages(self, source: str) -> list[Request]:
        """Requests that wait for pages, and whose prompts come from this node."""
        return [r for r in self._table.waiting.values() if self._table.sources.get(r.key) == source]

    @property
    def may_gain_pages(self) -> bool:
        """Whether requests hold pages that they will give back without moving to another node."""
        return bool(self._table.not_held(self._table.holders()))

    def totals(self) -> dict[str, float]:
        """Monotonic totals of what was scheduled and preempted."""
        return {**self._totals, **self._preemptor.totals, **self._queue.totals, **self.policy.totals()}

    # ---- planning a step --------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. Preempts requests for a more urgent one first."""
        if self._table.held:
            self._preemptor.pause_held(now)
            self.grant(now)
        elif 0 < len(self._table.requests) == len(self._table.receiving):
            self._were_chunks_alone = False  # there are only transfers in progress
            return None
        if self._preemptor.preempt_for_first(now):
            self.grant(now)
        grown, later = self._join_and_grow(now)
        is_decodes_turn = self._were_chunks_alone and bool(self._rows())
        chunks, begun = ([], []) if is_decodes_turn else self._local.extend(now, later)
        if later and not is_decodes_turn:
            grown += self._join_and_grow(now, keeps_slots=False)[0]
        chunks = [chunk for chunk in chunks if chunk.request.slot >= 0]  # some lost their slot to later ones
        begun = [request for request in begun if request.slot >= 0]
        self._were_chunks_alone = bool(chunks) and not self._limits.is_mixed
        rows = [] if self._were_chunks_alone else self._rows()
        if not rows and not chunks:
            return None
        return self._step(rows, chunks, begun, grown)

    def _step(
        self, rows: list[Request], chunks: list[Chunk], begun: Sequence[Request], grown: Sequence[Request]
    ) -> StepPlan:
        """Number the step and count its tokens as scheduled.

        Args:
            begun: requests whose first chunk is among ``chunks``.
            grown: running requests that have a page more.
        """
        joining = [request for key, request in self._joining.items() if self._table.running.get(key) is request]
        self._joining.clear()
        fresh = {request.key for request in joining}
        grown = [request for request in grown if request.slot >= 0 and request.key not in fresh]
        admissions: list[int] = []
        plan_rows = [Row(r.slot, r.num_scheduled, None, True) for r in rows] + [chunk.to_row() for chunk in chunks]
        for request in rows:
            request.num_scheduled += 1
            request.num_sampling += 1
            admissions.append(request.admission)
        self._totals["budget_rows"] += self._limits.max_running
        self._totals["budget_rows_used"] += len(rows)
        for chunk in chunks:
            name = "resumed_tokens_computed" if chunk.request.output else "prompt_tokens_computed"
            self._totals[name] += chunk.num_tokens
        return StepPlan(
            step=self._steps.begin(Step(rows, admissions, chunks)),
            admits=tuple([admit_row(r, last_token=r.output[-1]) for r in joining] + [admit_row(r) for r in begun]),
            pages=tuple(
                [PageDelta(r.slot, 0, tuple(r.pages)) for r in [*joining, *begun]]
                + [PageDelta(r.slot, len(r.pages) - 1, (r.pages[-1],)) for r in grown]
            ),
            rows=tuple(plan_rows),
            windows=self._allocator.window_deltas([*joining, *begun], [*rows, *(chunk.request for chunk in chunks)]),
        )

    def _join_and_grow(self, now: float, *, keeps_slots: bool = True) -> tuple[list[Request], Sequence[Request]]:
        """Fill the slots, and give every running request room for a token.

        A retraction for lack of pages frees a slot, which may be the only one: another request joins then.

        Returns:
            The requests that have a page more, and what ``_join_batch`` returns.
        """
        totals = self._preemptor.totals
        grown: list[Request] = []
        while True:
            later = self._join_batch(now, keeps_slots=keeps_slots)
            num_retractions = totals["retractions"]
            grown += self._grow(now)
            if totals["retractions"] == num_retractions:
                return grown, later

    def _join_batch(self, now: float, *, keeps_slots: bool) -> Sequence[Request]:
        """Give slots to requests that hold all they need: paused ones, and those whose prompts have arrived.

        Args:
            keeps_slots: slots stay free for earlier requests that are computed here.
        Returns:
            Requests that get no slot yet, since earlier ones are computed here.
        """
        able = self._table.not_held([*self._table.paused.values(), *self._table.ready.values()])
        later: list[Request] = []
        for request in self._ordering.by_priority(able):
            if not self._preemptor.can_have_slot(request, now):
                break
            if keeps_slots and self._queue.is_slot_for_others(request):
                later.append(request)
                continue
            self._preemptor.free_slot(request, now)
            if self._table.states[request.key] is State.PAUSED:
                self.decisions.note(now, request.rid, "resume", "in a row again, after {} tokens", request.num_tokens)
            self._table.move(request, Event.JOIN_BATCH, with_slot=True)
            request.placed_at = now
            request.stages.resume(now)
            self._joining[request.key] = request
        return later

    # ---- decode rows ------------------------------------------------------------------------------------------------

    def _growing(self) -> list[Request]:
        """Running requests that may sample one more token after the outstanding steps."""
        running = list(self._table.running.values())
        if self._stopping:
            running = [request for request in running if request.key not in self._stopping]
        if not self._steps:
            return running  # a request at its limit has ended
        most = self._capacity
        return [r for r in running if r.num_left > r.num_sampling and r.num_scheduled < most]

    def _rows(self) -> list[Request]:
        """The decode rows of the next step: growing requests whose pages have room for a token, most urgent first."""
        page_size = self._cache.page_size
        growing = self._ordering.by_effective_priority(self._growing())
        return [r for r in growing if len(r.pages) * page_size > r.num_scheduled]

    def _grow(self, now: float) -> list[Request]:
        """Give one page to every running request whose last page is full. Retracts requests where pages run short.

        A request first uses again a page of its own that no further token sees. It gets no page now if all other pages
        are being received or extended.
        """
        grown = []
        page_size = self._cache.page_size
        full = [r for r in self._growing() if len(r.pages) * page_size <= r.num_scheduled]
        for request in self._ordering.by_effective_priority(full):
            while request.key in self._table.running and len(request.pages) * page_size <= request.num_scheduled:
                if reuse_page(self._kv_window, request):
                    grown.append(request)
                elif pages := self._allocate_page():
                    request.pages += pages
                    request.own += pages
                    if self._allocator.window_pages is not None:
                        # A pause takes back what is scheduled and not computed.
                        self._allocator.window_pages.advance(request, request.num_computed, request.num_scheduled + 1)
                    grown.append(request)
                elif victim := self._preemptor.victim():
                    num_pages = len(set(victim.pages))  # a page of a ring is in the table several times
                    self._preemptor.retract(victim, now, "a running request needs its {} pages", num_pages)
                else:
                    break
        return grown

    def _allocate_page(self) -> list[int] | None:
        if not self._allocator.num_for_steps:
            self._cache.evict(1)
        return self._allocator.alloc_for_step(1)

    def chunks(self, plan: StepPlan) -> Sequence[Chunk]:
        """The chunks of the plan that was made last."""
        return self._steps.newest(plan.step).chunks

    # ---- taking in a step -------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Effect]:
        """Take in the result of the oldest outstanding step; return the effects, as ``take_effects``.

        Rows of requests that have left the slot they were planned for are ignored.
        """
        step = self._steps.oldest(result.step)
        sampled = [*self._commit_rows(step, result), *self._commit_chunks(step, result)]
        self._ordering.decoded([one.request for one in sampled])
        capacity = self._capacity
        for one in sampled:
            self._effects.append(one)
            request = one.request
            if one.finish:
                self.abort(request.key)
            elif len(request.prompt) + len(request.output) > capacity:
                self._effects.append(Outgrown(request))
        self._steps.end()
        self._take_out_stopping()
        return self.take_effects()

    def _commit_rows(self, step: Step, result: StepResult) -> list[Sampled]:
        """Count the tokens of decode rows as computed."""
        sampled: list[Sampled] = []
        logprobs = result.logprobs or (None,) * len(result.tokens)
        errors = result.errors or ("",) * len(result.tokens)
        for request, admission, token, logprob, error in zip(
            step.rows, step.admissions, result.tokens, logprobs, errors, strict=False
        ):
            if request.admission == admission:
                request.num_computed += 1
                request.num_sampling -= 1
                if error:
                    self._effects.append(SamplingFailed(request, error))
                else:
                    sampled.append(self._sampled(request, token, logprob))
        return sampled

    def _commit_chunks(self, step: Step, result: StepResult) -> list[Sampled]:
        """Cache what chunks have computed; a request whose last chunk this was is decoded from now on."""
        sampled: list[Sampled] = []
        results = chunk_results(step.chunks, result, num_before=len(step.rows))
        for chunk, found in zip(step.chunks, results, strict=True):
            if not chunk.is_current:
                continue
            request = chunk.request
            request.num_computed = chunk.start + chunk.num_tokens
            request.prompt_logprobs += found.prompt_logprobs
            cache_computed(self._cache, request)
            if found.error:
                self._effects.append(SamplingFailed(request, found.error))
            elif found.sampled is not None:
                self._table.move(request, Event.SAMPLED)
                if self._allocator.window_pages is not None:
                    self._allocator.window_pages.settle(request, request.num_computed, decodes=True)
                sampled.append(self._sampled(request, *found.sampled))
        return sampled

    def _sampled(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> Sampled:
        request.output.append(token)
        return Sampled(request, token, logprobs, self._finish(request, token))

    def _finish(self, request: Request, token: int) -> Finish:
        """Why the output ends with its last token; empty if it goes on."""
        return finish_reason(request.sampling, self._eos, token=token, num_output=len(request.output))

    # ---- repeated steps ---------------------------------------------------------------------------------------------

    def repeatable(self, tokens_of: Callable[[Request], Sequence[int]]) -> Repeatable | None:
        """How often the step planned last can be committed and planned again, if the node hears nothing meanwhile,
        with no change but one more token in each row; see ``repeat``. None: not once.

        Args:
            tokens_of: the next tokens of a request, as far as they are known.
        """
        if len(self._steps) != 1 or self._joining or self._stopping or self._effects or self._queue.short:
            return None
        if self._kv_window.is_bounded or self._allocator.window_pages is not None:
            return None  # ``repeat`` knows nothing of pages that are used again
        (step,) = self._steps
        rows, table = step.rows, self._table
        if not rows or step.chunks or len(rows) != len(table.running) or not table.is_settled:
            return None
        if (table.ready or table.paused) and (table.num_free_slots or self._ordering.rules.is_enabled):
            return None
        count = min([num_before_end(request, tokens_of(request), self._eos) for request in rows])
        count = min(count, self._capacity - max([request.num_tokens for request in rows]))
        num_pages = self._allocator.num_free + self._cache.num_evictable_pages
        count = most_with_pages(rows, count, self._cache.page_size, num_pages) if count > 0 else 0
        return Repeatable(rows, count) if count > 0 else None

    def repeat(self, tokens: Sequence[Sequence[int]]) -> Repeated:
        """Commit and plan the outstanding step as often as there are tokens, at most as ``repeatable`` says.

        Args:
            tokens: for each row, one token per repetition.
        """
        (step,) = self._steps
        rows, count = step.rows, len(tokens[0])
        self._steps.end()
        if self._ordering.is_charging:
            for number in range(count):
                for request, new in zip(rows, tokens, strict=True):
                    request.output.append(new[number])
                self._ordering.decoded(rows)
        else:
            for request, new in zip(rows, tokens, strict=True):
                request.output += new
        grown: list[tuple[int, int]] = []
        for place, request in enumerate(rows):
            grown += [(number, place) for number in growth_instants(request, count, self._cache.page_size)]
        grown.sort()
        deltas: list[PageDelta] = []
        for (_, place), page in zip(grown, self._allocate_pages(len(grown)), strict=True):
            request = rows[place]
            deltas.append(PageDelta(request.slot, len(request.pages), (page,)))
            request.pages.append(page)
            request.own.append(page)
        for request in rows:
            request.num_computed += count
            request.num_scheduled += count
        self._totals["budget_rows"] += count * self._limits.max_running
        self._totals["budget_rows_used"] += count * len(rows)
        plan = StepPlan(
            step=self._steps.begin_again(step, count),
            admits=(),
            pages=tuple(deltas),
            rows=tuple([Row(request.slot, request.num_scheduled - 1, None, True) for request in rows]),
        )
        return Repeated(plan, [number for number, _ in grown])

    def _allocate_pages(self, count: int) -> list[int]:
        """Allocate the same pages as ``count`` calls of ``_allocate_page``, but evict those of one leaf at once."""
        num_free = min(count, self._allocator.num_free)
        pages = self._allocator.alloc(num_free, Owner.REQUEST) or []
        while len(pages) < count and (num_evicted := self._cache.evict_from_leaf(count - len(pages))):
            pages += self._allocator.alloc(num_evicted, Owner.REQUEST) or []
        return pages

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every request is where its state says and that reservations and transfers agree.

        Raises:
            InvariantError: it is not so.
        """
        self._table.check()
        self._reservations.check(list(self._table.receiving.values()))
