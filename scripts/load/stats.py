"""The statistics that a report stands on: percentiles, bootstrap intervals, Kolmogorov-Smirnov.

Written out so that nothing large has to be imported. Sources: Efron and Tibshirani, *An Introduction to the Bootstrap*
(1993), chapters 6 and 13; Kolmogorov's limit with the correction of Stephens (JASA 69, 1974); the incomplete gamma
function by its series and continued fraction (Abramowitz and Stegun 6.5.29 and 6.5.31).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
QUANTILES: dict[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
RESAMPLES = 1000


def summary(values: Sequence[float] | Floats, rng: np.random.Generator) -> dict[str, float | int | list[float]]:
    """Count, mean, deviation, extremes and percentiles of a sample, with 95 % bootstrap intervals (``p50_ci`` ...).

    Percentiles interpolate linearly between order statistics. Empty for an empty sample.
    """
    sample = np.sort(np.asarray(values, dtype=np.float64))
    if not len(sample):
        return {"count": 0}
    found: dict[str, float | int | list[float]] = {
        "count": len(sample),
        "mean": float(sample.mean()),
        "std": float(sample.std()),
        "min": float(sample[0]),
        "max": float(sample[-1]),
    }
    found["mean_ci"] = mean_interval(sample, rng)
    for name, share in QUANTILES.items():
        found[name] = float(np.quantile(sample, share))
        found[name + "_ci"] = quantile_interval(sample, share, rng)
    return found


def mean_interval(sample: Floats, rng: np.random.Generator) -> list[float]:
    """95 % percentile bootstrap of the mean; by its normal limit where the sample is large."""
    count = len(sample)
    if count > 2000:
        half = 1.96 * float(sample.std()) / math.sqrt(count)
        return [float(sample.mean()) - half, float(sample.mean()) + half]
    means = sample[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1)
    return [float(value) for value in np.quantile(means, (0.025, 0.975))]


def quantile_interval(ordered: Floats, share: float, rng: np.random.Generator) -> list[float]:
    """95 % percentile bootstrap of a quantile, without resampling.

    The k-th smallest of n draws from the sample is its element ``floor(n U)``, U being the k-th smallest of n uniform
    draws, which is Beta(k, n - k + 1): that is the bootstrap's distribution itself.
    """
    count = len(ordered)
    k = min(count, max(1, round(share * (count - 1)) + 1))
    picked = ordered[np.minimum((count * rng.beta(k, count - k + 1, RESAMPLES)).astype(np.int64), count - 1)]
    return [float(value) for value in np.quantile(picked, (0.025, 0.975))]


def clustered_quantile_interval(
    clusters: Sequence[Floats], share: float, rng: np.random.Generator, resamples: int = 200
) -> list[float]:
    """As ``quantile_interval`` where values of a cluster (gaps of one request) belong together: clusters are drawn."""
    sizes = np.array([len(cluster) for cluster in clusters])
    if not sizes.sum():
        return []
    values = np.concatenate(clusters)
    owner = np.repeat(np.arange(len(clusters)), sizes)
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    found = []
    for _ in range(resamples):
        times = np.bincount(rng.integers(0, len(clusters), len(clusters)), minlength=len(clusters))
        weight = np.cumsum(times[owner])
        if weight[-1]:
            found.append(values[np.searchsorted(weight, share * weight[-1])])
    return [float(value) for value in np.quantile(found, (0.025, 0.975))] if found else []


# ---- does a sample follow a distribution? ---------------------------------------------------------------------------


def ks_test(
    sample: Sequence[float] | Floats, cdf: Callable[[Floats], Floats], resolution: float = 0.0
) -> tuple[float, float]:
    """Kolmogorov-Smirnov: the largest distance between a sample and a distribution, and its p-value.

    Args:
        resolution: values are only known to so much; only what no value inside of that explains counts as distance.
    """
    ordered = np.sort(np.asarray(sample, dtype=np.float64))
    count = len(ordered)
    above = float((np.arange(1, count + 1) / count - cdf(ordered + resolution)).max())
    below = float((cdf(ordered - resolution) - np.arange(count) / count).max())
    distance = max(above, below, 0.0)
    return distance, kolmogorov_p(distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)))


def kolmogorov_p(scaled: float) -> float:
    """Probability that Kolmogorov's statistic exceeds ``scaled``."""
    if scaled < 0.2:
        return 1.0
    total = sum((1 if k % 2 else -1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


def exponential_cdf(gaps: Floats) -> Floats:
    """Of gaps with mean 1."""
    return np.asarray(-np.expm1(-np.maximum(gaps, 0.0)))


def gamma_cdf(gaps: Floats, shape: float) -> Floats:
    """Of gamma gaps with mean 1: the regularised lower incomplete gamma function P(shape, shape * gap)."""
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


def ratio_interval(
    before: Sequence[Floats], after: Sequence[Floats], statistic: Callable[[Floats], float], rng: np.random.Generator
) -> tuple[float, float, float]:
    """Ratio ``after / before`` of a statistic, with a 95 % bootstrap interval.

    Args:
        before, after: clusters of values that belong together (the gaps of a request; or one value each), all of
            which are drawn or none.
    """
    ratios = []
    for _ in range(RESAMPLES // 2):
        below, above = statistic(_redrawn(before, rng)), statistic(_redrawn(after, rng))
        ratios.append(above / below if below else math.inf if above else 1.0)
    low, high = np.quantile(ratios, (0.025, 0.975), method="nearest")
    base, now = statistic(np.concatenate(before)), statistic(np.concatenate(after))
    return (now / base if base else math.inf if now else 1.0), float(low), float(high)


def _redrawn(clusters: Sequence[Floats], rng: np.random.Generator) -> Floats:
    return np.concatenate([clusters[pick] for pick in rng.integers(0, len(clusters), len(clusters)).tolist()])


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all get the same, 1/n when one gets everything."""
    total, squares = sum(shares), sum(share * share for share in shares)
    return total * total / (len(shares) * squares) if squares else 1.0


def proportion_interval(good: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (JASA 22, 1927)."""
    if not count:
        return 0.0, 1.0
    z = 1.96
    p = good / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)
