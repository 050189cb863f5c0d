"""Speed of the simulator: row-steps (one decode row in one step) per minute.

Each load runs --rounds times, and the best round counts, because other processes only make a round slower. Processor
time stands beside wall time for the same reason.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.main import Simulation

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
}


@dataclass(frozen=True, slots=True)
class BestRound:
    name: str
    row_steps: int
    wall_s: float
    cpu_s: float

    @property
    def per_minute(self) -> float:
        return self.row_steps / self.wall_s * 60


def measure(name: str, words: Sequence[str], num_rounds: int) -> BestRound:
    """Run one load ``num_rounds`` times; returns the best round."""
    found = []
    for _ in range(num_rounds):
        config = parse(SimulateConfig, words, command="simulate")
        simulation = Simulation(config, make_plan(config))
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 1_000)
        cpu_s = time.process_time()
        result = simulation.run()
        found.append(BestRound(name, result["row_steps"], result["wall_s"], time.process_time() - cpu_s))
        gc.unfreeze()
    return min(found, key=lambda figure: figure.wall_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load; the best counts (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each load's requests to run (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    if options.rounds < 1:
        raise ConfigError("--rounds must be at least 1")
    print(f"{'':52}{'row-steps':>10}{'wall':>8}{'CPU':>8}  million a minute")
    figures = []
    for name, (num_requests, words) in LOADS.items():
        count = max(1, round(num_requests * options.scale))
        figures.append(row := measure(name, [*words.split(), f"--num-requests={count}"], options.rounds))
        print(
            f"{name:52}{row.row_steps:>10,}{row.wall_s:>7.1f}s{row.cpu_s:>7.1f}s  {row.per_minute / 1e6:.1f}",
            flush=True,
        )
    print(f"Mark: {MARK / 1e6:.0f} million a minute, for the first.")
    return {f"{row.name}, row-steps per minute": row.per_minute for row in figures}
