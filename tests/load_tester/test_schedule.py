"""Arrivals: the right distribution, at the right rate, the same for the same seed, whatever the rate does over time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from scripts.load_tester.analysis import stats
from scripts.load_tester.workload.schedule import RateProfile, arrivals, unit_arrivals


def drawn(arrival: str, rate: str = "10", seed: int = 0, **options: object) -> np.ndarray:
    profile = RateProfile.parse(rate, options.get("duration_s"))  # type: ignore[arg-type]
    known = {"num_requests": None, "duration_s": None} | options
    return arrivals(profile, arrival, np.random.default_rng(seed), **known)  # type: ignore[arg-type]


def test_constant_arrivals_are_evenly_spaced_from_the_start() -> None:
    assert drawn("constant", "4", num_requests=5).tolist() == [0, 0.25, 0.5, 0.75, 1.0]


def test_bursts_keep_the_mean_rate() -> None:
    assert drawn("burst", "2", num_requests=6, burst_size=3).tolist() == [0, 0, 0, 1.5, 1.5, 1.5]


@pytest.mark.parametrize(("arrival", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 1.0), ("gamma", 2.5)])
def test_random_arrivals_have_their_distribution(arrival: str, cv: float) -> None:
    gaps = np.diff(unit_arrivals(arrival, 5000, np.random.default_rng(1), cv=cv))  # type: ignore[arg-type]
    assert gaps.mean() == pytest.approx(1, abs=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert stats.ks_p(gaps, lambda values: stats.gamma_cdf(values, 1 / cv**2)) > 0.01
    wrong = stats.ks_p(gaps, lambda values: stats.gamma_cdf(values, 1.3 / cv**2))
    assert wrong < 0.01, "the test would notice another distribution"


def test_the_same_seed_gives_the_same_instants_and_another_seed_others() -> None:
    first, again, other = (drawn("poisson", num_requests=50, seed=seed) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_a_duration_ends_the_arrivals() -> None:
    at = drawn("poisson", "50", duration_s=100.0)
    assert at[-1] < 100
    assert len(at) == pytest.approx(5000, abs=4 * math.sqrt(5000))


def test_very_bursty_arrivals_last_until_the_end_of_the_duration() -> None:
    """Nearly all gaps are tiny, so a few of these runs have a hundred times the mean number of arrivals."""
    gaps = np.random.default_rng(3).standard_gamma(1e-4, 200_000) * 1e4
    expected = np.cumsum(gaps)
    at = drawn("gamma", "1", seed=3, duration_s=5.0, cv=100.0)
    assert len(at) == np.count_nonzero(expected < 5.0) < 200_000
    assert at == pytest.approx(expected[: len(at)])
    counts = [len(drawn("gamma", "1", seed=seed, duration_s=5.0, cv=100.0)) for seed in range(40)]
    assert max(counts) > 5000


def test_steps_follow_each_other_and_the_last_rate_continues() -> None:
    """1/s for 3 s, then 2/s: arrivals at 0, 1, 2 and then every half second."""
    assert drawn("constant", "1x3,2x2", num_requests=9).tolist() == [0, 1, 2, 3, 3.5, 4, 4.5, 5, 5.5]


def test_a_ramp_from_0_to_10_in_10_s_reaches_its_nth_arrival_at_the_root_of_2n() -> None:
    at = drawn("constant", "0..10", duration_s=10.0)
    assert len(at) == 50
    assert at.tolist() == pytest.approx([math.sqrt(2 * n) for n in range(50)])


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.5, 30)), min_size=1, max_size=4),
    st.lists(st.floats(0, 500), min_size=1, max_size=20),
)
def test_seconds_and_operational_time_are_inverse(steps: list[tuple[float, float]], instants: list[float]) -> None:
    profile = RateProfile.parse(",".join(f"{rate}x{length}" for rate, length in steps))
    operational = np.sort(np.array(instants))
    there = profile.to_seconds(operational)
    assert np.all(np.diff(there) >= 0)
    assert profile.to_operational(there) == pytest.approx(operational, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "rate", ["", "fast", "-1", "0", "1x", "1x0", "2..3", "nan", "inf", "1x5,0x5", "1xinf", "1e7", "1e-7", "1x1e10"]
)
def test_an_invalid_rate_is_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="--rate"):
        RateProfile.parse(rate)


def test_the_refusal_of_a_rate_says_which_rates_may_be_zero() -> None:
    with pytest.raises(ConfigError, match="lengths must be above 0, rates 0 or more, and the last rate above 0"):
        RateProfile.parse("1x5,0x5")
