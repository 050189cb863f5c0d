"""Where prompts are computed, in virtual time: by cost (--local-prefill auto), against fixed choices.

The fixed choices are prefill nodes alone (--local-prefill never), and decode nodes for prompts of which they lack fewer
than 64, 512 or 2,048 tokens. All see the same requests. Without a trace they arrive at random, with prompts and outputs
of many lengths; --trace replays a Mooncake or Azure trace at the given mean rates.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.config.cli import parse
from scripts.load_tester.workload.plan import Plan, make_plan
from scripts.load_tester.workload.planned_request import UNIQUE, PlannedRequest, segment_key
from scripts.simulator.config import SimulateConfig
from scripts.simulator.simulation import Simulation

SHORTEST = ("--num-requests=30", "--rates=6", "--nodes=1+1")
AUTO = "--local-prefill=auto"
RULES: dict[str, tuple[str, ...]] = {
    "never": (),
    "under 64": (AUTO, "--local-prefill-threshold=64"),
    "under 512": (AUTO, "--local-prefill-threshold=512"),
    "under 2,048": (AUTO, "--local-prefill-threshold=2048"),
    "by cost": (AUTO,),
}
BY_COST = "by cost"
COMMON = "--chunked-prefill-size=2048 --max-total-tokens=400000 --max-input-len=32000 --max-queued-requests=100000"
#: Median and spread of prompts and outputs without a trace.
PROMPT, OUTPUT = (1_000, 1.1), (40, 1.0)


def random_plan(num_requests: int, rate: float) -> Plan:
    """Requests that arrive at random, most of them short."""
    random = np.random.default_rng(0)
    instants = np.cumsum(random.exponential(1 / rate, num_requests)).tolist()
    prompts = random.lognormal(np.log(PROMPT[0]), PROMPT[1], num_requests).astype(int).clip(1, 32_000).tolist()
    outputs = random.lognormal(np.log(OUTPUT[0]), OUTPUT[1], num_requests).astype(int).clip(1, 1_000).tolist()
    requests = [
        PlannedRequest(index, at, ((segment_key(UNIQUE, index), num_prompt),), num_output)
        for index, (at, num_prompt, num_output) in enumerate(zip(instants, prompts, outputs, strict=True))
    ]
    return Plan([[request] for request in requests], num_requests, True, instants[-1], [], {})


def measure(words: Sequence[str], plan: Plan | None) -> tuple[float, float, float, float]:
    """Mean and 99th percentile of the first token, mean time per output token, and mean of whole requests, in seconds.

    Args:
        plan: None for that of the trace.
    """
    config = parse(SimulateConfig, words, command="simulate")
    simulation = Simulation(config, plan or make_plan(config))
    simulation.run()
    ended = [outcome for outcome in simulation.client.outcomes if outcome.is_ok and outcome.stamps_s]
    first = [outcome.stamps_s[0] - outcome.due_at for outcome in ended]
    gaps = [
        (outcome.stamps_s[-1] - outcome.stamps_s[0]) / (outcome.num_output - 1)
        for outcome in ended
        if outcome.num_output > 1
    ]
    whole = [outcome.ended_at - outcome.due_at for outcome in ended]
    return float(np.mean(first)), float(np.percentile(first, 99)), float(np.mean(gaps)), float(np.mean(whole))


def compare(name: str, words: Sequence[str], plan: Plan | None) -> dict[str, float]:
    """Prints one load under every rule; returns the means of whole requests."""
    means: dict[str, float] = {}
    for rule, flags in RULES.items():
        first, last, gap, whole = measure([*words, *flags], plan)
        means[rule] = whole
        print(f"{name:24}{rule:14}{first:>10.3f}s{last:>9.2f}s{gap * 1e3:>10.1f}ms{whole:>10.3f}s", flush=True)
    best = min((rule for rule in means if rule != BY_COST), key=lambda rule: means[rule])
    print(f"{'':24}by cost takes {means[BY_COST] / means[best]:.2f} times what the best fixed choice ({best}) takes")
    return {f"{name} {rule}": mean for rule, mean in means.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="replay this trace")
    parser.add_argument("--rates", default="6,12,24", help="mean requests a second, with commas (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=400, help="of each run (%(default)s)")
    parser.add_argument("--nodes", default="2+2", help="prefill and decode nodes (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    num_prefill, num_decode = options.nodes.split("+")
    words = [f"--prefill={num_prefill}", f"--decode={num_decode}", f"--num-requests={options.num_requests}"]
    print(f"{'load':24}{'local prefill':14}{'TTFT mean':>11}{'p99':>10}{'TPOT mean':>12}{'request':>11}")
    for trace in options.trace or [""]:
        for rate in options.rates.split(","):
            if trace:
                replayed = [*words, *COMMON.split(), f"--trace={trace}", f"--rate={rate}"]
                figures |= compare(f"{Path(trace).stem[:16]} {rate}/s", replayed, None)
            else:
                drawn = [*words, *[word for word in COMMON.split() if "input-len" not in word]]
                figures |= compare(f"random {rate}/s", drawn, random_plan(options.num_requests, float(rate)))
    return figures
