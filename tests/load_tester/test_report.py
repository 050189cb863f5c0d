"""Files, page, expected outputs, exit statuses and live view."""

import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from common.config.shared import SMALL_MODEL
from common.errors import ConfigError
from scripts.benchmarks.harness.mock_server import MockServer, mock_server
from scripts.load_tester.analysis import metrics
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.client.ipc import Progress
from scripts.load_tester.client.server_info import fetch_server_info
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.main import main
from scripts.load_tester.output_files import DIFFERENT, FAILED, FINE, INVALID, WRONG
from scripts.load_tester.reporting.comparison_report import Pair, comparison_page
from scripts.load_tester.reporting.formats import percent
from scripts.load_tester.reporting.headline import outputs_verdict
from scripts.load_tester.reporting.html_report import page
from scripts.load_tester.reporting.progress import ProgressView, panel
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.reporting.svg import log_ticks, ticks
from scripts.load_tester.reporting.text_report import summary_lines
from scripts.load_tester.run import run_load
from scripts.load_tester.workload.plan import Plan, make_plan
from scripts.load_tester.workload.planned_request import PlannedRequest

ROOT = Path(__file__).parents[2]


def command(server: MockServer, *words: str) -> int:
    return main(["--url", server.url, "--rate", "60", "--num-requests", "30", "--output-len", "4", *words])


def test_one_run_writes_every_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {kind: tmp_path / f"r.{kind}" for kind in ("json", "jsonl", "html")}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    words += ["--svg", str(tmp_path / "pictures")]
    with mock_server(tmp_path, "--ttft", "0.01", "--itl", "0.002") as server:
        assert command(server, "--max-send-lateness", "1s", "--scrape-interval", "0.1", *words) in (FINE, INVALID)
    assert "time to first token" in capsys.readouterr().out
    report = json.loads(paths["json"].read_text())
    assert report["schema"] == 1 and len(report["samples"]["ttft"]) == 30
    assert report["scrape"]['mock_running{node="a"}'][0][1] == 1.5
    lines = paths["jsonl"].read_text().splitlines()
    assert len(lines) == 30 and json.loads(lines[0])["num_counted"] == 4
    page = paths["html"].read_text()
    assert page.count("<svg") >= 8
    assert page.count("<svg") == len(list((tmp_path / "pictures").glob("*.svg")))
    assert not re.search(r"https?://(?!127\.0\.0\.1)|<script|<link|@import|url\(", page), "the page is self-contained"


def test_text_from_a_server_is_escaped_and_printable(tmp_path: Path) -> None:
    evil = "</title></svg></pre><script>alert(1)</script>\x1b[2J\r\n\"onload='x'"
    with mock_server(tmp_path) as server:
        report = run_load(LoadtestConfig(url=server.url, rate="100", num_requests=9, output_len="3"))
    for index, one in enumerate(report.records):
        one.tenant, one.class_name, one.timings = evil + str(index % 2), evil + str(index % 3), {evil: 0.1}
    report.records[0].error = report.records[0].message = evil
    report.server["model"] = report.notes[:] = [evil]
    report.config["model"], report.reasons = evil, [evil]
    report.errors = metrics.errors(report.measured)
    rng = np.random.default_rng(0)
    report.tenants, report.classes = (
        metrics.groups(report.measured, name, {}, {}, rng) for name in ("tenant", "class_name")
    )
    report.stages = metrics.stages(report.measured, rng)
    report.scrape = {
        f'x_running{{node="{evil}"}}': [[0.0, 1.0], [1.0, 2.0]],
        f"running{evil}": [[0.0, 1.0], [1.0, 2.0]],
    }
    pair = Pair(evil, report.to_dict(), report.to_dict() | {"config": {evil: evil}}, [])
    written = page([report]) + page([report, report], found=[evil])
    written += comparison_page([evil, "b"], [pair, pair], [], reasons=[evil], threshold=0.05)
    assert "<script" not in written and "onload='" not in written
    assert "\x1b" not in written + "".join(summary_lines(report)) and "alert(1)" in written


def test_keys_never_reach_a_report(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        command(server, "--api-key", "s3cret", "--header", "X-Key: s3cret2", "--json", str(tmp_path / "r.json"))
    assert server.truth[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in (tmp_path / "r.json").read_text()


@pytest.mark.parametrize(("key", "words"), [(None, "requires an API key"), ("wrong", "refuses this --api-key")])
def test_a_missing_or_wrong_key_is_refused(key: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.load_tester.client.server_info.get", lambda *_: (401, b"{}"))
    with pytest.raises(ConfigError, match=words) as refused:
        fetch_server_info("http://127.0.0.1:9", {"Authorization": f"Bearer {key}"} if key else {})
    assert "wrong" not in str(refused.value), "keys are not shown"


@pytest.mark.parametrize(
    "page", [b"\xff", b"[" * 100_000, b"[]", b"null", b'{"data":{}}', b'{"data":[7],"limits":[1]}',
             b'{"data":[{"id":[1],"meta":3}]}',
             b'{"data":[{"id":"m","meta":{"n_vocab":"many"}}],"limits":{"vocab_size":-4}}'],
)  # fmt: skip
def test_malformed_server_information_is_ignored(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.load_tester.client.server_info.get", lambda *_: (200, page))
    found = fetch_server_info("http://127.0.0.1:9", {})
    assert found.vocab_size is None and found.model in (None, "m")
    assert found.vocab == (100, 10_000)


def test_files_are_written_after_the_reader_of_standard_output_is_gone(tmp_path: Path) -> None:
    """``loadtest --json r.json | true``"""
    path = tmp_path / "r.json"
    with mock_server(tmp_path) as server:
        words = ["--url", server.url, "--rate", "60", "--num-requests", "5", "--max-send-lateness", "5s"]
        command = [sys.executable, "-m", "scripts.cli", "loadtest", *words, "--json", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout and process.stderr
            process.stdout.close()
            assert process.wait(60) in (FINE, INVALID)
            assert process.stderr.read() == b""
    assert len(json.loads(path.read_text())["samples"]["ttft"]) == 5


def test_a_report_on_standard_output_is_alone_there(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        words = ["--url", server.url, "--rate", "60", "--num-requests", "5", "--json", "-"]
        command = [sys.executable, "-m", "scripts.cli", "loadtest", *words]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=60, check=False)
    assert json.loads(done.stdout)["num_requests"] == 5
    assert b"time to first token" in done.stderr


def test_other_files_are_written_after_one_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scripts.load_tester.command.write_jsonl", full)
    with mock_server(tmp_path) as server:
        paths = [str(tmp_path / name) for name in ("r.json", "r.jsonl", "r.html")]
        assert command(server, "--json", paths[0], "--jsonl", paths[1], "--html", paths[2]) == FAILED
    assert f"--jsonl {paths[1]} could not be written: No space left on device" in capsys.readouterr().err
    assert Path(paths[0]).exists() and Path(paths[2]).exists()


def test_samples_are_spread_over_the_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At most 10 of 30 requests are kept: every third, not the first ten."""
    monkeypatch.setattr("scripts.load_tester.reporting.report.MAX_SAMPLES", 12)
    with mock_server(tmp_path) as server:
        report = run_load(LoadtestConfig(url=server.url, rate="100", num_requests=30, output_len="2"))
    for index, one in enumerate(report.records):
        one.intended_s, one.stamps_s = float(index), [2.0 * index, 2.0 * index + 1]
    assert report.to_dict()["samples"]["ttft"] == [float(index) for index in range(0, 30, 3)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"duration": "10s", "warmup": "6s", "cooldown": "4s"}, "nothing is measured"),
        ({"stream": False, "slo_itl": "50ms"}, "--slo-itl need --stream"),
        ({"stream": False, "mix": "a:slo-ttft=1s"}, "--slo-ttft need --stream"),
        ({"url": "http://me:s3cret@127.0.0.1:1"}, "would not be sent"),
    ],
)
def test_options_without_effect_are_refused(words: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        LoadtestConfig(**words)
    assert "s3cret" not in str(refused.value)


def test_the_manual_names_every_field_of_every_file() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "loadtest.md").read_text()
    names = {
        *RequestRecord.__struct_fields__,
        *(own.name for own in fields(Report) if own.name != "records"),
        "samples",
    }
    assert not [name for name in sorted(names) if f"`{name}`" not in manual]


def test_outputs_are_compared_token_for_token(tmp_path: Path) -> None:
    saved = str(tmp_path / "outputs")
    with mock_server(tmp_path) as server:
        command(server, "--return-token-ids", "--jsonl", saved)
        same = command(server, "--expect-file", saved, "--json", str(tmp_path / "same.json"))
        lines = Path(saved).read_text().splitlines()
        spoiled = json.loads(lines[3])
        spoiled["ids"][2] += 1
        Path(saved).write_text("\n".join([*lines[:3], json.dumps(spoiled), *lines[4:-1]]))
        other = command(server, "--expect-file", saved, "--json", str(tmp_path / "other.json"))
    assert same in (FINE, INVALID)
    assert outputs_of(tmp_path / "same.json") == COUNTS | {"is_passed": True, "expected": 30, "compared": 30}
    assert other == DIFFERENT
    differing = {"expected": 29, "compared": 29, "differ": 1, "not_expected": 1}
    examples = [{"index": 3, "first_difference": 2}]
    assert outputs_of(tmp_path / "other.json") == COUNTS | differing | {"examples": examples}


COUNTS: dict[str, Any] = {
    "is_passed": False, "expected": 0, "compared": 0, "by_text": 0, "differ": 0, "unanswered": 0, "not_sent": 0,
    "not_expected": 0, "examples": [],
}  # fmt: skip


def outputs_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["outputs"]
    return found


def test_an_output_check_needs_every_expected_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run with 25 of 30 requests, with 30 other prompts, and with every fifth connection cut."""
    saved, path = str(tmp_path / "outputs"), tmp_path / "r.json"
    files = ("--expect-file", saved, "--json", str(path), "--html", str(tmp_path / "r.html"))
    with mock_server(tmp_path) as server:
        command(server, "--return-token-ids", "--jsonl", saved)
        assert command(server, "--num-requests", "25", *files) == DIFFERENT
        assert outputs_of(path) == COUNTS | {"expected": 30, "compared": 25, "not_sent": 5}
        assert "5 of 30 prompts in the file were never sent" in capsys.readouterr().err
        assert command(server, "--seed", "1", *files) == DIFFERENT
        assert outputs_of(path) == COUNTS | {"expected": 30, "not_sent": 30, "not_expected": 30}
        assert "the file has other prompts" in capsys.readouterr().out
    with mock_server(tmp_path, "--drop", "5") as server:
        assert command(server, *files) == DIFFERENT
    assert outputs_of(path) == COUNTS | {"expected": 30, "compared": 24, "unanswered": 6}
    said = capsys.readouterr()
    assert "24 compared, 0 differ; 6 requests without a whole answer" in said.err
    assert outputs_verdict(COUNTS | {"expected": 1, "unanswered": 1}) == "NO OUTPUT WAS COMPARED."
    verdict = "NOT ALL EXPECTED OUTPUTS WERE COMPARED"
    assert verdict in said.out and f'<li class="bad">{verdict}' in (tmp_path / "r.html").read_text()


def test_chat_and_trimmed_words_are_different_prompts(tmp_path: Path) -> None:
    saved, path = str(tmp_path / "outputs"), tmp_path / "r.json"
    trimmed = ["--prompt", "text", "--tokenizer", SMALL_MODEL]
    with mock_server(tmp_path) as server:
        command(server, "--prompt", "text", "--jsonl", saved)
        for words in (["--endpoint", "chat"], trimmed):
            assert command(server, *words, "--expect-file", saved, "--json", str(path)) == DIFFERENT
            assert outputs_of(path) == COUNTS | {"expected": 30, "not_sent": 30, "not_expected": 30}


def test_the_digest_covers_the_users_own_fields() -> None:
    """The seed does not matter for a given prompt."""

    def digest(drawn: str, **extra: object) -> str:
        return PlannedRequest(0, 0.0, ((1, 8),), 4, extra=extra).digest(drawn)

    assert digest("0", prompt="a") == digest("1", prompt="a") != digest("0", prompt="a", temperature=1)
    assert digest("0", temperature=1) != digest("1", temperature=1) != digest("1", temperature=0)


def test_a_run_of_failures_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(tmp_path, "--refuse", "1") as server:
        assert main(["--url", server.url, "--rate", "50", "--num-requests", "5"]) == FAILED
    assert "every request failed" in capsys.readouterr().err


def test_wrong_options_have_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == WRONG
    assert "nothing answers" in capsys.readouterr().err
    assert main(["--json", str(tmp_path / "no" / "such" / "r.json")]) == WRONG
    assert "no such folder" in capsys.readouterr().err
    assert main(["--json", str(tmp_path)]) == WRONG
    assert "is a folder: name a file in it" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["--svg", str(tmp_path / "file" / "pictures")]) == WRONG
    assert "is a file: name a folder" in capsys.readouterr().err
    assert main(["--json", str(tmp_path / "r"), "--html", str(tmp_path / "r")]) == WRONG
    assert "--json and --html name the same file" in capsys.readouterr().err
    (tmp_path / "trace").write_text('{"prompt": "x"}')
    assert main(["--trace", str(tmp_path / "trace"), "--jsonl", f"{tmp_path}/../{tmp_path.name}/trace"]) == WRONG
    assert "--trace and --jsonl name the same file" in capsys.readouterr().err
    assert main(["--mix", f"a:input=file:{tmp_path}/file", "--json", str(tmp_path / "file")]) == WRONG
    assert "--mix and --json name the same file" in capsys.readouterr().err
    assert main(["--search-steps", "3"]) == WRONG
    assert "--search-steps needs --find-goodput" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["--rate", "much"])
    assert wrong.value.code == WRONG


LINE = '{"prompt_digest":"d","num_output_asked":1,"error":"","text":"%s"}\n'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json\n", "cannot be read"),
        ("\n", "has no output"),
        ("".join(LINE % text for text in "ab"), "two different outputs"),
    ],
)
def test_an_invalid_expect_file_is_refused(content: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(ConfigError, match=f"--expect-file .* {complaint}"):
        run_load(LoadtestConfig(url="http://127.0.0.1:9", expect_file=str(tmp_path / "x")))


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0, 0.47) == [0, 0.1, 0.2, 0.3, 0.4]
    assert log_ticks(0.9, 120) == [1, 2, 5, 10, 20, 50, 100]


def test_the_live_view_fits_a_narrow_terminal_without_markup() -> None:
    console = Console(file=io.StringIO(), width=30, force_terminal=True)
    console.print(panel("first token  p50 100.0 ms, p99 250.0 ms [/x] [red]", "loadtest  http://[fe80::1]:8000  [/]"))
    console.print(panel("x", "loadtest  http://[fe80::1]:8000  4"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 6 and max(map(cell_len, map(plain_of, lines))) <= 30
    wide = Console(file=io.StringIO(), width=100)
    wide.print(panel("first [red] token " + "." * 60, "loadtest  http://[fe80::1]:8000"))
    assert isinstance(wide.file, io.StringIO)
    assert "http://[fe80::1]:8000" in wide.file.getvalue() and "[red]" in wide.file.getvalue()


def plain_of(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_shares_are_not_rounded_to_all_or_nothing() -> None:
    assert [percent(share) for share in (1.0, 0.9997, 0.5, 0.0002, 0.0, None)] == [
        "100.0%", ">99.9%", "50.0%", "<0.1%", "0.0%", "-",
    ]  # fmt: skip


def test_the_live_view_of_a_closed_loop_counts_turns() -> None:
    """Ten of the twenty requests of five sessions have ended: 15 of 30 blocks."""
    plan = make_plan(LoadtestConfig(concurrency=2, num_requests=5, turns="4"))
    assert (plan.num_sessions, plan.num_requests) == (5, 20)
    assert make_plan(LoadtestConfig(concurrency=2, duration="1s")).num_requests is None
    bar, *_ = ProgressView().text([Progress(4.0, 2, 10, 0, 0, [], [])], plan).splitlines()
    assert bar.count("█") == 15


def test_the_live_view_shows_progress_and_rates() -> None:
    view = ProgressView()
    plan = Plan([], 100, True, 10.0, [], {})
    view.text([Progress(4.0, 3, 0, 0, 200, [0.05], [0.001]), Progress(4.0, 1, 0, 0, 100, [], [])], plan)
    ticks = [Progress(5.0, 3, 20, 1, 400, [0.1, 0.25], [0.002, 0.004]), Progress(4.9, 2, 10, 0, 100, [], [])]
    bar, requests, first, gap, rate = view.text(ticks, plan).splitlines()
    assert bar == "█" * 15 + "░" * 15 + " 5.0 of 10.0 s"
    assert requests == "requests     30 done, 1 failed, 5 in flight"
    assert "p50 100.0 ms" in first and first.endswith("▂█"), "0.05 then 0.175: a quarter and all of the largest"
    assert "p50 3.0 ms" in gap and gap.endswith("▃█")
    assert "pieces/s     200 " in rate, "from 300 to 500 in a second"
