"""Diagnostics of a run, below its headline: how the load went out, what the client did, caching, tokens, fairness."""

from dataclasses import dataclass

from scripts.load_tester.reporting.formats import NO_VALUE, counted, milliseconds, per_second, percent
from scripts.load_tester.reporting.headline import describe_outputs, is_warm, what_arrives
from scripts.load_tester.reporting.report import Report

MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the diagnostics; ``meaning`` explains its terms."""

    name: str
    value: str
    meaning: str


def facts(report: Report) -> list[Fact]:
    return [*_load_facts(report), *_client_facts(report), *_service_facts(report), *_token_facts(report)]


def _load_facts(report: Report) -> list[Fact]:
    arrivals = report.arrivals
    late = arrivals["lateness"]
    apart = report.num_requests - report.num_measured
    rate = f"{_exact(arrivals['achieved_rate'])}/s" if arrivals["achieved_rate"] else NO_VALUE
    if arrivals["intended_rate"]:
        rate += f", {_exact(arrivals['intended_rate'])}/s intended"
    found = [
        Fact(
            "requests", f"{report.num_requests:,} sent in {report.length_s:.1f} s, {report.num_measured:,} measured",
            "requests of the warm-up and cool-down, and those cut off at the end, are not measured" if apart else "",
        ),
        Fact("arrivals", rate, f"rate at which {what_arrives(report)} began, against the plan"),
    ]  # fmt: skip
    if arrivals["cv"] is not None:
        expected = f", {arrivals['cv_expected']:.2f} expected" if arrivals["cv_expected"] is not None else ""
        found.append(
            Fact(
                "burstiness",
                f"{arrivals['cv']:.2f}{expected}",
                "deviation of the gaps between requests over their mean",
            )
        )
    if arrivals["ks_p"] is not None:
        found.append(
            Fact("gap test", f"p = {arrivals['ks_p']:.2g}",
                 "chance of such gaps if arrivals are as intended (Kolmogorov-Smirnov); invalid below 0.0001")
        )  # fmt: skip
    found.append(
        Fact("send lag", f"p50 {milliseconds(late['p50'])} ms, p99 {milliseconds(late['p99'])} ms",
             "how late requests went out. Latencies count from the intended instant, so that waiting for a slow "
             "server or client is not left out (coordinated omission)")
    )  # fmt: skip
    return found


def _client_facts(report: Report) -> list[Fact]:
    client = report.client
    per_event = f", {client['cpu_ms_per_event']:.3f} ms CPU a token" if client["cpu_ms_per_event"] else ""
    first = "no request was sent" if report.start_up_s is None else f"{report.start_up_s:.2f} s after the start"
    return [
        Fact(
            "client", f"{client['processes']} process{'es' if client['processes'] > 1 else ''}, busiest "
            f"{percent(min(1.0, client['busiest']))} of a core{per_event}",
            "this program; above 90% the run is invalid",
        ),
        Fact(
            "client lag", f"p99 {milliseconds(client['lag_p99_s'])} ms",
            "how late the client's own event loop was: time stamps are no more exact than this",
        ),
        Fact("first send", first, "from the start of the command to the first request"),
    ]  # fmt: skip


def _service_facts(report: Report) -> list[Fact]:
    service, fairness = report.service, report.fairness
    found = []
    if service["misses"]:
        words = ", ".join(
            f"{name.upper() if len(name) < 5 else name} {count:,}" for name, count in service["misses"].items()
        )
        found.append(Fact("missed", words, "requests over each limit; one request may miss several"))
    if not fairness:
        return found
    ratio = f"{fairness['ttft_ratio']:.2f}" if fairness["ttft_ratio"] else NO_VALUE
    found.append(
        Fact("fairness", f"{fairness['service_jain']:.3f}; TTFT ratio {ratio}",
             "Jain's index over the tenants' served shares, 1 is even; and worst over best median TTFT of a tenant")
    )  # fmt: skip
    if fairness["unserved"]:
        found.append(
            Fact("unserved", ", ".join(fairness["unserved"][:MAX_NAMES]), "more than half of their requests failed")
        )
    if fairness["tokens_per_s"]:
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in list(fairness["tokens_per_s"].items())[:MAX_NAMES])
        found.append(
            Fact("contended", f"{fairness['backlogged_jain']:.3f} in {fairness['backlogged_s']:,} s; tokens/s: {rates}",
                 "Jain's index over the seconds in which several tenants had requests waiting")
        )  # fmt: skip
    return found


def _token_facts(report: Report) -> list[Fact]:
    caching, tokens = report.caching, report.tokens
    found = []
    if caching["ideal_tokens"] or caching["achieved_tokens"]:
        value = f"{percent(caching['achieved_share'])} of prompt tokens, {percent(caching['ideal_share'])} possible"
        found.append(Fact("cache hits", value, "prompt tokens that the server had not to compute again"))
    if is_warm(report):
        found.append(
            Fact(
                "warm", f"{percent(caching['known_before_share'])} of prompt tokens", "were cached before the run began"
            )
        )
    if tokens["usage_mismatches"]:
        value = f"differs in {counted(tokens['usage_mismatches'], 'response')}"
        found.append(Fact("usage", value, "the server's count of tokens against the tokens received"))
    if tokens["input_said"] and tokens["input_asked"] and tokens["input_said"] != tokens["input_asked"]:
        value = f"{counted(tokens['input_asked'], 'token')} sent, {tokens['input_said']:,} by the server's count"
        found.append(Fact("prompts", value, "a chat template or another tokenizer adds tokens"))
    if tokens["other_length_than_asked"]:
        value = counted(tokens["other_length_than_asked"], "response")
        found.append(Fact("lengths", value, "with another number of tokens than asked for"))
    if tokens["uncounted"]:
        value = f"{counted(tokens['uncounted'], 'response')} without usage: each event counts as one token"
        found.append(Fact("tokens", value, "the server said neither how many tokens came nor which"))
    if report.outputs:
        found.append(Fact("outputs", describe_outputs(report.outputs), "against --expect-file"))
    return found


def _exact(rate: float) -> str:
    return per_second(rate) if rate >= 1000 else f"{rate:.4g}"
