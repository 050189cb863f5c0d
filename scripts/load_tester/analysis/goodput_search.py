"""Runs at several rates: a sweep, or a search for the highest rate that holds the service level.

The search doubles (or halves) the rate until the limit is enclosed, then bisects on a logarithmic scale. Wilson's
interval around the share of good requests decides whether a rate holds; correlated requests count for fewer. Where the
target lies inside the interval, the rate is tried again with another seed and the counts add up, at most ``MAX_TRIES``
times. An invalid run, in which the client fell behind, counts neither way; a rate with two invalid runs bounds the
search from above. Halving ends where a lower rate cannot help: every request failed, or requests without any other in
flight were not good enough either.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.client.request_headers import common_headers
from scripts.load_tester.client.server_info import fetch_server_info
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import FAILED, FINE, INVALID, say, write_files
from scripts.load_tester.reporting.progress import run_with_progress
from scripts.load_tester.reporting.report import SCHEMA, Report, write_json
from scripts.load_tester.reporting.text_report import milliseconds, percent

MAX_TRIES = 3
MAX_DOUBLINGS = 12
MIN_ANSWERS = 10
MIN_ALONE = 5
Run = Callable[[float, int], Report]


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
    reports: list[Report] = field(default_factory=list)

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
        """The point of ``best``."""
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
        point = measure(run, points[-1].rate * factor, target)
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
    is_client = any(point.rate == high and not point.is_valid for point in points)
    return SearchResult(low, points, f"at {high:.4g}/s the client could not keep up" if is_client else "")


def measure(run: Run, rate: float, target: float) -> RatePoint:
    """Run at a rate until it is certain whether it holds, or ``MAX_TRIES`` is reached."""
    point = RatePoint(rate)
    num_invalid = 0
    for number in range(MAX_TRIES):
        report = run(rate, number)
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


def search_command(config: LoadtestConfig) -> int:
    """Run ``--find-goodput`` or ``--sweep``, print a table, write the files; return the exit status."""
    server = fetch_server_info(config.url, common_headers(config), verify_tls=config.verify_tls)
    shown: list[Report] = []

    def run(rate: float, number: int) -> Report:
        one = replace(config, rate=f"{rate:.6g}", sweep=None, find_goodput=False, seed=config.seed + number)
        report = run_with_progress(one, server, salt=len(shown))
        shown.append(report)
        say(_row(rate, report))
        if report.was_stopped:
            raise KeyboardInterrupt
        return report

    say(f"{'rate':>9}{'achieved':>10}{'good':>9}{'TTFT p50':>10}{'TTFT p99':>10}{'ITL p50':>9}{'ITL p99':>9}  (ms)")
    found: SearchResult | None = None
    try:
        if config.find_goodput:
            found = find_goodput(run, float(config.rate or 1.0), config.slo_attainment, config.search_steps)
        else:
            for word in (config.sweep or "").split(","):
                run(float(word), 0)
    finally:  # after Ctrl-C too
        has_all = not shown or _write_results(config, shown, found)
    status = _sweep_status(shown) if found is None else _search_status(config, found)
    return status if has_all else FAILED


def _sweep_status(shown: list[Report]) -> int:
    """Exit status of a sweep: every run must be valid, and at least one request must have succeeded."""
    if not all(report.is_valid for report in shown):
        return INVALID
    if all(report.all_failed for report in shown):
        print("loadtest: every request failed", file=sys.stderr)
        return FAILED
    return FINE


def _search_status(config: LoadtestConfig, found: SearchResult) -> int:
    """Print the result of a search; return the exit status."""
    say("", describe_result(config, found))
    unsure = [point.rate for point in found.points if not point.is_sure and point.is_valid]
    if unsure:
        say(f"within chance of the limit: {', '.join(f'{rate:.4g}/s' for rate in unsure)}")
    if found.point and (warning := _too_short(found.point)):
        say(warning)
    failed = [point.rate for point in found.points if not point.is_valid]
    if failed:
        print(f"at {min(failed):.4g}/s the client could not keep up: the limit may be higher", file=sys.stderr)
        return INVALID
    return FINE if found.best else FAILED


def describe_result(config: LoadtestConfig, found: SearchResult) -> str:
    """The result of a search in a sentence."""
    limits = ", ".join(f"{name} {milliseconds(limit)} ms" for name, limit in config.slos.items())
    good = f"{percent(config.slo_attainment)} of requests within {limits}"
    if not found.best:
        return f"no rate was found with {good}: {found.why}"
    arrived = found.point.arrived if found.point else None
    drawn = f"; as drawn, its requests came at {arrived:.4g}/s" if arrived else ""
    if found.why:
        return f"at least {found.best:.4g}/s with {good}: it held, and {found.why}{drawn}"
    return f"highest rate with {good}: {found.best:.4g}/s{drawn}"


def _too_short(point: RatePoint) -> str:
    """Warn if the run was too short for a queue to grow; empty if it was long enough."""
    report = point.reports[-1]
    response_s = report.latency["e2e"].get("p50")
    span_s = report.num_measured / point.rate
    if not response_s or span_s >= MIN_ANSWERS * response_s:
        return ""
    return (
        f"a run at that rate sends for {span_s:.3g} s, and a response takes {response_s:.3g} s: it may hold only "
        "because the run is short; raise --duration"
    )


def _row(rate: float, report: Report) -> str:
    cells = [
        f"{rate:9.4g}",
        f"{report.throughput['requests_per_s']:10.4g}",
        f"{percent(report.service['attainment']):>9}",
        *(f"{milliseconds(report.latency['ttft'].get(name)):>10}" for name in ("p50", "p99")),
        *(f"{milliseconds(report.latency['itl'].get(name)):>9}" for name in ("p50", "p99")),
    ]
    return "".join(cells) + ("" if report.is_valid else "  INVALID: " + report.reasons[0])


def _write_results(config: LoadtestConfig, reports: list[Report], found: SearchResult | None) -> bool:
    from scripts.load_tester.reporting.charts import rate_charts, rate_figures, write_svgs
    from scripts.load_tester.reporting.html_report import write_html

    result = describe_result(config, found) if found else ""
    return write_files([
        (config.json, lambda path: write_json(_to_dict(reports, found), path)),
        (config.html, lambda path: write_html(reports, path, found=result)),
        (config.svg, lambda path: write_svgs(rate_charts({"": rate_figures(reports)}), path)),
    ])  # fmt: skip


def _to_dict(reports: list[Report], found: SearchResult | None) -> Figures:
    search = None
    if found:
        points = [point.to_dict() for point in found.points]
        search = {"best_rate": found.best, "is_enclosed": not found.why, "points": points}
    return {"schema": SCHEMA, "search": search, "runs": [report.to_dict() for report in reports]}
