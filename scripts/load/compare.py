"""``--compare BEFORE.json AFTER.json``: what changed, and whether chance could have done it.

Latencies are compared by the ratio of a statistic with its bootstrap interval; shares of good and of failed requests by
the difference of two proportions. A figure has *regressed* if it is worse by more than the threshold and the whole
interval says worse.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from common.errors import ConfigError
from scripts.load import stats
from scripts.load.main import FINE, INVALID, REGRESSED
from scripts.load.metrics import Figures
from scripts.load.report import read_json, write_json

STATISTICS: dict[str, Callable[[stats.Floats], float]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.quantile(values, 0.5)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}
MIN_FOR_P99 = 200  # of fewer requests it is as good as the maximum, and says nothing about the next run
TITLES = {"ttft": "time to first token", "itl": "gap between tokens", "tpot": "time per token", "e2e": "end to end"}


@dataclass(frozen=True)
class Change:
    """One figure before and after.

    Attributes:
        ratio, low, high: after over before, with its 95 % interval; of shares the difference.
        verdict: better, worse or same; worse and better only if significant and beyond the threshold.
    """

    name: str
    unit: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str


def compare(before: Figures, after: Figures, threshold: float) -> list[Change]:
    """All figures that both reports have."""
    rng = np.random.default_rng(0)
    changes = []
    for name, title in TITLES.items():
        a, b = (_clusters(side["samples"][name]) for side in (before, after))
        if not a or not b:
            continue
        for label, statistic in STATISTICS.items():
            if label == "p99" and min(len(a), len(b)) < MIN_FOR_P99:
                continue
            ratio, low, high = stats.ratio_interval(a, b, statistic, rng)
            values = statistic(np.concatenate(a)), statistic(np.concatenate(b))
            verdict = _verdict(low, high, 1.0, ratio, threshold)
            changes.append(Change(f"{title} {label}", "s", *values, ratio, low, high, verdict))
    changes.append(_share("failed requests", before["errors"], after["errors"], before, after, threshold))
    changes.append(_attainment(before["service"], after["service"], threshold))
    return changes


def _clusters(samples: Sequence[float | list[float]]) -> list[stats.Floats]:
    """Values that belong together; those of one value each where none do."""
    clusters = [np.atleast_1d(np.asarray(sample, dtype=np.float64)) for sample in samples]
    return [cluster for cluster in clusters if len(cluster)]


def _verdict(low: float, high: float, neutral: float, value: float, threshold: float) -> str:
    if low > neutral and value > neutral + threshold:
        return "worse"
    if high < neutral and value < neutral - threshold:
        return "better"
    return "same"


def _share(name: str, one: Figures, other: Figures, before: Figures, after: Figures, threshold: float) -> Change:
    counts = (before["num_measured"], after["num_measured"])
    difference, low, high = _difference(one["count"], counts[0], other["count"], counts[1])
    verdict = _verdict(low, high, 0.0, difference, threshold)
    return Change(name, "share", one["share"], other["share"], difference, low, high, verdict)


def _attainment(one: Figures, other: Figures, threshold: float) -> Change:
    difference, low, high = _difference(one["good"], one["count"], other["good"], other["count"])
    verdict = _verdict(-high, -low, 0.0, -difference, threshold)
    return Change("good requests", "share", one["attainment"], other["attainment"], difference, low, high, verdict)


def _difference(good_a: int, count_a: int, good_b: int, count_b: int) -> tuple[float, float, float]:
    """Difference of two proportions with Newcombe's 95 % interval (Statistics in Medicine 17, 1998, method 10)."""
    a, b = good_a / max(1, count_a), good_b / max(1, count_b)
    low_a, high_a = stats.proportion_interval(good_a, count_a)
    low_b, high_b = stats.proportion_interval(good_b, count_b)
    difference = b - a
    below = math.sqrt((b - low_b) ** 2 + (high_a - a) ** 2)
    above = math.sqrt((high_b - b) ** 2 + (a - low_a) ** 2)
    return difference, difference - below, difference + above


def compare_command(words: Sequence[str]) -> int:
    """The command line of this form; its exit status."""

    @click.command(context_settings={"max_content_width": 110})
    @click.option("--compare", nargs=2, required=True, metavar="BEFORE.json AFTER.json")
    @click.option("--threshold", default=0.05, show_default=True, help="Changes smaller than this share do not count.")
    @click.option("--json", "path", help="Write the comparison.", metavar="FILE")
    @click.option("--html", "page", help="Write it as one self-contained page, side by side.", metavar="FILE")
    @click.option("--svg", "folder", help="Write each picture as an SVG file into this folder.", metavar="FOLDER")
    def command(compare: tuple[str, str], threshold: float, **out: str | None) -> int:
        """Compare two reports, or two sweeps rate by rate. Exit status 4 if anything got significantly worse, 3 if a
        run was invalid."""
        return _run(*compare, threshold=threshold, out=out)

    try:
        status = command.main(list(words), prog_name="loadtest", standalone_mode=False)
        return int(status or 0)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None


def _run(first: str, second: str, *, threshold: float, out: dict[str, str | None]) -> int:
    sides = [(Path(name).stem, read_json(name)) for name in (first, second)]
    pairs = _paired(sides[0][1], sides[1][1])
    changes = {title: compare(before, after, threshold) for title, before, after in pairs}
    lines = [
        line
        for title, before, after in pairs
        for line in ([f"\n{title}"] if title else []) + lines_of(changes[title], before, after)
    ]
    print("\n".join(lines))
    if out["path"]:
        names = Change.__dataclass_fields__
        flat = [
            {"rate": title} | {name: getattr(one, name) for name in names}
            for title in changes
            for one in changes[title]
        ]
        write_json({"changes": flat}, out["path"])
    _draw(sides, lines, out)
    reasons = [
        f"{name}{f', {title}' if title else ''} is not a valid run: {side['reasons'][0]}"
        for title, *both in pairs
        for (name, _), side in zip(sides, both, strict=True)
        if not side["is_valid"]
    ]
    print("\n".join(reasons), file=sys.stderr, end="\n" if reasons else "")
    if any(change.verdict == "worse" for own in changes.values() for change in own):
        return REGRESSED
    return INVALID if reasons else FINE


def _paired(before: Figures, after: Figures) -> list[tuple[str, Figures, Figures]]:
    """Runs to be set side by side: the two, or those of two sweeps that were made at the same rate.

    Raises:
        ConfigError: a run and a sweep, or no rate in common.
    """
    if ("runs" in before) != ("runs" in after):
        raise ConfigError("one is a sweep or a search and the other a single run: compare like with like")
    if "runs" not in before:
        return [("", before, after)]
    by_rate = [{run["config"]["rate"]: run for run in side["runs"]} for side in (before, after)]
    pairs = [(f"{rate}/s", run, by_rate[1][rate]) for rate, run in by_rate[0].items() if rate in by_rate[1]]
    if not pairs:
        raise ConfigError("the two have no rate in common")
    return pairs


def _draw(sides: Sequence[tuple[str, Figures]], lines: Sequence[str], out: dict[str, str | None]) -> None:
    """The page and the pictures, if they are asked for."""
    if not (out["page"] or out["folder"]):
        return
    from scripts.load.html import comparison_page
    from scripts.load.pictures import by_rate, distributions_of, write_svgs

    names = [name for name, _ in sides]
    if names[0] == names[1]:
        names = [f"{names[0]} before", f"{names[1]} after"]
    whole = dict(zip(names, (side for _, side in sides), strict=True))
    is_sweep = "runs" in sides[0][1]
    charts = by_rate({name: side["runs"] for name, side in whole.items()}) if is_sweep else distributions_of(whole)
    if out["page"]:
        Path(out["page"]).write_text(comparison_page(names, lines, charts), encoding="utf-8")
    if out["folder"]:
        write_svgs(charts, out["folder"])


def lines_of(changes: list[Change], before: Figures, after: Figures) -> list[str]:
    """Side by side."""
    lines = [f"{'':28}{'before':>12}{'after':>12}{'change':>10}   95 % interval"]
    for one in changes:
        if one.unit == "s":
            cells = f"{one.before * 1e3:10.2f}ms{one.after * 1e3:10.2f}ms{one.ratio - 1:>+10.1%}"
            interval = f"{one.low - 1:+.1%} to {one.high - 1:+.1%}"
        else:
            cells = f"{one.before:12.2%}{one.after:12.2%}{one.ratio:>+10.1%}"
            interval = f"{one.low:+.1%} to {one.high:+.1%}"
        mark = {"worse": "  REGRESSED", "better": "  better", "same": ""}[one.verdict]
        lines.append(f"{one.name:28}{cells}   {interval}{mark}")
    for title, name in (("requests/s", "requests_per_s"), ("tokens/s out", "output_tokens_per_s")):
        a, b = before["throughput"][name], after["throughput"][name]
        lines.append(f"{title:28}{a:12.4g}{b:12.4g}{(b / a - 1) if a else 0.0:>+10.1%}")
    differing = [
        f"{name}: {before['config'].get(name)!r} before, {value!r} after"
        for name, value in after["config"].items()
        if value != before["config"].get(name)
        and name not in ("json", "jsonl", "html", "parquet", "url", "save_outputs", "svg", "expect_file")
    ]
    return lines + (["", "the two runs were asked for different things:", *differing] if differing else [])
