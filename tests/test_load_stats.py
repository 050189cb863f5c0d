"""Percentiles, intervals and tests against values known from elsewhere and from brute force."""

import math

import numpy as np
import pytest

from scripts.load import stats

RNG = np.random.default_rng(0)


def mean(values: stats.Floats) -> float:
    return float(values.mean())


def test_a_summary_of_one_to_a_hundred() -> None:
    found = stats.summary([float(number) for number in range(100, 0, -1)], RNG)
    assert (found["count"], found["mean"], found["min"], found["max"]) == (100, 50.5, 1, 100)
    assert found["p50"] == 50.5
    assert found["p99"] == pytest.approx(99.01)
    assert found["p99.9"] == pytest.approx(99.901)
    assert stats.summary([], RNG) == {"count": 0}


def test_the_quantile_interval_is_that_of_resampling() -> None:
    sample = np.sort(np.random.default_rng(1).exponential(1, 200))
    low, high = stats.quantile_interval(sample, 0.9, np.random.default_rng(2))
    resampled = np.quantile(sample[np.random.default_rng(3).integers(0, 200, (5000, 200))], 0.9, axis=1)
    expected = np.quantile(resampled, (0.025, 0.975))
    assert (low, high) == pytest.approx(tuple(expected), rel=0.1)


def test_intervals_of_the_mean_cover_it_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(4)
    samples = [rng.exponential(2, 100) for _ in range(200)]
    covered = sum(low < 2 < high for low, high in (stats.mean_interval(sample, rng) for sample in samples))
    assert 180 <= covered <= 199


def test_gaps_of_few_requests_are_less_certain_than_as_many_free_ones() -> None:
    """Ten clusters of 100 equal values hold ten values, not a thousand."""
    rng = np.random.default_rng(5)
    clusters = [np.full(100, value) for value in rng.uniform(0, 1, 10)]
    low, high = stats.clustered_quantile_interval(clusters, 0.5, rng)
    free_low, free_high = stats.quantile_interval(np.sort(np.concatenate(clusters)), 0.5, rng)
    assert high - low > 2 * (free_high - free_low)


@pytest.mark.parametrize(
    ("shape", "x", "expected"),
    [(1, 1, 1 - math.exp(-1)), (2, 0.5, 1 - 2 * math.exp(-1)), (3, 2, 0.9380312), (0.5, 0.5, math.erf(0.5))],
)
def test_the_gamma_distribution_has_its_known_values(shape: float, x: float, expected: float) -> None:
    """With mean 1, that of x is P(shape, shape x): P(1, 1), P(2, 1), P(3, 6) and P(1/2, 1/4)."""
    assert float(stats.gamma_cdf(np.array([x]), shape)[0]) == pytest.approx(expected, abs=1e-6)


def test_the_gamma_distribution_of_bursty_gaps_is_that_of_drawn_ones() -> None:
    draws = np.random.default_rng(6).standard_gamma(0.25, 100_000) / 0.25
    for x in (0.001, 0.5, 4.0):
        assert float(stats.gamma_cdf(np.array([x]), 0.25)[0]) == pytest.approx(float((draws <= x).mean()), abs=0.005)


def test_kolmogorovs_distribution_has_its_known_critical_values() -> None:
    assert stats.kolmogorov_p(1.3581) == pytest.approx(0.05, abs=1e-4)
    assert stats.kolmogorov_p(1.6276) == pytest.approx(0.01, abs=1e-4)
    assert stats.kolmogorov_p(0.1) == 1


def test_p_values_are_uniform_for_true_exponential_gaps_and_tiny_for_groups_of_ten() -> None:
    rng = np.random.default_rng(7)
    p_values = [stats.ks_test(rng.standard_exponential(100), stats.exponential_cdf)[1] for _ in range(300)]
    assert 0.4 < np.mean(p_values) < 0.6
    together = np.diff(np.repeat(np.cumsum(rng.standard_exponential(30) * 10), 10))
    assert stats.ks_test(together, stats.exponential_cdf)[1] < 1e-6


def test_gaps_known_to_a_millisecond_are_not_held_to_microseconds() -> None:
    """Half of bursty gaps are shorter than a send takes; that changes their distribution, but nothing that matters."""
    rng = np.random.default_rng(5)
    gaps = rng.standard_gamma(1 / 9, 400) * 9
    as_sent = np.maximum(gaps, 0.004)
    shape = lambda values: stats.gamma_cdf(values, 1 / 9)  # noqa: E731
    assert stats.ks_test(as_sent, shape)[1] < 1e-4
    assert stats.ks_test(as_sent, shape, 0.005)[1] > 0.05
    assert stats.ks_test(rng.standard_exponential(400), shape, 0.005)[1] < 1e-4, "another distribution is still seen"


def test_wilsons_interval_has_its_known_values() -> None:
    assert stats.proportion_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert stats.proportion_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)
    assert stats.proportion_interval(0, 0) == (0.0, 1.0)


def test_jains_index_is_one_for_equals_and_one_nth_for_a_winner() -> None:
    assert stats.jain_index([3, 3, 3]) == 1
    assert stats.jain_index([1, 0, 0, 0]) == 0.25


def test_the_ratio_of_two_samples_says_whether_they_differ() -> None:
    rng = np.random.default_rng(8)
    a = rng.normal(10, 1, 300)
    single = [a[n : n + 1] for n in range(300)]
    same = stats.ratio_interval(single, [rng.normal(10, 1, 1) for _ in range(300)], mean, rng)
    more = stats.ratio_interval(single, [rng.normal(11, 1, 1) for _ in range(300)], mean, rng)
    assert same[1] < 1 < same[2]
    assert more[1] > 1.05 and more[0] == pytest.approx(1.1, abs=0.02)
