"""``--compare BEFORE.json AFTER.json``: what changed, and whether the change is significant.

Latencies are compared by the ratio of a statistic, with a block bootstrap interval; shares of good and of failed
requests by the difference of two proportions. If the queue of one run grew to the end, its requests are all correlated,
and only a change by more than a factor of two is judged, with the spread of the other run. A figure has *regressed* if
it is worse by more than the threshold with p < 0.05 after Holm's correction over all compared figures; without the
correction a sweep of ten rates would regress against itself.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from common.errors import ConfigError
from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.output_files import FINE, INVALID, REGRESSED, check_file, check_folder
from scripts.load_tester.reporting.report import read_json, write_json

if TYPE_CHECKING:
    from scripts.load_tester.reporting.charts import TitledChart

STATISTICS: dict[str, Callable[[stats.Floats], float]] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.quantile(values, 0.5)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}
MIN_FOR_P99 = 200  # with fewer requests p99 is close to the maximum, and says little about the next run
MIN_FREE = 10  # with fewer independent requests the spread is unknown
MIN_FREE_FOR_P99 = 50
MIN_FOR_ONE_SIDED = 20
SIGNIFICANCE = 0.05
FAILED, GOOD = "failed requests", "good requests"
TITLES = {"ttft": "time to first token", "itl": "gap between tokens", "tpot": "time per token", "e2e": "end to end"}
#: Options that do not change the load.
NOT_LOAD = {
    "json", "jsonl", "html", "parquet", "url", "save_outputs", "svg", "expect_file", "live", "scrape",
    "scrape_interval", "clients",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One figure before and after.

    Attributes:
        ratio, low, high: after over before, with its 95 % interval; for shares the difference.
        p: probability of such a change by chance, corrected for all comparisons.
        verdict: better, worse or same; "unknown" where the data do not suffice.
    """

    name: str
    unit: str
    before: float
    after: float
    ratio: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    verdict: str = "unknown"


def compare(before: Figures, after: Figures, threshold: float) -> list[Change]:
    """Compare all figures that both reports have."""
    return add_verdicts([changes_of(before, after)], threshold)[0]


def add_verdicts(pairs: Sequence[Sequence[Change]], threshold: float) -> list[list[Change]]:
    """Add verdicts to the changes of several pairs of runs, corrected for their number."""
    every = [change for changes in pairs for change in changes]
    known = [place for place, change in enumerate(every) if change.p is not None]
    for place, p in zip(known, stats.holm([every[place].p or 0.0 for place in known]), strict=True):
        every[place] = replace(every[place], p=p, verdict=_verdict(every[place], p, threshold))
    rest = iter(every)
    return [[next(rest) for _ in changes] for changes in pairs]


def _verdict(change: Change, p: float, threshold: float) -> str:
    """Judge one change; the threshold does not apply to failed requests."""
    is_share = change.unit == "share"
    worse_by = change.ratio - (0.0 if is_share else 1.0)
    worse_by = -worse_by if change.name == GOOD else worse_by
    if p > SIGNIFICANCE or abs(worse_by) <= (0.0 if change.name == FAILED else threshold):
        return "same"
    return "worse" if worse_by > 0 else "better"


def changes_of(before: Figures, after: Figures) -> list[Change]:
    """Changes of all figures that both reports have, each with its own p and no verdict yet."""
    rng = np.random.default_rng(0)
    changes = []
    for name, title in TITLES.items():
        a, b = (_blocks(side["samples"][name]) for side in (before, after))
        if not a.size or not b.size:
            continue
        num_requests = min(len(side["samples"][name]) for side in (before, after))
        is_enough = min(a.num_free, b.num_free) >= MIN_FREE
        for label, statistic in STATISTICS.items():
            if label == "p99" and num_requests < MIN_FOR_P99:
                continue
            one, other = statistic(a.values), statistic(b.values)
            change = Change(f"{title} {label}", "s", one, other, other / one if one else 1.0)
            if is_enough and (label != "p99" or min(a.num_free, b.num_free) >= MIN_FREE_FOR_P99):
                found = stats.ratio(a, b, statistic, rng)
                change = replace(change, ratio=found.value, low=found.low, high=found.high, p=found.p)
            elif (
                num_requests >= MIN_FOR_ONE_SIDED and max(a.num_free, b.num_free) >= MIN_FREE and one > 0 and other > 0
            ):
                steady, jammed = (a, b) if a.num_free > b.num_free else (b, a)
                p = stats.far_p(steady, statistic, jammed.num_clusters, change.ratio, rng)
                change = replace(change, p=p if p <= SIGNIFICANCE else None)
            changes.append(change)
    failed = [(side["errors"]["count"], side["num_measured"]) for side in (before, after)]
    good = [(side["service"]["good"], side["service"]["count"]) for side in (before, after)]
    return [
        *changes,
        _share(FAILED, failed, is_judged=True),
        _share(GOOD, good, is_judged=_limits_agree(before, after), free=_free(before, after)),
    ]


def _blocks(samples: Sequence[float | list[float]]) -> stats.Blocks:
    """Group the samples of each request."""
    return stats.Blocks([np.atleast_1d(np.asarray(sample, dtype=np.float64)) for sample in samples])


def _limits_agree(before: Figures, after: Figures) -> bool:
    """Whether both runs have the same limits."""
    sides = [(side["service"].get("limits_s"), side.get("config", {}).get("mix")) for side in (before, after)]
    return sides[0] == sides[1]


def _free(before: Figures, after: Figures) -> float:
    """Share of requests that count as independent, of the run with fewer; 1 where a report does not say."""
    shares = [1.0]
    for service in (before["service"], after["service"]):
        shares.append(float(service.get("num_free", service["count"])) / max(1, service["count"]))
    return min(shares)


def _share(name: str, counts: Sequence[tuple[int, int]], *, is_judged: bool, free: float = 1.0) -> Change:
    """Compare a share of requests, given as (count, total) before and after.

    Args:
        free: share of requests that count as independent; at least ``MIN_FREE`` requests count.
    """
    (one, of_one), (other, of_other) = counts
    shares = one / max(1, of_one), other / max(1, of_other)
    sizes = [max(min(count, MIN_FREE), free * count) for count in (of_one, of_other)]
    change, low, high = stats.difference(shares[0] * sizes[0], sizes[0], shares[1] * sizes[1], sizes[1])
    is_judged = is_judged and of_one > 0 and of_other > 0
    p = stats.difference_p(shares[0] * sizes[0], sizes[0], shares[1] * sizes[1], sizes[1]) if is_judged else None
    return Change(name, "share", *shares, change, low, high, p)


def compare_command(words: Sequence[str]) -> int:
    """Run ``loadtest --compare``; return the exit status."""

    @click.command(context_settings={"max_content_width": 110})
    @click.option("--compare", nargs=2, required=True, metavar="BEFORE.json AFTER.json")
    @click.option(
        "--threshold",
        default=0.05,
        show_default=True,
        type=click.FloatRange(0.0),
        help="Smaller changes do not count: of latencies as a share, of good requests as a difference.",
    )
    @click.option("--json", "path", help="Write the comparison.", metavar="FILE")
    @click.option("--html", "page", help="Write it as one self-contained page, side by side.", metavar="FILE")
    @click.option("--svg", "folder", help="Write each picture as an SVG file into this folder.", metavar="FOLDER")
    def command(compare: tuple[str, str], threshold: float, **out: str | None) -> int:
        """Compare two reports, or two sweeps rate by rate. Exit status 3 if a run was invalid, else 4 if anything got
        significantly worse."""
        return _run(*compare, threshold=threshold, out=out)

    try:
        status = command.main(list(words), prog_name="loadtest", standalone_mode=False)
        return int(status or 0)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None


def _run(first: str, second: str, *, threshold: float, out: dict[str, str | None]) -> int:
    if math.isnan(threshold):
        raise ConfigError("--threshold must be a number")
    for flag, path in (("--json", out["path"]), ("--html", out["page"])):
        check_file(path, flag)
        if path and Path(path).resolve() in (Path(first).resolve(), Path(second).resolve()):
            raise ConfigError(f"--compare and {flag} name the same file, {path}")
    check_folder(out["folder"], "--svg")
    sides = [(Path(name).stem, read_json(name)) for name in (first, second)]
    try:  # everything that reads the two files
        pairs = _paired(sides[0][1], sides[1][1])
        found = add_verdicts([changes_of(before, after) for _, before, after in pairs], threshold)
        lines = [line for pair, own in zip(pairs, found, strict=True) for line in _titled(pair, own)]
        reasons = _reasons([name for name, _ in sides], pairs)
        names, charts = _charts(sides) if out["page"] or out["folder"] else ([], [])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"--compare: {first} and {second} must be reports of this version: {error!r}") from None
    print("\n".join(lines))
    if out["path"]:
        fields = Change.__dataclass_fields__
        flat = [
            {"rate": title} | {name: getattr(one, name) for name in fields}
            for (title, *_), own in zip(pairs, found, strict=True)
            for one in own
        ]
        write_json({"changes": flat}, out["path"])
    _draw(names, charts, lines, out)
    print("\n".join(reasons), file=sys.stderr, end="\n" if reasons else "")
    if reasons:
        return INVALID
    return REGRESSED if any(change.verdict == "worse" for own in found for change in own) else FINE


def _titled(pair: tuple[str, Figures, Figures], changes: list[Change]) -> list[str]:
    title, before, after = pair
    return ([f"\n{title}"] if title else []) + lines_of(changes, before, after)


def _reasons(names: Sequence[str], pairs: Sequence[tuple[str, Figures, Figures]]) -> list[str]:
    """Why runs are invalid, a line for each."""
    return [
        f"{name}{f', {title}' if title else ''} is not a valid run: {side['reasons'][0]}"
        for title, *both in pairs
        for name, side in zip(names, both, strict=True)
        if not side["is_valid"]
    ]


def _paired(before: Figures, after: Figures) -> list[tuple[str, Figures, Figures]]:
    """Pair the two runs, or the runs of two sweeps by rate.

    Raises:
        ConfigError: a run and a sweep, or sweeps without a common rate.
    """
    if ("runs" in before) != ("runs" in after):
        raise ConfigError("--compare: one file is a sweep or a search and the other a single run: name two of a kind")
    if "runs" not in before:
        return [("", before, after)]
    first, second = (_by_rate(side["runs"]) for side in (before, after))
    pairs = [(title, run, second[title]) for title, run in first.items() if title in second]
    if not pairs:
        raise ConfigError("--compare: the two have no rate in common")
    return pairs


def _by_rate(runs: Sequence[Figures]) -> dict[str, Figures]:
    """Runs by rate; a search makes several runs at one rate."""
    found: dict[str, Figures] = {}
    for run in runs:
        title = f"{run['config']['rate']}/s"
        tries = sum(other == title or other.startswith(title + ",") for other in found)
        found[title + (f", try {tries + 1}" if tries else "")] = run
    return found


def _charts(sides: Sequence[tuple[str, Figures]]) -> tuple[list[str], list["TitledChart"]]:
    """Distinct names for the two reports, and their charts."""
    from scripts.load_tester.reporting.charts import comparison_charts, rate_charts

    names = [name for name, _ in sides]
    if names[0] == names[1]:
        names = [f"{names[0]} before", f"{names[1]} after"]
    reports = dict(zip(names, (side for _, side in sides), strict=True))
    if "runs" in sides[0][1]:
        return names, rate_charts({name: report["runs"] for name, report in reports.items()})
    return names, comparison_charts(reports)


def _draw(names: Sequence[str], charts: Sequence["TitledChart"], lines: list[str], out: dict[str, str | None]) -> None:
    """Write the page and the charts that are asked for."""
    from scripts.load_tester.reporting.charts import write_svgs
    from scripts.load_tester.reporting.html_report import comparison_page

    if out["page"]:
        Path(out["page"]).write_text(comparison_page(names, lines, charts), encoding="utf-8")
    if out["folder"]:
        write_svgs(charts, out["folder"])


def lines_of(changes: list[Change], before: Figures, after: Figures) -> list[str]:
    """The comparison as text, side by side."""
    lines = [f"{'':28}{'before':>12}{'after':>12}{'change':>12}   95 % interval"]
    for one in changes:
        if one.unit == "s":
            cells = f"{one.before * 1e3:10.2f}ms{one.after * 1e3:10.2f}ms{one.ratio - 1:>+12.1%}"
            interval = f"{one.low - 1:+.1%} to {one.high - 1:+.1%}" if one.low is not None and one.high else ""
        else:
            cells = f"{one.before:12.2%}{one.after:12.2%}{one.ratio * 100:>+8.1f} pts"
            interval = f"{(one.low or 0) * 100:+.1f} to {(one.high or 0) * 100:+.1f} points"
        mark = {"worse": "  REGRESSED", "better": "  better", "same": "", "unknown": "  not judged"}[one.verdict]
        lines.append(f"{one.name:28}{cells}   {interval}{mark}")
    for title, name in (("requests/s", "requests_per_s"), ("tokens/s out", "output_tokens_per_s")):
        a, b = before["throughput"][name], after["throughput"][name]
        lines.append(f"{title:28}{a:12.4g}{b:12.4g}{(b / a - 1) if a else 0.0:>+12.1%}   not judged")
    return lines + _differences(before, after) + _too_few(changes)


def _too_few(changes: Sequence[Change]) -> list[str]:
    if not any(change.p is None and change.unit == "s" for change in changes):
        return []
    return [
        "",
        f"not judged: successive requests were slow together and count for fewer than {MIN_FREE} independent ones "
        f"({MIN_FREE_FOR_P99} for p99). Make the runs longer.",
    ]


def _differences(before: Figures, after: Figures) -> list[str]:
    """Options and server facts that differ between the runs."""
    names = dict.fromkeys([*before["config"], *after["config"]])
    pairs = [(name, before["config"].get(name), after["config"].get(name)) for name in names if name not in NOT_LOAD]
    pairs += [(f"server's {name}", before["server"].get(name), after["server"].get(name)) for name in ("model", "kind")]
    differing = [f"{name}: {one!r} before, {other!r} after" for name, one, other in pairs if one != other]
    return ["", "the two runs had different options or servers:", *differing] if differing else []
