"""Stages of a request, node charts, and charts as files, with values worked out by hand."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from support.load.records import record

from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.analysis.stage_timeline import Span, median_spans, spans_of
from scripts.load_tester.reporting.charts import gantt_charts, rate_charts, timeline_charts, waterfall_charts
from scripts.load_tester.reporting.node_usage import node_charts
from scripts.load_tester.reporting.svg import Chart, log_ticks

TIMINGS = {
    "prefill_queue_s": 0.1, "prefill_s": 0.3, "decode_queue_s": 0.02, "prompt_wait_s": 0.38, "transfer_s": 0.05,
    "join_s": 0.1,
}  # fmt: skip


def timed() -> RequestRecord:
    """Sent 0.1 s late; tokens 1.0, 1.2, 1.3 and 1.5 s after the intended instant, 2.0."""
    return record(3.0, 3.2, 3.3, 3.5, at=2.0, late=0.1, timings=TIMINGS)


def rounded(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (round(span.begin_s, 6), round(span.length_s, 6)) for span in spans}


def test_prefill_stages_end_with_the_first_token_and_decode_stages_with_the_second() -> None:
    assert rounded(spans_of(timed())) == {
        "sent late": (0.0, 0.1),
        "gateway and network": (0.1, 0.5),
        "prefill queue": (0.6, 0.1),
        "prefill": (0.7, 0.3),
        "decode queue": (0.65, 0.02),
        "decode waits for the prompt": (0.67, 0.38),
        "transfer": (1.05, 0.05),
        "first decode token": (1.1, 0.1),
        "first to second token": (1.0, 0.2),
        "steady decode, a token": (1.2, 0.15),
    }


def test_without_server_timings_the_stages_are_the_clients() -> None:
    plain = record(3.0, 3.2, 3.3, at=2.0)
    assert rounded(spans_of(plain)) == {
        "sent late": (0.0, 0.0),
        "until the first token": (0.0, 1.0),
        "first to second token": (1.0, 0.2),
        "steady decode, a token": (1.2, 0.1),
    }
    assert waterfall_charts([plain]) == [], "a waterfall needs the server's stages"
    assert rounded(spans_of(record(3.0, at=2.0))) == {"sent late": (0.0, 0.0), "until the first token": (0.0, 1.0)}


def test_an_untimed_queue_does_not_count_as_network() -> None:
    """llama.cpp times the prefill and not its queue; SGLang without metrics only the queue, which may lie anywhere."""
    prefill_only = rounded(spans_of(record(3.0, at=2.0, timings={"prefill_s": 0.3})))
    assert prefill_only["queue, gateway and network"] == (0.0, 0.7) and prefill_only["prefill"] == (0.7, 0.3)
    assert "gateway and network" not in prefill_only
    queue_only = rounded(spans_of(record(3.0, at=2.0, timings={"queue_s": 0.3})))
    assert queue_only == {"sent late": (0.0, 0.0), "until the first token": (0.0, 1.0)}


def test_medians_are_taken_over_the_requests_that_have_the_stage() -> None:
    three = [record(length, at=0.0, timings={"prefill_s": length}) for length in (1.0, 2.0, 4.0)]
    found = rounded(median_spans([*three, record(9.0, at=0.0)]))
    assert found["prefill"] == (0.0, 2.0)
    assert found["until the first token"] == (0.0, 9.0)


def test_the_waterfall_names_every_stage_in_order() -> None:
    """A stage of length 0 is shown too, since it tells that there was no queue."""
    ((_, chart),) = waterfall_charts([record(3.0, 3.2, at=2.0, timings=TIMINGS | {"prefill_queue_s": 0.0})])
    shown = re.findall(r"(?:>|^)([a-z ,]+)  ([\d.]+) ms<", chart.svg())
    assert [name for name, _ in dict.fromkeys(shown)] == [
        "sent late", "gateway and network", "decode queue", "decode waits for the prompt", "prefill queue", "prefill",
        "first to second token", "transfer", "first decode token",
    ]  # fmt: skip
    assert dict(shown)["prefill queue"] == "0.00" and dict(shown)["transfer"] == "50.0"


def test_the_gantt_chart_has_a_bar_for_each_stage_and_names_them() -> None:
    ((_, chart),) = gantt_charts([timed(), record(at=1.0, error="dropped", ended_s=4.0)])
    drawn = chart.svg()
    names = re.findall(r"<title>([^:#]*):", drawn)
    assert names == [
        "until the first token",
        *("sent late", "gateway and network", "prefill queue", "prefill"),
        *("first to second token", "decode, all later tokens"),
    ]
    assert ("c5", "failed") in chart.names


def test_many_requests_get_a_close_view_of_the_highest_concurrency() -> None:
    """One request per second for 100 s, each 0.5 s long, and ten more in second 70."""
    many = [record(at + 0.5, at=float(at)) for at in range(100)]
    crowd = [record(71.0, at=70.05 + number / 100) for number in range(10)]
    (_, whole), (title, close) = gantt_charts([*crowd, *many])
    assert title == "40 requests around the highest concurrency"
    begins = sorted(begin for _, begin, *_ in close._bars)
    assert len(whole._bars) == 110 and len(close._bars) == 40
    # The last of the crowd, at 70.14, has 71 + 9 before it: from the 60th, at 60, to the 99th, at 89.
    assert (begins[0], begins[-1]) == (60.0, 89.0)
    assert len(gantt_charts(many[:80])) == 1


def test_the_gantt_chart_says_which_of_many_requests_it_shows() -> None:
    many = [record(at + 0.5, at=float(at)) for at in range(300)]
    labels = [gantt_charts(several)[0][1].y_label for several in (many[:200], many, 2 * many)]
    assert labels == ["requests", "requests, one of 2", "requests, one of 3"]


def test_counters_become_rates_from_one_change_to_the_next() -> None:
    """Read every second, refreshed every two: 1.5 busy seconds in the first two, 1 in the next, then nothing."""
    values = [10.0, 10.0, 11.5, 11.5, 12.5, 12.5, 12.5, 12.5, 12.5, 12.5]
    scrape = {'x_node_busy_seconds_total{node="p"}': [[float(at), value] for at, value in enumerate(values)]}
    charts = node_charts(scrape)
    assert [title for title, _ in charts] == ["Busy with steps, share of the time"]
    drawn = charts[0][1].svg()
    heights = [round(float(y), 1) for y in re.findall(r"[ML][\d.]+,([\d.]+)", drawn)]
    top, bottom = 14.0, 220.0
    shares = [round((bottom - height) / (bottom - top), 2) for height in heights]
    assert shares == [0.75, 0.75, 0.5, 0.5, 0.0, 0.0]


def test_pages_in_use_are_neither_free_nor_only_cached() -> None:
    """Of 35 pages in the cache, requests hold 5."""
    series = {"pages": 100.0, "free_pages": 60.0, "cached_pages": 35.0, "evictable_pages": 30.0}
    scrape = {
        f'x_node_{name}{{node="d",role="decode"}}': [[1.0, value], [2.0, value]] for name, value in series.items()
    }
    charts = node_charts(scrape)
    assert charts[0][0] == "KV pages in use, share of the pool"
    (height,) = {float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", charts[0][1].svg())}
    assert (220 - height) / (220 - 14) == pytest.approx(0.1, abs=0.001)


def test_gauges_of_other_servers_are_shown_as_they_are() -> None:
    names = ['vllm:num_requests_running{engine="0"}', "sglang:token_usage", "llamacpp:requests_processing", "x_total"]
    charts = node_charts({name: [[0.0, 1.0], [1.0, 2.0]] for name in names})
    assert [title for title, _ in charts] == ["Num requests running", "Token usage", "Requests processing"]
    assert [chart.y_label for _, chart in charts] == [name.partition("{")[0] for name in names[:3]]


def test_a_replaced_node_counts_from_zero_again() -> None:
    """10 busy seconds by 10 s; a new process has 0.2 at 12 s, and is busy half of the time from then on."""
    series = [[0.0, 9.0], [10.0, 10.0], [12.0, 0.2], [14.0, 1.2]]
    ((_, chart),) = node_charts({'baton_node_busy_seconds_total{node="a"}': series})
    ((_, points, _, _),) = chart._marks
    assert points == [(0.0, 0.1), (10.0, 0.1), (12.0, 0.5), (14.0, 0.5)]


def test_a_title_says_how_many_nodes_are_left_out() -> None:
    names = [f'x_running{{node="n{number}"}}' for number in range(9)]
    ((title, chart),) = node_charts({name: [[0.0, 1.0], [1.0, 2.0]] for name in names})
    assert title == "Running (the first 6 of 9)" and len(chart.names) == 6


def test_thinning_keeps_spikes() -> None:
    """100,000 points, all at 1 except one at 9 and one at 0.1."""
    heights = [1.0] * 100_000
    heights[33_333], heights[70_001] = 9.0, 0.1
    chart = Chart("s", "ms")
    chart.dots([(float(at), height) for at, height in enumerate(heights)], 0)
    ((_, points, _, _),) = chart._marks
    assert len(points) <= 3001 and {(33_333.0, 9.0), (70_001.0, 0.1), (99_999.0, 1.0)} <= set(points)


def test_zeros_on_a_logarithmic_axis_are_drawn_at_its_lower_end() -> None:
    """Two tokens arrive together, 5 ms before the third; a request fails at 8 s; all charts span 8 s."""
    charts = dict(timeline_charts([record(1.0, 1.0, 1.005), record(at=7.0, index=1, error="dropped", ended_s=8.0)]))
    ((_, gaps, _, _),) = charts["Gap between tokens"]._marks
    assert gaps == [(1.0, 0.1), (1.005, pytest.approx(5.0))]
    assert charts["Gap between tokens"].svg().count("<circle") == 2
    failed = {
        title: [points for _, points, _, name in chart._marks if name == "failed"] for title, chart in charts.items()
    }
    assert failed["Time to first token"] == failed["End to end"] == [[(7.0, 0.0)]]
    assert {chart.x for chart in charts.values()} == {(0.0, 1.02 * 8.0)}
    ((_, tokens, _, _),) = charts["Tokens per second"]._marks
    assert tokens[-1] == (pytest.approx(7.875), 0.0), "none came after the first two seconds"
    (rated,) = [
        chart for title, chart in rate_charts({"": [run_at(1.0, 0.0)]}) if title == "Gap between tokens by rate"
    ]
    assert rated._marks[0][1] == [(1.0, 0.1)]


def test_the_legend_names_dashed_lines_and_a_single_sample_is_a_dot() -> None:
    chart = Chart("s", "ms")
    chart.line([(1, 2.0), (2, 3.0)], 0, "p50", is_dashed=True)
    assert chart.names == [("c0", "p50, dashed")]
    ((_, lone),) = node_charts({"mock_running": [[0.5, 2.0]]})
    assert "<circle" in lone.svg()


def test_tokens_are_counted_by_usage_where_events_hold_several() -> None:
    """Four events in a second; the usage says 40 tokens."""
    one = record(0.05, 0.15, 0.2, 0.24, num_output=40, usage_output=40)
    tokens = dict(timeline_charts([one]))["Tokens per second"]
    ((_, points, _, _),) = tokens._marks
    assert points == [(0.125, 160.0)]


def test_a_narrow_range_has_ticks() -> None:
    assert log_ticks(11, 88) == [15, 20, 30, 40, 50, 60, 80]
    assert log_ticks(31, 54) == [35, 40, 45, 50]
    assert log_ticks(0.01, 1000) == [0.01, 0.1, 1, 10, 100, 1000]


def run_at(rate: float | None, p50: float, *, is_valid: bool = True) -> dict[str, Any]:
    latency = {"count": 1, "p50": p50, "p95": p50, "p99": p50}
    own = {"rate": rate, "is_valid": is_valid, "latency": dict.fromkeys(("ttft", "itl", "e2e"), latency)}
    return own | {"throughput": {"requests_per_s": 1.0}, "service": {"goodput_per_s": 1.0}}


def test_invalid_runs_are_grey_and_in_no_line() -> None:
    """The runs of a search: 5, 8 (invalid) and 4 requests/s, and one without a rate."""
    runs = [run_at(5.0, 0.2), run_at(8.0, 0.9, is_valid=False), run_at(4.0, 0.1), run_at(None, 0.3)]
    chart = dict(rate_charts({"": runs}))["Time to first token by rate"]
    lines = [points for kind, points, _, name in chart._marks if kind == "line" and name == "p50"]
    assert lines == [[(4.0, 100.0), (5.0, 200.0)]]
    assert next(points for _, points, colour, _ in chart._marks if colour == "c6") == [(8.0, 900.0)]
    assert ("c6", "invalid") in chart.names
    served = dict(rate_charts({"": runs}))["Throughput and goodput by rate"]
    assert [len(points) for _, points, _, _ in served._marks] == [2, 2]


def test_control_characters_are_replaced_in_a_file() -> None:
    chart = Chart("s", "ms \x1b[31m\x00")
    chart.bar(0.0, 0.0, 1.0, 0, "a\x0bb\ud800</title><script>")
    tree = ElementTree.fromstring(chart.file("t\x07").encode())
    (title,) = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert title == "a\ufffdb\ufffd</title><script>"


def test_a_chart_file_is_self_contained() -> None:
    chart = Chart("requests/s", "ms <p50>", is_log_y=True)
    chart.line([(1, 2.0), (2, 3.0)], 0, "one & two")
    chart.line([(1, 4.0), (2, 9.0)], 1, "p99")
    tree = ElementTree.fromstring(chart.file("Rate against latency"))
    texts = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:3] == ["Rate against latency", "one & two", "p99"]
    assert "ms <p50>" in texts
    for number in range(2, 6):
        chart.line([(1, 2.0)], number, "a name that takes its room")
    keys = ElementTree.fromstring(chart.file("x")).findall("{http://www.w3.org/2000/svg}rect")
    places = [(float(key.get("x", "")), float(key.get("y", ""))) for key in keys]
    assert len({y for _, y in places}) == 4 and max(x for x, _ in places) < 480 - 170, "a long legend takes more lines"
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", chart.file("x")), "nothing from outside"
