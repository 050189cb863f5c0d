"""``--find-goodput`` and ``--sweep``: several runs, and what is concluded from them."""

import json
from pathlib import Path

import pytest
from load_mock import mock_server

from common.errors import ConfigError
from scripts.load.config import LoadtestConfig
from scripts.load.main import main
from scripts.load.report import Report
from scripts.load.search import find_goodput, measure


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
