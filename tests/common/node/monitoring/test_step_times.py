"""What a step without prompts takes, and what a prompt token adds to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.node.monitoring.step_times import HALF_LIFE, StepTimes


def test_nothing_is_known_before_the_first_step():
    times = StepTimes()
    assert (times.step_s, times.prompt_token_s) == (0.0, 0.0)


def test_on_a_prefill_node_each_token_has_its_share_of_the_whole_step():
    times = StepTimes()
    times.add(0.105, 2_000)
    assert (times.step_s, times.prompt_token_s) == (0.0, pytest.approx(52.5e-6))


def test_on_a_decode_node_a_token_costs_what_it_adds_to_a_step():
    times = StepTimes()
    for _ in range(10):
        times.add(0.010, 0)
    times.add(0.060, 1_000)
    assert times.step_s == pytest.approx(0.010)
    assert times.prompt_token_s == pytest.approx(50e-6)


def test_a_token_never_costs_less_than_nothing():
    times = StepTimes()
    times.add(0.050, 0)
    times.add(0.040, 8)
    assert times.prompt_token_s == 0.0


def test_a_step_counts_half_after_as_many_as_the_half_life():
    times = StepTimes()
    times.add(0.02, 0)
    for _ in range(HALF_LIFE):
        times.add(0.01, 0)
    weights = sum(0.5 ** (age / HALF_LIFE) for age in range(HALF_LIFE))
    assert times.step_s == pytest.approx((0.02 * 0.5 + 0.01 * weights) / (0.5 + weights))


@given(st.lists(st.tuples(st.floats(1e-4, 10.0), st.integers(0, 10_000)), min_size=1))
def test_a_mean_lies_between_the_shortest_and_the_longest_step(steps):
    times = StepTimes()
    for seconds, num_tokens in steps:
        times.add(seconds, num_tokens)
    plain = [seconds for seconds, num_tokens in steps if not num_tokens]
    if plain:
        assert min(plain) <= times.step_s * (1 + 1e-9) and times.step_s <= max(plain) * (1 + 1e-9)
    assert times.prompt_token_s <= max([seconds / count for seconds, count in steps if count], default=0.0) * (1 + 1e-9)


@given(st.lists(st.floats(1e-4, 10.0)), st.lists(st.floats(1e-4, 10.0)))
def test_several_steps_at_once_count_exactly_as_one_by_one(before, durations):
    alone, together = StepTimes(), StepTimes()
    for seconds in [*before, *durations]:
        alone.add(seconds, 0)
    together.add_decode_steps(before)
    together.add_decode_steps(durations)
    assert together.step_s == alone.step_s
