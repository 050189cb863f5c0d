"""The load tester's own accuracy and cost, against a mock server that records what it really did.

Each run compares the report's latencies with the mock server's records, and prints the CPU time per token, how late
requests went out, and the seconds to the first request. On a quiet machine the latencies agree within 2 % or 1 ms.
"""

import argparse
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from common.errors import ConfigError
from scripts.benchmarks.harness.cpu_contention import CpuContention
from scripts.benchmarks.harness.mock_server import load, mock_server

SHORTEST = ("--num-requests=20", "--repeats=1", "--output-len=8")
LATENCIES = {"ttft": "ttft_sent", "itl": "itl", "e2e": "e2e_sent"}  # name in the table, name in the report


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second, Poisson (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=200, help="requests of each run (%(default)s)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a request (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs whose median counts (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    if options.output_len < 2:
        raise ConfigError("--output-len must be at least 2: one token has no gap")
    contention = CpuContention(range(os.cpu_count() or 1))
    rows = [one_run(options, seed) for seed in range(options.repeats)]
    figures = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(f"\n{'median latencies, ms':24}{'mock':>10}{'report':>10}{'difference':>12}")
    for name in LATENCIES:
        truth, found = figures[f"{name} by the mock, ms"], figures[f"{name} by the report, ms"]
        print(f"{name:24}{truth:10.3f}{found:10.3f}{found / truth - 1:+12.2%}")
    for name in ("CPU per token, ms", "late by (p99), ms", "first request after, s"):
        print(f"{name:24}{figures[name]:10.4f}")
    print(f"other programs kept {contention.cores():.2f} cores busy")
    return figures


def one_run(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Figures of one run by the report and by the mock server."""
    with tempfile.TemporaryDirectory() as folder:
        with mock_server(Path(folder), "--ttft", "0.1", "--itl", "0.01") as mock:
            report = load(
                mock, endpoint="chat", rate=f"{options.rate:g}", num_requests=options.num_requests, input_len="64",
                output_len=str(options.output_len), seed=seed,
            )  # fmt: skip
    print(f"run {seed + 1}: {'valid' if report.is_valid else '; '.join(report.reasons)}", flush=True)
    true_s = {
        "ttft": [one["stamps"][0] - one["arrived_at"] for one in mock.truth],
        "itl": [later - earlier for one in mock.truth for earlier, later in pairwise(one["stamps"])],
        "e2e": [one["stamps"][-1] - one["arrived_at"] for one in mock.truth],
    }
    figures = {f"{name} by the mock, ms": 1e3 * statistics.median(values) for name, values in true_s.items()}
    figures |= {f"{name} by the report, ms": 1e3 * report.latency[own]["p50"] for name, own in LATENCIES.items()}
    return figures | {
        "CPU per token, ms": report.client["cpu_ms_per_event"],
        "late by (p99), ms": 1e3 * report.arrivals["lateness"]["p99"],
        "first request after, s": report.start_up_s or 0.0,
    }
