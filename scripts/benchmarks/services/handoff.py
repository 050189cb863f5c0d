"""What separate nodes cost a single request between its first and second token, by transport.

One prefill and one decode node, each with one compute thread on its own core, serve one request at a time, with a
prompt of random token ids and nothing cached. The first token comes from the prefill node and the second from the
decode node; the gap between them holds the handoff and one decode step, every later gap one decode step. So the cost of
a request is its first gap minus the median of its later gaps. It is shown as a share of *local TTFT*, the median time
to first token where one node with one thread prefills and decodes; the mark is 5 %. The arrangements take turns, in
alternating order. The load tester is the only client.

The decode node reports the stages ``transfer``, from the arrival of the handoff to the arrival of the last page, and
``join``, from then to the second token. The defaults take half an hour; ``--model small --dtype float32 --rounds 1
--lengths 512`` takes two minutes.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from common.config.shared import SMALL_MODEL
from common.errors import BatonError, ConfigError
from common.system.cpu_cores import usable_cores
from scripts.benchmarks.harness.cpu_contention import CpuContention
from scripts.benchmarks.harness.options import comma_separated
from scripts.benchmarks.harness.service_fixture import MAX_OTHERS, measured_load, running_service
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.config import LoadtestConfig
from scripts.models.random_model import random_model

SHORTEST = ("--model=small", "--dtype=float32", "--transports=shm", "--rounds=1", "--requests=2", "--lengths=256")
LOCAL = "local"
TRANSPORTS = ("shm", "tcp", "nixl", "gloo")
MODELS = ("qwen3-0.6b", "small")
POOL_TOKENS = 4_096
MARK = 0.05
MAX_ATTEMPTS = 10
NUM_WARMUP = 2  # requests of each length that are left out after a start

Options = argparse.Namespace  # the fields of `add_options`


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times in seconds; ``step_s`` is the median gap between tokens after the second."""

    arrangement: str
    num_input: int
    ttft_s: float
    first_gap_s: float
    step_s: float
    stages: dict[str, float]

    @property
    def cost_s(self) -> float:
        return self.first_gap_s - self.step_s


def measure(options: Options) -> tuple[list[Sample], list[str]]:
    """All samples, and the reasons why they are invalid."""
    model = SMALL_MODEL if options.model == "small" else str(random_model())
    samples: list[Sample] = []
    reasons: list[str] = []
    for number in range(options.rounds):
        arrangements = (LOCAL, *options.transports)
        for name in arrangements[::-1] if number % 2 else arrangements:
            say(f"round {number + 1} of {options.rounds}, {name} ...")
            contention = CpuContention(os.sched_getaffinity(0))
            with running_service(flags(name, model, options.dtype)) as url:
                for length in options.lengths:
                    found = samples_of(url, name, length, options, number)
                    samples += found
                    say(f"    {line_of(found)}")
            others = contention.cores()
            if others > MAX_OTHERS:
                reasons.append(f"round {number + 1}, {name}: other processes used {others:.1f} of these cores")
    return samples, reasons


def flags(arrangement: str, model: str, dtype: str) -> list[str]:
    """Options of ``serve``; every node has one thread in every arrangement."""
    shared = [f"--model={model}", f"--dtype={dtype}", "--threads=1", f"--max-total-tokens={POOL_TOKENS}"]
    if arrangement == LOCAL:
        return [*shared, "--prefill=0", "--decode=1", "--local-prefill=always"]
    return [*shared, "--prefill=1", "--decode=1", f"--transport={arrangement}"]


def samples_of(url: str, arrangement: str, length: int, options: Options, seed: int) -> list[Sample]:
    """One request after another, until enough of them had tokens that arrived one by one.

    Raises BatonError: a request failed, or too few of the requests can be used.
    """
    found: list[Sample] = []
    for attempt in range(MAX_ATTEMPTS):
        records = ask(url, arrangement, length, options, seed + attempt * options.rounds)
        found += [sample for sample in map(partial(sample_of, arrangement, length), records) if sample is not None]
        if len(found) >= options.requests:
            return found[: options.requests]
    raise BatonError(f"{arrangement}: tokens arrived together in all but {len(found)} requests")


def ask(url: str, arrangement: str, length: int, options: Options, seed: int) -> list[RequestRecord]:
    """One request after another; the first ones, which warm up, are left out. Raises BatonError: some failed."""
    report, _ = measured_load(
        LoadtestConfig(
            url=url,
            endpoint="generate",
            concurrency=1,
            num_requests=NUM_WARMUP + options.requests,
            input_len=str(length),
            output_len=str(options.new_tokens),
            scrape="none",
            live=False,
            seed=seed,
        ),
        salt=length,  # without it, prompts would begin like the shorter ones before, which the nodes have cached
    )
    failed = [record for record in report.records if not record.is_ok]
    if failed:
        raise BatonError(f"{arrangement}: a request failed: {failed[0].error} {failed[0].message}")
    return report.records[NUM_WARMUP:]


def sample_of(arrangement: str, length: int, record: RequestRecord) -> Sample | None:
    """None if the first tokens arrived together, or there are too few to tell a step."""
    if len(record.stamps_s) < 4 or any(count != 1 for count in record.counts[:2]):
        return None
    first_gap_s, step_s = record.gaps_s[0], statistics.median(record.gaps_s[1:])
    if not (first_gap_s and step_s):
        return None
    return Sample(arrangement, length, record.ttft_s, first_gap_s, step_s, dict(record.timings))


# ---- the table ------------------------------------------------------------------------------------------------------


def median_ms(values: Sequence[float]) -> float:
    return statistics.median(values) * 1e3 if values else float("nan")


def line_of(samples: Sequence[Sample]) -> str:
    """A line about the samples of one arrangement and length."""
    first = samples[0]
    return (
        f"{first.num_input} tokens: TTFT {median_ms([s.ttft_s for s in samples]):.1f} ms, first gap "
        f"{median_ms([s.first_gap_s for s in samples]):.1f} ms, step {median_ms([s.step_s for s in samples]):.1f} ms"
    )


def table(samples: Sequence[Sample], options: Options) -> list[str]:
    """The lines of the table; times are medians in ms."""
    columns = ("TTFT", "first gap", "step", "cost", "worst", "transfer", "join", "share")
    lines = [f"{'':24}" + "".join(f"{title:>11}" for title in columns)]
    for length in options.lengths:
        local = [s for s in samples if s.num_input == length and s.arrangement == LOCAL]
        local_ttft = median_ms([s.ttft_s for s in local])
        lines.append(f"{f'{length} tokens, local':24}" + "".join(_cells(local)[:4]))
        for name in options.transports:
            own = [s for s in samples if s.num_input == length and s.arrangement == name]
            share = median_ms([s.cost_s for s in own]) / local_ttft
            verdict = f"{share:>10.1%} " + ("" if share <= MARK else f" above the mark of {MARK:.0%}")
            lines.append(f"{f'{length} tokens, {name}':24}" + "".join(_cells(own)) + verdict)
    return lines


def _cells(samples: Sequence[Sample]) -> list[str]:
    costs = [s.cost_s for s in samples]
    stages = [median_ms([s.stages[n] for s in samples if n in s.stages]) for n in ("transfer_s", "join_s")]
    values = [median_ms([s.ttft_s for s in samples]), median_ms([s.first_gap_s for s in samples])]
    values += [median_ms([s.step_s for s in samples]), median_ms(costs), max(costs) * 1e3, *stages]
    return [f"{value:11.2f}" for value in values]


# ---- the command ----------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=MODELS[0], choices=MODELS, help="%(default)s has random weights")
    add(
        "--transports", type=comma_separated(str, among=TRANSPORTS), default=",".join(TRANSPORTS), help="of %(default)s"
    )
    add("--lengths", type=comma_separated(int), default="512,2048", help="prompt tokens (%(default)s)")
    add("--requests", type=int, default=4, help="requests of each length in each round (%(default)s)")
    add("--rounds", type=int, default=2, help="repetitions, each with new services (%(default)s)")
    add("--new-tokens", type=int, default=12, help="output tokens of each request (%(default)s)")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"], help="(%(default)s)")


def run(options: Options) -> dict[str, float]:
    if options.new_tokens < 4:
        raise ConfigError("--new-tokens must be at least 4: the cost is relative to the steps after the second token")
    if len(usable_cores()) < 2:
        say("bench handoff: prefill and decode node share one core here, which raises the cost")
    samples, reasons = measure(options)
    print(f"{options.model}, {options.dtype}; medians in ms of {options.rounds} x {options.requests} requests each")
    print("\n".join(table(samples, options)))
    for reason in reasons:
        print(f"invalid: {reason}")
    figures = {}
    for length in options.lengths:
        for name in (LOCAL, *options.transports):
            own = [s for s in samples if s.num_input == length and s.arrangement == name]
            figures[f"{length} tokens, {name}, TTFT ms"] = median_ms([s.ttft_s for s in own])
            figures[f"{length} tokens, {name}, first gap ms"] = median_ms([s.first_gap_s for s in own])
            figures[f"{length} tokens, {name}, step ms"] = median_ms([s.step_s for s in own])
    return figures
