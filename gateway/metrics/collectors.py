"""Prometheus series of the gateway, named ``baton_*``, in a registry of their own; and those of the nodes, passed on
from their heartbeats at the moment of a scrape."""

import re
from bisect import bisect_left
from collections import Counter as Totals
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.errors import RequestError
from gateway.metrics.queue_metrics import SECONDS, Waits
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import Node
from gateway.workers.router import Pair

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
HEARTBEAT_GAUGES = ("num_waiting", "num_running", "num_free_pages", "num_cached_pages", "num_quarantined_pages")
#: What nodes say in ``Tokens.timings`` of a request's way, as labels of one series.
STAGES = {
    "prefill_queue_s": "prefill_queue",
    "prefill_s": "prefill",
    "decode_queue_s": "decode_queue",
    "prompt_wait_s": "prompt_wait",
    "transfer_s": "transfer",
    "join_s": "join",
}


class Gaps:
    """A histogram of times between tokens. Prometheus' own takes a lock for every observation; this is met by every
    token of every stream."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TOKEN_SECONDS) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, count: int) -> None:
        """``count`` tokens, each so long after the one before."""
        self.counts[bisect_left(TOKEN_SECONDS, seconds)] += count
        self.sum_s += seconds * count


class _Refusing:
    """A context that counts the named errors that leave it."""

    def __init__(self, rejections: Counter, model: str) -> None:
        self._rejections = rejections
        self._model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError):
            self._rejections.labels(self._model, str(error.code)).inc()


@dataclass(frozen=True, slots=True)
class _Series:
    """One model's children of the labelled series."""

    prompt_tokens: Counter
    cached_tokens: Counter
    output_tokens: Counter
    local_prefills: Counter
    disconnects: Counter
    first_token: Histogram
    whole: Histogram
    per_token: Histogram
    stages: dict[str, Histogram]
    gaps: Gaps


class Metrics:
    """All series.

    Args:
        fleets: the models served, with their nodes.
        dropped: counts of control messages dropped, by reason.
        starvation_bound_s: whoever waits longer starves.

    Attributes:
        refusing: by model, what to do the work under that comes before any node hears of a request: if that ends in a
            named error, it counts as a rejection. No model stands for requests that have named none of ours yet.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self, fleets: Sequence[WorkerPool], dropped: Callable[[], Totals[str]], *, starvation_bound_s: float
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody reads
        self._registry = CollectorRegistry()
        self._answers = self._counter("baton_http_answers_total", "HTTP answers by path and status.", "path", "status")
        self._rejections = self._counter(
            "baton_rejections_total", "Requests refused before any node heard of them, by code.", "model", "reason"
        )
        self.refusing = {
            model: _Refusing(self._rejections, model) for model in ("", *(fleet.model for fleet in fleets))
        }
        self._outputs = self._counter(
            "baton_outputs_total", "Outputs ended: stop, length, or an error's code.", "model", "end"
        )
        in_flight = Gauge("baton_requests_in_flight", "Outputs under way.", ["model"], registry=self._registry)
        for fleet in fleets:
            in_flight.labels(fleet.model).set_function(partial(getattr, fleet.admission, "num_in_flight"))
        self._series = self._all_series([fleet.model for fleet in fleets])
        self._waits = Waits(fleets, starvation_bound_s=starvation_bound_s)
        self._registry.register(self._waits)
        self._registry.register(_NodeCollector(fleets, dropped))
        self._registry.register(_GapCollector({model: series.gaps for model, series in self._series.items()}))
        self._labelled: dict[tuple[str, int], Counter] = {}
        self._ends: dict[tuple[str, str], Counter] = {}

    def _all_series(self, models: Sequence[str]) -> dict[str, _Series]:
        prompt = self._counter("baton_prompt_tokens_total", "Prompt tokens of ended outputs.", "model")
        cached = self._counter("baton_cached_tokens_total", "Of those, the ones found in a node's cache.", "model")
        output = self._counter("baton_output_tokens_total", "Output tokens.", "model")
        local = self._counter(
            "baton_local_prefills_total", "Outputs whose prompt the decode node was to compute.", "model"
        )
        disconnects = self._counter("baton_disconnects_total", "Outputs ended because the client had gone.", "model")
        first = self._histogram("baton_time_to_first_token_seconds", "Until the first token.", SECONDS)
        whole = self._histogram("baton_request_seconds", "Until the end of an output.", SECONDS)
        per_token = self._histogram(
            "baton_time_per_output_token_seconds", "Mean over an output, after its first token.", TOKEN_SECONDS
        )
        stages = self._histogram("baton_stage_seconds", "Time in each stage, as the nodes tell it.", SECONDS, "stage")
        return {
            model: _Series(
                prompt_tokens=prompt.labels(model),
                cached_tokens=cached.labels(model),
                output_tokens=output.labels(model),
                local_prefills=local.labels(model),
                disconnects=disconnects.labels(model),
                first_token=first.labels(model),
                whole=whole.labels(model),
                per_token=per_token.labels(model),
                stages={name: stages.labels(model, stage) for name, stage in STAGES.items()},
                gaps=Gaps(),
            )
            for model in models
        }

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self._registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, words, ("model", *labels), buckets=buckets, registry=self._registry)

    # ---- events -----------------------------------------------------------------------------------------------------

    def answered(self, path: str, status: int) -> None:
        """One HTTP answer has been given."""
        counter = self._labelled.get((path, status))
        if counter is None:
            counter = self._labelled[path, status] = self._answers.labels(path, str(status))
        counter.inc()

    def started(self, relay: OutputStream, pair: Pair) -> None:
        """One output has been sent out."""
        if pair.prefill is None:
            self._series[relay.ask.model].local_prefills.inc()

    def on_gap(self, model: str) -> Callable[[float, int], None]:
        """Where the outputs of a model report the time between tokens."""
        return self._series[model].gaps.add

    def disconnected(self, relay: OutputStream) -> None:
        """The client of an output has gone before its end."""
        self._series[relay.ask.model].disconnects.inc()

    def ended(self, relay: OutputStream) -> None:
        """One output has ended."""
        self._waits.ended(relay)
        series = self._series[relay.ask.model]
        end = (relay.ask.model, relay.finish or (str(relay.error.code) if relay.error else ""))
        counter = self._ends.get(end)
        if counter is None:
            counter = self._ends[end] = self._outputs.labels(*end)
        counter.inc()
        series.prompt_tokens.inc(len(relay.ask.prompt))
        if relay.cached_tokens:
            series.cached_tokens.inc(relay.cached_tokens)
        series.output_tokens.inc(len(relay.ids))
        for name, seconds in relay.timings.items():
            if name in series.stages:
                series.stages[name].observe(seconds)
        if relay.first_at:
            series.first_token.observe(relay.first_at - relay.started_at)
        if relay.finish:
            series.whole.observe(relay.ended_at - relay.started_at)
            if len(relay.ids) > 1:
                series.per_token.observe((relay.ended_at - relay.first_at) / (len(relay.ids) - 1))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _GapCollector:
    """The series of times between tokens."""

    def __init__(self, gaps: dict[str, Gaps]) -> None:
        self._gaps = gaps

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily("baton_inter_token_seconds", "Between two tokens.", labels=["model"])
        bounds = [*map(str, TOKEN_SECONDS), "+Inf"]
        for model, gaps in self._gaps.items():
            family.add_metric([model], list(zip(bounds, accumulate(gaps.counts), strict=True)), gaps.sum_s)
        yield family


class _NodeCollector:
    """Series of the nodes, made from their last heartbeats when somebody asks."""

    LABELS = ("model", "node", "role")

    def __init__(self, fleets: Sequence[WorkerPool], dropped: Callable[[], Totals[str]]) -> None:
        self._fleets = fleets
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        nodes = [node for fleet in self._fleets for node in fleet.registry.nodes.values()]
        roles = GaugeMetricFamily("baton_nodes", "Registered nodes by role.", labels=["model", "role"])
        for fleet in self._fleets:
            for role in ("prefill", "decode"):
                count = sum(node.register.role == role for node in fleet.registry.nodes.values())
                roles.add_metric([fleet.model, role], count)
        yield roles
        pages = GaugeMetricFamily("baton_node_pages", "Pages of a node's pool.", labels=self.LABELS)
        for node in nodes:
            pages.add_metric(_labels(node), node.register.num_pages)
        yield pages
        for name in HEARTBEAT_GAUGES:
            gauge = GaugeMetricFamily(f"baton_node_{name[4:]}", f"{name} by node.", labels=self.LABELS)
            for node in nodes:
                if node.heartbeat is not None:
                    gauge.add_metric(_labels(node), getattr(node.heartbeat, name))
            yield gauge
        pairs = GaugeMetricFamily(
            "baton_node_pair",
            "1 for each pair in which pages can travel, 0 for each in which they should and cannot.",
            labels=[*self.LABELS, "peer", "transport", "why"],
        )
        for node in nodes:
            for pair in node.pairs:
                pairs.add_metric(
                    [*_labels(node), pair.peer, pair.transport, pair.problem or pair.why], not pair.problem
                )
        yield pairs
        yield from self._totals(nodes)
        dropped = CounterMetricFamily("baton_control_messages_dropped", "Control messages dropped.", labels=["reason"])
        for reason, count in self._dropped().items():
            dropped.add_metric([reason], count)
        yield dropped

    def _totals(self, nodes: Iterable[Node]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for node in nodes:
            counters = node.heartbeat.counters if node.heartbeat is not None else {}
            for name, value in sorted(counters.items()):
                plain = name.removeprefix("baton_").removesuffix("_total")
                clean = "baton_node_" + re.sub(r"[^a-zA-Z0-9_]", "_", plain)
                if clean not in families:
                    families[clean] = CounterMetricFamily(clean, f"{name} by node.", labels=self.LABELS)
                families[clean].add_metric(_labels(node), value)
        yield from families.values()


def _labels(node: Node) -> list[str]:
    return [node.register.model, node.name, node.register.role]
