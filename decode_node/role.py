"""The decode role: joins the scheduler, the receiver, and the requests that move to other decode nodes.

The scheduler decides which request gets pages and which runs. The receiver tells when a prompt has arrived and when the
pages of a broken transfer are safe again. Tokens and errors go straight to the gateway.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from common.cache.page_allocator import Owner
from common.cache.radix_cache import RadixCache
from common.errors import RECOVERABLE, ErrorCode, RequestError
from common.node.gateways.outbox import Outbox
from common.node.monitoring.request_stats import ABORT, ERROR, RequestStats
from common.node.planned_chunks import PlannedChunks
from common.node.request_messages import (
    check_generate,
    decisions_message,
    request_to_decode,
)
from common.node.role import DEADLINE_GRACE_S, Load, check_pages
from common.request import Request, RequestKey
from common.scheduling.grammar_queue import TIMEOUT_MESSAGE
from common.scheduling.prefill_adder import SamplingFailed
from common.step_plan import StepPlan, StepResult
from common.wire.messages import (
    MAX_TEXT,
    RESUMED,
    Abort,
    Closed,
    Failed,
    Flush,
    Flushed,
    FromPrefill,
    Generate,
    GetDecisions,
    Message,
    Move,
    Moved,
    PairState,
    Peer,
    PrefillNodes,
    Reprioritize,
    Resume,
    SetPaused,
)
from decode_node.moves import IN_CIRCLE, OutgoingMoves
from decode_node.prefill_peers import PrefillPeers
from decode_node.repeated_steps import Repeatable, Repeated
from decode_node.scheduler import DecodeScheduler, Effect, PageGrant, Sampled, Stopped
from decode_node.token_output import TokenOutput
from kv_transfer.events import Completed, Event, Finished, PairLost
from kv_transfer.receive.receiver import Receiver
from kv_transfer.transfer_stats import sums

#: Monotonic totals of the role itself. ``granted_tokens`` counts the tokens of prompts that a prefill node computed,
#: ``pages_cached`` their pages that were in this node's cache and therefore not granted. ``continued_requests`` counts
#: the ``requests`` that continue the output of an earlier attempt, ``interrupted_requests`` the requests that the
#: gateway continues after their attempt has ended here.
COUNTERS = (
    "requests",
    "continued_requests",
    "failed_requests",
    "interrupted_requests",
    "steps",
    "transfers",
    "granted_tokens",
    "pages_cached",
    "output_tokens",
)

ADDRESS_TAKEN = "the prefill node has ended: another process answers at its address"
#: Ends of transfers that the gateway need not be told: the prefill node is full, and has said so, or another attempt of
#: the request follows.
KNOWN_TO_GATEWAY = (ErrorCode.QUEUE_FULL, ErrorCode.TAKEN_OVER)


class DecodeRole:
    """Everything a decode node decides. See ``common.node.role.NodeRole`` for the calls.

    Args:
        moves: requests that leave for other decode nodes.
        vocab_size: token ids outside of it are refused.
        adapters: ids of the LoRA adapters that requests may have.
        stream_interval: output tokens per message to the gateway, after the first.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        receiver: Receiver,
        moves: OutgoingMoves,
        *,
        cache: RadixCache,
        vocab_size: int,
        adapters: Container[str],
        stream_interval: int,
    ) -> None:
        self.outbox = Outbox()
        self.stats = RequestStats()
        self._scheduler = scheduler
        self._receiver = receiver
        self._moves = moves
        self._cache = cache
        self._allocator = cache.allocator
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._peers = PrefillPeers()
        self._transfers: dict[RequestKey, RequestKey] = {}  # request -> transfer, where pages are sent again
        self._owners: dict[RequestKey, RequestKey] = {}  # transfer -> request
        self._totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._output = TokenOutput(self.outbox, stream_interval)
        self._planned_chunks = PlannedChunks()

    # ---- events -----------------------------------------------------------------------------------------------------

    def on_gateway(self, message: Message, now: float) -> None:
        if isinstance(message, Generate):
            for sample in message.samples():
                self._generate(sample, now)
        elif isinstance(message, Abort):
            self._abort(message, now)
        elif isinstance(message, Move):
            self._stop_to_move(message, now)
        elif isinstance(message, Reprioritize):
            self._reprioritize(message, now)
        elif isinstance(message, SetPaused):
            self._scheduler.set_paused((message.rid, message.attempt), is_paused=message.is_paused)
        elif isinstance(message, Flush):
            self.outbox.gateway.append(Flushed(self._cache.clear(), message.number))
        elif isinstance(message, PrefillNodes):
            self._peers.name(message.nodes, now)
            self._dial_prefill_nodes(now)
        elif isinstance(message, GetDecisions):
            self.outbox.gateway.append(decisions_message(self._scheduler.decisions, message, now))
        self._settle(now)

    def on_peer(self, peer: str, message: Message, now: float) -> None:
        if isinstance(message, FromPrefill):
            self._on_source(peer, message, now)
        elif (answer := self._moves.on_peer(peer, message, now)) is not None:
            self.outbox.peers.append((peer, answer))
        self._settle(now)

    def _on_source(self, peer: str, message: Message, now: float) -> None:
        """Handle a message of a node that pages come from."""
        for ended in self._peers.answered(peer, now):
            self._drop_peer(ended, ADDRESS_TAKEN, now)
        self._receiver.on_message(peer, message, now)
        if isinstance(message, Closed):
            key = (message.rid, message.attempt)
            if any(request.key == key for request in self._scheduler.waiting_for(peer)):
                self._forget(key)  # it ended before it had pages here; the gateway has heard of it
                if message.reason == "failed" or message.code is ErrorCode.TAKEN_OVER:
                    self._count_failure(message.code)
                elif message.reason == "aborted":
                    self._count_failure(ErrorCode.ABORTED)

    def peer_lost(self, peer: str, now: float) -> None:
        self._drop_peer(peer, "the prefill node was lost", now)
        self._moves.peer_lost(peer)
        self._settle(now)

    def grammar_compiled(self, grammar: str, now: float) -> None:
        self._scheduler.grammar_compiled(grammar)
        self._settle(now)

    def grammar_failed(self, grammar: str, message: str, now: float) -> None:
        for request in self._scheduler.grammars.waiting_for(grammar):
            self._fail(request, ErrorCode.INVALID_REQUEST, message, now)
        self._settle(now)

    def plan(self, now: float) -> StepPlan | None:
        plan = self._scheduler.plan(now)
        if plan is not None:
            self._planned_chunks.planned(self._scheduler.chunks(plan), now)
        self._output.flush_interrupted(now)
        if effects := self._scheduler.take_effects():
            self._perform(effects, now)
            self._settle(now)
        return plan

    def commit(self, result: StepResult, now: float) -> None:
        self._totals["steps"] += 1
        self._planned_chunks.committed(now)
        self._perform(self._scheduler.commit(result), now)
        self._settle(now)

    def tick(self, now: float) -> bool:
        for request in self._scheduler.expired(now - DEADLINE_GRACE_S):
            self._fail(request, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed on the decode node", now)
        for request in self._scheduler.grammars.overdue(now):
            self._fail(request, ErrorCode.INVALID_REQUEST, TIMEOUT_MESSAGE, now)
        if now >= self._peers.due_at:
            for peer in self._peers.overdue(now):
                self._drop_peer(peer, "the prefill node did not answer", now)
            self._dial_prefill_nodes(now)
        self._receiver.poll(now)
        more = self._moves.pump(now)
        self._settle(now)
        return more

    # ---- repeated steps ---------------------------------------------------------------------------------------------

    def repeatable(self, tokens_of: Callable[[Request], Sequence[int]]) -> Repeatable | None:
        """Like ``DecodeScheduler.repeatable``, where each step sends one token of every row and nothing else."""
        if not self._output.sends_each_token or self._moves.is_open:
            return None
        found = self._scheduler.repeatable(tokens_of)
        return found if found and all(request.stages.decoding_from for request in found.rows) else None

    def leaves_steps_alone(self, message: Message) -> bool:
        """Whether a message of a prefill node certainly changes nothing that a step depends on."""
        return not self._receiver.may_end(message)

    @property
    def due_at(self) -> float:
        """Before this instant, ``tick`` does nothing unless a transport has news or another event comes first."""
        return min(self._scheduler.next_deadline_at, self._peers.due_at, self._receiver.due_at)

    def repeat(self, rows: Sequence[Request], tokens: Sequence[Sequence[int]], instants: Sequence[float]) -> Repeated:
        """Commit and plan the outstanding step at each of these instants; the caller sends the tokens.

        Args:
            rows: its requests, as ``repeatable`` has returned them.
            tokens: for each row, one token per instant.
        """
        self._totals["steps"] += len(instants)
        self._totals["output_tokens"] += len(instants) * len(rows)
        self.stats.sampled_in_steps(rows, instants)
        return self._scheduler.repeat(tokens)

    # ---- the end of the process -------------------------------------------------------------------------------------

    def stop(self, message: str, now: float, code: ErrorCode = ErrorCode.SHUTTING_DOWN) -> None:
        for request in list(self._scheduler.requests.values()):
            self._fail(request, code, message, now)
        self._take_moved()
        messages, _ = self._receiver.take()
        self.outbox.peers.extend(messages)

    # ---- effects ----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Perform what the receiver and the scheduler have queued, until neither has anything left."""
        while True:
            messages, events = self._receiver.take()
            self.outbox.peers.extend(messages)
            for event in events:
                self._on_event(event, now)
            has_released = self._take_moved()
            self._scheduler.grant(now)
            if effects := self._scheduler.take_effects():
                self._perform(effects, now)
            has_refused = self._refuse_opposite_moves(now)
            if not (events or effects or has_released or has_refused):
                break
        self.outbox.grammars += self._scheduler.grammars.take_effects()

    def _perform(self, effects: Sequence[Effect], now: float) -> None:
        sampled = [effect.request for effect in effects if isinstance(effect, Sampled)]
        if sampled:
            self._totals["output_tokens"] += len(sampled)
            self.stats.sampled(sampled, now)
        for effect in effects:
            if isinstance(effect, Sampled):
                self._output.add(effect, now)
                if effect.finish:
                    self.stats.finished(effect.request, effect.finish, now)
                    self._forget(effect.request.key)
            elif isinstance(effect, PageGrant):
                self._begin_transfer(effect, now)
            elif isinstance(effect, Stopped):
                self._move(effect, now)
            elif isinstance(effect, SamplingFailed):
                self._fail(effect.request, ErrorCode.INVALID_REQUEST, effect.message, now)
            else:
                too_many = f"{effect.request.num_tokens} tokens and one more (--max-total-tokens of the decode node)"
                message = f"the pool of {self._allocator.num_pages} pages cannot hold {too_many}"
                self._fail(effect.request, ErrorCode.OUT_OF_PAGES, message, now)

    def _generate(self, message: Generate, now: float) -> None:
        request = request_to_decode(message, now)
        if request.key in self._scheduler.requests:
            return  # a repetition
        self._totals["requests"] += 1
        try:
            request.packed = check_generate(message, self._vocab_size, self._adapters)
            source = None if message.prefill is None else message.prefill.incarnation
            self._scheduler.submit(request, source=source)
        except RequestError as error:
            self._answer_failure(request.key, error.code, error.message)
            return
        if message.output:
            self._totals["continued_requests"] += 1
            self.stats.handed_off(request, now)
        if message.prefill is not None:
            self._dial(message.prefill, now)
            if self._peers.has_ended(message.prefill):
                self._fail(request, ErrorCode.NODE_LOST, ADDRESS_TAKEN, now)

    def _dial(self, peer: Peer, now: float) -> None:
        if self._peers.dial(peer, now):
            self.outbox.dial.append(peer)
            connect = self._receiver.connect(peer.incarnation, peer.name, peer.num_ranks)
            self.outbox.peers.append((peer.incarnation, connect))

    def _dial_prefill_nodes(self, now: float) -> None:
        """Connect to the prefill nodes that the gateway names, and hang up from others that nothing uses any more."""
        for peer in self._peers.due(now):
            self._dial(peer, now)
        for incarnation in self._peers.unnamed(now):
            if not self._receiver.has_transfers(incarnation) and not self._scheduler.waiting_for(incarnation):
                self._drop_peer(incarnation, "the gateway no longer knows the prefill node", now)

    def _drop_peer(self, peer: str, why: str, now: float) -> None:
        """Let go of a prefill node, and fail the requests that wait for it."""
        if not self._peers.lost(peer, why, now):
            return
        self._receiver.peer_lost(peer)
        for request in self._scheduler.waiting_for(peer):
            self._fail(request, ErrorCode.NODE_LOST, why, now)
        self.outbox.hang_up.append(peer)

    # ---- moves to other decode nodes --------------------------------------------------------------------------------

    def _stop_to_move(self, message: Move, now: float) -> None:
        key = (message.rid, message.attempt)
        if key in self._scheduler.requests and self._moves.order(message):
            self._scheduler.stop_decoding(key)
            self._perform(self._scheduler.take_effects(), now)

    def _move(self, stopped: Stopped, now: float) -> None:
        """Offer the pages of a request that no step computes any more to the other node, and tell the gateway."""
        request = stopped.request
        if request.key not in self._scheduler.requests:
            return  # its last step has ended it
        if not (stopped.has_pages and self._moves.start(request, now)):
            message = "the decode node is stopping, and the request has no pages that could move to another one"
            self._fail(request, ErrorCode.SHUTTING_DOWN, message, now)
            return
        self._output.flush(request, now)
        self._report_stages(request, now)
        self._output.forget(request.key)
        self._totals["interrupted_requests"] += 1
        self.outbox.gateway.append(Moved(*request.key, len(request.output)))
        self._scheduler.decisions.note(now, request.rid, "move", "after {} tokens", request.num_tokens)

    def _refuse_opposite_moves(self, now: float) -> bool:
        """Refuse requests that would wait in a circle. True if there were any."""
        if not self._moves.is_open or self._scheduler.may_gain_pages:
            return False
        refused = self._moves.in_circle(self._scheduler.waiting_for_pages)
        for request in refused:
            self._fail(request, ErrorCode.QUEUE_FULL, IN_CIRCLE, now)
        return bool(refused)

    def _take_moved(self) -> bool:
        """Send what the sender has queued, and release requests whose pages have gone. True if there were any."""
        messages, gone, failed = self._moves.take()
        self.outbox.peers.extend(messages)
        self.outbox.gateway.extend(failed)
        for key in gone:
            self._forget(key)
        return bool(gone)

    # ---- transfers --------------------------------------------------------------------------------------------------

    def _begin_transfer(self, granted: PageGrant, now: float) -> None:
        request, reservation = granted.request, granted.reservation
        source = self._scheduler.source(request.key)
        assert source is not None, f"{request.key} is computed here"
        self._totals["granted_tokens"] += request.num_decodable
        self._totals["pages_cached"] += reservation.num_cached
        if granted.is_resumed:
            self._ask_again(request, source, now)
        first, num_tokens, allocator = reservation.first, request.num_decodable, self._allocator
        self._receiver.begin(
            self._transfer_of(request.key),
            source,
            first=allocator.num_sent(first, num_tokens),
            num_cached=allocator.num_sent(reservation.num_cached, num_tokens),
            pages=allocator.to_transfer(reservation.pages, first, num_tokens),
            length=allocator.transfer_length(num_tokens),
        )

    def _ask_again(self, request: Request, source: str, now: float) -> None:
        """Have the prefill node compute a retracted request again, under a new transfer key."""
        _, before = self._transfer_of(request.key)
        transfer = (request.rid, before + RESUMED)
        self._transfers[request.key] = transfer
        self._owners[transfer] = request.key
        resume = Resume(
            *transfer,
            prompt=request.tokens(0, request.num_decodable),
            cache_salt=request.salt,
            adapter=request.adapter,
            priority=request.priority,
            priority_class=request.priority_class,
            tenant=request.tenant,
            timeout_s=max(request.deadline_at - now, 0.001),
            waited_s=max(now - request.arrived_at, 0.0),
        )
        self.outbox.peers.append((source, resume))

    def _reprioritize(self, message: Reprioritize, now: float) -> None:
        """Change a priority here, and at the prefill node that computes the request again."""
        key = (message.rid, message.attempt)
        self._scheduler.reprioritize(key, message.priority, now, priority_class=message.priority_class)
        source = self._scheduler.source(key)
        if key in self._transfers and source is not None and self._scheduler.is_receiving(key):
            passed_on = Reprioritize(*self._transfers[key], message.priority, message.priority_class)
            self.outbox.peers.append((source, passed_on))

    def _transfer_of(self, key: RequestKey) -> RequestKey:
        """The key by which the transfer plane knows the request's pages."""
        return self._transfers.get(key, key)

    def _on_event(self, event: Event, now: float) -> None:
        if isinstance(event, PairLost):
            self._drop_peer(event.peer, event.reason, now)
            return
        key = self._owners.pop(event.key, event.key)
        if isinstance(event, Completed):
            self._received(key, event, now)
        elif key != event.key:
            self._scheduler.not_received(key, now, self._allocator.from_transfer(event.arrived))
        elif isinstance(event, Finished):
            self._forget(key, event.arrived)
        else:
            self._report_stages(self._scheduler.requests[key], now)
            self._forget(key, event.arrived)
            if event.code in KNOWN_TO_GATEWAY:
                self._count_failure(event.code)
            else:
                self._answer_failure(key, event.code, event.message)

    def _received(self, key: RequestKey, event: Completed, now: float) -> None:
        request, token = self._scheduler.requests[key], event.prefill_done.token
        if token < self._vocab_size:
            self._scheduler.received(key, token=token)
            self.stats.handed_off(request, event.prefill_done_at)
            self._output.received(key, event, now)
            self._totals["transfers"] += 1
            return
        if key != event.key:
            self._scheduler.not_received(key, now)
        else:
            self._forget(key)
            message = "the prefill node sampled a token outside of the vocabulary"
            self._answer_failure(key, ErrorCode.TRANSFER_FAILED, message)
        self._allocator.free(self._allocator.from_transfer(event.pages), Owner.GRANT)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _abort(self, message: Abort, now: float) -> None:
        """End an attempt that the gateway no longer needs."""
        key = self._moves.request_of((message.rid, message.attempt))
        request = self._scheduler.requests.get(key)
        if self._moves.is_sending(key):
            self._moves.end(key, "aborted", "the gateway ended it", ErrorCode.ABORTED)
        elif request is not None:
            self._report_stages(request, now)
            if message.reason == "aborted":
                self.stats.ended(ABORT)
            elif message.reason == "stopped":
                self.stats.finished(request, "stop", now)
            elif message.reason == "continued":
                self._totals["interrupted_requests"] += 1
            self._end(key)

    def _end(self, key: RequestKey) -> None:
        """End a request that was aborted or failed: give everything back, and call off a transfer in progress."""
        is_receiving = self._scheduler.is_receiving(key)
        self._forget(key, self._receiver.cancel(self._transfer_of(key)) if is_receiving else ())

    def _forget(self, key: RequestKey, arrived: Sequence[int] = ()) -> None:
        """Forget a request; the first pages of its transfer, which have ``arrived``, stay cached.

        Args:
            arrived: pages or slabs, as the receiver counts them.
        """
        self._output.forget(key)
        self._moves.forget(key)
        self._owners.pop(self._transfers.pop(key, key), None)
        self._scheduler.abort(key, self._allocator.from_transfer(arrived))

    def _fail(self, request: Request, code: ErrorCode, message: str, now: float) -> None:
        if self._moves.is_sending(request.key):
            self._moves.end(request.key, "failed", message, code)  # the gateway asks the other node by now
            return
        self._output.flush(request, now)
        self._report_stages(request, now)
        self._end(request.key)
        self._answer_failure(request.key, code, message)

    def _report_stages(self, request: Request, now: float) -> None:
        """Tell the gateway where a request that ends early has spent its time since the last report."""
        self._output.report_unfinished(request, now, is_local=self._scheduler.source(request.key) is None)

    def _answer_failure(self, key: RequestKey, code: ErrorCode, message: str) -> None:
        self._count_failure(code)
        self.outbox.gateway.append(Failed(*key, code, message[:MAX_TEXT]))

    def _count_failure(self, code: ErrorCode) -> None:
        if code is ErrorCode.ABORTED:
            self.stats.ended(ABORT)  # the prefill node has heard of it first
        elif code in RECOVERABLE or code is ErrorCode.TAKEN_OVER:
            self._totals["interrupted_requests"] += 1
        else:
            self._totals["failed_requests"] += 1
            self.stats.ended(ERROR)

    # ---- state ------------------------------------------------------------------------------------------------------

    def files(self) -> Sequence[int]:
        return [*self._receiver.files(), *self._moves.files()]

    def transports(self) -> Sequence[str]:
        return self._receiver.transports()

    def pairs(self) -> Sequence[PairState]:
        pairs = [*self._receiver.pairs(), *self._moves.pairs()]
        known = {pair.incarnation for pair in pairs}
        lost = self._peers.problems(self._receiver.transports()[0])
        return [*pairs, *(pair for pair in lost if pair.incarnation not in known)]

    def peers(self) -> Sequence[str]:
        return self._moves.peers()

    def requests(self) -> Mapping[RequestKey, Request]:
        return self._scheduler.requests

    def load(self) -> Load:
        return Load.of(self._scheduler.requests, self._scheduler.num_waiting, self._cache)

    def gauges(self) -> dict[str, float]:
        return {
            "evictable_pages": float(self._cache.num_evictable_pages),
            "granted_pages": float(self._allocator.count(Owner.GRANT)),
            **self._allocator.gauges(),
            **sums(self._receiver.gauges(), self._moves.gauges()),
        }

    def counters(self) -> dict[str, float]:
        return {
            **self._totals,
            **self._output.totals,
            **self._scheduler.totals(),
            **sums(self._receiver.counters(), self._moves.counters()),
        }

    def check(self) -> None:
        check_pages(self._allocator, self._cache, self._scheduler.requests.values())
        self._scheduler.check()
        self._receiver.check()
        self._moves.check(self._scheduler.moving, self._scheduler.requests)
