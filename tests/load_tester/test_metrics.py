"""Figures from records that were made by hand, and what makes a run invalid."""

from typing import Any

import numpy as np
import pytest
from support.load.records import record

from scripts.load_tester.analysis import metrics
from scripts.load_tester.analysis.records import RequestRecord
from scripts.load_tester.analysis.validity import arrival_check, client_load, verdict
from scripts.load_tester.client.client_pool import LoadResult
from scripts.load_tester.client.ipc import ClientFinished
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.request_classes import request_classes_of
from scripts.load_tester.workload.schedule import unit_arrivals

RNG = np.random.default_rng(0)


def test_latencies_count_from_the_intended_instant_and_from_the_send() -> None:
    one = record(1.5, 1.6, 1.8, at=1.0, late=0.4)
    found = metrics.latencies([one], RNG)
    assert found["ttft"]["p50"] == pytest.approx(0.5)
    assert found["ttft_sent"]["p50"] == pytest.approx(0.1)
    assert found["e2e"]["p50"] == pytest.approx(0.8)
    assert found["e2e_sent"]["p50"] == pytest.approx(0.4)
    assert found["itl"]["mean"] == pytest.approx(0.15)
    assert found["first_gap"]["p50"] == pytest.approx(0.1)
    assert found["tpot"]["p50"] == pytest.approx(0.15)


def test_time_per_token_counts_tokens_not_events() -> None:
    """Three events of 2, 3 and 4 tokens: seven tokens follow the first event, in 0.7 s."""
    one = record(1.0, 1.3, 1.7, counts=[2, 3, 4], has_counts=True, num_counted=9, num_output=9)
    assert one.tpot_s == pytest.approx(0.1)
    assert record(1.0).tpot_s is None


def test_failures_have_no_latency_and_count_as_misses() -> None:
    records = [record(0.1, 0.2), record(0.1, 0.9), record(error="timeout"), record(0.1, error="dropped")]
    found = metrics.latencies(records, RNG)
    assert found["ttft"]["count"] == 2
    service = metrics.service(records, {"e2e": 0.5}, {})
    assert (service["good"], service["count"], service["attainment"]) == (1, 4, 0.25)
    assert metrics.goodput(records, {"e2e": 0.5}, {}, 0.0, 2.0) == 0.5
    assert service["misses"] == {"e2e": 1, "failed": 2}
    assert metrics.errors(records)["kinds"] == {"timeout": 1, "dropped": 1}


def test_correlated_attainment_counts_for_fewer() -> None:
    """20 of 40 requests are bad, the first 20 or every second one: equal shares, but fewer independent ones."""

    def service_of(is_good: list[bool]) -> metrics.Figures:
        records = [record(at + (0.1 if good else 2.0), at=float(at)) for at, good in enumerate(is_good)]
        return metrics.service(records[::-1], {"ttft": 1.0}, {})

    together, apart = service_of([False] * 20 + [True] * 20), service_of([False, True] * 20)
    assert together["attainment"] == apart["attainment"] == 0.5
    assert apart["num_free"] == 40 and apart["attainment_ci"] == pytest.approx([0.352, 0.648], abs=1e-3)
    assert together["num_free"] < 10 and together["attainment_ci"][0] < 0.25 < 0.75 < together["attainment_ci"][1]


def test_each_limit_applies_to_its_own_measure() -> None:
    slow_gap = record(0.1, 0.2, 0.9, 1.0)
    assert metrics.misses(slow_gap, {"itl": 0.5}) == ["itl"]
    assert metrics.misses(slow_gap, {"tpot": 0.31, "ttft": 0.1, "e2e": 1.0}) == []
    assert metrics.misses(slow_gap, {"tpot": 0.29, "ttft": 0.09, "e2e": 0.99}) == ["tpot", "ttft", "e2e"]
    assert metrics.misses(record(0.1, 0.3, deadline_ms=200.0), {}) == ["deadline"]


def test_limits_of_a_request_override_those_of_the_run() -> None:
    """Both take 0.1 s to the first token, and one of them had to within 50 ms."""
    records = [record(0.1, 0.2), record(0.1, 0.2, slos={"ttft": 0.05})]
    assert metrics.service(records, {"ttft": 0.5, "e2e": 0.5}, {})["misses"] == {"ttft": 1}
    assert metrics.goodput(records, {"ttft": 0.5}, {}, 0.0, 1.0) == 1.0


def test_a_limit_on_gaps_allows_one_percent_of_the_gaps() -> None:
    """One of three gaps is 0.5 s, so a limit of 499 ms holds for two thirds of the gaps, without interpolation."""
    assert metrics.misses(record(0.1, 0.11, 0.12, 0.62), {"itl": 0.499}) == ["itl"]
    assert metrics.misses(record(0.1, 0.11, 0.12, 0.62), {"itl": 0.501}) == []


def test_requests_without_any_other_in_flight_are_counted() -> None:
    """The second begins before the first has ended, the third after both, and the fourth fails alone."""
    records = [record(1.0, at=0.0), record(2.0, at=0.9), record(3.0, at=2.0), record(at=4.0, error="x", ended_s=5.0)]
    service = metrics.service(records, {"ttft": 1.05}, {})
    assert (service["good"], service["alone_good"], service["alone_count"]) == (2, 1, 2)
    overlapped = [record(9.0, at=0.0), record(2.0, at=1.0), record(4.0, at=3.0)]
    assert metrics.service(overlapped, {}, {})["alone_count"] == 0, "the first one outlasts both"


def test_a_class_has_its_own_limits() -> None:
    kinds = request_classes_of(LoadtestConfig(mix="fast:slo-ttft=50ms;slow:share=1"))
    records = [record(0.1, class_name="fast"), record(0.1, class_name="slow"), record(0.3, class_name="slow")]
    service = metrics.service(records, {"ttft": 0.2}, kinds)
    assert service["good"] == 1
    groups = metrics.groups(records, "class_name", {"ttft": 0.2}, kinds, RNG)
    assert (groups["fast"]["attainment"], groups["slow"]["attainment"]) == (0.0, 0.5)


def test_throughput_counts_tokens_inside_the_window() -> None:
    records = [record(0.5, 1.5, 2.5, usage_prompt=100), record(1.2, 1.4, usage_prompt=50), record(error="x")]
    found = metrics.throughput(records, 1.0, 2.0)
    assert found["output_tokens_per_s"] == 3
    assert found["requests_per_s"] == 1
    assert found["input_tokens_per_s"] == 50


def test_the_window_includes_its_last_response() -> None:
    """A response without streaming has all its tokens at its end."""
    whole = record(2.0, counts=[1], num_counted=1, num_output=32, usage_output=32, usage_prompt=8, ended_s=2.0)
    found = metrics.throughput([whole], 0.0, 2.0)
    assert (found["output_tokens_per_s"], found["input_tokens_per_s"], found["requests_per_s"]) == (16, 4, 0.5)


def test_goodput_counts_the_requests_that_throughput_counts_within_their_limits() -> None:
    """Of five, the first ends before the window, the last after it, and one of the others is late."""
    records = [record(end_s, at=at) for at, end_s in ((0.0, 0.9), (0.5, 1.0), (0.5, 2.0), (1.6, 2.0), (1.6, 2.1))]
    assert metrics.throughput(records, 1.0, 2.0)["requests_per_s"] == 3
    assert metrics.goodput(records, {}, {}, 1.0, 2.0) == 3
    assert metrics.goodput(records, {"ttft": 1.0}, {}, 1.0, 2.0) == 2


def test_usage_larger_than_the_events_is_spread_over_them() -> None:
    """The usage gives the tokens of events without a count."""
    one = record(0.1, 0.2, num_output=6, usage_output=6)
    assert metrics.throughput([one], 0.0, 0.15)["output_tokens_per_s"] == pytest.approx(3 / 0.15)


def test_fairness_compares_shares_of_requested_output() -> None:
    records = [record(0.1, 0.2, 0.3, tenant="a"), record(0.4, 0.5, 0.6, tenant="b"), record(tenant="b", error="x")]
    tenants = metrics.groups(records, "tenant", {}, {}, RNG)
    found = metrics.fairness(tenants, records, records, 0.0, 9.0)
    assert found["service_jain"] == pytest.approx((1 + 0.5) ** 2 / (2 * (1 + 0.25)))
    assert found["ttft_ratio"] == pytest.approx(4)


def test_tokens_of_tenants_are_compared_only_while_several_wait() -> None:
    """In seconds 1 and 2, a and b both have a request waiting throughout; c never waits."""
    records = [
        record(5.5, tenant="a", at=0.5, num_input=7),
        record(1.5, 2.5, 2.75, tenant="a", at=0.5, num_input=4),
        record(3.5, tenant="b", at=0.9, num_input=7),
        record(1.25, 1.75, tenant="b", at=0.5, num_input=9),
        record(1.5, 1.6, 1.7, tenant="c", at=1.4, num_input=100),
    ]
    found = metrics.fairness(metrics.groups(records, "tenant", {}, {}, RNG), records, records, 0.0, 9.0)
    assert found["backlogged_s"] == 2
    assert found["tokens_per_s"] == {"a": (5 + 2) / 2, "b": (11 + 0) / 2}
    assert found["backlogged_jain"] == pytest.approx((3.5 + 5.5) ** 2 / (2 * (3.5**2 + 5.5**2)))


def test_tokens_of_tenants_are_those_of_the_usage_where_events_have_several() -> None:
    """In second 1, a and b both wait throughout; a receives 2 events of 8 tokens each."""
    records = [
        record(1.2, 1.4, tenant="a", at=0.0, num_input=7, num_output=16),
        record(3.5, tenant="a", at=1.0),
        record(3.5, tenant="b", at=1.0),
    ]
    found = metrics.fairness(metrics.groups(records, "tenant", {}, {}, RNG), records, records, 0.0, 2.0)
    assert found["backlogged_s"] == 1 and found["tokens_per_s"] == {"a": 7 + 16, "b": 0}


def test_a_tenant_that_is_starved_does_not_make_the_others_look_fair() -> None:
    """Two of c's three requests failed, so its median time is infinite."""
    records = [record(0.1, tenant="a"), record(0.2, tenant="b"), record(0.1, tenant="c")]
    records += [record(tenant="c", error="timeout"), record(tenant="c", error="timeout")]
    found = metrics.fairness(metrics.groups(records, "tenant", {}, {}, RNG), records, records, 0.0, 9.0)
    assert found["ttft_ratio"] is None and found["unserved"] == ["c"]


def test_tokens_of_warm_up_requests_count_as_service() -> None:
    """In second 2, a and b wait throughout, and a receives tokens of its request from second 0."""
    early = record(2.2, 2.4, 2.6, tenant="a", at=0.0, num_input=7, is_measured=False)
    late = [record(3.5, tenant="a", at=2.0, num_input=1), record(3.5, tenant="b", at=2.0, num_input=1)]
    tenants = metrics.groups(late, "tenant", {}, {}, RNG)
    found = metrics.fairness(tenants, late, [early, *late], 2.0, 9.0)
    assert found["backlogged_s"] == 1 and found["tokens_per_s"] == {"a": 10.0, "b": 0.0}


def test_hits_from_before_the_run_are_told_from_hits_of_the_run() -> None:
    """8 + 6 of 40 prompt tokens were cached; the run explains 8 of the first request and none of the second."""
    found = metrics.caching(
        [
            record(1.0, num_input=20, usage_prompt=20, usage_cached=8, ideal_cached=10),
            record(1.0, num_input=20, usage_prompt=20, usage_cached=6, ideal_cached=0),
        ]
    )
    assert (found["achieved_share"], found["ideal_share"], found["known_before_share"]) == (14 / 40, 10 / 40, 6 / 40)


def test_the_tokens_of_a_chat_template_were_not_known_before_the_run() -> None:
    """All prompts begin with 8 tokens of the template; of the last one, 5 more tokens were cached."""
    new = [record(1.0, num_input=20, usage_prompt=28, usage_cached=8, ideal_cached=0)] * 3
    assert metrics.caching(new)["known_before_share"] == 0
    known = record(1.0, num_input=20, usage_prompt=28, usage_cached=13, ideal_cached=0)
    assert metrics.caching([*new, known])["known_before_share"] == 5 / (4 * 28)


def test_cache_hits_and_their_limit_are_of_the_same_requests() -> None:
    """The second request failed, so its 10 possible hits do not count."""
    found = metrics.caching(
        [
            record(1.0, num_input=20, usage_prompt=20, usage_cached=10, ideal_cached=10),
            record(error="dropped", num_input=20, ideal_cached=19),
        ]
    )
    assert (found["achieved_share"], found["ideal_share"]) == (0.5, 0.5)


def test_usage_is_checked_against_counted_tokens() -> None:
    right = record(0.1, 0.2, usage_output=2, has_counts=True, num_output_asked=2)
    wrong = record(0.1, 0.2, usage_output=3, has_counts=True, num_output=3)
    fewer_than_events = record(0.1, 0.2, usage_output=1, num_output=1)
    more_than_events = record(0.1, 0.2, usage_output=5, num_output=5)
    found = metrics.tokens([right, wrong, fewer_than_events, more_than_events])
    assert found["usage_mismatches"] == 2
    assert found["counted_exactly"] == 2
    assert found["other_length_than_asked"] == 2


def test_uncounted_output_has_no_mismatch() -> None:
    """One of two responses has no usage, so its lengths cannot differ from those asked for."""
    said = record(0.1, 0.2, 0.3, usage_output=3, usage_prompt=10)
    silent = record(0.1, 0.2)  # two events with unknown numbers of tokens
    found = metrics.tokens([said, silent])
    assert (found["input_asked"], found["input_said"], found["other_length_than_asked"]) == (10, 10, 0)
    assert found["uncounted"] == 1


# ---- validity --------------------------------------------------------------------------------------------------------


def run_of(at: "np.ndarray", lateness: "np.ndarray | float" = 0.0) -> list[RequestRecord]:
    return [
        record(float(a) + 1, at=float(a), late=float(late))
        for a, late in zip(at, np.broadcast_to(lateness, at.shape), strict=True)
    ]


def judged(records: list[RequestRecord], *, lag: float = 0.0, cpu: float = 0.1, **options: object) -> list[str]:
    config = LoadtestConfig(**options)  # type: ignore[arg-type]
    outcome = LoadResult(finished=[ClientFinished(cpu * 10, 10.0, [lag] * 100, 1)])
    return verdict(records, arrival_check(records, config, True), client_load(outcome, 0.0, 100), config, 0)


POISSON = np.cumsum(np.random.default_rng(3).exponential(0.1, 400))


def test_a_poisson_run_sent_on_time_is_valid() -> None:
    assert judged(run_of(POISSON), rate="10") == []
    check = arrival_check(run_of(POISSON), LoadtestConfig(rate="10"), True)
    assert check["cv"] == pytest.approx(1, abs=0.1) and check["cv_expected"] == 1 and check["ks_p"] > 0.01
    assert check["distinct_gaps"] > 0.99


def test_ten_requests_at_a_time_are_not_poisson() -> None:
    """Ten processes with the same seed send at the same instants."""
    together = np.repeat(np.cumsum(np.random.default_rng(3).exponential(1.0, 40)), 10)
    reasons = judged(run_of(together), rate="10")
    assert any("not those of poisson" in reason for reason in reasons)
    assert arrival_check(run_of(together), LoadtestConfig(rate="10"), True)["distinct_gaps"] < 0.2


def test_gamma_arrivals_are_checked_by_their_coefficient_of_variation() -> None:
    twice_as_varied = np.cumsum(np.random.default_rng(4).standard_gamma(1 / 4, 400) * 4)
    assert judged(run_of(twice_as_varied / 10), rate="10", arrival="gamma", cv=2.0) == []
    for cv in (0.5, 1.0, 4.0):
        [reason] = judged(run_of(twice_as_varied / 10), rate="10", arrival="gamma", cv=cv)
        assert "not those of gamma arrivals" in reason


@pytest.mark.parametrize(
    ("options", "cv"), [({"arrival": "constant"}, 0.0), ({"arrival": "burst", "burst_size": 5}, 2.0)]
)
def test_constant_and_burst_arrivals_are_checked_by_their_instants(options: dict[str, Any], cv: float) -> None:
    """Half of a schedule sent twice, and a schedule at twice the rate, are on time but wrong."""
    config = LoadtestConfig(rate="10", **options)
    unit = unit_arrivals(config.arrival, 400, RNG, burst_size=config.burst_size)
    assert judged(run_of(unit / 10), rate="10", **options) == []
    check = arrival_check(run_of(unit / 10), config, True)
    assert check["cv"] == pytest.approx(cv, abs=0.02) and check["cv_expected"] == cv and check["ks_p"] is None
    for wrong in (np.repeat(unit[:200] / 5, 2), unit / 20):
        reasons = judged(run_of(wrong), rate="10", **options)
        assert len(reasons) == 1 and "away from" in reasons[0], reasons


def test_late_sends_a_slow_loop_a_busy_client_and_missing_requests_are_each_named() -> None:
    assert "ms late" in judged(run_of(POISSON, 0.1), rate="10")[0]
    assert "loop was up to 200 ms late" in judged(run_of(POISSON), lag=0.2, rate="10")[0]
    assert "97% of a core" in judged(run_of(POISSON), cpu=0.97, rate="10")[0]
    config = LoadtestConfig(rate="10")
    records = run_of(POISSON)
    idle = ClientFinished(0.002, 0.0021, [], 0)  # it had no request
    load = client_load(LoadResult(finished=[idle]), 0.0, 1)
    assert load["busiest"] < 0.01
    assert "3 scheduled requests" in verdict(records, arrival_check(records, config, True), load, config, 3)[0]


def test_late_later_turns_make_a_run_invalid() -> None:
    """Instants of later turns follow from responses, so they count in no rate, but their lateness counts."""
    later = [record(float(at) + 1, at=float(at), late=0.1, turn=1, index=1) for at in POISSON + 0.5]
    reasons = judged([*run_of(POISSON), *later], rate="10")
    assert len(reasons) == 1 and "ms late" in reasons[0]
    check = arrival_check([*run_of(POISSON), *later], LoadtestConfig(rate="10"), True)
    assert check["count"] == 400 and check["lateness"]["max"] == pytest.approx(0.1)


def test_a_rate_that_was_not_reached_is_named() -> None:
    slipping = run_of(POISSON, np.linspace(0, 0.02, 400) * 0 + np.arange(400) * 0.01)
    reasons = judged(slipping, rate="10", max_send_lateness="1h")
    assert any("instead of" in reason for reason in reasons)


def test_one_late_request_at_an_end_of_a_short_run_is_not_a_missed_rate() -> None:
    """30 requests in 0.15 s, the first 5 ms late: the rate is 3 % higher because of one request."""
    instants = np.arange(30) * 0.005
    records = run_of(instants, np.where(instants == 0, 0.005, 0.0))
    assert arrival_check(records, LoadtestConfig(rate="200", arrival="constant"), True)["achieved_rate"] > 205
    assert judged(records, rate="200", arrival="constant") == []


def test_a_ramp_is_checked_in_operational_time() -> None:
    """The raw gaps of a ramp are not exponential; in operational time they are."""
    config = LoadtestConfig(rate="1..100", duration="20")
    operational = np.cumsum(np.random.default_rng(5).exponential(1.0, 950))
    records = run_of(config.profile.to_seconds(operational))
    assert arrival_check(records, config, True)["ks_p"] > 0.01
    assert arrival_check(records, LoadtestConfig(rate="50"), True)["ks_p"] < 1e-4
