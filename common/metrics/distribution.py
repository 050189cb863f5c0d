"""The observed values of one histogram. Pure: a few integers and a sum."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence


class Distribution:
    """Values counted by bucket. One thread adds; another may read ``counts`` and ``sum`` meanwhile.

    Args:
        bounds: upper bounds of the buckets, without infinity.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Observe a value ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def add_each(self, values: Iterable[float], count: int) -> None:
        """Observe each value ``count`` times, as calls of ``add`` would."""
        bounds, counts, total = self.bounds, self.counts, self.sum
        for value in values:
            counts[bisect_left(bounds, value)] += count
            total += value * count
        self.sum = total

    def add_all(self, values: Iterable[float]) -> None:
        """Observe many values, each in a fraction of the time that ``add`` takes."""
        ordered, first = sorted(values), 0
        if not ordered:
            return
        for i, bound in enumerate(self.bounds):
            last = bisect_right(ordered, bound, first)
            self.counts[i] += last - first
            first = last
        self.counts[-1] += len(ordered) - first
        self.sum += sum(ordered)
