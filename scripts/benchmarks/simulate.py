"""How fast the simulator is: row-steps (one decode row in one step) a minute, with checks off.

Wall-clock time, and processor time beside it, which tells on a busy machine. Each load is run --rounds times; the best
round counts, since others can only be slower by what else the machine does.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.config.cli import parse
from scripts.load_tester.workload.workload import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.main import Simulation

MARK = 10e6
LOADS = {
    "256 rows, 64 tokens in, 1,000 out": (
        *("--concurrency=256", "--num-requests=512", "--input-len=64", "--output-len=1000"),
        "--prefill=2",
    ),
    "256 rows, 300 tokens in, 300 out": (
        *("--concurrency=256", "--num-requests=1024", "--input-len=300", "--output-len=uniform:100:500"),
        "--prefill=2",
    ),
    "100 prefill and 100 decode nodes, 500 in, 200 out": (
        *("--rate=200", "--num-requests=2000", "--input-len=500", "--output-len=200"),
        *("--prefill=100", "--decode=100"),
    ),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One load; seconds of its best round."""

    name: str
    row_steps: int
    wall_s: float
    cpu_s: float

    @property
    def per_minute(self) -> float:
        return self.row_steps / self.wall_s * 60


def measure(name: str, words: Sequence[str], num_rounds: int) -> Figure:
    """Run one load a few times."""
    found = []
    for _ in range(num_rounds):
        config = parse(SimulateConfig, words, command="simulate")
        simulation = Simulation(config, make_plan(config))
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 1_000)
        cpu_s = time.process_time()
        result = simulation.run()
        found.append(Figure(name, result["row_steps"], result["wall_s"], time.process_time() - cpu_s))
        gc.unfreeze()
    return min(found, key=lambda figure: figure.wall_s)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench simulate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load; the best counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    print(f"{'':52}{'row-steps':>10}{'wall':>8}{'CPU':>8}  million a minute")
    figures = []
    for name, words in LOADS.items():
        figures.append(row := measure(name, words, options.rounds))
        print(
            f"{name:52}{row.row_steps:>10,}{row.wall_s:>7.1f}s{row.cpu_s:>7.1f}s  {row.per_minute / 1e6:.1f}",
            flush=True,
        )
    print(f"Mark: {MARK / 1e6:.0f} million a minute, for the first.")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
