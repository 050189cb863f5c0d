"""A node's ``/metrics``: values by hand, one count under all of its names, and text that Prometheus can read."""

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.node.event_loop import Snapshot
from common.node.monitoring.metrics import Identity, NodeMetrics
from common.node.monitoring.request_stats import RequestStats, StepStats
from common.request import Request
from common.sampling_params import SamplingParams
from common.wire.messages import Heartbeat, PairState

IDENTITY = Identity("decode-0", "decode", "m", num_pages=100, page_size=16)
COUNTERS = {
    "output_tokens": 50.0, "prompt_tokens": 40.0, "granted_tokens": 60.0, "prompt_tokens_cached": 4.0,
    "pages_cached": 1.0, "retractions": 3.0, "pauses": 2.0, "bytes_by_tcp": 4096.0, "bytes_saved_by_cache": 7.0,
    "transfer_seconds_by_tcp": 0.5, "transfers_failed_by_node_lost": 2.0, "transfers_failed_by_transfer_failed": 1.0,
}  # fmt: skip
GAUGES = {
    "evictable_pages": 10.0, "transfers_by_receiving_by_tcp": 3.0, "transfers_by_receiving_by_shm": 1.0,
    "transfers_by_quarantined_by_tcp": 5.0,
}  # fmt: skip
BATON = {"model": "m", "node": "decode-0", "role": "decode"}
VLLM = {"model_name": "m", "engine": "0"}
SGLANG = {"model_name": "m", "engine_type": "decode", "tp_rank": "0", "pp_rank": "0"}


def snapshot(at=10.0, **counters):
    heartbeat = Heartbeat(7, 5, 60, 30, 2, {**COUNTERS, **counters}, GAUGES)
    return Snapshot(at, heartbeat, (PairState("prefill-0", "p" * 32, "tcp", "asked for"),))


def samples(*snapshots, stats=None, steps=None):
    """Values by name and labels."""
    shown = NodeMetrics(IDENTITY, lambda: snapshots, stats or RequestStats(), steps or StepStats()).answer()
    assert shown.status == 200
    families = list(text_string_to_metric_families(shown.body.decode()))
    found = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    assert len(found) == sum(len(family.samples) for family in families), "one series is there twice"
    return found


def value(found, name, labels, **more):
    return found[name, frozenset({**labels, **more}.items())]


def test_gauges_are_those_of_the_last_snapshot_under_every_name():
    found = samples(snapshot(9.0), snapshot(10.0))
    for name, expected in (
        ("num_requests_running", 5), ("num_requests_waiting", 7), ("kv_cache_usage_perc", 0.3),
    ):  # fmt: skip
        assert value(found, f"vllm:{name}", VLLM) == expected
    for name, expected in (
        ("num_running_reqs", 5), ("num_queue_reqs", 7), ("token_usage", 0.3), ("num_used_tokens", 480),
        ("kv_available_tokens", 960), ("kv_evictable_tokens", 160), ("max_total_num_tokens", 1600),
        ("num_decode_transfer_queue_reqs", 4), ("num_decode_prealloc_queue_reqs", 7),
        ("num_prefill_inflight_queue_reqs", 0),
    ):  # fmt: skip
        assert value(found, f"sglang:{name}", SGLANG) == expected
    for name, expected in (("running", 5), ("waiting", 7), ("pages", 100), ("free_pages", 60), ("evictable_pages", 10)):
        assert value(found, f"baton_node_{name}", BATON) == expected
    assert value(found, "baton_node_open_transfers", BATON, stage="quarantined", transport="tcp") == 5
    assert value(found, "baton_node_pair", BATON, peer="prefill-0", transport="tcp", why="asked for") == 1


def test_totals_are_those_of_the_last_snapshot_under_every_name():
    found = samples(snapshot())
    for name, expected in (
        ("prompt_tokens", 40), ("generation_tokens", 50), ("num_preemptions", 5), ("prefix_cache_queries", 100),
        ("prefix_cache_hits", 20),
    ):  # fmt: skip
        assert value(found, f"vllm:{name}_total", VLLM) == expected
    for name, expected in (
        ("prompt_tokens", 40), ("generation_tokens", 50), ("num_retracted_requests", 3),
        ("num_transfer_failed_reqs", 3),
    ):  # fmt: skip
        assert value(found, f"sglang:{name}_total", SGLANG) == expected
    assert value(found, "sglang:cached_tokens_total", SGLANG, cache_source="device") == 20
    assert value(found, "sglang:cache_hit_rate", SGLANG) == 0.2
    assert value(found, "baton_node_transfer_bytes_total", BATON, transport="tcp") == 4096
    assert value(found, "baton_node_transfer_seconds_total", BATON, transport="tcp") == 0.5
    assert value(found, "baton_node_transfers_failed_total", BATON, reason="node_lost") == 2
    assert value(found, "baton_node_bytes_saved_by_cache_total", BATON) == 7


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ((snapshot(9.5, output_tokens=30.0), snapshot(10.0)), 40.0),
        ((snapshot(),), 0.0),
    ],
)
def test_throughput_is_that_between_two_snapshots(snapshots, expected):
    assert value(samples(*snapshots), "sglang:gen_throughput", SGLANG) == expected


def test_a_distribution_is_shown_under_all_of_its_names():
    stats, steps = RequestStats(), StepStats()
    one = Request("r", 0, (1, 2), SamplingParams(max_new_tokens=3), arrived_at=1.0, admitted_at=2.0, output=[5])
    stats.first_token(one, 4.0)
    stats.sampled([one], 4.25)
    stats.finished(one, "length", 4.25)
    steps.add(0.004, 3, 20, num_prompt_tokens=18)
    found = samples(snapshot(), stats=stats, steps=steps)
    for labels, names, total in (
        (VLLM, ("vllm:time_to_first_token_seconds",), 3.0),
        (SGLANG, ("sglang:time_to_first_token_seconds",), 3.0),
        (VLLM, ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"), 0.25),
        (VLLM, ("vllm:e2e_request_latency_seconds",), 3.25),
        (SGLANG, ("sglang:e2e_request_latency_seconds",), 3.25),
        (VLLM, ("vllm:request_queue_time_seconds",), 1.0),
        (VLLM, ("vllm:request_prefill_time_seconds",), 2.0),
        (VLLM, ("vllm:request_decode_time_seconds",), 0.25),
        (VLLM, ("vllm:request_prompt_tokens",), 2.0),
        (VLLM, ("vllm:request_generation_tokens",), 1.0),
        (VLLM, ("vllm:request_params_max_tokens", "vllm:request_max_num_generation_tokens"), 3.0),
        (VLLM, ("vllm:iteration_tokens_total",), 20.0),
        (BATON, ("baton_node_step_seconds",), 0.004),
        (BATON, ("baton_node_step_rows",), 3.0),
    ):
        for name in names:
            assert value(found, f"{name}_sum", labels) == total
            assert value(found, f"{name}_count", labels) == value(found, f"{name}_bucket", labels, le="+Inf") == 1
    assert value(found, "vllm:time_to_first_token_seconds_bucket", VLLM, le="2.5") == 0
    assert value(found, "vllm:time_to_first_token_seconds_bucket", VLLM, le="5.0") == 1
    ends = {reason: value(found, "vllm:request_success_total", VLLM, finished_reason=reason) for reason in stats.ends}
    assert ends == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_before_the_first_snapshot_there_are_only_distributions():
    names = {name for name, _ in samples()}
    assert "vllm:request_success_total" in names
    assert "vllm:num_requests_running" not in names


def test_the_memory_of_the_process_is_shown():
    rss = psutil.Process().memory_info().rss
    assert value(samples(), "process_resident_memory_bytes", {}) == pytest.approx(rss, rel=0.5)


def test_a_name_with_other_characters_is_shown_with_underscores():
    found = samples(snapshot(**{"odd name!": 3.0, "bytes_by_a_by_b": 4.0}))
    assert value(found, "baton_node_odd_name__total", BATON) == 3
    assert value(found, "baton_node_bytes_by_a_by_b_total", BATON) == 4
