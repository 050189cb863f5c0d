"""The timelines of requests: what is kept of each after its end, and the waterfall that is made of it when asked for.

All instants are by the gateway's clock. Spans of nodes are moved into it by the offset that was estimated when they
came (``gateway.workers.clock_offset``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from common.stage_spans import StageSpan
from gateway.requests.input.generate_request import client_rid
from gateway.requests.output_processor import MAX_REPORTS, OutputStream, StageReport
from gateway.tracing.trace_context import TraceContext, trace_id_of
from gateway.workers.clock_offset import MAX_DRIFT

GATEWAY = "gateway"
RUNNING = "running"
#: Attribute names for ``StageSpan.amount``.
COUNTED = {
    "prefill": "num_tokens",
    "prefill_chunk": "num_tokens",
    "transfer": "num_pages",
    "decode": "num_tokens",
}


class TimelineSpan(NamedTuple):
    """One bar of a waterfall.

    Attributes:
        process: ``gateway`` or the name of a node.
        start_at: by the gateway's clock.
    """

    name: str
    process: str
    start_at: float
    duration_s: float
    attributes: Mapping[str, Any]


class NodeClock(NamedTuple):
    """By how much the clock of a node was ahead of the gateway's, and the largest error of that."""

    offset_s: float
    error_s: float


class Timeline(msgspec.Struct, eq=False):
    """What is kept of one output.

    Attributes:
        status: ``running``, the reason of a normal end, or the code of an error.
        num_attempts: how many times it was sent to nodes.
        sent_at, first_at, ended_at: 0 until they are reached.
        reports: spans of nodes; more may come after the end of an output that was aborted.
    """

    rid: str
    request_id: str
    model: str
    tenant: str
    status: str
    started_at: float
    sent_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_attempts: int
    prefill: str
    decode: str
    max_tokens: int
    temperature: float
    top_p: float
    trace: TraceContext | None
    reports: list[StageReport]

    @classmethod
    def of(cls, stream: OutputStream) -> "Timeline":
        request = stream.request
        sampling = request.sampling
        return cls(
            client_rid(request.rid),
            request.request_id,
            request.model,
            request.tenant,
            stream.end or RUNNING,
            stream.started_at,
            stream.sent_at,
            stream.first_at,
            stream.ended_at,
            len(request.prompt),
            stream.cached_tokens,
            len(stream.ids),
            stream.num_attempts,
            stream.prefill,
            stream.decode,
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            stream.trace,
            stream.reports,
        )

    @property
    def trace_id(self) -> str:
        return trace_id_of(self.request_id) if self.trace is None else self.trace.trace_id

    def end_at(self, now: float) -> float:
        return self.ended_at or now

    def spans(self, now: float) -> list[TimelineSpan]:
        """The spans in the order of their beginnings."""
        queued_until = self.sent_at or self.end_at(now)
        queue = TimelineSpan("queue", GATEWAY, self.started_at, max(queued_until - self.started_at, 0.0), {})
        reports = self.reports[:]  # more may come while an exporter's thread is here
        clocks = self.clocks(now, reports)
        stages = [_span(span, report.node, clocks[report.node].offset_s) for report in reports for span in report.spans]
        return [queue, *sorted(stages, key=lambda span: (span.start_at, -span.duration_s))]

    def clocks(self, now: float, reports: Sequence[StageReport] | None = None) -> dict[str, NodeClock]:
        """The clock of each node that has reported, the same for all of its spans, so that none overlap by an error.

        It is that of the most exact report; within the duration of the request it may have drifted.

        Args:
            reports: those to take; None takes all.
        """
        drift_s = (self.end_at(now) - self.started_at) * MAX_DRIFT
        clocks: dict[str, NodeClock] = {}
        for report in self.reports[:] if reports is None else reports:
            error_s = report.error_s + drift_s
            if report.node not in clocks or error_s < clocks[report.node].error_s:
                clocks[report.node] = NodeClock(report.offset_s, error_s)
        return clocks


def _span(span: StageSpan, node: str, offset_s: float) -> TimelineSpan:
    counted = COUNTED.get(span.stage)
    attributes = {} if counted is None else {counted: span.amount}
    return TimelineSpan(span.stage, node, span.start_s - offset_s, span.duration_s, attributes)


class Timelines:
    """Keeps the timelines of the last requests that have ended, and finds those of running ones.

    Args:
        capacity: of ended outputs; 0 keeps none.
        running: all outputs in flight, newest first.
    """

    def __init__(self, capacity: int, running: Callable[[], Iterable[OutputStream]]) -> None:
        self._capacity = capacity
        self._running = running
        self._ended: dict[tuple[str, int], Timeline] = {}  # by rid and attempt, oldest first

    def ended(self, stream: OutputStream) -> Timeline | None:
        """Keep the timeline of an output that has ended; return it unless none is kept or wanted."""
        if not self._capacity and stream.trace is None:
            return None
        timeline = Timeline.of(stream)
        if self._capacity:
            key = (stream.request.rid, stream.attempt)
            self._ended.pop(key, None)  # outputs that were sent to no node have no attempt that tells them apart
            if len(self._ended) >= self._capacity:
                del self._ended[next(iter(self._ended))]
            self._ended[key] = timeline
        return timeline

    def reported(self, rid: str, attempt: int, report: StageReport) -> None:
        """Add spans that came after the end of their output; those of nodes that had no part in it are dropped."""
        timeline = self._ended.get((rid, attempt))
        if timeline is None or report.node not in (timeline.prefill, timeline.decode):
            return
        if len(timeline.reports) < MAX_REPORTS:
            timeline.reports.append(report)

    def last(self, limit: int, scope: str | None = None) -> list[Timeline]:
        """Those of one tenant that began last, the last one first; empty for those without a tenant, None for all."""
        running = map(Timeline.of, islice(self._running_of(scope), limit))
        return sorted([*running, *self._ended_of(scope)], key=lambda one: -one.started_at)[:limit]

    def _running_of(self, scope: str | None) -> Iterator[OutputStream]:
        return (stream for stream in self._running() if scope is None or stream.request.tenant == scope)

    def _ended_of(self, scope: str | None) -> Iterator[Timeline]:
        return (one for one in reversed(self._ended.values()) if scope is None or one.tenant == scope)

    def find(self, request_id: str, scope: str | None = None) -> Timeline | None:
        """The newest timeline with the id of an output, or of the first output of the HTTP request with this id."""
        running = [
            stream
            for stream in self._running_of(scope)
            if request_id in (client_rid(stream.request.rid), stream.request.request_id)
        ]
        ended = [one for one in self._ended_of(scope) if request_id in (one.rid, one.request_id)]
        matching = [*map(Timeline.of, running), *ended]
        first = min(matching, key=lambda one: (len(one.rid), one.rid), default=None)  # ...-9 before ...-10
        return next((one for one in matching if one.rid == request_id), first)

    def since(self, instant: float, limit: int, scope: str | None = None) -> list[Timeline]:
        """The newest timelines of outputs that were in flight at this instant or later, newest first."""
        newest = chain(map(Timeline.of, self._running_of(scope)), self._ended_of(scope))
        return list(islice((one for one in newest if not one.ended_at or one.ended_at >= instant), limit))
