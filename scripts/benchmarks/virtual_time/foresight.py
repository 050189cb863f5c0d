"""Schedulers in virtual time: first tokens beside one giant prompt, and every policy on a day that changes.

The *curve* is the time to first token of short prompts while one prompt of 8,000, 64,000 or 512,000 tokens is computed
on the same prefill node, with the rule that begun prompts come first (--long-prompt-share 1, which is also what SGLang
documents for its chunked request) and with shares.

The *day* has four parts of equal length: chats; agents that share long prefixes, and strangers; more work than the node
can do, with deadlines; long documents among short questions. A request is *good* if its first token comes within the
objective of its kind and it ends before its deadline.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.config.cli import parse
from common.config.scheduling import POLICIES
from scripts.load_tester.workload.plan import Plan
from scripts.load_tester.workload.planned_request import GROUP, UNIQUE, PlannedRequest, Segment, segment_key
from scripts.load_tester.workload.session_sampling import Session
from scripts.simulator.client import Outcome
from scripts.simulator.config import SimulateConfig
from scripts.simulator.simulation import Simulation

SHORTEST = ("--seeds=1", "--part=4")
GIANTS = (8_000, 64_000, 512_000)
#: Chunk of a step; with the simulator's costs a step of it takes 107 ms.
CHUNK, SHORT_TOKENS, SHORT_RATE = 2_048, 100, 50.0
RULES = {"begun first": "--long-prompt-share=1", "shares": "--long-prompt-share=0.5"}
CURVE = (
    f"--chunked-prefill-size={CHUNK} --context-length=600000 --max-total-tokens=1000000 --max-queued-requests=100000"
)
DAY = "--chunked-prefill-size=2048 --max-total-tokens=120000"


def simulated(words: Sequence[str], requests: list[PlannedRequest]) -> list[Outcome]:
    """Run the requests through one prefill and one decode node."""
    config = parse(SimulateConfig, [*words, f"--num-requests={len(requests)}"], command="simulate")
    sessions: list[Session] = [[request] for request in requests]
    simulation = Simulation(config, Plan(sessions, len(sessions), True, requests[-1].at, [], {}))
    simulation.run()
    return simulation.client.outcomes


# ---- the curve ------------------------------------------------------------------------------------------------------


def beside_giant(giant: int, rule: str, num_seeds: int) -> tuple[float, float, float]:
    """Medians and 99th percentiles of the short prompts' first tokens, and the mean of the giant's; in seconds."""
    alone_s = giant / CHUNK * (0.005 + CHUNK * 50e-6)
    waits: list[float] = []
    own: list[float] = []
    for seed in range(num_seeds):
        random = np.random.default_rng(seed)
        instants = 1.0 + np.cumsum(random.exponential(1 / SHORT_RATE, int(alone_s * SHORT_RATE) + 10))
        requests = [PlannedRequest(0, 1.0, ((segment_key(UNIQUE, 0), giant),), 1)]
        for index, at in enumerate(instants.tolist(), 1):
            requests.append(PlannedRequest(index, at, ((segment_key(UNIQUE, index), SHORT_TOKENS),), 1))
        outcomes = simulated([*CURVE.split(), rule, f"--seed={seed}"], requests)
        own += [outcome.ttft_s for outcome in outcomes if outcome.planned.index == 0]
        waits += [each.ttft_s for each in outcomes if each.planned.index and each.due_at < 1.0 + alone_s]
    return float(np.percentile(waits, 50)), float(np.percentile(waits, 99)), float(np.mean(own))


def print_curve(num_seeds: int, giants: Sequence[int]) -> dict[str, float]:
    figures: dict[str, float] = {}
    print(f"{'short prompts beside':22}{'rule':14}{'TTFT p50':>10}{'p99':>10}{'giant':>10}")
    for giant in giants:
        for name, flag in RULES.items():
            p50, p99, own = beside_giant(giant, flag, num_seeds)
            figures[f"{name} {giant} p99"] = p99
            print(f"{f'{giant:,} tokens':22}{name:14}{p50:>9.3f}s{p99:>9.3f}s{own:>9.2f}s", flush=True)
    return figures


# ---- the day --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the day: requests a second, and how one is drawn."""

    rate: float
    lengths: tuple[float, float]  # median and spread of the prompt
    num_output: int
    objective_s: float
    deadline_s: tuple[float, ...] = (60.0,)
    num_groups: int = 0  # prefixes of 3,000 tokens that nine of ten requests share
    share_long: float = 0.0  # of prompts twenty times as long


DAY_PARTS = (
    Part(rate=12, lengths=(600, 0.8), num_output=30, objective_s=0.5),
    Part(rate=16, lengths=(500, 0.5), num_output=20, objective_s=1.0, num_groups=12),
    Part(rate=24, lengths=(800, 0.5), num_output=10, objective_s=4.0, deadline_s=(1.0, 2.0, 4.0, 8.0)),
    Part(rate=11, lengths=(400, 0.6), num_output=20, objective_s=0.5, share_long=0.06),
)


def day(seed: int, part_s: float) -> Iterator[tuple[PlannedRequest, Part]]:
    random = np.random.default_rng(seed)
    index = 0
    for number, part in enumerate(DAY_PARTS):
        at = number * part_s
        while (at := at + random.exponential(1 / part.rate)) < (number + 1) * part_s:
            length = int(random.lognormal(np.log(part.lengths[0]), part.lengths[1])) + 1
            length *= 20 if random.random() < part.share_long else 1
            segments: tuple[Segment, ...] = ((segment_key(UNIQUE, index), min(length, 16_000)),)
            if part.num_groups and random.random() < 0.9:
                group = int(random.integers(part.num_groups))
                segments = ((segment_key(GROUP, group), 3_000), *segments)
            deadline_ms = float(random.choice(part.deadline_s)) * 1e3
            yield PlannedRequest(index, at, segments, part.num_output, deadline_ms=deadline_ms), part
            index += 1


def good_share(policy: str, num_seeds: int, part_s: float) -> tuple[float, list[float]]:
    """The share of good requests, over the whole day and in each part."""
    good: dict[Part, list[bool]] = {part: [] for part in DAY_PARTS}
    for seed in range(num_seeds):
        requests = list(day(seed, part_s))
        parts = {request.index: part for request, part in requests}
        words = [*DAY.split(), f"--schedule-policy={policy}", f"--seed={seed}"]
        for outcome in simulated(words, [request for request, _ in requests]):
            part = parts[outcome.planned.index]
            good[part].append(outcome.is_ok and outcome.ttft_s <= part.objective_s)
    everything = [each for found in good.values() for each in found]
    return float(np.mean(everything)), [float(np.mean(found)) for found in good.values()]


def print_day(num_seeds: int, part_s: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    print(f"\n{'good requests':16}{'day':>8}{'chats':>9}{'agents':>9}{'overload':>9}{'documents':>10}")
    for policy in POLICIES:
        share, parts = good_share(policy, num_seeds, part_s)
        figures[f"{policy} good"] = share
        cells = "".join(f"{part:>{width}.1%}" for part, width in zip(parts, (9, 9, 9, 10), strict=True))
        print(f"{policy:16}{share:>8.1%}{cells}", flush=True)
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=2, help="runs of each experiment (%(default)s)")
    parser.add_argument("--part", type=float, default=20.0, help="seconds of each part of the day (%(default)s)")
    parser.add_argument("--only", choices=("curve", "day"), help="one of the experiments")


def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    giants = GIANTS[: 1 if options.part < 10 else None]
    if options.only != "day":
        figures |= print_curve(options.seeds, giants)
    if options.only != "curve":
        figures |= print_day(options.seeds, options.part)
    return figures
