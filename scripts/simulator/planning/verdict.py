"""What simulations of a deployment under a load say: the share of requests within their objectives, how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 2_000
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class WindowResult:
    """One simulated window of the load.

    Attributes:
        num_expected: requests that would count if the simulation ran to its end.
        num_judged: requests that count and whose objectives are decided.
        num_good: of these, those within all their objectives.
        num_late: those whose first token missed its objective, or took most of a time to the last one that missed its.
        num_slow: the others that missed any.
        ttft_p99_s, itl_p99_s: 99th percentiles of requests that ended; 0 without any.
        is_whole: False if the simulation was stopped early, since too many requests had missed their objectives.
    """

    num_expected: int
    num_judged: int
    num_good: int
    num_late: int = 0
    num_slow: int = 0
    ttft_p99_s: float = 0.0
    itl_p99_s: float = 0.0
    is_whole: bool = True

    @property
    def weight(self) -> float:
        """Requests that a judged one stands for: if the simulation was stopped, the others are taken to fare alike."""
        return 1.0 if self.is_whole or not self.num_judged else self.num_expected / self.num_judged


@dataclass(frozen=True, slots=True)
class Verdict:
    """The windows of one deployment under one load.

    Attributes:
        share: of requests within their objectives, over all windows.
        interval: 95 % interval of that share, by resampling whole windows.
        confidence: probability that the share reaches the target, by the same resampling.
        num_windows: windows that were simulated; fewer than asked for if they were hopeless.
    """

    share: float
    interval: tuple[float, float]
    confidence: float
    num_late: int
    num_slow: int
    num_windows: int
    is_whole: bool
    ttft_p99_s: float = 0.0
    itl_p99_s: float = 0.0

    @property
    def short_of(self) -> str:
        """The kind of node that most missed objectives ask for."""
        return "prefill" if self.num_late >= self.num_slow else "decode"


def judge(windows: Sequence[WindowResult], target: float) -> Verdict:
    """Combine windows, which count as independent of each other; requests in a window do not.

    A window that was stopped early weighs as much as if it had run to its end.
    """
    good = np.array([window.num_good * window.weight for window in windows], dtype=np.float64)
    judged = np.array([window.num_judged * window.weight for window in windows], dtype=np.float64)
    total = judged.sum()
    drawn = np.random.default_rng(0).integers(0, len(windows), (NUM_RESAMPLES, len(windows)))
    shares = good[drawn].sum(axis=1) / np.maximum(judged[drawn].sum(axis=1), 1.0)
    low, high = np.quantile(shares, INTERVAL).tolist()
    return Verdict(
        share=float(good.sum() / total) if total else 0.0,
        interval=(low, high),
        confidence=float(np.mean(shares >= target)),
        num_late=sum(window.num_late for window in windows),
        num_slow=sum(window.num_slow for window in windows),
        num_windows=len(windows),
        is_whole=all(window.is_whole for window in windows),
        ttft_p99_s=max((window.ttft_p99_s for window in windows), default=0.0),
        itl_p99_s=max((window.itl_p99_s for window in windows), default=0.0),
    )


def is_hopeless(windows: Sequence[WindowResult], target: float, num_windows: int) -> bool:
    """Whether the target is out of reach even if all requests of the other windows were good.

    The others are taken to have as many requests as the mean of those simulated.
    """
    if not windows:
        return False
    expected = sum(window.num_expected for window in windows) / len(windows) * num_windows
    missed = sum((window.num_judged - window.num_good) * window.weight for window in windows)
    return missed > (1 - target) * expected
