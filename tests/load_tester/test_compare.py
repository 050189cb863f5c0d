"""``--compare``: which changes count, and what the exit status says of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.benchmarks.harness.mock_server import mock_server
from scripts.load_tester.analysis.compare import Change, add_verdicts, changes_of
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.main import main
from scripts.load_tester.output_files import FINE, INVALID, REGRESSED, WRONG

ROOT = Path(__file__).resolve().parents[2]


def report(
    ttft: "list[float] | np.ndarray", *, good: int = 100, failed: int = 0, count: int = 100, **own: Any
) -> Figures:
    """The fields of a report that comparisons use."""
    return {
        "schema": 1,
        "is_valid": True,
        "reasons": [],
        "config": {"rate": "4"},
        "server": {"model": "m", "kind": "k"},
        "samples": {"ttft": [float(value) for value in ttft], "itl": [], "tpot": [], "e2e": []},
        "service": {"good": good, "count": count, "attainment": good / count, "limits_s": {"ttft": 1.0}},
        "errors": {"count": failed, "share": failed / count},
        "throughput": {"requests_per_s": 4.0, "output_tokens_per_s": 9.0},
        "num_measured": count,
    } | own


def ttft(middle: float, count: int = 100, seed: int = 1) -> np.ndarray:
    return middle + np.random.default_rng(seed).normal(0, 0.03, count)


def written(folder: Path, **reports: Figures) -> list[str]:
    for name, content in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return [str(folder / f"{name}.json") for name in reports]


def compared(before: Figures, after: Figures) -> list[Change]:
    (changes,) = add_verdicts([changes_of(before, after)], 0.05)
    return changes


def verdicts(before: Figures, after: Figures) -> dict[str, str]:
    return {change.name: change.verdict for change in compared(before, after)}


def test_a_change_counts_only_if_it_is_large_and_significant() -> None:
    base = report(ttft(1.0), good=90)
    slightly, much, better = report(ttft(1.02, seed=2), good=89), report(ttft(1.2), good=60), report(ttft(0.8))
    assert set(verdicts(base, slightly).values()) == {"same"}
    assert verdicts(base, much) == {
        "time to first token mean": "worse",
        "time to first token p50": "worse",
        "failed requests": "same",
        "good requests": "worse",
    }
    assert list(verdicts(base, better).values()) == ["better", "better", "same", "better"]


def test_a_queue_that_grows_to_the_end_of_a_run_is_judged_by_the_other_run() -> None:
    """The spread of the queued run is unknown; that of the other run excludes a twofold change."""
    steady, growing = report(ttft(1.0, 200), count=200), report(np.linspace(1, 20, 200), count=200)
    names = ("time to first token mean", "time to first token p50", "time to first token p99")
    assert [verdicts(steady, growing)[name] for name in names] == ["worse"] * 3
    assert [verdicts(growing, steady)[name] for name in names] == ["better"] * 3
    slightly = report(np.linspace(1, 2, 200), count=200)
    assert [verdicts(steady, slightly)[name] for name in names] == ["unknown"] * 3
    assert [verdicts(slightly, growing)[name] for name in names] == ["unknown"] * 3, "neither of them can tell"


def test_p99_of_few_independent_requests_is_not_judged() -> None:
    """300 requests in 25 correlated blocks: p99 depends on one block, so it is judged only beyond a factor of two."""

    def stretches(middle: float, seed: int) -> Figures:
        return report(np.repeat(ttft(middle, 25, seed), 12), count=300)

    found = verdicts(stretches(1.0, 3), stretches(1.5, 6))
    assert [found[f"time to first token {name}"] for name in ("mean", "p99")] == ["worse", "unknown"]
    assert verdicts(stretches(1.0, 3), stretches(4.0, 6))["time to first token p99"] == "worse"
    apart = (report(ttft(middle, 300, seed), count=300) for middle, seed in ((1.0, 1), (1.5, 2)))
    assert verdicts(*apart)["time to first token p99"] == "worse"


def test_correlated_good_requests_count_for_fewer() -> None:
    """0.9 and 0.6 differ significantly for 100 independent requests, not for ten; ten bad ones suffice."""

    def good(share: float, num_free: float) -> Figures:
        found = report(ttft(1.0), good=round(100 * share))
        found["service"]["num_free"] = num_free
        return found

    assert verdicts(good(0.9, 100.0), good(0.6, 100.0))["good requests"] == "worse"
    assert verdicts(good(0.9, 100.0), good(0.6, 10.0))["good requests"] == "same"
    assert verdicts(good(0.9, 10.0), good(0.6, 100.0))["good requests"] == "same"
    assert verdicts(good(1.0, 100.0), good(0.1, 2.0))["good requests"] == "worse"


def test_runs_of_one_request_are_not_judged() -> None:
    """A bootstrap of one value has no spread, and would make any difference significant."""
    one, other = compared(report([0.1]), report([0.2]))[:2]
    assert (one.verdict, one.low, one.p, other.verdict) == ("unknown", None, None, "unknown")
    assert one.ratio == pytest.approx(2)
    empty = report([], count=1, good=0, failed=1)
    assert [change.verdict for change in compared(empty, empty)] == ["same", "same"]


def test_more_comparisons_need_stronger_evidence() -> None:
    """A change with p = 0.01 is significant for one pair of runs, not for one of forty pairs."""
    pair = changes_of(report(ttft(1.0)), report(ttft(1.0)))
    unsure = [Change("x", "s", 1.0, 1.1, 1.1, 1.02, 1.19, 0.01)]
    assert add_verdicts([unsure], 0.05)[0][0].verdict == "worse"
    found = add_verdicts([unsure, *([pair] * 39)], 0.05)
    assert found[0][0].verdict == "same" and len(found) == 40


def test_the_threshold_does_not_apply_to_failures() -> None:
    """A share of 3 % is below the threshold but significant for 1,000 requests."""
    before, after = report(ttft(1.0), count=1000, good=1000), report(ttft(1.0), count=1000, good=970, failed=30)
    assert verdicts(before, after)["failed requests"] == "worse"
    assert verdicts(after, before)["failed requests"] == "better"
    assert verdicts(before, report(ttft(1.0), count=1000, good=999, failed=1))["failed requests"] == "same"


def test_shares_of_good_requests_with_different_limits_are_not_judged() -> None:
    strict = report(ttft(1.0), good=10)
    strict["service"]["limits_s"] = {"ttft": 0.1}
    assert verdicts(report(ttft(1.0)), strict)["good requests"] == "unknown"


def test_an_invalid_run_makes_the_comparison_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = report(ttft(2.0))
    paths = written(tmp_path, a=report(ttft(1.0)), b=slow, c=slow | {"is_valid": False, "reasons": ["too late"]})
    assert main(["--compare", paths[0], paths[1], "--json", str(tmp_path / "d.json")]) == REGRESSED
    assert main(["--compare", paths[1], paths[0]]) == FINE
    assert main(["--compare", paths[0], paths[0]]) == FINE
    changes = json.loads((tmp_path / "d.json").read_text())["changes"]
    assert {one["name"] for one in changes if one["verdict"] == "worse"} == {
        "time to first token mean",
        "time to first token p50",
    }
    capsys.readouterr()
    assert main(["--compare", paths[0], paths[2]]) == INVALID
    assert "c is not a valid run: too late" in capsys.readouterr().err


def test_different_options_and_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = report(ttft(1.0), config={"rate": "8", "html": "x"}, server={"model": "n", "kind": "k"})
    main(["--compare", *written(tmp_path, a=report(ttft(1.0)), b=other)])
    text = capsys.readouterr().out
    assert "rate: '4' before, '8' after" in text and "server's model: 'm' before, 'n' after" in text
    assert "html" not in text


def test_unusable_reports_and_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, *bad = written(tmp_path, a=report(ttft(1.0)), b={"schema": 1}, c={"schema": 9}, d={"changes": []}, e={
        "schema": 1, "runs": [{"config": {"rate": "4"}}]})  # fmt: skip
    (tmp_path / "text").write_text("no")
    for path in (*bad, str(tmp_path / "text"), str(tmp_path / "none.json")):
        assert main(["--compare", good, path]) == WRONG
    assert main(["--compare", good, good, "--html", str(tmp_path / "no" / "x.html")]) == WRONG
    assert main(["--compare", good, good, "--svg", good]) == WRONG
    assert main(["--compare", good, good, "--html", good]) == WRONG
    both = str(tmp_path / "both")
    assert main(["--compare", good, good, "--json", both, "--html", both]) == WRONG
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"loadtest: --json and --html name the same file, {both}"
    assert len(lines) == 10 and all(line.startswith("loadtest: ") for line in lines)


@pytest.mark.parametrize("value", [None, [], {}, "x", True])
def test_malformed_reports_are_refused(tmp_path: Path, value: Any) -> None:
    """Each field of a run, and of a run in a sweep, replaced in turn."""
    base = report(ttft(1.0, 5))
    for name in base:
        if name != "schema":
            spoiled = base | {name: value}
            paths = written(tmp_path, a=base, b=spoiled, c=sweep(base), d=sweep(spoiled))
            for pair in (paths[:2], paths[2:]):
                assert main(["--compare", *pair, "--html", str(tmp_path / "p.html")]) in (FINE, WRONG, INVALID)
    runs = {"schema": 1, "search": None, "runs": value}
    assert main(["--compare", *written(tmp_path, c=sweep(base), d=runs)]) == WRONG


def sweep(run: Figures) -> Figures:
    return {"schema": 1, "search": None, "runs": [run]}


def test_a_comparison_as_json_stands_alone_on_standard_output(tmp_path: Path) -> None:
    (path,) = written(tmp_path, a=report(ttft(1.0)))
    words = [sys.executable, "-m", "scripts.cli", "loadtest", "--compare", path, path, "--json", "-"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == FINE
    assert json.loads(ended.stdout)["changes"]
    assert "rates are not judged" in ended.stderr


def test_help_of_a_comparison_needs_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--compare", "--help"], ["--compare", "a", "b", "--help"]):
        assert main(words) == FINE
        assert "--threshold" in capsys.readouterr().out


def test_runs_of_a_search_at_one_rate_are_compared_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [report(ttft(middle)) for middle in (1.0, 2.0)]
    paths = written(tmp_path, a={"schema": 1, "runs": runs}, b={"schema": 1, "runs": runs})
    assert main(["--compare", *paths]) == FINE
    assert "4/s, try 2" in capsys.readouterr().out


@pytest.mark.slow
def test_sweeps_are_compared_rate_by_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rates, first_s in (("quick", "40,80", "0.01"), ("slow", "20,40", "0.15")):
        with mock_server(tmp_path, "--ttft", first_s) as server:
            words = ["--sweep", rates, "--num-requests", "30", "--output-len", "3", "--max-send-lateness", "1s"]
            main(["--url", server.url, *words, "--json", str(tmp_path / f"{name}.json")])
    both = [str(tmp_path / f"{name}.json") for name in ("quick", "slow")]
    for path, least_s in zip(both, (0.01, 0.15), strict=True):  # measured values depend on the machine's load
        content = json.loads(Path(path).read_text())
        for run in content["runs"]:
            values = least_s + np.random.default_rng(0).exponential(least_s / 10, 30)
            run |= {"is_valid": True, "reasons": [], "samples": run["samples"] | {"ttft": values.tolist()}}
        Path(path).write_text(json.dumps(content))
    page, pictures, changed = tmp_path / "c.html", tmp_path / "pictures", tmp_path / "c.json"
    capsys.readouterr()
    assert main(["--compare", *both, "--html", str(page), "--svg", str(pictures), "--json", str(changed)]) == REGRESSED
    text = capsys.readouterr().out
    assert "40/s" in text and "80/s" not in text, "only what both have"
    (mean,) = [one for one in json.loads(changed.read_text())["changes"] if one["name"] == "time to first token mean"]
    assert mean["rate"] == "40/s" and mean["verdict"] == "worse" and mean["ratio"] > 2
    assert "REGRESSED" in page.read_text() and "slow p99" in page.read_text()
    assert (pictures / "time-to-first-token-by-rate.svg").read_text().count("quick p50") == 1
    assert main(["--compare", both[0], both[0]]) == FINE
    assert main(["--compare", both[0], *written(tmp_path, one=report(ttft(1.0)))]) == WRONG
