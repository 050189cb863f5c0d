"""``--find-goodput`` and ``--sweep``."""

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from scripts.benchmarks.harness.mock_server import mock_server
from scripts.load_tester.analysis.goodput_search import find_goodput, measure
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.main import main
from scripts.load_tester.output_files import FAILED, FINE, INVALID, WRONG
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.search_command import _sweep_status, _too_short, describe_result
from scripts.load_tester.workload.plan import NoArrivals


def counted(
    good: int, count: int, *, alone: tuple[int, int] = (0, 0), failed: int = 0, free: float | None = None
) -> Report:
    """A report of counts alone; ``alone`` are good and all requests without any other in flight."""
    report = Report.__new__(Report)
    report.service = {"good": good, "count": count, "num_free": count if free is None else free}
    report.service |= {"alone_good": alone[0], "alone_count": alone[1]}
    report.errors, report.num_measured = {"count": failed}, count
    report.arrivals = {"count": count}
    report.reasons = []
    return report


@pytest.mark.parametrize(("limit", "start"), [(13.0, 1.0), (0.3, 4.0), (5.0, 5.0)])
def test_the_search_encloses_the_limit_and_bisects(limit: float, start: float) -> None:
    """All requests are good up to the limit, and none beyond."""
    found = find_goodput(lambda rate, _: counted(100 * (rate <= limit), 100), start, 0.9, 6)
    assert found.best <= limit < found.best * 2 ** (1 / 64) * 1.0001 and not found.why
    assert all(point.is_sure and point.holds == (point.rate <= limit) for point in found.points)


def test_a_search_without_a_failing_rate_says_so() -> None:
    """Twelve doublings of 1/s all hold."""
    found = find_goodput(lambda *_: counted(100, 100), 1.0, 0.9, 6)
    assert (found.best, len(found.points)) == (4096, 13) and "4096/s was the last rate" in found.why
    words = describe_result(LoadtestConfig(slo_ttft="1s", find_goodput=True), found)
    assert words.startswith("at least 4096/s with 90.0% of requests within TTFT 1 s")


def test_a_search_ends_where_a_lower_rate_cannot_help() -> None:
    """Each halving doubles the length of a run, so the search must not go down in vain."""
    failing = find_goodput(lambda *_: counted(0, 60, failed=60), 1.0, 0.9, 6)
    assert (failing.best, len(failing.points), failing.why) == (0.0, 1, "every request failed")
    slow = find_goodput(lambda rate, _: counted(0, 60, alone=(1, 20) if rate < 0.6 else (0, 3)), 1.0, 0.9, 6)
    assert [point.rate for point in slow.points] == [1.0, 0.5]
    assert slow.why == "of 20 requests without any other in flight, 1 were good"
    queueing = find_goodput(lambda rate, _: counted(60 * (rate < 0.2), 60, alone=(20, 20)), 1.0, 0.9, 0)
    assert queueing.best == 0.125 and not queueing.why


def test_a_search_ends_where_no_request_arrives() -> None:
    def run(rate: float, number: int) -> Report:
        if rate < 0.2:
            raise NoArrivals
        return counted(0, 2)

    found = find_goodput(run, 1.0, 0.9, 6)
    assert ([point.rate for point in found.points], found.best) == ([1.0, 0.5, 0.25], 0.0)
    assert found.why == "at 0.125/s no request arrives within --duration"


def test_a_later_try_in_which_no_request_arrives_counts_for_nothing() -> None:
    def run(rate: float, number: int) -> Report:
        if number == 1:
            raise NoArrivals
        return counted(9, 10)

    point = measure(run, 0.5, 0.9)
    assert (point.good, point.count, point.holds, len(point.reports)) == (18, 20, True, 2)


def test_an_unclear_rate_is_tried_again_and_counts_add_up() -> None:
    point = measure(lambda *_: counted(9, 10), 1.0, 0.9)
    assert (point.good, point.count, point.holds, point.is_sure, len(point.reports)) == (27, 30, True, False, 3)
    clear = measure(lambda *_: counted(50, 100), 1.0, 0.9)
    assert (clear.holds, clear.is_sure, len(clear.reports)) == (False, True, 1)


def test_correlated_requests_make_a_rate_less_certain() -> None:
    """99 good of 100: Wilson's lower end is 0.945; if they count for 10 requests it is 0.7, and for 30, 0.87."""
    assert [len(measure(lambda *_: counted(99, 100), 1.0, 0.9).reports)] == [1]
    point = measure(lambda *_: counted(99, 100, free=10.0), 1.0, 0.9)
    assert (len(point.reports), point.holds, point.is_sure) == (3, True, False)
    assert point.to_dict()["attainment_ci"][0] == pytest.approx(0.87, abs=0.01)


def test_the_drawn_rate_is_reported() -> None:
    """Ninety requests drawn at 10/s may have a mean rate of 9/s."""

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

    found = find_goodput(run, 4.0, 0.9, 3)
    assert 8 <= found.best <= 10
    high = min(point.rate for point in found.points if not point.is_valid)
    assert found.why == f"at {high:.4g}/s the runs are invalid", "that is no limit of the server"
    assert next(point.rate for point in found.points if not point.is_valid) == 16.0
    again = counted(100, 100)
    again.reasons = ["the client could not keep up"]
    point = measure(lambda _, number: again if number else counted(9, 10), 1.0, 0.9)
    assert (point.holds, point.is_valid, len(point.reports)) == (False, False, 3), "it seemed to hold at first"


def test_one_invalid_run_does_not_bound_the_search() -> None:
    hiccup = counted(0, 100)
    hiccup.reasons = ["the client could not keep up"]
    point = measure(lambda _, number: counted(100, 100) if number else hiccup, 1.0, 0.9)
    assert (point.holds, point.is_valid, point.count, len(point.reports)) == (True, True, 100, 2)


def test_a_run_shorter_than_ten_responses_gets_a_warning() -> None:
    report = counted(60, 60)
    report.latency = {"e2e": {"p50": 0.4}}
    point = measure(lambda *_: report, 30.0, 0.9)
    assert "sends for 2 s, and a response takes 0.4 s" in _too_short(point)
    report.latency = {"e2e": {"p50": 0.2}}
    assert not _too_short(point)
    sessions = counted(60, 60)  # fifteen, of four turns each
    sessions.arrivals, sessions.latency = {"count": 15}, {"e2e": {"p50": 0.1}}
    assert "sends for 0.5 s, and" in _too_short(measure(lambda *_: sessions, 30.0, 0.9))


def test_the_status_of_a_sweep_follows_from_its_runs() -> None:
    fine, broken, failed = counted(5, 5), counted(5, 5), counted(0, 5, failed=5)
    broken.reasons = ["the client could not keep up"]
    assert [_sweep_status(runs) for runs in ([fine, fine], [fine, broken], [failed, failed], [fine, failed])] == [
        FINE,
        INVALID,
        FAILED,
        FINE,
    ]


def test_runs_of_a_sweep_have_the_same_schedule_and_other_tokens(tmp_path: Path) -> None:
    """Otherwise a run would find the prompts of the previous one in the server's cache."""
    with mock_server(tmp_path) as server:
        main(["--url", server.url, "--sweep", "60,120", "--num-requests", "8", "--input-len", "uniform:5:40"])
    first, second = server.truth[:8], server.truth[8:]
    prompts = [[one["body"]["prompt"] for one in part] for part in (first, second)]
    assert sorted(map(len, prompts[0])) == sorted(map(len, prompts[1]))
    assert not {tuple(prompt[:4]) for prompt in prompts[0]} & {tuple(prompt[:4]) for prompt in prompts[1]}


def test_options_that_a_sweep_ignores_are_refused() -> None:
    for words in (
        {"sweep": "1,2", "rate": "3"},
        {"sweep": "1,2", "jsonl": "x"},
        {"sweep": "1,2", "expect_file": "x"},
        {"sweep": "1,a"},
        {"sweep": "1,2", "trace": "x", "time_scale": 2.0},
    ):
        with pytest.raises(ConfigError, match="--sweep"):
            LoadtestConfig(**words)  # type: ignore[arg-type]


def test_a_sweep_with_a_rate_at_which_nothing_arrives_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url=http://127.0.0.1:9", "--sweep=50,0.001", "--duration=1s"]) == WRONG
    assert "no request arrives within --duration" in capsys.readouterr().err


def test_a_search_needs_a_single_first_rate() -> None:
    with pytest.raises(ConfigError, match="where the search begins"):
        LoadtestConfig(find_goodput=True, slo_ttft="1s", rate="1..5", duration="5s")


def test_a_sweep_gives_a_row_and_a_report_for_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock_server(tmp_path) as server:
        words = ["--url", server.url, "--sweep", "40,80", "--num-requests", "20", "--output-len", "2"]
        main([*words, "--json", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html")])
    content = json.loads((tmp_path / "s.json").read_text())
    assert [run["config"]["rate"] for run in content["runs"]] == ["40", "80"]
    assert "Rate against latency" in (tmp_path / "s.html").read_text()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and said[-1].startswith("written in ")


def test_a_sweep_writes_other_files_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    page = tmp_path / "s.html"
    with mock_server(tmp_path) as server:
        words = ["--url", server.url, "--sweep", "90", "--num-requests", "3", "--output-len", "1"]
        assert main([*words, "--json", "/dev/full", "--html", str(page)]) == FAILED
    assert "--json /dev/full could not be written" in capsys.readouterr().err and page.exists()
