"""Tables and pictures of the small model under load, for the README: latency by rate, separate nodes or not, a trace.

Writes SVG files and a page with the figures into a folder. Arrangements get the same requests at the same instants;
every run says how much of the machine other processes had meanwhile.
"""

import os
import shlex
import sys
from pathlib import Path

import click

from common.config.shared import SMALL_MODEL
from scripts.benchmarks.cpu_contention import Neighbours
from scripts.benchmarks.disagg import FLAGS
from scripts.benchmarks.service_fixture import served
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.charts import by_rate, distributions, over_time, rated, waterfall, write_svgs
from scripts.load_tester.reporting.files import Report
from scripts.load_tester.reporting.text_report import milliseconds, percent
from scripts.load_tester.run import run_load

ARRANGEMENTS = {"split": "1 prefill + 1 decode", "colocated": "2 colocated"}
HEAD = "| | requests/s | TTFT p50 | p99 | inter-token p50 | p99 | end to end p50 | p99 | tokens/s | others' cores |"


def measured(flags: list[str], configs: list[LoadtestConfig]) -> list[tuple[Report, float]]:
    """One service, one run after the other: reports, and how many cores other processes had."""
    found = []
    with served([*flags, f"--model={SMALL_MODEL}"]) as url:
        for salt, config in enumerate(configs):
            neighbours = Neighbours(os.sched_getaffinity(0))
            report = run_load(LoadtestConfig(**vars(config) | {"url": url}), salt=salt)
            found.append((report, neighbours.cores()))
            print(f"  {config.rate}/s: {'valid' if report.is_valid else report.reasons}", flush=True)
    return found


def row(name: str, rate: str, report: Report, others: float) -> str:
    """A line of a table."""
    cells = [name, rate]
    for figure in ("ttft", "itl", "e2e"):
        cells += [milliseconds(report.latency[figure].get(share)) for share in ("p50", "p99")]
    cells += [
        f"{report.throughput['output_tokens_per_s']:,.0f}",
        f"{others:.1f}" + ("" if report.is_valid else f"; invalid: {report.reasons[0]}"),
    ]
    return f"| {' | '.join(cells)} |"


def sweep(rates: list[str], seconds: float, folder: Path) -> list[str]:
    """Latency by rate of each arrangement: pictures, and the lines of the table."""
    lines, reports = [HEAD, "| " + "--- | " * HEAD.count(" | ") + "--- |"], {}
    common = {"duration": f"{seconds + 2:g}", "warmup": "2", "input_len": "200", "output_len": "40", "scrape": "none"}
    configs = [LoadtestConfig(rate=rate, **common) for rate in rates]  # type: ignore[arg-type]
    for arrangement, title in ARRANGEMENTS.items():
        print(title, flush=True)
        found = measured(FLAGS[arrangement], configs)
        reports[title] = rated([report for report, _ in found])
        lines += [row(title, rate, *one) for rate, one in zip(rates, found, strict=True)]
    write_svgs(by_rate(reports), str(folder))
    return lines


def replay(trace: str, rate: str, seconds: float, folder: Path) -> list[str]:
    """The trace, scaled to the small model, on one prefill and one decode node: pictures, and the lines about it."""
    print("trace", flush=True)
    config = LoadtestConfig(
        endpoint="generate", trace=trace, rate=rate, duration=f"{seconds:g}", length_scale=0.04, max_input_len=3000,
        max_output_len=400, scrape="none",
    )  # fmt: skip
    ((report, others),) = measured(FLAGS["split"], [config])
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    pictures = [over_time(report.records)[0], distributions(good)[1], *waterfall(good)]
    write_svgs([(f"Trace, {title[0].lower()}{title[1:]}", chart) for title, chart in pictures], str(folder))
    table = [HEAD, "| " + "--- | " * HEAD.count(" | ") + "--- |", row("the trace", rate, report, others)]
    caching = report.caching
    share = (
        f"{percent(caching['achieved_share'])} of prompt tokens were found cached, of {percent(caching['ideal_share'])}"
    )
    return [*report.notes, "", *table, "", f"{share} that are possible. Of {report.num_requests:,} requests "
            f"{report.errors['count']:,} failed."]  # fmt: skip


@click.command()
@click.option("--rates", default="10,20,30,40,50", show_default=True, help="Requests per second.")
@click.option("--seconds", default=10.0, show_default=True, help="Measured at each rate.")
@click.option("--trace", help="A Mooncake trace to replay as well.", metavar="FILE")
@click.option("--trace-rate", default="8", show_default=True, help="Its mean rate.")
@click.option("--trace-seconds", default=45.0, show_default=True)
@click.option("--folder", default="docs", show_default=True, help="Where pictures and page go.")
def main(rates: str, seconds: float, trace: str | None, trace_rate: str, trace_seconds: float, folder: str) -> None:
    """Measure, draw, and write ``measured.md``."""
    place = Path(folder)
    names = [Path(word).name if word == trace else word for word in sys.argv[1:]]
    command = shlex.join(["./scripts/bench", "pictures", *names])
    lines = ["# The small model under load", "", f"Made by `{command}`. Milliseconds; 200 tokens in and 40 out.", ""]
    lines += sweep(rates.split(","), seconds, place)
    for title in ("time-to-first-token-by-rate", "gap-between-tokens-by-rate", "throughput-and-goodput-by-rate"):
        lines += ["", f"![{title.replace('-', ' ')}]({title}.svg)"]
    if trace:
        lines += ["", "## A conversation trace", "", "Lengths times 0.04."]
        lines += ["", *replay(trace, trace_rate, trace_seconds, place)]
        lines += ["", *(f"![]({path.name})\n" for path in sorted(place.glob("trace-*.svg")))]
    (place / "measured.md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
