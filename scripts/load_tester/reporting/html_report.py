"""The report as one self-contained page: of a run, a sweep, a search or a comparison."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.stage_timeline import MEANINGS, stage_shares
from scripts.load_tester.reporting import svg
from scripts.load_tester.reporting.charts import run_sections, search_charts
from scripts.load_tester.reporting.diagnostics import facts
from scripts.load_tester.reporting.formats import interval, milliseconds, per_second, percent
from scripts.load_tester.reporting.headline import (
    Alert,
    Tile,
    Tone,
    alerts,
    objective,
    reaches_objective,
    tiles,
    what_arrives,
)
from scripts.load_tester.reporting.report import Report, command_of
from scripts.load_tester.reporting.sanitize import printable_lines

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9")
MAX_ROWS = 200  # of a table: a trace may have a million tenants
#: Rows of the table of latencies: title, name in the report, meaning.
LATENCY_ROWS = (
    ("Time to first token (TTFT)", "ttft", "from the instant a request should go out"),
    ("TTFT from the send", "ttft_sent", "without the time by which the client was late"),
    ("Gap between tokens (ITL)", "itl", "inter-token latency: between two tokens as they arrive"),
    ("First to second token", "first_gap", "where the request moves to the decode node"),
    ("Time per output token (TPOT)", "tpot", "mean gap of a request after its first token"),
    ("End to end (E2E)", "e2e", "from the instant a request should go out to its last token"),
    ("E2E from the send", "e2e_sent", "without the time by which the client was late"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of a table; ``share`` draws a bar of that part of its width."""

    value: str
    note: str = ""
    tone: Tone = ""
    share: float | None = None
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    cells: Sequence[Cell]
    meaning: str = ""
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table; ``head`` names the first column too."""

    head: Sequence[str]
    rows: Sequence[Row]
    is_words: bool = False
    num_left_out: int = 0

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Row], *, is_words: bool = False) -> "Table":
        """A table of the first ``MAX_ROWS`` rows."""
        return cls(head, rows[:MAX_ROWS], is_words, max(0, len(rows) - MAX_ROWS))


def write_html(
    reports: Sequence[Report], path: str, *, found: Sequence[str] = (), best_rate: float | None = None
) -> None:
    """Write the page of one run, or of several; for ``found`` and ``best_rate`` see ``page``."""
    Path(path).write_text(page(reports, found=found, best_rate=best_rate), encoding="utf-8")


def page(reports: Sequence[Report], *, found: Sequence[str] = (), best_rate: float | None = None) -> str:
    """The page of one run, or of several.

    Args:
        found: the result of a search in sentences, the most important first.
        best_rate: the highest rate that held in a search; None for a sweep.
    """
    last = reports[-1]
    several = _several(reports, found, best_rate) if len(reports) > 1 else {}
    return render(
        "report.html.j2",
        title=f"Load test of {last.server.get('model') or last.config['url']}",
        subtitle=" · ".join([_load(last, len(reports)), last.config["url"], _date(last.started_at)]),
        runs=[_run(report) for report in reports],
        command=command_of(last.config if len(reports) == 1 else _sweep_config(reports, best_rate)),
        server=_pairs("server", last.server | {"url": last.config["url"], "date": last.started_at}),
        config=_pairs("option", last.config),
        **several,
    )


def render(template: str, **values: Any) -> str:
    """A page from a template in ``templates``; text is escaped and without control characters."""
    folder = Path(__file__).parent / "templates"
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, finalize=_printable)
    return environment.get_template(template).render(**values, svg_style=Markup(svg.STYLE))


def _printable(value: Any) -> Any:
    """Replace control characters in text from a server, which escaping does not."""
    return value if isinstance(value, Markup) else printable_lines(str(value))


def _load(report: Report, num_runs: int) -> str:
    """The load in a few words."""
    config = report.config
    length = f" for {config['duration']}" if config.get("duration") else ""
    if num_runs > 1:
        return f"{num_runs} runs"
    if config.get("concurrency"):
        return f"closed loop: {config['concurrency']} requests always in flight{length}"
    if config.get("trace"):
        return f"trace {Path(config['trace']).name}{length}"
    rate = f"{config.get('rate') or '1'} {what_arrives(report)}/s"
    return f"{config.get('arrival', 'poisson').capitalize()} arrivals at {rate}{length}"


def _date(text: str) -> str:
    try:
        return datetime.datetime.fromisoformat(text).strftime("%-d %B %Y, %H:%M UTC")
    except ValueError:
        return text


def _sweep_config(reports: Sequence[Report], best_rate: float | None) -> Figures:
    """The options of the whole sweep or search, from those of its runs."""
    config = reports[0].config
    if best_rate is not None:
        return config | {"find_goodput": True}
    return config | {"rate": None, "sweep": ",".join(str(report.config["rate"]) for report in reports)}


# ---- one run --------------------------------------------------------------------------------------------------------


def _run(report: Report) -> dict[str, Any]:
    drawn = f" ({report.rate:.4g}/s as drawn)" if report.rate else ""
    good = percent(report.service["attainment"])
    return {
        "title": f"{report.config['rate']}/s{drawn}: {good} good{'' if report.is_valid else ', invalid'}",
        "objective": objective(report),
        "alerts": alerts(report),
        "tiles": tiles(report),
        "tables": [
            ("Failures", "", _errors(report.errors)),
            (
                "Where the time goes",
                "Share of the time from the intended instant to the last token, all requests together. Indented stages "
                "lie inside or beside the others, whose shares add up to 100%.",
                _stages(report),
            ),
            (
                "Latencies",
                "Milliseconds. Below each, its 95% interval: the true value for this load lies in such an interval 19 "
                "times of 20; without an upper end the run is too short. p99: 99 of 100 took at most this.",
                _latencies(report.latency),
            ),
            ("Classes of requests", "Latencies in milliseconds.", _groups("class", report.classes)),
            ("Tenants", "Latencies in milliseconds.", _groups("tenant", report.tenants)),
            ("Diagnostics", "Whether the load was as intended, and what else the run shows.", _facts(report)),
        ],
        "sections": run_sections(report),
    }


def _errors(errors: Figures) -> Table:
    rows = [
        Row(name, [Cell(f"{count:,}"), Cell(errors["examples"].get(name, ""), is_long=True)])
        for name, count in errors["kinds"].items()
    ]
    return Table.of(("kind", "requests", "for example"), rows, is_words=True)


def _stages(report: Report) -> Table:
    """Empty where the server timed nothing."""
    if not report.stages:
        return Table((), ())
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    rows = [
        Row(
            stage.name,
            [
                Cell(percent(stage.share), share=min(1.0, stage.share)),
                Cell(milliseconds(stage.p50_s)),
                Cell(milliseconds(stage.p99_s)),
            ],
            MEANINGS[stage.name],
            stage.is_part,
        )
        for stage in stage_shares(good)
    ]
    return Table.of(("stage", "share of the time", "p50, ms", "p99, ms"), rows)


def _latencies(latency: Figures) -> Table:
    rows = [
        Row(title, [Cell(milliseconds(own[column]), interval(own[f"{column}_ci"])) for column in COLUMNS], meaning)
        for title, name, meaning in LATENCY_ROWS
        if (own := latency[name])["count"]
    ]
    return Table.of(("latency", *COLUMNS), rows)


def _groups(title: str, groups: Figures) -> Table:
    rows = [
        Row(
            name,
            [
                Cell(f"{own['count']:,}"),
                Cell(f"{own['failed']:,}", tone="bad" if own["failed"] else ""),
                Cell(percent(own["attainment"])),
                Cell(f"{own['output_tokens']:,}"),
                *(Cell(milliseconds(own[name].get(share))) for name in ("ttft", "e2e") for share in ("p50", "p99")),
            ],
        )
        for name, own in groups.items()
    ]
    return Table.of(
        (title, "requests", "failed", "good", "output tokens", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99"), rows
    )


def _facts(report: Report) -> Table:
    rows = [Row(fact.name, [Cell(fact.value, fact.meaning, is_long=True)]) for fact in facts(report)]
    return Table.of(("figure", "value"), rows, is_words=True)


def _pairs(title: str, values: Figures) -> Table:
    rows = [
        Row(str(name), [Cell(value if isinstance(value, str) else json.dumps(value, default=str), is_long=True)])
        for name, value in values.items()
    ]
    return Table.of((title, "value"), rows, is_words=True)


# ---- a sweep or a search --------------------------------------------------------------------------------------------


def _several(reports: Sequence[Report], found: Sequence[str], best_rate: float | None) -> dict[str, Any]:
    """What the page of several runs has beside them; its tiles are those of the best one."""
    best = _best(reports, best_rate)
    tone: Tone = "good" if best_rate else "bad" if best_rate is not None else ""
    if best_rate is None:
        valid = sum(report.is_valid for report in reports)
        at = f"at {best.config['rate']}/s"
        words = f"{valid} of {len(reports)} runs are valid; the tiles show the one with most goodput, {at}."
        found = [words, *found]
    invalid = [Alert("bad", f"INVALID at {one.config['rate']}/s: {one.reasons[0]}") for one in reports if one.reasons]
    return {
        "alerts": [
            *(Alert(tone if not at else "warn", words[:1].upper() + words[1:]) for at, words in enumerate(found)),
            *invalid,
        ],
        "tiles": _best_tiles(best, best_rate),
        "rates": _rates(reports),
        "charts": search_charts(reports),
    }


def _best(reports: Sequence[Report], best_rate: float | None) -> Report:
    """The run at the best rate, or the one with most goodput."""
    at_best = [report for report in reports if best_rate and report.config["rate"] == f"{best_rate:.6g}"]
    valid = at_best or [report for report in reports if report.is_valid] or list(reports)
    return valid[-1] if at_best else max(valid, key=lambda report: float(report.service["goodput_per_s"]))


def _best_tiles(best: Report, best_rate: float | None) -> list[Tile]:
    named = [replace(one, name=f"{one.name} at {best.config['rate']}/s") for one in tiles(best)]
    if best_rate is None:
        return named
    if best_rate:
        highest = Tile("Highest rate", f"{best_rate:.4g}", "requests/s", f"holds {objective(best)}", tone="good")
    else:
        highest = Tile("Highest rate", "-", "", "no rate that was tried holds the objective", tone="bad")
    return [highest, *(one for one in named if not one.name.startswith("Failed"))]


def _rates(reports: Sequence[Report]) -> Table:
    rows = []
    for report in sorted(reports, key=lambda one: float(one.rate or 0.0)):
        service, rates = report.service, report.throughput
        holds: Tone = "good" if reaches_objective(report) else "bad"
        low, high = service["attainment_ci"]
        cells = [
            Cell(
                percent(service["attainment"]),
                f"{percent(low)} to {percent(high)}",
                holds if service["limits_s"] else "",
            ),
            Cell(per_second(rates["requests_per_s"])),
            Cell(per_second(rates["output_tokens_per_s"])),
            *(
                Cell(milliseconds(report.latency[name].get(share)))
                for name in ("ttft", "itl")
                for share in ("p50", "p99")
            ),
            Cell(f"{report.errors['count']:,}", tone="bad" if report.errors["count"] else ""),
        ]
        words = f"{report.rate:.4g}/s as drawn" if report.rate else ""
        words += "" if report.is_valid else f"; invalid: {report.reasons[0]}"
        rows.append(Row(f"{report.config['rate']}/s", cells, words))
    head = ("rate", "good", "answered/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "failed")
    return Table.of(head, rows)
