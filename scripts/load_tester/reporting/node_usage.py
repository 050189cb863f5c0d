"""Charts of each node's utilisation, from the server's metrics.

Counters of busy seconds become shares, counters of tokens become rates, page counts become the share of the pool in
use. Other gauges whose names suggest load are shown as they are.
"""

import re

from scripts.load_tester.reporting.svg import Chart, Points, number

Series = dict[str, list[list[float]]]  # "name{labels}" to [seconds, value], ...
Lines = list[tuple[str, Points]]  # name of the node, points
UTILISATION = re.compile(r"running|waiting|usage|in_flight|queue|num_requests|busy|util|processing|deferred", re.I)
COUNTERS = re.compile(r"_total$|_count$|_seconds$")
MAX_LINES, MAX_CHARTS = 6, 12
MAX_LABEL = 32  # letters that fit beside a chart
STALE_S = 4.0


def node_charts(scrape: Series) -> list[tuple[str, Chart]]:
    """Title and chart of busy time, pages, tokens computed, and other gauges of load."""
    found = [
        ("Busy with steps, share of the time", "share", _rates(scrape, "busy_seconds_total"), (0.0, 1.0)),
        ("KV pages in use, share of the pool", "share", _pages(scrape), (0.0, 1.0)),
        ("Prompt tokens computed per second", "tokens/s", _rates(scrape, "node_prompt_tokens_computed_total"), None),
        ("Output tokens per second", "tokens/s", _rates(scrape, "node_output_tokens_total"), None),
    ]
    charts = [(_of(title, lines), _chart(unit, lines, bounds)) for title, unit, lines, bounds in found if lines]
    families: dict[str, Lines] = {}
    for name, series in scrape.items():
        family = name.partition("{")[0]
        if UTILISATION.search(family) and not COUNTERS.search(family):
            families.setdefault(family, []).append((_node(name), [(at, value) for at, value in series]))
    charts += [
        (_of(_title(family), lines), _chart(family[:MAX_LABEL], lines, None)) for family, lines in families.items()
    ]
    return charts[:MAX_CHARTS]


def _of(title: str, lines: Lines) -> str:
    return title if len(lines) <= MAX_LINES else f"{title} (the first {MAX_LINES} of {len(lines)})"


def _title(family: str) -> str:
    """A metric's name in words without the server's prefix: ``sglang:num_running_reqs`` is Num running reqs."""
    words = re.split(r"[:_]+", family)
    return " ".join(words[1:] or words).capitalize()


def _chart(label: str, lines: Lines, bounds: tuple[float, float] | None) -> Chart:
    node, most = max(((name, max(value for _, value in points)) for name, points in lines), key=lambda pair: pair[1])
    highest = f"{min(most, bounds[1]):.0%}" if bounds else number(most)
    chart = Chart("seconds since the start of the run", label, y=bounds, finding=f"at most {highest} ({node})")
    for colour, (name, points) in enumerate(lines[:MAX_LINES]):
        chart.line(points, colour, name)
        if len(points) == 1:  # a line does not show a single point
            chart.dots(points, colour)
    return chart


def _node(name: str) -> str:
    """Distinguish a series of a family: by the node's name, else by its labels."""
    node = re.search(r'\bnode="([^"]*)"', name)
    return node.group(1) if node else name.partition("{")[2].rstrip("}").replace('"', "") or name


def _family(scrape: Series, ending: str) -> dict[str, list[list[float]]]:
    return {_node(name): series for name, series in scrape.items() if name.partition("{")[0].endswith(ending)}


def _rates(scrape: Series, ending: str) -> Lines:
    """Rates of counters per second.

    A server may refresh a counter less often than it is read, so a rate holds from one change to the next. A counter
    without a change for longer than ``STALE_S`` has a rate of 0.
    """
    lines: Lines = []
    for node, series in _family(scrape, ending).items():
        points: list[tuple[float, float]] = []
        moved_at, value = series[0]
        for at, now in series[1:]:
            if now < value:  # the node was replaced and counts from 0 again
                moved_at, value = at, now
            elif now > value or at - moved_at > STALE_S:
                rate = (now - value) / (at - moved_at)
                points += [(moved_at, rate), (at, rate)]
                moved_at, value = at, now
        lines.append((node, points))
    return [(node, points) for node, points in lines if points]


def _pages(scrape: Series) -> Lines:
    """Share of pages that requests hold: neither free nor only cached."""
    names = ("node_pages", "node_free_pages", "node_evictable_pages")
    every, free, cached = (_family(scrape, ending) for ending in names)
    lines: Lines = []
    for node, series in every.items():
        idle: list[dict[float, float]] = [dict(map(_pair, side.get(node, []))) for side in (free, cached)]
        if idle[0]:
            lines.append((node, [(at, 1 - sum(s.get(at, 0.0) for s in idle) / pages) for at, pages in series if pages]))
    return lines


def _pair(sample: list[float]) -> tuple[float, float]:
    return sample[0], sample[1]
