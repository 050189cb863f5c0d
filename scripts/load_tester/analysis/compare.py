"""Compares two reports: what changed, and whether the change is significant.

Latencies are compared by the ratio of a statistic, with a block bootstrap interval; shares of good and of failed
requests by the difference of two proportions. If the queue of one run grew to the end, its requests are all correlated,
and only a change by more than a factor of two is judged, with the spread of the other run. A figure has *regressed* if
it is worse by more than the threshold with p < 0.05 after Holm's correction over all compared figures; without the
correction a sweep of ten rates would regress against itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.metrics import Figures

STATISTICS: dict[str, Callable[[stats.Floats], float]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.quantile(values, 0.5)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}
MIN_FOR_P99 = 200  # with fewer requests p99 is close to the maximum, and says little about the next run
MIN_FREE = 10  # with fewer independent requests the spread is unknown
MIN_FREE_FOR_P99 = 50
MIN_FOR_ONE_SIDED = 20
SIGNIFICANCE = 0.05
FAILED, GOOD = "failed requests", "good requests"
TITLES = {"ttft": "time to first token", "itl": "gap between tokens", "tpot": "time per token", "e2e": "end to end"}


@dataclass(frozen=True)
class Change:
    """One figure before and after.

    Attributes:
        ratio, low, high: after over before, with its 95 % interval; for shares the difference.
        p: probability of such a change by chance, corrected for all comparisons.
        verdict: better, worse or same; "unknown" where the data do not suffice.
    """

    name: str
    unit: str
    before: float
    after: float
    ratio: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    verdict: str = "unknown"


def add_verdicts(pairs: Sequence[Sequence[Change]], threshold: float) -> list[list[Change]]:
    """Add verdicts to the changes of several pairs of runs, corrected for their number."""
    every = [change for changes in pairs for change in changes]
    known = [place for place, change in enumerate(every) if change.p is not None]
    for place, p in zip(known, stats.holm([every[place].p or 0.0 for place in known]), strict=True):
        every[place] = replace(every[place], p=p, verdict=_verdict(every[place], p, threshold))
    rest = iter(every)
    return [[next(rest) for _ in changes] for changes in pairs]


def _verdict(change: Change, p: float, threshold: float) -> str:
    """Judge one change; the threshold does not apply to failed requests."""
    is_share = change.unit == "share"
    worse_by = change.ratio - (0.0 if is_share else 1.0)
    worse_by = -worse_by if change.name == GOOD else worse_by
    if p > SIGNIFICANCE or abs(worse_by) <= (0.0 if change.name == FAILED else threshold):
        return "same"
    return "worse" if worse_by > 0 else "better"


def changes_of(before: Figures, after: Figures) -> list[Change]:
    """Changes of all figures that both reports have, each with its own p and no verdict yet."""
    rng = np.random.default_rng(0)
    changes = []
    for name, title in TITLES.items():
        a, b = (_blocks(side["samples"][name]) for side in (before, after))
        if not a.size or not b.size:
            continue
        num_requests = min(len(side["samples"][name]) for side in (before, after))
        is_enough = min(a.num_free, b.num_free) >= MIN_FREE
        for label, statistic in STATISTICS.items():
            if label == "p99" and num_requests < MIN_FOR_P99:
                continue
            one, other = statistic(a.values), statistic(b.values)
            change = Change(f"{title} {label}", "s", one, other, other / one if one else 1.0)
            if is_enough and (label != "p99" or min(a.num_free, b.num_free) >= MIN_FREE_FOR_P99):
                found = stats.ratio(a, b, statistic, rng)
                change = replace(change, ratio=found.value, low=found.low, high=found.high, p=found.p)
            elif (
                num_requests >= MIN_FOR_ONE_SIDED and max(a.num_free, b.num_free) >= MIN_FREE and one > 0 and other > 0
            ):
                steady, jammed = (a, b) if a.num_free > b.num_free else (b, a)
                p = stats.far_p(steady, statistic, jammed.num_clusters, change.ratio, rng)
                change = replace(change, p=p if p <= SIGNIFICANCE else None)
            changes.append(change)
    failed = [(side["errors"]["count"], side["num_measured"]) for side in (before, after)]
    good = [(side["service"]["good"], side["service"]["count"]) for side in (before, after)]
    return [
        *changes,
        _share(FAILED, failed, is_judged=True),
        _share(GOOD, good, is_judged=_limits_agree(before, after), free=_free(before, after)),
    ]


def _blocks(samples: Sequence[float | list[float]]) -> stats.Blocks:
    """Group the samples of each request."""
    return stats.Blocks([np.atleast_1d(np.asarray(sample, dtype=np.float64)) for sample in samples])


def _limits_agree(before: Figures, after: Figures) -> bool:
    sides = [(side["service"].get("limits_s"), side.get("config", {}).get("mix")) for side in (before, after)]
    return sides[0] == sides[1]


def _free(before: Figures, after: Figures) -> float:
    """Share of requests that count as independent, of the run with fewer; 1 where a report does not say."""
    shares = [1.0]
    for service in (before["service"], after["service"]):
        shares.append(float(service.get("num_free", service["count"])) / max(1, service["count"]))
    return min(shares)


def _share(name: str, counts: Sequence[tuple[int, int]], *, is_judged: bool, free: float = 1.0) -> Change:
    """Compare a share of requests, given as (count, total) before and after.

    Args:
        free: share of requests that count as independent; at least ``MIN_FREE`` requests count.
    """
    (one, of_one), (other, of_other) = counts
    shares = one / max(1, of_one), other / max(1, of_other)
    sizes = [max(min(count, MIN_FREE), free * count) for count in (of_one, of_other)]
    change, low, high = stats.difference(shares[0] * sizes[0], sizes[0], shares[1] * sizes[1], sizes[1])
    is_judged = is_judged and of_one > 0 and of_other > 0
    p = stats.difference_p(shares[0] * sizes[0], sizes[0], shares[1] * sizes[1], sizes[1]) if is_judged else None
    return Change(name, "share", *shares, change, low, high, p)
