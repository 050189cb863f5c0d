"""The report as one page: figures, pictures, configuration. No scripts, no other files, no other hosts.

Made for one run, or for the runs of a sweep or a search, which then come first as rate against latency.
"""

from collections.abc import Sequence
from pathlib import Path

from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.reporting import charts as pictures
from scripts.load_tester.reporting import svg
from scripts.load_tester.reporting.files import Report
from scripts.load_tester.reporting.sanitize import escaped
from scripts.load_tester.reporting.text_report import (
    ROWS,
    fact_lines,
    milliseconds,
    outputs_verdict,
    percent,
    summary_lines,
    verdict_lines,
)

PAGE_STYLE = """
:root { color-scheme: light dark; --page: #fff; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #14181f; --bad: #f97066; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  padding: 2rem 1rem; max-width: 1360px; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
h3 { font-size: .95rem; margin: 0 0 .2rem; } p { margin: .3rem 0; color: var(--soft); } .bad { color: var(--bad); }
.good { color: var(--c2); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 1.6rem; }
.charts .whole { grid-column: 1 / -1; } svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .8rem; color: var(--soft); }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .35em; border-radius: 2px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
.wide { overflow-x: auto; } th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: var(--soft); font-weight: 500; }
table.facts td, table.facts th { text-align: left; }
small { color: var(--soft); } pre { white-space: pre-wrap; font-size: .8rem; } details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--soft); }
"""
MAX_ROWS = 200  # of a table: a trace may have a million tenants
KEYS = "".join(f"i.c{n} {{ background: var(--c{n}) }}" for n in range(7))


def write_html(reports: Sequence[Report], path: str, *, found: str = "") -> None:
    """Write the page."""
    Path(path).write_text(page(reports, found=found), encoding="utf-8")


def page(reports: Sequence[Report], *, found: str = "") -> str:
    """The whole page.

    Args:
        found: what a search found, in a sentence.
    """
    last = reports[-1]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>Load test of {escaped(str(last.server.get('model')))}</title>",
        f"<style>{svg.STYLE}{PAGE_STYLE}{KEYS}</style>",
        f"<h1>Load test of {escaped(str(last.server.get('model') or last.config['url']))}</h1>",
        f"<p>{escaped(last.config['url'])} · {last.started_at} · seed {last.config['seed']}</p>",
    ]
    if len(reports) > 1:
        charts = _charts(pictures.by_rate({"": pictures.rated(reports)}))
        parts.append(f"<p><b>{escaped(found)}</b></p><h2>Rate against latency</h2>{charts}")
        parts += [f"<details><summary>{_title(report)}</summary>{_run(report)}</details>" for report in reports]
    else:
        parts.append(_run(last))
    parts.append(_details("Configuration", _table([[name, str(value)] for name, value in last.config.items()])))
    return "\n".join(parts) + "</html>\n"


def _title(report: Report) -> str:
    """Of one run among several."""
    drawn = f" ({report.rate:.4g}/s as drawn)" if report.rate else ""
    return escaped(f"Run at {report.config['rate']}/s{drawn}{'' if report.is_valid else ': invalid'}")


def comparison_page(names: Sequence[str], lines: Sequence[str], charts: Sequence[pictures.Picture]) -> str:
    """Two runs, or two sweeps, side by side.

    Args:
        lines: what the terminal says about them.
    """
    title = escaped(" and ".join(names))
    text = escaped("\n".join(lines).strip("\n"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{svg.STYLE}{PAGE_STYLE}{KEYS}</style><h1>{title}</h1>"
        f"{_charts(charts)}<h2>Figures</h2><pre>{text}</pre></html>\n"
    )


def _run(report: Report) -> str:
    kind = "bad" if report.all_failed else "" if report.errors["count"] else "good"
    verdict = f'<p class="{kind}">{escaped(verdict_lines(report)[0])}</p>'
    verdict = verdict if report.is_valid else _invalid(report.reasons)
    if report.outputs:
        is_good = report.outputs["is_passed"]
        verdict += f'<p class="{"good" if is_good else "bad"}">{escaped(outputs_verdict(report.outputs))}</p>'
    notes = "".join(f"<p>{escaped(note)}</p>" for note in report.notes)
    parts = [verdict, notes, _latency_table(report.latency), _facts(report)]
    parts += [_groups("Kinds of requests", report.classes), _groups("Tenants", report.tenants), _errors(report)]
    for title, words, is_wide, charts in pictures.of_run(report):
        if charts:
            drawn = _charts(charts, "whole" if is_wide else "")
            parts.append(f"<h2>{escaped(title)}</h2><p>{escaped(words)}</p>{drawn}")
    parts.append(_details("Summary as on the terminal", f"<pre>{escaped(chr(10).join(summary_lines(report)))}</pre>"))
    return "".join(parts)


def _invalid(reasons: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(reason)}</li>" for reason in reasons)
    return f'<div class="bad"><b>This run is invalid:</b><ul>{items}</ul></div>'


def _latency_table(latency: Figures) -> str:
    names = ("mean", "p50", "p90", "p95", "p99", "p99.9")
    rows = []
    above = ""
    for title, name in ROWS:
        figures = latency[name]
        above = title if not title.startswith(" ") else above
        if figures["count"]:
            whole = title if title == above else f"{above}, {title.strip()}"
            rows.append([escaped(whole), *(_with_interval(figures, column) for column in names)])
    head = ["milliseconds (95 % interval)", *names]
    words = (
        "An interval without an end: so few requests have nothing beyond. Those that waited together count as fewer."
    )
    return f'<div class="wide">{_table(rows, head, is_raw=True)}</div><p><small>{words}</small></p>'


def _with_interval(figures: Figures, name: str) -> str:
    low, high = figures[name + "_ci"]
    if low is None and high is None:
        return milliseconds(figures[name])
    ends = [milliseconds(end) for end in (low, high) if end is not None]
    words = " – ".join(ends) if len(ends) == 2 else f"{'from' if high is None else 'to'} {ends[0]}"
    return f"{milliseconds(figures[name])}<br><small>{words}</small>"


def _facts(report: Report) -> str:
    """What the terminal says, but for latencies and groups, which have tables of their own."""
    rows: list[list[str]] = []
    for line in fact_lines(report):
        if line.startswith(" ") and rows:
            rows[-1][1] += "; " + line.strip()
        elif line:
            rows.append([*line.split(None, 1)])
    return "<h2>Facts</h2>" + _table(rows).replace("<table>", '<table class="facts">')


def _groups(title: str, groups: Figures) -> str:
    if not groups:
        return ""
    rows = []
    for name, own in list(groups.items())[:MAX_ROWS]:
        cells = [
            name,
            f"{own['count']:,}",
            f"{own['failed']:,}",
            percent(own["attainment"]),
            f"{own['output_tokens']:,}",
        ]
        cells += [milliseconds(own["ttft"].get(share)) for share in ("p50", "p99")]
        rows.append([*cells, *(milliseconds(own["e2e"].get(share)) for share in ("p50", "p99"))])
    if len(groups) > MAX_ROWS:
        rows.append([f"and {len(groups) - MAX_ROWS:,} more"])
    head = ["ms", "requests", "failed", "good", "tokens out", "TTFT p50", "p99", "end to end p50", "p99"]
    return f'<h2>{title}</h2><div class="wide">{_table(rows, head)}</div>'


def _errors(report: Report) -> str:
    kinds = report.errors["kinds"]
    rows = [[name, f"{count:,}", report.errors["examples"].get(name, "")] for name, count in kinds.items()]
    if len(rows) > MAX_ROWS:
        rows = [*rows[:MAX_ROWS], [f"and {len(rows) - MAX_ROWS:,} more kinds", "", ""]]
    table = _table(rows, ("kind", "requests", "for example")).replace("<table>", '<table class="facts">')
    return f"<h2>Failures</h2>{table}" if rows else ""


def _charts(charts: Sequence[pictures.Picture], kind: str = "") -> str:
    cells = "".join(f'<div class="{kind}"><h3>{escaped(title)}</h3>{chart.svg()}</div>' for title, chart in charts)
    return f'<div class="charts">{cells}</div>'


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), *, is_raw: bool = False) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{cell if is_raw else escaped(cell)}</{tag}>" for cell in row)

    first = f"<tr>{cells(head, 'th')}</tr>" if head else ""
    return f"<table>{first}{''.join(f'<tr>{cells(row, chr(116) + chr(100))}</tr>' for row in rows)}</table>"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{content}</details>"
