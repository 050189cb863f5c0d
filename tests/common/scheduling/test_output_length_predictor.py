"""Predicted output lengths come from the narrowest group with enough outputs, and memory is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.scheduling.output_length_predictor import MAX_GROUPS, OutputLengthPredictor

CODE, CHAT = [1] * 32, [2] * 32


def taught(*lengths, tenant="t", prompt=CODE, is_cut=False, predictor=None):
    predictor = predictor or OutputLengthPredictor()
    for length in lengths:
        predictor.learn(tenant, prompt, length, is_cut=is_cut)
    return predictor


def test_three_outputs_are_too_few_for_a_prediction():
    assert OutputLengthPredictor().expected("t", CODE) == 0
    assert taught(10, 10, 10).expected("t", CODE) == 0
    assert taught(10, 10, 10, 10).expected("t", CODE) == 10


def test_the_mean_is_rounded_up():
    assert taught(10, 20, 10, 21).expected("t", CODE) == 16  # 15.25


def test_only_the_beginning_of_a_prompt_identifies_an_application():
    predictor = taught(10, 10, 10, 10)
    taught(100, 100, 100, 100, prompt=CHAT, predictor=predictor)
    assert predictor.expected("t", [*CODE, 7, 8, 9]) == 10
    assert predictor.expected("t", [*CHAT, 7]) == 100
    assert predictor.expected("t", [3] * 40) == 55  # of the tenant's
    assert predictor.expected("other", CODE) == 55  # the mean over all requests


def test_a_tenants_mean_comes_before_that_of_all_requests():
    predictor = taught(10, 10, 10, 10)
    taught(50, 50, 50, 50, tenant="u", predictor=predictor)
    assert (predictor.expected("t", CHAT), predictor.expected("u", CHAT)) == (10, 50)


def test_an_output_cut_at_its_limit_never_lowers_the_prediction():
    predictor = taught(100, 100, 100, 100)
    taught(5, 5, 5, is_cut=True, predictor=predictor)
    assert predictor.expected("t", CODE) == 100
    taught(200, is_cut=True, predictor=predictor)
    assert predictor.expected("t", CODE) == 113  # (7 x 100 + 200) / 8 = 112.5
    assert taught(16, 16, 16, 16, is_cut=True).expected("t", CODE) == 16


def test_the_prediction_follows_a_change():
    predictor = taught(*[10] * 500)
    taught(*[200] * 300, predictor=predictor)
    assert predictor.expected("t", CODE) == pytest.approx(200, abs=2)


def test_the_number_of_groups_is_bounded_and_the_overall_mean_stays():
    predictor = OutputLengthPredictor()
    for i in range(MAX_GROUPS):
        predictor.learn(f"t{i}", [i], 8, is_cut=False)
    assert len(predictor) == MAX_GROUPS
    assert predictor.expected("another", [1]) == 8


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 500), st.booleans()), max_size=60))
def test_the_prediction_lies_between_the_shortest_and_the_longest_output(history):
    predictor = OutputLengthPredictor()
    for tenant, first, length, is_cut in history:
        predictor.learn(tenant, [first], length, is_cut=is_cut)
    for tenant in "ab":
        for first in range(4):
            expected = predictor.expected(tenant, [first])
            assert expected == 0 or min(h[2] for h in history) <= expected <= max(h[2] for h in history)
            assert (expected == 0) == (len(history) < 4)
