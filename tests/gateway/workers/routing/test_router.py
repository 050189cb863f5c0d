"""The choice of a pair by load, prefix affinity and pool size; and counts that return to zero."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.candidates import D1, D2, P1, P2, Candidate

from gateway.workers.routing.router import Router


def router():
    return Router(piece_tokens=4)


def test_equals_take_turns():
    pairs = [router_.choose([P1, P2], [D1, D2], [i] * 3, num_new=5) for router_ in [router()] for i in range(4)]
    assert [(pair.prefill, pair.decode) for pair in pairs] == [("p1", "d1"), ("p2", "d2"), ("p1", "d1"), ("p2", "d2")]


def test_a_long_prompt_keeps_a_prefill_node_busy_until_its_first_token():
    chosen = router()
    long = chosen.choose([P1, P2], [D1], list(range(1000)), num_new=2)
    assert long.prefill == "p1"
    assert [chosen.choose([P1, P2], [D1], [7] * 3, num_new=2).prefill for _ in range(3)] == ["p2", "p2", "p2"]
    chosen.prefill_done(long)
    assert chosen.choose([P1, P2], [D1], [7] * 3, num_new=2).prefill == "p1"


def test_an_idle_pair_with_the_prefix_is_chosen():
    chosen = router()
    prefix = list(range(100, 140))
    for prompt in (prefix, [1, 2, 3, 4], prefix, [5, 6, 7, 8]):  # p1, p2, then p1 again by affinity, then p2 by turn
        pair = chosen.choose([P1, P2], [D1, D2], prompt, num_new=4)
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    pair = chosen.choose([P1, P2], [D1, D2], [*prefix, 9, 9, 9], num_new=4)
    assert (pair.prefill, pair.decode) == ("p1", "d1")
    assert pair.num_compute == 3  # 43 tokens, of which ten pieces of four are cached


def test_load_outweighs_affinity():
    chosen = router()
    prefix = list(range(100, 140))
    first = chosen.choose([P1, P2], [D1, D2], prefix, num_new=4)
    chosen.choose([P1], [D1], list(range(1000, 1500)), num_new=4)  # p1 and d1 now have 500 tokens more
    second = chosen.choose([P1, P2], [D1, D2], prefix, num_new=4)
    assert (first.prefill, second.prefill, second.decode) == ("p1", "p2", "d2")


def test_prompts_of_different_salts_share_nothing():
    chosen = router()
    prefix = list(range(100, 140))
    for salt in ("a", "b"):
        pair = chosen.choose([P1, P2], [D1, D2], prefix, num_new=4, salt=salt)
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    assert pair.prefill == "p2"
    assert chosen.choose([P1, P2], [D1, D2], prefix, num_new=4, salt="b").prefill == "p2"


def test_decode_nodes_are_filled_in_proportion_to_their_pools():
    chosen = router()
    small, large = Candidate("small", 100), Candidate("large", 300)
    picks = [chosen.choose([P1], [small, large], [1, 2], num_new=8).decode for _ in range(8)]
    assert picks.count("large") == 6


def test_a_full_decode_node_comes_after_the_others():
    chosen = router()
    few, many = Candidate("few", 10_000, max_running=2), Candidate("many", 10_000, max_running=4)
    chosen.choose([P1], [many], [1] * 900, num_new=2)  # a much fuller pool
    pairs = [chosen.choose([P1], [few, many], [i], num_new=2) for i in range(6)]
    assert [pair.decode for pair in pairs] == ["few", "few", "many", "many", "many", "few"]
    chosen.decode_done(pairs[2])
    assert (chosen.num_requests("few"), chosen.num_requests("many")) == (3, 3)
    assert chosen.choose([P1], [few, many], [7], num_new=2).decode == "many"
    chosen.remove_worker("many")
    chosen.decode_done(pairs[3])
    assert chosen.num_requests("many") == 0


def test_the_predicted_output_is_counted_and_the_maximum_must_fit():
    chosen = router()
    pair = chosen.choose([P1], [D1], [1] * 10, num_new=500, num_expected=30)
    assert pair.num_hold == 40
    assert chosen.load("d1") == 40
    assert chosen.choose([P1], [Candidate("small", 100)], [1] * 10, num_new=500, num_expected=30) is None
    assert chosen.choose([P1], [D1], [1] * 10, num_new=5, num_expected=30).num_hold == 15
    assert chosen.choose_again(pair, [P1, P2], [D1, D2], num_new=500, num_expected=30).num_hold == 30


def test_a_pool_that_is_too_small_is_never_chosen():
    chosen = router()
    tiny = Candidate("tiny", 10)
    assert chosen.choose([tiny, P1], [D1], [1] * 11, num_new=2).prefill == "p1"
    assert chosen.choose([P1], [tiny], [1] * 5, num_new=6) is None
    assert chosen.choose([], [D1], [1], num_new=2) is None
    assert chosen.load("tiny") == 0


def test_a_removed_node_has_no_load_and_no_cache():
    chosen = router()
    prefix = list(range(100, 140))
    pair = chosen.choose([P1, P2], [D1, D2], prefix, num_new=4)
    chosen.remove_worker("p1")
    chosen.prefill_done(pair)  # its end is still reported
    assert chosen.load("p1") == 0
    assert chosen.choose([P1, P2], [D1], prefix, num_new=4).num_compute == 40


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)), max_size=40))
def test_after_all_requests_no_load_is_left(requests):
    chosen = router()
    open_pairs = []
    for num_prompt, num_new, num_end in requests:
        pair = chosen.choose([P1, P2], [D1, D2], list(range(num_prompt)), num_new=num_new)
        open_pairs.append(pair)
        for _ in range(min(num_end, len(open_pairs))):
            ended = open_pairs.pop(0)
            chosen.prefill_done(ended)
            chosen.decode_done(ended)
    for pair in open_pairs:
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    assert [chosen.load(node) for node in ("p1", "p2", "d1", "d2")] == [0, 0, 0, 0]


# ---- local prefill --------------------------------------------------------------------------------------------------


def test_always_local_uses_no_prefill_node():
    chosen = Router(piece_tokens=4, local_prefill="always")
    pair = chosen.choose([], [D1], [1, 2, 3], num_new=5)
    assert (pair.prefill, pair.decode, pair.num_compute, pair.num_hold) == (None, "d1", 3, 8)
    assert pair.nodes == ("d1",)
    assert chosen.choose([P1], [D1], [1, 2, 3], num_new=5).prefill is None
    assert (chosen.load("p1"), chosen.load("d1")) == (0, 16)
    assert chosen.choose([P1], [], [1], num_new=2) is None


def test_auto_computes_prompts_under_the_threshold_on_the_decode_node():
    chosen = Router(piece_tokens=4, local_prefill="auto", local_threshold=10)
    assert chosen.choose([P1], [D1], [1] * 9, num_new=2).prefill is None
    assert chosen.choose([P1], [D1], [2] * 10, num_new=2).prefill == "p1"
    assert chosen.choose([], [D1], [3] * 9, num_new=2) is None  # auto still needs a registered prefill node


def test_auto_counts_only_uncached_tokens():
    chosen = Router(piece_tokens=4, local_prefill="auto", local_threshold=10)
    prefix = list(range(100, 140))
    assert chosen.choose([P1], [D1, D2], prefix, num_new=2).prefill == "p1"
    again = chosen.choose([P1], [D1], [*prefix, *[7] * 9], num_new=2)  # 49 tokens, 40 of them cached
    assert (again.prefill, again.decode) == (None, "d1")
    assert chosen.choose([P1], [D1], [*prefix, *[8] * 10], num_new=2).prefill == "p1"
    assert chosen.choose([P1], [D2], [*prefix, 9], num_new=2).prefill == "p1"  # the other decode node has none of it
    chosen.clear_prefixes()
    assert chosen.choose([P1], [D1], [*prefix, 9], num_new=2).prefill == "p1"


def test_further_samples_share_the_pair_and_cost_their_output():
    chosen = router()
    first = chosen.choose([P1, P2], [D1, D2], [1] * 10, num_new=5)
    second = chosen.choose_again(first, [P1, P2], [D1, D2], num_new=5)
    assert (second.prefill, second.decode, second.num_compute, second.num_hold) == ("p1", "d1", 0, 5)
    assert (chosen.load("p1"), chosen.load("d1")) == (10, 20)
    for pair in (second, first):
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    assert (chosen.load("p1"), chosen.load("d1")) == (0, 0)


@settings(deadline=None)
@given(
    st.sampled_from(["never", "auto", "always"]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3)), max_size=30),
)
def test_after_all_requests_no_load_is_left_in_any_mode(mode, requests):
    chosen = Router(piece_tokens=4, local_prefill=mode, local_threshold=12)
    pairs = []
    for num_prompt, num_new, num_samples in requests:
        pairs.append(chosen.choose([P1, P2], [D1, D2], list(range(num_prompt)), num_new=num_new))
        pairs += [chosen.choose_again(pairs[-1], [P1, P2], [D1, D2], num_new=num_new) for _ in range(num_samples - 1)]
    for pair in pairs:
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    assert [chosen.load(node) for node in ("p1", "p2", "d1", "d2")] == [0, 0, 0, 0]


def test_a_pair_that_cannot_exchange_pages_is_not_chosen():
    """Either of its nodes may report that."""
    for p1, d1 in (
        (P1, Candidate("d1", 10_000, failed_peers=frozenset({"p1"}))),
        (Candidate("p1", 10_000, failed_peers=frozenset({"d1"})), D1),
    ):
        chosen = router()
        pairs = [chosen.choose([p1, P2], [d1, D2], [i] * 3, num_new=5) for i in range(40)]
        found = {(pair.prefill, pair.decode) for pair in pairs}
        assert ("p1", "d1") not in found
        assert {decode for _, decode in found} == {"d1", "d2"}


def test_an_idle_decode_node_without_a_usable_prefill_node_is_passed_over():
    dead = Candidate("d1", 10_000, failed_peers=frozenset({"p1"}))
    chosen = router()
    pairs = [chosen.choose([P1], [dead, D2], [i] * 3, num_new=5) for i in range(20)]
    assert {pair.decode for pair in pairs} == {"d2"}
    assert chosen.load("d2") > 0
    assert chosen.choose([P1], [D1, D2], [1] * 3, num_new=5).decode == "d1", "it has recovered"


def test_no_pair_is_chosen_when_none_can_exchange_pages():
    dead = Candidate("d1", 10_000, failed_peers=frozenset({"p1"}))
    assert router().choose([P1], [dead], [1] * 3, num_new=5) is None
    alone = Router(piece_tokens=4, local_prefill="always")
    assert alone.choose([], [dead], [1] * 3, num_new=5).prefill is None


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple), max_size=20))
def test_a_node_has_probably_cached_the_longest_prefix_that_it_was_sent(prompts):
    chosen = router()
    prefixes = {"p1": {()}, "p2": {()}}  # whole pieces that each node was sent
    for prompt in prompts:
        pair = chosen.choose([P1, P2], [D1], prompt, num_new=2)
        pieces = [prompt[:end] for end in range(4, len(prompt) + 1, 4)]
        cached = max(len(prefix) for prefix in prefixes[pair.prefill] if prompt[: len(prefix)] == prefix)
        assert pair.num_compute == len(prompt) - cached
        prefixes[pair.prefill].update(pieces)


def test_one_token_needs_no_decode_node() -> None:
    chosen = router()
    pairs = [chosen.choose([P1, P2], [D1, D2], [i] * 30, num_new=1) for i in range(2)]
    assert [(pair.prefill, pair.decode, pair.nodes) for pair in pairs] == [("p1", None, ("p1",)), ("p2", None, ("p2",))]
    assert (chosen.load("p1"), chosen.load("d1"), chosen.num_requests("p1")) == (30, 0, 1)
    full = chosen.dispatch_capacity([P1, P2], [D1, D2])
    for pair in pairs:
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    assert chosen.dispatch_capacity([P1, P2], [D1, D2]) == full + 2
    assert (chosen.load("p1"), chosen.num_requests("p1")) == (0, 0)


def test_a_decode_node_that_computes_prompts_makes_the_only_token_too() -> None:
    pair = Router(local_prefill="always").choose([], [D1], [1] * 30, num_new=1)
    assert pair is not None
    assert pair.nodes == ("d1",)


def test_pairs_are_chosen_within_one_revision():
    chosen = router()
    new_p, new_d = Candidate("new-p", 10_000, revision="w2"), Candidate("new-d", 10_000, revision="w2")
    pairs = {chosen.choose([P1, new_p], [D1, new_d], [i] * 3, num_new=5).nodes for i in range(8)}
    assert pairs == {("p1", "d1"), ("new-p", "new-d")}
    assert chosen.choose([P1], [new_d], [1, 2], num_new=5) is None


def test_what_other_gateways_have_sent_counts_as_load():
    chosen = router()
    chosen.set_other_load("p1", 100)
    chosen.set_other_load("d2", 100)
    assert chosen.load("p1") == 100
    for _ in range(3):
        pair = chosen.choose([P1, P2], [D1, D2], [7] * 3, num_new=2)
        assert (pair.prefill, pair.decode) == ("p2", "d1")
    assert (chosen.load("p1"), chosen.load("p2")) == (100, 9)
    chosen.set_other_load("p1", 0)
    assert chosen.choose([P1, P2], [D2], [7] * 3, num_new=2).prefill == "p1"
    chosen.remove_worker("d2")
    assert chosen.load("d2") == 0


def test_a_request_of_a_model_with_a_window_counts_for_the_pages_that_it_can_hold():
    chosen, ring = router(), Candidate("ring", 1_000, most_held_tokens=64, longest=1_000_000)
    pairs = [chosen.choose((P1,), (ring,), [7] * 300, num_new=5_000) for _ in range(2)]
    pairs.append(chosen.choose_again(pairs[0], (P1,), (ring,), num_new=5_000))
    pairs.append(chosen.choose_target(D1, (ring,), num_tokens=300, num_new=500))
    pairs.append(chosen.choose((P1,), (ring,), [7] * 10, num_new=4))
    assert [pair.num_hold for pair in pairs] == [64, 64, 64, 64, 14]
    assert chosen.load("ring") == 4 * 64 + 14
    for pair in pairs[:3]:
        chosen.prefill_done(pair)
        chosen.decode_done(pair)
    assert chosen.load("ring") == 64 + 14


def test_counts_stay_exact_whatever_numbers_a_node_sends():
    huge = Candidate("huge", 2**64 * 65_536, max_running=2**64 - 1)
    chosen = router()
    pair = chosen.choose((P1,), (huge,), [7] * 3, num_new=2)
    for num_tokens in (2**60, 2**64 - 1, 5):
        for name in pair.nodes:
            chosen.set_other_load(name, num_tokens)
    assert chosen.dispatch_capacity((P1,), (huge,)) > 0
    chosen.prefill_done(pair)
    chosen.decode_done(pair)
    assert [chosen.load(name) for name in pair.nodes] == [5, 5]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_two_gateways_that_send_at_once_fill_the_nodes_as_evenly_as_one(requests):
    """Each learns from the nodes what the other one has sent; then no node has a whole request more than another."""
    prefills, decodes = [P1, P2], [Candidate(f"d{i}", 100_000) for i in range(3)]
    names = [node.incarnation for node in (*prefills, *decodes)]
    routers = {True: router(), False: router()}
    own = {is_first: dict.fromkeys(names, 0) for is_first in routers}
    largest = 0
    for number, (is_first, num_prompt, num_new) in enumerate(requests):
        pair = routers[is_first].choose(prefills, decodes, [number] * num_prompt, num_new=num_new + 1)
        own[is_first][pair.prefill] += pair.num_compute
        own[is_first][pair.decode] += pair.num_hold
        for name in names:
            routers[not is_first].set_other_load(name, own[is_first][name])
        largest = max(largest, num_prompt + num_new + 1)
        for role in (prefills, decodes):
            loads = [own[True][node.incarnation] + own[False][node.incarnation] for node in role]
            assert max(loads) - min(loads) <= largest
