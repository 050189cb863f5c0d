"""The summary on the terminal, most important figures first."""

from typing import Any

from scripts.load_tester.analysis.metrics import Figures
from scripts.load_tester.analysis.stage_timeline import NAMES
from scripts.load_tester.analysis.stats import QUANTILES, UNBOUNDED
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.reporting.sanitize import printable

WIDTH = 160
MAX_KINDS = 20
MAX_KNOWN_BEFORE = 0.05  # every prompt of a chat begins with the server's own template
ROWS = (
    ("time to first token", "ttft"),
    ("  from the send", "ttft_sent"),
    ("gap between tokens", "itl"),
    ("  first to second", "first_gap"),
    ("time per output token", "tpot"),
    ("end to end", "e2e"),
    ("  from the send", "e2e_sent"),
)


def milliseconds(value: Any) -> str:
    """A duration in seconds as milliseconds with three or four significant digits."""
    if not isinstance(value, int | float):
        return "-"
    scaled = value * 1e3
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}"


def percent(value: Any) -> str:
    """A share as a percentage; only all is 100.0 %, and only nothing 0.0 %."""
    if not isinstance(value, int | float):
        return "-"
    text = f"{value:.1%}"
    return ">99.9%" if text == "100.0%" and value < 1 else "<0.1%" if text == "0.0%" and value > 0 else text


def per_second(value: float) -> str:
    """A rate with three or four significant digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def summary_lines(report: Report) -> list[str]:
    """The whole summary, without control characters."""
    notes = [*report.notes, ""] if report.notes else []
    lines = [*notes, *_load_lines(report), "", *_latency_lines(report.latency), "", *_rate_lines(report)]
    lines += _service_lines(report) + _group_lines("class", report.classes) + _group_lines("tenant", report.tenants)
    lines += _other_lines(report)
    lines += ["", *verdict_lines(report)]
    return [printable(line) for line in lines]


def fact_lines(report: Report) -> list[str]:
    """All lines but latencies, groups and the verdict; each begins with a keyword."""
    return [*_load_lines(report), *_rate_lines(report), *_service_lines(report), *_other_lines(report)]


def _load_lines(report: Report) -> list[str]:
    arrivals, client = report.arrivals, report.client
    late = arrivals["lateness"]
    rate = f"{_exact(arrivals['achieved_rate'])}/s" if arrivals["achieved_rate"] else "-"
    intended = f" of {_exact(arrivals['intended_rate'])}/s intended" if arrivals["intended_rate"] else ""
    shape = f", CV {arrivals['cv']:.2f}" if arrivals["cv"] is not None else ""
    if arrivals["cv_expected"] is not None and shape:
        shape += f" ({arrivals['cv_expected']:.2f} expected)"
    if arrivals["ks_p"] is not None:
        shape += f", KS p {arrivals['ks_p']:.2g}"
    first = (
        "no request was sent" if report.start_up_s is None else f"first request {report.start_up_s:.2f} s after start"
    )
    per_event = f"{client['cpu_ms_per_event']:.4f} ms per token event" if client["cpu_ms_per_event"] else "-"
    return [
        f"requests   {report.num_requests:,} sent, {report.num_measured:,} measured, "
        f"{report.errors['count']:,} failed, in {report.length_s:.1f} s",
        f"arrivals   {rate}{intended}{shape}; sent late p50 {milliseconds(late['p50'])} ms, "
        f"p99 {milliseconds(late['p99'])} ms",
        f"client     {client['processes']} process{'es' if client['processes'] > 1 else ''}, CPU {per_event}, "
        f"loop lag p99 {milliseconds(client['lag_p99_s'])} ms, {first}",
    ]


def _exact(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _latency_lines(latency: Figures) -> list[str]:
    names = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
    lines = [f"{'ms':24}" + "".join(f"{name:>10}" for name in names)]
    for title, name in ROWS:
        figures = latency[name]
        if figures["count"]:
            lines.append(f"{title:24}" + "".join(f"{milliseconds(figures[column]):>10}" for column in names))
    lines.append("Latencies count from the intended instant; 95 % intervals are in the JSON and on the page.")
    count = latency["ttft"]["count"]
    beyond = [name for name, share in QUANTILES.items() if share**count > UNBOUNDED]
    if count and beyond:
        lines.append(
            f"With {count:,} requests {', '.join(beyond)} depend on the slowest few: another run may differ widely."
        )
    return lines


def _rate_lines(report: Report) -> list[str]:
    rates = report.throughput
    return [
        f"throughput {per_second(rates['requests_per_s'])} requests/s, "
        f"{rates['output_tokens_per_s']:,.1f} tokens/s out, {rates['input_tokens_per_s']:,.1f} tokens/s in"
    ]


def _service_lines(report: Report) -> list[str]:
    service = report.service
    low, high = service["attainment_ci"]
    limits = ", ".join(f"{name} {milliseconds(limit)} ms" for name, limit in service["limits_s"].items())
    lines = [
        f"goodput    {per_second(service['goodput_per_s'])} requests/s; {percent(service['attainment'])} good "
        f"({percent(low)} to {percent(high)}) within {limits or 'no limit but success'}"
    ]
    if service["misses"]:
        lines.append("misses     " + ", ".join(f"{name} {count:,}" for name, count in service["misses"].items()))
    for name, count in list(report.errors["kinds"].items())[:MAX_KINDS]:
        example = report.errors["examples"].get(name, "")
        line = f"error      {name} x {count:,}{': ' + example if example else ''}"
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
    if len(report.errors["kinds"]) > MAX_KINDS:
        lines.append(f"error      and {len(report.errors['kinds']) - MAX_KINDS:,} more kinds")
    return lines


def _group_lines(title: str, groups: Figures) -> list[str]:
    if not groups:
        return []
    lines = ["", f"{title:24}{'count':>10}{'failed':>10}{'good':>10}{'TTFT p50':>10}{'TTFT p99':>10}{'E2E p50':>10}"]
    for name, own in list(groups.items())[:MAX_KINDS]:
        cells = [f"{own['count']:,}", f"{own['failed']:,}", percent(own["attainment"])]
        cells += [milliseconds(own["ttft"].get(share)) for share in ("p50", "p99")]
        cells.append(milliseconds(own["e2e"].get("p50")))
        lines.append(f"{name[:23]:24}" + "".join(f"{cell:>10}" for cell in cells))
    if len(groups) > MAX_KINDS:
        lines.append(f"and {len(groups) - MAX_KINDS:,} more")
    return lines


def _other_lines(report: Report) -> list[str]:
    caching, tokens, fairness, outputs = report.caching, report.tokens, report.fairness, report.outputs
    lines = []
    if fairness:
        ratio = f"{fairness['ttft_ratio']:.2f}" if fairness["ttft_ratio"] else "-"
        if fairness["unserved"]:
            ratio += f" (more than half failed of {', '.join(fairness['unserved'][:8])})"
        lines.append(f"fairness   Jain {fairness['service_jain']:.3f}, worst over best median TTFT {ratio}")
        if fairness["tokens_per_s"]:
            rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in list(fairness["tokens_per_s"].items())[:8])
            lines.append(
                f"           while several waited ({fairness['backlogged_s']:,} s): Jain "
                f"{fairness['backlogged_jain']:.3f}, tokens/s {rates}"
            )
    if caching["ideal_tokens"] or caching["achieved_tokens"]:
        lines.append(
            f"cache      {percent(caching['achieved_share'])} of prompt tokens; "
            f"a perfect cache would have held {percent(caching['ideal_share'])}"
        )
    if is_warm(report):
        share = percent(caching["known_before_share"])
        lines.append(
            f"WARM       {share} of prompt tokens were in the server's cache before the run: use --flush-cache or "
            "another --seed"
        )
    if tokens["usage_mismatches"]:
        lines.append(f"usage      of {tokens['usage_mismatches']:,} responses differs from the tokens received")
    if tokens["input_said"] and tokens["input_asked"] and tokens["input_said"] != tokens["input_asked"]:
        lines.append(f"prompts    {tokens['input_asked']:,} tokens, {tokens['input_said']:,} by the server's count")
    if tokens["other_length_than_asked"]:
        lines.append(f"lengths    {tokens['other_length_than_asked']:,} responses do not have the length asked for")
    if outputs:
        lines.append("outputs    " + describe_outputs(outputs))
    for name, figures in report.stages.items():
        title = NAMES.get(name, name.removesuffix("_s"))
        lines.append(
            f"stage      {title}: p50 {milliseconds(figures['p50'])} ms, p99 {milliseconds(figures['p99'])} ms"
        )
    return lines


def is_warm(report: Report) -> bool:
    """Whether the server had more of the prompts in its cache than this run can have put there."""
    return (report.caching["known_before_share"] or 0.0) > MAX_KNOWN_BEFORE


def describe_outputs(outputs: Figures) -> str:
    as_text = f" ({outputs['by_text']:,} as text, without token ids)" if outputs["by_text"] else ""
    parts = [f"{outputs['compared']:,} compared{as_text}, {outputs['differ']:,} differ"]
    if outputs["unanswered"]:
        parts.append(f"{outputs['unanswered']:,} requests failed or were cut off")
    if outputs["not_sent"]:
        parts.append(f"{outputs['not_sent']:,} of {outputs['expected']:,} prompts in the file were never sent")
    if outputs["not_expected"]:
        parts.append(f"{outputs['not_expected']:,} requests are not in the file")
    return "; ".join(parts)


def verdict_lines(report: Report) -> list[str]:
    """Whether the run is valid, and why not; whether the outputs are the expected ones."""
    return [*_run_lines(report), *filter(None, [outputs_verdict(report.outputs)])]


def outputs_verdict(outputs: Figures) -> str:
    """The result of the output check in a sentence; empty without expected outputs."""
    if not outputs:
        return ""
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


def _run_lines(report: Report) -> list[str]:
    if report.is_valid and report.all_failed:
        return ["Every request failed."]
    if report.is_valid:
        failed = f" {report.errors['count']:,} of {report.num_measured:,} failed." if report.errors["count"] else ""
        return ["The run is valid: requests went out as intended, and the client kept up." + failed]
    return ["THE RUN IS INVALID:", *(f"  - {reason}" for reason in report.reasons)]
