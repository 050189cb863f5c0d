"""What separate prefill and decode nodes do for latency: the same cores and Poisson load, arranged in several ways.

Every arrangement is a fresh ``serve`` on the same cores, and gets the very same requests at the same instants (one
seed): prompts of 512 random token ids, nothing shared, 64 tokens out. They take turns at every rate, in the opposite
order at every other, so that neither a slow hour of the machine nor its end falls on one of them alone. The load-test
harness (``scripts/load_tester``) is the only client. Rates are absolute for the shape of Qwen3-0.6B; for the small
model they
are shares of its capacity: what the weaker of the first two arrangements completes with 32 requests always under way.

Latency counts from the intended instant. Ratios are to the first arrangement, 1 prefill + 1 decode: above 1 it is the
better one. With all its defaults this takes about an hour; ``--quick`` takes three minutes. Every run is bounded by its
seconds of arrivals and two minutes more, after which requests still under way are given up and count as failed.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.config.shared import SMALL_MODEL
from common.errors import BatonError
from scripts.benchmarks.cpu_contention import Neighbours
from scripts.benchmarks.disagg_table import ARRANGEMENTS, lines_of
from scripts.benchmarks.service_fixture import served
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.files import Report, write_json
from scripts.load_tester.run import run_load
from scripts.models.random_model import random_model
from scripts.serving.cpu_affinity import usable_cores

SCHEMA = 1
NUM_INPUT, NUM_OUTPUT = 512, 64
CAPACITY_CONCURRENCY = 32
POOL_TOKENS = 32_768  # of every node, so that no arrangement is short of pages
MAX_OTHERS = 0.15  # cores that others may use before figures are not to be trusted
START_S = 15.0  # what a start and the last answers take, for the estimate alone
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
    """What to measure. ``rates`` are requests per second, ``shares`` parts of the capacity; times are in seconds."""

    models: tuple[str, ...]
    arrangements: tuple[str, ...]
    rates: tuple[float, ...]
    shares: tuple[float, ...]
    rounds: int
    large_s: float
    small_s: float
    capacity_s: float
    cores: int
    seed: int

    def length_s(self, model: str) -> float:
        return self.small_s if model == "small" else self.large_s


@dataclass(frozen=True, slots=True)
class Point:
    """One run to make: everything that its outcome depends on. ``share`` is 0 where the rate is absolute."""

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
    """Makes the runs that are still missing, and keeps them in a file as they come."""

    def __init__(self, options: Options, path: str | None, found: Found) -> None:
        self._options = options
        self._path = path
        self._found = found

    def run(self) -> Found:
        """Make all of it; returns what belongs to it, earlier runs that were gone on with included."""
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
        """Requests per second that the first two arrangements complete; all are measured, if that has not been done."""
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
            say(f"    not to be trusted: {reason}")
        content = {name: value for name, value in report.to_dict().items() if name != "config"}
        self._found["runs"].append({"point": asdict(point), "report": content})
        self._save()

    def _load(self, place: str, arrangement: str, length_s: float, warmup_s: float, seed: int, **when: Any) -> Report:
        flags = [*FLAGS[arrangement], f"--model={place}", f"--max-total-tokens={POOL_TOKENS}"]
        with served(flags) as url:
            config = LoadtestConfig(
                url=url,
                duration=f"{length_s:g}",
                warmup=f"{warmup_s:g}",
                timeout="120",  # bounds the end of a run at a rate that is too much
                input_len=str(NUM_INPUT),
                output_len=str(NUM_OUTPUT),
                return_token_ids=True,
                scrape="none",
                live=False,
                seed=seed,
                **when,
            )
            neighbours = Neighbours(os.sched_getaffinity(0))
            report = run_load(config)
            others = neighbours.cores()
        if others > MAX_OTHERS:
            report.reasons.append(f"other processes kept {others:.1f} of our cores busy")
        if "the run was stopped before its end" in report.reasons:
            raise KeyboardInterrupt  # the harness has taken the signal
        return report

    def _save(self) -> None:
        if self._path:
            write_json(self._found, self._path + ".new")
            os.replace(self._path + ".new", self._path)


def points(options: Options, model: str, capacity: float) -> Iterator[Point]:
    """Every run for one model, in the order in which they are made."""
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
    """About how long all of it takes."""
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


# ---- the command ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> tuple[Options, argparse.Namespace]:
    """Options, and beside them ``json`` and ``resume``."""
    parser = argparse.ArgumentParser(
        prog="bench disagg", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--quick", action="store_true", help="the small model alone, two arrangements, 10 s for each run")
    add("--models", default=",".join(MODELS), metavar="NAME,...", help="of %(default)s")
    add("--arrangements", default=",".join(FLAGS), metavar="NAME,...", help="of %(default)s; the first is compared")
    add("--rates", default="0.25,0.5,0.75", metavar="RATE,...", help="requests/s for qwen3-0.6b (%(default)s)")
    add("--shares", default="0.3,0.6,0.85", metavar="SHARE,...", help="of capacity for small (%(default)s)")
    add("--rounds", type=int, default=1, help="times that everything is measured, each with another seed (%(default)s)")
    add("--large-seconds", type=float, default=150.0, help="of arrivals in a run of qwen3-0.6b (%(default)s)")
    add("--small-seconds", type=float, default=45.0, help="of arrivals in a run of small (%(default)s)")
    add("--capacity-seconds", type=float, default=20.0, help="of a run that finds the capacity (%(default)s)")
    add("--cores", type=int, default=2, help="physical cores that everything shares, client included (%(default)s)")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="write every run there, as soon as it is over")
    add("--resume", action="store_true", help="do not repeat the runs that are in the --json FILE")
    given = parser.parse_args(argv)
    if given.resume and not given.json:
        parser.error("--resume goes on with the runs in a file: add --json FILE")
    if given.quick:
        given.models, given.small_seconds, given.capacity_seconds = "small", 10.0, 6.0
        given.arrangements = "split,colocated" if given.arrangements == ",".join(FLAGS) else given.arrangements
    for flag, names, known in (
        ("--models", given.models, MODELS), ("--arrangements", given.arrangements, tuple(FLAGS))
    ):  # fmt: skip
        if unknown := [name for name in names.split(",") if name not in known]:
            parser.error(f"{flag}: {unknown[0]!r} is none of {', '.join(known)}")
    try:
        rates, shares = _numbers(given.rates), _numbers(given.shares)
    except ValueError:
        parser.error("--rates and --shares are numbers with commas between")
    options = Options(
        models=tuple(given.models.split(",")),
        arrangements=tuple(given.arrangements.split(",")),
        rates=rates,
        shares=shares,
        rounds=given.rounds,
        large_s=given.large_seconds,
        small_s=given.small_seconds,
        capacity_s=given.capacity_seconds,
        cores=given.cores,
        seed=given.seed,
    )
    return options, given


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def started(path: str | None, *, is_resumed: bool) -> Found:
    """What a file holds that is to be gone on with, or an empty start.

    Raises:
        BatonError: the file holds something else.
    """
    if is_resumed and path and Path(path).exists():
        found: Found = json.loads(Path(path).read_text())
        if found.get("schema") != SCHEMA or found.get("bench") != "disagg":
            raise BatonError(f"--json {path} holds no runs of this benchmark")
        return found
    machine = {"machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": SCHEMA, "bench": "disagg", "began_at": began, "machine": machine, "capacity": {}, "runs": []}


def keep_to(num_cores: int) -> None:
    """This process and all that it starts stay on so many physical cores."""
    cores = usable_cores()
    if len(cores) < num_cores:
        say(f"bench disagg: --cores {num_cores}, but this machine has {len(cores)} for us")
    os.sched_setaffinity(0, {cpu for core in cores[:num_cores] for cpu in core})


def main(argv: Sequence[str] | None = None) -> int:
    options, given = parse(argv)
    keep_to(options.cores)
    say(f"bench disagg: about {minutes(options):.0f} minutes")
    try:
        found = started(given.json, is_resumed=given.resume)
        found = Bench(options, given.json, found).run()
    except BatonError as error:
        say(f"bench disagg: {error}")
        return 1
    except KeyboardInterrupt:
        say("bench disagg: stopped" + ("; --resume goes on from here" if given.json else ""))
        return 130
    print("\n".join(lines_of(found, options.arrangements)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
