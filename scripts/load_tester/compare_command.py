"""``loadtest --compare BEFORE.json AFTER.json``: prints, draws and writes a comparison."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from common.errors import ConfigError
from scripts.load_tester.analysis.compare import Change, add_verdicts, changes_of
from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.output_files import (
    FINE,
    INVALID,
    REGRESSED,
    TO_STDOUT,
    check_distinct,
    check_file,
    check_folder,
)
from scripts.load_tester.reporting.charts import TitledChart, comparison_charts, rate_charts, write_svgs
from scripts.load_tester.reporting.comparison_report import Pair, comparison_lines, comparison_page
from scripts.load_tester.reporting.report import read_json, write_json


def compare_command(words: Sequence[str]) -> int:
    """Parse the options and run the comparison; return the exit status."""

    @click.command(context_settings={"max_content_width": 110})
    @click.option("--compare", nargs=2, required=True, metavar="BEFORE.json AFTER.json")
    @click.option(
        "--threshold",
        default=0.05,
        show_default=True,
        type=click.FloatRange(0.0),
        help="Smaller changes do not count: of latencies as a share, of good requests as a difference.",
    )
    @click.option(
        "--json",
        "path",
        help="Write the comparison; - for standard output, with all other lines on standard error.",
        metavar="FILE",
    )
    @click.option("--html", "page", help="Write it as one self-contained page, side by side.", metavar="FILE")
    @click.option("--svg", "folder", help="Write each picture as an SVG file into this folder.", metavar="FOLDER")
    def command(compare: tuple[str, str], threshold: float, **out: str | None) -> int:
        """Compare two reports, or two sweeps rate by rate. Exit status 3 if a run was invalid, else 4 if anything got
        significantly worse."""
        return _run(*compare, threshold=threshold, out=out)

    try:
        words = ["--help"] if "--help" in words else list(words)  # also where it stands in place of the two files
        status = command.main(words, prog_name="loadtest", standalone_mode=False)
        return int(status or 0)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None


def _run(first: str, second: str, *, threshold: float, out: dict[str, str | None]) -> int:
    if math.isnan(threshold):
        raise ConfigError("--threshold must be a number")
    files = [("--json", None if out["path"] == TO_STDOUT else out["path"]), ("--html", out["page"])]
    for flag, path in files:
        check_file(path, flag)
    check_distinct([("--compare", first), ("--compare", second)], files)
    check_folder(out["folder"], "--svg")
    sides = [(Path(name).stem, read_json(name)) for name in (first, second)]
    try:  # everything that reads the two files
        runs = _paired(sides[0][1], sides[1][1])
        found = add_verdicts([changes_of(before, after) for _, before, after in runs], threshold)
        pairs = [Pair(*run, own) for run, own in zip(runs, found, strict=True)]
        lines = [line for pair in pairs for line in comparison_lines(pair)]
        reasons = _reasons([name for name, _ in sides], runs)
        names, charts = _charts(sides) if out["page"] or out["folder"] else ([], [])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"--compare: {first} and {second} must be reports of this version: {error!r}") from None
    print("\n".join(lines), file=sys.stderr if out["path"] == TO_STDOUT else sys.stdout)
    if out["path"]:
        fields = Change.__dataclass_fields__
        flat = [
            {"rate": pair.title} | {name: getattr(one, name) for name in fields}
            for pair in pairs
            for one in pair.changes
        ]
        write_json({"changes": flat}, out["path"])
    if out["page"]:
        written = comparison_page(names, pairs, charts, reasons=reasons, threshold=threshold)
        Path(out["page"]).write_text(written, encoding="utf-8")
    if out["folder"]:
        write_svgs(charts, out["folder"])
    print("\n".join(reasons), file=sys.stderr, end="\n" if reasons else "")
    if reasons:
        return INVALID
    return REGRESSED if any(change.verdict == "worse" for own in found for change in own) else FINE


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

    Raises ConfigError: a run and a sweep, or sweeps without a common rate.
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


def _charts(sides: Sequence[tuple[str, Figures]]) -> tuple[list[str], list[TitledChart]]:
    """Distinct names for the two reports, and their charts."""
    names = [name for name, _ in sides]
    if names[0] == names[1]:
        names = [f"{names[0]} before", f"{names[1]} after"]
    reports = dict(zip(names, (side for _, side in sides), strict=True))
    if "runs" in sides[0][1]:
        return names, rate_charts({name: report["runs"] for name, report in reports.items()})
    return names, comparison_charts(reports)
