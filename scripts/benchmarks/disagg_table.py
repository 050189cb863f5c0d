"""The table of ``bench disagg``: every arrangement at every rate, and how each compares with the first.

Runs of several rounds are pooled: a percentile is that of all their samples together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ARRANGEMENTS = {
    "split": "1 prefill + 1 decode",
    "colocated": "2 colocated",
    "colocated-128": "2 colocated, chunks of 128",
    "one": "1 colocated, all threads",
}

#: What another engine did with the same load, on two cores of another machine: TTFT p50, inter-token p50 and p99 in s.
REFERENCE_RATE = 0.5
REFERENCE = {"ttft_p50": 0.81, "itl_p50": 0.066, "itl_p99": 0.806}
REFERENCE_NAME = "vLLM 0.32, colocated (*)"
FOOTNOTE = "(*) measured on two cores of another machine, for orientation only: its ratio to anything here says little"

COLUMNS = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "p99",
    "itl_p50": "inter-token p50",
    "itl_p99": "p99",
    "e2e_p50": "whole p50",
    "e2e_p99": "p99",
}
WIDTHS = {"ttft_p50": 10, "ttft_p99": 9, "itl_p50": 17, "itl_p99": 9, "e2e_p50": 11, "e2e_p99": 9}
NAME_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Cell:
    """One arrangement at one rate, over all rounds. Times in seconds.

    Attributes:
        times: by the names in ``COLUMNS``; without those of which there is no sample.
        tokens_per_s: output tokens received per second, over the time in which requests arrived.
        reasons: why it should not be trusted.
    """

    times: dict[str, float]
    requests_per_s: float
    tokens_per_s: float
    count: int
    failed: int
    reasons: tuple[str, ...]


def pooled(reports: Sequence[dict[str, Any]]) -> Cell:
    """One cell from the reports (``Report.to_dict``) of its rounds."""
    times: dict[str, float] = {}
    for name in ("ttft", "itl", "e2e"):
        samples = [value for report in reports for value in report["samples"][name]]
        values = np.concatenate([np.atleast_1d(value) for value in samples]) if samples else np.array([])
        if len(values):
            times |= {f"{name}_p50": float(np.quantile(values, 0.5)), f"{name}_p99": float(np.quantile(values, 0.99))}
    return Cell(
        times,
        float(np.mean([report["throughput"]["requests_per_s"] for report in reports])),
        float(np.mean([report["throughput"]["output_tokens_per_s"] for report in reports])),
        sum(report["num_measured"] for report in reports),
        sum(report["errors"]["count"] for report in reports),
        tuple(reason for report in reports for reason in report["reasons"]),
    )


def lines_of(found: dict[str, Any], arrangements: Sequence[str]) -> list[str]:
    """The whole table, as lines, of what is there."""
    lines: list[str] = []
    for model in dict.fromkeys(run["point"]["model"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["point"]["model"] == model]
        lines += ["", _title(model, found["capacity"], arrangements), _heading()]
        for rate, share in dict.fromkeys((run["point"]["rate"], run["point"]["share"]) for run in runs):
            here = [run for run in runs if run["point"]["rate"] == rate]
            cells = {
                name: pooled([run["report"] for run in here if run["point"]["arrangement"] == name])
                for name in arrangements
                if any(run["point"]["arrangement"] == name for run in here)
            }
            shown = f"{rate:.3g} requests/s" + (f" ({share:.0%} of capacity)" if share else "")
            lines += ["", shown, *_rows(cells, has_reference=model != "small" and rate == REFERENCE_RATE)]
    return lines[1:]


def _title(model: str, capacity: dict[str, float], arrangements: Iterable[str]) -> str:
    if model != "small":
        return "Qwen3-0.6B's shape, 512 tokens in and 64 out (times in ms)"
    known = ", ".join(f"{ARRANGEMENTS[name]}: {capacity[name]:.3g}" for name in arrangements if name in capacity)
    return f"the small model, 512 tokens in and 64 out (times in ms); capacity in requests/s: {known}"


def _heading() -> str:
    cells = "".join(f"{title:>{WIDTHS[name]}}" for name, title in COLUMNS.items())
    return f"{'':{NAME_WIDTH}}{cells}{'requests/s':>12}{'tokens/s':>10}{'count':>7}{'failed':>8}"


def _rows(cells: dict[str, Cell], *, has_reference: bool) -> list[str]:
    lines, notes = [], []
    first = next(iter(cells.values()))
    for name, cell in cells.items():
        times = "".join(_time(cell.times.get(column), WIDTHS[column]) for column in COLUMNS)
        rest = f"{cell.requests_per_s:12.3g}{cell.tokens_per_s:10.1f}{cell.count:7}{cell.failed:8}"
        lines.append(f"{ARRANGEMENTS[name]:{NAME_WIDTH}}{times}{rest}")
        if cell is not first:
            lines.append(_ratios(first, cell))
        notes += [f"  {ARRANGEMENTS[name]}: not to be trusted, {reason}" for reason in dict.fromkeys(cell.reasons)]
    if has_reference:
        times = "".join(_time(REFERENCE.get(column), WIDTHS[column]) for column in COLUMNS)
        lines += [f"{REFERENCE_NAME:{NAME_WIDTH}}{times}", FOOTNOTE]
    return lines + notes


def _ratios(first: Cell, other: Cell) -> str:
    """How many times better the first is: times of the other over its own, rates of its own over the other's."""
    line = f"{'  times better is the first':{NAME_WIDTH}}"
    for column, width in WIDTHS.items():
        ours, theirs = first.times.get(column), other.times.get(column)
        line += f"{theirs / ours:{width - 1}.2f}x" if ours and theirs else f"{'':{width}}"
    rates = ((first.requests_per_s, other.requests_per_s, 12), (first.tokens_per_s, other.tokens_per_s, 10))
    return line + "".join(f"{ours / theirs:{width - 1}.2f}x" if theirs else "" for ours, theirs, width in rates)


def _time(seconds: float | None, width: int) -> str:
    if seconds is None:
        return f"{'-':>{width}}"
    ms = seconds * 1e3
    return f"{ms:{width}.{1 if ms < 100 else 0}f}"
