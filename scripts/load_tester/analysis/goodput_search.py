"""Searches for the highest rate that holds the service level.

The search doubles (or halves) the rate until the limit is enclosed, then bisects on a logarithmic scale. Wilson's
interval around the share of good requests decides whether a rate holds; correlated requests count for fewer. Where the
target lies inside the interval, the rate is tried again with another seed and the counts add up, at most ``MAX_TRIES``
times. An invalid run, in which the client fell behind, counts neither way; a rate with two invalid runs bounds the
search from above. Halving ends where a lower rate cannot help: every request failed, or requests without any other in
flight were not good enough either; and where no request arrives within ``--duration``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.workload.plan import NoArrivals

if TYPE_CHECKING:
    from scripts.load_tester.reporting.report import Report

MAX_TRIES = 3
MAX_DOUBLINGS = 12
MIN_ALONE = 5
Run = Callable[[float, int], "Report"]


@dataclass
class RatePoint:
    """The combined result of all runs at one rate.

    Attributes:
        num_free: equivalent number of independent requests.
        alone_good, alone_count: good and all requests without any other in flight.
        holds: whether the share of good requests reaches the target.
        is_sure: whether ``holds`` is certain to 95 %, or only true of the mean.
        is_valid: whether the client kept up; if not, the rate says nothing about the server.
    """

    rate: float
    good: int = 0
    count: int = 0
    num_free: float = 0.0
    alone_good: int = 0
    alone_count: int = 0
    holds: bool = False
    is_sure: bool = False
    is_valid: bool = True
    reports: "list[Report]" = field(default_factory=list)

    @property
    def attainment(self) -> float:
        return self.good / self.count if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share of good requests."""
        return stats.proportion_interval(self.attainment * self.num_free, self.num_free)

    @property
    def arrived(self) -> float | None:
        """Mean rate of the drawn arrivals, which differs a little from ``rate``."""
        rates = [report.rate for report in self.reports if report.rate]
        return sum(rates) / len(rates) if rates else None

    def to_dict(self) -> Figures:
        low, high = self.interval
        own = {"rate": self.rate, "good": self.good, "count": self.count, "attainment": self.attainment}
        return own | {
            "arrived": self.arrived,
            "attainment_ci": [low, high],
            "holds": self.holds,
            "is_sure": self.is_sure,
            "is_valid": self.is_valid,
            "tries": len(self.reports),
        }

    def why_no_lower_rate(self, target: float) -> str:
        """Why a lower rate cannot hold either; empty if it might."""
        if self.reports and all(report.all_failed for report in self.reports):
            return "every request failed"
        is_enough = self.is_valid and self.alone_count >= MIN_ALONE
        if is_enough and stats.proportion_interval(self.alone_good, self.alone_count)[1] < target:
            return f"of {self.alone_count} requests without any other in flight, {self.alone_good} were good"
        return ""


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        best: the highest rate that held; 0 if none did.
        points: all rates, in the order in which they were tried.
        why: why the limit is not enclosed from both sides; empty if it is.
    """

    best: float
    points: list[RatePoint]
    why: str = ""

    @property
    def point(self) -> RatePoint | None:
        return next((point for point in self.points if point.holds and point.rate == self.best), None)


def find_goodput(run: Run, start: float, target: float, steps: int) -> SearchResult:
    """Find the highest rate that holds.

    Args:
        run: makes a run from a rate and the number of the try.
        start: first rate, requests per second.
        target: share of requests that must be good.
        steps: bisections once the limit is enclosed.
    """
    points = [measure(run, start, target)]
    factor = 2.0 if points[0].holds else 0.5
    for _ in range(MAX_DOUBLINGS):
        why = "" if factor > 1 else points[-1].why_no_lower_rate(target)
        if why:
            return SearchResult(0.0, points, why)
        rate = points[-1].rate * factor
        try:
            point = measure(run, rate, target)
        except NoArrivals:
            best = max((one.rate for one in points if one.holds), default=0.0)
            return SearchResult(best, points, f"at {rate:.4g}/s no request arrives within --duration")
        points.append(point)
        if point.holds != points[0].holds:
            break
    holding = [point.rate for point in points if point.holds]
    failing = [point.rate for point in points if not point.holds]
    if not holding or not failing:
        return SearchResult(max(holding, default=0.0), points, f"{points[-1].rate:.4g}/s was the last rate tried")
    low, high = max(holding), min(failing)
    for _ in range(steps):
        middle = math.sqrt(low * high)
        point = measure(run, middle, target)
        points.append(point)
        low, high = (middle, high) if point.holds else (low, middle)
    is_invalid = any(point.rate == high and not point.is_valid for point in points)
    return SearchResult(low, points, f"at {high:.4g}/s the runs are invalid" if is_invalid else "")


def measure(run: Run, rate: float, target: float) -> RatePoint:
    """Run at a rate until it is certain whether it holds, or ``MAX_TRIES`` is reached.

    Raises NoArrivals: no request arrives in the first try. A later one counts for nothing then.
    """
    point = RatePoint(rate)
    num_invalid = 0
    for number in range(MAX_TRIES):
        try:
            report = run(rate, number)
        except NoArrivals:
            if not point.reports:
                raise
            continue
        point.reports.append(report)
        if report.reasons:
            num_invalid += 1
            if num_invalid > 1:
                break
            continue
        point.good += report.service["good"]
        point.count += report.service["count"]
        point.num_free += report.service["num_free"]
        point.alone_good += report.service["alone_good"]
        point.alone_count += report.service["alone_count"]
        low, high = point.interval
        point.is_sure = low >= target or high < target
        if point.is_sure:
            break
    point.is_valid = point.count > 0 and num_invalid < 2
    point.holds = point.is_valid and point.attainment >= target
    return point
