"""``loadtest --sweep`` and ``--find-goodput``: runs at several rates, a table, and the files."""

import sys
from dataclasses import replace

from scripts.load_tester.analysis.goodput_search import RatePoint, SearchResult, find_goodput
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.client.request_headers import common_headers
from scripts.load_tester.client.server_info import fetch_server_info
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import FAILED, FINE, INVALID, say, write_files
from scripts.load_tester.reporting.formats import limit, milliseconds, percent
from scripts.load_tester.reporting.headline import LATENCIES
from scripts.load_tester.reporting.progress import run_with_progress
from scripts.load_tester.reporting.report import SCHEMA, Report, write_json
from scripts.load_tester.workload.plan import make_plan

MIN_RESPONSES = 10  # times the duration of a response: the least length of a run


def search_command(config: LoadtestConfig) -> int:
    """Run ``--find-goodput`` or ``--sweep``, print a table, write the files; return the exit status."""
    rates = [float(word) for word in (config.sweep or config.rate or "1").split(",")]  # one of a search

    def at(rate: float, number: int = 0) -> LoadtestConfig:
        return replace(config, rate=f"{rate:.6g}", sweep=None, find_goodput=False, seed=config.seed + number)

    for rate in rates:  # before the server is asked, for mistakes in a trace and rates at which nothing arrives
        make_plan(at(rate))
    server = fetch_server_info(config.url, common_headers(config), verify_tls=config.verify_tls)
    shown: list[Report] = []

    def run(rate: float, number: int) -> Report:
        report = run_with_progress(at(rate, number), server, salt=len(shown))
        shown.append(report)
        say(_row(rate, report))
        if report.was_stopped:
            raise KeyboardInterrupt
        return report

    say(f"{'rate':>9}{'achieved':>10}{'good':>9}{'TTFT p50':>10}{'TTFT p99':>10}{'ITL p50':>9}{'ITL p99':>9}  (ms)")
    found: SearchResult | None = None
    try:
        if config.find_goodput:
            found = find_goodput(run, rates[0], config.slo_attainment, config.search_steps)
        else:
            for rate in rates:
                run(rate, 0)
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
    say("", *search_notes(config, found))
    failed = [point.rate for point in found.points if not point.is_valid]
    if failed:
        print(f"at {min(failed):.4g}/s the runs are invalid: the limit may be higher", file=sys.stderr)
        return INVALID
    return FINE if found.best else FAILED


def search_notes(config: LoadtestConfig, found: SearchResult) -> list[str]:
    """The result of a search in a sentence, and what makes it uncertain."""
    notes = [describe_result(config, found)]
    unsure = [point.rate for point in found.points if not point.is_sure and point.is_valid]
    if unsure:
        notes.append(f"within chance of the limit: {', '.join(f'{rate:.4g}/s' for rate in unsure)}")
    if found.point and (warning := _too_short(found.point)):
        notes.append(warning)
    return notes


def describe_result(config: LoadtestConfig, found: SearchResult) -> str:
    limits = ", ".join(f"{LATENCIES[name][0]} {limit(seconds)}" for name, seconds in config.slos.items())
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
    span_s = report.arrivals["count"] / point.rate  # a session arrives once
    if not response_s or span_s >= MIN_RESPONSES * response_s:
        return ""
    return (
        f"a run at that rate sends for {span_s:.3g} s, and a response takes {response_s:.3g} s: it may hold only "
        "because the run is short; give a longer --duration or more --num-requests"
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
    from scripts.load_tester.reporting.charts import search_charts, write_svgs
    from scripts.load_tester.reporting.html_report import write_html

    notes = search_notes(config, found) if found else []
    best = found.best if found else None
    return write_files([
        ("--json", config.json, lambda path: write_json(_to_dict(reports, found), path)),
        ("--html", config.html, lambda path: write_html(reports, path, found=notes, best_rate=best)),
        ("--svg", config.svg, lambda path: write_svgs(search_charts(reports), path)),
    ])  # fmt: skip


def _to_dict(reports: list[Report], found: SearchResult | None) -> Figures:
    search = None
    if found:
        points = [point.to_dict() for point in found.points]
        search = {"best_rate": found.best, "is_enclosed": not found.why, "points": points}
    return {"schema": SCHEMA, "search": search, "runs": [report.to_dict() for report in reports]}
