"""Which pictures a report shows, and of what."""

import itertools
import re
from collections.abc import Sequence

import numpy as np

from scripts.load.records import Record
from scripts.load.report import Report
from scripts.load.svg import Chart, Points
from scripts.load.table import milliseconds

Picture = tuple[str, str]  # title, svg
MAX_BARS = 240
UTILISATION = re.compile(r"running|waiting|usage|free_pages|cached_pages|in_flight|queue|num_requests|busy|util", re.I)
COUNTERS = re.compile(r"_total\b|_count\b|_total\{|_count\{")


def of_run(report: Report) -> list[tuple[str, str, list[Picture]]]:
    """Sections of a run: title, what is seen, pictures."""
    records = report.records
    good = [record for record in report.measured if record.is_ok and record.stamps_s]
    return [
        ("Over time", "Each dot is a request, at the instant for which it was intended.", over_time(records)),
        ("Distributions", "Share of requests (of gaps) that took at most so long.", distributions(good)),
        ("Requests", "Each bar is a request: waiting for its first token, then decoding.", gantt(records)),
        ("Stages", "Median of each, by the server's own clock, and what the client saw.", waterfall(report, good)),
        ("Server", "The server's own metrics during the run.", server(report)),
    ]  # fmt: skip


def by_rate(reports: Sequence[Report]) -> list[Picture]:
    """Latency and service over the rate, one point per run."""
    ordered = sorted((report for report in reports if report.rate), key=lambda report: report.rate or 0.0)
    charts = []
    for name, title in (("ttft", "Time to first token"), ("itl", "Gap between tokens"), ("e2e", "End to end")):
        chart = Chart("requests/s, intended", "ms", is_log_y=True)
        for colour, share in enumerate(("p50", "p95", "p99")):
            points = [((r.rate or 0.0), r.latency[name][share] * 1e3) for r in ordered if r.latency[name]["count"]]
            chart.line(points, colour, share)
            chart.dots(points, colour)
        charts.append((title, chart.svg()))
    chart = Chart("requests/s, intended", "requests/s")
    chart.line([(r.rate or 0.0, r.throughput["requests_per_s"]) for r in ordered], 0, "answered")
    chart.line([(r.rate or 0.0, r.service["goodput_per_s"]) for r in ordered], 2, "good")
    charts.append(("Throughput and goodput", chart.svg()))
    return charts


def over_time(records: Sequence[Record]) -> list[Picture]:
    """Latency, load and output over the run."""
    good = [record for record in records if record.is_ok and record.stamps_s]
    if not good:
        return []
    first = Chart("s", "ms", is_log_y=True)
    first.dots([(record.intended_s, record.ttft_s * 1e3) for record in good], 0, "time to first token")
    first.line(_rolling([(record.intended_s, record.ttft_s * 1e3) for record in good]), 1, "median of the last 20")
    whole = Chart("s", "ms", is_log_y=True)
    whole.dots([(record.intended_s, record.e2e_s * 1e3) for record in good], 0, "end to end")
    whole.line(_rolling([(record.intended_s, record.e2e_s * 1e3) for record in good]), 1, "median of the last 20")
    gaps = [(at, (at - before) * 1e3) for r in good for before, at in itertools.pairwise(r.stamps_s)]
    decode = Chart("s", "ms", is_log_y=True)
    decode.dots(sorted(gaps), 0, "gap between tokens")
    under_way, tokens = Chart("s", "requests"), Chart("s", "tokens/s")
    under_way.line(_level([(r.intended_s, r.ended_s) for r in records]), 0, "under way")
    under_way.line(_level([(r.intended_s, r.stamps_s[0] if r.stamps_s else r.ended_s) for r in records]), 1, "waiting")
    tokens.line(_per_second(good), 2)
    return [
        ("Time to first token", first.svg()),
        ("Gap between tokens", decode.svg()),
        ("End to end", whole.svg()),
        ("Requests under way, and without a first token yet", under_way.svg()),
        ("Tokens per second", tokens.svg()),
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
            ordered = np.sort(np.array(values)) * 1e3
            if len(ordered):
                chart.line(list(zip(ordered.tolist(), _shares(len(ordered)), strict=True)), colour, name)
        if any(len(values) for values in lines.values()):
            charts.append((title, chart.svg()))
    return charts


def gantt(records: Sequence[Record]) -> list[Picture]:
    """One bar per request; of many, an even selection."""
    step = -(-len(records) // MAX_BARS)
    shown = sorted(records, key=lambda record: record.intended_s)[:: max(1, step)]
    if not shown:
        return []
    chart = Chart(
        "s", f"requests{f', every {step}th' if step > 1 else ''}", height=max(160, min(620, 60 + 5 * len(shown)))
    )
    for row, record in enumerate(shown):
        title = f"#{record.index} {record.class_name} {record.num_input} in, {record.num_output} out {record.error}"
        at = float(-row)
        if record.released_s > record.intended_s:
            chart.bar(at, record.intended_s, record.released_s, 3, title)
        first = record.stamps_s[0] if record.stamps_s else record.ended_s
        chart.bar(at, max(record.intended_s, record.released_s), first, 1, title)
        if record.stamps_s:
            chart.bar(at, first, record.stamps_s[-1], 0, title)
        if record.error:
            chart.bar(at, record.ended_s, record.ended_s, 5, title)
    key = "".join(
        f'<span><i class="c{colour}"></i>{name}</span>'
        for colour, name in ((3, "sent late"), (1, "waiting for the first token"), (0, "decoding"), (5, "failed"))
    )
    return [("Requests by stage", f'<div class="legend">{key}</div>' + chart.svg())]


def waterfall(report: Report, good: Sequence[Record]) -> list[Picture]:
    """Stages as medians; the gap between first and second token, as the client saw it, stands on its own.

    Stages of the prefill leg follow each other, and so do those of the other leg, beside them: both are asked at once.
    What the prefill leg does not account for until the first token is drawn in front of both.
    """
    if not report.stages or not good:
        return []
    legs: tuple[list[tuple[str, float]], list[tuple[str, float]]] = ([], [])
    for name, figures in report.stages.items():
        legs[not name.startswith("prefill")].append((name.removesuffix("_s").replace("_", " "), figures["p50"]))
    first_s = float(np.median([record.ttft_s for record in good]))
    start_s = max(0.0, first_s - sum(length for _, length in legs[0]))
    spans = [("gateway and network", 0.0, start_s), *_one_after_another(legs[0], start_s)]
    spans += _one_after_another(legs[1], start_s)
    gaps = [record.gaps_s[0] for record in good if len(record.stamps_s) > 1]
    steady = [gap for record in good for gap in record.gaps_s[1:]]
    seen = [("first to second token, as seen", gaps), ("steady gap between tokens", steady)]
    spans += _one_after_another([(name, float(np.median(some))) for name, some in seen if some], first_s)
    chart = Chart("ms", "stages", height=60 + 26 * len(spans))
    key = []
    for row, (name, begin_s, length_s) in enumerate(spans):
        title = f"{name} {milliseconds(length_s)} ms"
        chart.bar(float(-row), begin_s * 1e3, (begin_s + length_s) * 1e3, row % 6, title)
        key.append(f'<span><i class="c{row % 6}"></i>{title}</span>')
    return [("From arrival to steady decoding", f'<div class="legend">{"".join(key)}</div>' + chart.svg())]


def _one_after_another(stages: Sequence[tuple[str, float]], begin_s: float) -> list[tuple[str, float, float]]:
    """Name, begin and length of each."""
    begins = itertools.accumulate((length for _, length in stages), initial=begin_s)
    return [(name, begin, length) for (name, length), begin in zip(stages, begins, strict=False)]


def server(report: Report) -> list[Picture]:
    """Gauges that speak of load, by name, with a line for each set of labels."""
    families: dict[str, list[tuple[str, list[list[float]]]]] = {}
    for name, series in report.scrape.items():
        family, _, labels = name.partition("{")
        if UTILISATION.search(family) and not COUNTERS.search(name):
            families.setdefault(family, []).append((labels.rstrip("}"), series))
    charts = []
    for family, lines in itertools.islice(families.items(), 12):
        chart = Chart("s", family[:44])
        for colour, (labels, series) in enumerate(lines[:6]):
            chart.line([(at, value) for at, value in series], colour, labels.replace('"', "") or family)
        charts.append((family, chart.svg()))
    return charts


def _rolling(points: Points, count: int = 20) -> Points:
    ordered = sorted(points)
    values = [value for _, value in ordered]
    return [(at, float(np.median(values[max(0, i - count + 1) : i + 1]))) for i, (at, _) in enumerate(ordered)]


def _level(spans: Sequence[tuple[float, float]]) -> Points:
    """How many spans cover each instant, as steps."""
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    for at, change in edges:
        level = points[-1][1]
        points += [(at, level), (at, level + change)]
    return points


def _per_second(good: Sequence[Record]) -> Points:
    stamps = np.concatenate([record.stamps_s for record in good])
    counts = np.concatenate([record.counts for record in good])
    width = max(0.25, float(stamps.max()) / 200)
    numbers = np.bincount((stamps / width).astype(int), weights=counts)
    return [((i + 0.5) * width, float(number) / width) for i, number in enumerate(numbers)]


def _shares(count: int) -> list[float]:
    return [(rank + 1) / count for rank in range(count)]
