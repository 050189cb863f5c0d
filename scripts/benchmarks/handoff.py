"""What disaggregation costs a lone request: from its first token to its second, less one decode step, by transport.

One prefill and one decode node, each with one compute thread on a core of its own, serve one request at a time: a
prompt of random token ids, nothing cached. Its first token comes from the prefill node, its second from the decode
node, and between them lie the handoff and one decode step; every later gap is a decode step alone. So the cost of a
request is its first gap less the median of its others, and it is given as a share of *local TTFT*: the median time to
the first token where one node with the same one thread computes prompts and decodes. The arrangements take turns, round
by round, in the opposite order at every other; the load-test harness (``scripts/load_tester``) is the only client.
The mark is 5 % of local TTFT.

The stages are what the decode node says of each request: ``transfer``, from the handoff's arrival to the last page's,
and ``join``, from then to the second token, which is a decode step and what it waited for. The defaults take a
good half of an hour; ``--quick`` two minutes, on the small model.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.config.shared import SMALL_MODEL
from common.errors import BatonError
from scripts.benchmarks.cpu_contention import Neighbours
from scripts.benchmarks.service_fixture import served
from scripts.load_tester.analysis.records import Record
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.run import run_load
from scripts.models.random_model import random_model
from scripts.serving.cpu_affinity import usable_cores

LOCAL = "local"
TRANSPORTS = ("shm", "tcp", "nixl", "gloo")
MODELS = ("qwen3-0.6b", "small")
POOL_TOKENS = 4_096
MARK = 0.05
NUM_WARMUP = 2  # requests of each length and start that prepare what is prepared once
MAX_OTHERS = 0.15  # cores that others may use before figures are not to be trusted


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


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    model: str
    transports: tuple[str, ...]
    lengths: tuple[int, ...]
    requests: int
    rounds: int
    new_tokens: int
    dtype: str
    seed: int


def measure(options: Options) -> tuple[list[Sample], list[str]]:
    """All samples, and why they should not be trusted."""
    model = SMALL_MODEL if options.model == "small" else str(random_model())
    samples: list[Sample] = []
    reasons: list[str] = []
    for number in range(options.rounds):
        arrangements = (LOCAL, *options.transports)
        for name in arrangements[::-1] if number % 2 else arrangements:
            say(f"round {number + 1} of {options.rounds}, {name} ...")
            neighbours = Neighbours(os.sched_getaffinity(0))
            with served(flags(name, model, options.dtype)) as url:
                for length in options.lengths:
                    found = ask(url, name, length, options, options.seed + number)
                    samples += found
                    say(f"    {line_of(found)}")
            others = neighbours.cores()
            if others > MAX_OTHERS:
                reasons.append(f"round {number + 1}, {name}: other processes kept {others:.1f} of our cores busy")
    return samples, reasons


def flags(arrangement: str, model: str, dtype: str) -> list[str]:
    """Of ``serve``. One thread for each node, however many nodes there are."""
    shared = [f"--model={model}", f"--dtype={dtype}", "--threads=1", f"--max-total-tokens={POOL_TOKENS}"]
    if arrangement == LOCAL:
        return [*shared, "--prefill=0", "--decode=1", "--local-prefill=always"]
    return [*shared, "--prefill=1", "--decode=1", f"--transport={arrangement}"]


def ask(url: str, arrangement: str, length: int, options: Options, seed: int) -> list[Sample]:
    """One request after another.

    Raises:
        BatonError: some failed.
    """
    report = run_load(
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
        )
    )
    if "the run was stopped before its end" in report.reasons:
        raise KeyboardInterrupt  # the harness has taken the signal
    failed = [record for record in report.records if not record.is_ok]
    if failed:
        raise BatonError(f"{arrangement}: a request failed: {failed[0].error} {failed[0].message}")
    return [sample_of(arrangement, length, record) for record in report.records[NUM_WARMUP:]]


def sample_of(arrangement: str, length: int, record: Record) -> Sample:
    """Raises BatonError if several tokens came at once, or too few to tell a step."""
    if len(record.stamps_s) < 4 or any(count != 1 for count in record.counts[:2]):
        raise BatonError(f"{arrangement}: tokens came in pieces of {record.counts}")
    gaps = record.gaps_s
    return Sample(arrangement, length, record.ttft_s, gaps[0], statistics.median(gaps[1:]), dict(record.timings))


# ---- the table ------------------------------------------------------------------------------------------------------


def median_ms(values: Sequence[float]) -> float:
    return statistics.median(values) * 1e3 if values else float("nan")


def line_of(samples: Sequence[Sample]) -> str:
    """Of samples of one arrangement and length."""
    first = samples[0]
    return (
        f"{first.num_input} tokens: TTFT {median_ms([s.ttft_s for s in samples]):.1f} ms, first gap "
        f"{median_ms([s.first_gap_s for s in samples]):.1f} ms, step {median_ms([s.step_s for s in samples]):.1f} ms"
    )


def table(samples: Sequence[Sample], options: Options) -> list[str]:
    """A line for every length and transport; times are medians in ms."""
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


def parse(argv: Sequence[str] | None) -> tuple[Options, argparse.Namespace]:
    """Options, and beside them ``json``."""
    parser = argparse.ArgumentParser(
        prog="bench handoff", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--quick", action="store_true", help="the small model in float32, one round")
    add("--model", default=MODELS[0], choices=MODELS, help="%(default)s has random weights")
    add("--transports", default=",".join(TRANSPORTS), metavar="NAME,...", help="of %(default)s")
    add("--lengths", type=int, nargs="+", default=[512, 2048], help="prompt tokens (%(default)s)")
    add("--requests", type=int, default=4, help="of each length in each round (%(default)s)")
    add("--rounds", type=int, default=2, help="times that everything is started and measured (%(default)s)")
    add("--new-tokens", type=int, default=12, help="of each request (%(default)s)")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"], help="(%(default)s)")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="write every sample there")
    given = parser.parse_args(argv)
    if given.quick:
        given.model, given.dtype, given.rounds = "small", "float32", 1
        given.lengths = [length for length in given.lengths if length <= 1024] or [512]
    if unknown := [name for name in given.transports.split(",") if name not in TRANSPORTS]:
        parser.error(f"--transports: {unknown[0]!r} is none of {', '.join(TRANSPORTS)}")
    if given.new_tokens < 4:
        parser.error("--new-tokens must be at least 4: the steps after the second token are what is compared with")
    options = Options(
        model=given.model,
        transports=tuple(given.transports.split(",")),
        lengths=tuple(given.lengths),
        requests=given.requests,
        rounds=given.rounds,
        new_tokens=given.new_tokens,
        dtype=given.dtype,
        seed=given.seed,
    )
    return options, given


def main(argv: Sequence[str] | None = None) -> int:
    options, given = parse(argv)
    if len(usable_cores()) < 2:
        say("bench handoff: prefill and decode node share one core here, so that the cost is more than it would be")
    try:
        samples, reasons = measure(options)
    except BatonError as error:
        say(f"bench handoff: {error}")
        return 1
    except KeyboardInterrupt:
        say("bench handoff: stopped")
        return 130
    print(f"{options.model}, {options.dtype}; medians in ms of {options.rounds} x {options.requests} requests each")
    print("\n".join(table(samples, options)))
    for reason in reasons:
        print(f"not to be trusted: {reason}")
    if given.json:
        content: dict[str, Any] = {"options": asdict(options), "samples": [asdict(s) for s in samples]}
        with open(given.json, "w") as file:
            json.dump({**content, "reasons": reasons}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
