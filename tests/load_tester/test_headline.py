"""The headline, diagnostics, terminal summary and page of runs whose figures are worked out by hand."""

import json
import re
from html import unescape
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.load.records import record
from support.load.reports import report_of

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.analysis.stage_timeline import stage_shares
from scripts.load_tester.reporting.formats import interval, milliseconds, per_second
from scripts.load_tester.reporting.headline import alerts, tiles
from scripts.load_tester.reporting.html_report import page
from scripts.load_tester.reporting.report import Report, command_of
from scripts.load_tester.reporting.svg import Chart
from scripts.load_tester.reporting.text_report import WIDTH, summary_lines

TIMINGS = {"prefill_queue_s": 0.1, "prefill_s": 0.3, "decode_queue_s": 0.02, "transfer_s": 0.05, "join_s": 0.1}
HOSTILE = "</style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[2J" + "long" * 60


def steady(count: int = 40, ttft: float = 0.1, **fields: Any) -> list[RequestRecord]:
    """Requests every second, with a token after ``ttft`` and two more 10 and 20 ms later."""
    return [
        record(at + ttft, at + ttft + 0.01, at + ttft + 0.02, at=float(at), index=at, **fields) for at in range(count)
    ]


def shown_tiles(html: str) -> dict[str, tuple[str, str]]:
    """Value and unit of each tile, by its name."""
    found = re.findall(r'<section class="tile[^>]*><h3>(.*?)</h3>\s*<p class="value">(.*?) <span>(.*?)</span>', html)
    return {unescape(name): (unescape(value), unescape(unit)) for name, value, unit in found}


def tones(report: Report) -> dict[str, str]:
    return {tile.name: tile.tone for tile in tiles(report)}


def test_the_tiles_show_the_figures_of_the_json() -> None:
    report = report_of([*steady(), record(at=40.0, index=40, error="dropped")], slo_ttft="500ms")
    written = json.loads(json.dumps(report.to_dict()))
    assert shown_tiles(page([report])) == {
        "Goodput": (per_second(written["service"]["goodput_per_s"]), "requests/s"),
        "Throughput": (per_second(written["throughput"]["requests_per_s"]), "requests/s"),
        "Output": (per_second(written["throughput"]["output_tokens_per_s"]), "tokens/s"),
        "Failed": ("1", "of 41"),
        "TTFT p50": (milliseconds(written["latency"]["ttft"]["p50"]), "ms"),
        "TTFT p99": (milliseconds(written["latency"]["ttft"]["p99"]), "ms"),
        "ITL p99": (milliseconds(written["latency"]["itl"]["p99"]), "ms"),
        "E2E p50": (milliseconds(written["latency"]["e2e"]["p50"]), "ms"),
    }
    assert shown_tiles(page([report]))["TTFT p50"] == ("100.0", "ms")


def test_the_rate_of_an_open_loop_is_that_of_sessions() -> None:
    """40 and 80 requests in 50 s; in a closed loop, all turns count."""
    turns = [*steady(), *steady(turn=1)]
    rates = [(steady(), {}), (turns, {}), (turns, {"concurrency": 4})]
    found = [tiles(report_of(records, **options))[1].note for records, options in rates]
    assert found == ["0.8/s were sent", "1.6 sessions/s began", "1.6/s were sent"]


def test_tiles_are_judged_by_the_limits_of_the_run() -> None:
    """Of 40 requests, all take 100 ms to the first token; one more takes 2 s."""
    within = report_of(steady(), slo_ttft="500ms")
    assert tones(within)["Goodput"] == tones(within)["TTFT p99"] == "good"
    one_slow = report_of([*steady(), record(43.0, 43.01, at=41.0, index=41)], slo_ttft="500ms")
    assert (tones(one_slow)["Goodput"], tones(one_slow)["TTFT p50"], tones(one_slow)["TTFT p99"]) == (
        "good",
        "good",
        "warn",
    )
    over = report_of(steady(), slo_ttft="50ms")
    assert tones(over)["Goodput"] == tones(over)["TTFT p50"] == "bad"
    (tile,) = [tile for tile in tiles(over) if tile.name == "TTFT p99"]
    assert (tile.judgement, tile.note) == ("over the limit of 50 ms", "40 of 40 requests over the limit")
    assert set(tones(report_of(steady())).values()) == {"", "good"}, "without a limit only the lack of failures is good"


def test_limits_of_requests_are_an_objective() -> None:
    for own in ({"deadline_ms": 500.0}, {"slos": {"ttft": 0.5}}):
        (tile,) = [tile for tile in tiles(report_of(steady(**own))) if tile.name == "Goodput"]
        assert tile.judgement == "100.0% good: reaches 90%"


def test_invalid_runs_and_failures_stand_before_the_tiles() -> None:
    failed = [record(at=40.0 + n, index=40 + n, error="http_429", message="queue is full") for n in range(3)]
    report = report_of([*steady(), *failed])
    report.reasons.append("requests went out late")
    html = page([report])
    assert html.index("INVALID: requests went out late") < html.index('class="tile')
    assert html.index("3 of 43 requests failed: http_429 x 3 (queue is full).") < html.index('class="tile')
    lines = summary_lines(report)
    assert "INVALID" in lines[0] and lines[-1] == "INVALID: requests went out late"
    assert [alert.tone for alert in alerts(report)][:2] == ["bad", "bad"]


@pytest.mark.parametrize(
    "records", [[], [record(at=0.0, error="connect")], steady(1), steady(1, timings=TIMINGS), [record(0.1)]],
    ids=["nothing", "only a failure", "one request", "one with stages", "one token"],
)  # fmt: skip
def test_a_tiny_run_gives_a_whole_report(records: list[RequestRecord]) -> None:
    report = report_of(records, slo_ttft="1s", slo_itl="1s")
    html, lines = page([report]), summary_lines(report)
    assert len(shown_tiles(html)) == 8 and "All options" in html and len(lines) > 10
    assert "nan" not in re.findall(r"[a-z]+", "\n".join(lines)) and "None" not in "\n".join(lines)
    if not any(one.is_ok for one in records):
        assert shown_tiles(html)["TTFT p99"] == ("-", "")
    assert page([report, report])


def test_the_summary_fits_a_terminal_of_80_columns() -> None:
    failed = [record(at=50.0, index=90, error="http_500", message=HOSTILE)]
    named = steady(timings=TIMINGS, tenant=HOSTILE, class_name="a" * 70) + steady(9, tenant="b", class_name="c")
    report = report_of([*named, *failed], slo_ttft="50ms", slo_itl="1ms", slo_e2e="90ms")
    report.server["model"] = report.config["url"] = HOSTILE
    report.notes.append(HOSTILE)
    lines = summary_lines(report)
    assert max(map(len, lines)) <= WIDTH and all(line.isprintable() for line in lines)
    assert lines[0].startswith("Load test of") and any(line.startswith("TTFT p50") for line in lines[:14])


def test_the_summary_says_that_tokens_of_a_server_without_usage_are_events() -> None:
    words = "40 responses without usage: each event counts as one token"
    assert any(words in line for line in summary_lines(report_of(steady())))
    for known in ({"usage_output": 3}, {"has_counts": True}):
        assert not any("without usage" in line for line in summary_lines(report_of(steady(**known))))


def test_hostile_text_cannot_add_elements_or_styles() -> None:
    named = steady(timings={HOSTILE: 0.1}, tenant=HOSTILE, class_name=HOSTILE) + steady(3, tenant="b", class_name="c")
    report = report_of([*named, record(at=50.0, error=HOSTILE, message=HOSTILE)])
    report.server["model"] = report.server[HOSTILE] = HOSTILE
    report.config["mix"] = report.config["url"] = HOSTILE
    html = page([report]) + page([report, report], found=[HOSTILE])
    assert not re.search(r"<script|<img|</style>\"|\x1b", html)
    assert html.count("</style>") == 2 and "default-src 'none'" in html


def test_the_shares_of_successive_stages_add_up_to_one() -> None:
    """Token 1 after 0.5 s, 2 after 0.7 s, 3 after 1.0 s: prefill 0.3 of 1.0, its queue 0.1, first gap 0.2, rest 0.3."""
    stages = {stage.name: stage for stage in stage_shares([record(0.5, 0.7, 1.0, timings=TIMINGS)])}
    shares = {name: round(stage.share, 6) for name, stage in stages.items() if not stage.is_part}
    assert shares == {
        "sent late": 0.0, "gateway and network": 0.1, "prefill queue": 0.1, "prefill": 0.3,
        "first to second token": 0.2, "decode, all later tokens": 0.3,
    }  # fmt: skip
    assert {name for name, stage in stages.items() if stage.is_part} == {
        "decode queue",
        "transfer",
        "first decode token",
    }
    assert (stages["transfer"].p50_s, stages["transfer"].p99_s) == (0.05, 0.05)


@example([0.0, 0.0, 0.0, 5e-324], 3)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40), st.integers(0, 50))
def test_no_interval_of_a_duration_reaches_below_zero(values: list[float], times: int) -> None:
    """Wide intervals of correlated values, too: the sample is repeated in order."""
    found = stats.summary(np.repeat(values, times + 1), np.random.default_rng(0))
    ends = [end for name, pair in found.items() if name.endswith("_ci") and isinstance(pair, list) for end in pair]
    assert all(end is None or end >= 0 for end in ends)


def test_an_interval_of_a_chart_is_clipped_at_zero() -> None:
    chart = Chart("requests/s", "share")
    chart.interval(1.0, -0.5, 0.5, 0)
    assert chart._intervals == [(1.0, 0.0, 0.5, "c0")]


def test_intervals_without_an_end_are_worded() -> None:
    assert [interval(ends) for ends in ([0.01, 0.02], [0.01, None], [None, 0.02], [None, None], None)] == [
        "10.0 to 20.0", "at least 10.0", "at most 20.0", "", "",
    ]  # fmt: skip


def test_the_command_of_a_run_has_its_options_and_no_secret() -> None:
    report = report_of(steady(2), slo_ttft="500ms", api_key="s3cret", mix="a:input=3; b:input=4", live=False, seed=7)
    assert command_of(report.config) == (
        "./scripts/loadtest --seed 7 --mix 'a:input=3; b:input=4' --slo-ttft 500ms --no-live"
    )
    assert "s3cret" not in page([report]) and "--seed 7" in page([report])
