"""The prefill role: joins the scheduler and the sender.

The scheduler decides what is computed. The sender decides when a page may leave. The first token of a request and every
error go straight to the gateway.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from common.cache.radix_cache import RadixCache
from common.errors import RECOVERABLE, ErrorCode, RequestError
from common.node.gateways.outbox import Outbox
from common.node.monitoring.request_stats import ABORT, ERROR, RequestStats
from common.node.planned_chunks import PlannedChunks
from common.node.request_messages import (
    check_adapter,
    check_generate,
    check_tokens,
    decisions_message,
    first_token_message,
    is_recomputed,
    request_to_prefill,
)
from common.node.role import DEADLINE_GRACE_S, Load, check_pages
from common.request import Request, RequestKey
from common.scheduling.grammar_queue import TIMEOUT_MESSAGE
from common.scheduling.prefill_adder import SamplingFailed
from common.step_plan import StepPlan, StepResult
from common.wire.messages import (
    MAX_TEXT,
    Abort,
    CloseReason,
    Connect,
    Failed,
    Flush,
    Flushed,
    Generate,
    GetDecisions,
    Message,
    PairState,
    PrefillDone,
    Reprioritize,
    Resume,
    Spans,
)
from kv_transfer.send.sender import Sender
from prefill_node.scheduler import Computed, Effect, PrefillScheduler, Retracted

#: Monotonic totals of the role itself. ``prompt_tokens`` counts the tokens of prompts whose first token was sampled
#: here, and ``prompt_tokens_cached`` how many of these were in the cache. ``overlapped_transfers`` counts the
#: ``chunked_requests`` whose first page was delivered before the last chunk began. ``resumes`` counts requests whose
#: tokens are only computed again; they are not in ``requests``. ``interrupted_requests`` counts requests that the
#: gateway continues after their attempt has ended here.
COUNTERS = (
    "requests",
    "failed_requests",
    "interrupted_requests",
    "steps",
    "prompt_tokens",
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "output_tokens",
    "chunked_requests",
    "overlapped_transfers",
    "resumes",
)


class PrefillRole:
    """Everything a prefill node decides. See ``common.node.role.NodeRole`` for the calls.

    Args:
        vocab_size: token ids outside of it are refused.
        adapters: ids of the LoRA adapters that requests may have.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        sender: Sender,
        *,
        cache: RadixCache,
        vocab_size: int,
        adapters: Container[str],
    ) -> None:
        self.outbox = Outbox()
        self.stats = RequestStats()
        self._scheduler = scheduler
        self._sender = sender
        self._cache = cache
        self._allocator = cache.allocator
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._resumed: dict[RequestKey, str] = {}  # with the decode node that asked; the gateway hears nothing
        self._alone: dict[RequestKey, None] = {}  # without a decode node: they end with their first token
        self._totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._planned_chunks = PlannedChunks()
        self._rank = scheduler.rank if scheduler.has_priorities else None

    # ---- events ---------------------------------------------------------------------------------------------------

    def on_gateway(self, message: Message, now: float) -> None:
        if isinstance(message, Generate):
            for sample in message.samples():
                self._generate(sample, now)
        elif isinstance(message, Abort):
            self._abort(message, now)
        elif isinstance(message, Reprioritize):
            self._reprioritize(message, now)
        elif isinstance(message, Flush):
            self.outbox.gateway.append(Flushed(self._cache.clear(), message.number))
        elif isinstance(message, GetDecisions):
            self.outbox.gateway.append(decisions_message(self._scheduler.decisions, message, now))
        self._settle()

    def on_peer(self, peer: str, message: Message, now: float) -> None:
        if isinstance(message, Connect):
            if not (message.resumes or message.beside):
                self._end_resumed(peer)
            self._sender.on_message(peer, message, now)
        elif isinstance(message, Resume):
            self._resume(peer, message, now)
        elif isinstance(message, Reprioritize):
            self._reprioritize(message, now)
        else:
            self._sender.on_message(peer, message, now)
        self._settle()

    def peer_lost(self, peer: str, now: float) -> None:
        self._sender.peer_lost(peer)
        self._settle()

    def grammar_compiled(self, grammar: str, now: float) -> None:
        self._scheduler.grammar_compiled(grammar)
        self._settle()

    def grammar_failed(self, grammar: str, message: str, now: float) -> None:
        for request in self._scheduler.grammars.waiting_for(grammar):
            self._fail(request, ErrorCode.INVALID_REQUEST, message, now)
        self._settle()

    def plan(self, now: float) -> StepPlan | None:
        plan = self._scheduler.plan(now)
        self._perform(self._scheduler.take_effects(), now)
        if plan is not None:
            self._planned_chunks.planned(self._scheduler.chunks(plan), now)
            self._count_overlap(plan)
        return plan

    def commit(self, result: StepResult, now: float) -> None:
        self._totals["steps"] += 1
        self._planned_chunks.committed(now)
        self._perform(self._scheduler.commit(result), now)
        self._settle()

    def tick(self, now: float) -> bool:
        for request in self._scheduler.expired(now - DEADLINE_GRACE_S):
            self._fail(request, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed on the prefill node", now)
        for request in self._scheduler.grammars.overdue(now):
            self._fail(request, ErrorCode.INVALID_REQUEST, TIMEOUT_MESSAGE, now)
        more = self._sender.pump(now, rank=self._rank)
        self._settle()
        return more

    def stop(self, message: str, now: float, code: ErrorCode = ErrorCode.SHUTTING_DOWN) -> None:
        for request in list(self._scheduler.requests.values()):
            self._fail(request, code, message, now)
        self._settle()

    # ---- effects ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Send what the sender has queued, and give back the pages that it no longer needs."""
        messages, released = self._sender.take()
        self.outbox.peers.extend(messages)
        for release in released:
            was_closing = self._scheduler.is_closing(release.key)
            self._scheduler.release(release.key)
            is_resumed = self._resumed.pop(release.key, None) is not None
            if not (release.ok or was_closing or is_resumed or release.is_told):
                self._answer_failure(release.key, release.code, release.reason)
        self.outbox.grammars += self._scheduler.grammars.take_effects()

    def _perform(self, effects: Sequence[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Retracted):
                if effect.key not in self._alone:
                    self._sender.retract(effect.key)
            elif isinstance(effect, SamplingFailed):
                self._fail(effect.request, ErrorCode.INVALID_REQUEST, effect.message, now)
            else:
                self._on_computed(effect, now)

    def _generate(self, message: Generate, now: float) -> None:
        request = request_to_prefill(message, now)
        if request.key in self._scheduler.requests:
            return  # a repetition
        self._totals["resumes" if message.output else "requests"] += 1
        try:
            request.packed = check_generate(message, self._vocab_size, self._adapters)
            if message.decode is None and message.sampling.max_new_tokens > 1:
                raise RequestError(ErrorCode.INVALID_REQUEST, "without a decode node there is only a first token")
            self._scheduler.submit(request)
        except RequestError as error:
            if message.decode is not None:
                self._sender.reject(request.key, message.decode.incarnation, error.message, error.code)
            self._answer_failure(request.key, error.code, error.message, is_alone=message.decode is None)
            return
        if message.decode is None:
            self._alone[request.key] = None
        else:
            self._sender.open(request.key, message.decode.incarnation)

    def _resume(self, peer: str, message: Resume, now: float) -> None:
        """Compute again what a decode node has retracted. Failures are reported to it, not to the gateway."""
        request = request_to_prefill(message, now)
        if request.key in self._scheduler.requests:
            return
        try:
            request.packed = check_tokens(message.prompt, self._vocab_size)
            check_adapter(message.adapter, self._adapters)
            self._scheduler.submit(request, is_resumed=True)
        except RequestError as error:
            self._sender.reject(request.key, peer, error.message, error.code)
            return
        self._totals["resumes"] += 1
        self._resumed[request.key] = peer
        self._sender.open(request.key, peer)

    def _reprioritize(self, message: Reprioritize, now: float) -> None:
        key = (message.rid, message.attempt)
        self._scheduler.reprioritize(key, message.priority, now, priority_class=message.priority_class)

    def _on_computed(self, computed: Computed, now: float) -> None:
        """Let pages leave. After the last chunk, answer the gateway and hand the request over."""
        request, first = computed.request, computed.first
        self._totals["prompt_tokens_computed"] += computed.num_tokens
        if first is None:
            if not request.is_wrapped:  # otherwise later chunks take the pages of this one
                self._sender.computed(request.key, self._to_transfer(request, computed.num_pages))
            return
        if not first.is_repeat and not is_recomputed(request):
            self._totals["output_tokens"] += 1
            self._totals["prompt_tokens"] += len(request.prompt)
            self._totals["prompt_tokens_cached"] += request.num_cached
            self.stats.first_token(request, now)
            if first.finish:
                self.stats.finished(request, first.finish, now)
            self._send_stages(request, now)
            self.outbox.gateway.append(first_token_message(request, first.token, first.logprobs, first.finish))
        if first.finish:
            self._close(request.key, "finished")
        else:
            length = self._allocator.transfer_length(len(request.prompt))
            done = PrefillDone(request.rid, request.attempt, length, first.token)
            self._sender.finish(request.key, done, self._to_transfer(request, len(request.pages)))

    def _to_transfer(self, request: Request, num_pages: int) -> Sequence[int]:
        """What a transfer moves of the first pages of a prompt."""
        return self._allocator.to_transfer(request.pages[:num_pages], 0, len(request.prompt))

    def _count_overlap(self, plan: StepPlan) -> None:
        for chunk in self._scheduler.chunks(plan):
            request = chunk.request
            if chunk.is_last and chunk.start > request.num_tokens - request.num_to_compute:
                self._totals["chunked_requests"] += 1
                self._totals["overlapped_transfers"] += self._sender.has_delivered(request.key)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _abort(self, message: Abort, now: float) -> None:
        """End an attempt that the gateway no longer needs."""
        key = (message.rid, message.attempt)
        request = self._scheduler.requests.get(key)
        if request is None or self._scheduler.is_closing(key):
            return
        self._report_stages(request, now)
        if message.reason == "continued":
            self._totals["interrupted_requests"] += 1
            self._end(key, "aborted", "another attempt goes on with the request", ErrorCode.TAKEN_OVER)
        else:
            if key in self._alone:
                self.stats.ended(ABORT)
            self._end(key, "aborted", "the gateway ended it")

    def _end(
        self, key: RequestKey, reason: CloseReason, message: str, code: ErrorCode = ErrorCode.TRANSFER_FAILED
    ) -> bool:
        """Stop computing and sending a request. False if it is unknown or has ended already."""
        if not self._scheduler.abort(key):
            return False
        self._close(key, reason, message, code)
        return True

    def _close(
        self, key: RequestKey, reason: CloseReason, message: str = "", code: ErrorCode = ErrorCode.TRANSFER_FAILED
    ) -> None:
        """End the transfer of a request, which gives its pages back; without a decode node they are free at once."""
        if key in self._alone:
            del self._alone[key]
            self._scheduler.release(key)
        else:
            self._sender.abort(key, reason, message, code)

    def _end_resumed(self, peer: str) -> None:
        """End what a decode node has asked for over an earlier connection: it computes these requests itself by now.

        If that connection broke between ``Resume`` and ``Grant``, nothing else ends them.
        """
        for key in [key for key, decode in self._resumed.items() if decode == peer]:
            self._end(key, "failed", "the decode node has connected again")

    def _fail(self, request: Request, code: ErrorCode, message: str, now: float) -> None:
        is_alone = request.key in self._alone
        if self._end(request.key, "failed", message, code) and request.key not in self._resumed:
            self._report_stages(request, now)
            self._answer_failure(request.key, code, message, is_alone=is_alone)

    def _report_stages(self, request: Request, now: float) -> None:
        """Tell the gateway where a request that ends before its first token has spent its time."""
        if not self._scheduler.has_first_token(request.key) and not is_recomputed(request):
            self._send_stages(request, now)

    def _send_stages(self, request: Request, now: float) -> None:
        spans = request.stages.take_prefill(request.received_at, now)
        self.outbox.gateway.append(Spans(*request.key, tuple(spans)))

    def _answer_failure(self, key: RequestKey, code: ErrorCode, message: str, *, is_alone: bool = False) -> None:
        self._totals["interrupted_requests" if code in RECOVERABLE else "failed_requests"] += 1
        if is_alone and code not in RECOVERABLE:
            self.stats.ended(ERROR)
        self.outbox.gateway.append(Failed(*key, code, message[:MAX_TEXT]))

    # ---- state ------------------------------------------------------------------------------------------------------

    def files(self) -> Sequence[int]:
        return self._sender.files()

    def transports(self) -> Sequence[str]:
        return self._sender.transports()

    def pairs(self) -> Sequence[PairState]:
        return self._sender.pairs()

    def peers(self) -> Sequence[str]:
        return self._sender.peers()

    def requests(self) -> Mapping[RequestKey, Request]:
        return self._scheduler.requests

    def load(self) -> Load:
        return Load.of(self._scheduler.requests, self._scheduler.num_waiting, self._cache)

    def gauges(self) -> dict[str, float]:
        evictable = {"evictable_pages": float(self._cache.num_evictable_pages)}
        return {**evictable, **self._allocator.gauges(), **self._sender.gauges()}

    def counters(self) -> dict[str, float]:
        return {**self._totals, **self._scheduler.totals(), **self._sender.counters()}

    def check(self) -> None:
        check_pages(self._allocator, self._cache, self._scheduler.requests.values())
        self._scheduler.check()
        self._sender.check()
