"""Prometheus series of the queue, by model and priority class: waiting times, starved and waiting requests, policy."""

from collections import Counter as Totals
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from common.metrics.series import LabelledCounter, LabelledHistogram
from common.request import LOWEST_PRIORITY
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
LABELS = ("model", "class")
#: Different priorities that have a label of their own; clients choose them, so there must be a bound.
MAX_PRIORITIES = 16


class QueueMetrics:
    def __init__(self, pools: Sequence[WorkerPool], registry: CollectorRegistry, *, starvation_bound_s: float) -> None:
        self._pools = pools
        self._bound_s = starvation_bound_s
        self._waited = LabelledHistogram(
            registry, "baton_waiting_seconds", "Until a node began with the prompt.", SECONDS, *LABELS
        )
        self._starved = LabelledCounter(
            registry, "baton_starved", "Outputs that waited longer than --starvation-bound.", *LABELS
        )
        self._waited_by_priority = LabelledHistogram(
            registry,
            "baton_priority_waiting_seconds",
            "The same by priority, with --enable-priority-scheduling.",
            SECONDS,
            "model",
            "priority",
        )
        self._priorities: dict[int, str] = {LOWEST_PRIORITY: "none"}
        self._by_priority = {pool.model for pool in pools if pool.queue.order.rules.is_enabled}
        for pool in pools:
            for name in pool.queue.class_names:  # shown as 0 before the first request
                self._waited.of(pool.model, name)
                self._starved.add(0, pool.model, name)
        registry.register(self)

    def ended(self, model: str, outputs: Sequence[OutputStream], timings: Sequence[Mapping[str, float]]) -> None:
        """Count ended outputs of one model. Each waited until a node started its prompt, or else until its end.

        Args:
            timings: of each output.
        """
        waited: dict[str, list[float]] = {}
        by_priority: dict[str, list[float]] = {}
        for output, seconds in zip(outputs, timings, strict=True):
            if output.sent_at and output.first_at:
                waited_s = output.sent_at - output.started_at + seconds.get("prefill_queue_s", 0.0)
            else:
                waited_s = output.ended_at - output.started_at
            waited.setdefault(output.request.priority_class, []).append(waited_s)
            if model in self._by_priority:
                by_priority.setdefault(self._priority_label(output.request.priority), []).append(waited_s)
        for name, values in waited.items():
            self._waited.of(model, name).add_all(values)
            self._starved.add(sum([value > self._bound_s for value in values]), model, name)
        for label, values in by_priority.items():
            self._waited_by_priority.of(model, label).add_all(values)

    def _priority_label(self, priority: int) -> str:
        """The label of a priority; ``other`` for those that come after the first different ones."""
        if priority not in self._priorities and len(self._priorities) <= MAX_PRIORITIES:
            self._priorities[priority] = str(priority)
        return self._priorities.get(priority, "other")

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("baton_requests_waiting", "Outputs that wait in the gateway.", labels=LABELS)
        policy = GaugeMetricFamily(
            "baton_schedule_policy",
            "1 for the policy that orders the gateway's queue now.",
            labels=["model", "policy"],
        )
        for pool in self._pools:
            now = Totals(request.priority_class for request in pool.queue.requests())
            for name in pool.queue.class_names:
                waiting.add_metric([pool.model, name], now[name])
            policy.add_metric([pool.model, pool.queue.policy], 1)
        yield waiting
        yield policy
