"""Counters and histograms that cost a fraction of a microsecond per event.

Those of the Prometheus library look up their labels and take a lock each time, which is most of the cost of a short
request's metrics. All events of a process happen on one thread, so these need no locks.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from common.metrics.distribution import Distribution


class LabelledCounter:
    """A counter for each combination of labels.

    Attributes:
        values: by the values of the labels.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.values: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, value: float, *labels: str) -> None:
        """Add to one counter; the first addition shows it, also one of 0."""
        self.values[labels] = self.values.get(labels, 0) + value

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


def add_distribution(family: HistogramMetricFamily, labels: Sequence[str], values: Distribution) -> None:
    """Add the buckets of a distribution to a family of histograms."""
    bounds = [*map(floatToGoString, values.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(list(values.counts)), strict=True)), values.sum)


class LabelledHistogram:
    """A histogram for each combination of labels.

    Args:
        bounds: upper bounds of the buckets, without infinity.
    """

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> None:
        self._name, self._text, self._bounds, self._labels = name, text, bounds, labels
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def of(self, *labels: str) -> Distribution:
        """The histogram of these labels, which is shown from the first call on."""
        found = self._distributions.get(labels)
        if found is None:
            found = self._distributions[labels] = Distribution(self._bounds)
        return found

    def counts(self) -> list[int]:
        """Observations of each bucket, over all labels; the last bucket has no upper bound."""
        columns = zip(*(values.counts for values in self._distributions.values()), strict=True)
        return list(map(sum, columns)) or [0] * (len(self._bounds) + 1)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, values in self._distributions.items():
            add_distribution(family, labels, values)
        yield family
