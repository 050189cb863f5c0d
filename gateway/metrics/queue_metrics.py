"""Prometheus series of waiting: for how long, who starved, who waits now, and by which policy, by class of request."""

from bisect import bisect_left
from collections import Counter as Totals
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.scheduling.policies.adaptive import Adaptive
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
Label = tuple[str, str]  # model and class


class Waits:
    """Args:
    fleets: the models served.
    starvation_bound_s: whoever has waited longer has starved.
    """

    def __init__(self, fleets: Sequence[WorkerPool], *, starvation_bound_s: float) -> None:
        self._fleets = fleets
        self._bound_s = starvation_bound_s
        self._counts: dict[Label, list[int]] = {}
        self._sums: dict[Label, float] = {}
        self._starved: Totals[Label] = Totals()
        for fleet in fleets:
            for name in _classes(fleet):
                self._counts[fleet.model, name] = [0] * (len(SECONDS) + 1)
                self._sums[fleet.model, name] = 0.0
                self._starved[fleet.model, name] = 0

    def ended(self, relay: OutputStream) -> None:
        """One output has ended: it waited until a node began with its prompt, or for nothing."""
        if relay.sent_at and relay.first_at:
            seconds = relay.sent_at - relay.started_at + relay.timings.get("prefill_queue_s", 0.0)
        else:
            seconds = relay.ended_at - relay.started_at
        label = (relay.ask.model, relay.ask.priority_class)
        self._counts[label][bisect_left(SECONDS, seconds)] += 1
        self._sums[label] += seconds
        self._starved[label] += seconds > self._bound_s

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "class"]
        waited = HistogramMetricFamily("baton_waiting_seconds", "Until a node began with the prompt.", labels=labels)
        bounds = [*map(str, SECONDS), "+Inf"]
        for label, counts in self._counts.items():
            waited.add_metric(list(label), list(zip(bounds, accumulate(counts), strict=True)), self._sums[label])
        yield waited
        starved = CounterMetricFamily(
            "baton_starved", "Outputs that waited longer than --starvation-bound.", labels=labels
        )
        for label, count in self._starved.items():
            starved.add_metric(list(label), count)
        yield starved
        waiting = GaugeMetricFamily("baton_requests_waiting", "Outputs that wait in the gateway.", labels=labels)
        policy = GaugeMetricFamily(
            "baton_schedule_policy",
            "1 for the policy that orders the gateway's queue now, and what has decided that.",
            labels=["model", "policy", "why"],
        )
        measured = GaugeMetricFamily(
            "baton_adaptive_measured",
            "What adaptive goes by: requests in the queue, and shares of them.",
            labels=["model", "measure"],
        )
        for fleet in self._fleets:
            now = Totals(request.priority_class for request in fleet.backlog.requests())
            for name in _classes(fleet):
                waiting.add_metric([fleet.model, name], now[name])
            chosen = fleet.backlog.order.policy
            why = chosen.why if isinstance(chosen, Adaptive) else "configured"
            policy.add_metric([fleet.model, fleet.backlog.policy, why], 1)
            for name, value in chosen.measured.items() if isinstance(chosen, Adaptive) else ():
                measured.add_metric([fleet.model, name], value)
        yield waiting
        yield policy
        yield measured


def _classes(fleet: WorkerPool) -> list[str]:
    """Names of the classes; one without a name if there are none."""
    return list(fleet.backlog.order.rules.class_weights) or [""]
