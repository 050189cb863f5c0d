"""Speed of the simulator: row-steps (one decode row in one step) per minute.

Each load runs --rounds times, and the best round counts, because other processes only make a round slower. Processor
time stands beside wall time for the same reason. Steps that are alike are taken together; beside that stands one round
in which steps are taken one at a time, with the same results.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.config.cli import parse
from common.errors import BatonError
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.simulation import Simulation, rare_collections

MARK = 10e6
SHORTEST = ("--rounds=1", "--scale=0.02")
#: Number of requests and options of each load.
LOADS = {
    "256 rows, 64 tokens in, 1,000 out": (512, "--concurrency=256 --input-len=64 --output-len=1000 --prefill=2"),
    "256 rows, 300 tokens in, 300 out": (
        1024,
        "--concurrency=256 --input-len=300 --output-len=uniform:100:500 --prefill=2",
    ),
    "100 prefill and 100 decode nodes, 500 in, 200 out": (
        2000,
        "--rate=200 --input-len=500 --output-len=200 --prefill=100 --decode=100",
    ),
    "4 prefill and 6 decode nodes, 500 in, 350 out": (
        1500,
        "--rate=4 --input-len=lognormal:500:1 --output-len=lognormal:250:0.8:max=2000 --prefill=4 --decode=6",
    ),
    "the same nodes, 13,000 in, 350 out (Mooncake's means)": (
        1500,
        "--rate=3.4 --input-len=lognormal:7500:1:max=120000 --output-len=lognormal:250:0.8:max=2000 --prefill=4"
        " --decode=6",
    ),
}
#: Runs only with --only-large, once.
LARGE = {
    "500 prefill and 500 decode nodes, 500 in, 200 out": (
        100_000,
        "--rate=1000 --input-len=500 --output-len=200 --prefill=500 --decode=500",
    )
}
#: Entries of a report that depend on the machine.
TIMES = ("wall_s", "row_steps_per_minute")


@dataclass(frozen=True, slots=True)
class BestRound:
    """The fastest of several rounds.

    Attributes:
        results: the report of the simulation without its times.
    """

    name: str
    row_steps: int
    wall_s: float
    cpu_s: float
    results: dict[str, Any]

    @property
    def per_minute(self) -> float:
        return self.row_steps / self.wall_s * 60


def measure(name: str, words: Sequence[str], num_rounds: int, *, is_stepwise: bool = False) -> BestRound:
    """Run one load ``num_rounds`` times; return the best round."""
    found = []
    for _ in range(num_rounds):
        config = parse(SimulateConfig, words, command="simulate")
        simulation = Simulation(config, make_plan(config), is_stepwise=is_stepwise)
        with rare_collections():
            began_s = time.process_time()
            result = simulation.run()
            cpu_s = time.process_time() - began_s
        results = {key: value for key, value in result.items() if key not in TIMES}
        found.append(BestRound(name, result["row_steps"], result["wall_s"], cpu_s, results))
    return min(found, key=lambda figure: figure.wall_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load; the best counts (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each load's requests to run (%(default)s)")
    parser.add_argument("--only-large", action="store_true", help="only 1,000 nodes and 100,000 requests, some minutes")


def run(options: argparse.Namespace) -> dict[str, float]:
    print(f"{'':56}{'row-steps':>10}{'wall':>8}{'CPU':>8}  million a minute; step by step, CPU")
    figures: dict[str, float] = {}
    loads = LARGE if options.only_large else LOADS
    for name, (num_requests, words) in loads.items():
        given = [*words.split(), f"--num-requests={max(1, round(num_requests * options.scale))}"]
        row = measure(name, given, 1 if name in LARGE else options.rounds)
        line = f"{name:56}{row.row_steps:>10,}{row.wall_s:>7.1f}s{row.cpu_s:>7.1f}s  {row.per_minute / 1e6:.1f}"
        figures[f"{name}, row-steps per minute"] = row.per_minute
        if name not in LARGE:
            stepwise = measure(name, given, 1, is_stepwise=True)
            if stepwise.results != row.results:
                raise BatonError(f"steps taken together and step by step give different results: {name}")
            figures[f"{name}, times as fast as step by step"] = stepwise.cpu_s / row.cpu_s
            line += f"; {stepwise.cpu_s:.1f}s, {stepwise.cpu_s / row.cpu_s:.1f} times as long"
        print(line, flush=True)
    if not options.only_large:
        print(f"Mark: {MARK / 1e6:.0f} million a minute, for the first.")
    return figures
