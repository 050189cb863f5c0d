"""How many nodes a load needs: values worked out by hand, and rules that hold for all loads."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.capacity import (
    MAX_NODES,
    PromptWork,
    decode_work,
    largest_batch,
    nodes_for,
    planned_batch,
    prefill_nodes,
    share_waiting,
)


@pytest.mark.parametrize(
    ("work", "utilization", "count"),
    [(0.0, 0.7, 1), (0.7, 0.7, 1), (0.71, 0.7, 2), (1.4, 0.7, 2), (1.7, 0.8, 3), (5.0, 1.0, 5)],
)
def test_nodes_are_busy_for_their_share_at_most(work, utilization, count):
    assert nodes_for(work, utilization) == count


@pytest.mark.parametrize("work", [1e17, math.inf, math.nan])
def test_a_load_that_cannot_be_asks_for_a_bounded_number_of_nodes(work):
    assert nodes_for(work, 0.7) == prefill_nodes(PromptWork(work, 0.1, 1.0), 0.1, utilization=0.7) == MAX_NODES


def test_one_node_with_random_service_times_makes_prompts_wait_as_the_formula_of_a_single_server_says():
    work = PromptWork(0.5, 1.0, 1.0)
    assert share_waiting(1, work, 0.0) == pytest.approx(0.5)
    assert share_waiting(1, work, 2.0) == pytest.approx(0.5 * math.exp(-1.0))


def test_two_nodes_with_one_node_of_work_make_a_third_of_the_prompts_wait():
    assert share_waiting(2, PromptWork(1.0, 1.0, 1.0), 0.0) == pytest.approx(1 / 3)


def test_prompts_of_equal_length_wait_half_as_long_as_random_ones():
    alike, random = PromptWork(0.5, 1.0, 0.0), PromptWork(0.5, 1.0, 1.0)
    assert share_waiting(1, alike, 1.0) == pytest.approx(share_waiting(1, random, 2.0))


def test_all_prompts_wait_at_nodes_that_cannot_keep_up():
    assert share_waiting(2, PromptWork(2.0, 0.1, 0.0), 10.0) == 1.0


def test_an_objective_asks_for_a_node_that_the_work_alone_does_not_need():
    work = PromptWork(0.5, 1.0, 1.0)
    assert prefill_nodes(work, math.inf, utilization=0.7) == 1
    assert prefill_nodes(work, 1.0, utilization=0.7) == 2  # 30 % would wait longer at one node, 2 % at two
    assert prefill_nodes(work, 4.0, utilization=0.7) == 1  # 7 % at one node


def test_no_node_is_added_for_prompts_that_are_late_without_waiting():
    assert prefill_nodes(PromptWork(0.5, 1.0, 1.0), -0.1, utilization=0.7) == 1


def step_s(batch):
    return 0.01 + 0.001 * batch


def test_the_largest_batch_leaves_a_fifth_of_the_objective_for_waiting():
    assert largest_batch(step_s, 0.03, 256) == 14  # 10 ms + 14 ms are 80 % of 30 ms
    assert largest_batch(step_s, 0.03, 8) == 8
    assert largest_batch(step_s, 0.01, 256) == 0


def test_decode_work_follows_from_the_time_of_a_planned_batch():
    assert planned_batch(20, 0.7) == 14
    assert planned_batch(1, 0.7) == 1
    assert decode_work(1_000.0, step_s, 14) == pytest.approx(1_000 * 0.024 / 14)


@given(
    work=st.floats(0.0, 50.0), mean_s=st.floats(0.001, 100.0), variation=st.floats(0.0, 20.0),
    seconds=st.floats(0.0, 100.0), count=st.integers(1, 60),
)  # fmt: skip
def test_more_nodes_and_more_time_never_make_more_prompts_wait(work, mean_s, variation, seconds, count):
    prompts = PromptWork(work, mean_s, variation)
    share = share_waiting(count, prompts, seconds)
    assert 0.0 <= share <= 1.0
    assert share_waiting(count + 1, prompts, seconds) <= share + 1e-12
    assert share_waiting(count, prompts, seconds + 1.0) <= share + 1e-12


@given(work=st.floats(0.0, 50.0), slack_s=st.floats(0.001, 10.0), utilization=st.floats(0.05, 1.0))
def test_the_nodes_for_prompts_are_enough_and_one_less_is_not(work, slack_s, utilization):
    prompts = PromptWork(work, 0.5, 0.3)
    count = prefill_nodes(prompts, slack_s, utilization=utilization)
    assert work <= count * utilization + 1e-6
    assert share_waiting(count, prompts, slack_s) <= 0.1 + 1e-12
    fewer = count - 1
    assert not fewer or work > fewer * utilization - 1e-6 or share_waiting(fewer, prompts, slack_s) > 0.1
