"""Which pictures a report shows, and of what."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from scripts.load_tester.analysis import stage_timeline as stages
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.node_usage import node_charts
from scripts.load_tester.analysis.records import Record
from scripts.load_tester.reporting.files import Report
from scripts.load_tester.reporting.svg import Chart, Points
from scripts.load_tester.reporting.text_report import milliseconds

Picture = tuple[str, Chart]  # with its title
MAX_BARS = 240
NUM_CLOSE = 40
WIDE = 1300
MAX_ROLLING = 1000
LEAST_MS = 0.1  # tokens that came together have no gap, and a logarithmic axis no 0


def of_run(report: Report) -> list[tuple[str, str, bool, list[Picture]]]:
    """Sections of a run: title, what is seen, whether its pictures take the whole width, pictures."""
    records = report.records
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    return [
        ("Over time", "Each dot is a request, at the instant for which it was intended, warm-up and cool-down "
         "included; of too many to draw, the fastest and the slowest of each stretch. Failed ones lie on the "
         "axis; what took less than 0.1 ms is drawn as that.", False, over_time(records)),
        ("Distributions", "Share of requests (of gaps) that took at most so long; less than 0.1 ms is drawn as "
         "that.", False, distributions(good)),
        ("Requests", "Each bar is a request, from its intended instant to its last token.", True, gantt(records)),
        ("Stages", "Medians, by the server's own clocks and the client's. The way to the first token is filled up "
         "with what the server did not account for.", True, waterfall(good)),
        ("Nodes", "The server's own metrics during the run.", False, node_charts(report.scrape)),
    ]  # fmt: skip


def by_rate(sweeps: Mapping[str, Sequence[Figures]]) -> list[Picture]:
    """Latency and service over the rate, one point per run; of several sweeps, one colour each.

    Args:
        sweeps: reports as they are in the JSON, by the name of their sweep; the name is shown if there are several.
    """
    charts: list[Picture] = []
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
        chart.line(done, number, "answered" + end, is_dashed=True)  # over it, so that both are seen where they agree
    charts.append(("Throughput and goodput by rate", chart))
    return charts


def _by_rate(runs: Sequence[Figures]) -> list[Figures]:
    """Those that have a rate, in its order: a search goes up and down."""
    return sorted((run for run in runs if run["rate"]), key=lambda run: float(run["rate"]))


def _invalid(chart: Chart, points: Points) -> None:
    """Grey, and in no line: of such runs nobody knows what the server would have done."""
    if points:
        chart.keys["invalid"] = INVALID
        chart.dots(points, INVALID)


def rated(reports: Sequence[Report]) -> list[Figures]:
    """What ``by_rate`` needs of reports."""
    names = ("rate", "is_valid", "latency", "throughput", "service")
    return [{name: getattr(report, name) for name in names} for report in reports]


def over_time(records: Sequence[Record]) -> list[Picture]:
    """Latency, load and output over the run."""
    good = [record for record in records if record.is_ok and record.stamps_s]
    if not good:
        return []
    x = (0.0, 1.02 * max(record.ended_s for record in records))  # of all, so that they can be read side by side
    first, whole, decode = (Chart("s", "ms", x=x, is_log_y=True) for _ in range(3))
    first.dots([(record.intended_s, _ms(record.ttft_s)) for record in good], 0, "time to first token")
    first.line(_rolling([(record.intended_s, _ms(record.ttft_s)) for record in good]), 1, "median of the last 20")
    whole.dots([(record.intended_s, _ms(record.e2e_s)) for record in good], 0, "end to end")
    whole.line(_rolling([(record.intended_s, _ms(record.e2e_s)) for record in good]), 1, "median of the last 20")
    lost = [(record.intended_s, 0.0) for record in records if record.error and record.error != "halted"]
    for chart in (first, whole) if lost else ():  # on the axis itself, since they have no latency
        chart.dots(lost, FAILED, "failed")
    gaps = [(at, _ms(at - before)) for r in good for before, at in itertools.pairwise(r.stamps_s)]
    decode.dots(sorted(gaps), 0, "gap between tokens")
    under_way, tokens = Chart("s", "requests", x=x), Chart("s", "tokens/s", x=x)
    under_way.line(_level([(r.intended_s, r.ended_s) for r in records]), 0, "under way")
    under_way.line(_level([(r.intended_s, r.stamps_s[0] if r.stamps_s else r.ended_s) for r in records]), 1, "waiting")
    tokens.line(_per_second(good, x[1]), 2)
    return [
        ("Time to first token", first),
        ("Gap between tokens", decode),
        ("End to end", whole),
        ("Requests under way, and without a first token yet", under_way),
        ("Tokens per second", tokens),
    ]


def distributions(good: Sequence[Record]) -> list[Picture]:
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


#: Colour of each stage in the Gantt chart, with its name in the legend; others share the first.
STAGE_COLOURS = {
    stages.LATE: 3, stages.GATEWAY: 6, stages.UNTIMED: 6, "queue": 4, "prefill queue": 4, "prefill": 1,
    stages.WAITING: 1, stages.FIRST_GAP: 2, stages.STEADY: 0,
}  # fmt: skip
FAILED, INVALID = 5, 6


def distributions_of(runs: Mapping[str, Figures]) -> list[Picture]:
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


def gantt(records: Sequence[Record]) -> list[Picture]:
    """One bar per request, in its stages: of many an even selection, and those beside the fullest instant closely."""
    ordered = sorted(records, key=lambda record: record.intended_s)
    if not ordered:
        return []
    step = -(-len(ordered) // MAX_BARS)
    charts = [("Requests by stage", _bars(ordered[::step], f"requests{f', every {step}th' if step > 1 else ''}"))]
    if len(ordered) > 2 * NUM_CLOSE:
        close = _busiest(ordered, NUM_CLOSE)
        charts.append((f"{NUM_CLOSE} requests where most were under way", _bars(close, "requests")))
    return charts


def _busiest(ordered: Sequence[Record], count: int) -> Sequence[Record]:
    """So many that follow each other, with the request in their middle that met most others."""
    points = _level([(record.intended_s, record.ended_s) for record in ordered])
    fullest_at, _ = max(points, key=lambda point: point[1])
    middle = sum(record.intended_s < fullest_at for record in ordered)
    begin = max(0, min(middle - count // 2, len(ordered) - count))
    return ordered[begin : begin + count]


def _bars(records: Sequence[Record], label: str) -> Chart:
    chart = Chart("s", label, height=max(160, min(620, 60 + 5 * len(records))), width=WIDE)
    for row, record in enumerate(records):
        title = f"#{record.index} {record.class_name} {record.num_input} in, {record.num_output} out {record.error}"
        for span in stages.spans_of(record) if record.stamps_s else _lost(record):
            if span.name in STAGE_COLOURS and span.length_s > 0:
                chart.keys[span.name] = colour = STAGE_COLOURS[span.name]
                end_s = record.stamps_s[-1] if span.name == stages.STEADY else record.intended_s + span.end_s
                begin_s = record.intended_s + span.begin_s
                chart.bar(float(-row), begin_s, end_s, colour, f"{span.name}: {title}")
        if record.error:
            chart.keys["failed"] = FAILED
            chart.bar(float(-row), record.ended_s, record.ended_s, FAILED, title)
    return chart


def _lost(record: Record) -> list[stages.Span]:
    """Of a request that never brought a token: it waited until it failed."""
    return [stages.Span(stages.WAITING, 0.0, record.ended_s - record.intended_s)]


def waterfall(good: Sequence[Record]) -> list[Picture]:
    """The stages on the way to steady decoding, one below the other, each at its median begin and length."""
    if not any(record.timings for record in good):
        return []
    spans = stages.median_spans(good)
    rows = {float(-row): f"{span.name}  {milliseconds(span.length_s)} ms" for row, span in enumerate(spans)}
    chart = Chart(
        "ms since the intended instant", "stages", height=60 + 24 * len(spans), width=WIDE, left=250, rows=rows
    )
    for row, span in enumerate(spans):
        colour = STAGE_COLOURS.get(span.name, 3)
        chart.bar(float(-row), span.begin_s * 1e3, span.end_s * 1e3, colour, rows[float(-row)])
    return [("From arrival to steady decoding", chart)]


def _rolling(points: Points, count: int = 20) -> Points:
    """The median of so many points up to each, in order of x; of many points only so often as can be seen."""
    ordered = sorted(points)
    values = np.array([value for _, value in ordered])
    step = -(-len(ordered) // MAX_ROLLING)
    return [
        (ordered[i][0], float(np.median(values[max(0, i - count + 1) : i + 1]))) for i in range(0, len(values), step)
    ]


def _level(spans: Sequence[tuple[float, float]]) -> Points:
    """How many spans cover each instant, as steps."""
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    for at, change in edges:
        level = points[-1][1]
        points += [(at, level), (at, level + change)]
    return points


def _ms(seconds: float) -> float:
    return max(seconds * 1e3, LEAST_MS)


def _per_second(good: Sequence[Record], end_s: float) -> Points:
    stamps = np.concatenate([record.stamps_s for record in good])
    counts = np.concatenate([record.tokens_per_count * np.array(record.counts) for record in good])
    width = max(0.25, end_s / 200)
    numbers = np.bincount((stamps / width).astype(int), weights=counts, minlength=int(end_s / width))
    return [((i + 0.5) * width, float(number) / width) for i, number in enumerate(numbers)]


def _shares(count: int) -> list[float]:
    return [(rank + 1) / count for rank in range(count)]


def write_svgs(charts: Sequence[Picture], folder: str) -> list[str]:
    """Each as a file of its own, named by its title; the paths."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / ("-".join(re.findall(r"[a-z0-9]+", title.lower())) + ".svg") for title, _ in charts]
    for path, (title, chart) in zip(paths, charts, strict=True):
        path.write_text(chart.file(title), encoding="utf-8")
    return [str(path) for path in paths]
