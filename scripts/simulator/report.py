"""The results of a simulation, as a dictionary and as a table, and the files of reports."""

import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.shared import ROLES
from scripts.load_tester.analysis.metrics import limited_gap, slo_limits
from scripts.load_tester.analysis.stats import QUANTILES
from scripts.load_tester.reporting.formats import counted, milliseconds, per_second, percent
from scripts.load_tester.reporting.sanitize import printable
from scripts.load_tester.workload.request_classes import RequestClass
from scripts.simulator.client import Outcome
from scripts.simulator.service.cluster import Cluster
from scripts.simulator.service.node import Node

Figures = dict[str, Any]
WIDTH = 80
#: Changes of role that the table names.
MAX_CHANGES = 12
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
ROWS = (
    ("time to first token", "ttft"),
    ("  waiting at the prefill node", "prefill_queue"),
    ("  computing the prompt", "prefill"),
    ("gap between messages", "itl"),
    ("  first to second", "first_gap"),
    ("time per output token", "tpot"),
    ("  waiting for decode pages", "decode_queue"),
    ("  transfer of the last pages", "transfer"),
    ("end to end", "e2e"),
)
#: Stages of a request that nodes report, in seconds.
STAGES = ("prefill_queue", "prefill", "decode_queue", "prompt_wait", "transfer", "join")
#: Counters of the nodes that the table shows where they are not zero.
TOTALS = (
    "retractions",
    "preemptions",
    "pauses",
    "resumed_tokens_computed",
    "transfers",
    "pages_sent",
    "local_prefills",
)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives.

    Attributes:
        kinds: request classes, whose own limits take precedence.
        attainment: the share of requests that should meet their limits.
        starvation_s: a request that waits longer than this for its first token counts as starved.
    """

    slos: dict[str, float]
    kinds: dict[str, RequestClass]
    attainment: float
    starvation_s: float


def write_report(path: str | None, flag: str, text: Callable[[], str]) -> bool:
    """Write a file, if it has a path. After a failure, says so on standard error and returns False."""
    if path is None:
        return True
    try:
        Path(path).write_text(text(), encoding="utf-8")
    except OSError as error:
        print(f"simulate: cannot write {flag} {path}: {error.strerror}", file=sys.stderr)
        return False
    return True


def service(kept: Sequence[Outcome], goals: Objectives) -> Figures:
    """How many of the measured requests met their limits; failed requests did not."""
    num_good = sum(_is_good(o, slo_limits(o.planned, goals.slos, goals.kinds)) for o in kept)
    starved = sum((o.stamps_s[0] if o.stamps_s else o.ended_at) - o.due_at > goals.starvation_s for o in kept)
    share = num_good / len(kept) if kept else 0.0
    return {"good": num_good, "share": share, "is_attained": share >= goals.attainment, "starved": starved}


def _is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    return outcome.is_ok and bool(outcome.stamps_s) and not missed_limits(outcome, limits)


def missed_limits(outcome: Outcome, limits: dict[str, float]) -> list[str]:
    """Names of the limits that a request with tokens has missed."""
    return [name for name, limit in limits.items() if _reached(outcome, name) > limit]


def _reached(outcome: Outcome, name: str) -> float:
    """The latency of a request with tokens that a limit of this name bounds, in seconds; 0 without one."""
    stamps = outcome.stamps_s
    if name == "ttft":
        return outcome.ttft_s
    if name == "e2e":
        return outcome.ended_at - outcome.due_at
    if name == "itl" and len(stamps) > 1:
        return limited_gap(np.diff(stamps).tolist())
    return outcome.tpot_s or 0.0 if name == "tpot" else 0.0


def summary(values: Sequence[float] | NDArray[np.float64]) -> Figures:
    """Count, mean, extremes and percentiles of a sample in seconds; only the count of an empty one."""
    sample = np.asarray(values, dtype=np.float64)
    if not len(sample):
        return {"count": 0}
    shares = np.quantile(sample, list(QUANTILES.values())).tolist()
    return {
        "count": len(sample),
        "mean": float(sample.mean()),
        "min": float(sample.min()),
        "max": float(sample.max()),
        **dict(zip(QUANTILES, shares, strict=True)),
    }


def figures(
    cluster: Cluster,
    outcomes: Sequence[Outcome],
    *,
    goals: Objectives,
    wall_s: float,
    measured: tuple[float, float],
    is_whole: bool = True,
) -> Figures:
    """All results. Rates are of the measured requests, from the end of the warm-up to their last answer.

    Args:
        wall_s: real seconds that the simulation took.
        measured: first and last due time of the requests that count in latencies.
        is_whole: False if the run was stopped before its end.
    """
    now = cluster.events.now()
    kept = [outcome for outcome in outcomes if measured[0] <= outcome.due_at <= measured[1] and outcome.ended_at >= 0]
    good = [outcome for outcome in kept if outcome.is_ok and outcome.stamps_s]
    rows = sum(node.work["rows"] for node in cluster.nodes.values())
    num_input = sum(outcome.planned.num_input for outcome in good)
    answered_at = max((outcome.ended_at for outcome in good), default=now)
    measured_s = max(answered_at - measured[0], 0.0)
    return {
        "is_whole": is_whole,
        "virtual_s": now,
        "measured_s": measured_s,
        "wall_s": wall_s,
        "row_steps": rows,
        "row_steps_per_minute": rows / wall_s * 60 if wall_s else 0.0,
        "events": cluster.events.num_events,
        "requests": {
            "sent": len(outcomes),
            "measured": len(kept),
            "answered": len(good),
            "errors": dict(sorted(Counter(outcome.error for outcome in kept if outcome.error).items())),
        },
        "throughput": {
            "requests_per_s": _rate(len(good), measured_s),
            "output_tokens_per_s": _rate(sum(outcome.num_output for outcome in good), measured_s),
            "input_tokens_per_s": _rate(num_input, measured_s),
        },
        "cached_share": sum(outcome.cached_tokens for outcome in good) / num_input if num_input else 0.0,
        "service": service(kept, goals),
        "latency_s": latencies(good),
        "classes": _by(good, lambda outcome: outcome.planned.class_name),
        "tenants": _by(good, lambda outcome: outcome.planned.tenant),
        "nodes": {role: _role(cluster.of(role), now) for role in ROLES},
        "role_changes": [{"at_s": at, "role": role} for at, role in cluster.role_changes],
        "wire_busy_s": cluster.network.busy_s,
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def latencies(good: Sequence[Outcome]) -> Figures:
    """Latencies in seconds, from the instant at which a request was due."""
    stamps = [np.array(outcome.stamps_s) for outcome in good]
    gaps = [np.diff(each) for each in stamps]
    return {
        "ttft": summary([outcome.ttft_s for outcome in good]),
        "itl": summary(np.concatenate(gaps) if gaps else []),
        "first_gap": summary([float(gap[0]) for gap in gaps if len(gap)]),
        "tpot": summary([tpot for outcome in good if (tpot := outcome.tpot_s) is not None]),
        "e2e": summary([outcome.ended_at - outcome.due_at for outcome in good]),
        **{
            name: summary([outcome.timings[f"{name}_s"] for outcome in good if f"{name}_s" in outcome.timings])
            for name in STAGES
        },
    }


def _by(good: Sequence[Outcome], name_of: Any) -> dict[str, Figures]:
    """Latencies of each class or tenant, if there is more than one."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in good:
        groups.setdefault(name_of(outcome), []).append(outcome)
    return {name: latencies(groups[name]) for name in sorted(groups)} if len(groups) > 1 else {}


def _role(nodes: Sequence[Node], now: float) -> Figures:
    if not nodes:
        return {"count": 0}
    work: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for node in nodes:
        work.update(node.work)
        totals.update(node.role.counters())
    lived_s = [now - node.started_at for node in nodes]
    busy = [node.busy_s / seconds if seconds else 0.0 for node, seconds in zip(nodes, lived_s, strict=True)]
    page_s = sum(node.capacity.num_pages * seconds for node, seconds in zip(nodes, lived_s, strict=True))
    return {
        "count": len(nodes),
        "busy": {"mean": sum(busy) / len(busy), "min": min(busy), "max": max(busy)},
        "pages_used": sum(node.used_page_s for node in nodes) / page_s if page_s else 0.0,
        **{name: work[name] for name in ("steps", "rows", "prompt_tokens")},
        "totals": dict(sorted(totals.items())),
    }


# ---- the table ------------------------------------------------------------------------------------------------------


def table(found: Figures) -> list[str]:
    """The results as text, the main figures first, in lines of at most 80 columns."""
    errors = ", ".join(f"{name} {count:,}" for name, count in found["requests"]["errors"].items())
    lines = [] if found["is_whole"] else ["stopped before the end; results so far:"]
    lines += _headline(found)
    if errors:
        lines += _wrapped(f"failed      {errors}", 12)
    if "faults" in found:
        counts = ", ".join(f"{name} {count:,}" for name, count in found["faults"]["injected"].items())
        lines += _wrapped(f"faults      {counts or 'none'}; wrong answers: {found['faults']['wrong_answers']:,}", 12)
    lines += ["", f"{'milliseconds':30}" + "".join(f"{name:>8}" for name in COLUMNS)]
    for title, name in ROWS:
        row = found["latency_s"][name]
        if row["count"]:
            lines.append(f"{title:30}" + "".join(f"{milliseconds(row[column]):>8}" for column in COLUMNS))
    for kind in ("classes", "tenants"):
        lines += _group_lines(kind, found[kind])
    lines.append("")
    for role, figures_of in found["nodes"].items():
        lines += _role_lines(role, figures_of)
    if changes := [f"to {change['role']} at {change['at_s']:,.0f} s" for change in found["role_changes"]]:
        more = f", and {len(changes) - MAX_CHANGES:,} times more" if len(changes) > MAX_CHANGES else ""
        lines += _wrapped(f"roles       changed {', '.join(changes[:MAX_CHANGES])}{more}", 12)
    speed = f"{found['row_steps']:,} row-steps, {found['row_steps_per_minute'] / 1e6:.1f} million a minute"
    return lines + _wrapped(f"simulated   {found['virtual_s']:,.1f} s in {found['wall_s']:,.1f} s: {speed}", 12)


def _headline(found: Figures) -> list[str]:
    """The main figures, one a line."""
    requests, rates, service = found["requests"], found["throughput"], found["service"]
    ttft, itl, e2e = (found["latency_s"][name] for name in ("ttft", "itl", "e2e"))
    goodput = _rate(service["good"], found["measured_s"])
    inputs = f"{rates['input_tokens_per_s']:,.0f} tokens/s of prompts, {percent(found['cached_share'])} of these cached"
    waited = f"{percent(service['share'])} within limits, {service['starved']:,} waited too long"
    answered = f"{requests['sent']:,} sent, {requests['answered']:,} answered"
    rows = [
        ("goodput", per_second(goodput), "requests/s", waited),
        ("throughput", per_second(rates["requests_per_s"]), "requests/s", answered),
        ("output", f"{rates['output_tokens_per_s']:,.0f}", "tokens/s", inputs),
        ("TTFT p50", milliseconds(ttft.get("p50")), "ms", "time to first token, half took at most this"),
        ("TTFT p99", milliseconds(ttft.get("p99")), "ms", "99 of 100 took at most this"),
        ("ITL p99", milliseconds(itl.get("p99")), "ms", "inter-token latency: between two messages"),
        ("E2E p50", milliseconds(e2e.get("p50")), "ms", "end to end"),
    ]
    return [line for name, value, unit, words in rows for line in _wrapped(f"{name:11}{value:>9} {unit:11}{words}", 32)]


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _group_lines(kind: str, groups: dict[str, Figures]) -> list[str]:
    lines = (
        ["", f"{kind:20}{'requests':>12}{'ttft p50':>12}{'p99':>10}{'itl p99':>10}{'e2e p99':>12}"] if groups else []
    )
    for name, row in groups.items():
        figures_of = (row["ttft"]["p50"], row["ttft"]["p99"], row["itl"].get("p99"), row["e2e"]["p99"])
        cells = zip(map(milliseconds, figures_of), (12, 10, 10, 12), strict=True)
        counted = f"{printable(name or '(none)')[:19]:20}{row['ttft']['count']:>12,}"
        lines.append(counted + "".join(f"{cell:>{width}}" for cell, width in cells))
    return lines


def _role_lines(role: str, found: Figures) -> list[str]:
    if not found["count"]:
        return []
    busy = found["busy"]
    per_step = found["rows"] / found["steps"] if found["steps"] else 0.0
    tokens = found["prompt_tokens"] / found["steps"] if found["steps"] else 0.0
    parts = [
        f"{role:12}{counted(found['count'], 'node')}, busy {percent(busy['mean'])} ({percent(busy['min'])} to "
        f"{percent(busy['max'])}), pages in use {percent(found['pages_used'])}",
        f"{per_step:.1f} rows and {tokens:.1f} prompt tokens a step",
    ]
    parts += [f"{name.replace('_', ' ')} {found['totals'][name]:,.0f}" for name in TOTALS if found["totals"].get(name)]
    return _wrapped(", ".join(parts), 12)
