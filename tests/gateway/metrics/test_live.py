"""Samples are differences of totals, and percentiles come from the buckets of histograms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics.collectors import MetricTotals
from gateway.metrics.live import NUM_SAMPLES, WINDOW_S, LiveError, LiveHistory, percentile

BOUNDS = (0.1, 0.2, 0.4)
NOTHING = MetricTotals(
    at=0.0,
    num_ended=0,
    num_tokens=0,
    errors={},
    first_token_bounds=BOUNDS,
    first_tokens=(0, 0, 0, 0),
    gap_bounds=BOUNDS,
    gaps=(0, 0, 0, 0),
    num_running=0,
    num_waiting=0,
)


def history_of(*totals):
    history = LiveHistory()
    for one in totals:
        history.add(one)
    return history


def test_a_percentile_is_interpolated_inside_its_bucket():
    assert percentile(BOUNDS, (4, 0, 0, 0), 0.5) == 0.05
    assert percentile(BOUNDS, (1, 0, 1, 0), 0.5) == 0.1
    assert percentile(BOUNDS, (0, 0, 4, 0), 0.75) == 0.35
    assert percentile(BOUNDS, (1, 0, 0, 99), 0.99) == 0.4, "nothing is known above the highest bound"
    assert percentile(BOUNDS, (0, 0, 0, 0), 0.5) is None


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 0.99))
def test_a_percentile_lies_in_the_bucket_that_holds_it(counts, share):
    found = percentile(BOUNDS, counts, share)
    assert (found is None) == (sum(counts) == 0)
    if found is not None:
        assert sum(counts[: sum(bound < found - 1e-6 for bound in BOUNDS)]) <= share * sum(counts)


def test_rates_are_per_second_however_late_a_sample_is():
    errors = {"queue_full": 4, "aborted": 6}
    later = replace(NOTHING, at=2.0, num_ended=3, num_tokens=100, errors=errors, num_running=5, num_waiting=6)
    (sample,) = history_of(NOTHING, later).samples
    assert (sample.requests_per_s, sample.tokens_per_s, sample.errors_per_s) == (1.5, 50.0, 2.0)
    assert (sample.running, sample.waiting) == (5, 6)


def test_a_percentile_covers_the_last_seconds_only():
    slow = replace(NOTHING, at=1.0, first_tokens=(0, 0, 10, 0), gaps=(10, 0, 0, 0))
    history = history_of(NOTHING, *(replace(slow, at=float(second)) for second in range(1, WINDOW_S + 2)))
    samples = list(history.samples)
    assert samples[0].ttft_p50_s == pytest.approx(0.3)
    assert samples[0].ttft_p99_s == pytest.approx(0.398)
    assert samples[0].inter_token_p50_s == pytest.approx(0.05)
    assert [sample.ttft_p50_s is None for sample in samples] == [False] * WINDOW_S + [True]


def test_a_minute_is_kept():
    totals = [replace(NOTHING, at=float(second), num_ended=second) for second in range(NUM_SAMPLES * 2)]
    samples = history_of(*totals).samples
    assert len(samples) == NUM_SAMPLES
    assert {sample.requests_per_s for sample in samples} == {1.0}


def test_errors_are_counted_by_code_in_all_and_in_the_last_minute():
    def at(second, **errors):
        return replace(NOTHING, at=float(second), errors=errors)

    history = history_of(at(0), at(1, queue_full=2), *(at(second, queue_full=2, aborted=1) for second in range(2, 70)))
    assert history.errors() == [LiveError("queue_full", 2, 0), LiveError("aborted", 1, 0)]
    history.add(at(70, queue_full=2, aborted=4))
    assert history.errors() == [LiveError("aborted", 4, 3), LiveError("queue_full", 2, 0)]
    assert history_of().errors() == []
