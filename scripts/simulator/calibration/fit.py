"""Fits the parameters of ``Costs`` to measurements. Pure: the same samples give the same costs."""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.config.shared import Role
from scripts.simulator.calibration.samples import HandoffSample, PromptSample, Samples, StepSample
from scripts.simulator.costs import Costs, StepWork

Floats = NDArray[np.float64]
MIN_LENGTHS, MIN_PROMPTS, MIN_STEPS = 3, 6, 30
#: Groups with fewer samples say too little, unless all groups have fewer.
MIN_GROUP = 3
#: Repetitions of a weighted fit, and the relative error below which samples weigh alike.
NUM_ROUNDS, LEAST_ERROR = 12, 0.003
#: A transfer that takes less per token than this is too fast to be seen by a client.
FASTEST_TOKEN_S, FASTEST_WIRE = 1e-10, 1e13

#: A step that takes longer than this many usual ones was disturbed.
MOST_OF_USUAL = 4.0
#: Factors that stand for the spread of steps.
NUM_FACTORS = 40


class TooFewSamples(Exception):
    """There is not enough to fit."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs, the median relative error of each part, and how many samples each had.

    Attributes:
        beside: costs while both nodes compute; None if that was not measured.
        spread: factors between steps and their costs while both nodes compute, by role (``NodeModel.spread``).
    """

    costs: Costs
    errors: dict[str, float]
    samples: dict[str, int]
    beside: Costs | None = None
    spread: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)


def fit_costs(samples: Samples, kv_bytes_per_token: int) -> Fit:
    """Fit all parameters. Raises TooFewSamples: names what is missing."""
    _check(samples)
    costs, step_error = _fit_steps(samples.steps)
    costs, prompt_error = _fit_prompts(samples.prompts, costs)
    costs, handoff_error = _fit_handoffs(samples.handoffs, costs, kv_bytes_per_token)
    errors = {"prompts": prompt_error, "steps": step_error, "handoffs": handoff_error}
    counts = {"prompts": len(samples.prompts), "steps": len(samples.steps), "handoffs": len(samples.handoffs)}
    beside, spread = None, dict[Role, tuple[float, ...]]()
    lengths = len({one.num_input for one in samples.prompts_beside})
    if len(samples.steps_beside) >= MIN_STEPS and len(samples.prompts_beside) >= MIN_PROMPTS and lengths >= MIN_LENGTHS:
        found, errors["steps beside prompts"] = _fit_steps(samples.steps_beside)
        found, errors["prompts beside outputs"] = _fit_prompts(samples.prompts_beside, found)
        counts |= {"steps beside prompts": len(samples.steps_beside)}
        counts |= {"prompts beside outputs": len(samples.prompts_beside)}
        beside = replace(found, message_s=costs.message_s)
        gaps = [(gap_s, _step_s(beside, one)) for one in samples.steps_beside for gap_s in one.gaps_s]
        prompts = [(_seconds(one), _prompt_s(beside, one.num_input)) for one in samples.prompts_beside]
        spread = {"prefill": _spread(prompts), "decode": _spread(gaps)}
    return Fit(costs, errors, counts, beside, spread)


def fit_beside_decode(samples: Samples) -> tuple[Costs, float]:
    """Fit the costs of decode steps beside those of another decode node; also returns the median relative error."""
    if len(samples.steps_beside_decode) < MIN_STEPS:
        raise TooFewSamples(f"{len(samples.steps_beside_decode)} decode steps beside another decode node were measured")
    return _fit_steps(samples.steps_beside_decode)


def _seconds(prompt: PromptSample) -> float:
    assert prompt.prefill_s is not None, "samples beside outputs have it"
    return prompt.prefill_s


def _step_s(costs: Costs, step: StepSample) -> float:
    return costs.seconds(StepWork(0, step.num_rows, step.num_context))


def _prompt_s(costs: Costs, num_input: int) -> float:
    return costs.seconds(StepWork(num_input, 0, 0, num_input * (num_input + 1) // 2))


def _spread(measured: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Equally likely factors, in ascending order: the mean of each equal part of all.

    Args:
        measured: seconds, and seconds by the fitted costs, of each step.
    """
    seconds, fitted_s = np.array(measured).T
    ratios = np.sort(seconds / fitted_s)
    ratios = np.minimum(ratios, MOST_OF_USUAL * np.median(ratios))
    return tuple(float(part.mean()) for part in np.array_split(ratios, min(NUM_FACTORS, len(ratios))))


def _check(samples: Samples) -> None:
    lengths = len({one.num_input for one in samples.prompts})
    if len(samples.prompts) < MIN_PROMPTS or lengths < MIN_LENGTHS:
        raise TooFewSamples(f"{len(samples.prompts)} prompts of {lengths} lengths were measured")
    if len(samples.steps) < MIN_STEPS:
        raise TooFewSamples(f"{len(samples.steps)} decode steps were measured")


def _fit_steps(steps: Sequence[StepSample]) -> tuple[Costs, float]:
    """Decode steps. Few rows take as long as some more do, if reading the weights is what takes the time."""
    seconds = np.array([one.seconds for one in steps])
    rows, context = np.array([(one.num_rows, one.num_context) for one in steps], dtype=np.float64).T
    groups = [(one.num_rows, round(2 * math.log2(one.num_context + 1))) for one in steps]
    best, least, error = Costs(), math.inf, 0.0
    for fewest in range(int(rows.max()) // 2 + 1):
        columns = np.stack([np.ones_like(rows), np.maximum(rows, fewest), context], axis=1)
        found, median_error = grouped_fit(columns, seconds, groups)
        fitted = np.maximum(columns @ found, 1e-9)  # and a measured step may take no time
        mean_error = float(np.abs(seconds / fitted - 1).mean())
        if mean_error < least:
            least, error = mean_error, median_error
            fixed, row, token = found.tolist()
            weights = fewest * row
            best = Costs(fixed, row_s=row, context_token_s=token, message_s=0.0, wire_s=0.0, weights_s=weights)
    return best, error


def _fit_prompts(prompts: Sequence[PromptSample], costs: Costs) -> tuple[Costs, float]:
    """Prompts, beyond the fixed time of a step. What the node does not account for is two messages.

    Short prompts take as long as some longer ones, if reading the weights is what takes the time.
    """
    timed = [one for one in prompts if one.prefill_s is not None]
    if len(timed) >= MIN_PROMPTS:
        own = np.array([one.prefill_s for one in timed], dtype=np.float64)
        outside = float(np.median([one.ttft_s - (one.prefill_s or 0.0) for one in timed]))
    else:
        timed, outside = list(prompts), 0.0
        own = np.array([one.ttft_s for one in timed])
    lengths = np.array([one.num_input for one in timed], dtype=np.float64)
    medians = {length: float(np.median(own[lengths == length])) for length in sorted(set(lengths.tolist()))}
    best, least, error = costs, math.inf, 0.0
    for least_long in (0.0, *medians) if costs.weights_s else (0.0,):
        is_long = lengths >= least_long
        columns = np.stack([np.ones_like(lengths), lengths * is_long, lengths * (lengths + 1) / 2], axis=1)
        found, _ = grouped_fit(columns, own, lengths.tolist(), offset=costs.step_s + costs.weights_s * ~is_long)
        fixed, token, pair = found.tolist()
        candidate = replace(costs, prompt_step_s=fixed, prompt_token_s=token, prompt_pair_s=pair)
        errors = [abs(own_s / max(_prompt_s(candidate, int(n)), 1e-9) - 1) for n, own_s in medians.items()]
        if sum(errors) < least:
            best, least, error = candidate, sum(errors), float(np.median(errors))
    return replace(best, message_s=max(0.0, outside / 2)), error


def _fit_handoffs(handoffs: Sequence[HandoffSample], costs: Costs, kv_bytes_per_token: int) -> tuple[Costs, float]:
    """The wait for the second token, beyond its step: a latency, and a time per token of the prompt."""
    if len(handoffs) < MIN_PROMPTS:
        return replace(costs, wire_bytes_per_s=FASTEST_WIRE), 0.0
    lengths = np.array([one.num_input for one in handoffs], dtype=np.float64)
    step_s = costs.step_s + max(costs.weights_s, costs.row_s) + costs.context_token_s * (lengths + 1)
    columns = np.stack([np.ones_like(lengths), lengths], axis=1)
    seconds = np.array([one.seconds for one in handoffs])
    found, error = grouped_fit(columns, seconds, lengths.tolist(), offset=step_s)
    latency, token = found.tolist()
    wire = kv_bytes_per_token / token if token > FASTEST_TOKEN_S else FASTEST_WIRE
    return replace(costs, wire_s=max(0.0, latency - costs.message_s), wire_bytes_per_s=wire), error


def grouped_fit(
    columns: Floats, values: Floats, groups: Sequence[Hashable], *, offset: Floats | float = 0.0
) -> tuple[Floats, float]:
    """Non-negative coefficients of ``values - offset``, and the median relative error of the groups' medians.

    Samples of a group were made alike; their median stands for them, so that a late client or two tokens that were
    read together do not count. The sum of relative errors is the least, by repeated weighted least squares, so that
    short steps weigh as much as long ones and a group that went wrong has little weight.
    """
    members: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    large = [places for places in members.values() if len(places) >= MIN_GROUP] or list(members.values())
    offsets = np.broadcast_to(np.asarray(offset, dtype=np.float64), values.shape)
    medians = np.array([np.median(values[places]) for places in large])
    means = np.array([columns[places].mean(axis=0) for places in large])
    beyond = medians - np.array([offsets[places].mean() for places in large])
    counts = np.sqrt([len(places) for places in large])
    scale = np.full_like(medians, max(float(np.median(medians)), 1e-9))
    errors = np.ones_like(medians)
    found = np.zeros(columns.shape[1])
    for _ in range(NUM_ROUNDS):
        weights = counts / scale / np.sqrt(np.maximum(errors, LEAST_ERROR))
        found = non_negative_fit(means * weights[:, None], beyond * weights)
        fitted = means @ found + (medians - beyond)
        scale = np.maximum(fitted, 1e-9)
        errors = np.abs(fitted - medians) / scale
    return found, float(np.median(errors))


def non_negative_fit(columns: Floats, values: Floats) -> Floats:
    """Least squares with coefficients of at least 0: the best over all sets of columns that are left out."""
    count = columns.shape[1]
    # Columns of one size: ``lstsq`` leaves out what is many times smaller than the rest.
    sizes: Floats = np.abs(columns).max(axis=0)
    sizes[sizes == 0] = 1.0
    columns = columns / sizes
    best, least = np.zeros(count), float(np.square(values).sum())
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            found, *_ = np.linalg.lstsq(columns[:, chosen], values, rcond=None)
            if (found < 0).any():
                continue
            error = float(np.square(columns[:, chosen] @ found - values).sum())
            if error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = found / sizes[list(chosen)]
    return best
