"""The comparison of two runs, or of two sweeps rate by rate, as lines on the terminal and as a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.load_tester.analysis.compare import MIN_FREE, MIN_FREE_FOR_P99, Change
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.reporting.charts import TitledChart
from scripts.load_tester.reporting.formats import milliseconds, per_second, percent
from scripts.load_tester.reporting.headline import Alert, Tile, Tone
from scripts.load_tester.reporting.html_report import Cell, Row, Table, render
from scripts.load_tester.reporting.report import command_of

#: Options that do not change the load.
NOT_LOAD = {
    "json", "jsonl", "html", "url", "svg", "expect_file", "live", "scrape",
    "scrape_interval", "clients",
}  # fmt: skip
VERDICTS: dict[str, tuple[str, Tone]] = {
    "worse": ("REGRESSED", "bad"), "better": ("better", "good"), "same": ("", ""), "unknown": ("not judged", ""),
}  # fmt: skip
#: Rates: unit, name in the report, title.
RATES = (("requests/s", "requests_per_s", "Throughput"), ("tokens/s", "output_tokens_per_s", "Output"))
#: Figures of the tiles: name in ``Change``, title.
TILES = (
    ("time to first token p50", "TTFT p50"),
    ("time to first token p99", "TTFT p99"),
    ("gap between tokens p99", "ITL p99"),
)


@dataclass(frozen=True)
class Pair:
    """Two runs of one load; ``title`` is their rate if they belong to a sweep."""

    title: str
    before: Figures
    after: Figures
    changes: Sequence[Change]


def comparison_lines(pair: Pair) -> list[str]:
    """The comparison as text, side by side, in at most 80 columns."""
    lines = [f"{'':24}{'before':>8}{'after':>8}{'change':>10} {'':10} 95% interval"]
    for one in pair.changes:
        before, after, change, interval = _cells(one)
        mark = VERDICTS[one.verdict][0]
        lines.append(f"{one.name:24}{before:>8}{after:>8}{change:>10} {mark:10} {interval}".rstrip())
    for title, name, _ in RATES:
        a, b = (side["throughput"][name] for side in (pair.before, pair.after))
        lines.append(f"{title:24}{per_second(a):>8}{per_second(b):>8}{(b / a - 1) if a else 0.0:>+10.1%}")
    lines = ([f"\n{pair.title}"] if pair.title else []) + [*lines, "Latencies in milliseconds; rates are not judged."]
    differing = [
        f"  {name}: {one!r} before, {other!r} after" for name, one, other in differences(pair.before, pair.after)
    ]
    few = ["", *too_few(pair.changes)] if too_few(pair.changes) else []
    return lines + (["", "the two runs had different options or servers:", *differing] if differing else []) + few


def _cells(one: Change) -> tuple[str, str, str, str]:
    """Before, after, change and its 95 % interval."""
    if one.unit == "s":
        known = one.low is not None and one.high is not None
        interval = f"{(one.low or 0) - 1:+.1%} to {(one.high or 0) - 1:+.1%}" if known else ""
        return milliseconds(one.before), milliseconds(one.after), f"{one.ratio - 1:+.1%}", interval
    interval = f"{(one.low or 0) * 100:+.1f} to {(one.high or 0) * 100:+.1f} pts"
    return percent(one.before), percent(one.after), f"{one.ratio * 100:+.1f} pts", interval


def too_few(changes: Sequence[Change]) -> list[str]:
    """Why some latencies are not judged; empty if all are."""
    if not any(change.p is None and change.unit == "s" for change in changes):
        return []
    return [
        f"not judged: successive requests were slow together and count for fewer than {MIN_FREE}",
        f"independent ones ({MIN_FREE_FOR_P99} for p99). Make the runs longer.",
    ]


def differences(before: Figures, after: Figures) -> list[tuple[str, object, object]]:
    """Options and server facts that differ between the runs."""
    names = dict.fromkeys([*before["config"], *after["config"]])
    pairs = [(name, before["config"].get(name), after["config"].get(name)) for name in names if name not in NOT_LOAD]
    pairs += [(f"server's {name}", before["server"].get(name), after["server"].get(name)) for name in ("model", "kind")]
    return [(name, one, other) for name, one, other in pairs if one != other]


# ---- the page -------------------------------------------------------------------------------------------------------


def comparison_page(
    names: Sequence[str],
    pairs: Sequence[Pair],
    charts: Sequence[TitledChart],
    *,
    reasons: Sequence[str],
    threshold: float,
) -> str:
    """The page of two runs, or two sweeps, side by side.

    Args:
        names: of the two.
        reasons: why runs are invalid, a sentence for each.
    """
    return render(
        "comparison.html.j2",
        title=f"{names[0]} before, {names[1]} after",
        threshold=f"{threshold * 100:g}%",
        runs=[_described(name, side) for name, side in zip(names, (pairs[0].before, pairs[0].after), strict=True)],
        alerts=_alerts(pairs, reasons),
        tiles=_tiles(pairs[0]) if len(pairs) == 1 else [],
        tables=[(pair.title or "Figures", _table(pair)) for pair in pairs],
        differences=[(f"Different options {pair.title}".strip(), _differing(pair)) for pair in pairs],
        charts=charts,
    )


def _described(name: str, side: Figures) -> tuple[str, str, str]:
    """Name, server with the date, and command line of a run."""
    server = [
        side["server"].get("model"),
        side["server"].get("version"),
        side["config"].get("url"),
        side.get("started_at"),
    ]
    return name, ", ".join(str(word) for word in server if word), command_of(side["config"])


def _alerts(pairs: Sequence[Pair], reasons: Sequence[str]) -> list[Alert]:
    def named(verdict: str) -> list[str]:
        return [
            f"{one.name}{f' at {pair.title}' if pair.title else ''}"
            for pair in pairs
            for one in pair.changes
            if one.verdict == verdict
        ]

    worse, better = named("worse"), named("better")
    found = [Alert("bad", f"INVALID: {reason}") for reason in reasons]
    if worse:
        found.append(Alert("bad", f"Regressed: {', '.join(worse)}."))
    if better:
        found.append(Alert("good", f"Better: {', '.join(better)}."))
    if not worse and not better:
        found.append(Alert("", "No figure changed significantly."))
    for pair in pairs:
        if words := too_few(pair.changes):
            found.append(Alert("warn", f"{pair.title} {' '.join(words)}".strip()))
        if different := [name for name, _, _ in differences(pair.before, pair.after)]:
            found.append(Alert("warn", f"{pair.title} The two had different options: {', '.join(different)}.".strip()))
    return found


def _tiles(pair: Pair) -> list[Tile]:
    changes = {one.name: one for one in pair.changes}
    good = changes["good requests"]
    found = [_tile("Good requests", good, "", "within all limits")]
    for unit, name, title in RATES:
        a, b = (side["throughput"][name] for side in (pair.before, pair.after))
        change = f"{b / a - 1:+.1%}" if a else ""
        found.append(Tile(title, per_second(b), unit, "not judged", note=f"before: {per_second(a)}", judgement=change))
    return found + [_tile(title, changes[name], "ms", name) for name, title in TILES if name in changes]


def _tile(title: str, change: Change, unit: str, meaning: str) -> Tile:
    before, after, words, interval = _cells(change)
    verdict, tone = VERDICTS[change.verdict]
    return Tile(title, after, unit, meaning, interval, f"before: {before}", f"{words} {verdict}".strip(), tone)


def _table(pair: Pair) -> Table:
    rows = []
    for one in pair.changes:
        before, after, change, interval = _cells(one)
        unit = " ms" if one.unit == "s" else ""
        words, tone = VERDICTS[one.verdict]
        cells = [Cell(before + unit), Cell(after + unit), Cell(change, interval), Cell(words or "same", tone=tone)]
        rows.append(Row(one.name, cells))
    for title, name, _ in RATES:
        a, b = (side["throughput"][name] for side in (pair.before, pair.after))
        change = f"{b / a - 1:+.1%}" if a else ""
        rows.append(Row(title, [Cell(per_second(a)), Cell(per_second(b)), Cell(change), Cell("not judged")]))
    return Table.of(("figure", "before", "after", "change, 95% interval", "verdict"), rows)


def _differing(pair: Pair) -> Table:
    rows = [Row(name, [Cell(str(one), is_long=True), Cell(str(other), is_long=True)]) for name, one, other in
            differences(pair.before, pair.after)]  # fmt: skip
    return Table.of(("option", "before", "after"), rows, is_words=True)
