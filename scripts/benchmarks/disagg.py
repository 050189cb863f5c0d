"""Latency with and without separate prefill and decode nodes, on the same cores and under the same Poisson load.

Every arrangement is a new ``serve`` on the same cores and gets the same requests at the same instants: prompts of 512
random token ids, 64 output tokens, nothing shared. At each rate the arrangements take turns, in alternating order, so
that a slow phase of the machine does not fall on one of them alone. The load tester is the only client. Rates are
absolute for the shape of Qwen3-0.6B. For the small model they are shares of its capacity: the rate that the weaker of
the first two arrangements completes with 32 requests in flight.

Latency counts from the planned instant of a request. Ratios are to the first arrangement; above 1, the first is better.
The defaults take about an hour; ``--models small --arrangements split,colocated --small-seconds 10 --capacity-seconds
6`` takes three minutes. Each run ends at the latest two minutes after its last arrival; requests still in flight then
count as failed. Samples of several rounds are pooled: a percentile is that of all of them together.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.config.shared import SMALL_MODEL
from common.errors import BatonError, ConfigError
from scripts.benchmarks.cpu_contention import CpuContention
from scripts.benchmarks.service_fixture import running_service
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report, write_json
from scripts.load_tester.run import run_load
from scripts.models.random_model import random_model
from scripts.serving.cpu_affinity import usable_cores

SHORTEST = (
    "--models=small", "--arrangements=split", "--capacity=5", "--shares=1", "--small-seconds=2",
)  # fmt: skip
SCHEMA = 1
NUM_INPUT, NUM_OUTPUT = 512, 64
CAPACITY_CONCURRENCY = 32
POOL_TOKENS = 32_768  # of every node, so that no arrangement runs out of pages
MAX_OTHERS = 0.15  # cores used by other processes above which a run is marked invalid
START_S = 15.0  # start of a service and the last answers, for the estimate of the total time
MODELS = ("qwen3-0.6b", "small")

FLAGS = {
    "split": ["--prefill=1", "--decode=1"],
    "colocated": ["--prefill=0", "--decode=2", "--local-prefill=always", "--enable-mixed-chunk"],
    "colocated-128": [
        "--prefill=0",
        "--decode=2",
        "--local-prefill=always",
        "--enable-mixed-chunk",
        "--chunked-prefill-size=128",
    ],
    "one": ["--prefill=0", "--decode=1", "--local-prefill=always", "--enable-mixed-chunk"],
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        rates: requests per second for the large model.
        shares: rates for the small model, as shares of its capacity.
        capacity: requests per second; None to measure it.
    """

    models: tuple[str, ...]
    arrangements: tuple[str, ...]
    rates: tuple[float, ...]
    shares: tuple[float, ...]
    rounds: int
    large_s: float
    small_s: float
    capacity_s: float
    capacity: float | None
    cores: int
    seed: int

    def length_s(self, model: str) -> float:
        return self.small_s if model == "small" else self.large_s


@dataclass(frozen=True, slots=True)
class Point:
    """All parameters of one run. ``share`` is 0 if the rate is absolute."""

    model: str
    arrangement: str
    rate: float
    share: float
    length_s: float
    warmup_s: float
    seed: int
    cores: int


Found = dict[str, Any]


class Bench:
    """Makes the missing runs, and writes each to a file when it is over."""

    def __init__(self, options: Options, path: str | None, found: Found) -> None:
        self._options = options
        self._path = path
        self._found = found

    def run(self) -> Found:
        """Make all missing runs; returns the planned runs, including those of the file."""
        planned: list[Found] = []
        for model in self._options.models:
            place = SMALL_MODEL if model == "small" else str(random_model())
            capacity = self._capacity(place) if model == "small" else 0.0
            for point in points(self._options, model, capacity):
                planned.append(asdict(point))
                if not any(run["point"] == asdict(point) for run in self._found["runs"]):
                    self._measure(point, place)
        return self._found | {"runs": [run for run in self._found["runs"] if run["point"] in planned]}

    def _capacity(self, place: str) -> float:
        """The lower capacity of the first two arrangements, in requests per second. Measures all that are not known."""
        if self._options.capacity is not None:
            return self._options.capacity
        known: dict[str, float] = self._found["capacity"]
        for name in self._options.arrangements:
            if name not in known:
                say(f"small model, capacity of {ARRANGEMENTS[name]}, {self._options.capacity_s:g} s ...")
                warmup_s = self._options.capacity_s / 5
                report = self._load(
                    place, name, self._options.capacity_s, warmup_s, self._options.seed,
                    concurrency=CAPACITY_CONCURRENCY,
                )  # fmt: skip
                known[name] = report.throughput["requests_per_s"]
                say(f"    {known[name]:.1f} requests/s")
                self._save()
        return min(known[name] for name in self._options.arrangements[:2])

    def _measure(self, point: Point, place: str) -> None:
        say(f"{point.model}, {ARRANGEMENTS[point.arrangement]}, {point.rate:.3g} requests/s, {point.length_s:g} s ...")
        report = self._load(
            place, point.arrangement, point.length_s, point.warmup_s, point.seed, rate=f"{point.rate:.6g}"
        )
        ttft, itl = report.latency["ttft"], report.latency["itl"]
        if ttft["count"] and itl["count"]:
            say(
                f"    {ttft['count']} requests, TTFT p50 {ttft['p50'] * 1e3:.0f} ms, inter-token p50 "
                f"{itl['p50'] * 1e3:.1f} ms, p99 {itl['p99'] * 1e3:.1f} ms"
            )
        for reason in report.reasons:
            say(f"    invalid: {reason}")
        content = {name: value for name, value in report.to_dict().items() if name != "config"}
        self._found["runs"].append({"point": asdict(point), "report": content})
        self._save()

    def _load(self, place: str, arrangement: str, length_s: float, warmup_s: float, seed: int, **when: Any) -> Report:
        flags = [*FLAGS[arrangement], f"--model={place}", f"--max-total-tokens={POOL_TOKENS}"]
        with running_service(flags) as url:
            config = LoadtestConfig(
                url=url,
                duration=f"{length_s:g}",
                warmup=f"{warmup_s:g}",
                timeout="120",  # bounds a run at a rate above the capacity
                input_len=str(NUM_INPUT),
                output_len=str(NUM_OUTPUT),
                return_token_ids=True,
                scrape="none",
                live=False,
                seed=seed,
                **when,
            )
            contention = CpuContention(os.sched_getaffinity(0))
            report = run_load(config)
            others = contention.cores()
        if others > MAX_OTHERS:
            report.reasons.append(f"other processes used {others:.1f} of these cores")
        if "the run was stopped before its end" in report.reasons:
            raise KeyboardInterrupt  # the load tester has handled the signal
        return report

    def _save(self) -> None:
        if self._path:
            write_json(self._found, self._path + ".new")
            os.replace(self._path + ".new", self._path)


def points(options: Options, model: str, capacity: float) -> Iterator[Point]:
    """All runs for one model, in order."""
    shares = options.shares if model == "small" else (0.0,) * len(options.rates)
    rates = [share * capacity for share in shares] if model == "small" else options.rates
    length_s = options.length_s(model)
    is_reversed = False
    for number in range(options.rounds):
        for rate, share in zip(rates, shares, strict=True):
            order = options.arrangements[::-1] if is_reversed else options.arrangements
            is_reversed = not is_reversed
            for name in order:
                seed = options.seed + number
                yield Point(model, name, rate, share, length_s, length_s / 10, seed, options.cores)


def minutes(options: Options) -> float:
    """Estimated minutes of all runs."""
    total_s = 0.0
    for model in options.models:
        num_rates = len(options.shares if model == "small" else options.rates)
        num_runs = num_rates * options.rounds * len(options.arrangements)
        total_s += num_runs * (options.length_s(model) + (START_S if model == "small" else 2 * START_S))
        if model == "small":
            total_s += len(options.arrangements) * (options.capacity_s + START_S)
    return total_s / 60


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- the table -------------------------------------------------------------------------------------------------------


ARRANGEMENTS = {
    "split": "1 prefill + 1 decode",
    "colocated": "2 colocated",
    "colocated-128": "2 colocated, chunks of 128",
    "one": "1 colocated, all threads",
}

#: Another engine under the same load, on two cores of another machine, in seconds.
REFERENCE_RATE = 0.5
REFERENCE = {"ttft_p50": 0.81, "itl_p50": 0.066, "itl_p99": 0.806}
REFERENCE_NAME = "vLLM 0.32, colocated (*)"
FOOTNOTE = "(*) measured on two cores of another machine, for orientation only"

COLUMNS = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "p99",
    "itl_p50": "inter-token p50",
    "itl_p99": "p99",
    "e2e_p50": "whole p50",
    "e2e_p99": "p99",
}
WIDTHS = {"ttft_p50": 10, "ttft_p99": 9, "itl_p50": 17, "itl_p99": 9, "e2e_p50": 11, "e2e_p99": 9}
NAME_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Cell:
    """One arrangement at one rate, over all rounds.

    Attributes:
        times: seconds, by the names in ``COLUMNS``; a figure without samples is missing.
        tokens_per_s: output tokens received per second, over the time in which requests arrived.
        reasons: why the figures are invalid; empty if they are valid.
    """

    times: dict[str, float]
    requests_per_s: float
    tokens_per_s: float
    count: int
    failed: int
    reasons: tuple[str, ...]


def pooled(reports: Sequence[dict[str, Any]]) -> Cell:
    """Pool the reports (``Report.to_dict``) of all rounds."""
    times: dict[str, float] = {}
    for name in ("ttft", "itl", "e2e"):
        samples = [value for report in reports for value in report["samples"][name]]
        values = np.concatenate([np.atleast_1d(value) for value in samples]) if samples else np.array([])
        if len(values):
            times |= {f"{name}_p50": float(np.quantile(values, 0.5)), f"{name}_p99": float(np.quantile(values, 0.99))}
    return Cell(
        times,
        float(np.mean([report["throughput"]["requests_per_s"] for report in reports])),
        float(np.mean([report["throughput"]["output_tokens_per_s"] for report in reports])),
        sum(report["num_measured"] for report in reports),
        sum(report["errors"]["count"] for report in reports),
        tuple(reason for report in reports for reason in report["reasons"]),
    )


def lines_of(found: dict[str, Any], arrangements: Sequence[str]) -> list[str]:
    """The lines of the table."""
    lines: list[str] = []
    for model in dict.fromkeys(run["point"]["model"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["point"]["model"] == model]
        lines += ["", _title(model, found["capacity"], arrangements), _heading()]
        for rate, share in dict.fromkeys((run["point"]["rate"], run["point"]["share"]) for run in runs):
            here = [run for run in runs if run["point"]["rate"] == rate]
            cells = {
                name: pooled([run["report"] for run in here if run["point"]["arrangement"] == name])
                for name in arrangements
                if any(run["point"]["arrangement"] == name for run in here)
            }
            shown = f"{rate:.3g} requests/s" + (f" ({share:.0%} of capacity)" if share else "")
            lines += ["", shown, *_rows(cells, has_reference=model != "small" and rate == REFERENCE_RATE)]
    return lines[1:]


def _title(model: str, capacity: dict[str, float], arrangements: Iterable[str]) -> str:
    if model != "small":
        return "Qwen3-0.6B's shape, 512 tokens in and 64 out (times in ms)"
    known = ", ".join(f"{ARRANGEMENTS[name]}: {capacity[name]:.3g}" for name in arrangements if name in capacity)
    return f"the small model, 512 tokens in and 64 out (times in ms); capacity in requests/s: {known}"


def _heading() -> str:
    cells = "".join(f"{title:>{WIDTHS[name]}}" for name, title in COLUMNS.items())
    return f"{'':{NAME_WIDTH}}{cells}{'requests/s':>12}{'tokens/s':>10}{'count':>7}{'failed':>8}"


def _rows(cells: dict[str, Cell], *, has_reference: bool) -> list[str]:
    lines, notes = [], []
    first = next(iter(cells.values()))
    for name, cell in cells.items():
        times = "".join(_time(cell.times.get(column), WIDTHS[column]) for column in COLUMNS)
        rest = f"{cell.requests_per_s:12.3g}{cell.tokens_per_s:10.1f}{cell.count:7}{cell.failed:8}"
        lines.append(f"{ARRANGEMENTS[name]:{NAME_WIDTH}}{times}{rest}")
        if cell is not first:
            lines.append(_ratios(first, cell))
        notes += [f"  {ARRANGEMENTS[name]}: invalid, {reason}" for reason in dict.fromkeys(cell.reasons)]
    if has_reference:
        times = "".join(_time(REFERENCE.get(column), WIDTHS[column]) for column in COLUMNS)
        lines += [f"{REFERENCE_NAME:{NAME_WIDTH}}{times}", FOOTNOTE]
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


# ---- the command ----------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", default=",".join(MODELS), metavar="NAME,...", help="of %(default)s")
    add("--arrangements", default=",".join(FLAGS), metavar="NAME,...", help="of %(default)s; ratios are to the first")
    add("--rates", default="0.25,0.5,0.75", metavar="RATE,...", help="requests/s for qwen3-0.6b (%(default)s)")
    add("--shares", default="0.3,0.6,0.85", metavar="SHARE,...", help="of capacity for small (%(default)s)")
    add("--rounds", type=int, default=1, help="repetitions, each with another seed (%(default)s)")
    add("--large-seconds", type=float, default=150.0, help="arrivals in a run of qwen3-0.6b (%(default)s)")
    add("--small-seconds", type=float, default=45.0, help="arrivals in a run of small (%(default)s)")
    add("--capacity-seconds", type=float, default=20.0, help="length of a run that measures the capacity (%(default)s)")
    add("--capacity", type=float, help="requests/s to take as the small model's capacity instead of measuring it")
    add("--cores", type=int, default=2, help="physical cores for the service and the client together (%(default)s)")
    add("--seed", type=int, default=0)
    add("--runs", metavar="FILE", help="write each run to FILE when it is over, and skip the runs already in FILE")


def checked(given: argparse.Namespace) -> Options:
    """Raises ConfigError for options that cannot be measured."""
    for flag, names, known in (
        ("--models", given.models, MODELS), ("--arrangements", given.arrangements, tuple(FLAGS))
    ):  # fmt: skip
        if unknown := [name for name in names.split(",") if name not in known]:
            raise ConfigError(f"{flag}: {unknown[0]!r} is none of {', '.join(known)}")
    try:
        rates, shares = _numbers(given.rates), _numbers(given.shares)
    except ValueError:
        raise ConfigError("--rates and --shares are numbers separated by commas") from None
    return Options(
        models=tuple(given.models.split(",")),
        arrangements=tuple(given.arrangements.split(",")),
        rates=rates,
        shares=shares,
        rounds=given.rounds,
        large_s=given.large_seconds,
        small_s=given.small_seconds,
        capacity_s=given.capacity_seconds,
        capacity=given.capacity,
        cores=given.cores,
        seed=given.seed,
    )


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def earlier_runs(path: str | None) -> Found:
    """The content of a ``--runs`` file, or empty content if there is no file.

    Raises:
        BatonError: another program wrote the file.
    """
    if path and Path(path).exists():
        found: Found = json.loads(Path(path).read_text())
        if found.get("schema") != SCHEMA or found.get("bench") != "disagg":
            raise BatonError(f"--runs {path} was not written by this benchmark")
        return found
    machine = {"machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": SCHEMA, "bench": "disagg", "began_at": began, "machine": machine, "capacity": {}, "runs": []}


def keep_to(num_cores: int) -> None:
    """Pin this process and its children to that many physical cores."""
    cores = usable_cores()
    if len(cores) < num_cores:
        say(f"bench disagg: --cores {num_cores}, but only {len(cores)} can be used here")
    os.sched_setaffinity(0, {cpu for core in cores[:num_cores] for cpu in core})


def run(given: argparse.Namespace) -> dict[str, float]:
    options = checked(given)
    keep_to(options.cores)
    say(f"bench disagg: about {minutes(options):.0f} minutes")
    found = Bench(options, given.runs, earlier_runs(given.runs)).run()
    print("\n".join(lines_of(found, options.arrangements)))
    figures: dict[str, float] = {f"capacity, {name}, requests/s": rate for name, rate in found["capacity"].items()}
    for run in found["runs"]:
        point, report = run["point"], run["report"]
        name = f"{point['model']}, {point['arrangement']}, {point['rate']:.3g}/s"
        cell = pooled([report])
        figures |= {f"{name}, {figure} ms": 1e3 * cell.times.get(figure, 0.0) for figure in ("ttft_p50", "e2e_p50")}
        figures[f"{name}, tokens/s"] = cell.tokens_per_s
    return figures
