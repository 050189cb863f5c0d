"""The charts of a report."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from scripts.load_tester.analysis import stage_timeline
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.reporting.node_usage import node_charts
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.reporting.svg import Chart, Points
from scripts.load_tester.reporting.text_report import milliseconds

TitledChart = tuple[str, Chart]  # with its title
MAX_BARS = 240
NUM_CLOSE = 40
WIDE = 1300
MAX_ROLLING = 1000
LEAST_MS = 0.1  # tokens received together have no gap, and a logarithmic axis has no 0


def run_sections(report: Report) -> list[tuple[str, str, bool, list[TitledChart]]]:
    """Sections of a run: title, explanation, whether charts take the whole width, charts."""
    records = report.records
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    return [
        ("Over time", "Each dot is a request, at its intended instant, warm-up and cool-down included; of too "
         "many requests to draw, the fastest and the slowest of each stretch. Failed requests lie on the axis. Less "
         "than 0.1 ms is drawn as 0.1 ms.", False, timeline_charts(records)),
        ("Distributions", "Share of requests (or gaps) that took at most this long; less than 0.1 ms drawn as 0.1 ms.",
         False, distribution_charts(good)),
        ("Requests", "Each bar is a request, from its intended instant to its last token.", True,
         gantt_charts(records)),
        ("Stages", "Medians, by the clocks of server and client. The first gap is what the server "
         "did not account for.", True, waterfall_charts(good)),
        ("Nodes", "The server's own metrics during the run.", False, node_charts(report.scrape)),
    ]  # fmt: skip


def rate_charts(sweeps: Mapping[str, Sequence[Figures]]) -> list[TitledChart]:
    """Latency and service over the rate, one point per run and one colour per sweep.

    Args:
        sweeps: reports as in the JSON, by the name of their sweep, which is shown if there are several.
    """
    charts: list[TitledChart] = []
    for name, title in (("ttft", "Time to first token"), ("itl", "Gap between tokens"), ("e2e", "End to end")):
        chart = Chart("requests/s, intended", "ms", is_log_y=True)
        for number, (sweep, runs) in enumerate(sweeps.items()):
            answered = [run for run in _by_rate(runs) if run["latency"][name]["count"]]
            for place, share in enumerate(("p50", "p95", "p99") if len(sweeps) == 1 else ("p50", "p99")):
                colour = place if len(sweeps) == 1 else number
                points = [(run["rate"], _ms(run["latency"][name][share])) for run in answered if run["is_valid"]]
                label = f"{sweep} {share}" if len(sweeps) > 1 else share
                chart.line(points, colour, label, is_dashed=len(sweeps) > 1 and share == "p50")
                chart.dots(points, colour)
                _invalid(chart, [(r["rate"], _ms(r["latency"][name][share])) for r in answered if not r["is_valid"]])
        charts.append((f"{title} by rate", chart))
    chart = Chart("requests/s, intended", "requests/s")
    for number, (sweep, runs) in enumerate(sweeps.items()):
        end = f", {sweep}" if len(sweeps) > 1 else ""
        valid = [run for run in _by_rate(runs) if run["is_valid"]]
        chart.line([(run["rate"], run["service"]["goodput_per_s"]) for run in valid], number + 2, "good" + end)
        done = [(run["rate"], run["throughput"]["requests_per_s"]) for run in valid]
        chart.line(done, number, "answered" + end, is_dashed=True)  # last, so that both stay visible
    charts.append(("Throughput and goodput by rate", chart))
    return charts


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


def timeline_charts(records: Sequence[RequestRecord]) -> list[TitledChart]:
    """Latency, load and output over the run."""
    good = [record for record in records if record.is_ok and record.stamps_s]
    if not good:
        return []
    x = (0.0, 1.02 * max(record.ended_s for record in records))  # the same for all charts
    first, whole, decode = (Chart("s", "ms", x=x, is_log_y=True) for _ in range(3))
    first.dots([(record.intended_s, _ms(record.ttft_s)) for record in good], 0, "time to first token")
    first.line(_rolling([(record.intended_s, _ms(record.ttft_s)) for record in good]), 1, "median of the last 20")
    whole.dots([(record.intended_s, _ms(record.e2e_s)) for record in good], 0, "end to end")
    whole.line(_rolling([(record.intended_s, _ms(record.e2e_s)) for record in good]), 1, "median of the last 20")
    lost = [(record.intended_s, 0.0) for record in records if record.error and record.error != "halted"]
    for chart in (first, whole) if lost else ():  # on the axis, since failures have no latency
        chart.dots(lost, FAILED, "failed")
    gaps = [(at, _ms(at - before)) for r in good for before, at in itertools.pairwise(r.stamps_s)]
    decode.dots(sorted(gaps), 0, "gap between tokens")
    under_way, tokens = Chart("s", "requests", x=x), Chart("s", "tokens/s", x=x)
    under_way.line(_level([(r.intended_s, r.ended_s) for r in records]), 0, "in flight")
    under_way.line(_level([(r.intended_s, r.stamps_s[0] if r.stamps_s else r.ended_s) for r in records]), 1, "waiting")
    tokens.line(_per_second(good, x[1]), 2)
    return [
        ("Time to first token", first),
        ("Gap between tokens", decode),
        ("End to end", whole),
        ("Requests in flight, and those without a first token yet", under_way),
        ("Tokens per second", tokens),
    ]


def distribution_charts(good: Sequence[RequestRecord]) -> list[TitledChart]:
    """Cumulative distributions, from the intended instant and from the send."""
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
    for title, lines in samples.items():
        chart = Chart("ms", "share", y=(0.0, 1.0), is_log_x=True)
        for colour, (name, values) in enumerate(lines.items()):
            ordered = np.maximum(np.sort(np.array(values)) * 1e3, LEAST_MS)
            if len(ordered):
                chart.line(list(zip(ordered.tolist(), _shares(len(ordered)), strict=True)), colour, name)
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
        chart = Chart("ms", "share", y=(0.0, 1.0), is_log_x=True)
        for colour, (run, figures) in enumerate(runs.items()):
            values = np.sort(np.concatenate([np.empty(0), *map(np.atleast_1d, figures["samples"][name])])) * 1e3
            values = np.maximum(values, LEAST_MS)
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
    charts = [("Requests by stage", _bars(ordered[::step], f"requests{f', every {step}th' if step > 1 else ''}"))]
    if len(ordered) > 2 * NUM_CLOSE:
        close = _busiest(ordered, NUM_CLOSE)
        charts.append((f"{NUM_CLOSE} requests around the highest concurrency", _bars(close, "requests")))
    return charts


def _busiest(ordered: Sequence[RequestRecord], count: int) -> Sequence[RequestRecord]:
    """Successive requests around the instant with most requests in flight."""
    points = _level([(record.intended_s, record.ended_s) for record in ordered])
    fullest_at, _ = max(points, key=lambda point: point[1])
    middle = sum(record.intended_s < fullest_at for record in ordered)
    begin = max(0, min(middle - count // 2, len(ordered) - count))
    return ordered[begin : begin + count]


def _bars(records: Sequence[RequestRecord], label: str) -> Chart:
    chart = Chart("s", label, height=max(160, min(620, 60 + 5 * len(records))), width=WIDE)
    for row, record in enumerate(records):
        title = f"#{record.index} {record.class_name} {record.num_input} in, {record.num_output} out {record.error}"
        for span in stage_timeline.spans_of(record) if record.stamps_s else _lost(record):
            if span.name in STAGE_COLOURS and span.length_s > 0:
                chart.keys[span.name] = colour = STAGE_COLOURS[span.name]
                end_s = record.stamps_s[-1] if span.name == stage_timeline.STEADY else record.intended_s + span.end_s
                begin_s = record.intended_s + span.begin_s
                chart.bar(float(-row), begin_s, end_s, colour, f"{span.name}: {title}")
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
        "ms since the intended instant", "stages", height=60 + 24 * len(spans), width=WIDE, left=250, rows=rows
    )
    for row, span in enumerate(spans):
        colour = STAGE_COLOURS.get(span.name, 3)
        chart.bar(float(-row), span.begin_s * 1e3, span.end_s * 1e3, colour, rows[float(-row)])
    return [("From arrival to steady decoding", chart)]


def _rolling(points: Points, count: int = 20) -> Points:
    """Rolling median over ``count`` points, in order of x, thinned to ``MAX_ROLLING`` points."""
    ordered = sorted(points)
    values = np.array([value for _, value in ordered])
    step = -(-len(ordered) // MAX_ROLLING)
    return [
        (ordered[i][0], float(np.median(values[max(0, i - count + 1) : i + 1]))) for i in range(0, len(values), step)
    ]


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


def write_svgs(charts: Sequence[TitledChart], folder: str) -> list[str]:
    """Write each chart to a file named by its title; return the paths."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / ("-".join(re.findall(r"[a-z0-9]+", title.lower())) + ".svg") for title, _ in charts]
    for path, (title, chart) in zip(paths, charts, strict=True):
        path.write_text(chart.file(title), encoding="utf-8")
    return [str(path) for path in paths]
