"""Exports the timelines of sampled requests as OpenTelemetry spans, over OTLP and HTTP.

A thread makes the spans and sends them. The event loop only appends to a bounded queue: while the collector cannot be
reached, requests are dropped from the export and counted. Names follow the GenAI semantic conventions, and those of
vLLM for what they lack. Prompts and outputs are never exported.

The packages of OpenTelemetry are imported here alone, since they are an extra.
"""

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common.clock import Clock
from common.errors import ConfigError, needs_extra
from common.finish_reason import NORMAL_ENDS
from gateway.tracing.timelines import GATEWAY, Timeline, TimelineSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

#: Requests that wait to be exported; one more is dropped.
MAX_WAITING = 2_048
#: Requests of one message. Its encoding holds the interpreter for some milliseconds, which delay the event loop.
MAX_BATCH = 32
#: Resources kept for further requests.
MAX_RESOURCES = 1_024
#: Time from the end of a request to its export, in which the last spans of its nodes arrive.
DELAY_S = 1.0
#: The longest time for one batch, retries included, and for the last export at a stop.
TIMEOUT_S, STOP_S = 10.0, 2.0
TRACES_PATH = "/v1/traces"
#: Stages of decode nodes alone, by which those of earlier attempts are known.
DECODE_STAGES = {"decode_queue", "prefill_wait", "transfer", "batch_join", "decode"}


class OtlpExporter:
    """Sends sampled requests to an OpenTelemetry collector.

    Args:
        endpoint: URL of the collector; without a path, ``/v1/traces`` is appended.

    Attributes:
        num_exported, num_dropped: requests.
    Raises:
        ConfigError: the packages are not installed, or the URL is no URL.
    """

    def __init__(self, endpoint: str, clock: Clock) -> None:
        self._spans = _SpanMaker()
        self._exporter = _make_exporter(traces_url(endpoint))
        self._clock = clock
        self.num_exported = self.num_dropped = 0
        self._waiting: deque[Timeline] = deque()
        self._is_stopping = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def submit(self, timeline: Timeline) -> None:
        """Export an ended request later, without blocking."""
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
        else:
            self._waiting.append(timeline)

    def close(self) -> None:
        """Export what is left, for two seconds at most."""
        self._is_stopping.set()
        self._thread.join(timeout=STOP_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_stopping.wait(DELAY_S):
            self._export_until(self._clock.now() - DELAY_S)
        self._export_until(math.inf)

    def _export_until(self, instant: float) -> None:
        """Export the requests that ended by this instant."""
        while batch := self._next_batch(instant):
            try:
                is_sent = self._send(batch)
            except Exception:
                log.exception("requests could not be exported as spans")
                is_sent = False
            if is_sent:
                self.num_exported += len(batch)
            else:
                self.num_dropped += len(batch)
                if not self._has_failed:
                    log.warning("the collector at --otlp-endpoint does not accept spans; they are dropped")
            self._has_failed = not is_sent

    def _next_batch(self, instant: float) -> list[Timeline]:
        batch: list[Timeline] = []
        while self._waiting and len(batch) < MAX_BATCH and self._waiting[0].ended_at <= instant:
            batch.append(self._waiting.popleft())
        return batch

    def _send(self, batch: list[Timeline]) -> bool:
        now, unix_now = self._clock.now(), time.time()
        spans = [span for timeline in batch for span in self._spans.of(timeline, unix_now - now)]
        return bool(self._exporter.export(spans).name == "SUCCESS")


def traces_url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket without its other, or a port that is no number
        is_url = False
    if not is_url:
        raise ConfigError(f"--otlp-endpoint must be a URL such as http://localhost:4318, not {endpoint!r}")
    if "@" in parts.netloc:
        message = "--otlp-endpoint takes no user name and password, which /server_info would show"
        raise ConfigError(f"{message}; set OTEL_EXPORTER_OTLP_HEADERS instead")
    return endpoint.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else endpoint


def _make_exporter(url: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _not_installed(error) from error
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log every failed attempt
    return OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(f"--otlp-endpoint {needs_extra('otlp')} ({error})")


class _SpanMaker:
    """Makes OpenTelemetry's spans of timelines. The gateway and each node have a resource of their own."""

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise _not_installed(error) from error
        self._trace = trace
        self._resource, self._span = Resource, ReadableSpan
        self._scope = InstrumentationScope("baton")
        self._resources: dict[tuple[str, str], Resource] = {}

    def of(self, timeline: Timeline, unix_offset_s: float) -> Iterator["ReadableSpan"]:
        """The spans of one output: of the whole, and below it those of its stages.

        Args:
            unix_offset_s: by how much Unix time is ahead of the gateway's clock.
        """
        trace, context = self._trace, timeline.trace
        assert context is not None
        root = self._context(context.trace_id, context.span_id)
        parent = self._context(context.trace_id, context.parent_id, is_remote=True) if context.parent_id else None
        is_error = timeline.status not in NORMAL_ENDS
        whole = TimelineSpan(
            f"{context.operation} {timeline.model}",
            GATEWAY,
            timeline.started_at,
            timeline.ended_at - timeline.started_at,
            _gen_ai_attributes(timeline),
        )
        status = trace.Status(trace.StatusCode.ERROR, timeline.status) if is_error else trace.Status()
        yield self._made(
            whole, GATEWAY, unix_offset_s, context=root, parent=parent, kind=trace.SpanKind.SERVER, status=status
        )
        prefills: dict[str, Any] = {}  # the spans that contain the chunks
        spans = timeline.spans(timeline.ended_at)
        decodes = {timeline.decode, *(span.process for span in spans if span.name in DECODE_STAGES)}
        errors = {name: clock.error_s for name, clock in timeline.clocks(timeline.ended_at).items()}
        for span in spans:
            own = self._context(context.trace_id, secrets.token_hex(8))
            above = prefills.get(span.process, root) if span.name == "prefill_chunk" else root
            if span.name == "prefill":
                prefills[span.process] = own
            attributes = {f"baton.{name}": value for name, value in span.attributes.items()}
            if math.isfinite(error_s := errors.get(span.process, math.inf)):
                attributes["baton.clock_error_s"] = error_s
            role = GATEWAY if span.process == GATEWAY else "decode" if span.process in decodes else "prefill"
            yield self._made(span._replace(attributes=attributes), role, unix_offset_s, context=own, parent=above)

    def _made(self, span: TimelineSpan, role: str, unix_offset_s: float, **others: Any) -> "ReadableSpan":
        start_s = span.start_at + unix_offset_s
        return self._span(
            span.name,
            resource=self._resource_of(span.process, role),
            attributes=dict(span.attributes),
            start_time=int(start_s * 1e9),
            end_time=int((start_s + span.duration_s) * 1e9),
            instrumentation_scope=self._scope,
            **others,
        )

    def _context(self, trace_id: str, span_id: str, *, is_remote: bool = False) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, flags)

    def _resource_of(self, process: str, role: str) -> "Resource":
        found = self._resources.get((role, process))
        if found is None:
            if len(self._resources) >= MAX_RESOURCES:  # names of nodes may change with every start
                self._resources.clear()
            names = {"service.name": f"baton-{role}", "service.instance.id": process}
            found = self._resources[role, process] = self._resource.create(names)
        return found


def _gen_ai_attributes(timeline: Timeline) -> dict[str, Any]:
    """The attributes of a whole request. Times are in seconds."""
    assert timeline.trace is not None
    duration_s = timeline.ended_at - timeline.started_at
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": timeline.trace.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": timeline.model,
        "gen_ai.response.model": timeline.model,
        "gen_ai.request.max_tokens": timeline.max_tokens,
        "gen_ai.request.temperature": timeline.temperature,
        "gen_ai.request.top_p": timeline.top_p,
        "gen_ai.response.id": timeline.request_id,
        "gen_ai.usage.input_tokens": timeline.prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
        "gen_ai.request.id": timeline.rid,
        "gen_ai.latency.e2e": duration_s,
        "gen_ai.latency.time_in_queue": (timeline.sent_at or timeline.ended_at) - timeline.started_at,
    }
    if timeline.first_at:
        ttft_s = timeline.first_at - timeline.started_at
        attributes |= {"gen_ai.response.time_to_first_chunk": ttft_s, "gen_ai.latency.time_to_first_token": ttft_s}
    if timeline.status in NORMAL_ENDS:
        attributes["gen_ai.response.finish_reasons"] = (timeline.status,)
    else:
        attributes["error.type"] = timeline.status
    return attributes
