"""Reads request traces and makes plans of them.

Formats are recognised by their fields: Mooncake (FAST'25; JSON lines with ``hash_ids`` of 512 tokens, milliseconds),
Qwen-Bailian (JSON lines with ``chat_id`` and ``hash_ids`` of 16 tokens, seconds), Azure's LLM inference traces (CSV
with a date, Splitwise, ISCA'24), BurstGPT (CSV, seconds), and the user's own requests as JSON lines (``prompt``,
``messages`` or ``input_length``). ``Trace.notes`` says what was recognised, the unit of time first.
"""

import csv
import datetime
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common.config.scheduling import MAX_PRIORITY
from common.errors import ConfigError, reason_of
from scripts.load_tester.reporting.formats import counted
from scripts.load_tester.workload.lengths import MAX_LENGTH
from scripts.load_tester.workload.planned_request import HASH, UNIQUE, PlannedRequest, Segment, segment_key
from scripts.load_tester.workload.schedule import MAX_SECONDS

UNIT_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MOONCAKE_TOKENS, QWEN_TOKENS = 512, 16
MAX_LIMIT_MS = 86_400_000  # of a deadline or objective, as in requests
MAX_PER_MS = 0.2  # requests; whole numbers that come closer together are rather seconds than milliseconds
NEARLY_ALL, UNEVEN = 0.9, 0.05  # share of gaps that must be multiples of a tick, and the tolerance


@dataclass(slots=True)
class TraceRow:
    """One request of a trace; ``at`` in the trace's own unit, None if it has no clock."""

    at: float | None
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    class_name: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """A trace.

    Attributes:
        unit: of its timestamps: s, ms, us; empty without timestamps.
        segment_tokens: prompt tokens that one of its hash ids stands for.
        rows: in order of time; ``at`` in seconds from the first.
        notes: what was recognised and left out, as sentences.
    """

    format: str
    unit: str
    segment_tokens: int
    rows: list[TraceRow]
    notes: list[str]

    @property
    def has_times(self) -> bool:
        return bool(self.unit)

    def within(self, window: tuple[float, float]) -> list[TraceRow]:
        """The rows of a window: first and last second; without timestamps, numbers of rows."""
        low, high = window
        numbered = enumerate(self.rows)
        return [row for number, row in numbered if low <= (number if row.at is None else row.at) < high]


def read_trace(path: str, unit: str = "auto") -> Trace:
    """Read a file of any known format.

    Raises ConfigError: the file cannot be read, or has no known format; names line and field.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if first.lstrip().startswith("{"):
                name, tokens, rows = _json_lines(file, path)
            else:
                name, tokens, rows = _csv(file, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace {path} cannot be read: {reason_of(error)}") from None
    notes: list[str] = []
    kept = [row for row in rows if row.extra or (row.num_input > 0 and row.num_output > 0)]
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept):,} of {counted(len(rows), 'row')} without tokens left out")
    if not kept:
        raise ConfigError(f"--trace {path} holds no request")
    found = _with_times(kept, name, unit, notes, path)
    return Trace(name, found, tokens, kept, notes)


def _with_times(rows: list[TraceRow], name: str, unit: str, notes: list[str], path: str) -> str:
    """Convert instants to seconds from the first one; return their unit."""
    instants = [row.at for row in rows if row.at is not None]
    if not all(map(math.isfinite, instants)):
        raise ConfigError(f"--trace {path}: a timestamp is not a finite number")
    if not instants:
        notes.append(f"{counted(len(rows), 'request')}, format {name}, without timestamps")
        return ""
    if len(instants) < len(rows):
        raise ConfigError(f"--trace {path}: some lines have a timestamp and some do not")
    found = _unit(name, instants) if unit == "auto" else unit
    scale = UNIT_S[found]
    start = min(instants)
    for row in rows:
        assert row.at is not None
        row.at = (row.at - start) * scale
    rows.sort(key=lambda row: row.at or 0.0)
    span = rows[-1].at or 0.0
    if not span <= MAX_SECONDS:
        raise ConfigError(f"--trace {path}: its timestamps span {span:.3g} s: check --trace-unit")
    rate = f", {len(rows) / span:.3g} requests/s" if span else ""
    how = "detected" if unit == "auto" else "given"
    pace = f"{counted(len(rows), 'request')} over {span:,.1f} s{rate}"
    notes.insert(0, f"{pace}; format {name}, timestamps in {found} ({how})")
    return found


def _unit(name: str, instants: list[float]) -> str:
    """Unit of a format's timestamps.

    Mooncake counts whole milliseconds. Files of others in its format count seconds, which shows in fractions, or in a
    rate that would be 200 requests/s and more in milliseconds.
    """
    if name != "Mooncake":
        return "s"
    if any(at != int(at) for at in instants[:10_000]):
        return "s"
    span = max(instants) - min(instants)
    return "ms" if span == 0 or len(instants) / span < MAX_PER_MS else "s"


# ---- formats --------------------------------------------------------------------------------------------------------


def _json_lines(lines: Iterable[str], path: str) -> tuple[str, int, list[TraceRow]]:
    rows: list[TraceRow] = []
    name, tokens = "", 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = msgspec.json.decode(line)
            if not name:
                name, tokens = _json_format(content)
            rows.append(_own_row(content) if name == "own" else _hash_row(content, name))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"--trace {path}, line {number}: {type(error).__name__} {error}") from None
    return name, tokens, rows


def _json_format(content: dict[str, Any]) -> tuple[str, int]:
    if "hash_ids" in content and "chat_id" in content:
        return "Qwen-Bailian", QWEN_TOKENS
    if "hash_ids" in content and "timestamp" in content:
        return "Mooncake", MOONCAKE_TOKENS
    return "own", MOONCAKE_TOKENS


def _hash_row(content: dict[str, Any], name: str) -> TraceRow:
    class_name = _text(content.get("type")) if name == "Qwen-Bailian" else ""
    counts = _length(content["input_length"]), _length(content["output_length"])
    return TraceRow(float(content["timestamp"]), *counts, _hash_ids(content), class_name)


def _hash_ids(content: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(hash_id) for hash_id in content.get("hash_ids") or ())


def _length(value: Any) -> int:
    """Parse a number of tokens; 0 or less for none. Raises ValueError, OverflowError: no number, or too large."""
    length = int(float(value))
    if length > MAX_LENGTH:
        raise ValueError(f"{length:,} tokens are more than {MAX_LENGTH:,}")
    return length


def _text(value: Any) -> str:
    return "" if value is None else str(value)


OWN_FIELDS = ("at", "timestamp", "input_length", "output_length", "class", "hash_ids")


def _own_row(content: dict[str, Any]) -> TraceRow:
    """Parse a line of the user's own; fields other than ``OWN_FIELDS`` go into the body as they are."""
    extra = {name: value for name, value in content.items() if name not in OWN_FIELDS}
    at = content.get("at", content.get("timestamp"))
    prompt = extra.get("prompt")
    num_input = _length(content.get("input_length", len(prompt) if isinstance(prompt, list) else 0))
    limits = [extra.pop("max_completion_tokens", None), extra.pop("max_tokens", None)]
    num_output = _length(content.get("output_length", next((limit for limit in limits if limit is not None), 0)))
    if num_input < 0 or num_output < 0:
        raise ValueError("a length below 0")
    if not num_input and "prompt" not in extra and "messages" not in extra:
        raise ValueError("neither prompt nor messages nor input_length")
    class_name = _text(content.get("class"))
    return TraceRow(
        None if at is None else float(at), num_input, num_output or 32, _hash_ids(content), class_name, extra
    )


def _csv(lines: Iterable[str], path: str) -> tuple[str, int, list[TraceRow]]:
    reader = csv.DictReader(itertools.dropwhile(lambda line: not line.strip(), lines), restval="")
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    names = set(reader.fieldnames)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        name, columns = "Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    elif {"Timestamp", "Request tokens", "Response tokens"} <= names:
        name, columns = "BurstGPT", ("Timestamp", "Request tokens", "Response tokens")
    else:
        raise ConfigError(
            f"--trace {path} has no known format: neither JSON lines, nor the CSV of Azure or BurstGPT "
            f"(its columns are {', '.join(sorted(names)) or 'none'})"
        )
    rows = []
    for cells in reader:
        try:
            at = _date(cells[columns[0]]) if name == "Azure" else float(cells[columns[0]])
            counts = _length(cells[columns[1]]), _length(cells[columns[2]])
            rows.append(TraceRow(at, *counts, (), cells.get("Model", "")))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"--trace {path}, line {reader.line_num}: {error}") from None
    return name, MOONCAKE_TOKENS, rows


def _date(text: str) -> float:
    """Seconds of a UTC date with a fraction of up to nine digits, such as 2023-11-16 18:17:03.9799600."""
    date, _, fraction = text.strip().partition(".")
    digits = "".join(itertools.takewhile(str.isdigit, fraction))
    whole = datetime.datetime.fromisoformat(date[:19]).replace(tzinfo=datetime.UTC)
    return whole.timestamp() + (int(digits) / 10 ** len(digits) if digits else 0.0)


# ---- from rows to a plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes:
        window: part of the trace to replay, as in ``Trace.within``.
        time_scale: seconds of replay per second of the trace; None to reach ``mean_rate``.
        has_jitter: whether to spread requests of one tick over the tick.
        output_scale: of outputs; None for ``length_scale``.
        duration_s: length of the replay, after which no request is planned.
    """

    window: tuple[float, float] = (0.0, float("inf"))
    time_scale: float | None = 1.0
    mean_rate: float = 1.0
    has_jitter: bool = False
    length_scale: float = 1.0
    output_scale: float | None = None
    max_input: int | None = None
    max_output: int | None = None
    max_requests: int | None = None
    duration_s: float = float("inf")


def replay_trace(trace: Trace, replay: ReplayOptions, rng: np.random.Generator) -> list[PlannedRequest]:
    """Make a plan of the trace, and describe the replay in ``trace.notes``.

    Raises ConfigError: the window has no request, or the replay is too long.
    """
    low, high = replay.window
    rows = trace.within(replay.window)[: replay.max_requests]
    if not rows:
        raise ConfigError(f"--trace-window {low:g}:{high:g} contains no request of the trace")
    at = np.array([row.at or 0.0 for row in rows]) - (low if trace.has_times else 0.0)
    if replay.has_jitter and trace.has_times:
        at = _jittered(at, rng, trace.notes)
    if trace.has_times:
        at = at - at[0] if not low else at
        at = at * _scale(at, replay, trace.notes)
        if not at[-1] <= MAX_SECONDS:
            raise ConfigError(f"--time-scale or --rate makes the replay {at[-1]:.3g} s long")
    timed = enumerate(zip(rows, at.tolist(), strict=True))
    plan = [_planned(number, row, when, trace, replay) for number, (row, when) in timed if when < replay.duration_s]
    if len(plan) < len(rows):
        trace.notes.append(f"{len(plan):,} of them come within --duration {replay.duration_s:g} s")
    return plan


def _jittered(at: Any, rng: np.random.Generator, notes: list[str]) -> Any:
    """Spread requests at one instant evenly at random up to the next tick."""
    gaps = np.diff(np.unique(at))
    if not len(gaps):
        return at
    tick = _tick(gaps)
    if not tick:
        raise ConfigError("--trace-jitter: this trace's clock has no ticks of a millisecond or more")
    notes.append(f"requests spread within ticks of {tick:g} s")
    return np.sort(at + rng.uniform(0.0, tick, len(at)))


def _tick(gaps: Any) -> float:
    """Tick of a clock in seconds, from the gaps between its instants; 0 below a millisecond.

    The most common gap is the tick if nearly all gaps are multiples of it, even with a little jitter. Otherwise, where
    most ticks pass without a request, the tick is the greatest common divisor of the gaps.
    """
    spans = np.rint(gaps * 1000).astype(np.int64)
    ((common, _),) = Counter(spans.tolist()).most_common(1)
    if not common:
        return 0.0
    astray = np.abs(spans - np.rint(spans / common) * common)
    is_step = np.mean(astray <= UNEVEN * common) >= NEARLY_ALL
    return (common if is_step else int(np.gcd.reduce(spans))) / 1000


def _scale(at: Any, replay: ReplayOptions, notes: list[str]) -> float:
    span = float(at[-1] - at[0])
    natural = (len(at) - 1) / span if span else 0.0
    if replay.time_scale is None:
        scale = natural / replay.mean_rate if natural else 1.0
    else:
        scale = replay.time_scale
    if natural:
        pace = f"over {span * scale:,.1f} s (time x {scale:.4g}): {natural / scale:.3g}/s"
        notes.append(f"{counted(len(at), 'request')} replayed {pace}")
    return scale


def _planned(number: int, row: TraceRow, at: float, trace: Trace, replay: ReplayOptions) -> PlannedRequest:
    num_input = _scaled(row.num_input, replay.length_scale, replay.max_input) if row.num_input else 0
    output_scale = replay.length_scale if replay.output_scale is None else replay.output_scale
    num_output = _scaled(row.num_output, output_scale, replay.max_output, "--output-scale")
    extra = row.extra or None
    segments = _segments(number, num_input, row.hash_ids, trace.segment_tokens * replay.length_scale)
    tenant = _text(row.extra.get("user"))
    return PlannedRequest(
        number, at, segments, num_output, row.class_name, tenant, extra=extra, **_priority_fields(row.extra)
    )


def _priority_fields(extra: dict[str, Any]) -> dict[str, Any]:
    """Priority, deadline and objectives of a user's own request; values of a wrong type only go to the server."""
    priority = extra.get("priority")
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        priority = None
    fields = {"ttft": "slo_ttft_ms", "itl": "slo_itl_ms"}
    limits = {key: extra[key] for key in ("deadline_ms", *fields.values()) if _is_limit(extra.get(key))}
    return {
        "priority": priority,
        "deadline_ms": limits.get("deadline_ms"),
        "priority_class": _text(extra.get("priority_class")),
        "slos": tuple((name, limits[key] / 1e3) for name, key in fields.items() if key in limits),
    }


def _is_limit(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_LIMIT_MS


def _scaled(length: int, scale: float, most: int | None, flag: str = "--length-scale") -> int:
    scaled = max(1.0, length * scale)
    if scaled > MAX_LENGTH and most is None:
        raise ConfigError(f"{flag} makes a length of {scaled:.3g} tokens, more than {MAX_LENGTH:,}: lower it")
    return round(scaled if most is None else min(scaled, most))


def _segments(number: int, num_input: int, hash_ids: tuple[int, ...], size: float) -> tuple[Segment, ...]:
    """Segments of a prompt: ``size`` tokens on average for each hash id, and the rest of ``num_input`` for the last.

    Ends are rounded and not lengths, so that no tokens are lost, and equal prefixes have equal segments.
    """
    if not hash_ids:
        return ((segment_key(UNIQUE, number), num_input),) if num_input else ()
    ends = [min(round(size * count), num_input) for count in range(len(hash_ids))] + [num_input]
    pairs = zip(hash_ids, itertools.pairwise(ends), strict=True)
    return tuple((segment_key(HASH, hash_id), end - begin) for hash_id, (begin, end) in pairs if end > begin)
