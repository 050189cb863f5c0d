"""The Prometheus series of the gateway, named ``baton_*``, and those of the nodes, taken from their last heartbeats."""

from collections import Counter as Totals
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.errors import RequestError
from common.metrics.node_series import NodeState, node_families
from common.metrics.series import LabelledCounter, LabelledHistogram
from gateway.metrics.queue_metrics import SECONDS, QueueMetrics
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import Worker

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
#: Stage labels of ``baton_stage_seconds``, by the key in ``Tokens.timings``.
STAGES = {
    "prefill_queue_s": "prefill_queue",
    "prefill_s": "prefill",
    "decode_queue_s": "decode_queue",
    "prompt_wait_s": "prefill_wait",
    "transfer_s": "transfer",
    "join_s": "batch_join",
}


class Metrics:
    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, pools: Sequence[WorkerPool], dropped: Totals[str], *, starvation_bound_s: float) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self._registry = registry = CollectorRegistry()
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
        self._disconnects = counter("baton_disconnects", "Outputs ended because the client disconnected.", "model")
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
        registry.register(_NodeCollector(pools, dropped))

    # ---- events -----------------------------------------------------------------------------------------------------

    def answered(self, path: str, status: int) -> None:
        self._answers.add(1, path, str(status))

    def rejected(self, model: str, error: RequestError) -> None:
        """Counts a request refused before it was sent to a node; the model is empty if it names no served one."""
        self._rejections.add(1, model, str(error.code))

    def on_gap(self, model: str) -> Callable[[float, int], None]:
        """The function to which outputs of a model report times between tokens."""
        return self._gaps.of(model).add

    def disconnected(self, output: OutputStream) -> None:
        self._disconnects.add(1, output.request.model)

    def ended(self, output: OutputStream) -> None:
        self._waits.ended(output)
        model = output.request.model
        self._outputs.add(1, model, output.finish or (str(output.error.code) if output.error else ""))
        if output.is_local_prefill:
            self._local_prefills.add(1, model)
        self._prompt_tokens.add(len(output.request.prompt), model)
        self._cached_tokens.add(output.cached_tokens, model)
        self._output_tokens.add(len(output.ids), model)
        for name, seconds in output.timings.items():
            if name in STAGES:
                self._stages.of(model, STAGES[name]).add(seconds)
        if output.first_at:
            self._first_token.of(model).add(output.first_at - output.started_at)
        if output.finish:
            self._whole.of(model).add(output.ended_at - output.started_at)
            if len(output.ids) > 1:
                self._per_token.of(model).add((output.ended_at - output.first_at) / (len(output.ids) - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _NodeCollector:
    """Shows the nodes' series, from their last heartbeats."""

    def __init__(self, pools: Sequence[WorkerPool], dropped: Totals[str]) -> None:
        self._pools = pools
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        nodes = [node for pool in self._pools for node in pool.registry.workers.values()]
        counts = Totals((node.register.model, node.register.role) for node in nodes)
        roles = GaugeMetricFamily("baton_nodes", "Registered nodes by role.", labels=["model", "role"])
        for pool in self._pools:
            for role in ("prefill", "decode"):
                roles.add_metric([pool.model, role], counts[pool.model, role])
        yield roles
        yield from node_families(map(_state_of, nodes))
        dropped = CounterMetricFamily("baton_control_messages_dropped", "Control messages dropped.", labels=["reason"])
        for reason, count in self._dropped.items():
            dropped.add_metric([reason], count)
        yield dropped


def _state_of(node: Worker) -> NodeState:
    register = node.register
    return NodeState((register.model, node.name, register.role), register.num_pages, node.heartbeat, node.pairs)
