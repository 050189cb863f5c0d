"""Pauses of streams at faults, worked out by hand."""

import pytest

from scripts.chaos_harness.pauses import Injected, Stream, pauses_by_kind, quantiles


def test_the_longest_gap_of_each_stream_in_flight_counts() -> None:
    kill = Injected("kill", 10.0, 10.0, 3.0)
    streams = [
        Stream([9.0, 9.9, 12.4, 12.5], 12.5),  # a gap of 2.5 s around the kill
        Stream([9.0, 9.1, 9.2], 9.3),  # had ended
        Stream([10.5, 14.0], 14.0),  # had not begun
        Stream([9.8, 10.1, 10.3], 10.3),  # of another node
    ]
    assert pauses_by_kind([kill], streams) == {"kill": [pytest.approx(2.5), pytest.approx(0.3)]}


def test_a_gap_after_a_fault_that_is_long_over_does_not_count() -> None:
    pause = Injected("pause", 10.0, 11.0, 0.0)
    # It is felt until 13.0: the gap from 12.9 counts, that from 13.1 does not.
    assert pauses_by_kind([pause], [Stream([9.0, 12.9, 13.1, 19.0], 19.0)]) == {"pause": [pytest.approx(3.9)]}
    assert pauses_by_kind([pause], [Stream([9.0, 10.5, 13.1, 19.0], 19.0)]) == {"pause": [pytest.approx(2.6)]}


def test_a_gap_at_two_faults_counts_for_the_one_with_the_higher_mark() -> None:
    faults = [Injected("pause", 10.0, 10.5, 0.0), Injected("hang", 9.5, 17.0, 8.0)]
    assert pauses_by_kind(faults, [Stream([9.0, 16.0], 16.0)]) == {"hang": [pytest.approx(7.0)]}


def test_quantiles_of_one_value_are_that_value() -> None:
    assert quantiles([0.5]) == (0.5, 0.5, 0.5)
