"""``GET /metrics`` of one node: the series ``baton_node_*``, and what vLLM and SGLang users chart, under those names.

Each event is counted once, in ``RequestStats``, ``StepStats`` or a total of the role. The tables below give a count the
names that other projects have for it. A node shows only what it has done itself, so that sums over nodes are right.
"""

import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.metrics.distribution import Distribution
from common.metrics.node_series import LABELS, NodeState, node_families
from common.metrics.series import add_distribution
from common.node.event_loop import Snapshot
from common.node.monitoring.http_server import Answer
from common.node.monitoring.request_stats import RequestStats, StepStats

Histograms = dict[str, tuple[str, tuple[str, ...]]]
#: Distributions of ``RequestStats`` by name: what each is, and its names.
REQUEST_HISTOGRAMS: Histograms = {
    "time_to_first_token": (
        "Seconds from a request's arrival at the gateway to its first token.",
        ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    ),
    "inter_token": (
        "Seconds between two tokens of an output.",
        (
            *("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            "sglang:inter_token_latency_seconds",
        ),
    ),
    "end_to_end": (
        "Seconds from a request's arrival at the gateway to its last token.",
        ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    ),
    "queue": (
        "Seconds from a request's arrival at the gateway to the start of its prompt.",
        ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    ),
    "prefill": ("Seconds in which a prompt was computed.", ("vllm:request_prefill_time_seconds",)),
    "decode": ("Seconds from the first to the last token.", ("vllm:request_decode_time_seconds",)),
    "prompt_tokens": (
        "Tokens of the prompts of finished requests.",
        ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
    ),
    "output_tokens": (
        "Tokens of the outputs of finished requests.",
        ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram"),
    ),
    "max_tokens": (
        "The most tokens that finished requests could produce.",
        ("vllm:request_params_max_tokens", "vllm:request_max_num_generation_tokens"),
    ),
}
#: The same for the distributions of ``StepStats``.
STEP_HISTOGRAMS: Histograms = {
    "seconds": ("Seconds of one step of the engine.", ("baton_node_step_seconds",)),
    "rows": ("Requests in one step of the engine.", ("baton_node_step_rows",)),
    "tokens": ("Tokens that one step of the engine computed.", ("vllm:iteration_tokens_total",)),
}


class Series(NamedTuple):
    """A gauge or a total with one value."""

    name: str
    text: str
    value: Callable[["Figures"], float]


class Identity(NamedTuple):
    """What labels and totals say of a node beside what happens on it."""

    name: str
    role: str
    model: str
    num_pages: int
    page_size: int


class Figures:
    """The numbers of a snapshot that the tables below read.

    Args:
        snapshots: one, or the two latest, of which rates are made.
    """

    def __init__(self, identity: Identity, snapshots: tuple[Snapshot, ...], stats: RequestStats) -> None:
        heartbeat = snapshots[-1].heartbeat
        self._snapshots = snapshots
        self.load = heartbeat
        self.totals = heartbeat.counters
        self.gauges = heartbeat.gauges
        self.stats = stats
        self.is_decode = identity.role == "decode"
        self.page_size = identity.page_size
        self.num_pages = identity.num_pages
        self.num_evictable = heartbeat.gauges["evictable_pages"]
        self.num_used = identity.num_pages - heartbeat.num_free_pages - self.num_evictable

    def total(self, *names: str) -> float:
        """The sum of these totals; one that this role does not have is 0."""
        return sum(self.totals.get(name, 0.0) for name in names)

    def num_transfers(self, *stages: str) -> float:
        """Transfers at these stages, by any transport."""
        prefixes = tuple(f"transfers_by_{stage}_by_" for stage in stages)
        return sum(value for name, value in self.gauges.items() if name.startswith(prefixes))

    def prefix_queries(self) -> float:
        return self.total("prompt_tokens", "granted_tokens")

    def prefix_hits(self) -> float:
        return self.total("prompt_tokens_cached") + self.page_size * self.total("pages_cached")

    def throughput(self) -> float:
        """Output tokens per second between the two latest snapshots."""
        first, last = self._snapshots[0], self._snapshots[-1]
        name = "output_tokens"
        num_tokens = last.heartbeat.counters.get(name, 0.0) - first.heartbeat.counters.get(name, 0.0)
        return num_tokens / (last.at - first.at) if last.at > first.at else 0.0


#: Gauges and totals under vLLM's names, with its labels ``model_name`` and ``engine``, and under SGLang's, with its
#: labels ``model_name``, ``engine_type``, ``tp_rank`` and ``pp_rank``.
GAUGES = (
    Series("vllm:num_requests_running", "Requests that hold pages.", lambda f: f.load.num_running),
    Series("vllm:num_requests_waiting", "Requests that wait for pages.", lambda f: f.load.num_waiting),
    Series("vllm:kv_cache_usage_perc", "Share of pages in use; 1 is all.", lambda f: f.num_used / f.num_pages),
    Series("sglang:num_running_reqs", "Requests that hold pages.", lambda f: f.load.num_running),
    Series("sglang:num_queue_reqs", "Requests that wait for pages.", lambda f: f.load.num_waiting),
    Series("sglang:token_usage", "Share of pages in use; 1 is all.", lambda f: f.num_used / f.num_pages),
    Series("sglang:num_used_tokens", "Tokens of pages in use.", lambda f: f.num_used * f.page_size),
    Series("sglang:kv_used_tokens", "Tokens of pages in use.", lambda f: f.num_used * f.page_size),
    Series("sglang:kv_available_tokens", "Tokens of free pages.", lambda f: f.load.num_free_pages * f.page_size),
    Series("sglang:kv_evictable_tokens", "Tokens of cached pages not in use.", lambda f: f.num_evictable * f.page_size),
    Series("sglang:max_total_num_tokens", "Tokens of the whole pool.", lambda f: f.num_pages * f.page_size),
    Series("sglang:gen_throughput", "Tokens sampled per second, over the last second or so.", Figures.throughput),
    Series(
        "sglang:cache_hit_rate",
        "Share of looked up prompt tokens that were in this node's cache.",
        lambda f: f.prefix_hits() / max(1.0, f.prefix_queries()),
    ),
    Series(
        "sglang:num_prefill_bootstrap_queue_reqs",
        "Transfers for which the decode node has granted no pages.",
        lambda f: f.num_transfers("waiting_for_grant"),
    ),
    Series(
        "sglang:num_prefill_inflight_queue_reqs",
        "Transfers with pages to write, being written, or not acknowledged.",
        lambda f: f.num_transfers("waiting_to_write", "writing", "waiting_for_ack"),
    ),
    Series(
        "sglang:num_decode_prealloc_queue_reqs",
        "Requests that wait for pages on a decode node.",
        lambda f: f.load.num_waiting if f.is_decode else 0,
    ),
    Series(
        "sglang:num_decode_transfer_queue_reqs",
        "Transfers whose pages are being received.",
        lambda f: f.num_transfers("receiving", "waiting_for_connection"),
    ),
)
TOTALS = (
    Series("vllm:prompt_tokens", "Tokens of prompts computed or cached here.", lambda f: f.total("prompt_tokens")),
    Series("vllm:generation_tokens", "Tokens sampled here.", lambda f: f.total("output_tokens")),
    Series("vllm:prefix_cache_queries", "Prompt tokens looked up in this node's cache.", Figures.prefix_queries),
    Series("vllm:prefix_cache_hits", "Prompt tokens found in this node's cache.", Figures.prefix_hits),
    Series(
        "vllm:num_preemptions",
        "Requests that lost their pages or their row while they ran.",
        lambda f: f.total("retractions", "pauses"),
    ),
    Series("sglang:prompt_tokens", "Tokens of prompts computed or cached here.", lambda f: f.total("prompt_tokens")),
    Series("sglang:generation_tokens", "Tokens sampled here.", lambda f: f.total("output_tokens")),
    Series("sglang:cached_tokens", "Prompt tokens found in this node's cache.", Figures.prefix_hits),
    Series("sglang:num_requests", "Requests that ended here.", lambda f: sum(f.stats.ends.values())),
    Series("sglang:num_aborted_requests", "Requests that were aborted.", lambda f: f.stats.ends["abort"]),
    Series("sglang:num_retracted_requests", "Requests that lost their pages.", lambda f: f.total("retractions")),
    Series(
        "sglang:num_transfer_failed_reqs",
        "Transfers that failed.",
        lambda f: sum(value for name, value in f.totals.items() if name.startswith("transfers_failed_by_")),
    ),
)
#: Labels of single series beside those.
MORE_LABELS = {"sglang:cached_tokens": {"cache_source": "device"}}


class NodeMetrics:
    """Answers ``GET /metrics``; safe on any thread.

    Args:
        snapshots: returns the event loop's two latest.
    """

    def __init__(
        self, identity: Identity, snapshots: Callable[[], tuple[Snapshot, ...]], stats: RequestStats, steps: StepStats
    ) -> None:
        self._identity = identity
        self._snapshots = snapshots
        self._stats = stats
        self._steps = steps
        self._process = ProcessCollector(registry=None)
        self._labels = {
            "vllm": {"model_name": identity.model, "engine": "0"},
            "sglang": {"model_name": identity.model, "engine_type": identity.role, "tp_rank": "0", "pp_rank": "0"},
            "baton_node": dict(zip(LABELS, (identity.model, identity.name, identity.role), strict=True)),
        }

    def answer(self) -> Answer:
        return Answer(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """All families. Lets other threads run after each, since the event loop must not wait for all of them."""
        for family in self._families():
            yield family
            time.sleep(0)

    def _families(self) -> Iterator[Metric]:
        identity, snapshots = self._identity, self._snapshots()
        for table, source in ((REQUEST_HISTOGRAMS, self._stats), (STEP_HISTOGRAMS, self._steps)):
            for attribute, (text, names) in table.items():
                for name in names:
                    yield self._histogram(name, text, getattr(source, attribute))
        yield self._ends()
        yield from self._process.collect()
        if not snapshots:
            return
        last = snapshots[-1]
        labels = (identity.model, identity.name, identity.role)
        yield from node_families([NodeState(labels, identity.num_pages, last.heartbeat, last.pairs)])
        figures = Figures(identity, snapshots, self._stats)
        for gauge in GAUGES:
            yield self._family(GaugeMetricFamily, gauge, figures)
        for total in TOTALS:
            yield self._family(CounterMetricFamily, total, figures)

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], series: Series, figures: Figures
    ) -> Metric:
        labels = self._labels_of(series.name) | MORE_LABELS.get(series.name, {})
        family = kind(series.name, series.text, labels=list(labels))
        family.add_metric(list(labels.values()), series.value(figures))
        return family

    def _labels_of(self, name: str) -> dict[str, str]:
        family, colon, _ = name.partition(":")
        return self._labels[family if colon else "baton_node"]

    def _histogram(self, name: str, text: str, values: Distribution) -> Metric:
        labels = self._labels_of(name)
        family = HistogramMetricFamily(name, text, labels=list(labels))
        add_distribution(family, list(labels.values()), values)
        return family

    def _ends(self) -> Metric:
        labels = self._labels_of("vllm:request_success")
        text = "Requests that ended here, by reason."
        family = CounterMetricFamily("vllm:request_success", text, labels=[*labels, "finished_reason"])
        for reason, count in self._stats.ends.items():
            family.add_metric([*labels.values(), reason], count)
        return family
