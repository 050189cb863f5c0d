"""Where a prompt is computed: costs by hand, and the choices of the router that follow from them."""

from dataclasses import replace

import pytest
from support.gateway.candidates import D1, D2, P1, Candidate

from gateway.workers.routing.placement import DELAY_WEIGHT, DecodePlace, PrefillPlace
from gateway.workers.routing.router import Router

#: A prompt token takes 1 ms on each node, and a step of a decode node 10 ms.
FAST = {"prompt_token_s": 0.001, "step_s": 0.010}
PREFILL, DECODE, OTHER = replace(P1, prompt_token_s=0.001), replace(D1, **FAST), replace(D2, **FAST)


def router() -> Router:
    return Router(piece_tokens=4, local_prefill="auto")


def prompt(first: int, length: int) -> list[int]:
    return [first * 1_000 + i for i in range(length)]


def test_a_prefill_node_costs_its_queue_the_prompt_and_the_transfer():
    place = PrefillPlace(wait_s=0.3, num_to_compute=200, token_s=0.001, num_to_send=100, send_s=0.0001)
    assert place.cost_s == pytest.approx(0.51)


def test_a_decode_node_costs_the_delay_of_every_output_there_as_well():
    place = DecodePlace(own_s=0.06, prompt_s=0.02, num_outputs=4, num_coming=0, coming_s=0.0)
    assert place.cost_s == pytest.approx(0.06 + DELAY_WEIGHT * 4 * 0.02)


@pytest.mark.parametrize(
    ("coming_s", "delay_s"),
    [
        (0.0, 2 * 0.02),  # both begin at once and wait for the whole prompt
        (0.01, 2 * 0.015),  # they begin within its first half
        (0.04, 2 * 0.005),  # one of them begins before its end, and waits for half of it on average
    ],
)
def test_outputs_that_will_begin_meanwhile_are_delayed_by_what_is_left(coming_s, delay_s):
    place = DecodePlace(own_s=0.02, prompt_s=0.02, num_outputs=0, num_coming=2, coming_s=coming_s)
    assert place.cost_s == pytest.approx(0.02 + DELAY_WEIGHT * delay_s)


def test_prompts_go_to_the_prefill_node_until_something_is_measured():
    chosen = router()
    assert [chosen.choose([P1], [D1], prompt(i, 40), num_new=2).prefill for i in range(5)] == ["p1"] * 5


def test_prompts_that_were_sent_before_anything_was_measured_count_from_the_next_first_token_on():
    chosen = router()
    first, *_ = [chosen.choose([P1], [D1], prompt(i, 400), num_new=2) for i in range(5)]
    chosen.observe(PREFILL)
    assert chosen.choose([PREFILL], [DECODE], prompt(5, 100), num_new=2, now=0.8).prefill == "p1"
    chosen.prefill_done(first, 1.0)  # 1,700 tokens are left, so that the node is busy until 2.7 s
    assert chosen.choose([PREFILL], [DECODE], prompt(6, 100), num_new=2, now=1.0).prefill is None


def test_prompts_that_take_longer_than_expected_are_estimated_again():
    chosen = router()
    pairs = [chosen.choose([PREFILL], [DECODE], prompt(i, 300), num_new=1) for i in range(3)]
    chosen.prefill_done(pairs[0], 1.0)  # it should have had all three by 0.9 s
    assert chosen.choose([PREFILL], [DECODE], prompt(4, 100), num_new=2, now=1.0).prefill is None


def test_an_idle_prefill_node_computes_the_prompt_since_it_waits_for_no_decode_step():
    assert router().choose([PREFILL], [DECODE], prompt(1, 40), num_new=2).prefill == "p1"


def test_a_prompt_behind_a_long_one_is_computed_by_an_idle_decode_node():
    chosen = router()
    assert chosen.choose([PREFILL], [DECODE], prompt(1, 500), num_new=2).prefill == "p1"
    pair = chosen.choose([PREFILL], [DECODE], prompt(2, 40), num_new=2)
    assert (pair.prefill, pair.decode, pair.num_compute) == (None, "d1", 40)


def test_prompts_that_a_decode_node_has_to_compute_count_until_their_first_token():
    chosen = router()
    chosen.choose([PREFILL], [DECODE], prompt(1, 500), num_new=2)
    local = chosen.choose([PREFILL], [DECODE], prompt(2, 400), num_new=2)  # 0.9 s there, 0.73 s here
    assert local.prefill is None
    assert chosen.choose([PREFILL], [DECODE], prompt(3, 200), num_new=2).prefill == "p1"  # 0.7 s there, 0.77 s here
    chosen.prefill_done(local)
    chosen.decode_done(local)
    assert chosen.choose([PREFILL], [DECODE], prompt(4, 200), num_new=2).prefill is None


def test_outputs_that_would_be_delayed_keep_a_prompt_away():
    chosen = router()
    for number in range(4):
        begun = chosen.choose([PREFILL], [DECODE], prompt(number, 4), num_new=500)
        chosen.prefill_done(begun)
    chosen.choose([PREFILL], [DECODE], prompt(8, 300), num_new=2)
    assert chosen.choose([PREFILL], [DECODE], prompt(9, 100), num_new=2).prefill == "p1"  # 0.4 s there, 0.91 s here
    assert chosen.choose([PREFILL], [DECODE, OTHER], prompt(10, 100), num_new=2).nodes == ("d2",)


@pytest.mark.parametrize("small", [Candidate("d1", 600, **FAST), Candidate("d1", 10_000, max_running=1, **FAST)])
def test_a_full_decode_node_leaves_the_prompt_and_its_pages_to_the_prefill_node(small):
    chosen = router()
    assert chosen.choose([PREFILL], [small], prompt(1, 500), num_new=90).prefill == "p1"
    assert chosen.choose([PREFILL], [small], prompt(2, 10), num_new=2).nodes == ("p1", "d1")


def test_a_prompt_that_a_decode_node_has_cached_is_computed_there():
    chosen = router()
    chosen.note_cached(prompt(1, 400), "", "d2")
    pair = chosen.choose([PREFILL], [DECODE, OTHER], prompt(1, 404), num_new=2)
    assert (pair.nodes, pair.num_compute) == (("d2",), 4)


def test_the_faster_of_two_prefill_nodes_gets_more_of_the_prompts():
    slow, fast = replace(P1, prompt_token_s=0.003), Candidate("p2", 10_000, prompt_token_s=0.001)
    chosen = Router(piece_tokens=4)
    pairs = [chosen.choose([slow, fast], [D1], prompt(i, 100), num_new=2) for i in range(8)]
    assert sum(pair.prefill == "p2" for pair in pairs) == 6


def test_prefill_nodes_count_alike_until_all_have_measured_a_token():
    slow, unknown = replace(P1, prompt_token_s=0.003), Candidate("p2", 10_000)
    chosen = Router(piece_tokens=4)
    pairs = [chosen.choose([slow, unknown], [D1], prompt(i, 100), num_new=2) for i in range(8)]
    assert sum(pair.prefill == "p2" for pair in pairs) == 4


def test_a_threshold_decides_whatever_it_costs():
    chosen = Router(piece_tokens=4, local_prefill="auto", local_threshold=10)
    assert chosen.choose([PREFILL], [DECODE], prompt(1, 9), num_new=2).prefill is None
    assert chosen.choose([PREFILL], [DECODE], prompt(2, 10), num_new=2).prefill == "p1"
