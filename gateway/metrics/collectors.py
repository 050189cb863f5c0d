"""The Prometheus series of the gateway, named ``baton_*``, and those of the nodes, taken from their last heartbeats."""

from collections import Counter as Totals
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.config.shared import ROLES
from common.errors import RECOVERABLE, RequestError
from common.finish_reason import NORMAL_ENDS
from common.metrics.node_series import NodeState, node_families
from common.metrics.series import LabelledCounter, LabelledHistogram
from common.plugins import PriorityFunction
from common.wire.mailbox import Mailbox
from gateway.metrics.queue_metrics import SECONDS, QueueMetrics
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.output_processor import TIMINGS, OutputStream
from gateway.tracing.otlp import OtlpExporter
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import Worker

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
#: Ended outputs are counted together, this many at once, and whenever the metrics are read: each alone would take three
#: times as long, a tenth of the processor time of a short answer.
COUNTED_AT_ONCE = 128
#: They are counted sooner if their prompts together have this many tokens, since they stay in memory until then.
COUNTED_TOKENS = 200_000
#: Of more nodes the gateway shows no series of their own: writing them would take a second. The nodes show them too.
MAX_NODES = 128
#: Stage labels of ``baton_stage_seconds``, by their names in ``OutputStream.timings``.
STAGES = {name: stage for stage, name in TIMINGS.items()}


@dataclass(frozen=True, slots=True)
class MetricTotals:
    """What the metrics of all models count at one instant.

    Attributes:
        num_ended: outputs that ended, with an error or without.
        num_tokens: output tokens, each counted as it comes, except the first, which is counted as its output ends.
        errors: outputs that failed and requests that were refused, by code.
        first_tokens, gaps: observations of each bucket of the times until a first token and between two tokens.
        num_running, num_waiting: outputs that have been sent to nodes, and that wait in the gateway.
    """

    at: float
    num_ended: float
    num_tokens: int
    errors: Mapping[str, int]
    first_token_bounds: Sequence[float]
    first_tokens: Sequence[int]
    gap_bounds: Sequence[float]
    gaps: Sequence[int]
    num_running: int
    num_waiting: int


class Metrics:
    """All series of a gateway.

    Args:
        mailbox: of the control plane.
        exporter: of traces; None without one.
        function: of the user, for priorities; None without one.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        pools: Sequence[WorkerPool],
        mailbox: Mailbox,
        dispatcher: Dispatcher,
        exporter: OtlpExporter | None = None,
        *,
        function: PriorityFunction | None = None,
        starvation_bound_s: float,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self._registry = registry = CollectorRegistry()
        self._pools = pools
        self._uncounted: list[OutputStream] = []  # ended
        self._num_uncounted_tokens = 0  # of their prompts
        counter, histogram = partial(LabelledCounter, registry), partial(LabelledHistogram, registry)
        self._answers = counter("baton_http_answers", "HTTP answers by path and status.", "path", "status")
        self._rejections = counter(
            "baton_rejections", "Requests refused before they were sent to a node, by code.", "model", "reason"
        )
        self._outputs = counter("baton_outputs", "Outputs ended: stop, length, or an error's code.", "model", "end")
        in_flight = Gauge("baton_requests_in_flight", "Outputs in flight.", ["model"], registry=registry)
        self._prompt_tokens = counter("baton_prompt_tokens", "Prompt tokens of ended outputs.", "model")
        self._cached_tokens = counter(
            "baton_cached_tokens", "Prompt tokens of ended outputs that a node's cache held.", "model"
        )
        self._output_tokens = counter("baton_output_tokens", "Output tokens.", "model")
        self._local_prefills = counter(
            "baton_local_prefills", "Outputs whose prompt the decode node computes.", "model"
        )
        self._disconnects = counter("baton_disconnects", "Outputs whose client disconnected before their end.", "model")
        self._retries = counter(
            "baton_idempotent_retries",
            "Requests that got outputs of an earlier one: running or ended.",
            "model",
            "found",
        )
        self._first_token = histogram("baton_time_to_first_token_seconds", "Until the first token.", SECONDS, "model")
        self._whole = histogram("baton_request_seconds", "Until the end of an output.", SECONDS, "model")
        self._per_token = histogram(
            "baton_time_per_output_token_seconds", "Mean over an output, after its first token.", TOKEN_SECONDS, "model"
        )
        self._stages = histogram(
            "baton_stage_seconds", "Time in each stage, as the nodes report it.", SECONDS, "model", "stage"
        )
        self._gaps = histogram("baton_inter_token_seconds", "Between two tokens.", TOKEN_SECONDS, "model")
        tokens = (self._prompt_tokens, self._cached_tokens, self._output_tokens)
        for pool in pools:
            in_flight.labels(pool.model).set_function(partial(getattr, pool.admission, "num_in_flight"))
            for totals in (*tokens, self._local_prefills, self._disconnects):
                totals.add(0, pool.model)  # shown as 0 before the first request
            for times in (self._first_token, self._whole, self._per_token, self._gaps):
                times.of(pool.model)
            for stage in STAGES.values():
                self._stages.of(pool.model, stage)
        self._waits = QueueMetrics(pools, registry, starvation_bound_s=starvation_bound_s)
        ProcessCollector(registry=registry)
        registry.register(_NodeCollector(pools, mailbox))
        registry.register(_RecoveryCollector(pools, dispatcher))
        if exporter is not None:
            registry.register(_ExportCollector(exporter))
        if function is not None:
            registry.register(_FunctionCollector(function))

    # ---- events -----------------------------------------------------------------------------------------------------

    def answered(self, path: str, status: int) -> None:
        self._answers.add(1, path, str(status))

    def rejected(self, model: str, error: RequestError) -> None:
        """Count a request refused before it was sent to a node; the model is empty if it names no served one."""
        self._rejections.add(1, model, str(error.code))

    def on_gap(self, model: str) -> Callable[[float, int], None]:
        """The function to which outputs of a model report times between tokens."""
        return self._gaps.of(model).add

    def disconnected(self, output: OutputStream) -> None:
        self._disconnects.add(1, output.request.model)

    def retried(self, model: str, *, is_ended: bool) -> None:
        self._retries.add(1, model, "ended" if is_ended else "running")

    def ended(self, output: OutputStream) -> None:
        self._uncounted.append(output)
        self._num_uncounted_tokens += len(output.request.prompt)
        if len(self._uncounted) >= COUNTED_AT_ONCE or self._num_uncounted_tokens >= COUNTED_TOKENS:
            self._count_ended()

    def _count_ended(self) -> None:
        outputs, self._uncounted, self._num_uncounted_tokens = self._uncounted, [], 0
        for model in dict.fromkeys([output.request.model for output in outputs]):
            self._count(model, [output for output in outputs if output.request.model == model])

    def _count(self, model: str, outputs: Sequence[OutputStream]) -> None:
        """Count ended outputs of one model."""
        for end, count in Totals([output.end for output in outputs]).items():
            self._outputs.add(count, model, end)
        self._local_prefills.add(sum([output.is_local_prefill for output in outputs]), model)
        self._prompt_tokens.add(sum([len(output.request.prompt) for output in outputs]), model)
        self._cached_tokens.add(sum([output.cached_tokens for output in outputs]), model)
        self._output_tokens.add(sum([len(output.ids) for output in outputs]), model)
        timings = [output.timings for output in outputs]
        for name, stage in STAGES.items():
            self._stages.of(model, stage).add_all([seconds[name] for seconds in timings if name in seconds])
        self._waits.ended(model, outputs, timings)
        begun = [output for output in outputs if output.first_at]
        self._first_token.of(model).add_all([output.first_at - output.started_at for output in begun])
        finished = [output for output in outputs if output.finish]
        self._whole.of(model).add_all([output.ended_at - output.started_at for output in finished])
        self._per_token.of(model).add_all(
            [(one.ended_at - one.first_at) / (len(one.ids) - 1) for one in finished if len(one.ids) > 1]
        )

    def totals(self, now: float) -> MetricTotals:
        """The totals of now. It copies a few dozen numbers, so that it can be called every second."""
        self._count_ended()
        num_waiting = sum(len(pool.queue) for pool in self._pools)
        errors: Totals[str] = Totals()
        for (_, reason), count in self._rejections.values.items():
            errors[reason] += int(count)
        for (_, end), count in self._outputs.values.items():
            if end not in NORMAL_ENDS:
                errors[end] += int(count)
        first_tokens, gaps = self._first_token.counts(), self._gaps.counts()
        return MetricTotals(
            at=now,
            num_ended=sum(self._outputs.values.values()),
            num_tokens=sum(first_tokens) + sum(gaps),
            errors=errors,
            first_token_bounds=SECONDS,
            first_tokens=first_tokens,
            gap_bounds=TOKEN_SECONDS,
            gaps=gaps,
            num_running=sum(pool.admission.num_in_flight for pool in self._pools) - num_waiting,
            num_waiting=num_waiting,
        )

    def text(self) -> bytes:
        self._count_ended()
        return generate_latest(self._registry)


class _RecoveryCollector:
    def __init__(self, pools: Sequence[WorkerPool], dispatcher: Dispatcher) -> None:
        self._pools = pools
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        recoveries = CounterMetricFamily(
            "baton_recoveries",
            "Further attempts at requests whose last attempt ended without their fault, by its code.",
            labels=["model", "reason"],
        )
        resting = GaugeMetricFamily(
            "baton_resting_pairs", "Pairs of nodes without requests since their transfers failed.", labels=["model"]
        )
        for pool in self._pools:
            for code in sorted(RECOVERABLE):
                recoveries.add_metric([pool.model, code], self._dispatcher.recoveries[pool.model, code])
            resting.add_metric([pool.model], len(pool.registry.health.resting()))
        yield recoveries
        yield resting


class _ExportCollector:
    def __init__(self, exporter: OtlpExporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "baton_traces_exported", "Requests whose spans the collector took.", value=self._exporter.num_exported
        )
        yield CounterMetricFamily(
            "baton_traces_dropped",
            "Sampled requests whose spans the collector did not take.",
            value=self._exporter.num_dropped,
        )


class _FunctionCollector:
    def __init__(self, function: PriorityFunction) -> None:
        self._function = function

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "baton_priority_function_failures",
            "Calls of --priority-function that failed or gave an invalid priority.",
            value=self._function.failures.count,
        )


class _NodeCollector:
    """Shows the nodes' series, from their last heartbeats."""

    def __init__(self, pools: Sequence[WorkerPool], mailbox: Mailbox) -> None:
        self._pools = pools
        self._mailbox = mailbox

    def collect(self) -> Iterator[Metric]:
        nodes = [node for pool in self._pools for node in pool.registry.workers.values()]
        counts = Totals((node.register.model, node.register.role) for node in nodes)
        roles = GaugeMetricFamily("baton_nodes", "Registered nodes by role.", labels=["model", "role"])
        for pool in self._pools:
            for role in ROLES:
                roles.add_metric([pool.model, role], counts[pool.model, role])
        yield roles
        advised = GaugeMetricFamily(
            "baton_advised_nodes", "Nodes that the present load needs, by role.", labels=["model", "role"]
        )
        for pool in self._pools:
            for advice in pool.advisor.advice.roles:
                advised.add_metric([pool.model, advice.role], advice.advised)
        yield advised
        yield from node_families(map(_state_of, nodes if len(nodes) <= MAX_NODES else ()))
        dropped = CounterMetricFamily("baton_control_messages_dropped", "Control messages dropped.", labels=["reason"])
        for reason, count in self._mailbox.dropped.items():
            dropped.add_metric([reason], count)
        yield dropped
        refused = CounterMetricFamily(
            "baton_control_connections_refused", "Control connections refused.", labels=["reason"]
        )
        for reason, count in self._mailbox.refused.items():
            refused.add_metric([reason], count)
        yield refused


def _state_of(node: Worker) -> NodeState:
    register = node.register
    return NodeState((register.model, node.name, register.role), register.num_pages, node.heartbeat, node.pairs)
