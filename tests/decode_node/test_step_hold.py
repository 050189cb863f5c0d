"""How long a step is held back for requests whose last pages are on their way."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.step_hold import MAX_SHARE, StepHold


def after_a_step(begun_at: float = 10.0, ended_at: float = 12.0) -> StepHold:
    hold = StepHold()
    hold.planned(begun_at)
    hold.committed(ended_at)
    return hold


@pytest.mark.parametrize(
    ("num_landing", "num_running", "until"), [(1, 1, 12.5), (1, 4, 12.5), (1, 8, 12.25), (2, 16, 12.25)]
)
def test_a_step_waits_no_longer_than_the_request_gains(num_landing: int, num_running: int, until: float) -> None:
    hold = after_a_step()
    assert hold.holds(num_landing, num_running, 12.0)
    assert hold.until == until
    assert hold.holds(num_landing, num_running, until - 0.001)
    assert not hold.holds(num_landing, num_running, until)
    assert hold.until == math.inf


def test_a_step_does_not_wait_without_such_requests_or_before_the_first_step() -> None:
    assert not after_a_step().holds(0, 3, 12.0)
    assert not after_a_step().holds(1, 0, 12.0)
    assert not StepHold().holds(1, 1, 0.0)


def test_of_two_outstanding_steps_the_second_begins_when_the_first_ends() -> None:
    hold = StepHold()
    hold.planned(0.0)
    hold.planned(0.0)
    hold.committed(4.0)
    hold.committed(6.0)
    assert hold.begun_at == 4.0
    assert hold.holds(1, 1, 6.0)
    assert hold.until == 6.5


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 9), st.floats(0.0, 1.0)
)
def test_all_requests_together_never_wait_longer_than_those_that_come_gain(
    steps: list[float], num_landing: int, num_running: int, late_s: float
) -> None:
    hold, now = StepHold(), 0.0
    for step_s in steps:
        hold.planned(now)
        now += step_s
        hold.committed(now)
    waited_s = (hold.until if hold.holds(num_landing, num_running, now + late_s) else now) - now
    assert waited_s <= MAX_SHARE * steps[-1] + 1e-9
    assert waited_s * num_running <= num_landing * steps[-1] + 1e-9
