"""Latency with and without separate prefill and decode nodes, on the same cores and under the same Poisson load.

Every arrangement is a new ``serve`` on the same cores and gets the same requests at the same instants: prompts of 512
random token ids, 64 output tokens, nothing shared. At each rate the arrangements take turns, in alternating order, so
that a slow phase of the machine does not fall on one of them alone. The load tester is the only client. Rates are
shares of the capacity of the weaker of the first two arrangements. A capacity is the rate at which requests are served
while 32 of them are in flight.

Latency counts from the planned instant of a request. Ratios are to the first arrangement; above 1, the first is better.
The gap before the second token, which contains the transfer, also has a column of its own, and ``later`` is the ratio
of 99th percentile and median without it.
The defaults take about an hour; ``--models small --arrangements split,colocated --small-seconds 10
--small-capacity-requests 300`` takes three minutes. Each run ends at the latest two minutes after its last arrival;
requests still in flight then count as failed. Samples of several rounds are pooled: a percentile is that of all of them
together. A benchmark that is stopped prints the tables of the runs so far.

``--peer vllm=PYTHON`` adds vLLM's OpenAI server with all threads, which serves the same folder of random weights in
Qwen3-0.6B's shape and mixes prompts with decode rows.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.config.shared import SMALL_MODEL
from common.system.cpu_cores import usable_cores
from scripts.benchmarks.harness.options import comma_separated
from scripts.benchmarks.harness.service_fixture import MAX_OTHERS, measured_load, running_service
from scripts.benchmarks.peers.peer import parse_peers
from scripts.benchmarks.peers.vllm_peer import LAYER_KV_BYTES
from scripts.benchmarks.peers.vllm_server import running_vllm
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report
from scripts.models.random_model import QWEN3_600M, random_model

SHORTEST = ("--models=small", "--arrangements=split", "--capacity=5", "--shares=1", "--small-seconds=2")
NUM_INPUT, NUM_OUTPUT = 512, 64
CAPACITY_CONCURRENCY = 32
POOL_TOKENS = 20_480  # of every node: what 32 requests need, and a tenth more
TIMEOUT_S = 120.0  # of a request; bounds a run at a rate above the capacity
START_S = 15.0  # start of a service and the last answers, for the estimate of the total time
MODELS = ("qwen3-0.6b", "small")


class Arrangement(NamedTuple):
    """Nodes of a service: a title, and the options of ``serve``."""

    title: str
    flags: Sequence[str]


COLOCATED = ("--prefill=0", "--local-prefill=always", "--enable-mixed-chunk")
ARRANGEMENTS = {
    "split": Arrangement("1 prefill + 1 decode", ("--prefill=1", "--decode=1")),
    "colocated": Arrangement("2 colocated", (*COLOCATED, "--decode=2")),
    "one": Arrangement("1 colocated, all threads", (*COLOCATED, "--decode=1")),
    "auto": Arrangement("1 + 1, prompts by cost", ("--prefill=1", "--decode=1", "--local-prefill=auto")),
}
DEFAULTS = ("split", "auto", "colocated", "one")
VLLM = "vllm"
TITLES = {name: found.title for name, found in ARRANGEMENTS.items()} | {VLLM: "vLLM, all threads"}
COLUMNS = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "p99",
    "itl_p50": "inter-token p50",
    "itl_p99": "p99",
    "first_gap_p50": "first gap p50",
    "e2e_p50": "end to end p50",
    "e2e_p99": "p99",
}
WIDTHS = {"ttft_p50": 10, "ttft_p99": 9, "itl_p50": 17, "itl_p99": 9, "first_gap_p50": 15, "e2e_p50": 16, "e2e_p99": 9}
NAME_WIDTH = 30
KV_BYTES = POOL_TOKENS * QWEN3_600M["num_hidden_layers"] * LAYER_KV_BYTES

Options = argparse.Namespace  # the fields of `add_options`


@dataclass(frozen=True, slots=True)
class Point:
    """All parameters of one run; ``rate`` is this ``share`` of the capacity."""

    model: str
    arrangement: str
    rate: float
    share: float
    length_s: float
    seed: int


Run = tuple[Point, dict[str, Any]]  # with its report (``Report.to_dict``)
Capacities = dict[tuple[str, str], float]  # requests/s of a model in an arrangement


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--models",
        type=comma_separated(str, among=MODELS),
        default=MODELS,
        metavar="NAME,...",
        help=f"of {', '.join(MODELS)}",
    )
    add(
        "--arrangements", type=comma_separated(str, among=ARRANGEMENTS), default=DEFAULTS,
        metavar="NAME,...", help=f"of {', '.join(ARRANGEMENTS)}; ratios are to the first",
    )  # fmt: skip
    add("--shares", type=comma_separated(float), default="0.3,0.6,0.85", help="rates, of capacity (%(default)s)")
    add("--rounds", type=int, default=1, help="repetitions, each with another seed (%(default)s)")
    add("--large-seconds", type=float, default=100.0, help="arrivals in a run of qwen3-0.6b (%(default)s)")
    add("--small-seconds", type=float, default=30.0, help="arrivals in a run of small (%(default)s)")
    add("--large-capacity-requests", type=int, default=64, help="requests for qwen3-0.6b's capacity (%(default)s)")
    add("--small-capacity-requests", type=int, default=1000, help="requests for small's capacity (%(default)s)")
    add("--capacity", type=float, help="requests/s to take as the capacity instead of measuring it")
    add("--peer", action="append", default=[], metavar="vllm=PYTHON", help="for qwen3-0.6b, also vLLM's server")
    add("--cores", type=int, default=2, help="physical cores for the service and the client together (%(default)s)")
    add("--seed", type=int, default=0, help="of the first round (%(default)s)")


def run(options: Options) -> dict[str, float]:
    services = Services(parse_peers(options.peer, among=(VLLM,)).get(VLLM), options.cores)
    keep_to(options.cores)
    say(f"bench disagg: about {minutes(options):.0f} minutes")
    capacities: Capacities = {}
    runs: list[Run] = []
    try:
        for model in options.models:
            folder = SMALL_MODEL if model == "small" else str(random_model())
            if options.capacity is None:
                capacities |= measure_capacities(model, folder, services, options)
            lowest = options.capacity or min(capacities[model, name] for name in options.arrangements[:2])
            planned = list(points(options, model, lowest))
            for number, point in enumerate(planned, start=1):
                say(f"{model}, run {number} of {len(planned)}: {point.rate:.3g}/s, {TITLES[point.arrangement]} ...")
                runs.append((point, measure(point, folder, services)))
    finally:  # also when it is stopped
        print("\n".join(table(runs, capacities)), flush=True)
    figures = {f"capacity, {model}, {name}, requests/s": rate for (model, name), rate in capacities.items()}
    rounds: dict[str, list[dict[str, Any]]] = {}
    for point, report in runs:
        rounds.setdefault(f"{point.model}, {point.arrangement}, {point.rate:.3g}/s", []).append(report)
    for name, reports in rounds.items():
        cell = pooled(reports)
        figures |= {f"{name}, {figure} ms": 1e3 * cell.times.get(figure, 0.0) for figure in ("ttft_p50", "e2e_p50")}
        figures[f"{name}, tokens/s"] = cell.tokens_per_s
        for kind, of in (("itl", "inter-token p99/p50"), ("later", "p99/p50 of later gaps")):
            if spread := cell.spread(kind):
                figures[f"{name}, {of}"] = spread
    return figures


@dataclass(frozen=True, slots=True)
class Services:
    """Starts the services that are compared.

    Attributes:
        vllm: a python with vLLM; None without ``--peer``.
    """

    vllm: Path | None
    num_cores: int

    def running(self, arrangement: str, folder: str) -> AbstractContextManager[str]:
        """Run this arrangement while the block lasts; yields its URL."""
        if arrangement != VLLM:
            flags = (*ARRANGEMENTS[arrangement].flags, f"--model={folder}", f"--max-total-tokens={POOL_TOKENS}")
            return running_service(flags)
        assert self.vllm is not None
        num_tokens = NUM_INPUT + NUM_OUTPUT
        return running_vllm(self.vllm, folder, num_threads=self.num_cores, max_model_len=num_tokens, kv_bytes=KV_BYTES)


def keep_to(num_cores: int) -> None:
    """Pin this process and its children to that many physical cores."""
    cores = usable_cores()
    if len(cores) < num_cores:
        say(f"bench disagg: --cores {num_cores}, but only {len(cores)} can be used here")
    os.sched_setaffinity(0, {cpu for core in cores[:num_cores] for cpu in core})


def compared(options: Options, model: str) -> tuple[str, ...]:
    """The names of the arrangements that run this model."""
    return (*options.arrangements, *([VLLM] if options.peer and model != "small" else []))


def measure_capacities(model: str, folder: str, services: Services, options: Options) -> Capacities:
    """Requests per second that each arrangement completes in a closed loop."""
    num_requests = options.small_capacity_requests if model == "small" else options.large_capacity_requests
    capacities = {}
    for name in compared(options, model):
        say(f"{model}, capacity of {TITLES[name]}, {num_requests} requests ...")
        with services.running(name, folder) as url:
            report = load(url, options.seed, num_requests=num_requests, concurrency=CAPACITY_CONCURRENCY)
        capacities[model, name] = report.throughput["requests_per_s"]
        say(f"    {capacities[model, name]:.3g} requests/s")
    return capacities


def measure(point: Point, folder: str, services: Services) -> dict[str, Any]:
    with services.running(point.arrangement, folder) as url:
        length_s = point.length_s
        report = load(url, point.seed, rate=f"{point.rate:.6g}", duration=f"{length_s:g}", warmup=f"{length_s / 10:g}")
    ttft, itl = report.latency["ttft"], report.latency["itl"]
    if ttft["count"] and itl["count"]:
        say(
            f"    {ttft['count']} requests, {report.throughput['requests_per_s']:.3g}/s, TTFT p50 "
            f"{ttft['p50'] * 1e3:.0f} ms, inter-token p50 {itl['p50'] * 1e3:.1f} ms, p99 {itl['p99'] * 1e3:.1f} ms"
            + (f" ({itl['p99'] / itl['p50']:.2f}x)" if itl["p50"] else "")
        )
    for reason in report.reasons:
        say(f"    invalid: {reason}")
    return report.to_dict()


def load(url: str, seed: int, **when: Any) -> Report:
    """Load a service with ``when``: how many requests arrive, and when."""
    config = LoadtestConfig(
        url=url,
        timeout=f"{TIMEOUT_S:g}",
        input_len=str(NUM_INPUT),
        output_len=str(NUM_OUTPUT),
        return_token_ids=True,
        scrape="none",
        live=False,
        seed=seed,
        **when,
    )
    report, others = measured_load(config)
    if others > MAX_OTHERS:
        report.reasons.append(f"other processes used {others:.1f} of these cores")
    return report


def points(options: Options, model: str, capacity: float) -> Iterator[Point]:
    length_s = options.small_seconds if model == "small" else options.large_seconds
    is_reversed = False
    for number in range(options.rounds):
        for share in options.shares:
            order = compared(options, model)[:: -1 if is_reversed else 1]
            is_reversed = not is_reversed
            for name in order:
                yield Point(model, name, share * capacity, share, length_s, options.seed + number)


def minutes(options: Options) -> float:
    total_s = 0.0
    for model in options.models:
        is_small, num_arrangements = model == "small", len(compared(options, model))
        length_s = options.small_seconds if is_small else options.large_seconds
        capacity_s = 20.0 if is_small else 150.0  # with the defaults, at 50 and 0.45 requests/s
        around_s = START_S if is_small else 2 * START_S
        total_s += len(options.shares) * options.rounds * num_arrangements * (length_s + around_s)
        total_s += num_arrangements * (capacity_s + around_s) if options.capacity is None else 0.0
    return total_s / 60


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One arrangement at one rate, over all rounds.

    Attributes:
        times: seconds, by names as in ``COLUMNS``; ``later`` are all gaps but the first. Without samples, missing.
        tokens_per_s: output tokens received per second, over the time in which requests arrived.
        reasons: why the figures are invalid; empty if they are valid.
    """

    times: dict[str, float]
    requests_per_s: float
    tokens_per_s: float
    count: int
    failed: int
    reasons: tuple[str, ...]

    def spread(self, name: str) -> float:
        """How many times its median the 99th percentile of such times is; 0 without samples, or if the median is 0, as
        where a client without a core finds most tokens in the same piece as others."""
        return self.times[f"{name}_p99"] / self.times[f"{name}_p50"] if self.times.get(f"{name}_p50") else 0.0


def pooled(reports: Sequence[dict[str, Any]]) -> Cell:
    """Pool the reports (``Report.to_dict``) of all rounds."""
    times: dict[str, float] = {}
    found = {name: [value for report in reports for value in report["samples"][name]] for name in ("ttft", "e2e")}
    gaps = [of_request for report in reports for of_request in report["samples"]["itl"] if of_request]
    found["itl"] = [gap for of_request in gaps for gap in of_request]
    found["first_gap"] = [of_request[0] for of_request in gaps]
    found["later"] = [gap for of_request in gaps for gap in of_request[1:]]
    for name, values in found.items():
        if values:
            times |= {f"{name}_p50": float(np.quantile(values, 0.5)), f"{name}_p99": float(np.quantile(values, 0.99))}
    return Cell(
        times,
        float(np.mean([report["throughput"]["requests_per_s"] for report in reports])),
        float(np.mean([report["throughput"]["output_tokens_per_s"] for report in reports])),
        sum(report["num_measured"] for report in reports),
        sum(report["errors"]["count"] for report in reports),
        tuple(reason for report in reports for reason in report["reasons"]),
    )


def table(runs: Sequence[Run], capacities: Capacities) -> list[str]:
    lines: list[str] = []
    for model in dict.fromkeys([*(model for model, _ in capacities), *(point.model for point, _ in runs)]):
        here = [(point, report) for point, report in runs if point.model == model]
        lines += [
            "",
            _title(model),
            *_capacity_lines({at: rate for (of, at), rate in capacities.items() if of == model}),
        ]
        lines += [_heading()] if here else []
        for rate, share in dict.fromkeys((point.rate, point.share) for point, _ in here):
            reports: dict[str, list[dict[str, Any]]] = {}
            for name in dict.fromkeys(point.arrangement for point, _ in here):
                found = [report for point, report in here if (point.rate, point.arrangement) == (rate, name)]
                reports |= {name: found} if found else {}
            shown = f"{rate:.3g} requests/s ({share:.0%} of capacity)"
            lines += ["", shown, *_rows({name: pooled(found) for name, found in reports.items()})]
    return lines[1:]


def _title(model: str) -> str:
    name = "the small model" if model == "small" else "Qwen3-0.6B's shape"
    return f"{name}, {NUM_INPUT} tokens in and {NUM_OUTPUT} out (times in ms)"


def _capacity_lines(capacities: dict[str, float]) -> list[str]:
    """Each arrangement's capacity, and by which factor that of the first is better."""
    lines = [f"requests/s with {CAPACITY_CONCURRENCY} in flight:"] if capacities else []
    first = next(iter(capacities.values()), 0.0)
    for name, rate in capacities.items():
        ratio = f"{first / rate:9.2f}x" if rate and len(lines) > 1 else ""
        lines.append(f"{'  ' + TITLES[name]:{NAME_WIDTH}}{rate:10.3g}{ratio}")
    return lines


def _heading() -> str:
    cells = "".join(f"{title:>{WIDTHS[name]}}" for name, title in COLUMNS.items())
    rest = f"{'requests/s':>12}{'tokens/s':>10}{'count':>7}{'failed':>8}{'p99/p50':>9}{'later':>8}"
    return f"{'':{NAME_WIDTH}}{cells}{rest}"


def _rows(cells: dict[str, Cell]) -> list[str]:
    lines, notes = [], []
    first = next(iter(cells.values()))
    for name, cell in cells.items():
        title = TITLES[name]
        times = "".join(_time(cell.times.get(column), WIDTHS[column]) for column in COLUMNS)
        rest = f"{cell.requests_per_s:12.3g}{cell.tokens_per_s:10.1f}{cell.count:7}{cell.failed:8}"
        for kind, width in (("itl", 9), ("later", 8)):
            rest += f"{cell.spread(kind):{width}.2f}" if cell.spread(kind) else f"{'-':>{width}}"
        lines.append(f"{title:{NAME_WIDTH}}{times}{rest}")
        if cell is not first:
            lines.append(_ratios(first, cell))
        notes += [f"  {title}: invalid, {reason}" for reason in dict.fromkeys(cell.reasons)]
    return lines + notes


def _ratios(first: Cell, other: Cell) -> str:
    """By which factor the first is better: other over first for times, first over other for rates."""
    line = f"{'  ratio to the first':{NAME_WIDTH}}"
    for column, width in WIDTHS.items():
        ours, theirs = first.times.get(column), other.times.get(column)
        line += f"{theirs / ours:{width - 1}.2f}x" if ours and theirs else f"{'':{width}}"
    rates = ((first.requests_per_s, other.requests_per_s, 12), (first.tokens_per_s, other.tokens_per_s, 10))
    return line + "".join(f"{ours / theirs:{width - 1}.2f}x" if theirs else "" for ours, theirs, width in rates)


def _time(seconds: float | None, width: int) -> str:
    if seconds is None:
        return f"{'-':>{width}}"
    ms = seconds * 1e3
    return f"{ms:{width}.{1 if ms < 100 else 0}f}"
