"""From records to figures: latencies, rates, goodput, errors, fairness, caching, tokens.

Headline latencies count from the *intended* instant, so that a stalled server, or a stalled client, cannot hide by
delaying what comes after (Tene's "coordinated omission"); those from the actual send stand beside them. Failures have
no latency; they count as misses wherever something is judged.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.load_tester.analysis import stats
from scripts.load_tester.analysis.records import Record
from scripts.load_tester.workload.request_classes import Kind

Figures = dict[str, Any]


def latencies(records: Sequence[Record], rng: np.random.Generator) -> Figures:
    """Summaries in seconds, over requests that succeeded.

    ``ttft``, ``e2e``: from the intended instant; ``ttft_sent``, ``e2e_sent``: from the send. ``itl``: gaps between
    successive events with output. ``tpot``: per request, time after the first event over tokens after it.
    ``first_gap``: between first and second event alone, where disaggregation shows.
    """
    good = [record for record in records if record.is_ok and record.stamps_s]
    gaps = [np.array(record.gaps_s) for record in good]
    every_gap = np.concatenate(gaps) if gaps else np.array([])
    itl = stats.summary(every_gap, rng)
    if len(every_gap):
        itl |= stats.clustered_intervals(gaps, rng)
    return {
        "ttft": stats.summary([record.ttft_s for record in good], rng),
        "ttft_sent": stats.summary([record.stamps_s[0] - record.released_s for record in good], rng),
        "itl": itl,
        "tpot": stats.summary([tpot for record in good if (tpot := record.tpot_s) is not None], rng),
        "first_gap": stats.summary([gap[0] for gap in gaps if len(gap)], rng),
        "e2e": stats.summary([record.e2e_s for record in good], rng),
        "e2e_sent": stats.summary([record.stamps_s[-1] - record.released_s for record in good], rng),
    }


def throughput(records: Sequence[Record], begin_s: float, end_s: float) -> Figures:
    """Rates inside a window, its ends included: what was received in it, whoever asked when.

    Args:
        records: all of the run, measured or not.
    """
    length = max(end_s - begin_s, 1e-9)
    out = 0.0
    requests = tokens_in = events = 0
    for record in records:
        inside = [n for at, n in zip(record.stamps_s, record.counts, strict=True) if begin_s <= at <= end_s]
        out += record.tokens_per_count * sum(inside)
        events += len(inside)
        if record.is_ok and begin_s <= record.stamps_s[-1] <= end_s:
            requests += 1
        if record.stamps_s and begin_s <= record.stamps_s[0] <= end_s:
            tokens_in += record.num_input if record.usage_prompt is None else record.usage_prompt
    return {
        "window_s": [begin_s, end_s],
        "requests_per_s": requests / length,
        "output_tokens_per_s": out / length,
        "input_tokens_per_s": tokens_in / length,
        "events_per_s": events / length,
    }


# ---- service levels -------------------------------------------------------------------------------------------------


def misses(record: Record, limits: dict[str, float]) -> list[str]:
    """Which limits a request breaks; ``failed`` if it has no answer to judge, ``deadline`` if it missed its own."""
    if not record.is_ok or not record.stamps_s:
        return ["failed"]
    broken = []
    gaps = record.gaps_s
    for name, limit in limits.items():
        value: float | None
        if name == "itl":
            # The least that 99 % of the gaps are within; between two gaps lies no limit.
            value = sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1] if gaps else None
        else:
            value = {"ttft": record.ttft_s, "e2e": record.e2e_s, "tpot": record.tpot_s}[name]
        if value is not None and value > limit:
            broken.append(name)
    if record.deadline_ms is not None and record.e2e_s * 1e3 > record.deadline_ms:
        broken.append("deadline")
    return broken


def limits_of(kind: Kind | None, slos: dict[str, float]) -> dict[str, float]:
    """A class's limits: its own over the run's."""
    return slos | dict(kind.slos if kind else ())


def service(records: Sequence[Record], slos: dict[str, float], kinds: dict[str, Kind], seconds: float) -> Figures:
    """Attainment and goodput. Without any limit every answered request is good. ``num_free``: as how many requests they
    count that do not depend on each other. ``alone_good`` and ``alone_count`` are of those that met no other request:
    what a lower rate could bring all to.

    Args:
        records: the measured ones.
        seconds: over which they were intended.
    """
    broken = [misses(record, limits_of(kinds.get(record.class_name), slos)) for record in records]
    good = sum(not names for names in broken)
    alone = _alone(records)
    in_time = sorted(range(len(records)), key=lambda place: records[place].intended_s)
    num_free = len(records) / stats.correlation_time(np.array([float(not broken[place]) for place in in_time]))
    low, high = stats.proportion_interval(good * num_free / max(1, len(records)), num_free)
    return {
        "limits_s": slos,
        "good": good,
        "count": len(records),
        "attainment": good / len(records) if records else 0.0,
        "attainment_ci": [low, high],
        "num_free": num_free,
        "goodput_per_s": good / seconds if seconds > 0 else 0.0,
        "alone_good": sum(not names and is_alone for names, is_alone in zip(broken, alone, strict=True)),
        "alone_count": sum(alone),
        "misses": dict(Counter(name for names in broken for name in names)),
    }


def _alone(records: Sequence[Record]) -> list[bool]:
    """Whether each was under way with no other."""
    order = sorted(range(len(records)), key=lambda place: records[place].intended_s)
    alone = [True] * len(records)
    latest, latest_s = -1, -math.inf
    for place in order:
        if records[place].intended_s < latest_s:
            alone[place] = alone[latest] = False
        if records[place].ended_s > latest_s:
            latest, latest_s = place, records[place].ended_s
    return alone


# ---- other questions ------------------------------------------------------------------------------------------------


#: Words for failures about which no server says any.
WORDS = {
    "connect": "no connection could be opened",
    "dropped": "the connection was closed before the answer's end",
    "timeout": "no end within --timeout",
    "halted": "the run was stopped",
    "bad_http": "not HTTP",
}


def errors(records: Sequence[Record]) -> Figures:
    """Failures by kind, with an example of what the server said, or what it is."""
    failed = [record for record in records if not record.is_ok]
    kinds = Counter(record.error for record in failed)
    said = {record.error: record.message for record in reversed(failed) if record.message}
    examples = {record.error: WORDS[record.error] for record in failed if record.error in WORDS} | said
    return {
        "count": len(failed),
        "share": len(failed) / len(records) if records else 0.0,
        "kinds": dict(kinds.most_common()),
        "examples": examples,
    }


def groups(
    records: Sequence[Record], field: str, slos: dict[str, float], kinds: dict[str, Kind], rng: np.random.Generator
) -> Figures:
    """The main figures for each class or tenant, if there are several."""
    names = list(dict.fromkeys(getattr(record, field) for record in records))
    if len(names) < 2:
        return {}
    found = {}
    for name in sorted(names):
        own = [record for record in records if getattr(record, field) == name]
        good = [record for record in own if record.is_ok and record.stamps_s]
        found[name or "(none)"] = {
            "count": len(own),
            "failed": len(own) - len(good),
            "output_tokens": sum(record.num_output for record in good),
            "attainment": service(own, slos, kinds, 1.0)["attainment"],
            "ttft": stats.summary([record.ttft_s for record in good], rng),
            "e2e": stats.summary([record.e2e_s for record in good], rng),
        }
    return found


def fairness(
    tenants: Figures, records: Sequence[Record], every: Sequence[Record], begin_s: float, end_s: float
) -> Figures:
    """How evenly tenants are served.

    ``service_jain``: Jain's index over the share of its asked output that each tenant got; ``ttft_ratio``: worst over
    best median time to first token, a failure taking for ever; None if that is the worst, and ``unserved`` names the
    tenants more than half of whose requests failed. Whoever asks for little gets little, and that is fair; so tokens
    are compared only where tenants compete (as Sheng et al. do for VTC, OSDI'24): ``backlogged_s`` are the seconds in
    which at least two tenants had a request waiting all through, ``tokens_per_s`` what each of them got in those
    (prompts, counted at the first token, and output), ``backlogged_jain`` Jain's index over that.

    Args:
        records: the measured ones.
        every: all of the run: what was asked for in the warm-up may be served after it.
        begin_s, end_s: the measured part; seconds outside of it are not compared.
    """
    if not tenants:
        return {}
    asked: Counter[str] = Counter()
    for record in records:
        asked[record.tenant or "(none)"] += record.num_output_asked
    shares = [figures["output_tokens"] / max(1, asked[name]) for name, figures in tenants.items()]
    medians = _medians_with_failures(records)
    worst, best = max(medians.values()), min(medians.values())
    seconds, rates = _served_while_backlogged(every, begin_s, end_s)
    return {
        "tenants": len(tenants),
        "service_jain": stats.jain_index(shares),
        "ttft_ratio": worst / best if best > 0 and math.isfinite(worst) else None,
        "unserved": [name for name, median in medians.items() if math.isinf(median)],
        "backlogged_s": seconds,
        "tokens_per_s": rates,
        "backlogged_jain": stats.jain_index(list(rates.values())) if rates else None,
    }


def _medians_with_failures(records: Sequence[Record]) -> dict[str, float]:
    """Median time to first token of each tenant; infinite if more than half of its requests failed."""
    times: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record.tenant or "(none)", []).append(record.ttft_s if record.is_ok else math.inf)
    medians = {name: statistics.median(values) for name, values in sorted(times.items())}
    return {name: m if math.isfinite(m) else statistics.median_low(times[name]) for name, m in medians.items()}


def _served_while_backlogged(records: Sequence[Record], begin_s: float, end_s: float) -> tuple[int, dict[str, float]]:
    """Seconds in which several tenants waited all through, and the tokens per second that each of these got."""
    waiting: dict[int, set[str]] = {}
    served: Counter[tuple[int, str]] = Counter()
    for record in records:
        name = record.tenant or "(none)"
        first_s = record.stamps_s[0] if record.stamps_s else record.ended_s
        for second in range(math.ceil(max(record.intended_s, begin_s)), math.floor(min(first_s, end_s))):
            waiting.setdefault(second, set()).add(name)
        if record.stamps_s:
            served[math.floor(first_s), name] += record.num_input
        for at, count in zip(record.stamps_s, record.counts, strict=True):
            served[math.floor(at), name] += count
    contested = {second: names for second, names in waiting.items() if len(names) > 1}
    totals: dict[str, list[int]] = {}
    for second, names in contested.items():
        for name in names:
            totals.setdefault(name, []).append(served[second, name])
    return len(contested), {name: sum(some) / len(some) for name, some in sorted(totals.items())}


def caching(records: Sequence[Record]) -> Figures:
    """Prompt tokens that the server found cached, against the most that any cache could have from this run alone; both
    of those requests of which the server says it.

    ``known_before_share``: of prompt tokens, those found cached beyond that: the server had them before the run, so
    its latencies are not those of new prompts.
    """
    said = [record for record in records if record.usage_cached is not None and record.usage_prompt]
    compared = said or records
    asked = sum(record.num_input for record in compared)
    ideal = sum(record.ideal_cached for record in compared)
    found: Figures = {
        "prompt_tokens": asked,
        "ideal_tokens": ideal,
        "ideal_share": ideal / asked if asked else 0.0,
        "achieved_tokens": None,
        "achieved_share": None,
        "known_before_share": None,
    }
    if said:
        cached = sum(record.usage_cached or 0 for record in said)
        prompts = sum(record.usage_prompt or 0 for record in said)
        beyond = sum(max(0, (record.usage_cached or 0) - record.ideal_cached) for record in said)
        found["achieved_tokens"] = cached
        found["achieved_share"] = cached / prompts
        found["known_before_share"] = beyond / prompts
    return found


def tokens(records: Sequence[Record]) -> Figures:
    """Whether the server's usage agrees with what was sent and what was counted."""
    good = [record for record in records if record.is_ok]
    said = [record for record in good if record.usage_output is not None]
    exact = [record for record in said if record.has_counts]
    of_prompts = [record for record in good if record.usage_prompt is not None]
    known = [record for record in good if record.has_counts or record.usage_output is not None]
    return {
        # Of those whose prompts the server counted, so that the two can be compared.
        "input_asked": sum(record.num_input for record in of_prompts),
        "input_said": sum(record.usage_prompt or 0 for record in of_prompts),
        "output_asked": sum(record.num_output_asked for record in good),
        "output_said": sum(record.usage_output or 0 for record in said),
        "output_counted": sum(record.num_counted for record in good),
        "without_usage": len(good) - len(said),
        "counted_exactly": len(exact),
        # Fewer tokens than events cannot be; where tokens were counted, any difference is an error.
        "usage_mismatches": sum(record.usage_output != record.num_counted for record in exact)
        + sum((record.usage_output or 0) < record.num_counted for record in said if not record.has_counts),
        "other_length_than_asked": sum(record.num_output != record.num_output_asked for record in known),
    }


def stages(records: Sequence[Record], rng: np.random.Generator) -> Figures:
    """Summaries of the stages that the server times itself, by name, in seconds."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.timings.items():
            found.setdefault(name, []).append(value)
    return {name: stats.summary(values, rng) for name, values in found.items()}
