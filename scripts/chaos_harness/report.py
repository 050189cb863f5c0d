"""The report at the end of a run, as a dictionary and as a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts.chaos_harness.answers import Verdict
from scripts.chaos_harness.pauses import quantiles
from scripts.chaos_harness.verdicts import Findings, Tally

Figures = dict[str, Any]


def figures(tally: Tally, found: Findings, *, broken: Sequence[str], injected: Sequence[str], took_s: float) -> Figures:
    verdicts = tally.verdicts
    return {
        "took_s": took_s,
        "sent": tally.num_sent,
        "output_tokens_per_s": tally.num_tokens / found.load_s if found.load_s else None,
        "switches_s": list(found.switches_s),
        "since_faults_s": list(found.since_faults_s),
        "equal": verdicts[Verdict.EQUAL],
        "other_tokens_by_rounding": verdicts[Verdict.ROUNDED],
        "agreeing_tokens": tally.num_agreeing / tally.num_tokens if tally.num_tokens else None,
        "recovered": found.num_recovered,
        "sent_to_another_gateway": tally.num_resent,
        "refused": verdicts[Verdict.REFUSED],
        "failed": verdicts[Verdict.FAILED],
        "errors": dict(tally.errors.most_common()),
        "wrong": verdicts[Verdict.WRONG],
        "lost": verdicts[Verdict.LOST],
        "hanging": verdicts[Verdict.HANGING],
        "faults": dict(sorted(Counter(injected).items())),
        "pauses_s": {
            name: {"streams": len(gaps), **dict(zip(("p50", "p99", "max"), quantiles(gaps), strict=True))}
            for name, gaps in sorted(found.pauses.items())
        },
        "leaked_pages": dict(found.pages),
        "left_behind": list(found.left),
        "descriptors": {name: {"before": pair[0], "after": pair[1]} for name, pair in found.descriptors.items()},
        "crashes": list(found.crashes),
        "examples": tally.examples,
        "broken": list(broken),
    }


def table(shown: Figures, repeat: str) -> list[str]:
    """The report as text: counts, pauses, leaks, and at the end what does not hold."""
    errors = ", ".join(f"{code} {count:,}" for code, count in shown["errors"].items()) or "none"
    rows = [
        ("sent", f"{shown['sent']:,} in {shown['took_s']:.0f} s"),
        ("throughput", f"{shown['output_tokens_per_s'] or 0:,.0f} output tokens/s"),
        ("equal", f"{shown['equal']:,}"),
        ("recovered", f"{shown['recovered']:,}"),
        ("sent again", f"{shown['sent_to_another_gateway']:,}"),
        ("refused", f"{shown['refused']:,}"),
        ("failed", f"{shown['failed']:,}"),
        ("errors", errors),
        ("wrong", f"{shown['wrong']:,}"),
        ("lost", f"{shown['lost']:,}"),
        ("hanging", f"{shown['hanging']:,}"),
        ("faults", ", ".join(f"{name} {count}" for name, count in shown["faults"].items()) or "none"),
    ]
    if rounded := shown["other_tokens_by_rounding"]:
        of_all = 1 - rounded / (shown["equal"] + rounded)
        rows.insert(
            3, ("agreement", f"{of_all:.1%} of answers, {shown['agreeing_tokens']:.1%} of tokens; others by rounding")
        )
    if switches_s := shown["switches_s"]:
        p50, _, longest = quantiles(switches_s)
        rows.append(("switches", f"of {len(switches_s)} transports in s: p50 {p50:.2f}, longest {longest:.2f}"))
        p50, _, longest = quantiles(shown["since_faults_s"])
        rows.append(("from fault", f"p50 {p50:.2f}, longest {longest:.2f}, with the time until a page was to be sent"))
    lines = ["", *(f"{name:12}{value}" for name, value in rows)]
    if shown["pauses_s"]:
        lines += ["", f"{'pauses in s':14}{'streams':>9}{'p50':>9}{'p99':>9}{'max':>9}"]
        lines += [
            f"{name:14}{row['streams']:>9,}{row['p50']:>9.3f}{row['p99']:>9.3f}{row['max']:>9.3f}"
            for name, row in shown["pauses_s"].items()
        ]
    lines += ["", *(f"  {example}" for example in shown["examples"])] if shown["examples"] else [""]
    if shown["broken"]:
        return [*lines, *(f"BROKEN  {sentence}" for sentence in shown["broken"]), f"repeat with: {repeat}"]
    return [*lines, "every invariant holds: 0 wrong, 0 lost, 0 hanging, 0 leaked"]
