"""Several runs: one at each of some rates, or a search for the highest rate at which the service level holds.

The search doubles (or halves) the rate until the limit is enclosed, then bisects on a logarithmic scale. Whether a rate
holds is decided by Wilson's interval around the share of good requests: where the target lies inside the interval, the
rate is tried again with another seed and the counts are added up, at most ``MAX_TRIES`` times.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scripts.load import stats
from scripts.load.config import LoadtestConfig
from scripts.load.live import watched
from scripts.load.main import FAILED, FINE, INVALID, at_rate
from scripts.load.metrics import Figures
from scripts.load.probe import probe
from scripts.load.report import SCHEMA, Report, write_json
from scripts.load.table import milliseconds, percent

MAX_TRIES = 3
MAX_DOUBLINGS = 12
Run = Callable[[float, int], Report]


@dataclass
class Point:
    """A rate, and what all runs at it came to.

    Attributes:
        holds: whether the share of good requests reaches the target.
        is_valid: whether the client kept up; if not, nobody knows what the server would have done.
        is_sure: whether that is so with 95 % confidence, or only by the mean.
    """

    rate: float
    good: int = 0
    count: int = 0
    holds: bool = False
    is_sure: bool = False
    is_valid: bool = True
    reports: list[Report] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        return self.good / self.count if self.count else 0.0

    @property
    def arrived(self) -> float | None:
        """Requests per second that really were to come: drawn instants are not quite as many as their mean."""
        rates = [report.rate for report in self.reports if report.rate]
        return sum(rates) / len(rates) if rates else None

    def to_dict(self) -> Figures:
        low, high = stats.proportion_interval(self.good, self.count)
        own = {"rate": self.rate, "good": self.good, "count": self.count, "attainment": self.attainment}
        return own | {
            "arrived": self.arrived,
            "attainment_ci": [low, high],
            "holds": self.holds,
            "is_sure": self.is_sure,
            "tries": len(self.reports),
        }


def find_goodput(run: Run, start: float, target: float, steps: int) -> tuple[float, list[Point]]:
    """The highest rate that holds, 0 if none does, and all points in the order in which they were tried.

    Args:
        run: makes a run at a rate, with the number of the try.
        start: where to begin, requests per second.
        target: share of requests that must be good.
        steps: bisections once a rate that holds and one that does not are known.
    """
    points = [measure(run, start, target)]
    factor = 2.0 if points[0].holds else 0.5
    for _ in range(MAX_DOUBLINGS):
        point = measure(run, points[-1].rate * factor, target)
        points.append(point)
        if point.holds != points[0].holds:
            break
    holding = [point.rate for point in points if point.holds]
    failing = [point.rate for point in points if not point.holds]
    if not holding or not failing:
        return max(holding, default=0.0), points
    low, high = max(holding), min(failing)
    for _ in range(steps):
        middle = math.sqrt(low * high)
        point = measure(run, middle, target)
        points.append(point)
        low, high = (middle, high) if point.holds else (low, middle)
    return low, points


def measure(run: Run, rate: float, target: float) -> Point:
    """Run at a rate until it is clear whether it holds, or patience ends."""
    point = Point(rate)
    for number in range(MAX_TRIES):
        report = run(rate, number)
        point.reports.append(report)
        if report.reasons:
            point.is_valid = point.holds = False
            break
        point.good += report.service["good"]
        point.count += report.service["count"]
        low, high = stats.proportion_interval(point.good, point.count)
        point.holds = point.attainment >= target
        point.is_sure = low >= target or high < target
        if point.is_sure:
            break
    return point


def search_command(config: LoadtestConfig) -> int:
    """``--find-goodput`` and ``--sweep``: run, print a table, write the files."""
    server = probe(config.url, api_key=config.api_key, verify_tls=config.verify_tls)
    shown: list[Report] = []

    def run(rate: float, number: int) -> Report:
        report = watched(replace(at_rate(config, rate), seed=config.seed + number), server, salt=len(shown))
        shown.append(report)
        print(_row(rate, report), flush=True)
        if report.was_stopped:
            raise KeyboardInterrupt
        return report

    print(f"{'rate':>9}{'achieved':>10}{'good':>9}{'TTFT p50':>10}{'TTFT p99':>10}{'ITL p50':>9}{'ITL p99':>9}  (ms)")
    best: float | None = None
    points: list[Point] = []
    try:
        if config.find_goodput:
            start = float(config.rate) if config.rate and config.rate.replace(".", "", 1).isdigit() else 1.0
            best, points = find_goodput(run, start, config.slo_attainment, config.search_steps)
        else:
            for word in (config.sweep or "").split(","):
                run(float(word), 0)
    finally:  # stopped, too: what there is
        if shown:
            _write(config, shown, points, best)
    return _verdict(config, shown, points, best)


def _verdict(config: LoadtestConfig, shown: list[Report], points: list[Point], best: float | None) -> int:
    """Say what was found; the exit status."""
    if best is not None:
        limits = ", ".join(f"{name} {milliseconds(limit)} ms" for name, limit in config.slos.items())
        arrived = next((point.arrived for point in points if point.rate == best and point.holds), None)
        drawn = f"; as drawn, its requests came at {arrived:.4g}/s" if arrived else ""
        print(f"\nhighest rate with {percent(config.slo_attainment)} of requests within {limits}: {best:.4g}/s{drawn}")
        unsure = [point.rate for point in points if not point.is_sure and point.is_valid]
        if unsure:
            print(f"within chance of the limit: {', '.join(f'{rate:.4g}/s' for rate in unsure)}")
    failed = [point.rate for point in points if not point.is_valid]
    if failed:
        print(f"at {min(failed):.4g}/s the client could not keep up: the limit may be higher", file=sys.stderr)
    if failed or not any(report.is_valid for report in shown):
        return INVALID
    return FAILED if best == 0 else FINE


def _row(rate: float, report: Report) -> str:
    cells = [
        f"{rate:9.4g}",
        f"{report.throughput['requests_per_s']:10.4g}",
        f"{percent(report.service['attainment']):>9}",
        *(f"{milliseconds(report.latency['ttft'].get(name)):>10}" for name in ("p50", "p99")),
        *(f"{milliseconds(report.latency['itl'].get(name)):>9}" for name in ("p50", "p99")),
    ]
    return "".join(cells) + ("" if report.is_valid else "  INVALID: " + report.reasons[0])


def _write(config: LoadtestConfig, reports: list[Report], points: list[Point], best: float | None) -> None:
    if config.json:
        runs = [report.to_dict() for report in reports]
        search = {"best_rate": best, "points": [point.to_dict() for point in points]} if points else None
        write_json({"schema": SCHEMA, "search": search, "runs": runs}, config.json)
    if config.html:
        from scripts.load.html import write_html

        write_html(reports, config.html, best_rate=best)
    if config.svg:
        from scripts.load.pictures import by_rate, rated, write_svgs

        write_svgs(by_rate({"": rated(reports)}), config.svg)
