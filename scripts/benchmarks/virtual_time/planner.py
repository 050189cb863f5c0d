"""How far simulated latencies are from those of live services, at loads and with nodes that were not calibrated.

A service with one prefill and one decode node is calibrated, and if other numbers are asked for, how much two decode
nodes slow each other (``simulate --calibrate``). Then everything is simulated.
Only when all predictions are written down, with their instant and SHA-256, services with other numbers of nodes run on
the same cores. The load tester sends each of them the same requests at the same instants as the simulator had. Rates
are shares of the simulated capacity: what the service answers with 64 requests in flight. The nodes have one thread
each and a model of 83 million parameters with random weights, whose decode steps take 7 ms.

``--trace FILE`` replays a Mooncake or Azure trace (``FILE@FROM:TO`` these seconds of it), with lengths scaled to the
given means and at most eight times as long. Without a trace, requests are drawn. Every run begins with empty caches.
A simulated figure misses the mark if it is further from the live one, or from the median of several (``--repeats``),
than 15 %, or for 99th percentiles than the larger of 25 % and the range of the live runs. A star marks it.
"""

import argparse
import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.config.options import flag_of
from common.config.shared import SMALL_MODEL
from common.errors import BatonError
from common.system.cpu_cores import usable_cores
from scripts.benchmarks.harness.cpu_contention import CpuContention
from scripts.benchmarks.harness.options import comma_separated, num_nodes
from scripts.benchmarks.harness.service_fixture import measured_load, running_service
from scripts.load_tester.config import LoadOptions, LoadtestConfig
from scripts.load_tester.output_files import check_file
from scripts.load_tester.workload.plan import make_plan
from scripts.load_tester.workload.traces import read_trace
from scripts.models.random_model import QWEN3_600M, random_model
from scripts.simulator.calibration.command import calibrate_command
from scripts.simulator.config import SimulateConfig
from scripts.simulator.hardware.node_model import Profile, find_hardware
from scripts.simulator.simulation import Simulation

SHORTEST = (
    "--model=small", "--calibrate-seconds=4", "--nodes=1+1", "--loads=0.5", "--num-requests=20",
    "--capacity-requests=20", "--attempts=1", "--slo-ttft=60s", "--slo-itl=60s",
)  # fmt: skip
SHAPE = QWEN3_600M | {
    "head_dim": 64,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
#: Options of live and of simulated nodes.
NODE_OPTIONS: dict[str, Any] = {"max_total_tokens": 16_384, "max_running_requests": 32, "chunked_prefill_size": 512}
CAPACITY_CONCURRENCY = 64
#: The longest prompt and output, as multiples of the means.
MOST = 8
#: Mean of a lognormal distribution with this spread, as a multiple of its median.
SPREAD, MEAN_TO_MEDIAN = 0.8, 1.38
#: Figures with their titles, and how far a simulated one may be off.
FIGURES = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "p99",
    "itl_p50": "inter-token p50",
    "itl_p99": "p99",
    "goodput": "goodput",
}
MARK, MARK_P99 = 0.15, 0.25
#: A live run during which other programs used more cores than this is repeated.
MOST_OTHERS = 0.08
Options = argparse.Namespace  # the fields of `add_options`


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", action="append", default=[], metavar="FILE[@FROM:TO]", help="replay this trace; may be repeated")
    add(
        "--nodes", type=comma_separated(num_nodes), default="1+1,2+1,1+2", help="prefill and decode nodes (%(default)s)"
    )
    add("--loads", type=comma_separated(float), default="0.3,0.6,0.85", help="shares of the capacity (%(default)s)")
    add("--num-requests", type=int, default=200, help="of each run (%(default)s)")
    add("--capacity-requests", type=int, default=120, help="of a run that measures the capacity (%(default)s)")
    add("--repeats", type=int, default=1, help="live runs, whose median counts (%(default)s)")
    add("--attempts", type=int, default=3, help="live runs in place of one that was disturbed (%(default)s)")
    add("--input-mean", type=float, default=160.0, help="mean tokens of a prompt (%(default)s)")
    add("--output-mean", type=float, default=12.0, help="mean tokens of an output (%(default)s)")
    add("--slo-ttft", default="500ms", help="objective of a request, for the goodput (%(default)s)")
    add("--slo-itl", default="30ms", help="the same, for 99 %% of its gaps between tokens (%(default)s)")
    add("--model", default="", metavar="FOLDER", help="another model; small is the included one")
    add("--calibrate-seconds", type=float, default=120.0, help="length of the calibration (%(default)s)")
    add("--profile", type=Path, metavar="FILE", help="use this calibration if the file exists, else write it there")
    add("--predictions", type=Path, metavar="FILE", help="write the predictions there")
    add("--save", type=Path, metavar="FILE", help="append all requests of each cell, as a JSON line")


class Served(NamedTuple):
    """One request: when it was due, and when its tokens came (none if it failed), in seconds."""

    due_s: float
    stamps_s: Sequence[float]
    stages_s: dict[str, float]


class Run(NamedTuple):
    requests: list[Served]
    requests_per_s: float
    good_per_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Nodes that are compared under several loads.

    Attributes:
        profile: the calibration.
    """

    num_prefill: int
    num_decode: int
    profile: Path

    @property
    def name(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}"

    def live(self, url: str, load: dict[str, Any], attempts: int) -> Run:
        config = LoadtestConfig(
            url=url, endpoint="generate", scrape="none", live=False, clients=1, flush_cache=True, **load
        )
        for _ in range(attempts):
            report, others = measured_load(config)
            if others <= MOST_OTHERS:
                break
            print(f"other programs kept {others:.2f} cores busy during a live run", flush=True)
        if report.all_failed:
            raise BatonError(f"every request of the load {load} failed: {report.records[0].message}")
        requests = [Served(one.intended_s, one.stamps_s if one.is_ok else (), one.timings) for one in report.records]
        return Run(requests, report.throughput["requests_per_s"], report.service["good"] / last_due_s(requests))

    def simulated(self, load: dict[str, Any]) -> Run:
        config = SimulateConfig(
            hardware=str(self.profile), prefill=self.num_prefill, decode=self.num_decode, cores=len(usable_cores()),
            **NODE_OPTIONS, **load,
        )  # fmt: skip
        simulation = Simulation(config, make_plan(config))
        found = simulation.run()
        requests = [
            Served(one.due_at, one.stamps_s if one.is_ok else (), one.timings) for one in simulation.client.outcomes
        ]
        return Run(requests, found["throughput"]["requests_per_s"], found["service"]["good"] / last_due_s(requests))


class Prediction(NamedTuple):
    """A simulated load.

    Attributes:
        load: its options.
        share: of the simulated capacity; 0 for the closed loop that measures the capacity.
    """

    deployment: Deployment
    name: str
    share: float
    load: dict[str, Any]
    simulated: Run


class Cell(NamedTuple):
    """One line of the table."""

    name: str
    live: list[Run]
    simulated: Run


def run(options: Options) -> dict[str, float]:
    for trace in options.trace or [""]:
        LoadtestConfig(**load_of(trace, options))  # a mistake is named before the calibration
    for name in ("predictions", "save"):
        check_file(getattr(options, name), flag_of(name))
    print_heading()
    figures: dict[str, float] = {}
    misses: list[str] = []
    for cell in cells(options):
        live, simulated = [figures_of(one) for one in cell.live], figures_of(cell.simulated)
        missed = [name for name in FIGURES if is_missed(name, [one[name] for one in live], simulated[name])]
        print_row(cell.name, live, simulated, missed)
        misses += [f"{cell.name} {name}" for name in missed]
        figures |= {f"{name}, {cell.name}, live": median([one[name] for one in live]) for name in FIGURES}
        figures |= {f"{name}, {cell.name}, simulated": simulated[name] for name in FIGURES}
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(cell._asdict()) + "\n")
    num_figures = len(figures) // 2
    print(f"{num_figures - len(misses)} of {num_figures} figures are within the mark")
    return figures


def cells(options: Options) -> Iterator[Cell]:
    """Measure and simulate every cell, each service after the other."""
    folder = SMALL_MODEL if options.model == "small" else options.model or str(random_model(SHAPE))
    flags = [f"{flag_of(name)}={value}" for name, value in NODE_OPTIONS.items()]
    flags += [f"--model={folder}", "--threads=1", "--no-log-requests"]
    with tempfile.TemporaryDirectory(prefix="baton-planner-") as place:
        profile = options.profile or Path(place) / "profile.json"
        if not profile.exists():
            check_file(str(profile), "--profile")
            with running_service(flags) as url:
                calibrate(url, profile, options.calibrate_seconds)
        if any(sum(nodes) > 2 for nodes in options.nodes) and not _knows_two_decode_nodes(profile):
            with running_service([*flags, "--decode=2"]) as url:
                calibrate(url, profile, options.calibrate_seconds, hardware=str(profile))
        deployments = [Deployment(prefill, decode, profile) for prefill, decode in options.nodes]
        predictions = {one.name: predictions_of(one, options) for one in deployments}
        write_down([one for several in predictions.values() for one in several], options.predictions)
        for deployment in deployments:
            nodes = [f"--prefill={deployment.num_prefill}", f"--decode={deployment.num_decode}"]
            with running_service([*flags, *nodes]) as url:
                yield from cells_of(url, predictions[deployment.name], options)


def _knows_two_decode_nodes(profile: Path) -> bool:
    """Whether a profile tells how two decode nodes slow each other."""
    known = find_hardware(str(profile), None).source
    assert isinstance(known, Profile)
    return bool(known.beside_decode)


def calibrate(url: str, profile: Path, seconds: float, *, hardware: str | None = None) -> None:
    contention = CpuContention(os.sched_getaffinity(0))
    config = SimulateConfig(
        calibrate=url, json=str(profile), calibrate_seconds=seconds, hardware=hardware, progress=False
    )
    if calibrate_command(config):
        raise BatonError("the service could not be calibrated")
    if (others := contention.cores()) > MOST_OTHERS:
        print(f"other programs kept {others:.2f} cores busy: calibrate again on an idle machine", flush=True)


def predictions_of(deployment: Deployment, options: Options) -> list[Prediction]:
    """Simulate, for each trace, a closed loop that measures the capacity, and then shares of that."""
    found: list[Prediction] = []
    for trace in options.trace or [""]:
        load = load_of(trace, options)
        name = f"{deployment.name} {Path(trace.partition('@')[0]).stem or 'drawn'}"
        closed = {
            **load,
            "concurrency": CAPACITY_CONCURRENCY,
            "num_requests": options.capacity_requests,
            "trace_jitter": False,
        }
        found.append(Prediction(deployment, f"{name} capacity", 0.0, closed, deployment.simulated(closed)))
        capacity = found[-1].simulated.requests_per_s
        for share in options.loads:
            given = {**load, "rate": f"{share * capacity:.6g}", "num_requests": options.num_requests}
            found.append(Prediction(deployment, f"{name} {share:.0%}", share, given, deployment.simulated(given)))
    return found


def write_down(predictions: Sequence[Prediction], file: Path | None) -> None:
    """Print when the predictions were made, and the SHA-256 of their figures, before any of them is tried."""
    lines = [
        json.dumps({"name": one.name, "load": one.load, "requests_per_s": one.simulated.requests_per_s}
                   | figures_of(one.simulated))
        for one in predictions
    ]  # fmt: skip
    text = "".join(f"{line}\n" for line in lines)
    if file is not None:
        file.write_text(text)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    print(f"{now}: {len(lines)} predictions, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}", flush=True)


def cells_of(url: str, predictions: Sequence[Prediction], options: Options) -> Iterator[Cell]:
    """Try the predictions for one deployment."""
    for one in predictions:
        if one.share:
            live = [one.deployment.live(url, one.load, options.attempts) for _ in range(options.repeats)]
            yield Cell(one.name, live, one.simulated)
            continue
        capacity = one.deployment.live(url, one.load, options.attempts).requests_per_s
        expected = one.simulated.requests_per_s
        off = f"{expected / capacity - 1:+.0%}"
        print(f"{one.name}: {capacity:.3g} requests/s, simulated {expected:.3g} ({off})", flush=True)


def load_of(trace: str, options: Options) -> dict[str, Any]:
    """Options of the load that the load tester and the simulator share."""
    slos = {"slo_ttft": options.slo_ttft, "slo_itl": options.slo_itl}
    means = {"input": options.input_mean, "output": options.output_mean}
    if not trace:
        return slos | {
            f"{kind}_len": f"lognormal:{mean / MEAN_TO_MEDIAN:g}:{SPREAD}:max={MOST * mean:.0f}"
            for kind, mean in means.items()
        }
    path, _, window = trace.partition("@")
    found = read_trace(path)
    rows = found.within(LoadOptions(trace_window=window or None).window)[: options.num_requests]
    if not rows:
        raise BatonError(f"--trace {trace}: no request of the trace is in this window")
    return slos | {
        "trace": path,
        "trace_window": window or None,
        "trace_jitter": found.format == "Mooncake",  # whose clock ticks every three seconds
        "length_scale": options.input_mean / float(np.mean([row.num_input for row in rows])),
        "output_scale": options.output_mean / float(np.mean([row.num_output for row in rows])),
        "max_input_len": round(MOST * options.input_mean),
        "max_output_len": round(MOST * options.output_mean),
    }


# ---- figures --------------------------------------------------------------------------------------------------------


def figures_of(run: Run) -> dict[str, float]:
    """Latencies in milliseconds, and requests per second within their objectives."""
    answered = [one for one in run.requests if len(one.stamps_s)]
    first_ms = [1e3 * (one.stamps_s[0] - one.due_s) for one in answered]
    gaps_ms = 1e3 * np.concatenate([np.diff(one.stamps_s) for one in answered])
    return {
        "ttft_p50": float(np.quantile(first_ms, 0.5)),
        "ttft_p99": float(np.quantile(first_ms, 0.99)),
        "itl_p50": float(np.quantile(gaps_ms, 0.5)),
        "itl_p99": float(np.quantile(gaps_ms, 0.99)),
        "goodput": run.good_per_s,
    }


def last_due_s(requests: Sequence[Served]) -> float:
    return max(max(one.due_s for one in requests), 1e-9)


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def is_missed(name: str, live: Sequence[float], simulated: float) -> bool:
    """Whether a simulated figure is further from the median of live ones than it may be."""
    middle = median(live)
    allowed = max(MARK_P99 * middle, max(live) - min(live)) if name.endswith("p99") else MARK * middle
    return abs(simulated - middle) > allowed


def print_heading() -> None:
    print(f"{'':34}" + "".join(f"{title:^24}" for title in FIGURES.values()))
    print(f"{'nodes, load':34}" + f"{'live':>8}{'simulated':>10}{'':6}" * len(FIGURES), flush=True)


def print_row(name: str, live: Sequence[dict[str, float]], simulated: dict[str, float], missed: Sequence[str]) -> None:
    cells = []
    for figure in FIGURES:
        middle = median([one[figure] for one in live])
        off = f"{simulated[figure] / middle - 1:+.0%}" if middle else "-"
        cells.append(f"{middle:>8.3g}{simulated[figure]:>8.3g}{off + '*' * (figure in missed):>8}")
    print(f"{name:34}" + "".join(cells), flush=True)
