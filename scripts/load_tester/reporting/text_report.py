"""The summary on the terminal, headline first, in lines of at most 80 columns."""

import textwrap
from collections.abc import Sequence

from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.stage_timeline import stage_shares
from scripts.load_tester.reporting.diagnostics import facts
from scripts.load_tester.reporting.formats import counted, milliseconds, percent
from scripts.load_tester.reporting.headline import alerts, objective, tiles
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.reporting.sanitize import printable

WIDTH = 80
MAX_KINDS = 20
MAX_NAME = 120  # of model and server, in characters
MAX_MESSAGE = 300  # of a failure, in characters
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
ROWS = (
    ("time to first token", "ttft"),
    ("  from the send", "ttft_sent"),
    ("gap between tokens", "itl"),
    ("  first to second", "first_gap"),
    ("time per output token", "tpot"),
    ("end to end", "e2e"),
    ("  from the send", "e2e_sent"),
)


def summary_lines(report: Report) -> list[str]:
    """The whole summary, without control characters."""
    lines = [
        *_headline(report),
        "",
        *_latency_lines(report.latency),
        *_stage_lines(report),
        *_group_lines("class", report.classes),
        *_group_lines("tenant", report.tenants),
        "",
        *_named([(fact.name, fact.value) for fact in facts(report)]),
        *_error_lines(report.errors),
        "",
        *verdict_lines(report),
    ]
    return [printable(line) for line in lines]


def _headline(report: Report) -> list[str]:
    state = "valid" if report.is_valid else "INVALID, see the end"
    state = "every request failed" if report.all_failed else state
    target = printable(f"{report.server.get('model') or 'the server'} at {report.config['url']}")[:MAX_NAME]
    lines = _wrapped(f"Load test of {target}: {state}")
    lines += _wrapped(f"Objective: {objective(report)}. In brackets: 95% intervals.")
    for tile in tiles(report):
        known = f"({tile.interval})" if tile.interval else tile.note
        words = f"{tile.judgement} {known}".strip() or tile.meaning
        name = tile.name.lower() if tile.name.istitle() else tile.name
        lines += _wrapped(f"{name:11}{tile.value:>9} {tile.unit:11}{words}", 32)
    return lines


def _wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        break_on_hyphens=False,
    ) or [""]


def _named(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [line for name, value in rows for line in _wrapped(f"{name:12}{value}", 12)]


def _latency_lines(latency: Figures) -> list[str]:
    lines = [f"{'milliseconds':22}" + "".join(f"{name:>8}" for name in COLUMNS)]
    for title, name in ROWS:
        figures = latency[name]
        if figures["count"]:
            lines.append(f"{title:22}" + "".join(f"{milliseconds(figures[column]):>8}" for column in COLUMNS))
    return lines if len(lines) > 1 else ["no latencies: no request was answered"]


def _stage_lines(report: Report) -> list[str]:
    """Where the time went, if the server timed its stages."""
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    if not report.stages:
        return []
    lines = ["", f"{'stage':36}{'share':>12}{'p50 ms':>14}{'p99 ms':>14}"]
    for stage in stage_shares(good):
        share = f"({percent(stage.share)})" if stage.is_part else f"{percent(stage.share)} "
        title = f"{'  ' * stage.is_part}{stage.name}"
        lines.append(f"{title[:35]:36}{share:>13}{milliseconds(stage.p50_s):>13}{milliseconds(stage.p99_s):>14}")
    words = (
        "Shares of the time from the intended instant to the last token; those in brackets lie inside or beside other "
        "stages."
    )
    return [*lines, *_wrapped(words, 0)]


def _group_lines(title: str, groups: Figures) -> list[str]:
    if not groups:
        return []
    lines = ["", f"{title:20}{'count':>10}{'failed':>10}{'good':>10}{'TTFT p50':>10}{'TTFT p99':>10}{'E2E p50':>10}"]
    for name, own in list(groups.items())[:MAX_KINDS]:
        cells = [f"{own['count']:,}", f"{own['failed']:,}", percent(own["attainment"])]
        cells += [milliseconds(own["ttft"].get(share)) for share in ("p50", "p99")]
        cells.append(milliseconds(own["e2e"].get("p50")))
        lines.append(f"{printable(name)[:19]:20}" + "".join(f"{cell:>10}" for cell in cells))
    if len(groups) > MAX_KINDS:
        lines.append(f"and {len(groups) - MAX_KINDS:,} more")
    return lines


def _error_lines(errors: Figures) -> list[str]:
    rows = []
    for name, count in list(errors["kinds"].items())[:MAX_KINDS]:
        example = printable(errors["examples"].get(name, ""))
        example = example if len(example) <= MAX_MESSAGE else example[:MAX_MESSAGE] + "…"
        rows.append(("failure", f"{printable(name)} x {count:,}{': ' + example if example else ''}"))
    if len(errors["kinds"]) > MAX_KINDS:
        rows.append(("failure", f"and {counted(len(errors['kinds']) - MAX_KINDS, 'more kind')}"))
    return _named(rows)


def verdict_lines(report: Report) -> list[str]:
    """The sentences of ``headline.alerts``, the most important one last, where the prompt follows."""
    return [line for alert in reversed(alerts(report)) for line in _wrapped(printable(alert.text))]
