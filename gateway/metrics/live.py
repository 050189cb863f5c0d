"""The last minute of the service in samples of a second, which the page at ``/`` draws. Pure.

Once a second the gateway adds the totals of its own metrics (``Metrics.totals``), and a sample is the difference of two
of them. Requests and tokens therefore cost nothing more, and a page that opens shows the last minute at once.
"""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from common.errors import ErrorCode
from gateway.metrics.collectors import MetricTotals

INTERVAL_S = 1.0
NUM_SAMPLES = 60
#: A second holds too few requests for a percentile, so a percentile covers the samples of this many seconds.
WINDOW_S = 10


class LiveSample(msgspec.Struct, frozen=True, kw_only=True):
    """One second; a percentile is None without a value in the last ``WINDOW_S`` seconds.

    Attributes:
        requests_per_s: outputs that ended.
        errors_per_s: outputs that failed and requests that were refused, without those that clients ended.
        running: outputs that the gateway has sent to nodes.
        waiting: outputs that wait in the gateway.
    """

    requests_per_s: float
    tokens_per_s: float
    errors_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    running: int
    waiting: int


class LiveError(msgspec.Struct, frozen=True):
    """Outputs that failed and requests that were refused with one code."""

    code: str
    total: int
    last_minute: int


class LiveHistory:
    """Samples of the last minute, oldest first."""

    def __init__(self) -> None:
        self.samples: deque[LiveSample] = deque(maxlen=NUM_SAMPLES)
        self._totals: deque[MetricTotals] = deque(maxlen=NUM_SAMPLES + 1)

    def add(self, totals: MetricTotals) -> None:
        """Add the totals of now, about ``INTERVAL_S`` after those before."""
        if self._totals:
            last = self._totals[-1]
            window = self._totals[max(len(self._totals) - WINDOW_S, 0)]
            self.samples.append(_sample(last, totals, window))
        self._totals.append(totals)

    def errors(self) -> list[LiveError]:
        """Errors since the start and in the last minute by code, the most frequent of the last minute first."""
        if not self._totals:
            return []
        before, now = self._totals[0].errors, self._totals[-1].errors
        rows = [LiveError(code, total, total - before.get(code, 0)) for code, total in now.items()]
        return sorted(rows, key=lambda row: (-row.last_minute, -row.total, row.code))


def _sample(before: MetricTotals, now: MetricTotals, window: MetricTotals) -> LiveSample:
    seconds = max(now.at - before.at, 1e-3)
    first_tokens = _difference(window.first_tokens, now.first_tokens)
    gaps = _difference(window.gaps, now.gaps)
    return LiveSample(
        requests_per_s=round((now.num_ended - before.num_ended) / seconds, 3),
        tokens_per_s=round((now.num_tokens - before.num_tokens) / seconds, 3),
        errors_per_s=round((_num_failed(now) - _num_failed(before)) / seconds, 3),
        ttft_p50_s=percentile(now.first_token_bounds, first_tokens, 0.5),
        ttft_p99_s=percentile(now.first_token_bounds, first_tokens, 0.99),
        inter_token_p50_s=percentile(now.gap_bounds, gaps, 0.5),
        inter_token_p99_s=percentile(now.gap_bounds, gaps, 0.99),
        running=now.num_running,
        waiting=now.num_waiting,
    )


def _num_failed(totals: MetricTotals) -> int:
    return sum(totals.errors.values()) - totals.errors.get(ErrorCode.ABORTED, 0)


def _difference(before: Sequence[int], now: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip(before, now, strict=True)]


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which ``share`` of the observations lie, interpolated inside its bucket; None without any.

    Prometheus' ``histogram_quantile`` computes the same. The highest bound stands for all values above it.

    Args:
        bounds: upper bounds of the buckets, without infinity.
        counts: observations of each bucket; the last one holds those above all bounds.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for (low, high), count in zip(pairwise((0.0, *bounds)), counts, strict=False):
        if count and below + count >= rank:
            return round(low + (high - low) * (rank - below) / count, 6)
        below += count
    return float(bounds[-1])
