"""Our counters and histograms export what those of the Prometheus library export."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from common.metrics.distribution import Distribution
from common.metrics.series import LabelledCounter, LabelledHistogram

BOUNDS = (0.001, 0.5, 1, 2.5)
LABELS = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["x", 'y"\n']))


@pytest.fixture(autouse=True, scope="module")
def without_created_series():
    disable_created_metrics()


def test_values_are_counted_in_their_buckets():
    values = Distribution(BOUNDS)
    values.add(0.001)  # a bound belongs to its own bucket
    values.add(0.0011, 2)
    values.add(9.0)
    assert values.counts == [1, 2, 0, 0, 1]
    assert values.sum == pytest.approx(9.0032)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.3, 0.5, 1.0, 2.0, 2.5, 9.0])))
def test_many_values_at_once_are_counted_as_one_by_one(given_values):
    alone, together = Distribution(BOUNDS), Distribution(BOUNDS)
    for value in given_values:
        alone.add(value)
    together.add_all(given_values)
    assert together.counts == alone.counts
    assert together.sum == pytest.approx(alone.sum)


@given(st.lists(st.floats(0.0, 10.0)), st.integers(1, 300))
def test_a_value_of_several_at_once_is_added_as_alone(given_values, count):
    alone, together = Distribution(BOUNDS), Distribution(BOUNDS)
    for value in given_values:
        alone.add(value, count)
    together.add_each(given_values, count)
    assert (together.counts, together.sum) == (alone.counts, alone.sum)  # equal, and not only nearly


@given(st.lists(st.tuples(LABELS, st.floats(0, 10))))
def test_the_exported_text_is_that_of_the_library(events):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = LabelledCounter(ours, "total_of", "A counter.", "one", "two")
    histogram = LabelledHistogram(ours, "times_s", "A histogram.", BOUNDS, "one", "two")
    library_counter = Counter("total_of", "A counter.", ("one", "two"), registry=theirs)
    library_histogram = Histogram("times_s", "A histogram.", ("one", "two"), buckets=BOUNDS, registry=theirs)
    for labels, value in events:
        counter.add(value, *labels)
        histogram.of(*labels).add(value)
        library_counter.labels(*labels).inc(value)
        library_histogram.labels(*labels).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
