"""The report as one self-contained page, from ``report.html.j2``: of a run, a sweep, a search or a comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.reporting import svg
from scripts.load_tester.reporting.charts import TitledChart, rate_charts, rate_figures, run_sections
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.reporting.sanitize import printable_lines
from scripts.load_tester.reporting.text_report import (
    ROWS,
    fact_lines,
    milliseconds,
    outputs_verdict,
    percent,
    summary_lines,
    verdict_lines,
)

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9")
MAX_ROWS = 200  # of a table: a trace may have a million tenants


def write_html(reports: Sequence[Report], path: str, *, found: str = "") -> None:
    """Write the page of one run, or of several; ``found`` is the result of a search, in a sentence."""
    Path(path).write_text(page(reports, found=found), encoding="utf-8")


def page(reports: Sequence[Report], *, found: str = "") -> str:
    """The page of one run, or of several; ``found`` is the result of a search, in a sentence."""
    last = reports[-1]
    return _render(
        title=f"Load test of {last.server.get('model') or last.config['url']}",
        config=last.config,
        started_at=last.started_at,
        found=found,
        charts=rate_charts({"": rate_figures(reports)}) if len(reports) > 1 else [],
        runs=[_run(report) for report in reports],
    )


def comparison_page(names: Sequence[str], lines: Sequence[str], charts: Sequence[TitledChart]) -> str:
    """The page of two runs, or two sweeps, side by side; ``lines`` is the text of the comparison."""
    return _render(title=" and ".join(names), charts=charts, comparison="\n".join(lines).strip("\n"))


def _render(**values: Any) -> str:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=_printable)
    environment.filters |= {
        "milliseconds": milliseconds,
        "percent": percent,
        "interval": _interval,
        "thousands": "{:,}".format,
    }
    template = environment.get_template("report.html.j2")
    return template.render(**values, svg_style=Markup(svg.STYLE), columns=COLUMNS, max_rows=MAX_ROWS)


def _printable(value: Any) -> Any:
    """Replace control characters in text from a server, which escaping does not."""
    return value if isinstance(value, Markup) else printable_lines(str(value))


def _run(report: Report) -> dict[str, Any]:
    drawn = f" ({report.rate:.4g}/s as drawn)" if report.rate else ""
    return {
        "report": report,
        "title": f"Run at {report.config['rate']}/s{drawn}{'' if report.is_valid else ': invalid'}",
        "verdict": verdict_lines(report)[0],
        "verdict_class": "bad" if report.all_failed else "" if report.errors["count"] else "good",
        "outputs_verdict": outputs_verdict(report.outputs),
        "latency": _latency_rows(report.latency),
        "facts": _facts(report),
        "sections": run_sections(report),
        "summary": "\n".join(summary_lines(report)),
    }


def _latency_rows(latency: Figures) -> list[tuple[str, Figures]]:
    """Rows with data; an indented title belongs to the one above it."""
    rows, above = [], ""
    for title, name in ROWS:
        above = title if not title.startswith(" ") else above
        if latency[name]["count"]:
            rows.append((title if title == above else f"{above}, {title.strip()}", latency[name]))
    return rows


def _interval(ends: Sequence[float | None]) -> str:
    """A 95 % interval in words; empty if neither end is known."""
    high = ends[1]
    known = [milliseconds(end) for end in ends if end is not None]
    if len(known) == 2:
        return " – ".join(known)
    return f"{'from' if high is None else 'to'} {known[0]}" if known else ""


def _facts(report: Report) -> list[list[str]]:
    """The terminal's lines without latencies and groups, which have tables of their own."""
    rows: list[list[str]] = []
    for line in fact_lines(report):
        if line.startswith(" ") and rows:
            rows[-1][1] += "; " + line.strip()
        elif line:
            rows.append([*line.split(None, 1)])
    return rows
