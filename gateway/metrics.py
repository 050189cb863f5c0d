"""Prometheus series of the gateway, named ``baton_*``, in a registry of their own; and those of the nodes, passed on
from their heartbeats at the moment of a scrape."""

import re
from collections import Counter as Totals
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.registry import Node
from gateway.relay import Relay

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
HEARTBEAT_GAUGES = ("num_waiting", "num_running", "num_free_pages", "num_cached_pages", "num_quarantined_pages")


class Metrics:
    """All series.

    Args:
        nodes: gives the registered nodes.
        dropped: counts of control messages dropped, by reason.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, nodes: Callable[[], Iterable[Node]], dropped: Callable[[], Totals[str]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody reads
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "baton_http_answers_total", "HTTP answers by path and status.", ["path", "status"], registry=self._registry
        )
        self._outputs = Counter(
            "baton_outputs_total", "Outputs ended: stop, length, or an error's code.", ["end"], registry=self._registry
        )
        self.in_flight = Gauge("baton_requests_in_flight", "Outputs under way.", registry=self._registry)
        self._prompt_tokens = self._counter("baton_prompt_tokens_total", "Prompt tokens of ended outputs.")
        self._cached_tokens = self._counter("baton_cached_tokens_total", "Prompt tokens found in prefill's cache.")
        self._output_tokens = self._counter("baton_output_tokens_total", "Output tokens.")
        self._first_token = self._histogram("baton_time_to_first_token_seconds", "Until the first token.", SECONDS)
        self._whole = self._histogram("baton_request_seconds", "Until the end of an output.", SECONDS)
        self._per_token = self._histogram(
            "baton_time_per_output_token_seconds", "Mean over an output, after its first token.", TOKEN_SECONDS
        )
        self._registry.register(_NodeCollector(nodes, dropped))
        self._labelled: dict[tuple[str, int], Counter] = {}

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(name, words, registry=self._registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, words, buckets=buckets, registry=self._registry)

    def answered(self, path: str, status: int) -> None:
        """One HTTP answer has been given."""
        counter = self._labelled.get((path, status))
        if counter is None:
            counter = self._labelled[path, status] = self._answers.labels(path, str(status))
        counter.inc()

    def ended(self, relay: Relay) -> None:
        """One output has ended."""
        self._outputs.labels(relay.finish or (str(relay.error.code) if relay.error else "")).inc()
        self._prompt_tokens.inc(len(relay.ask.prompt))
        self._cached_tokens.inc(relay.cached_tokens)
        self._output_tokens.inc(len(relay.ids))
        if relay.first_at:
            self._first_token.observe(relay.first_at - relay.started_at)
        if relay.finish:
            self._whole.observe(relay.ended_at - relay.started_at)
            if len(relay.ids) > 1:
                self._per_token.observe((relay.ended_at - relay.first_at) / (len(relay.ids) - 1))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _NodeCollector:
    """Series of the nodes, made from their last heartbeats when somebody asks."""

    def __init__(self, nodes: Callable[[], Iterable[Node]], dropped: Callable[[], Totals[str]]) -> None:
        self._nodes = nodes
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        nodes = list(self._nodes())
        roles = GaugeMetricFamily("baton_nodes", "Registered nodes by role.", labels=["role"])
        for role in ("prefill", "decode"):
            roles.add_metric([role], sum(node.register.role == role for node in nodes))
        yield roles
        for name in HEARTBEAT_GAUGES:
            gauge = GaugeMetricFamily(f"baton_node_{name[4:]}", f"{name} by node.", labels=["node", "role"])
            for node in nodes:
                if node.heartbeat is not None:
                    gauge.add_metric([node.name, node.register.role], getattr(node.heartbeat, name))
            yield gauge
        yield from self._totals(nodes)
        dropped = CounterMetricFamily("baton_control_messages_dropped", "Control messages dropped.", labels=["reason"])
        for reason, count in self._dropped().items():
            dropped.add_metric([reason], count)
        yield dropped

    @staticmethod
    def _totals(nodes: list[Node]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for node in nodes:
            counters = node.heartbeat.counters if node.heartbeat is not None else {}
            for name, value in sorted(counters.items()):
                plain = name.removeprefix("baton_").removesuffix("_total")
                clean = "baton_node_" + re.sub(r"[^a-zA-Z0-9_]", "_", plain)
                if clean not in families:
                    families[clean] = CounterMetricFamily(clean, f"{name} by node.", labels=["node", "role"])
                families[clean].add_metric([node.name, node.register.role], value)
        yield from families.values()
