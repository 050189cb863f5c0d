"""The estimate of a node's clock in virtual time: its error bound holds, whatever clocks and delays do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.clock_offset import MAX_DRIFT, ClockOffset

#: Of a message. With two delays of zero at the largest drift, rounding alone would look like a clock that has jumped.
DELAYS = st.floats(1e-6, 2.0)


def test_equal_delays_give_the_offset_and_half_of_the_round_trip_as_its_error() -> None:
    clock = ClockOffset()
    clock.sent_by_gateway(100.0, 401.0, 102.0)  # the node is 300 s ahead; both messages take 1 s
    clock.sent_by_node(401.0, 102.0)
    offset_s, error_s = clock.estimate(102.0)
    assert offset_s == pytest.approx(300.0 + MAX_DRIFT)  # the first instant is 2 s old
    assert error_s == pytest.approx(1.0 + MAX_DRIFT)


def test_a_bound_loosens_with_its_age() -> None:
    clock = ClockOffset()
    clock.sent_by_gateway(10.0, 10.0, 10.0)
    clock.sent_by_node(10.0, 10.0)
    assert clock.estimate(10.0) == (0.0, 0.0)
    assert clock.estimate(110.0) == (0.0, pytest.approx(100 * MAX_DRIFT))


def test_the_quickest_message_of_each_direction_counts() -> None:
    clock = ClockOffset()
    for forth_s, back_s in ((0.5, 0.001), (0.001, 0.5), (0.3, 0.3)):
        clock.sent_by_gateway(50.0, 50.0 + forth_s, 50.0)
        clock.sent_by_node(50.0 - back_s, 50.0)
    assert clock.estimate(50.0) == (pytest.approx(0.0), pytest.approx(0.001))


def test_without_messages_in_both_directions_the_error_is_infinite() -> None:
    clock = ClockOffset()
    assert clock.estimate(1.0) == (0.0, math.inf)
    clock.sent_by_node(5.0, 2.0)
    assert clock.estimate(2.0) == (3.0, math.inf)


def test_a_clock_that_jumps_is_estimated_anew() -> None:
    clock = ClockOffset()
    for offset_s in (0.0, 3_600.0):
        clock.sent_by_gateway(100.0, 100.25 + offset_s, 100.5)
        clock.sent_by_node(100.25 + offset_s, 100.5)
    offset_s, error_s = clock.estimate(100.5)
    assert math.isinf(error_s) or abs(offset_s - 3_600.0) <= error_s
    clock.sent_by_gateway(101.0, 3_701.25, 101.5)
    clock.sent_by_node(3_701.25, 101.5)
    offset_s, error_s = clock.estimate(101.5)
    assert abs(offset_s - 3_600.0) <= error_s <= 0.5


@given(
    skew_s=st.floats(-1e4, 1e4),
    drift=st.floats(-MAX_DRIFT, MAX_DRIFT),
    beats=st.lists(st.tuples(st.floats(0.01, 100.0), DELAYS, st.floats(0.0, 5.0), DELAYS), min_size=1, max_size=30),
)
def test_the_true_offset_lies_within_the_error_of_the_estimate(
    skew_s: float, drift: float, beats: list[tuple[float, float, float, float]]
) -> None:
    """Clocks skewed by hours that drift, and delays that have nothing to do with each other."""

    def by_node(instant: float) -> float:
        return instant + skew_s + drift * instant

    clock = ClockOffset()
    now = 0.0
    for pause_s, forth_s, held_s, back_s in beats:
        sent_at = now + pause_s
        received_at = sent_at + forth_s
        answered_at = received_at + held_s
        now = answered_at + back_s
        clock.sent_by_gateway(sent_at, by_node(received_at), now)
        clock.sent_by_node(by_node(answered_at), now)
        offset_s, error_s = clock.estimate(now)
        assert abs(offset_s - (by_node(now) - now)) <= error_s + 1e-6
        assert error_s <= (forth_s + held_s + back_s) / 2 * (1 + 8 * MAX_DRIFT) + held_s + 1e-6
