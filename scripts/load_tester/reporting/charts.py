"""The charts of a report."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from scripts.load_tester.analysis import stage_timeline
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.reporting.formats import limit, milliseconds, per_second, percent
from scripts.load_tester.reporting.node_usage import node_charts
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.reporting.svg import RIGHT, Chart, Points

TitledChart = tuple[str, Chart]  # with its title
START = "seconds since the start of the run"
RATE = "requests/s, intended"
MAX_BARS = 240
NUM_CLOSE = 40
WIDE = 960
MAX_ROLLING = 1000
LEAST_MS = 0.1  # tokens received together have no gap, and a logarithmic axis has no 0


def run_sections(report: Report) -> list[tuple[str, str, bool, list[TitledChart]]]:
    """Sections of a run: title, explanation, whether charts take the whole width, charts."""
    records, limits = report.records, report.service["limits_s"]
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    return [
        ("Over time", "Each dot is one request at its intended instant (or one gap between tokens), warm-up and "
         "cool-down included. Of too many to draw, the fastest and the slowest of each stretch are shown. Failed "
         "requests lie on the axis. Less than 0.1 ms is drawn as 0.1 ms.", False, timeline_charts(records, limits)),
        ("Distributions", "How many requests (or gaps) took at most this long: where a line crosses 0.5 is the median "
         "(p50), at 0.99 the 99th percentile (p99).", False, distribution_charts(good, limits)),
        ("Each request", "One bar for each request, from its intended instant to its last token, in the colours of its "
         "stages; the time is in seconds since the start of the run.", True, gantt_charts(records)),
        ("Nodes", "The server's own metrics during the run.", False, node_charts(report.scrape)),
    ]  # fmt: skip


def run_charts(report: Report) -> list[TitledChart]:
    """All charts of a run: those of its page, and the stages, which the page shows as a table."""
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    return [*(one for *_, charts in run_sections(report) for one in charts), *waterfall_charts(good)]


def rate_charts(sweeps: Mapping[str, Sequence[Figures]]) -> list[TitledChart]:
    """Latency and service over the rate, one point per run and one colour per sweep.

    Args:
        sweeps: reports as in the JSON, by the name of their sweep, which is shown if there are several.
    """
    charts: list[TitledChart] = []
    for name, title in (("ttft", "Time to first token"), ("itl", "Gap between tokens"), ("e2e", "End to end")):
        every = [run for runs in sweeps.values() for run in runs]
        finding = _by_rate_finding(name, every) if len(sweeps) == 1 else ""
        chart = Chart(RATE, f"{title.lower()}, ms", is_log_y=True, finding=finding)
        for number, (sweep, runs) in enumerate(sweeps.items()):
            answered = [run for run in _by_rate(runs) if run["latency"][name]["count"]]
            for place, share in enumerate(("p50", "p95", "p99") if len(sweeps) == 1 else ("p50", "p99")):
                colour = place if len(sweeps) == 1 else number
                points = [(run["rate"], _ms(run["latency"][name][share])) for run in answered if run["is_valid"]]
                label = f"{sweep} {share}" if len(sweeps) > 1 else share
                chart.line(points, colour, label, is_dashed=len(sweeps) > 1 and share == "p50")
                chart.dots(points, colour)
                _invalid(chart, [(r["rate"], _ms(r["latency"][name][share])) for r in answered if not r["is_valid"]])
        _add_limit(chart, "y", every[0]["service"].get("limits_s", {}).get(name) if every else None)
        charts.append((f"{title} by rate", chart))
    good = [run["service"]["goodput_per_s"] for runs in sweeps.values() for run in runs if run["is_valid"]]
    finding = f"at most {per_second(max(good))} good requests/s" if good and len(sweeps) == 1 else ""
    chart = Chart(RATE, "requests/s", finding=finding)
    for number, (sweep, runs) in enumerate(sweeps.items()):
        end = f", {sweep}" if len(sweeps) > 1 else ""
        valid = [run for run in _by_rate(runs) if run["is_valid"]]
        chart.line([(run["rate"], run["service"]["goodput_per_s"]) for run in valid], number + 2, "good" + end)
        done = [(run["rate"], run["throughput"]["requests_per_s"]) for run in valid]
        chart.line(done, number, "answered" + end, is_dashed=True)  # last, so that both stay visible
    charts.append(("Throughput and goodput by rate", chart))
    return charts


def attainment_charts(runs: Sequence[Figures], target: float) -> list[TitledChart]:
    """The share of good requests over the rate, with 95 % intervals: what a search decides by."""
    known = [run for run in _by_rate(runs) if run["is_valid"] and run["service"].get("limits_s")]
    if not known:
        return []
    points = [(run["rate"], run["service"]["attainment"]) for run in known]
    holding = [f"at {rate:.4g}/s" for rate, share in points if share >= target]
    finding = f"{percent(target)} reached {', '.join(holding) if len(holding) < 4 else f'in {len(holding)} runs'}"
    chart = Chart(
        RATE,
        "share of good requests",
        y=(0.0, 1.05),
        finding=finding if holding else f"{percent(target)} never reached",
    )
    for run in known:
        low, high = run["service"]["attainment_ci"]
        chart.interval(run["rate"], low, high, 2)
    chart.dots(points, 2, "one run, with its 95% interval")
    chart.limit("y", target, f"objective {percent(target)}")
    return [("Good requests by rate", chart)]


def search_charts(reports: Sequence[Report]) -> list[TitledChart]:
    """The charts of a sweep or a search."""
    figures = rate_figures(reports)
    return attainment_charts(figures, reports[0].target) + rate_charts({"": figures})


def _by_rate_finding(name: str, runs: Sequence[Figures]) -> str:
    """How p99 moves from the lowest to the highest rate."""
    known = [run for run in _by_rate(runs) if run["is_valid"] and run["latency"][name]["count"]]
    if len(known) < 2:
        return ""
    first, last = known[0], known[-1]
    ends = [f"{milliseconds(run['latency'][name]['p99'])} ms at {run['rate']:.4g}/s" for run in (first, last)]
    return f"p99 {' and '.join(ends)}"


def _add_limit(chart: Chart, axis: Literal["x", "y"], value: float | None) -> None:
    if value is not None:
        chart.limit(axis, value * 1e3, f"limit {limit(value)}")


def _by_rate(runs: Sequence[Figures]) -> list[Figures]:
    """Runs with a rate, in ascending order: a search goes up and down."""
    return sorted((run for run in runs if run["rate"]), key=lambda run: float(run["rate"]))


def _invalid(chart: Chart, points: Points) -> None:
    """Draw invalid runs as grey dots without a line: they say nothing about the server."""
    if points:
        chart.keys["invalid"] = INVALID
        chart.dots(points, INVALID)


def rate_figures(reports: Sequence[Report]) -> list[Figures]:
    """The part of reports that ``rate_charts`` needs."""
    names = ("rate", "is_valid", "latency", "throughput", "service")
    return [{name: getattr(report, name) for name in names} for report in reports]


def timeline_charts(
    records: Sequence[RequestRecord], limits: Mapping[str, float] = MappingProxyType({})
) -> list[TitledChart]:
    """Latency, load and output over the run; ``limits`` in seconds, by ttft, itl and e2e."""
    good = [record for record in records if record.is_ok and record.stamps_s]
    if not good:
        return []
    x = (0.0, 1.02 * max(record.ended_s for record in records))  # the same for all charts
    values = {
        "time to first token": [record.ttft_s for record in good],
        "end to end": [record.e2e_s for record in good],
        "gap between tokens": [gap for record in good for gap in record.gaps_s],
    }
    first, whole, decode = (
        Chart(START, f"{words}, ms", x=x, is_log_y=True, finding=_extremes(some)) for words, some in values.items()
    )
    first.dots([(record.intended_s, _ms(record.ttft_s)) for record in good], 0, "time to first token")
    first.line(_rolling([(record.intended_s, _ms(record.ttft_s)) for record in good]), 1, "median of the last 20")
    whole.dots([(record.intended_s, _ms(record.e2e_s)) for record in good], 0, "end to end")
    whole.line(_rolling([(record.intended_s, _ms(record.e2e_s)) for record in good]), 1, "median of the last 20")
    lost = [(record.intended_s, 0.0) for record in records if record.error and record.error != "halted"]
    for chart in (first, whole) if lost else ():  # on the axis, since failures have no latency
        chart.dots(lost, FAILED, "failed")
    gaps = [(at, _ms(at - before)) for r in good for before, at in itertools.pairwise(r.stamps_s)]
    decode.dots(sorted(gaps), 0, "gap between tokens")
    for name, chart in (("ttft", first), ("e2e", whole), ("itl", decode)):
        _add_limit(chart, "y", limits.get(name))
    in_flight = _level([(r.intended_s, r.ended_s) for r in records])
    waiting = _level([(r.intended_s, r.stamps_s[0] if r.stamps_s else r.ended_s) for r in records])
    most = [max(level for _, level in levels) for levels in (in_flight, waiting)]
    under_way = Chart(START, "requests", x=x, finding=f"at most {most[0]:,.0f} and {most[1]:,.0f}")
    under_way.line(in_flight, 0, "in flight")
    under_way.line(waiting, 1, "waiting for the first token")
    rates = _per_second(good, x[1])
    highest = per_second(max(rate for _, rate in rates))
    tokens = Chart(START, "output tokens/s", x=x, finding=f"{highest} at the highest")
    tokens.line(rates, 2)
    return [
        ("Time to first token", first),
        ("Gap between tokens", decode),
        ("End to end", whole),
        ("Requests in flight, and those without a first token yet", under_way),
        ("Tokens per second", tokens),
    ]


def _extremes(values: Sequence[float]) -> str:
    """The median and the largest of some durations in seconds; empty without any."""
    if not values:
        return ""
    return f"median {milliseconds(float(np.median(values)))} ms, slowest {milliseconds(max(values))} ms"


def distribution_charts(
    good: Sequence[RequestRecord], limits: Mapping[str, float] = MappingProxyType({})
) -> list[TitledChart]:
    """Cumulative distributions, from the intended instant and from the send; ``limits`` as in ``timeline_charts``."""
    if not good:
        return []
    samples = {
        "Time to first token": {
            "from the intended instant": [r.ttft_s for r in good],
            "from the send": [r.stamps_s[0] - r.released_s for r in good],
        },
        "Gap between tokens": {
            "all": [gap for r in good for gap in r.gaps_s],
            "first to second": [r.gaps_s[0] for r in good if len(r.stamps_s) > 1],
        },
        "Time per output token": {"": [tpot for r in good if (tpot := r.tpot_s) is not None]},
        "End to end": {
            "from the intended instant": [r.e2e_s for r in good],
            "from the send": [r.stamps_s[-1] - r.released_s for r in good],
        },
    }
    charts = []
    for short, (title, lines) in zip(("ttft", "itl", "tpot", "e2e"), samples.items(), strict=True):
        headline = next(iter(lines.values()))
        finding = f"99% within {milliseconds(float(np.quantile(headline, 0.99)))} ms" if headline else ""
        chart = Chart(f"{title.lower()}, ms", "share of all", y=(0.0, 1.0), is_log_x=True, finding=finding)
        _add_limit(chart, "x", limits.get(short))
        for colour, (name, values) in enumerate(lines.items()):
            ordered = np.maximum(np.sort(np.array(values)) * 1e3, LEAST_MS)
            points = list(zip(ordered.tolist(), _shares(len(ordered)), strict=True))
            if points:
                chart.line(points, colour, name)
            if len(points) == 1:  # a line does not show a single point
                chart.dots(points, colour)
        if any(len(values) for values in lines.values()):
            charts.append((f"{title}, distribution", chart))
    return charts


#: Colour of each stage in the Gantt chart.
STAGE_COLOURS = {
    stage_timeline.LATE: 3,
    stage_timeline.GATEWAY: 6,
    stage_timeline.UNTIMED: 6,
    "queue": 4,
    "prefill queue": 4,
    "prefill": 1,
    stage_timeline.WAITING: 1,
    stage_timeline.FIRST_GAP: 2,
    stage_timeline.STEADY: 0,
}
FAILED, INVALID = 5, 6


def comparison_charts(runs: Mapping[str, Figures]) -> list[TitledChart]:
    """Cumulative distributions of several runs, by name, from the samples in their JSON."""
    charts = []
    for name, title in (("ttft", "Time to first token"), ("itl", "Gap between tokens"), ("e2e", "End to end")):
        samples = [np.concatenate([np.empty(0), *map(np.atleast_1d, run["samples"][name])]) for run in runs.values()]
        medians = [f"{milliseconds(float(np.median(values)))} ms" for values in samples if len(values)]
        finding = f"medians {' and '.join(medians)}" if medians else ""
        chart = Chart(f"{title.lower()}, ms", "share of all", y=(0.0, 1.0), is_log_x=True, finding=finding)
        for colour, (run, own) in enumerate(zip(runs, samples, strict=True)):
            values = np.maximum(np.sort(own) * 1e3, LEAST_MS)
            if len(values):
                chart.line(list(zip(values.tolist(), _shares(len(values)), strict=True)), colour, run)
        charts.append((f"{title}, distribution", chart))
    return charts


def gantt_charts(records: Sequence[RequestRecord]) -> list[TitledChart]:
    """One bar per request in its stages: an even selection, and a close view around the highest concurrency."""
    ordered = sorted(records, key=lambda record: record.intended_s)
    if not ordered:
        return []
    step = -(-len(ordered) // MAX_BARS)
    charts = [("Requests by stage", _bars(ordered[::step], f"requests{f', one of {step}' if step > 1 else ''}"))]
    if len(ordered) > 2 * NUM_CLOSE:
        close = _busiest(ordered, NUM_CLOSE)
        x = (close[0].intended_s, max(record.ended_s for record in close))
        charts.append((f"{NUM_CLOSE} requests around the highest concurrency", _bars(close, "requests", x)))
    return charts


def _busiest(ordered: Sequence[RequestRecord], count: int) -> Sequence[RequestRecord]:
    """Successive requests around the instant with most requests in flight."""
    points = _level([(record.intended_s, record.ended_s) for record in ordered])
    fullest_at, _ = max(points, key=lambda point: point[1])
    middle = sum(record.intended_s < fullest_at for record in ordered)
    begin = max(0, min(middle - count // 2, len(ordered) - count))
    return ordered[begin : begin + count]


def _bars(records: Sequence[RequestRecord], label: str, x: tuple[float, float] | None = None) -> Chart:
    chart = Chart(START, label, x=x, left=RIGHT, height=max(160, min(620, 60 + 5 * len(records))), width=WIDE)
    for row, record in enumerate(records):
        title = f"#{record.index} {record.class_name} {record.num_input} in, {record.num_output} out {record.error}"
        for span in stage_timeline.spans_of(record) if record.stamps_s else _lost(record):
            if span.name in STAGE_COLOURS and span.length_s > 0:
                is_rest = span.name == stage_timeline.STEADY
                name = stage_timeline.REST if is_rest else span.name
                chart.keys[name] = colour = STAGE_COLOURS[span.name]
                end_s = record.stamps_s[-1] if is_rest else record.intended_s + span.end_s
                begin_s = record.intended_s + span.begin_s
                chart.bar(float(-row), begin_s, end_s, colour, f"{name}: {title}")
        if record.error:
            chart.keys["failed"] = FAILED
            chart.bar(float(-row), record.ended_s, record.ended_s, FAILED, title)
    return chart


def _lost(record: RequestRecord) -> list[stage_timeline.Span]:
    """The only stage of a request without output: it waited until it failed."""
    return [stage_timeline.Span(stage_timeline.WAITING, 0.0, record.ended_s - record.intended_s)]


def waterfall_charts(good: Sequence[RequestRecord]) -> list[TitledChart]:
    """The stages up to steady decoding, one below the other, each at its median begin and length."""
    if not any(record.timings for record in good):
        return []
    spans = stage_timeline.median_spans(good)
    rows = {float(-row): f"{span.name}  {milliseconds(span.length_s)} ms" for row, span in enumerate(spans)}
    chart = Chart(
        "ms since the intended instant", "stages", height=60 + 24 * len(spans), width=WIDE, left=290, rows=rows
    )
    for row, span in enumerate(spans):
        colour = STAGE_COLOURS.get(span.name, 3)
        chart.bar(float(-row), span.begin_s * 1e3, span.end_s * 1e3, colour, rows[float(-row)])
    return [("From arrival to steady decoding", chart)]


def _rolling(points: Points) -> Points:
    """Rolling median over 20 points, in order of x, thinned to ``MAX_ROLLING`` points."""
    ordered = sorted(points)
    values = np.array([value for _, value in ordered])
    step = -(-len(ordered) // MAX_ROLLING)
    return [(ordered[i][0], float(np.median(values[max(0, i - 19) : i + 1]))) for i in range(0, len(values), step)]


def _level(spans: Sequence[tuple[float, float]]) -> Points:
    """Number of spans that cover each instant, as steps."""
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    for at, change in edges:
        level = points[-1][1]
        points += [(at, level), (at, level + change)]
    return points


def _ms(seconds: float) -> float:
    return max(seconds * 1e3, LEAST_MS)


def _per_second(good: Sequence[RequestRecord], end_s: float) -> Points:
    stamps = np.concatenate([record.stamps_s for record in good])
    counts = np.concatenate([record.tokens_per_count * np.array(record.counts) for record in good])
    width = max(0.25, end_s / 200)
    numbers = np.bincount((stamps / width).astype(int), weights=counts, minlength=int(end_s / width))
    return [((i + 0.5) * width, float(number) / width) for i, number in enumerate(numbers)]


def _shares(count: int) -> list[float]:
    return [(rank + 1) / count for rank in range(count)]


def write_svgs(charts: Sequence[TitledChart], folder: str) -> None:
    """Write each chart to a file named by its title."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for title, chart in charts:
        name = "-".join(re.findall(r"[a-z0-9]+", title.lower()))
        (place / f"{name}.svg").write_text(chart.file(title), encoding="utf-8")
