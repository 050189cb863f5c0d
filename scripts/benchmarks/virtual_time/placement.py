"""Where prompts are computed and which nodes compute them, in virtual time: by cost, against fixed choices.

The first table compares places: by cost (--local-prefill auto), prefill nodes alone (--local-prefill never), and decode
nodes for prompts of which they lack fewer than 64, 512 or 2,048 tokens. The second compares pairs of nodes, with
prefill nodes alone: by cost, in turn, by least load, by the longest cached prefix, and by least load with affinity,
which also counts the tokens of this prompt that a node lacks. All see the same requests. Without a trace they
arrive at random, with prompts and outputs of many lengths; --trace replays a Mooncake or Azure trace at the given mean
rates, or at shares of the capacity (--loads): the requests that the service answers in a second with 128 in flight.
--windows takes several stretches of the load, so that noise can be told from a difference.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config.cli import parse
from gateway.workers.routing.router import Router
from scripts.benchmarks.harness.options import comma_separated, num_nodes
from scripts.benchmarks.virtual_time.fixed_pairing import (
    ByCost,
    InTurn,
    LeastLoad,
    LeastLoadWithAffinity,
    LongestPrefix,
    PairedConfig,
)
from scripts.load_tester.workload.plan import Plan, make_plan
from scripts.load_tester.workload.planned_request import UNIQUE, PlannedRequest, segment_key
from scripts.load_tester.workload.traces import read_trace
from scripts.simulator.simulation import Simulation

SHORTEST = ("--num-requests=30", "--loads=0.6")


class Rule(NamedTuple):
    """A choice under comparison: options of the gateway, and its router."""

    flags: tuple[str, ...] = ()
    router: type[Router] = Router


AUTO = "--local-prefill=auto"
BY_COST = "by cost"
TABLES: dict[str, dict[str, Rule]] = {
    "places": {
        "never": Rule(),
        "under 64": Rule((AUTO, "--local-prefill-threshold=64")),
        "under 512": Rule((AUTO, "--local-prefill-threshold=512")),
        "under 2,048": Rule((AUTO, "--local-prefill-threshold=2048")),
        BY_COST: Rule((AUTO,)),
    },
    "pairs": {
        "in turn": Rule(router=InTurn),
        "least load": Rule(router=LeastLoad),
        "longest prefix": Rule(router=LongestPrefix),
        "with affinity": Rule(router=LeastLoadWithAffinity),
        BY_COST: Rule(router=ByCost),
    },
}
COMMON = "--chunked-prefill-size=2048 --max-total-tokens=400000 --max-queued-requests=100000"
LONGEST_PROMPT = 32_000
#: Requests in flight while the capacity is measured.
CAPACITY_CONCURRENCY = 128
#: Median and spread of prompts and outputs without a trace.
PROMPT, OUTPUT = (1_000, 1.1), (40, 1.0)


class Load(NamedTuple):
    """One stretch of a load.

    Attributes:
        words: options of ``simulate``.
        plan: its requests; None for those of the trace.
    """

    words: tuple[str, ...]
    plan: Plan | None


def random_plan(num_requests: int, rate: float, seed: int) -> Plan:
    """Requests that arrive at random, most of them short."""
    random = np.random.default_rng(seed)
    instants = np.cumsum(random.exponential(1 / rate, num_requests)).tolist()
    prompts = random.lognormal(np.log(PROMPT[0]), PROMPT[1], num_requests).astype(int).clip(1, LONGEST_PROMPT).tolist()
    outputs = random.lognormal(np.log(OUTPUT[0]), OUTPUT[1], num_requests).astype(int).clip(1, 1_000).tolist()
    requests = [
        PlannedRequest(index, at, ((segment_key(UNIQUE, index), num_prompt),), num_output)
        for index, (at, num_prompt, num_output) in enumerate(zip(instants, prompts, outputs, strict=True))
    ]
    return Plan([[request] for request in requests], num_requests, True, instants[-1], [], {})


def loads_of(trace: str, rate: float, options: argparse.Namespace) -> list[Load]:
    """The stretches of a load at this rate, spread evenly over the trace."""
    num_prefill, num_decode = options.nodes
    words = (f"--prefill={num_prefill}", f"--decode={num_decode}", *COMMON.split())
    count, num_windows = options.num_requests, options.windows
    if not trace:
        return [Load(words, random_plan(count, rate, seed)) for seed in range(num_windows)]
    found = read_trace(trace)
    instants = [row.at or 0.0 for row in found.rows]
    words = (*words, f"--trace={trace}", f"--max-input-len={LONGEST_PROMPT}", f"--rate={rate!r}")
    if found.format == "Mooncake":  # whose clock ticks every three seconds
        words = (*words, "--trace-jitter")
    last = max(0, len(instants) - count - 1)
    firsts = [last * number // max(1, num_windows - 1) for number in range(num_windows)]
    spans = [(instants[first], instants[min(first + count, len(instants) - 1)]) for first in firsts]
    return [Load((*words, f"--trace-window={begin!r}:{max(end, begin + 1.0)!r}"), None) for begin, end in spans]


def capacity_of(trace: str, options: argparse.Namespace) -> float:
    """Requests per second that the service answers by cost with many in flight: the mean of all stretches."""
    found = []
    for words, plan in loads_of(trace, 1.0, options):
        closed = [word for word in words if not word.startswith("--rate=")]
        if plan is not None:
            plan = replace(plan, is_open=False, seconds=None)
        simulation = simulate([*closed, f"--concurrency={CAPACITY_CONCURRENCY}"], plan, TABLES["pairs"][BY_COST])
        found.append(len(simulation.client.outcomes) / max(one.ended_at for one in simulation.client.outcomes))
    return float(np.mean(found))


def simulate(words: Sequence[str], plan: Plan | None, rule: Rule) -> Simulation:
    config = replace(parse(PairedConfig, [*words, *rule.flags], command="simulate"), router=rule.router)
    simulation = Simulation(config, plan or make_plan(config))
    simulation.run()
    return simulation


class Figures(NamedTuple):
    """Mean and 99th percentile of the first token, mean time per output token, and mean of whole requests, in
    seconds."""

    first_s: float
    first_p99_s: float
    gap_s: float
    whole_s: float


def measure(load: Load, rule: Rule) -> Figures:
    simulation = simulate(load.words, load.plan, rule)
    ended = [outcome for outcome in simulation.client.outcomes if outcome.is_ok and outcome.stamps_s]
    first = [outcome.ttft_s for outcome in ended]
    gaps = [
        (outcome.stamps_s[-1] - outcome.stamps_s[0]) / (outcome.num_output - 1)
        for outcome in ended
        if outcome.num_output > 1
    ]
    whole = [outcome.ended_at - outcome.due_at for outcome in ended]
    return Figures(float(np.mean(first)), float(np.percentile(first, 99)), float(np.mean(gaps)), float(np.mean(whole)))


def compare(name: str, rules: Mapping[str, Rule], loads: Sequence[Load]) -> dict[str, float]:
    """Print one load under every rule; return the means of whole requests."""
    means: dict[str, list[float]] = {}
    for title, rule in rules.items():
        found = [measure(load, rule) for load in loads]
        first, last, gap, whole = (float(np.mean(values)) for values in zip(*found, strict=True))
        means[title] = [one.whole_s for one in found]
        print(f"{name:24}{title:16}{first:>10.3f}s{last:>9.2f}s{gap * 1e3:>10.1f}ms{whole:>10.3f}s", flush=True)
    best = min((title for title in rules if title != BY_COST), key=lambda title: sum(means[title]))
    ratios = [mine / other for mine, other in zip(means[BY_COST], means[best], strict=True)]
    mean = sum(means[BY_COST]) / sum(means[best])
    spread = f", {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    print(f"{'':24}by cost takes {mean:.2f} times what the best fixed choice ({best}) takes{spread}")
    return {f"{name} {title}": float(np.mean(values)) for title, values in means.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", action="append", default=[], metavar="FILE", help="replay this trace")
    add(
        "--rates",
        type=comma_separated(float),
        default="6,12,24",
        help="mean requests a second, with commas (%(default)s)",
    )
    add(
        "--loads",
        type=comma_separated(float),
        help="instead of --rates: shares of the capacity, such as 0.3,0.6,0.85,0.95",
    )
    add("--num-requests", type=int, default=400, help="of each run (%(default)s)")
    add("--windows", type=int, default=1, help="stretches of the load, whose mean counts (%(default)s)")
    add("--nodes", type=num_nodes, default="2+2", help="prefill and decode nodes (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for trace in options.trace or [""]:
        title = Path(trace).stem[:16] or "random"
        rates = {f"{title} {rate:g}/s": rate for rate in options.rates}
        if options.loads:
            capacity = capacity_of(trace, options)
            print(f"{title}: capacity {capacity:.3g} requests/s")
            rates = {f"{title} {share:.0%}": share * capacity for share in options.loads}
        for table in TABLES:
            print(f"{'load':24}{table:16}{'TTFT mean':>11}{'p99':>10}{'TPOT mean':>12}{'request':>11}")
            for name, rate in rates.items():
                found = compare(name, TABLES[table], loads_of(trace, rate, options))
                figures |= {f"{table}, {key}": value for key, value in found.items()}
    return figures
