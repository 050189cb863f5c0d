"""A plan as text and as a dictionary."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scripts.load_tester.reporting.formats import counted, limit, milliseconds, per_second, percent
from scripts.simulator.config import SimulateConfig
from scripts.simulator.planning.deployment import Deployment
from scripts.simulator.planning.planner import LoadRow, PlanResult
from scripts.simulator.planning.search import MAX_FACTOR, Found
from scripts.simulator.planning.verdict import Verdict

WIDTH, INDENT = 80, 12
#: A window should last this many times the objective of the first token.
MIN_SPANS = 10.0


def objective_words(config: SimulateConfig) -> str:
    limits = ", ".join(f"{name.upper()} {limit(seconds)}" for name, seconds in config.slos.items())
    return f"{percent(config.slo_attainment)} of requests within {limits}"


def plan_lines(result: PlanResult, config: SimulateConfig) -> list[str]:
    """The plan, the most important first, in lines of at most 80 columns."""
    load = result.load
    lines = _wrapped("objective", objective_words(config))
    lines += _wrapped(
        "load",
        f"{per_second(load.requests_per_s)} requests/s, {load.input_tokens_per_s:,.0f} tokens/s of prompts, "
        f"{load.output_tokens_per_s:,.0f} of outputs, in the simulated windows",
    )
    if words := short_words(result, config):
        lines += _wrapped("note", words)
    chosen = result.chosen
    if chosen is None:
        return lines + _wrapped("plan", f"none: {result.why}")
    lines += _wrapped("plan", f"{deployment_words(result, chosen.deployment)}; {chosen.deployment.settings.words()}")
    lines += _wrapped("holds", verdict_words(chosen.verdict))
    lines += _wrapped("cost", cost_words(result, chosen.deployment))
    lines += _wrapped("instead", alternative_words(result))
    lines += _wrapped("colocated", crossing_words(result))
    for deployment, factor in result.capacities:
        name = "reserve" if deployment == chosen.deployment else "next node"
        lines += _wrapped(name, _capacity_words(result, deployment, factor))
    lines += _wrapped("run it", " ".join(chosen.deployment.flags()))
    return [*lines, "", *load_table(result)]


def short_words(result: PlanResult, config: SimulateConfig) -> str:
    """A warning if windows are too short for queues to grow; empty if they are not."""
    span_s, ttft_s = result.load.span_s / config.plan_windows, config.slos.get("ttft", 0.0)
    if span_s >= MIN_SPANS * ttft_s:
        return ""
    return (
        f"a window lasts {span_s:.3g} s, too short for queues to grow beside a TTFT of {limit(ttft_s)}: "
        "raise --plan-requests"
    )


def _wrapped(name: str, words: str) -> list[str]:
    return textwrap.wrap(
        f"{name:{INDENT}}{words}", WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False, break_long_words=False
    )


def deployment_words(result: PlanResult, deployment: Deployment) -> str:
    price = result.price_per_hour(deployment)
    cost = f", {price:,.2f} $/h" if price else ""
    nodes = "node" if deployment.num_nodes == 1 else "nodes"
    return f"{deployment.words()} {nodes}, {counted(result.num_devices(deployment), 'device')}{cost}"


def verdict_words(verdict: Verdict) -> str:
    low, high = verdict.interval
    return (
        f"{percent(verdict.share)} of requests (95% interval {percent(low)} to {percent(high)} over "
        f"{verdict.num_windows} windows; {percent(verdict.confidence)} sure); worst window: TTFT p99 "
        f"{milliseconds(verdict.ttft_p99_s)} ms, ITL p99 {milliseconds(verdict.itl_p99_s)} ms"
    )


def cost_words(result: PlanResult, deployment: Deployment) -> str:
    if not result.price_per_hour(deployment):
        return "unknown: give --price-per-hour"
    return (
        f"{result.price_per_million(deployment):.3g} $ per million tokens of prompts and outputs, "
        f"{result.price_per_million_output(deployment):.3g} $ per million of outputs"
    )


def alternative_words(result: PlanResult) -> str:
    """The other kind of service, beside the chosen one."""
    chosen = result.chosen
    assert chosen is not None
    is_colocated = chosen.deployment.settings.is_colocated
    other = result.best if is_colocated else result.colocated
    if other is None:
        kind = "prefill and decode nodes" if is_colocated else "a colocated pool"
        return f"{kind}: no number of nodes holds the objectives"
    return f"{deployment_words(result, other.deployment)}; {other.deployment.settings.words()}"


def crossing_words(result: PlanResult) -> str:
    """At which of the simulated loads a colocated pool is cheaper."""
    cheaper = result.colocated_cheaper_at()
    factors = [row.factor for row in result.rows]

    def rates(some: Sequence[float]) -> str:
        return " and ".join(per_second(factor * result.load.requests_per_s) for factor in some) + " requests/s"

    if not cheaper:
        return f"not cheaper at any simulated load, {rates([factors[0], factors[-1]])} among them" if factors else "-"
    if cheaper == factors:
        return f"cheaper at all simulated loads, up to {rates(factors[-1:])}"
    if cheaper == factors[: len(cheaper)]:
        return f"cheaper up to {rates(cheaper[-1:])}, and no longer at {rates([factors[len(cheaper)]])}"
    others = [factor for factor in factors if factor not in cheaper]
    if others == factors[: len(others)]:
        return f"cheaper from {rates(cheaper[:1])} on, and not yet at {rates(others[-1:])}"
    return f"cheaper at {rates(cheaper)}, not at {rates(others)}"


def _capacity_words(result: PlanResult, deployment: Deployment, factor: float) -> str:
    rate = factor * result.load.requests_per_s
    own = result.capacities[0][1]
    if own >= MAX_FACTOR:
        return f"{deployment.words()} hold over {per_second(rate)} requests/s, the last load that was tried"
    if deployment == result.capacities[0][0]:
        return f"{deployment.words()} hold up to {per_second(rate)} requests/s, {factor - 1:+.0%}"
    gain = f"{factor / own - 1:+.0%}" if own else "-"
    return f"{deployment.words()}: up to {per_second(rate)} requests/s, {gain} against the plan"


def load_table(result: PlanResult) -> list[str]:
    """What each load needs, separate and colocated, with the cost per million tokens."""
    lines = [f"{'requests/s':>10}  {'prefill + decode':30}{'$/Mtok':>8}  {'colocated':20}{'$/Mtok':>8}"]
    for row in result.rows:
        rate = per_second(row.factor * result.load.requests_per_s)
        lines.append(f"{rate:>10}  {_cell(result, row, row.separate, 30)}  {_cell(result, row, row.colocated, 20)}")
    return lines


def _cell(result: PlanResult, row: LoadRow, found: Found | None, width: int) -> str:
    if found is None:
        return f"{'-':{width}}{'-':>8}"
    price = result.price_per_million(found.deployment, row.factor)
    return f"{found.deployment.words():{width}}{f'{price:.3g}' if price else '-':>8}"


def plan_figures(result: PlanResult, config: SimulateConfig) -> dict[str, Any]:
    """The plan for programs."""

    def of(found: Found | None, factor: float = 1.0) -> dict[str, Any] | None:
        if found is None:
            return None
        deployment = found.deployment
        return {
            "prefill": deployment.num_prefill,
            "decode": deployment.num_decode,
            **asdict(deployment.settings),
            "devices": result.num_devices(deployment),
            "price_per_hour": result.price_per_hour(deployment),
            "price_per_million_tokens": result.price_per_million(deployment, factor),
            "price_per_million_output_tokens": result.price_per_million_output(deployment, factor),
            "verdict": asdict(found.verdict),
            "flags": list(deployment.flags()),
        }

    return {
        "objective": {"share": config.slo_attainment, "confidence": config.plan_confidence, **config.slos},
        "load": {
            "requests_per_s": result.load.requests_per_s,
            "input_tokens_per_s": result.load.input_tokens_per_s,
            "output_tokens_per_s": result.load.output_tokens_per_s,
        },
        "plan": of(result.chosen),
        "why_none": result.why,
        "separate": of(result.best),
        "colocated": of(result.colocated),
        "loads": [
            {"factor": row.factor, "separate": of(row.separate, row.factor), "colocated": of(row.colocated, row.factor)}
            for row in result.rows
        ],
        "colocated_cheaper_at": result.colocated_cheaper_at(),
        "capacities": [
            {"prefill": deployment.num_prefill, "decode": deployment.num_decode, "factor": factor}
            for deployment, factor in result.capacities
        ],
    }
