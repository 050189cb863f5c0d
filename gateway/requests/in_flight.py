"""The requests in flight: what the gateway knows of each, beside its output."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from common.request import Request
from common.wire.messages import EndReason, Failed, Generate, Moved, Sample, Spans, Tokens
from gateway.requests.attempts.recovery import Recovery
from gateway.requests.input.generate_request import GenerateRequest, client_rid
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import Worker
from gateway.workers.routing.router import WorkerPair


class Timer(Protocol):
    def cancel(self) -> None: ...


class InFlightRequest(msgspec.Struct, eq=False):
    """Gateway state of one in-flight request.

    Attributes:
        pairs: chosen for the outputs of the same HTTP request, by prompt number; these outputs share it.
        queued: the request as the queue knows it; None if it never waited and its service is not accounted.
        pair, nodes: None and empty while it waits. Only ``InFlightTable.place`` sets the nodes.
        attempt: nodes know the request by this number and its rid.
        revision: configuration and weights of its nodes.
        vocab_size: of its nodes.
        num_continued: output tokens that the stream had when the attempt began.
        began_at: when the attempt was sent.
        is_prefill_counted: the router counts the prompt as one that the prefill node has to compute.
        is_paused: its client is slow to read.
        was_paused: it was paused at some time, so that the time it took says nothing about the nodes.
        is_held: its decode node was told not to compute it, since it is paused.
        failed_at: the node that failed it and need not be told of its end.
        recovery: what decides about further attempts; None while no attempt has ended without the request's fault.
        backoff: runs until the request joins the queue for its next attempt; None while it does not wait for that.
        is_probe: it tries a pair whose transfers have failed lately.
        has_reserved_nodes: its nodes get no new requests, since it may have killed those before.
    """

    stream: OutputStream
    pool: WorkerPool
    timer: Timer
    pairs: dict[int, WorkerPair]
    queued: Request | None = None
    pair: WorkerPair | None = None
    nodes: tuple[str, ...] = ()
    attempt: int = 0
    revision: str = ""
    vocab_size: int = 0
    num_continued: int = 0
    began_at: float = 0.0
    is_prefill_counted: bool = False
    is_paused: bool = False
    was_paused: bool = False
    is_held: bool = False
    failed_at: str = ""
    recovery: Recovery | None = None
    backoff: Timer | None = None
    is_probe: bool = False
    has_reserved_nodes: bool = False

    @property
    def is_on_trial(self) -> bool:
        """Its output shows whether its nodes can be trusted, for which other requests wait."""
        return self.is_probe or self.has_reserved_nodes

    @property
    def is_prefilled(self) -> bool:
        """The decode node has sent a token, so it has all pages; the prefill node is done with the request."""
        return len(self.stream.ids) > max(self.num_continued, 1)

    @property
    def end_reason(self) -> EndReason:
        """Why nodes are told to end the attempt."""
        stream = self.stream
        if not stream.is_ended:
            return "continued"
        if stream.is_ended_by_node:
            return "finished"
        return "stopped" if stream.finish else "aborted"

    def begin_attempt(self, pair: WorkerPair, nodes: Sequence[Worker], attempt: int, now: float) -> None:
        """Note that an attempt is sent to a pair, which has these nodes."""
        stream = self.stream
        self.pairs[stream.request.prompt_number] = self.pair = pair
        self.attempt, self.began_at = attempt, now
        self.num_continued = len(stream.ids)
        self.is_prefill_counted = True
        self.revision, self.vocab_size = nodes[-1].revision, nodes[-1].register.vocab_size
        stream.sent_at = stream.sent_at or now
        stream.attempt = attempt
        stream.num_attempts += 1
        stream.is_local_prefill = pair.prefill is None
        stream.prefill = "" if pair.prefill is None else nodes[0].name
        stream.decode = "" if pair.decode is None else nodes[-1].name

    def generate(self, others: Iterable["InFlightRequest"], now: float) -> Generate:
        """The message that begins this attempt, and that of other samples of the prompt."""
        request, workers, pair = self.stream.request, self.pool.registry.workers, self.pair
        assert pair is not None
        waited_s = max(now - self.stream.started_at, 0.0)
        return Generate(
            rid=request.rid,
            attempt=self.attempt,
            prompt=request.prompt,
            sampling=request.sampling,
            prefill=None if pair.prefill is None else workers[pair.prefill].peer,
            decode=None if pair.decode is None else workers[pair.decode].peer,
            timeout_s=max(request.timeout_s - waited_s, 0.001),
            cache_salt=request.salt,
            adapter=request.adapter,
            priority=request.priority,
            priority_class=request.priority_class,
            tenant=request.tenant,
            expected_output=request.expected_output,
            waited_s=waited_s,
            slo_ttft_s=request.slo_ttft_s,
            slo_itl_s=request.slo_itl_s,
            others=tuple([other.sample() for other in others]),
            key=request.key,
            output=tuple(self.stream.ids),
        )

    def sample(self) -> Sample:
        """This attempt in the message of another sample of the same prompt."""
        request = self.stream.request
        return Sample(request.rid, self.attempt, request.sampling.seed, request.key)

    def nodes_to_tell(self, pair: WorkerPair) -> Sequence[str]:
        """Nodes that may not know that the request has ended."""
        stream = self.stream
        if stream.is_ended_by_node:
            is_ended_by_prefill = pair.prefill is not None and len(stream.ids) <= 1
            return (pair.decode,) if is_ended_by_prefill and pair.decode else ()  # it may still wait for pages
        return [node for node in pair.nodes if node != self.failed_at]


def message_key(flight: InFlightRequest) -> tuple[Any, ...]:
    """Equal for the samples of one prompt that one message can carry."""
    request = flight.stream.request
    continued = flight.attempt if flight.stream.ids else 0
    return id(flight.pairs), request.prompt_number, flight.nodes, request.priority, request.priority_class, continued


class InFlightTable(dict[str, InFlightRequest]):
    """All requests in flight by rid, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[str, dict[str, InFlightRequest]] = {}  # by node and rid
        self._num_with: Counter[tuple[str, str]] = Counter()  # by model and adapter

    def __delitem__(self, rid: str) -> None:
        request = self[rid].stream.request
        self.place(self[rid], ())
        super().__delitem__(rid)
        if request.adapter:
            self._num_with -= Counter([(request.model, request.adapter)])

    def count_adapter(self, request: GenerateRequest) -> None:
        """Count a request with an adapter that has entered the table."""
        self._num_with[request.model, request.adapter] += 1

    def place(self, flight: InFlightRequest, nodes: tuple[str, ...]) -> None:
        """Set the nodes that work on a request."""
        rid = flight.stream.request.rid
        for incarnation in flight.nodes:
            there = self._at[incarnation]
            del there[rid]
            if not there:
                del self._at[incarnation]
        flight.nodes = nodes
        for incarnation in nodes:
            self._at.setdefault(incarnation, {})[rid] = flight

    def at(self, incarnation: str) -> list[InFlightRequest]:
        """Requests that a node works on, or whose pages it still sends."""
        return list(self._at.get(incarnation, {}).values())

    def num_at(self, incarnation: str) -> int:
        return len(self._at.get(incarnation, ()))

    def num_with(self, model: str, adapter: str) -> int:
        """Requests that have an adapter, by its id, those included that wait."""
        return self._num_with[model, adapter]

    def matching(self, request_id: str | None, tenant: str | None) -> list[InFlightRequest]:
        """A request, or all outputs of a batch, by the id that the client knows; None matches all."""
        return [
            flight
            for rid, flight in self.items()
            if (request_id is None or request_id in (client_rid(rid), flight.stream.request.request_id))
            and (tenant is None or flight.stream.request.tenant == tenant)
        ]

    def concerned(self, sender: str, message: Tokens | Spans | Moved | Failed) -> InFlightRequest | None:
        """The request that a node's message is about; None if it has ended or the sender does not work on it."""
        flight = self.get(message.rid)
        if flight is None or message.attempt != flight.attempt or sender not in flight.nodes:
            return None
        return flight


def request_of(stream: OutputStream) -> Request:
    """The entry of an output in a queue."""
    request = stream.request
    return Request(
        rid=request.rid,
        attempt=0,
        prompt=request.prompt,
        sampling=request.sampling,
        salt=request.salt,
        priority=request.priority,
        priority_class=request.priority_class,
        tenant=request.tenant,
        expected_output=request.expected_output,
        arrived_at=stream.started_at,
        deadline_at=stream.started_at + request.timeout_s,
        slo_ttft_s=request.slo_ttft_s,
        slo_itl_s=request.slo_itl_s,
    )
