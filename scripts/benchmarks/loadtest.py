"""The load-test harness beside aiperf: same mock server, same load, runs that alternate.

Both measure a mock whose latencies are known and that writes down when it really sent each token. aiperf comes from an
environment of its own: ``python -m venv V && V/bin/pip install aiperf``, then ``./scripts/bench loadtest --aiperf
V/bin/aiperf``. Without it, only the harness and the mock's truth are compared.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

from scripts.benchmarks.competitors import aiperf_words, cpu_of, keep_tokenizer
from scripts.benchmarks.cpu_contention import Neighbours
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.files import Report
from scripts.load_tester.run import run_load

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("ttft", "itl", "e2e")
AIPERF_NAMES = {"ttft": "time_to_first_token", "itl": "inter_chunk_latency", "e2e": "request_latency"}
OURS = {"ttft": "ttft_sent", "itl": "itl", "e2e": "e2e_sent"}
Row = dict[tuple[str, str], float]  # (figure, statistic) to milliseconds


class Mock:
    """The mock server of the tests, as a process."""

    def __init__(self, folder: Path) -> None:
        self._truth = folder / "truth.jsonl"
        script = str(ROOT / "tests" / "support" / "mock_openai.py")
        flags = ["--ttft", "0.1", "--itl", "0.01", "--truth", str(self._truth)]
        self._process = subprocess.Popen([sys.executable, script, *flags], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def stop(self) -> Row:
        """What it really did, from its own notes."""
        self._process.terminate()
        self._process.wait()
        rows = [json.loads(line) for line in self._truth.read_text().splitlines()]
        values = {
            "ttft": [row["stamps"][0] - row["arrived_at"] for row in rows],
            "itl": [gap for row in rows for gap in np.diff(row["stamps"]).tolist()],
            "e2e": [row["stamps"][-1] - row["arrived_at"] for row in rows],
        }
        return {
            (name, label): 1e3 * statistic(values[name])
            for name in FIGURES
            for label, statistic in (("p50", statistics.median), ("mean", statistics.fmean))
        }


def ours(rate: float, count: int, tokens: int, seed: int, folder: Path) -> tuple[Row, Row, Report]:
    """Figures of a run of the harness, the mock's truth about it, and the report."""
    mock = Mock(folder)
    config = LoadtestConfig(
        url=mock.url,
        endpoint="chat",
        rate=f"{rate:g}",
        num_requests=count,
        input_len="64",
        output_len=str(tokens),
        seed=seed,
        scrape="none",
    )
    report = run_load(config)
    found = {(name, label): report.latency[OURS[name]][label] * 1e3 for name in FIGURES for label in ("p50", "mean")}
    return found, mock.stop(), report


def aiperf(program: str, rate: float, count: int, tokens: int, folder: Path) -> tuple[Row, Row, float]:
    """Figures of a run of aiperf, the mock's truth about it, and CPU seconds."""
    mock = Mock(folder)
    cpu_s = cpu_of(aiperf_words(program, mock.url, rate, count, tokens, folder, "chat"), folder)
    truth = mock.stop()
    content = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    found = {
        (name, label): float(content[AIPERF_NAMES[name]][key])
        for name in FIGURES
        for label, key in (("p50", "p50"), ("mean", "avg"))
    }
    return found, truth, cpu_s


@click.command()
@click.option("--aiperf", "program", help="Path of aiperf's executable.", metavar="FILE")
@click.option("--rate", default=10.0, show_default=True, help="Requests per second, Poisson.")
@click.option("--num-requests", "count", default=200, show_default=True)
@click.option("--output-len", "tokens", default=32, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(program: str | None, rate: float, count: int, tokens: int, repeats: int) -> None:
    """Compare medians over alternating runs."""
    mine: list[Row] = []
    truths: list[Row] = []
    theirs: list[Row] = []
    cpu_ms: list[tuple[float, float]] = []
    neighbours = Neighbours(range(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep_tokenizer(folder)
        for seed in range(repeats):
            found, truth, report = ours(rate, count, tokens, seed, folder)
            mine.append(found)
            truths.append(truth)
            own_ms = report.client["cpu_ms_per_event"]
            print(f"run {seed + 1}: {'valid' if report.is_valid else report.reasons}, {own_ms:.4f} ms of CPU per event")
            if program:
                found, _, cpu_s = aiperf(program, rate, count, tokens, folder)
                theirs.append(found)
                cpu_ms.append((own_ms, cpu_s * 1e3 / (count * tokens)))
    _show(mine, truths, theirs)
    print(f"others kept {neighbours.cores():.2f} cores busy meanwhile")
    if cpu_ms:
        own, other = (statistics.median(side) for side in zip(*cpu_ms, strict=True))
        print(
            f"CPU per token event: harness {own:.3f} ms, aiperf {other:.3f} ms (with its start-up), {other / own:.1f}x"
        )


def _show(mine: list[Row], truths: list[Row], theirs: list[Row]) -> None:
    print(f"\n{'milliseconds, medians':24}{'mock':>10}{'harness':>10}{'off by':>9}{'aiperf':>10}{'harness/aiperf':>16}")
    for key in mine[0]:
        own, truth = (statistics.median(row[key] for row in rows) for rows in (mine, truths))
        line = f"{' '.join(key):24}{truth:10.3f}{own:10.3f}{own / truth - 1:+9.2%}"
        if theirs:
            other = statistics.median(row[key] for row in theirs)
            line += f"{other:10.3f}{own / other:16.4f}"
        print(line)


if __name__ == "__main__":
    main()
