"""Percentiles, intervals and tests against values known from elsewhere and from brute force."""

import math

import numpy as np
import pytest

from scripts.load_tester.analysis import stats

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
    low, high = stats.quantile_interval(sample, 0.9, np.random.default_rng(2), 200)
    resampled = np.quantile(sample[np.random.default_rng(3).integers(0, 200, (5000, 200))], 0.9, axis=1)
    expected = np.quantile(resampled, (0.025, 0.975))
    assert (low, high) == pytest.approx(tuple(expected), rel=0.1)


def test_intervals_of_the_mean_have_their_coverage() -> None:
    rng = np.random.default_rng(4)
    samples = [rng.exponential(2, 100) for _ in range(200)]
    covered = sum(low < 2 < high for low, high in (stats.mean_interval(sample, rng, 100) for sample in samples))
    assert 180 <= covered <= 199


def test_clustered_gaps_are_less_certain_than_independent_ones() -> None:
    """Twenty clusters of 100 equal values count as twenty values, not two thousand."""
    rng = np.random.default_rng(5)
    clusters = [np.full(100, value) for value in rng.uniform(0, 1, 20)]
    low, high = stats.clustered_intervals(clusters, rng)["p50_ci"]
    free_low, free_high = stats.quantile_interval(np.sort(np.concatenate(clusters)), 0.5, rng, 2_000)
    assert low and high and free_low and free_high
    assert high - low > 2 * (free_high - free_low)


def test_a_small_sample_does_not_bound_an_interval() -> None:
    """All of 100 values lie below the 99th percentile with probability 0.99^100 = 0.37; all of 400 with 0.02."""
    values = np.random.default_rng(6).exponential(1, 400)
    few, many = stats.summary(values[:100], RNG), stats.summary(values, RNG)
    assert few["p99_ci"][1] is None and many["p99_ci"][1] is not None  # type: ignore[index]
    assert many["p99.9_ci"][1] is None  # type: ignore[index]
    lone = stats.summary([1.0], RNG)
    assert lone["p50"] == 1 and lone["p50_ci"] == lone["mean_ci"] == [None, None]
    gaps = stats.clustered_intervals([values[n : n + 10] for n in range(0, 400, 10)], RNG)
    assert gaps["p99.9_ci"][1] is None and gaps["p50_ci"][1] is not None
    assert stats.clustered_intervals([values], RNG)["p50_ci"] == [None, None], "the gaps of one request"


def queueing(count: int, load: float, rng: np.random.Generator) -> stats.Floats:
    """Sojourn times of an M/M/1 queue, which are correlated."""
    arrivals, services = np.cumsum(rng.exponential(1 / load, count)), rng.exponential(1, count)
    free_at, found = 0.0, []
    for arrival, service in zip(arrivals, services, strict=True):
        free_at = max(free_at, arrival) + service
        found.append(free_at - arrival)
    return np.array(found)


def test_intervals_of_correlated_values_have_their_coverage() -> None:
    """The true mean is 1 / (1 - load) = 2; intervals for independent values miss it in a third of the cases."""
    rng = np.random.default_rng(7)
    samples = [queueing(1000, 0.5, rng) for _ in range(100)]
    assert 4 < np.median([stats.correlation_time(sample) for sample in samples]) < 14
    ends = [stats.summary(sample, rng)["mean_ci"] for sample in samples]
    assert sum(low < 2 < high for low, high in ends) >= 87  # type: ignore[misc]
    alone = [stats.mean_interval(np.sort(sample), rng, 1_000) for sample in samples]
    assert sum(low < 2 < high for low, high in alone) < 75  # type: ignore[operator]


def test_independent_values_all_count() -> None:
    rng = np.random.default_rng(8)
    times = [stats.correlation_time(rng.exponential(1, 300)) for _ in range(50)]
    assert np.median(times) < 1.2 and stats.correlation_time(np.ones(9)) == 1
    blocks = stats.Blocks([rng.exponential(1, 2) for _ in range(50)])
    assert (blocks.count, blocks.size) == (50, 100)


def test_blocks_are_redrawn_whole() -> None:
    """Each of the clusters (0, 1), (2), (3, 4, 5) is drawn with all of its values or none."""
    blocks = stats.Blocks([np.array(values, dtype=float) for values in ((0, 1), (2,), (), (3, 4, 5))])
    for _ in range(20):
        drawn = np.bincount(blocks.redrawn(RNG).astype(int), minlength=6)
        assert drawn[0] == drawn[1] and drawn[3] == drawn[4] == drawn[5]
        assert drawn[0] + drawn[2] + drawn[3] == 3


@pytest.mark.parametrize(
    ("shape", "x", "expected"),
    [(1, 1, 1 - math.exp(-1)), (2, 0.5, 1 - 2 * math.exp(-1)), (3, 2, 0.9380312), (0.5, 0.5, math.erf(0.5))],
)
def test_the_gamma_distribution_has_its_known_values(shape: float, x: float, expected: float) -> None:
    """With mean 1 the distribution function is P(shape, shape x): P(1, 1), P(2, 1), P(3, 6) and P(1/2, 1/4)."""
    assert float(stats.gamma_cdf(np.array([x]), shape)[0]) == pytest.approx(expected, abs=1e-6)


def test_the_gamma_distribution_matches_drawn_gaps() -> None:
    draws = np.random.default_rng(6).standard_gamma(0.25, 100_000) / 0.25
    for x in (0.001, 0.5, 4.0):
        assert float(stats.gamma_cdf(np.array([x]), 0.25)[0]) == pytest.approx(float((draws <= x).mean()), abs=0.005)


def test_kolmogorovs_distribution_has_its_known_critical_values() -> None:
    assert stats.kolmogorov_p(1.3581) == pytest.approx(0.05, abs=1e-4)
    assert stats.kolmogorov_p(1.6276) == pytest.approx(0.01, abs=1e-4)
    assert stats.kolmogorov_p(0.1) == 1


def test_p_values_are_uniform_for_true_exponential_gaps_and_tiny_for_groups_of_ten() -> None:
    rng = np.random.default_rng(7)
    p_values = [stats.ks_p(rng.standard_exponential(100), stats.exponential_cdf) for _ in range(300)]
    assert 0.4 < np.mean(p_values) < 0.6
    together = np.diff(np.repeat(np.cumsum(rng.standard_exponential(30) * 10), 10))
    assert stats.ks_p(together, stats.exponential_cdf) < 1e-6


def test_the_ks_test_allows_for_the_resolution_of_gaps() -> None:
    """Half of very bursty gaps are shorter than a send, which changes their distribution within the resolution."""
    rng = np.random.default_rng(5)
    gaps = rng.standard_gamma(1 / 9, 400) * 9
    as_sent = np.maximum(gaps, 0.004)
    shape = lambda values: stats.gamma_cdf(values, 1 / 9)  # noqa: E731
    assert stats.ks_p(as_sent, shape) < 1e-4
    assert stats.ks_p(as_sent, shape, 0.005) > 0.05
    assert stats.ks_p(rng.standard_exponential(400), shape, 0.005) < 1e-4, "another distribution is still seen"


def test_wilsons_interval_has_its_known_values() -> None:
    assert stats.proportion_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert stats.proportion_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)
    assert stats.proportion_interval(0, 0) == (0.0, 1.0)


def test_jains_index_is_one_for_equals_and_one_nth_for_a_winner() -> None:
    assert stats.jain_index([3, 3, 3]) == 1
    assert stats.jain_index([1, 0, 0, 0]) == 0.25


def test_the_ratio_of_two_samples_says_whether_they_differ() -> None:
    rng = np.random.default_rng(8)

    def blocks(middle: float) -> stats.Blocks:
        return stats.Blocks([rng.normal(middle, 1, 1) for _ in range(300)])

    before = blocks(10)
    same, more = stats.ratio(before, blocks(10), mean, rng), stats.ratio(before, blocks(11), mean, rng)
    assert same.low < 1 < same.high and same.p > 0.05
    assert more.low > 1.05 and more.value == pytest.approx(1.1, abs=0.02) and more.p < 1e-9


def test_a_median_of_zero_differs_from_another_only_if_redrawn_samples_agree() -> None:
    """About half of the values are 0, so that chance decides whether the median is."""
    rng = np.random.default_rng(0)

    def blocks(num_zeros: int) -> stats.Blocks:
        values = np.repeat([0.0, 1.0], [num_zeros, 301 - num_zeros])
        return stats.Blocks(list(rng.permutation(values)[:, None]))

    def p(before: stats.Blocks, after: stats.Blocks) -> float:
        return stats.ratio(before, after, lambda values: float(np.median(values)), rng).p

    assert p(blocks(151), blocks(150)) > 0.3 and p(blocks(150), blocks(151)) > 0.3
    assert p(blocks(301), blocks(301)) == 1
    assert p(blocks(301), blocks(0)) == p(blocks(0), blocks(301)) == 0


def test_the_larger_variance_counts_for_both_runs() -> None:
    """If two runs are equal, the smaller variance is an underestimate."""
    rng = np.random.default_rng(0)
    calm, wild = (stats.Blocks(list(rng.normal(10, spread, (300, 1)))) for spread in (0.1, 2.0))
    found = stats.ratio(calm, wild, mean, rng)
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.96 * 2**0.5 * 0.2 / 300**0.5, rel=0.2)


def test_a_one_sided_comparison_needs_a_factor_of_two() -> None:
    """With almost no spread any factor above two counts; with a spread of 0.1 tenfold counts and 2.5-fold does not."""
    rng = np.random.default_rng(0)
    same = stats.Blocks([np.array([1.0])] * 100)
    assert [stats.far_p(same, mean, 100, ratio, rng) for ratio in (1.9, 2.1, 0.51, 0.49)] == [1, 0, 1, 0]
    loose = stats.Blocks(list(np.random.default_rng(1).normal(10, 10, (100, 1))))
    assert stats.far_p(loose, mean, 100, 10.0, rng) < 1e-3 and stats.far_p(loose, mean, 100, 2.5, rng) > 0.3
    assert stats.far_p(loose, mean, 5, 5.0, rng) > 5 * stats.far_p(loose, mean, 100, 5.0, rng), "five say little"


def test_two_halves_of_one_queue_do_not_differ() -> None:
    """The mean wait of 500 correlated values differs by a fifth between the halves, which is chance."""
    rng = np.random.default_rng(9)
    sure = 0
    for _ in range(30):
        before, after = (stats.Blocks(np.split(queueing(500, 0.6, rng), 500)) for _ in range(2))
        sure += stats.ratio(before, after, mean, rng).p < 0.05
    assert sure <= 5


def test_a_difference_of_shares_has_its_p_value() -> None:
    """Newcombe's own example, 56 of 70 against 48 of 80: 0.2 with 0.0524 to 0.3339."""
    assert stats.difference(48, 80, 56, 70) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    assert 0.005 < stats.difference_p(48, 80, 56, 70) < 0.02
    assert stats.difference_p(5, 100, 5, 100) == pytest.approx(1)


def test_holms_correction() -> None:
    """Holm multiplies the smallest of three p-values by 3, the next by 2, and keeps them in order."""
    assert stats.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert stats.holm([]) == []
