"""Runs an experiment: the highest rate at which each variant holds the objectives of each case."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from scripts.simulator.config import SimulateConfig
from scripts.simulator.experiments.cases import Case, Experiment, Variant
from scripts.simulator.planning.evaluation import Evaluator
from scripts.simulator.planning.search import MAX_FACTOR, Evaluate, Goal, capacity
from scripts.simulator.planning.windows import windows_of

#: The share of requests within objectives is what counts, not how sure it is: both sides have the same requests.
CONFIDENCE = 0.5
#: Options of a drawn load, which a trace replaces.
DRAWN = ("input_len", "output_len", "prefix_len", "prefix_groups")


@dataclass(frozen=True, slots=True)
class Measured:
    """The highest rate of a variant, in requests per second and device; 0 if it holds the objectives at none.

    Attributes:
        is_open: whether it holds them at every rate that was tried, so that the highest is not known.
    """

    case: Case
    variant: Variant
    rate: float
    is_open: bool = False


def case_config(config: SimulateConfig, case: Case, variant: Variant) -> SimulateConfig:
    """The configuration of one variant under the load of its case."""
    options = dict(case.options)
    if config.trace is not None:
        options = {name: value for name, value in options.items() if name not in DRAWN}
    base = config.without_plan()
    rate = case.rate * variant.deployment.num_devices
    tp = variant.deployment.settings.decode_tp  # of all nodes, without which the model may not fit
    return replace(base, rate=f"{rate!r}", prefill_tp=tp, decode_tp=tp, **{**options, **variant.options})


def run_experiment(
    experiment: Experiment, config: SimulateConfig, *, num_processes: int, on_measured: Callable[[Measured], None]
) -> list[Measured]:
    goal = Goal(config.slo_attainment, CONFIDENCE)
    found: list[Measured] = []
    for case in experiment.cases:
        for variant in case.variants:
            windows = windows_of(
                case_config(config, case, variant), num_windows=config.plan_windows, num_requests=config.plan_requests
            )
            with Evaluator(windows, goal, num_processes=num_processes) as evaluate:
                found.append(measure(case, variant, evaluate, goal))
            on_measured(found[-1])
    return found


def measure(case: Case, variant: Variant, evaluate: Evaluate, goal: Goal) -> Measured:
    factor = capacity(evaluate, variant.deployment, goal)
    return Measured(case, variant, case.rate * factor, is_open=factor >= MAX_FACTOR)


def lines_of(experiment: Experiment, measured: list[Measured]) -> list[str]:
    """The claim, and a table with each variant's rate against that of the paper's baseline."""
    lines = [experiment.claim, ""]
    for case in experiment.cases:
        own = [one for one in measured if one.case is case]
        baseline = next((one.rate for one in own if one.variant.is_baseline and not one.is_open), 0.0)
        lines.append(f"{case.name:40}{'requests/s per device':>22}{'ratio':>8}")
        for one in own:
            rate = f"over {one.rate:.3g}" if one.is_open else f"{one.rate:.3g}"
            ratio = f"{one.rate / baseline:.2f}" if baseline and not one.is_open else "-"
            lines.append(f"  {one.variant.name:38}{rate:>22}{ratio:>8}")
        lines += [f"  {_summary(own)}", ""]
    return lines[:-1]


def _summary(own: list[Measured]) -> str:
    """The best separate nodes against the best colocated ones."""
    pools = [one for one in own if one.variant.deployment.settings.is_colocated]
    others = [one for one in own if not one.variant.deployment.settings.is_colocated]
    if any(one.is_open for one in own):
        return "requests are too few to find the highest rate: raise --plan-requests"
    best_pool, best = max(pools, key=lambda one: one.rate), max(others, key=lambda one: one.rate)
    if not best_pool.rate or not best.rate:
        return "one side holds the objectives at no rate that was tried"
    ratio = best.rate / best_pool.rate
    return f"best separate against best colocated: {ratio:.2f} times the requests"
