"""Follows each request from its arrival to its end: which ones wait, where each was sent, and how each ends.

Requests are sent while the nodes have room. The rest wait in the queue of their model and are sent, in order, as others
end; the pair of nodes is chosen at that moment. Every output is in the table (``gateway.requests.in_flight``) from its
arrival to its end, and leaves it in one place, ``_remove``: after the last token, a stop string, an error of its own,
the deadline, or an abort. The nodes that may still work on it are told at once.

An attempt that ends without the request's fault, such as by the loss of a node, does not end the request: ``_recover``
puts it back into the queue, and the next attempt continues after the tokens that the stream has
(``gateway.requests.attempts.further_attempts``). A request on a decode node that drains moves to another one
(``gateway.requests.attempts.moves``).
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, groupby
from typing import NoReturn, Protocol

import msgspec

from common.clock import Clock
from common.decision_log import DecisionLog
from common.errors import RECOVERABLE, ErrorCode, RequestError
from common.request import Request
from common.wire.messages import (
    Abort,
    Failed,
    Message,
    Move,
    Moved,
    Reprioritize,
    SetPaused,
    Spans,
    Tokens,
)  # fmt: skip
from gateway.requests.admission.deadlines import reason_of_lateness, refusal_by_deadline
from gateway.requests.attempts.further_attempts import (
    FurtherAttempts,
    choose_next_pair,
    confirm_loss,
    end_by_failure,
    end_by_loss,
    end_by_wrong_output,
    wrong_output,
)
from gateway.requests.attempts.moves import Moves
from gateway.requests.attempts.recovery import AttemptEnd
from gateway.requests.attempts.trials import begin_trial, end_passed_trial, end_trial
from gateway.requests.in_flight import InFlightRequest, InFlightTable, Timer, message_key, request_of
from gateway.requests.input.generate_request import GenerateRequest, client_rid
from gateway.requests.output_processor import INTERNAL_ERROR, OutputStream, StageReport
from gateway.workers.pool import WorkerPool
from gateway.workers.routing.router import WorkerPair

log = logging.getLogger(__name__)

#: Outputs, and tokens of their prompts, that are sent before the event loop gets a turn.
SENT_AT_ONCE, TOKENS_AT_ONCE = 64, 1 << 17

#: The decision log's sentence for a request that is sent, by the number of nodes.
SENT = {1: "to {1.name} alone, {0:.3f} s after it came", 2: "to {1.name} and {2.name}, {0:.3f} s after it came"}


class NodeChannel(Protocol):
    def send(self, message: Message, *incarnations: str) -> None:
        """Send a message to nodes once the current event is handled. ``on_worker_lost`` follows, never before this
        returns, if one cannot be reached."""
        ...


class Timers(Protocol):
    """The part of an asyncio event loop that the dispatcher uses."""

    def call_later(self, delay_s: float, act: Callable[[str], None], rid: str, /) -> Timer: ...
    def call_soon(self, act: Callable[[], None], /) -> object: ...


class Dispatcher:
    """Sends requests to nodes and follows each to its end.

    Args:
        on_end: called once for every output taken, after it has left the table.
        first_attempt: attempts are numbered from here. A random start keeps attempts of one gateway apart from those
            of an earlier one, which nodes remember for a while.
    """

    def __init__(
        self, pools: Iterable[WorkerPool], channel: NodeChannel, timers: Timers, clock: Clock,
        *, on_end: Callable[[OutputStream], None], first_attempt: int = 0,
    ) -> None:  # fmt: skip
        self._pools = {pool.model: pool for pool in pools}
        self._channel = channel
        self._timers = timers
        self._clock = clock
        self._on_end = on_end
        self.decisions = DecisionLog()
        self._in_flight = InFlightTable()
        self._further = FurtherAttempts()
        self._is_shut = False
        self._is_pump_due = False
        self._attempts = count(first_attempt)
        self._moves = Moves(self._attempts)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def recoveries(self) -> Counter[tuple[str, ErrorCode]]:
        """Further attempts since the start, by model and cause."""
        return self._further.num_by_cause

    def num_at(self, incarnation: str) -> int:
        """Requests in flight that a node works on, or whose pages it still sends."""
        return self._in_flight.num_at(incarnation)

    def num_with(self, model: str, adapter: str) -> int:
        """Requests in flight that have an adapter of a model, by its id."""
        return self._in_flight.num_with(model, adapter)

    def streams(self) -> Iterator[OutputStream]:
        """All outputs in flight, oldest first."""
        return (flight.stream for flight in self._in_flight.values())

    def newest_streams(self) -> Iterator[OutputStream]:
        """The same, newest first."""
        return (flight.stream for flight in reversed(self._in_flight.values()))

    def _streams(self, pool: WorkerPool) -> Iterator[OutputStream]:
        return (flight.stream for flight in self._in_flight.values() if flight.pool is pool)

    # ---- arrival ----------------------------------------------------------------------------------------------------

    def dispatch(self, streams: Sequence[OutputStream]) -> None:
        """Take the outputs of one HTTP request, all or none; the samples of a prompt go to one pair.

        Raises RequestError: an id is in use, an adapter has been unloaded, too many requests are in flight, or no nodes
            are registered.
        """
        if self._is_shut:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        for stream in streams:
            if stream.request.rid in self._in_flight:
                rid = client_rid(stream.request.rid)
                message = f"rid: a request with the id {rid!r} is in flight; choose another id"
                raise RequestError(ErrorCode.INVALID_REQUEST, message, param="rid")
        pool = self._pools[streams[0].request.model]
        if adapter := streams[0].request.adapter:
            pool.registry.check_adapter(adapter)
        now = self._clock.now()
        is_idle, is_continued = pool.queue.is_idle, any(stream.ids for stream in streams)
        if not (is_idle or is_continued):
            if refusal := refusal_by_deadline(pool, streams[0], self._streams(pool), now):
                self._refuse(streams[0], refusal, now)
        self._admit(pool, streams, now, is_continued=is_continued)
        pairs: dict[int, WorkerPair] = {}
        flights: list[InFlightRequest] = []
        for stream in streams:
            request = stream.request
            left_s = max(request.timeout_s - (now - stream.started_at), 0.001)
            timer = self._timers.call_later(left_s, self._on_deadline, request.rid)
            flight = InFlightRequest(stream, pool, timer, pairs)
            flights.append(flight)
            self._in_flight[request.rid] = flight
            if stream.ids:
                self._further.adopt(flight, now)
            if request.adapter:
                self._in_flight.count_adapter(request)
        num_able = min(self._capacity(pool), len(flights)) if is_idle else 0
        num_sent = _num_in_turn([flight.stream.request.prompt for flight in flights[:num_able]])
        if num_sent < len(flights):
            self._enqueue_rest(flights, num_sent, num_able, now)
        placed: list[InFlightRequest] = []
        for flight in flights[:num_sent]:
            if pool.queue.order.is_charging:
                self._enqueue(flight)  # removed at once, but the policy accounts all service
            if self._place(flight, now):
                placed.append(flight)
            else:  # the next pump sets it aside
                if flight.queued is None:
                    self._enqueue(flight)
                self.pump_soon()
        self._send(placed, now)

    def end_kept(self, stream: OutputStream) -> None:
        """Take an output that a node has kept whole for another gateway, so that it never is in flight here."""
        self._on_end(stream)

    def _enqueue_rest(self, flights: Sequence[InFlightRequest], num_sent: int, num_able: int, now: float) -> None:
        """Let requests wait: those up to ``num_able`` for the next turn, the others for room."""
        for i, flight in enumerate(flights[num_sent:], num_sent):
            if i >= num_able:
                rid, num_waiting = flight.stream.request.rid, len(flight.pool.queue)
                self.decisions.note(now, rid, "wait", "the nodes are full, {} wait already", num_waiting)
            self._enqueue(flight)
        if num_sent < num_able:
            self.pump_soon()

    def _admit(self, pool: WorkerPool, streams: Sequence[OutputStream], now: float, *, is_continued: bool) -> None:
        """Count the outputs in. If there are too many, less urgent requests are evicted, or these are refused.

        Args:
            is_continued: another gateway has accepted them. A refusal would lose what the nodes have kept of them.
        """
        limits = pool.registry.accepted
        if limits is None:
            raise pool.no_route()
        count, max_running = len(streams), 1 << 31 if is_continued else limits.max_running
        excess = pool.admission.take(count, max_running=max_running, now=now)
        if excess <= 0:
            return
        for victim in self._eviction_candidates(pool, request_of(streams[0]), excess):
            self._evict(victim, streams[0], now)
        try:
            in_flight = self._streams(pool)
            pool.admission.admit(count, max_running=max_running, now=now, waiting=pool.queue, in_flight=in_flight)
        except RequestError as error:
            self._refuse(streams[0], error, now)

    def _refuse(self, stream: OutputStream, error: RequestError, now: float) -> NoReturn:
        self.decisions.note(now, stream.request.rid, "refuse", "{}", error.message)
        raise error

    def _eviction_candidates(self, pool: WorkerPool, request: Request, count: int) -> list[InFlightRequest]:
        """Requests that make room for a more urgent one: those in the queue, or if it is empty, those at nodes that
        have sent no token yet."""
        queue = pool.queue
        sent: list[Request] = []
        if queue.is_idle and queue.order.rules.is_enabled:
            others = [other for other in self._in_flight.values() if other.pool is pool]
            sent = [request_of(other.stream) for other in others if other.pair and not other.stream.ids]
        return [self._in_flight[victim.rid] for victim in queue.eviction_candidates(request, count, sent=sent)]

    def _evict(self, victim: InFlightRequest, other: OutputStream, now: float) -> None:
        reason = "the queue is full and a more urgent request has taken its place"
        self.decisions.note(now, victim.stream.request.rid, "evict", "{} came: " + reason, other.request.rid)
        retry_after_s = self._retry_after_s(victim.pool, now)
        message = f"the request was evicted: {reason}"
        self._fail(victim, RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=retry_after_s))

    def _retry_after_s(self, pool: WorkerPool, now: float) -> float:
        return pool.admission.retry_after(1, now, waiting=pool.queue, in_flight=self._streams(pool))

    @staticmethod
    def _enqueue(flight: InFlightRequest) -> None:
        flight.queued = request_of(flight.stream)
        if flight.recovery is None:
            flight.pool.queue.push(flight.queued)
        else:
            flight.pool.queue.put_back(flight.queued)

    # ---- to the nodes -----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send waiting requests, in order, as far as the nodes have room."""
        self._is_pump_due = False
        now = self._clock.now()
        for pool in self._pools.values():
            self._order_moves(pool, now)
            if pool.queue.is_idle or not (capacity := self._capacity(pool)):
                continue
            waiting = pool.queue.first(capacity, now)
            placed: list[InFlightRequest] = []
            pace = pool.admission.pace(now, waiting=pool.queue)
            for queued in waiting[: _num_in_turn([request.prompt for request in waiting])]:
                flight = self._in_flight[queued.rid]
                if reason := reason_of_lateness(pool, flight.stream, pace, now):
                    self._fail_by_deadline(flight, reason)
                elif self._place(flight, now):
                    placed.append(flight)
                else:
                    pool.queue.strand(queued, now)
                    self.decisions.note(now, queued.rid, "strand", "no pair of nodes with enough pages takes it now")
            self._send(placed, now)
            if not pool.queue.is_idle and self._capacity(pool):
                self.pump_soon()

    @staticmethod
    def _capacity(pool: WorkerPool) -> int:
        """Requests that the nodes of a pool have room for."""
        return max(pool.router.dispatch_capacity(pool.registry.prefills, pool.registry.decodes), 0)

    def pump_soon(self) -> None:
        """Call ``pump`` once the current events are handled, since many requests may end together."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._timers.call_soon(self.pump)

    def on_workers_added(self, pool: WorkerPool) -> None:
        """Nodes take requests, or take them again: there is more room, and perhaps for stranded requests too."""
        pool.queue.retry_stranded(self._clock.now())
        self.pump_soon()

    def tick(self, now: float) -> None:
        """End requests that have waited too long for nodes to come back, let failed pairs be probed, and move
        requests away from draining nodes."""
        for pool in self._pools.values():
            self._order_moves(pool, now)
            if pool.registry.tick(now):
                self.on_workers_added(pool)
            registry = pool.registry
            for queued in pool.queue.expired(now, is_routable=registry.is_ready, has_reserved=registry.has_reserved):
                message = "no nodes that can serve the request registered while it waited"
                self._fail(self._in_flight[queued.rid], RequestError(ErrorCode.NO_ROUTE, message))
        for flight, error in self._further.expired(now):
            self._fail(flight, error)

    def _place(self, flight: InFlightRequest, now: float) -> bool:
        """Choose the pair of a request, which is sent next; False if no page pool is large enough."""
        stream, pool, request = flight.stream, flight.pool, flight.stream.request
        if flight.recovery is None:
            pair = self._choose(pool, request, flight.pairs.get(request.prompt_number), now)
        else:
            pair = choose_next_pair(pool, stream, flight.recovery, now)
        if pair is None:
            return False
        if flight.recovery is not None:
            is_suspect = flight.recovery.is_suspect
            self._further.begin(flight, is_alone=is_suspect and not any(map(self.num_at, pair.nodes)))
        if flight.recovery is not None or pool.registry.health.breakers:
            begin_trial(flight, pair)
        if flight.queued is not None:
            pool.queue.remove(flight.queued)
            num_input = len(request.prompt) if pair.prefill is None else pair.num_compute
            pool.queue.order.admitted(flight.queued, num_input=num_input)
        nodes = [pool.registry.workers[incarnation] for incarnation in pair.nodes]
        self._in_flight.place(flight, pair.nodes)
        flight.begin_attempt(pair, nodes, next(self._attempts), now)
        self.decisions.note(now, request.rid, "send", SENT[len(nodes)], now - stream.started_at, *nodes)
        return True

    def _send(self, placed: Sequence[InFlightRequest], now: float) -> None:
        """Send requests to their pairs; neighbouring samples of one prompt share a message.

        An unexpected error ends only the requests of its message.
        """
        groups = [placed] if len(placed) == 1 else [list(samples) for _, samples in groupby(placed, key=message_key)]
        for group in groups:
            flight, *others = group
            try:
                self._channel.send(flight.generate(others, now), *flight.nodes)
            except Exception:
                log.exception("a request could not be sent")
                for failed in group:
                    self.fail_internal(failed.stream.request.rid)
        for flight in placed:
            if flight.is_paused and not flight.stream.is_ended:  # since an earlier attempt
                self._hold_if_paused(flight)

    @staticmethod
    def _choose(pool: WorkerPool, request: GenerateRequest, known: WorkerPair | None, now: float) -> WorkerPair | None:
        """The best pair for a request.

        Args:
            known: the pair of another sample of its prompt, which is chosen again if it still can take one.
        """
        prefills, decodes = pool.registry.prefills, pool.registry.decodes
        if request.adapter:
            prefills, decodes = pool.registry.able(request.adapter)
        num_new, num_expected = request.sampling.max_new_tokens, request.expected_output
        if known is not None:
            pair = pool.router.choose_again(known, prefills, decodes, num_new=num_new, num_expected=num_expected)
            if pair is not None:
                return pair
        return pool.router.choose(
            prefills, decodes, request.prompt,
            num_new=num_new, num_expected=num_expected, salt=request.salt, now=now,
        )  # fmt: skip

    # ---- changes ----------------------------------------------------------------------------------------------------

    def reprioritize(
        self, request_id: str, tenant: str | None, priority: int | None, priority_class: str | None
    ) -> int:
        """Change the priority or class, unless None, in the queue and on the nodes. Return how many outputs.

        Args:
            tenant: changes only this tenant's requests; None those of all.
        """
        flights = self._in_flight.matching(request_id, tenant)
        for flight in flights:
            self._reprioritize(flight, priority, priority_class)
        return len(flights)

    def change_priority(self, rid: str, priority: int) -> None:
        """Change the priority of one output in flight, in the queue and on the nodes."""
        self._reprioritize(self._in_flight[rid], priority, None)

    def _reprioritize(self, flight: InFlightRequest, priority: int | None, priority_class: str | None) -> None:
        request = flight.stream.request
        priority_now = request.priority if priority is None else priority
        class_now = request.priority_class if priority_class is None else priority_class
        flight.stream.request = msgspec.structs.replace(request, priority=priority_now, priority_class=class_now)
        before = (request.priority, request.priority_class)
        self.decisions.note_change(self._clock.now(), request.rid, before, (priority_now, class_now))
        if flight.queued is not None:
            flight.pool.queue.reprioritize(flight.queued, priority_now, class_now)
        message = Reprioritize(request.rid, flight.attempt, priority_now, priority_class)
        self._channel.send(message, *flight.nodes)

    def set_paused(self, rid: str, is_paused: bool) -> None:
        """Pause a request on its decode node, since its client is slow to read, or let it go on."""
        flight = self._in_flight.get(rid)
        if flight is None or flight.is_paused == is_paused:
            return
        flight.is_paused = is_paused
        flight.was_paused = True
        flight.pool.admission.set_paused(is_paused=is_paused)
        self.decisions.note(self._clock.now(), rid, "pause" if is_paused else "resume", "as its client reads")
        self._hold_if_paused(flight)
        if not flight.pool.queue.is_idle:
            self.pump_soon()

    def _hold_if_paused(self, flight: InFlightRequest) -> None:
        """Tell the decode node whether to compute a request. A trial goes on until it has passed."""
        is_held = flight.is_paused and not flight.is_on_trial
        if flight.pair is not None and flight.pair.decode is not None and flight.is_held != is_held:
            flight.is_held = is_held
            flight.pool.router.set_paused(flight.pair, is_paused=is_held)
            self._channel.send(SetPaused(flight.stream.request.rid, flight.attempt, is_held), flight.pair.decode)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def abort(self, rid: str, message: str = "the request was aborted") -> bool:
        """End one request on the client's behalf; False if it is not in flight."""
        return self._fail_rid(rid, RequestError(ErrorCode.ABORTED, message))

    def abort_matching(self, request_id: str | None, tenant: str | None = None) -> int:
        """End a request, or all outputs of a batch, by the id that the client knows. Return how many.

        Args:
            request_id: None matches all.
            tenant: ends only this tenant's requests; None those of all.
        """
        return sum(self.abort(flight.stream.request.rid) for flight in self._in_flight.matching(request_id, tenant))

    def shut_down(self) -> None:
        """End all requests and refuse new ones: the gateway stops.

        Nodes go on with those that have a key, as if the gateway had died: a retry at another one continues the output.
        """
        self._is_shut = True
        for flight in list(self._in_flight.values()):
            self._fail(flight, RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping"))

    def fail_internal(self, rid: str) -> bool:
        """End a request because handling it raised an unexpected error; False if it is not in flight."""
        return self._fail_rid(rid, RequestError(ErrorCode.INTERNAL, INTERNAL_ERROR))

    def _on_deadline(self, rid: str) -> None:
        flight = self._in_flight[rid]
        deadline_s = flight.stream.request.timeout_s
        self._fail_by_deadline(flight, f"the request's deadline of {deadline_s:g} s has passed")

    def _fail_by_deadline(self, flight: InFlightRequest, reason: str) -> None:
        self._fail(flight, RequestError(ErrorCode.DEADLINE_EXCEEDED, reason))

    def _fail_rid(self, rid: str, error: RequestError) -> bool:
        flight = self._in_flight.get(rid)
        if flight is not None:
            self._fail(flight, error)
        return flight is not None

    def _fail(self, flight: InFlightRequest, error: RequestError) -> None:
        flight.stream.fail(error, self._clock.now())
        self._remove(flight)

    def _remove(self, flight: InFlightRequest) -> None:
        """The one way out of the table, for a request whose stream has ended."""
        stream, pool = flight.stream, flight.pool
        del self._in_flight[stream.request.rid]
        flight.timer.cancel()
        if flight.pair is not None:
            self._release_nodes(flight, flight.pair)
        elif flight.backoff is not None:
            flight.backoff.cancel()
        elif flight.queued is not None:
            pool.queue.remove(flight.queued)
        if flight.recovery is not None:
            self._further.drop(stream.request.rid)
        is_at_end = stream.error is None or stream.error.code is ErrorCode.DEADLINE_EXCEEDED
        served_s = stream.ended_at - stream.sent_at if is_at_end and flight.pair is not None else None
        is_typical = not flight.was_paused and flight.recovery is None  # else it has waited for its client or nodes
        if flight.is_paused:
            pool.admission.set_paused(is_paused=False)
        num_tokens = len(stream.ids)
        pool.admission.release(stream.ended_at, served_s=served_s, num_tokens=num_tokens, is_typical=is_typical)
        if stream.error is None or stream.error.code is not ErrorCode.QUEUE_FULL:  # as those refused on arrival
            pool.load_meter.ended(stream)
        if not pool.queue.is_idle:
            self.pump_soon()
        self._on_end(stream)

    def _release_nodes(self, flight: InFlightRequest, pair: WorkerPair) -> None:
        is_left_to_nodes = self._is_shut and bool(flight.stream.request.key)
        if not is_left_to_nodes and (nodes := flight.nodes_to_tell(pair)):
            self._channel.send(Abort(flight.stream.request.rid, flight.attempt, flight.end_reason), *nodes)
        if self._moves and self._moves.drop(flight):
            self.pump_soon()
        self._end_attempt(flight, pair)

    def _end_attempt(self, flight: InFlightRequest, pair: WorkerPair) -> None:
        """Count an attempt out."""
        if flight.is_prefill_counted:
            flight.pool.router.prefill_done(pair, self._clock.now())
        if flight.is_held:
            flight.is_held = False
            flight.pool.router.set_paused(pair, is_paused=False)
        flight.pool.router.decode_done(pair)
        if (flight.has_reserved_nodes or flight.pool.registry.health.breakers) and end_trial(flight, pair):
            self.on_workers_added(flight.pool)

    # ---- further attempts -------------------------------------------------------------------------------------------

    def _recover(self, flight: InFlightRequest, end: AttemptEnd) -> None:
        """End what is left of an attempt that ended without the request's fault, and prepare the next one."""
        assert flight.pair is not None
        now, rid = self._clock.now(), flight.stream.request.rid
        backoff_s = self._further.attempt_ended(flight, end, now)
        if isinstance(backoff_s, RequestError):
            error = backoff_s
            if error.code is ErrorCode.QUEUE_FULL:
                retry_after_s = self._retry_after_s(flight.pool, now)
                error = RequestError(error.code, error.message, retry_after_s=retry_after_s)
            self._fail(flight, error)
            return
        self._release_nodes(flight, flight.pair)
        self._in_flight.place(flight, ())
        wait_s = self._further.wait(flight, backoff_s, now)
        self.decisions.note(now, rid, "recover", "after {} tokens: {}", len(flight.stream.ids), end.message)
        if wait_s:
            flight.backoff = self._timers.call_later(wait_s, self._on_backoff_over, rid)
            self.pump_soon()  # its place is free for others meanwhile
        else:
            self._put_back(flight)

    def _on_backoff_over(self, rid: str) -> None:
        flight = self._in_flight[rid]
        flight.backoff = None
        self._put_back(flight)

    def _put_back(self, flight: InFlightRequest) -> None:
        """Let a request join the queue again, for its next attempt."""
        if flight.queued is None:
            flight.queued = request_of(flight.stream)
        flight.pool.queue.put_back(flight.queued)
        self.pump_soon()

    # ---- moves away from draining nodes -----------------------------------------------------------------------------

    def _order_moves(self, pool: WorkerPool, now: float) -> None:
        if not pool.registry.draining:
            return
        flights = chain.from_iterable(map(self._in_flight.at, sorted(pool.registry.draining)))
        for order in self._moves.begin(pool, flights):
            attempt = self._in_flight[order.rid].attempt
            self.decisions.note(now, order.rid, "move", "to {}, since its node drains", order.target.name)
            self._channel.send(Move(order.rid, attempt, order.attempt, order.target.peer), order.source)

    def _go_on_at_target(self, flight: InFlightRequest) -> None:
        """Continue a request that has stopped to move, once all of its tokens are here."""
        move = self._moves.take_complete(flight)
        if move is None:
            return
        assert flight.pair is not None
        now, stream, workers = self._clock.now(), flight.stream, flight.pool.registry.workers
        self.pump_soon()  # the next request may move
        if move.is_lost:
            message = "a decode node was lost while the request moved to it"
            self._recover(flight, AttemptEnd(ErrorCode.NODE_LOST, message, is_seen=True))
            return
        self._end_attempt(flight, flight.pair)
        self._in_flight.place(flight, move.pair.nodes)
        flight.pair, flight.attempt = move.pair, move.attempt
        flight.num_continued, flight.began_at, flight.is_prefill_counted = len(stream.ids), now, True
        stream.attempt = flight.attempt
        stream.num_attempts += 1
        source, target = (workers[incarnation] for incarnation in flight.nodes)
        stream.prefill, stream.decode = source.name, target.name
        self._channel.send(flight.generate((), now), target.incarnation)
        self._hold_if_paused(flight)

    # ---- messages of nodes ------------------------------------------------------------------------------------------

    def on_tokens(self, sender: str, message: Tokens) -> None:
        """Pass tokens to their stream. A sender of tokens that belong to no request is told to stop, except after
        ``shut_down``, which leaves some requests to nodes.
        """
        flight = self._in_flight.concerned(sender, message)
        if flight is None:
            if not self._is_shut:
                self._channel.send(Abort(message.rid, message.attempt), sender)
            return
        if wrong := wrong_output(message, flight):
            self._recover_from_wrong_output(flight, sender, wrong)
            return
        if flight.is_prefill_counted and message.index == flight.num_continued and flight.pair is not None:
            flight.is_prefill_counted = False
            flight.pool.router.prefill_done(flight.pair, self._clock.now())
        if flight.queued is not None:
            flight.pool.queue.order.served(flight.queued, num_output=len(message.tokens))
        flight.stream.on_tokens(message, self._clock.now())
        if flight.stream.is_ended:
            self._remove(flight)
        elif flight.stream.lacks_token and flight.pair is not None:
            wrong = f"later tokens without token {len(flight.stream.ids)}"
            self._recover_from_wrong_output(flight, flight.pair.last, wrong)
            return
        elif flight.is_on_trial and end_passed_trial(flight):
            self._hold_if_paused(flight)
            self.on_workers_added(flight.pool)
        if self._moves and not flight.stream.is_ended:
            self._go_on_at_target(flight)

    def _recover_from_wrong_output(self, flight: InFlightRequest, sender: str, wrong: str) -> None:
        end = end_by_wrong_output(flight, sender, wrong)
        log.error("%s", end.message)
        self._recover(flight, end)

    def on_spans(self, sender: str, message: Spans, report: StageReport) -> bool:
        """Pass spans of a node to their stream; False if it has ended."""
        flight = self._in_flight.concerned(sender, message)
        if flight is None:
            return False
        flight.stream.on_spans(report)
        return True

    def on_moved(self, sender: str, message: Moved) -> None:
        """A draining node has stopped a request, whose pages wait for the node that it moves to."""
        flight = self._in_flight.concerned(sender, message)
        if flight is not None:
            self._moves.stopped(message.rid, message.num_output)
            self._go_on_at_target(flight)

    def on_failed(self, sender: str, message: Failed) -> None:
        flight = self._in_flight.concerned(sender, message)
        if flight is None or (flight.is_prefilled and flight.pair is not None and sender == flight.pair.prefill):
            return
        flight.failed_at = sender
        if message.code is ErrorCode.ABORTED:  # by the node that sends the pages, and not on our behalf: it has lost us
            message = msgspec.structs.replace(message, code=ErrorCode.TRANSFER_FAILED)
        if message.code in RECOVERABLE:
            self._recover(flight, end_by_failure(flight, sender, message, self._clock.now()))
            return
        text, param = message.message, None
        if message.code is ErrorCode.INVALID_REQUEST and flight.stream.request.grammar_param:
            param = flight.stream.request.grammar_param  # a node refuses nothing else
            text = f"{param}: {text}"
        self._fail(flight, RequestError(message.code, text, param=param))

    def on_worker_lost(
        self, incarnation: str, name: str, *, is_empty: bool = False, alive_until: float = math.inf
    ) -> None:
        """Continue the requests of a node that is no longer registered on others.

        Args:
            is_empty: the node was done with all requests.
            alive_until: it was probably alive until then; later requests have nothing to do with its loss.
        """
        now = self._clock.now()
        self._moves.lose_target(incarnation)
        there = self._in_flight.at(incarnation)
        for flight in self._further.recovering():
            error = confirm_loss(flight, incarnation, alive_until, now)
            if error is not None:
                self._fail(flight, error)
        for flight in there:
            if flight.stream.is_ended:
                continue
            end = end_by_loss(flight, incarnation, name, is_empty=is_empty, alive_until=alive_until)
            if end is not None:
                self._recover(flight, end)


def _num_in_turn(prompts: Sequence[Sequence[int]]) -> int:
    """How many of these prompts are sent in one turn; at least one, if there is one."""
    num_tokens = 0
    for number, prompt in enumerate(prompts):
        num_tokens += len(prompt)
        if number and (number == SENT_AT_ONCE or num_tokens > TOKENS_AT_ONCE):
            return number
    return len(prompts)
