"""One answer made of those of several gateways."""

import json

from gateway.siblings.combining import COMBINED, combine_metrics, is_miss, is_owned

PAGES = {
    1: """# HELP a_total A.
# TYPE a_total counter
a_total 3.0
# HELP baton_nodes Nodes.
# TYPE baton_nodes gauge
baton_nodes{role="decode"} 2.0
# HELP h_seconds H.
# TYPE h_seconds histogram
h_seconds_bucket{le="1.0",model="m"} 1.0
h_seconds_count{model="m"} 1.0
""",
    0: """# HELP a_total A.
# TYPE a_total counter
a_total 4.0
# HELP baton_nodes Nodes.
# TYPE baton_nodes gauge
baton_nodes{role="decode"} 1.0
# HELP b B.
# TYPE b gauge
b{x="a b\u2028c"} 1.0
""",
}


def combined(method, path, *answers, limit=100):
    return json.loads(COMBINED[method, path]([json.dumps(answer).encode() for answer in answers], limit))


def test_series_of_each_gateway_get_its_label_and_those_of_nodes_stay_as_they_are():
    assert (
        combine_metrics(PAGES)
        == """# HELP a_total A.
# TYPE a_total counter
a_total{gateway="1"} 3.0
a_total{gateway="0"} 4.0
# HELP baton_nodes Nodes.
# TYPE baton_nodes gauge
baton_nodes{role="decode"} 2.0
# HELP h_seconds H.
# TYPE h_seconds histogram
h_seconds_bucket{gateway="1",le="1.0",model="m"} 1.0
h_seconds_count{gateway="1",model="m"} 1.0
# HELP b B.
# TYPE b gauge
b{gateway="0",x="a b\u2028c"} 1.0
"""
    )


def test_counts_are_added():
    assert combined("POST", "/abort_request", {"aborted": 1}, {"aborted": 2}) == {"aborted": 3}
    info = combined("GET", "/server_info", {"model": "m", "num_in_flight": 4}, {"model": "m", "num_in_flight": 1})
    assert info == {"model": "m", "num_in_flight": 5}


def test_the_newest_requests_of_all_are_listed():
    lists = [{"requests": [{"rid": f"{name}{at}", "started_at": at} for at in (5, 3, 1)]} for name in "ab"]
    assert [row["rid"] for row in combined("GET", "/v1/requests", *lists, limit=3)["requests"]] == ["a5", "b5", "a3"]


def test_the_last_decisions_of_all_are_listed_oldest_first():
    lists = [{"worker": "gateway", "decisions": [{"ago_s": s} for s in ages]} for ages in ((9, 2), (5, 1))]
    found = combined("GET", "/v1/workers/gateway/decisions", *lists, limit=3)
    assert found == {"worker": "gateway", "decisions": [{"ago_s": 5}, {"ago_s": 2}, {"ago_s": 1}]}


def test_nodes_have_the_requests_of_all_gateways():
    first = {"workers": [{"incarnation": "x", "num_requests": 1}], "num_in_flight": 2, "num_waiting": 1}
    other = {
        "workers": [{"incarnation": "y", "num_requests": 7}, {"incarnation": "x", "num_requests": 3}],
        "num_in_flight": 5,
        "num_waiting": 0,
    }
    assert combined("GET", "/v1/workers", first, other) == {
        "workers": [{"incarnation": "x", "num_requests": 4}],
        "num_in_flight": 7,
        "num_waiting": 1,
    }


def test_pages_that_any_gateway_flushed_are_counted():
    first = {"num_pages": 5, "nodes": [{"name": "p", "num_pages": 5}]}
    other = {"num_pages": 1, "nodes": [{"name": "p", "num_pages": 1}, {"name": "new", "num_pages": 0}]}
    assert combined("POST", "/flush_cache", first, other) == {"num_pages": 6, "nodes": [{"name": "p", "num_pages": 6}]}


def sample(requests_per_s, ttft_p50_s, running):
    names = ("tokens_per_s", "errors_per_s", "waiting")
    times = ("ttft_p99_s", "inter_token_p50_s", "inter_token_p99_s")
    return {
        "requests_per_s": requests_per_s,
        "ttft_p50_s": ttft_p50_s,
        "running": running,
        **dict.fromkeys(names, 0),
        **dict.fromkeys(times),
    }


def test_the_live_page_adds_rates_and_shows_the_slowest_times():
    queue = {"model": "m", "priority_class": "", "policy": "fcfs"}
    answers = [
        {
            "samples": [sample(1.0, None, 1), sample(2.1, 0.5, 2)],
            "queues": [{**queue, "waiting": 1, "oldest_wait_s": 0.5}],
            "errors": [{"code": "aborted", "total": 4, "last_minute": 1}],
        },
        {
            "samples": [sample(0.2, 0.7, 3)],
            "queues": [{**queue, "waiting": 0, "oldest_wait_s": None}],
            "errors": [
                {"code": "no_route", "total": 9, "last_minute": 3},
                {"code": "aborted", "total": 1, "last_minute": 1},
            ],
        },
    ]
    live = combined("GET", "/v1/live", *answers)
    assert [(one["requests_per_s"], one["ttft_p50_s"], one["running"]) for one in live["samples"]] == [
        (1.0, None, 1),
        (2.3, 0.7, 5),
    ]
    assert live["samples"][1]["ttft_p99_s"] is None
    assert live["queues"] == [{**queue, "waiting": 1, "oldest_wait_s": 0.5}]
    assert live["errors"] == [
        {"code": "no_route", "total": 9, "last_minute": 3},
        {"code": "aborted", "total": 5, "last_minute": 2},
    ]


def test_what_one_gateway_alone_has_is_asked_for_elsewhere_once_it_is_missed():
    assert all(map(is_owned, ("/v1/requests/a/b/timeline", "/v1/requests/x/priority", "/v1/responses/resp_1")))
    assert not any(map(is_owned, ("/v1/requests", "/v1/responses", "/v1/workers")))
    assert is_miss(404, b'{"error":{"code":"not_found"}}')
    assert is_miss(400, b'{"error":{"code":"previous_response_not_found"}}')
    assert not is_miss(400, b'{"error":{"code":"invalid_request"}}')
    assert not is_miss(200, b'"not_found"')
