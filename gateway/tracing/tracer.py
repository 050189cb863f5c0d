"""Decides which requests belong to a trace, and which traces are exported."""

import secrets

from gateway.tracing.otlp import OtlpExporter
from gateway.tracing.timelines import Timeline
from gateway.tracing.trace_context import TraceContext, parse_traceparent, trace_id_of


class Tracer:
    """Begins traces, and hands sampled ones to the exporter.

    Args:
        exporter: gets the timelines of sampled requests; None exports nothing.
        sample_rate: share of the requests without a valid ``traceparent`` that are sampled; the client's flag decides
            for all others.

    Attributes:
        is_sampling: some requests without a ``traceparent`` are sampled.
    """

    def __init__(self, exporter: OtlpExporter | None, sample_rate: float) -> None:
        self._exporter = exporter
        self._threshold = 0 if exporter is None else int(sample_rate * (1 << 64))
        self.is_sampling = self._threshold > 0

    def begin(self, traceparent: str, request_id: str, operation: str) -> TraceContext | None:
        """The trace of an HTTP request; None if its client names none and it is not sampled.

        Args:
            traceparent: the header; empty without one.
        """
        if traceparent:
            context = parse_traceparent(traceparent, _span_id(), operation)
            if context is not None:
                return context
        trace_id = trace_id_of(request_id)
        if int(trace_id[16:], 16) >= self._threshold:
            return None
        return TraceContext(trace_id, "", _span_id(), True, operation)

    def ended(self, timeline: Timeline) -> None:
        if self._exporter is not None and timeline.trace is not None and timeline.trace.is_sampled:
            self._exporter.submit(timeline)


def another_span(context: TraceContext | None) -> TraceContext | None:
    """The context of another output of the same HTTP request."""
    return None if context is None else context._replace(span_id=_span_id())


def _span_id() -> str:
    return secrets.token_hex(8)
