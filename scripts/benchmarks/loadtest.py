"""Accuracy of the load tester: its figures beside those that a mock server recorded, and beside aiperf's.

The latencies of the mock server are known, and it records when it sent each token. ``--aiperf`` runs aiperf (0.13) with
the same load, in alternation. Install it in its own environment: ``python -m venv V && V/bin/pip install aiperf``.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from common.config.shared import SMALL_MODEL
from scripts.benchmarks.cpu_contention import CpuContention
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.run import run_load

SHORTEST = ("--num-requests=20", "--output-len=8", "--repeats=1")
ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("ttft", "itl", "e2e")
AIPERF_NAMES = {"ttft": "time_to_first_token", "itl": "inter_chunk_latency", "e2e": "request_latency"}
OURS = {"ttft": "ttft_sent", "itl": "itl", "e2e": "e2e_sent"}
REVISION = "0" * 40  # of the tokenizer in the hub cache
Row = dict[tuple[str, str], float]  # (figure, statistic) to milliseconds


class Mock:
    """The mock server of the tests, in a process."""

    def __init__(self, folder: Path) -> None:
        self._truth = folder / "truth.jsonl"
        script = str(ROOT / "tests" / "support" / "mock_openai.py")
        flags = ["--ttft", "0.1", "--itl", "0.01", "--truth", str(self._truth)]
        self._process = subprocess.Popen([sys.executable, script, *flags], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def stop(self) -> Row:
        """Stop; returns the latencies that the server recorded."""
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
    """Run the load tester; returns its figures, those of the mock server, and the report."""
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


def aiperf(program: str, rate: float, count: int, tokens: int, folder: Path) -> tuple[Row, float]:
    """Run aiperf; returns its figures and its CPU seconds."""
    mock = Mock(folder)
    cpu_s = cpu_of(aiperf_words(program, mock.url, rate, count, tokens, folder), folder)
    mock.stop()
    content = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    found = {
        (name, label): float(content[AIPERF_NAMES[name]][key])
        for name in FIGURES
        for label, key in (("p50", "p50"), ("mean", "avg"))
    }
    return found, cpu_s


def aiperf_words(program: str, url: str, rate: float, count: int, tokens: int, folder: Path) -> list[str]:
    """Command line of aiperf with Poisson arrivals."""
    shutil.rmtree(folder / "aiperf", ignore_errors=True)
    words = f"profile -m mock --endpoint-type chat --streaming --arrival-pattern poisson --isl 64 --osl {tokens}"
    words += f" --request-rate {rate:g} --request-count {count} --ui none --tokenizer baton/small"
    return [program, *words.split(), "--url", url, "--output-artifact-dir", str(folder / "aiperf")]


def cpu_of(words: list[str], folder: Path) -> float:
    """CPU seconds of a command and all of its processes.

    Raises:
        RuntimeError: the command failed; the message contains the end of its output.
    """
    environ = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        raise RuntimeError(f"{words[0]} ended with status {ran.returncode}:\n{ran.stdout[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def keep_tokenizer(folder: Path) -> None:
    """Put the small model's tokenizer into a hub cache, so that aiperf needs no network."""
    cache = folder / "hf" / "hub" / "models--baton--small"
    shutil.copytree(SMALL_MODEL, cache / "snapshots" / REVISION)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(REVISION)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--aiperf", help="executable of aiperf, to measure it as well", metavar="FILE")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second, Poisson (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=200, help="requests of each run (%(default)s)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a request (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs whose median counts (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    mine: list[Row] = []
    truths: list[Row] = []
    theirs: list[Row] = []
    own_ms: list[float] = []
    their_ms: list[float] = []
    size = (options.rate, options.num_requests, options.output_len)
    contention = CpuContention(range(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep_tokenizer(folder)
        for seed in range(options.repeats):
            found, truth, report = ours(*size, seed, folder)
            mine.append(found)
            truths.append(truth)
            own_ms.append(report.client["cpu_ms_per_event"])
            verdict = "valid" if report.is_valid else report.reasons
            started = f"first request after {report.start_up_s or 0.0:.2f} s"
            print(f"run {seed + 1}: {verdict}, {own_ms[-1]:.4f} ms of CPU per token, {started}")
            if options.aiperf:
                found, cpu_s = aiperf(options.aiperf, *size, folder)
                theirs.append(found)
                their_ms.append(cpu_s * 1e3 / (options.num_requests * options.output_len))
    figures = _show(mine, truths, theirs) | {"ms of CPU per token": statistics.median(own_ms)}
    print(f"other processes used {contention.cores():.2f} cores")
    if their_ms:
        own, other = statistics.median(own_ms), statistics.median(their_ms)
        print(f"CPU per token: ours {own:.3f} ms, aiperf {other:.3f} ms (with its start-up), {other / own:.1f}x")
    return figures


def _show(mine: list[Row], truths: list[Row], theirs: list[Row]) -> dict[str, float]:
    """Print the table; returns our figures and those of the mock server."""
    print(f"\n{'milliseconds, medians':24}{'mock':>10}{'ours':>10}{'off by':>9}{'aiperf':>10}{'ours/aiperf':>16}")
    figures: dict[str, float] = {}
    for key in mine[0]:
        own, truth = (statistics.median(row[key] for row in rows) for rows in (mine, truths))
        figures |= {f"{' '.join(key)} ms": own, f"{' '.join(key)} ms, mock": truth}
        line = f"{' '.join(key):24}{truth:10.3f}{own:10.3f}{own / truth - 1:+9.2%}"
        if theirs:
            other = statistics.median(row[key] for row in theirs)
            line += f"{other:10.3f}{own / other:16.4f}"
        print(line)
    return figures
