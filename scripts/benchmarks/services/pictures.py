"""Latency of the small model by rate, on separate and on colocated nodes, and under a trace: tables and pictures.

The tables are Markdown; ``--folder`` gets the pictures as SVG files. All arrangements get the same requests at the same
instants. Every row shows how many cores other processes used meanwhile.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.config.shared import SMALL_MODEL
from scripts.benchmarks.harness.options import comma_separated
from scripts.benchmarks.harness.service_fixture import measured_load, running_service
from scripts.benchmarks.services.disagg import ARRANGEMENTS
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import check_folder
from scripts.load_tester.reporting.charts import (
    distribution_charts,
    rate_charts,
    rate_figures,
    timeline_charts,
    waterfall_charts,
    write_svgs,
)
from scripts.load_tester.reporting.formats import milliseconds, percent
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.workload.plan import make_plan

SHORTEST = ("--rates=20", "--seconds=1")
HEAD = "| | requests/s | TTFT p50 | p99 | inter-token p50 | p99 | end to end p50 | p99 | tokens/s | cores of others |"


def measured(flags: Sequence[str], configs: list[LoadtestConfig]) -> list[tuple[Report, float]]:
    """Run each load against one service: reports, and cores that other processes used."""
    found = []
    with running_service([*flags, f"--model={SMALL_MODEL}"]) as url:
        for salt, config in enumerate(configs):
            report, others = measured_load(replace(config, url=url), salt=salt)
            found.append((report, others))
            print(f"  {config.rate}/s: {'valid' if report.is_valid else report.reasons}", flush=True)
    return found


def row(name: str, rate: str, report: Report, others: float) -> str:
    cells = [name, rate]
    for figure in ("ttft", "itl", "e2e"):
        cells += [milliseconds(report.latency[figure].get(share)) for share in ("p50", "p99")]
    cells += [
        f"{report.throughput['output_tokens_per_s']:,.0f}",
        f"{others:.1f}" + ("" if report.is_valid else f"; invalid: {report.reasons[0]}"),
    ]
    return f"| {' | '.join(cells)} |"


def table(found: Sequence[tuple[str, str, Report, float]]) -> list[str]:
    return [HEAD, "| " + "--- | " * HEAD.count(" | ") + "--- |", *(row(*one) for one in found)]


def sweep(rates: list[str], seconds: float, folder: Path | None) -> list[tuple[str, str, Report, float]]:
    """Measure every arrangement at every rate: arrangement, rate, report, cores that other processes used."""
    found: list[tuple[str, str, Report, float]] = []
    reports = {}
    common = {"duration": f"{seconds + 2:g}", "warmup": "2", "input_len": "200", "output_len": "40", "scrape": "none"}
    configs = [LoadtestConfig(rate=rate, **common) for rate in rates]  # type: ignore[arg-type]
    for title, flags in (ARRANGEMENTS["split"], ARRANGEMENTS["colocated"]):
        print(title, flush=True)
        runs = measured(flags, configs)
        reports[title] = rate_figures([report for report, _ in runs])
        found += [(title, rate, *one) for rate, one in zip(rates, runs, strict=True)]
    if folder:
        write_svgs(rate_charts(reports), str(folder))
    return found


def trace_load(trace: str, rate: str, seconds: float) -> LoadtestConfig:
    """The replay of the trace, scaled to the small model. Raises ConfigError: the trace cannot be replayed so."""
    config = LoadtestConfig(
        endpoint="generate", trace=trace, rate=rate, duration=f"{seconds:g}", length_scale=0.04, max_input_len=3000,
        max_output_len=400, scrape="none",
    )  # fmt: skip
    make_plan(config)
    return config


def replay(config: LoadtestConfig, folder: Path | None) -> list[str]:
    """Replay a trace on one prefill and one decode node; return lines about it."""
    print("trace", flush=True)
    ((report, others),) = measured(ARRANGEMENTS["split"].flags, [config])
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    pictures = [timeline_charts(report.records)[0], distribution_charts(good)[1], *waterfall_charts(good)]
    if folder:
        write_svgs([(f"Trace, {title[0].lower()}{title[1:]}", chart) for title, chart in pictures], str(folder))
    caching = report.caching
    shares = f"{percent(caching['achieved_share'])} of prompt tokens were cached, of {percent(caching['ideal_share'])}."
    failures = f"{report.errors['count']:,} of {report.num_requests:,} requests failed."
    return [*report.notes, "", *table([("the trace", f"{config.rate}", report, others)]), "", f"{shares} {failures}"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=comma_separated(str), default="10,20,30,40,50", help="requests/s (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured at each rate (%(default)s)")
    parser.add_argument("--trace", help="also replay this Mooncake trace", metavar="FILE")
    parser.add_argument("--trace-rate", default="8", help="its mean rate (%(default)s)")
    parser.add_argument("--trace-seconds", type=float, default=45.0, help="its length (%(default)s)")
    parser.add_argument("--folder", type=Path, help="write the pictures to this folder")


def run(options: argparse.Namespace) -> dict[str, float]:
    check_folder(options.folder, "--folder")
    trace = trace_load(options.trace, options.trace_rate, options.trace_seconds) if options.trace else None
    print("The small model under load. Milliseconds; 200 tokens in and 40 out.\n")
    found = sweep(options.rates, options.seconds, options.folder)
    print("\n".join(table(found)))
    if trace:
        print("\nA conversation trace, lengths times 0.04.\n")
        print("\n".join(replay(trace, options.folder)))
    figures = {}
    for name, rate, report, _ in found:
        figures[f"{name}, {rate}/s, TTFT p50 ms"] = 1e3 * report.latency["ttft"].get("p50", 0.0)
        figures[f"{name}, {rate}/s, end to end p50 ms"] = 1e3 * report.latency["e2e"].get("p50", 0.0)
        figures[f"{name}, {rate}/s, tokens/s"] = report.throughput["output_tokens_per_s"]
    return figures
