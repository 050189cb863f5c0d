"""Statistics of a report: percentiles, bootstrap intervals, Kolmogorov-Smirnov.

Written with NumPy alone, so that nothing large has to be imported. Sources: Efron and Tibshirani, *An Introduction to
the Bootstrap* (1993), chapters 6, 8 and 13; Sokal's window for correlation times (*Monte Carlo Methods in Statistical
Mechanics*, 1997); Kolmogorov's limit with the correction of Stephens (JASA 69, 1974); the incomplete gamma function by
its series and continued fraction (Abramowitz and Stegun 6.5.29 and 6.5.31); Holm's correction (Scand. J. Stat. 6,
1979).

Requests in one queue wait together, so neighbours are correlated: intervals and tests count the equivalent number of
independent values, the count over the correlation time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
QUANTILES: dict[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
RESAMPLES, CLUSTER_RESAMPLES = 1000, 200
MIN_FREE = 6  # fewer independent values all lie on one side of their median in 1 of 32 samples or more
MIN_BLOCKS = 8
UNBOUNDED = 0.025  # if all values lie on one side of a quantile with more than this probability, it has no bound
MAX_ALONE = 1.5  # correlation times up to this are chance
FAR = 2.0  # ratio beyond which a change counts if the spread of only one run is known
Interval = list[float | None]
Intervals = dict[str, Interval]
Summary = dict[str, float | int | Interval]


def summary(values: Sequence[float] | Floats, rng: np.random.Generator) -> Summary:
    """Count, mean, deviation, extremes and percentiles of durations, with 95 % bootstrap intervals (``p50_ci`` ...).

    Percentiles interpolate linearly between order statistics. Empty for an empty sample.

    Args:
        values: in order of time; neighbours may be correlated. None is negative, so neither is an end of an interval.

    Returns:
        An end of an interval is None where the sample is too small to bound it.
    """
    series = np.asarray(values, dtype=np.float64)
    if not len(series):
        return {"count": 0}
    num_free = len(series) / correlation_time(series)
    sample = np.sort(series)
    found: Summary = {
        "count": len(sample),
        "mean": float(sample.mean()),
        "std": float(sample.std()),
        "min": float(sample[0]),
        "max": float(sample[-1]),
    }
    found["mean_ci"] = [end if end is None else max(0.0, end) for end in mean_interval(sample, rng, num_free)]
    for name, share in QUANTILES.items():
        found[name] = float(np.quantile(sample, share))
        found[name + "_ci"] = quantile_interval(sample, share, rng, num_free)
    return found


def correlation_time(series: Floats) -> float:
    """Integrated autocorrelation time, summed to the first lag that is five times the sum so far; 1 if independent."""
    count = len(series)
    away = series - series.mean() if count else series
    if count < 4 or not away.any():
        return 1.0
    spectrum = np.fft.rfft(away, 1 << (2 * count - 1).bit_length())
    products = np.fft.irfft(spectrum * spectrum.conj())[:count]
    if products[0] <= 0:  # deviations so small that their squares are 0
        return 1.0
    times = 1 + 2 * np.cumsum(products[1:] / products[0])
    far = np.nonzero(np.arange(1, count) >= 5 * times)[0]
    return float(min(max(1.0, times[far[0]] if len(far) else count), count))


def mean_interval(sample: Floats, rng: np.random.Generator, num_free: float) -> Interval:
    """95 % percentile bootstrap of the mean; its normal limit for a large sample.

    Args:
        num_free: equivalent number of independent values.
    """
    count, mean = len(sample), float(sample.mean())
    if num_free < MIN_FREE:
        return [None, None]
    wider = math.sqrt(count / num_free)
    if count > 2000:
        half = wider * 1.96 * float(sample.std()) / math.sqrt(count)
        return [mean - half, mean + half]
    means = sample[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1)
    return [mean + wider * (float(value) - mean) for value in np.quantile(means, (0.025, 0.975))]


def quantile_interval(ordered: Floats, share: float, rng: np.random.Generator, num_free: float) -> Interval:
    """95 % percentile bootstrap of a quantile, without resampling.

    The k-th smallest of n draws from the sample is its element ``floor(n U)``, U being the k-th smallest of n uniform
    draws, which is Beta(k, n - k + 1): this is the exact distribution of the bootstrap. Of correlated values as many
    are drawn as there are independent ones. The largest of n values does not bound a quantile that fewer than one in n
    exceed: where all n lie below the quantile with more than 2.5 %, the interval has no upper end.
    """
    count = len(ordered)
    k = max(1.0, share * (num_free - 1) + 1)
    picks = (count * rng.beta(k, max(num_free - k + 1, 1e-9), RESAMPLES)).astype(np.int64)
    low, high = np.quantile(ordered[np.minimum(picks, count - 1)], (0.025, 0.975))
    return [
        None if (1 - share) ** num_free > UNBOUNDED else float(low),
        None if share**num_free > UNBOUNDED else float(high),
    ]


def clustered_intervals(clusters: Sequence[Floats], rng: np.random.Generator) -> Intervals:
    """Intervals as in ``summary`` for clusters of values (the gaps of one request), which are redrawn as blocks.

    An end that falls on an extreme value is None.
    """
    drawn = Blocks(clusters)
    if drawn.num_free < MIN_FREE or not drawn.size:
        return {name + "_ci": [None, None] for name in ("mean", *QUANTILES)}
    order = np.argsort(drawn.values, kind="stable")
    values, owner = drawn.values[order], drawn.owner[order]
    shares = np.array(list(QUANTILES.values()))
    found = []
    for _ in range(CLUSTER_RESAMPLES):
        times = np.bincount(drawn.picks(rng), minlength=drawn.count)[owner]
        weight = np.cumsum(times)
        if weight[-1]:
            quantiles = values[np.searchsorted(weight, shares * weight[-1])]
            found.append([float(times @ values) / weight[-1], *quantiles])
    low, high = np.quantile(np.array(found), (0.025, 0.975), axis=0)
    return {
        name + "_ci": [_unless(low[n], values[0]), _unless(high[n], values[-1])]
        for n, name in enumerate(("mean", *QUANTILES))
    }


def _unless(value: float, extreme: float) -> float | None:
    return None if value == extreme else float(value)


class Blocks:
    """Clusters of values in blocks of correlated neighbours, for a block bootstrap.

    Args:
        clusters: in order of time; empty ones are left out.
    """

    def __init__(self, clusters: Sequence[Floats]) -> None:
        kept = [cluster for cluster in clusters if len(cluster)]
        self.values = np.concatenate([np.empty(0), *kept])
        self.size = len(self.values)
        self.num_clusters = len(kept)
        time = correlation_time(np.array([cluster.mean() for cluster in kept]))
        length = max(1, min(len(kept) // MIN_BLOCKS, math.ceil(3 * time))) if time > MAX_ALONE else 1
        self.num_free = len(kept) / time
        self.owner = np.repeat(np.arange(len(kept)) // length, [len(cluster) for cluster in kept])
        self.count = -(-len(kept) // length)
        self._sizes = np.bincount(self.owner, minlength=self.count)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def picks(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw blocks with replacement, as many as there are."""
        return rng.integers(0, self.count, self.count)

    def redrawn(self, rng: np.random.Generator) -> Floats:
        picks = self.picks(rng)
        sizes = self._sizes[picks]
        skipped = np.repeat(self._starts[picks] - (np.cumsum(sizes) - sizes), sizes)
        return self.values[skipped + np.arange(len(skipped))]


# ---- does a sample follow a distribution? ---------------------------------------------------------------------------


def ks_p(sample: Sequence[float] | Floats, cdf: Callable[[Floats], Floats], resolution: float = 0.0) -> float:
    """P-value of the Kolmogorov-Smirnov test, by the largest distance between a sample and a distribution.

    Args:
        resolution: uncertainty of each value; a distance that it explains does not count.
    """
    ordered = np.sort(np.asarray(sample, dtype=np.float64))
    count = len(ordered)
    above = float((np.arange(1, count + 1) / count - cdf(ordered + resolution)).max())
    below = float((cdf(ordered - resolution) - np.arange(count) / count).max())
    distance = max(above, below, 0.0)
    return kolmogorov_p(distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)))


def kolmogorov_p(scaled: float) -> float:
    """Probability that Kolmogorov's statistic exceeds ``scaled``."""
    if scaled < 0.2:
        return 1.0
    total = sum((1 if k % 2 else -1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


def exponential_cdf(gaps: Floats) -> Floats:
    """Exponential distribution with mean 1."""
    return np.asarray(-np.expm1(-np.maximum(gaps, 0.0)))


def gamma_cdf(gaps: Floats, shape: float) -> Floats:
    """Gamma distribution with mean 1: the regularised lower incomplete gamma function P(shape, shape * gap)."""
    return np.array([_incomplete_gamma(shape, shape * max(0.0, float(gap))) for gap in gaps])


def _incomplete_gamma(a: float, x: float) -> float:
    if x <= 0:
        return 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-12:
            n += 1
            term *= x / n
            total += term
        return total * front
    # Lentz's method for the continued fraction of the upper function
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 500):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b or 1e-300)
        c = b + an / c or 1e-300
        h *= d * c
        if abs(d * c - 1) < 1e-12:
            break
    return 1 - front * h


# ---- do two samples differ? -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """Ratio of a statistic, after over before, with its 95 % interval and p-value."""

    value: float
    low: float
    high: float
    p: float


def ratio(before: Blocks, after: Blocks, statistic: Callable[[Floats], float], rng: np.random.Generator) -> Ratio:
    """Ratio ``after / before`` of a statistic, by the bootstrap variance of its logarithm.

    If nothing changed, both runs have the same variance, so the larger estimate counts for both. 0 has no logarithm:
    where the statistic of a run is 0, only p is estimated.
    """
    base, now = statistic(before.values), statistic(after.values)
    if base <= 0 or now <= 0:
        value = 1.0 if base == now else math.inf if now > base else 0.0
        return Ratio(value, value, value, _order_p(before, after, statistic, rng))
    sides = (before, after), (after, before)
    variance = max(
        _variance(side, statistic, rng) * (1 + side.num_clusters / other.num_clusters) for side, other in sides
    )
    change, error = math.log(now / base), math.sqrt(variance)
    return Ratio(
        now / base,
        math.exp(change - 1.96 * error),
        math.exp(change + 1.96 * error),
        math.erfc(abs(change) / error / math.sqrt(2)) if error else float(change == 0),
    )


def _order_p(before: Blocks, after: Blocks, statistic: Callable[[Floats], float], rng: np.random.Generator) -> float:
    """Two-sided p-value of a difference: how often it vanishes or has the other sign in redrawn samples."""
    drawn = [statistic(after.redrawn(rng)) - statistic(before.redrawn(rng)) for _ in range(RESAMPLES // 2)]
    signs = np.sign(drawn)
    return min(1.0, 2 * float(min(np.mean(signs <= 0), np.mean(signs >= 0))))


def far_p(
    steady: Blocks, statistic: Callable[[Floats], float], size: int, ratio: float, rng: np.random.Generator
) -> float:
    """Probability by chance that another run's statistic exceeds ``FAR`` times this one's by this much, or the reverse.

    The spread of a run whose requests are all correlated is unknown, so that of the steady run stands in for it. It
    counts twice, since the steady run may understate it.

    Args:
        size: requests of the other run.
        ratio: of the two statistics.
    """
    beyond = abs(math.log(ratio)) - math.log(FAR)
    variance = 4 * _variance(steady, statistic, rng) * (1 + steady.num_clusters / size)
    return math.erfc(beyond / math.sqrt(2 * variance)) if beyond > 0 and variance else float(beyond <= 0)


def _variance(side: Blocks, statistic: Callable[[Floats], float], rng: np.random.Generator) -> float:
    """Bootstrap variance of the statistic's logarithm, widened for few blocks as Student's t is."""
    drawn = [statistic(side.redrawn(rng)) for _ in range(RESAMPLES // 2)]
    spread = float(np.var(np.log([value for value in drawn if value > 0] or [1.0])))
    return spread * (side.count - 1) / max(side.count - 3, 1)


def difference(
    good_a: float, count_a: float, good_b: float, count_b: float, z: float = 1.96
) -> tuple[float, float, float]:
    """``b - a`` of two proportions with Newcombe's interval (Statistics in Medicine 17, 1998, method 10)."""
    a, b = good_a / max(1, count_a), good_b / max(1, count_b)
    low_a, high_a = proportion_interval(good_a, count_a, z)
    low_b, high_b = proportion_interval(good_b, count_b, z)
    below = math.sqrt((b - low_b) ** 2 + (high_a - a) ** 2)
    above = math.sqrt((high_b - b) ** 2 + (a - low_a) ** 2)
    return b - a, b - a - below, b - a + above


def difference_p(good_a: float, count_a: float, good_b: float, count_b: float) -> float:
    """p-value of a difference of proportions, from the widest interval that excludes 0."""
    least, most = 0.0, 40.0
    for _ in range(50):
        z = (least + most) / 2
        _, low, high = difference(good_a, count_a, good_b, count_b, z)
        least, most = (z, most) if low > 0 or high < 0 else (least, z)
    return math.erfc(least / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values after Holm's correction for multiple comparisons."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    found, most = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        most = max(most, min(1.0, p_values[place] * (len(p_values) - rank)))
        found[place] = most
    return found


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all get the same, 1/n when one gets everything."""
    total, squares = sum(shares), sum(share * share for share in shares)
    return total * total / (len(shares) * squares) if squares else 1.0


def proportion_interval(good: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a proportion (JASA 22, 1927); 95 % by default."""
    if not count:
        return 0.0, 1.0
    p = good / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)
