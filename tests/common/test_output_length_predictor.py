"""Expected output lengths: from the narrowest group that has seen enough, and bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.scheduling.output_length_predictor import OutputLengthPredictor

CODE, CHAT = [1] * 32, [2] * 32


def taught(*lengths, tenant="t", prompt=CODE, is_cut=False, predictor=None):
    predictor = predictor or OutputLengthPredictor()
    for length in lengths:
        predictor.learn(tenant, prompt, length, is_cut=is_cut)
    return predictor


def test_without_history_nothing_is_expected_and_three_outputs_are_none():
    assert OutputLengthPredictor().expected("t", CODE) == 0
    assert taught(10, 10, 10).expected("t", CODE) == 0
    assert taught(10, 10, 10, 10).expected("t", CODE) == 10


def test_the_mean_is_rounded_up():
    assert taught(10, 20, 10, 21).expected("t", CODE) == 16  # 15.25


def test_only_the_beginning_of_a_prompt_tells_applications_apart():
    predictor = taught(10, 10, 10, 10)
    taught(100, 100, 100, 100, prompt=CHAT, predictor=predictor)
    assert predictor.expected("t", [*CODE, 7, 8, 9]) == 10
    assert predictor.expected("t", [*CHAT, 7]) == 100
    assert predictor.expected("t", [3] * 40) == 55  # of the tenant's
    assert predictor.expected("other", CODE) == 55  # of everybody's


def test_a_tenant_is_asked_before_everybody_else():
    predictor = taught(10, 10, 10, 10)
    taught(50, 50, 50, 50, tenant="u", predictor=predictor)
    assert (predictor.expected("t", CHAT), predictor.expected("u", CHAT)) == (10, 50)


def test_an_output_that_was_cut_never_lowers_what_is_expected():
    predictor = taught(100, 100, 100, 100)
    taught(5, 5, 5, is_cut=True, predictor=predictor)
    assert predictor.expected("t", CODE) == 100
    taught(200, is_cut=True, predictor=predictor)
    assert predictor.expected("t", CODE) == 113  # (7 x 100 + 200) / 8 = 112.5
    assert taught(16, 16, 16, 16, is_cut=True).expected("t", CODE) == 16


def test_what_changes_is_followed():
    predictor = taught(*[10] * 500)
    taught(*[200] * 300, predictor=predictor)
    assert predictor.expected("t", CODE) == pytest.approx(200, abs=2)


def test_what_is_remembered_is_bounded_and_everybody_is_never_forgotten():
    predictor = OutputLengthPredictor(max_groups=10)
    for i in range(100):
        predictor.learn(f"t{i}", [i], 8, is_cut=False)
    assert len(predictor) == 10
    assert predictor.expected("somebody", [1]) == 8


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 500), st.booleans()), max_size=60))
def test_what_is_expected_lies_between_what_was_seen(history):
    predictor = OutputLengthPredictor()
    for tenant, first, length, is_cut in history:
        predictor.learn(tenant, [first], length, is_cut=is_cut)
    for tenant in "ab":
        for first in range(4):
            expected = predictor.expected(tenant, [first])
            assert expected == 0 or min(h[2] for h in history) <= expected <= max(h[2] for h in history)
            assert (expected == 0) == (len(history) < 4)
