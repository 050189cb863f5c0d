"""What is written and said: files, page, comparison, search, expected outputs, exit statuses."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from load_mock import MockServer, mock_server
from load_records import record

from common.errors import ConfigError
from scripts.load import metrics
from scripts.load.compare import compare
from scripts.load.config import LoadtestConfig
from scripts.load.live import View
from scripts.load.main import DIFFERENT, FAILED, FINE, INVALID, REGRESSED, WRONG, main
from scripts.load.parquet import COLUMNS, write_parquet
from scripts.load.probe import probe
from scripts.load.records import Record
from scripts.load.report import Report
from scripts.load.run import run_load
from scripts.load.scrape import parse
from scripts.load.search import find_goodput, measure
from scripts.load.svg import log_ticks, ticks
from scripts.load.wire import Tick
from scripts.load.workload import Plan


def command(server: MockServer, *words: str) -> int:
    return main(["--url", server.url, "--rate", "60", "--num-requests", "30", "--output-len", "4", *words])


def test_one_run_writes_every_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {kind: tmp_path / f"r.{kind}" for kind in ("json", "jsonl", "html", "parquet")}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    words += ["--svg", str(tmp_path / "pictures")]
    pytest.importorskip("pyarrow")
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


def test_keys_never_reach_a_report(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        command(server, "--api-key", "s3cret", "--header", "X-Key: s3cret2", "--json", str(tmp_path / "r.json"))
    assert server.truth[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in (tmp_path / "r.json").read_text()


@pytest.mark.parametrize(("key", "words"), [(None, "wants an API key"), ("wrong", "refuses this --api-key")])
def test_a_server_behind_a_key_is_refused_in_a_sentence(
    key: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.load.probe.get", lambda *_: (401, b"{}"))
    with pytest.raises(ConfigError, match=words) as refused:
        probe("http://127.0.0.1:9", api_key=key)
    assert "wrong" not in str(refused.value), "keys are not shown"


@pytest.mark.parametrize(
    "page", [b"\xff", b"[]", b"null", b'{"data":{}}', b'{"data":[7],"limits":[1]}', b'{"data":[{"id":[1],"meta":3}]}',
             b'{"data":[{"id":"m","meta":{"n_vocab":"many"}}],"limits":{"vocab_size":-4}}'],
)  # fmt: skip
def test_a_server_that_says_odd_things_about_itself_is_one_that_says_nothing(
    page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.load.probe.get", lambda *_: (200, page))
    found = probe("http://127.0.0.1:9", api_key=None)
    assert found.vocab_size is None and found.model in (None, "m")
    assert found.vocab == (100, 10_000)


def test_parquet_has_a_row_per_request_and_says_what_columns_mean(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [record(0.5, 0.6, timings={"prefill_s": 0.1}), record(error="dropped", index=1)]
    write_parquet(rows, str(tmp_path / "r.parquet"))
    table = parquet.read_table(tmp_path / "r.parquet")
    assert table.num_rows == 2 and table.column_names == [name for name, _, _ in COLUMNS]
    assert table["stamps_s"][0].as_py() == [0.5, 0.6]
    assert (table["ttft_s"][0].as_py(), table["ttft_s"][1].as_py()) == (0.5, None)
    assert all(table.schema.field(name).metadata[b"description"] for name in table.column_names)
    known = set(Record.__struct_fields__) | {"ttft_s", "e2e_s", "tpot_s"}
    assert known - set(table.column_names) == {"text", "ids", "num_events"}


def test_the_manual_names_every_field_of_every_file() -> None:
    manual = (Path(__file__).parents[1] / "docs" / "loadtest.md").read_text()
    rows = {f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in COLUMNS}
    assert rows <= set(manual.splitlines())
    names = {*Record.__struct_fields__, *(own.name for own in fields(Report) if own.name != "records"), "samples"}
    assert not [name for name in sorted(names) if f"`{name}`" not in manual]


def test_outputs_are_compared_token_for_token(tmp_path: Path) -> None:
    saved = str(tmp_path / "outputs")
    with mock_server(tmp_path) as server:
        command(server, "--save-outputs", saved)
        same = command(server, "--expect-file", saved, "--json", str(tmp_path / "same.json"))
        lines = Path(saved).read_text().splitlines()
        spoiled = json.loads(lines[3])
        spoiled["ids"][2] += 1
        Path(saved).write_text("\n".join([*lines[:3], json.dumps(spoiled), *lines[4:-1]]))
        other = command(server, "--expect-file", saved, "--json", str(tmp_path / "other.json"))
    assert same in (FINE, INVALID)
    counts = json.loads((tmp_path / "same.json").read_text())["outputs"]
    assert (counts["compared"], counts["differ"]) == (30, 0)
    assert other == DIFFERENT
    counts = json.loads((tmp_path / "other.json").read_text())["outputs"]
    assert (counts["compared"], counts["differ"], counts["not_compared"]) == (29, 1, 1)
    assert counts["examples"] == [{"index": 3, "first_difference": 2}]


def test_a_slower_run_is_a_regression_and_the_same_one_is_none(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    with mock_server(tmp_path, "--ttft", "0.03", "--itl", "0.005") as server:
        command(server, "--max-send-lateness", "1s", "--json", str(before))
    report = json.loads(before.read_text()) | {"is_valid": True}
    before.write_text(json.dumps(report))
    assert main(["--compare", str(before), str(before)]) == FINE
    report["samples"]["ttft"] = [sample + 1 for sample in report["samples"]["ttft"]]
    after.write_text(json.dumps(report))
    assert main(["--compare", str(before), str(after), "--json", str(tmp_path / "c.json")]) == REGRESSED
    assert main(["--compare", str(after), str(before)]) == FINE
    changes = json.loads((tmp_path / "c.json").read_text())["changes"]
    worse = {change["name"] for change in changes if change["verdict"] == "worse"}
    assert worse == {"time to first token mean", "time to first token p50"}
    assert main(["--compare", str(before), str(tmp_path / "none.json")]) == WRONG


def test_sweeps_are_compared_rate_by_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"quick": ("40,80", "0.01"), "slow": ("20,40", "0.15")}
    for name, (rates, ttft) in names.items():
        with mock_server(tmp_path, "--ttft", ttft) as server:
            words = [
                "--sweep",
                rates,
                "--num-requests",
                "30",
                "--output-len",
                "3",
                "--json",
                str(tmp_path / f"{name}.json"),
            ]
            main(["--url", server.url, *words])
    both = [str(tmp_path / f"{name}.json") for name in names]
    written = [
        "--html",
        str(tmp_path / "c.html"),
        "--svg",
        str(tmp_path / "pictures"),
        "--json",
        str(tmp_path / "c.json"),
    ]
    capsys.readouterr()
    assert main(["--compare", *both, *written]) == REGRESSED
    text = capsys.readouterr().out
    assert "40/s" in text and "80/s" not in text, "only what both have"
    changes = json.loads((tmp_path / "c.json").read_text())["changes"]
    (mean,) = [one for one in changes if one["name"] == "time to first token mean"]
    assert mean["rate"] == "40/s" and mean["verdict"] == "worse" and mean["ratio"] > 2
    page = (tmp_path / "c.html").read_text()
    assert "REGRESSED" in page and "slow p99" in page
    assert (tmp_path / "pictures" / "time-to-first-token-by-rate.svg").read_text().count("quick p50") == 1
    assert main(["--compare", both[0], both[0]]) in (FINE, INVALID)
    single = tmp_path / "one.json"
    single.write_text(json.dumps({"schema": 1}))
    assert main(["--compare", both[0], str(single)]) == WRONG


def test_a_change_counts_only_if_it_is_large_and_sure() -> None:
    def report(ttft: list[float], good: int) -> metrics.Figures:
        samples = {"ttft": ttft, "itl": [], "tpot": [], "e2e": []}
        service = {"good": good, "count": 100, "attainment": good / 100}
        errors = {"count": 0, "share": 0.0}
        return {"samples": samples, "service": service, "errors": errors, "num_measured": 100}

    base = report([1 + 0.001 * n for n in range(100)], 90)
    slightly = compare(base, report([1.02 + 0.001 * n for n in range(100)], 89), 0.05)
    much = compare(base, report([1.2 + 0.001 * n for n in range(100)], 60), 0.05)
    better = compare(base, report([0.8 + 0.001 * n for n in range(100)], 100), 0.05)
    assert {change.verdict for change in slightly} == {"same"}
    assert {change.name: change.verdict for change in much} == {
        "time to first token mean": "worse",
        "time to first token p50": "worse",
        "failed requests": "same",
        "good requests": "worse",
    }
    assert [change.verdict for change in better] == ["better", "better", "same", "better"]


def counted(good: int, count: int) -> Report:
    """A report that holds nothing but its verdict."""
    report = Report.__new__(Report)
    report.service = {"good": good, "count": count}
    report.reasons = []
    return report


@pytest.mark.parametrize(("limit", "start"), [(13.0, 1.0), (0.3, 4.0), (5.0, 5.0)])
def test_the_search_encloses_the_limit_and_bisects(limit: float, start: float) -> None:
    """All requests are good up to a rate, and none beyond."""
    best, points = find_goodput(lambda rate, _: counted(100 * (rate <= limit), 100), start, 0.9, 6)
    assert best <= limit < best * 2 ** (1 / 64) * 1.0001
    assert all(point.is_sure and point.holds == (point.rate <= limit) for point in points)


def test_an_unclear_rate_is_tried_again_and_counts_add_up() -> None:
    point = measure(lambda *_: counted(9, 10), 1.0, 0.9)
    assert (point.good, point.count, point.holds, point.is_sure, len(point.reports)) == (27, 30, True, False, 3)
    clear = measure(lambda *_: counted(50, 100), 1.0, 0.9)
    assert (clear.holds, clear.is_sure, len(clear.reports)) == (False, True, 1)


def test_what_arrived_of_a_rate_is_told_beside_it() -> None:
    """Ninety requests drawn at 10/s may well come at 9."""

    def run(rate: float, number: int) -> Report:
        report = counted(9, 10)
        report.rate = (9.0, 10.0, 9.5)[number]
        return report

    point = measure(run, 10.0, 0.9)
    assert (point.rate, point.to_dict()["arrived"]) == (10.0, 9.5)
    assert measure(lambda *_: counted(50, 100), 1.0, 0.9).arrived is None, "a trace that has no rate"


def test_a_rate_that_the_client_could_not_send_does_not_count_as_held() -> None:
    def run(rate: float, number: int) -> Report:
        report = counted(100, 100)
        report.reasons = ["the client could not keep up"] if rate > 10 else []
        return report

    best, points = find_goodput(run, 4.0, 0.9, 3)
    assert 8 <= best <= 10
    assert next(point.rate for point in points if not point.is_valid) == 16.0
    again = counted(100, 100)
    again.reasons = ["the client could not keep up"]
    point = measure(lambda _, number: again if number else counted(9, 10), 1.0, 0.9)
    assert (point.holds, point.is_valid, len(point.reports)) == (False, False, 2), "it seemed to hold at first"


def test_runs_of_a_sweep_have_the_same_schedule_and_other_tokens(tmp_path: Path) -> None:
    """Otherwise each would find the prompts of the one before it in the server's cache."""
    with mock_server(tmp_path) as server:
        main(["--url", server.url, "--sweep", "60,120", "--num-requests", "8", "--input-len", "uniform:5:40"])
    first, second = server.truth[:8], server.truth[8:]
    prompts = [[one["body"]["prompt"] for one in part] for part in (first, second)]
    assert sorted(map(len, prompts[0])) == sorted(map(len, prompts[1]))
    assert not {tuple(prompt[:4]) for prompt in prompts[0]} & {tuple(prompt[:4]) for prompt in prompts[1]}


def test_a_run_in_which_every_request_failed_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(tmp_path, "--refuse", "1") as server:
        assert main(["--url", server.url, "--rate", "50", "--num-requests", "5"]) == FAILED
    assert "every request failed" in capsys.readouterr().err


def test_what_a_sweep_would_not_write_is_refused() -> None:
    for words in ({"sweep": "1,2", "jsonl": "x"}, {"sweep": "1,2", "expect_file": "x"}, {"sweep": "1,a"}):
        with pytest.raises(ConfigError, match="--sweep"):
            LoadtestConfig(**words)  # type: ignore[arg-type]


def test_a_sweep_gives_a_row_and_a_report_for_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(tmp_path) as server:
        words = ["--url", server.url, "--sweep", "40,80", "--num-requests", "20", "--output-len", "2"]
        main([*words, "--json", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html")])
    content = json.loads((tmp_path / "s.json").read_text())
    assert [run["config"]["rate"] for run in content["runs"]] == ["40", "80"]
    assert "Rate against latency" in (tmp_path / "s.html").read_text()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_wrong_words_are_one_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == WRONG
    assert "nothing answers" in capsys.readouterr().err
    assert main(["--json", str(tmp_path / "no" / "such" / "r.json")]) == WRONG
    assert "no such folder" in capsys.readouterr().err
    assert main(["--json", str(tmp_path)]) == WRONG
    assert "is a folder: name a file in it" in capsys.readouterr().err
    assert main(["--search-steps", "3"]) == WRONG
    assert "--search-steps needs --find-goodput" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["--rate", "much"])
    assert wrong.value.code == WRONG


def test_an_expected_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not json\n")
    with mock_server(tmp_path) as server:
        with pytest.raises(ConfigError, match="--expect-file"):
            run_load(LoadtestConfig(url=server.url, num_requests=1, rate="50", expect_file=str(tmp_path / "x")))


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0, 0.47) == [0, 0.1, 0.2, 0.3, 0.4]
    assert log_ticks(0.9, 120) == [1, 2, 5, 10, 20, 50, 100]


def test_prometheus_text_is_read_without_buckets_and_nan() -> None:
    text = '# HELP a b\na_total 3\na_bucket{le="1"} 2\nb{x="y z"} 1.5e3\nc NaN\nd 1.2.3\nprocess_x 1\n'
    assert parse(text) == {"a_total": 3.0, 'b{x="y z"}': 1500.0}


def test_the_live_view_says_how_far_and_how_fast() -> None:
    view = View()
    plan = Plan([], 100, True, 10.0, [], {})
    view.text([Tick(4.0, 3, 0, 0, 200, 0, [0.05], [0.001]), Tick(4.0, 1, 0, 0, 100, 0, [], [])], plan)
    ticks = [Tick(5.0, 3, 20, 1, 400, 0, [0.1, 0.25], [0.002, 0.004]), Tick(4.9, 2, 10, 0, 100, 0, [], [])]
    bar, requests, first, gap, rate = view.text(ticks, plan).splitlines()
    assert bar == "█" * 15 + "░" * 15 + " 5.0 of 10.0 s"
    assert requests == "requests     30 done, 1 failed, 5 under way"
    assert "p50 100.0 ms" in first and first.endswith("▂█"), "0.05 then 0.175: a quarter and all of the largest"
    assert "p50 3.0 ms" in gap and gap.endswith("▃█")
    assert "pieces/s     200 " in rate, "from 300 to 500 in a second"
