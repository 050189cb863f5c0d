"""Whole runs against a mock server that records what it did."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config.shared import SMALL_MODEL
from common.errors import ConfigError
from scripts.benchmarks.harness.mock_server import load, mock_server
from scripts.load_tester.client import client_pool
from scripts.load_tester.command import load_command
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.run import run_load


def are_figures_of(figures: dict[str, float], values: list[float]) -> None:
    assert figures["mean"] == pytest.approx(float(np.mean(values)))
    assert figures["p50"] == pytest.approx(float(np.median(values)))


def test_every_latency_follows_from_the_stamps_and_every_token_is_counted(tmp_path: Path) -> None:
    slos = {"slo_ttft": "60s", "slo_itl": "60s", "slo_tpot": "60s", "slo_e2e": "60s"}
    with mock_server(tmp_path, "--ttft", "0.05", "--itl", "0.01") as server:
        report = load(server, rate="50", num_requests=50, output_len="12", input_len="40", tenants=2, seed=3, **slos)
    assert report.num_requests == len(server.truth) == 50
    truth = sorted(server.truth, key=lambda one: one["arrived_at"])
    records = sorted(report.records, key=lambda record: record.sent_s)
    own_gaps = [list(itertools.pairwise(record.stamps_s)) for record in records]
    are_figures_of(report.latency["itl"], [b - a for own in own_gaps for a, b in own])
    are_figures_of(report.latency["first_gap"], [b - a for (a, b), *_ in own_gaps])
    for name, at in (("ttft", 0), ("e2e", -1)):
        took_s = [record.stamps_s[at] - record.released_s for record in records]
        are_figures_of(report.latency[name + "_sent"], took_s)
        are_figures_of(report.latency[name], [record.stamps_s[at] - record.intended_s for record in records])
        true_s = [one["stamps"][at] - one["arrived_at"] for one in truth]
        assert all(own >= its for own, its in zip(sorted(took_s), sorted(true_s), strict=True))
    length = max(record.stamps_s[-1] for record in records)  # from the first intended instant, 0, to the last token
    assert report.throughput["requests_per_s"] == pytest.approx(50 / length)
    assert report.throughput["output_tokens_per_s"] == pytest.approx(600 / length)
    assert report.throughput["input_tokens_per_s"] == pytest.approx(2000 / length)
    assert report.service["good"] == 50 and not report.service["misses"]
    assert report.fairness["service_jain"] == 1
    assert report.tokens["output_said"] == report.tokens["output_counted"] == 50 * 12
    assert report.tokens["input_said"] == report.tokens["input_asked"] == 50 * 40
    assert report.tokens["usage_mismatches"] == report.tokens["other_length_than_asked"] == 0
    assert report.errors["count"] == 0 and report.service["attainment"] == 1


def test_the_wait_behind_a_stalled_server_counts_from_the_intended_instant(tmp_path: Path) -> None:
    """20 requests/s for 4 s, four served at a time, nothing moves for 3 s: most of the 80 requests wait over a second.

    A busy machine makes these waits longer, never shorter.
    """
    with mock_server(tmp_path, "--ttft", "0.02", "--capacity", "4", "--stall", "0.5:3") as server:
        report = load(server, rate="20", arrival="constant", num_requests=80, output_len="1")
    assert report.latency["ttft"]["p95"] > 2.7
    assert report.latency["ttft"]["p50"] > 1.0
    released = [record.released_s for record in report.records]
    assert max(released) < report.latency["ttft"]["max"] + 4, "no request waited for the response of another"


@pytest.mark.slow
def test_drops_refusals_errors_in_the_stream_and_hangs_are_told_apart(tmp_path: Path) -> None:
    flags = ("--drop", "5", "--refuse", "7", "--sour", "11", "--hang", "13", "--itl", "0.002")
    with mock_server(tmp_path, *flags) as server:
        report = load(server, rate="80", num_requests=78, output_len="6", timeout="10s")
    numbers = range(1, 79)
    refused = {n for n in numbers if n % 7 == 0}
    dropped = {n for n in numbers if n % 5 == 0} - refused
    sour = {n for n in numbers if n % 11 == 0} - refused - dropped
    hung = {n for n in numbers if n % 13 == 0} - refused - dropped - sour
    expected = {"http_500": len(refused), "dropped": len(dropped), "stream_node_lost": len(sour), "timeout": len(hung)}
    assert report.errors["kinds"] == dict(sorted(expected.items(), key=lambda item: -item[1]))
    assert report.errors["examples"]["http_500"] == "internal error"
    bad = sum(expected.values())
    assert report.errors["count"] == bad
    assert report.service["good"] == 78 - bad and report.service["misses"] == {"failed": bad}
    assert len(server.truth) == 78, "nothing was sent twice"
    last_s = max(record.stamps_s[-1] for record in report.records if record.stamps_s)
    assert report.throughput["window_s"][1] == last_s < report.length_s, "a hang is no time in which tokens came"


def test_a_client_without_files_for_its_connections_is_no_failure_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "report"
    words = [sys.executable, "-m", "scripts.load_tester.main", "--concurrency=80", "--num-requests=80", "--clients=1"]
    with mock_server(tmp_path, "--ttft", "2") as server:
        words += [f"--url={server.url}", "--output-len=1", f"--json={path}", "--scrape=none"]
        ran = subprocess.run(["bash", "-c", 'ulimit -n 40; exec "$@"', "", *words], capture_output=True, timeout=100)
    report = json.loads(path.read_bytes())
    assert ran.returncode == 3 and set(report["errors"]["kinds"]) == {"no_socket"}
    failed = report["errors"]["count"]
    (reason,) = [reason for reason in report["reasons"] if "ports" in reason]
    assert reason.startswith(f"the client had no files or ports for {failed} connections: raise ulimit -Hn, or widen")


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("flags", [("--split",), ("--crlf",), ("--bunch", "3"), ("--split", "--crlf")])
@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_every_dialect_and_framing_gives_the_same_tokens(tmp_path: Path, flags: tuple[str, ...], endpoint: str) -> None:
    with mock_server(tmp_path, *flags) as server:
        report = load(server, rate="100", num_requests=6, output_len="10", endpoint=endpoint, return_token_ids=True)
    assert report.errors["count"] == 0
    text = "".join(f" t{number}" for number in range(10))
    assert {record.text for record in report.records} == {text}
    assert {record.num_output for record in report.records} == {10}
    if endpoint == "generate":
        assert report.stages["prefill_s"]["p50"] == 0.25
    if endpoint != "chat":
        assert {tuple(record.ids) for record in report.records} == {tuple(range(10))}


def test_turns_of_a_session_follow_each_other_and_carry_earlier_turns(tmp_path: Path) -> None:
    options = {"turns": "3", "think": "30ms", "input_len": "20", "output_len": "4", "prefix_len": 16}
    with mock_server(tmp_path, "--ttft", "0.01") as server:
        report = load(server, rate="40", num_requests=8, **options)
    assert report.num_requests == 24
    for session in range(8):
        own = [record for record in report.records if record.session == session]
        assert [record.turn for record in own] == [0, 1, 2]
        assert [record.num_input for record in own] == [36, 60, 84]
        for before, after in itertools.pairwise(own):
            assert after.intended_s >= before.ended_s
            assert after.released_s >= after.intended_s
    # All share 16 tokens; a later turn finds all earlier turns: 40, then 64 tokens with the drawn responses.
    assert report.caching["ideal_tokens"] == 7 * 16 + 8 * (16 + 20) + 8 * (16 + 20 + 4 + 20)


def test_tenants_are_named_in_a_header_and_by_their_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# keys\ntenant-0 k0\ntenant-1 k1\n")
    options = {"rate": "80", "num_requests": 12, "output_len": "1", "tenants": 3, "api_key": "other"}
    with mock_server(tmp_path) as server:
        load(server, tenant_header="x-baton-tenant", tenant_keys=str(keys), **options)
        load(server, **options)
    named, plain = server.truth[:12], server.truth[12:]
    key_of = {"tenant-0": "Bearer k0", "tenant-1": "Bearer k1", "tenant-2": "Bearer other"}
    assert {one["tenant"] for one in named} == set(key_of)
    assert all(one["authorization"] == key_of[one["tenant"]] and "user" not in one["body"] for one in named)
    assert all(one["authorization"] == "Bearer other" and one["body"]["user"] in key_of for one in plain)
    assert not any(one["tenant"] for one in plain)


def test_keys_of_tenants_that_the_load_does_not_have_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("search k0\n")
    with mock_server(tmp_path) as server:
        with pytest.raises(ConfigError, match="names no tenant of this load, which has tenant-0, tenant-1: correct"):
            load(server, tenants=2, tenant_keys=str(keys), num_requests=20)
        with pytest.raises(ConfigError, match="names no tenant of this load, which has none"):
            load(server, tenant_keys=str(keys))
        load(server, mix="a:tenant=search", tenant_keys=str(keys), num_requests=1, rate="80")
    assert [one["authorization"] for one in server.truth] == ["Bearer k0"]


def test_a_tenant_name_cannot_break_a_head(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"prompt": "x"}\n' * 50 + '{"prompt": "x", "user": "a\\r\\nHost: b"}\n')
    with mock_server(tmp_path) as server:
        for options in ({"trace": str(trace)}, {"mix": "a:tenant=\u00e4"}):
            with pytest.raises(ConfigError, match="must be printable ASCII"):
                load(server, tenant_header="x-baton-tenant", **options)
    assert not server.truth


def test_late_sends_make_a_run_invalid(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        report = load(server, rate="50", num_requests=30, output_len="1", max_send_lateness="1us")
    assert not report.is_valid
    assert "went out more than" in report.reasons[0]


def test_a_tokenizer_is_a_file_or_a_folder(tmp_path: Path) -> None:
    texts = []
    for place in (SMALL_MODEL, Path(SMALL_MODEL) / "tokenizer.json"):
        with mock_server(tmp_path) as server:
            load(server, rate="50", num_requests=1, output_len="1", prompt="text", tokenizer=str(place))
        texts.append(server.truth[0]["body"]["prompt"])
    assert texts[0] == texts[1] and isinstance(texts[0], str)
    (tmp_path / "tokenizer.json").write_text("{}")
    with mock_server(tmp_path) as server:
        for path in (tmp_path, tmp_path / "none", "/dev/null"):
            with pytest.raises(ConfigError, match="--tokenizer"):
                load(server, num_requests=1, prompt="text", tokenizer=str(path))


@pytest.mark.parametrize("options", [{}, {"sweep": "1,2"}, {"find_goodput": True, "slo_ttft": "1s"}])
def test_a_damaged_trace_is_reported_before_the_server_is_asked(tmp_path: Path, options: dict[str, Any]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("{not json")
    with pytest.raises(ConfigError, match="line 1"):
        load_command(LoadtestConfig(url="http://127.0.0.1:9", trace=str(trace), flush_cache=True, **options))
    with pytest.raises(ConfigError, match="--mix"):
        load_command(LoadtestConfig(url="http://127.0.0.1:9", mix="a:b", clients=1))


def test_an_address_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing answers"):
        run_load(LoadtestConfig(url="http://127.0.0.1:9"))


def test_a_server_that_drops_connections_makes_failures_not_a_hang(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--drop", "1") as server:
        report = load(server, rate="100", num_requests=10, output_len="4")
    assert report.errors["kinds"] == {"dropped": 10}
    assert report.latency["ttft"]["count"] == 0


def test_only_a_request_on_a_closed_kept_alive_connection_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the client learns that the connection is closed."""
    real, client = subprocess.Popen, "scripts.load_tester.client"
    patient = f"from {client} import client_process, connection; connection.CLOSED_IDLE_S = 600; client_process.main()"

    def start(_: object, **options: Any) -> "subprocess.Popen[bytes]":
        return real([sys.executable, "-c", patient], **options)

    with mock_server(tmp_path, "--slam", "1") as server:
        slammed = load(server, rate="100", num_requests=5)
    assert slammed.errors["kinds"] == {"dropped": 5} and len(server.truth) == 5
    with mock_server(tmp_path, "--slam", "2") as server:
        monkeypatch.setattr(client_pool.subprocess, "Popen", start)
        report = load(server, concurrency=1, num_requests=5, output_len="2")
    assert report.errors["count"] == 0
    assert [record.is_retry for record in report.records] == [False, True, True, True, True]
    assert len(server.truth) == 9


def test_responses_without_streaming_are_measured(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--ttft", "0.02") as server:
        report = load(server, rate="50", num_requests=5, output_len="4", stream=False)
    assert report.errors["count"] == 0
    assert report.tokens["output_said"] == 20
    begin_s, end_s = report.throughput["window_s"]
    assert report.throughput["output_tokens_per_s"] == pytest.approx(20 / (end_s - begin_s)), "the last answer's too"
    assert any("not streamed" in note for note in report.notes)


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize(
    "options",
    [
        {"num_requests": 10, "rate": "50", "output_len": "4"},
        {"num_requests": 10, "concurrency": 5, "output_len": "4"},
        {"rate": "50", "trace": "untimed.jsonl"},
        {"trace": "timed.jsonl"},
    ],
)
def test_rates_are_until_the_last_token_if_the_requests_end_before_the_duration(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for name, instants in (("untimed", [{}] * 10), ("timed", [{"at": 0.01 * number} for number in range(10)])):
        lines = [json.dumps({"input_length": 16, "output_length": 4, **instant}) for instant in instants]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    if "trace" in options:
        options = {**options, "trace": str(tmp_path / options["trace"])}
    with mock_server(tmp_path, "--ttft", "0.5") as server:
        report = load(server, duration="60", **options)
    end_s = max(record.stamps_s[-1] for record in report.records)
    assert report.throughput["window_s"] == [0.0, end_s]
    assert report.throughput["requests_per_s"] == pytest.approx(10 / end_s)
    assert report.service["goodput_per_s"] == pytest.approx(10 / end_s)


def test_usage_that_disagrees_with_the_tokens_is_reported(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--wrong-usage") as server:
        report = load(server, rate="50", num_requests=5, output_len="4", return_token_ids=True)
    assert report.tokens["usage_mismatches"] == 5


def test_cache_hits_are_compared_with_a_perfect_cache(tmp_path: Path) -> None:
    """Two groups share 64 tokens each; the first prompt of each group finds nothing cached."""
    with mock_server(tmp_path) as server:
        shared = {"prefix_len": 64, "prefix_groups": 2}
        report = load(server, rate="50", num_requests=10, input_len="16", output_len="1", **shared)
    groups = {record.group for record in report.records}
    assert report.caching["ideal_tokens"] == (10 - len(groups)) * 64
    assert report.caching["achieved_tokens"] == report.caching["ideal_tokens"]
