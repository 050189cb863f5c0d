"""The search for the fewest devices that hold the objectives.

It knows nothing of simulations: ``evaluate`` says how a deployment fares under the load times a factor. More nodes are
taken never to make a service worse, which holds but for chance; so the search grows what is short until the objectives
hold, and then takes nodes away while they still do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from common.config.shared import Role
from scripts.simulator.planning.deployment import Deployment, Settings
from scripts.simulator.planning.verdict import Verdict

MAX_GROWTHS = 24
#: Share of a role's nodes that are added at once, near the target and far from it.
GROWTH, FAST_GROWTH, FAR = 0.15, 0.5, 0.25
#: Factors by which ``capacity`` steps up, and how close it comes.
CAPACITY_STEP, CAPACITY_TOLERANCE = 1.25, 0.06
MAX_FACTOR = 64.0

Evaluate = Callable[[Deployment, float], Verdict]


@dataclass(frozen=True, slots=True)
class Goal:
    """When objectives count as held.

    Attributes:
        share: of requests that must be within their objectives.
        confidence: the least probability that this share is reached.
        max_devices: a search that needs more gives up.
    """

    share: float = 0.9
    confidence: float = 0.8
    max_devices: int = 4_096

    def is_held(self, verdict: Verdict) -> bool:
        return verdict.share >= self.share and verdict.confidence >= self.confidence


@dataclass(frozen=True, slots=True)
class Found:
    """A deployment that holds the objectives, and how it fared."""

    deployment: Deployment
    verdict: Verdict


def fewest(evaluate: Evaluate, start: Deployment, goal: Goal, *, factor: float = 1.0, below: int = 0) -> Found | None:
    """The fewest devices with the settings of ``start``; None if the search gives up.

    Args:
        start: where to begin.
        factor: of the load.
        below: give up as soon as at least this many devices are needed; 0 for no such bound.
    """
    current = start
    for _ in range(MAX_GROWTHS):
        if current.num_devices > goal.max_devices or (below and current.num_devices >= below):
            return None
        verdict = evaluate(current, factor)
        if goal.is_held(verdict):
            return _shrink(evaluate, Found(current, verdict), goal, factor)
        role: Role = "decode" if current.settings.is_colocated or verdict.short_of == "decode" else "prefill"
        growth = FAST_GROWTH if goal.share - verdict.share > FAR else GROWTH
        current = current.plus(role, max(1, round(current.count(role) * growth)))
    return None


def _shrink(evaluate: Evaluate, found: Found, goal: Goal, factor: float) -> Found:
    """Take away nodes while the objectives hold, those with most devices first."""
    while True:
        deployment = found.deployment
        roles = sorted(deployment.settings.roles, key=deployment.devices_of, reverse=True)
        steps = [(role, count) for role in roles for count in dict.fromkeys((max(1, deployment.count(role) // 8), 1))]
        smaller = [deployment.plus(role, -count) for role, count in steps if deployment.count(role) > count]
        held = next(((one, v) for one in smaller if goal.is_held(v := evaluate(one, factor))), None)
        if held is None:
            return found
        found = Found(*held)


def best_settings(evaluate: Evaluate, starts: Iterable[Deployment], goal: Goal) -> Found | None:
    """The fewest devices over deployments of different settings, each from its own start.

    Of two with as many devices, the one with the higher share wins.
    """
    best: Found | None = None
    first: Deployment | None = None
    for start in sorted(starts, key=lambda one: one.num_devices):
        if best is None or first is None:
            best, first = fewest(evaluate, start, goal), start
            continue
        bound = best.deployment.num_devices + 1
        guess = _within(_corrected(start, first, best.deployment), bound)
        found = fewest(evaluate, guess, goal, below=bound) if guess else None
        if found is not None and _rank(found) < _rank(best):
            best = found
    return best


def _corrected(start: Deployment, guessed: Deployment, needed: Deployment) -> Deployment:
    """A guess, corrected by how far an earlier guess was from what was needed."""
    for role in start.settings.roles:
        wanted = round(start.count(role) * needed.count(role) / guessed.count(role))
        start = start.plus(role, max(1, wanted) - start.count(role))
    return start


def _within(deployment: Deployment, bound: int) -> Deployment | None:
    """The deployment with as many nodes less as it takes to have fewer devices than ``bound``; None for none left."""
    while deployment.num_devices >= bound:
        roles = [role for role in deployment.settings.roles if deployment.count(role) > 1]
        if not roles:
            return None
        deployment = deployment.plus(max(roles, key=deployment.count), -1)
    return deployment


def _rank(found: Found) -> tuple[int, float]:
    return found.deployment.num_devices, -found.verdict.share


def tune(evaluate: Evaluate, found: Found, variants: Iterable[Settings], goal: Goal) -> Found:
    """Try other settings with as many nodes, one change at a time, and shrink where one holds better.

    Args:
        variants: settings, each of which differs from those of ``found`` in one field.
    """
    base = found.deployment.settings
    for variant in variants:
        changed = {
            name: getattr(variant, name) for name in Settings.__dataclass_fields__
            if getattr(variant, name) != getattr(base, name)
        }  # fmt: skip
        deployment = replace(found.deployment, settings=replace(found.deployment.settings, **changed))
        verdict = evaluate(deployment, 1.0)
        if goal.is_held(verdict) and verdict.share >= found.verdict.share:
            found = min(found, _shrink(evaluate, Found(deployment, verdict), goal, 1.0), key=_rank)
    return found


def capacity(evaluate: Evaluate, deployment: Deployment, goal: Goal, *, start: float = 1.0) -> float:
    """The largest factor of the load at which a deployment holds the objectives; 0 if it holds at none that was tried.

    It is ``MAX_FACTOR`` or more if it holds at all that were tried.

    Args:
        start: a factor at which to begin.
    """
    low, high = 0.0, 0.0
    if goal.is_held(evaluate(deployment, start)):
        low = start
        while not high and low < MAX_FACTOR:
            factor = low * CAPACITY_STEP
            low, high = (factor, 0.0) if goal.is_held(evaluate(deployment, factor)) else (low, factor)
    else:
        high = start
        while not low and high > start / MAX_FACTOR:
            factor = high / CAPACITY_STEP
            low, high = (factor, high) if goal.is_held(evaluate(deployment, factor)) else (0.0, factor)
    while low and high and high / low - 1 > CAPACITY_TOLERANCE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if goal.is_held(evaluate(deployment, middle)) else (low, middle)
    return low
