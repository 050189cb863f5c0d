"""The headline of a report: its main figures, each held against the objective, and what a reader must know first."""

from dataclasses import dataclass
from typing import Literal

from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.stats import QUANTILES, UNBOUNDED
from scripts.load_tester.config import has_limits
from scripts.load_tester.reporting.formats import NO_VALUE, counted, interval, limit, milliseconds, per_second, percent
from scripts.load_tester.reporting.report import Report

Tone = Literal["good", "warn", "bad", ""]
MAX_KNOWN_BEFORE = 0.05  # a smaller share changes latencies little
MAX_KINDS = 3
MAX_EXAMPLE = 160  # of a server's words, in characters
#: Short name of each latency, its name in words, and what it means.
LATENCIES = {
    "ttft": ("TTFT", "time to first token", "from the instant a request should go out to its first token"),
    "itl": ("ITL", "inter-token latency", "gap between two successive tokens of a stream"),
    "tpot": ("TPOT", "time per output token", "mean gap of a request after its first token"),
    "e2e": ("E2E", "end to end", "from the instant a request should go out to its last token"),
}
#: What a percentile says.
PERCENTILES = {"p50": "half took at most this", "p99": "99 of 100 took at most this"}


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the headline.

    Attributes:
        meaning: the figure in plain words.
        interval: its 95 % interval.
        note: what belongs to it.
        judgement: how it stands against the objective, as ``tone`` says; empty without one.
    """

    name: str
    value: str
    unit: str
    meaning: str
    interval: str = ""
    note: str = ""
    judgement: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """One sentence that stands before all figures."""

    tone: Tone
    text: str


# ---- tiles ----------------------------------------------------------------------------------------------------------


def tiles(report: Report) -> list[Tile]:
    rates, sent = report.throughput, _sent(report)
    return [
        _goodput(report),
        Tile("Throughput", per_second(rates["requests_per_s"]), "requests/s", "answered completely", note=sent),
        Tile(
            "Output", per_second(rates["output_tokens_per_s"]), "tokens/s", "generated, all requests together",
            note=f"{per_second(rates['input_tokens_per_s'])} tokens/s of prompts",
        ),
        _failed(report),
        latency_tile(report, "ttft", "p50"),
        latency_tile(report, "ttft", "p99"),
        latency_tile(report, "itl", "p99"),
        latency_tile(report, "e2e", "p50"),
    ]  # fmt: skip


def what_arrives(report: Report) -> str:
    """What the rate of arrivals counts: in an open loop, sessions if they have turns, which follow their answers."""
    has_turns = not report.config["concurrency"] and any(record.turn for record in report.records)
    return "sessions" if has_turns else "requests"


def _sent(report: Report) -> str:
    rate = report.arrivals["achieved_rate"]
    words = "/s were sent" if what_arrives(report) == "requests" else " sessions/s began"
    return f"{per_second(rate)}{words}" if rate else ""


def _goodput(report: Report) -> Tile:
    service = report.service
    low, high = service["attainment_ci"]
    tone: Tone = ""
    judgement = "no limit given: every answer is good"
    if has_objective(report):
        is_reached, target = reaches_objective(report), f"{report.target * 100:g}%"
        judgement = f"{percent(service['attainment'])} good: {'reaches' if is_reached else 'misses'} {target}"
        tone = "good" if is_reached else "bad"
    return Tile(
        "Goodput", per_second(service["goodput_per_s"]), "requests/s", "answered within all limits",
        f"{percent(low)} to {percent(high)}", judgement=judgement, tone=tone,
    )  # fmt: skip


def has_objective(report: Report) -> bool:
    """Whether the run, one of its classes or one of its requests has a limit or a deadline."""
    is_limited = bool(report.service["limits_s"]) or has_limits(report.config.get("mix"))
    return is_limited or any(record.slos or record.deadline_ms is not None for record in report.measured)


def _failed(report: Report) -> Tile:
    count = report.errors["count"]
    return Tile(
        "Failed", f"{count:,}", f"of {report.num_measured:,}", "measured requests without a complete answer",
        judgement=f"{percent(report.errors['share'])} of requests" if count else "",
        tone="bad" if count else "good" if report.num_measured else "",
    )  # fmt: skip


def latency_tile(report: Report, name: str, share: str) -> Tile:
    """A percentile of a latency; p99 over a limit is only a warning while enough requests are within all limits."""
    short, words, _ = LATENCIES[name]
    figures = report.latency[name]
    title = f"{short} {share}"
    if not figures["count"]:
        return Tile(title, NO_VALUE, "", words, note="no request gave a value")
    least = report.service["limits_s"].get(name)
    judgement = ""
    tone: Tone = ""
    if least is not None:
        is_within = figures[share] <= least
        judgement = f"{'within' if is_within else 'over'} the limit of {limit(least)}"
        tone = "good" if is_within else "warn" if reaches_objective(report) else "bad"
    return Tile(
        title, milliseconds(figures[share]), "ms", f"{words}, {PERCENTILES[share]}",
        interval(figures.get(f"{share}_ci")), _missed(report, name) if share == "p99" else "", judgement, tone,
    )  # fmt: skip


def _missed(report: Report, name: str) -> str:
    """How many requests break a limit of the run; empty if classes or requests have limits of their own."""
    has_others = "slo-" in (report.config.get("mix") or "") or any(record.slos for record in report.measured)
    if name not in report.service["limits_s"] or has_others:
        return ""
    return f"{report.service['misses'].get(name, 0):,} of {counted(report.num_measured, 'request')} over the limit"


def reaches_objective(report: Report) -> bool:
    return bool(report.service["attainment"] >= report.target)


def objective(report: Report) -> str:
    """The service level that the run is held against, in words."""
    limits = ", ".join(
        f"{LATENCIES[name][0]} {limit(value)}{' (99% of its gaps)' if name == 'itl' else ''}"
        for name, value in report.service["limits_s"].items()
    )
    if not has_objective(report):
        return "none: without --slo-ttft, --slo-itl, --slo-tpot or --slo-e2e every answer counts as good"
    return f"{report.target * 100:g}% of requests within {limits or 'their own limits'}"


# ---- what comes first -----------------------------------------------------------------------------------------------


def alerts(report: Report) -> list[Alert]:
    """Whether the figures can be trusted, failures, and everything else that changes how they are read."""
    found = [Alert("bad", f"INVALID: {reason}") for reason in report.reasons]
    if report.errors["count"]:
        found.append(Alert("bad", _failures(report)))
    if report.outputs:
        found.append(Alert("good" if report.outputs["is_passed"] else "bad", outputs_verdict(report.outputs)))
    if is_warm(report):
        share = percent(report.caching["known_before_share"])
        found.append(Alert("warn", f"WARM: the server had {share} of the prompt tokens in its cache before the run: "
                           "use --flush-cache or another --seed."))  # fmt: skip
    if doubt := small_sample(report):
        found.append(Alert("warn", doubt))
    if report.is_valid and not report.all_failed:
        found.insert(0, Alert("good", "The run is valid: requests went out as intended, and the client kept up."))
    return found + [Alert("", note) for note in report.notes]


def _failures(report: Report) -> str:
    kinds = report.errors["kinds"]
    named = ", ".join(f"{name} x {count:,}" for name, count in list(kinds.items())[:MAX_KINDS])
    more = f" and {counted(len(kinds) - MAX_KINDS, 'more kind')}" if len(kinds) > MAX_KINDS else ""
    some = f"{report.errors['count']:,} of {counted(report.num_measured, 'request')}"
    example = report.errors["examples"].get(next(iter(kinds)), "")
    example = example if len(example) <= MAX_EXAMPLE else example[:MAX_EXAMPLE] + "…"
    said = f" ({example})" if example else ""
    return f"{'Every request' if report.all_failed else some} failed: {named}{more}{said}."


def small_sample(report: Report) -> str:
    """Which percentiles rest on the slowest few requests; empty if none does."""
    count = report.latency["ttft"]["count"]
    beyond = [name for name, share in QUANTILES.items() if share**count > UNBOUNDED]
    if not count or not beyond:
        return ""
    names = " and ".join([", ".join(beyond[:-1]), beyond[-1]] if len(beyond) > 1 else beyond)
    few = f"With {counted(count, 'request')}"
    return f"{few}, {names} rest on the slowest few: another run may differ widely."


def is_warm(report: Report) -> bool:
    """Whether the server had more of the prompts in its cache than this run can have put there."""
    return (report.caching["known_before_share"] or 0.0) > MAX_KNOWN_BEFORE


def describe_outputs(outputs: Figures) -> str:
    as_text = f" ({outputs['by_text']:,} as text, without token ids)" if outputs["by_text"] else ""
    parts = [f"{outputs['compared']:,} compared{as_text}, {outputs['differ']:,} differ"]
    if outputs["unanswered"]:
        parts.append(f"{counted(outputs['unanswered'], 'request')} without a whole answer")
    if outputs["not_sent"]:
        parts.append(f"{outputs['not_sent']:,} of {outputs['expected']:,} prompts in the file were never sent")
    if outputs["not_expected"]:
        parts.append(f"{counted(outputs['not_expected'], 'request')} not in the file")
    return "; ".join(parts)


def outputs_verdict(outputs: Figures) -> str:
    """The result of the output check in a sentence."""
    if outputs["is_passed"]:
        return "All expected outputs came, token for token." if not outputs["by_text"] else "All expected outputs came."
    if outputs["differ"]:
        return "OUTPUTS DIFFER FROM THE EXPECTED ONES."
    if not outputs["compared"]:
        others = (
            ": the file has other prompts (they depend on --seed, lengths, classes and the range of token ids, or on "
            "your own file)"
        )
        return f"NO OUTPUT WAS COMPARED{others if outputs['not_sent'] == outputs['expected'] else ''}."
    return "NOT ALL EXPECTED OUTPUTS WERE COMPARED: the compared ones are equal."
