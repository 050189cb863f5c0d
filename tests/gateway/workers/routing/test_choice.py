"""The choice by arrays equals the exhaustive one after any history, and what it remembers of prompts is bounded."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.gateway.candidates import Candidate
from support.gateway.exhaustive_choice import ExhaustiveRouter

from gateway.workers.routing.candidates import NUM_ROWS, NodeFilter
from gateway.workers.routing.prefix_index import PrefixIndex
from gateway.workers.routing.router import MAX_GROUPS, MIN_STALE_ROWS, Router

#: Powers of two, so that no sum depends on the order of its parts.
SECONDS = st.sampled_from([0.0, 2.0**-10, 2.0**-9, 2.0**-7])
NUM_NODES = 6


def nodes_of(role):
    """Nodes of one role, some of which pair with none of another revision, or not with the first of the other role."""
    other = {"p": "d0", "d": "p0"}[role]
    node = st.builds(
        Candidate,
        incarnation=st.just(""),
        capacity_tokens=st.sampled_from([64, 128, 256, 1024]),
        longest=st.sampled_from([0, 0, 32, 4096]),
        most_held_tokens=st.sampled_from([0, 0, 16]),
        max_running=st.integers(1, 4),
        failed_peers=st.sampled_from([frozenset(), frozenset(), frozenset({other})]),
        revision=st.sampled_from(["w1", "w1", "w1", "w2"]),
        step_s=SECONDS,
        prompt_token_s=SECONDS,
        send_token_s=SECONDS,
    )
    lists = st.lists(node, min_size=1, max_size=NUM_NODES)
    return lists.map(lambda found: tuple(replace(one, incarnation=f"{role}{i}") for i, one in enumerate(found)))


REQUEST = st.tuples(st.just("request"), st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 24))
EVENT = st.one_of(
    REQUEST,
    REQUEST,
    st.tuples(st.just("again"), st.integers(0, 40), st.integers(1, 24)),
    st.tuples(st.just("move"), st.integers(0, NUM_NODES), st.integers(1, 24)),
    st.tuples(st.just("pause"), st.integers(0, 40), st.none()),
    st.tuples(st.just("begin"), st.integers(0, 40), st.none()),
    st.tuples(st.just("end"), st.integers(0, 40), st.none()),
    st.tuples(st.just("others"), st.integers(0, 2 * NUM_NODES), st.integers(0, 64)),
    st.tuples(st.just("lose"), st.integers(0, 2 * NUM_NODES), st.none()),
    st.tuples(st.just("measure"), st.integers(0, 2 * NUM_NODES), SECONDS),
)
SEQUENCES = st.sampled_from([tuple, list])
MODES = st.sampled_from([("never", None), ("always", None), ("auto", None), ("auto", 8)])


@given(MODES, SEQUENCES, nodes_of("p"), nodes_of("d"), st.lists(EVENT, min_size=1, max_size=60))
@settings(max_examples=examples(400), deadline=None)
def test_the_choice_equals_the_exhaustive_one_after_any_history(mode, sequence, prefills, decodes, history):
    prefills, decodes = sequence(prefills), sequence(decodes)
    fast = Router(piece_tokens=4, local_prefill=mode[0], local_threshold=mode[1])
    slow = ExhaustiveRouter(4, *mode)
    waiting, begun, paused = [], [], []
    nodes = {node.incarnation: node for node in (*prefills, *decodes)}

    def begin(pair, now):
        fast.prefill_done(pair, now)
        slow.prefill_done(pair, nodes, now)

    for number, (event, value, more) in enumerate(history):
        if pairs := {"again": waiting, "begin": waiting, "pause": begun, "end": begun}.get(event):
            value %= len(pairs)
        if event == "request":
            request = {"num_new": more, "num_expected": value[0] * 5, "now": number / 4}
            pair = fast.choose(prefills, decodes, tuple(value), **request)
            assert pair == slow.choose(prefills, decodes, tuple(value), **request)
            waiting += [] if pair is None else [pair]
        elif event == "again" and value < len(waiting):
            pair = fast.choose_again(waiting[value], prefills, decodes, num_new=more)
            assert pair == slow.choose_again(waiting[value], prefills, decodes, num_new=more)
            waiting += [] if pair is None else [pair]
        elif event == "move" and value < len(decodes):
            pair = fast.choose_target(decodes[value], decodes, num_tokens=9, num_new=more)
            assert pair == slow.choose_target(decodes[value], decodes, num_tokens=9, num_new=more)
            waiting += [] if pair is None else [pair]
        elif event == "pause" and value < len(begun):
            is_paused = begun[value] not in paused
            (paused.append if is_paused else paused.remove)(begun[value])
            for router in (fast, slow):
                router.set_paused(begun[value], is_paused=is_paused)
        elif event == "begin" and value < len(waiting):
            begun.append(waiting.pop(value))
            begin(begun[-1], number / 4)
        elif event == "end" and value < len(begun):
            pair = begun.pop(value)
            for router in (fast, slow):
                if pair in paused:
                    router.set_paused(pair, is_paused=False)
                router.decode_done(pair)
            if pair in paused:
                paused.remove(pair)
        elif event in ("others", "lose", "measure") and value < len(prefills) + len(decodes):
            node = [*prefills, *decodes][value]
            if event == "measure":  # as a heartbeat says, in the same tuple of nodes
                object.__setattr__(node, "prompt_token_s", more)
                fast.observe(node)
            for router in (fast, slow):
                if event == "others":
                    router.set_other_load(node.incarnation, more)
                elif event == "lose":
                    router.remove_worker(node.incarnation)
            if event == "lose":  # its requests end, and it registers again
                for pair in [pair for pair in (*waiting, *begun) if node.incarnation in pair.nodes]:
                    if pair in waiting:
                        begin(pair, number / 4)
                    for router in (fast, slow):
                        if pair in paused:
                            router.set_paused(pair, is_paused=False)
                        router.decode_done(pair)
                    (waiting if pair in waiting else begun).remove(pair)
                paused = [pair for pair in paused if node.incarnation not in pair.nodes]


AMONG = st.builds(
    NodeFilter,
    revision=st.sampled_from(["", "w1", "w2", "unknown"]),
    prefers_idle=st.booleans(),
    avoid=st.frozensets(st.sampled_from(["p0", "p1", "d0", "d1", "gone"]), max_size=2),
    decode=st.sampled_from([None, None, "d0", "d1", "gone"]),
)


@given(nodes_of("p"), nodes_of("d"), st.lists(AMONG, min_size=1, max_size=20))
@settings(max_examples=examples(200), deadline=None)
def test_a_choice_among_some_nodes_equals_the_choice_with_these_alone(prefills, decodes, history):
    fast, slow = Router(piece_tokens=4), Router(piece_tokens=4)

    def allowed(nodes, among, count):
        nodes = [node for node in nodes if among.revision in ("", node.revision)]
        if among.decode is not None and nodes and nodes[0].incarnation.startswith("d"):
            nodes = [node for node in nodes if node.incarnation == among.decode]
        else:
            nodes = [node for node in nodes if node.incarnation not in among.avoid]
        return [node for node in nodes if among.prefers_idle and not count(node.incarnation)] or nodes

    for number, among in enumerate(history):
        some_prefills, some_decodes = allowed(prefills, among, slow.load), allowed(decodes, among, slow.num_requests)
        pair = fast.choose(prefills, decodes, (number % 3,) * 9, num_new=2, among=among)
        assert pair == slow.choose(some_prefills, some_decodes, (number % 3,) * 9, num_new=2)
    assert len(fast._groups) == 1


@pytest.mark.parametrize("num_nodes", [2, NUM_ROWS, NUM_ROWS + 1, 3 * NUM_ROWS])
def test_many_nodes_take_turns(num_nodes):
    prefills = tuple(Candidate(f"p{i}", 1_000) for i in range(num_nodes))
    decodes = tuple(Candidate(f"d{i}", 1_000) for i in range(num_nodes))
    router = Router()
    pairs = [router.choose(prefills, decodes, (i,), num_new=2) for i in range(2 * num_nodes)]
    assert [pair.nodes for pair in pairs] == [(f"p{i}", f"d{i}") for i in range(num_nodes)] * 2


def test_the_group_of_nodes_that_most_requests_have_is_kept_among_those_of_many_adapters():
    router, usual = Router(), ((Candidate("p", 1_000),), (Candidate("d", 1_000),))
    first = router._group(*usual)
    for number in range(2 * MAX_GROUPS):
        router.choose((Candidate(f"p{number}", 1_000),), (Candidate(f"d{number}", 1_000),), (1,), num_new=2)
        assert router._group(*usual) is first
    assert len(router._groups) == MAX_GROUPS


def test_a_node_that_comes_and_goes_leaves_no_cache_to_the_next_one_in_its_row():
    router, prompt = Router(piece_tokens=4), (1,) * 40
    for number in range(5 * MIN_STALE_ROWS):
        nodes = tuple(Candidate(f"p{number}-{i}", 1_000) for i in range(2))
        pair = router.choose(nodes, (Candidate("d", 10_000),), prompt, num_new=2)
        assert pair.num_compute == 40
        router.prefill_done(pair)
        router.decode_done(pair)
        for node in nodes:
            router.remove_worker(node.incarnation)
    assert len(router._arrays.load) <= 8 * MIN_STALE_ROWS


def test_a_node_in_another_role_has_its_cache_and_the_requests_that_it_was_given():
    router, prompt = Router(piece_tokens=4), (1,) * 40
    old, new = Candidate("old", 1_000), Candidate("new", 1_000)
    router.note_cached(prompt, "", "old")
    given = router.choose((new,), (Candidate("d", 10_000),), (7,) * 9, num_new=2)
    router.rename_worker("old", "new")
    assert router.load("new") == 9
    other = Candidate("other", 1_000)
    pair = router.choose((other, new), (Candidate("d", 10_000),), prompt, num_new=2)
    assert (pair.prefill, pair.num_compute) == ("new", 0)
    for one in (given, pair):
        router.prefill_done(one)
    assert router.load("new") == 0
    router.remove_worker("old")
    assert router.choose((other, old), (Candidate("d", 10_000),), prompt, num_new=2).num_compute == 40


# ---- the index of prefixes -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=12)), max_size=40))
def test_the_index_knows_the_longest_prefix_of_each_node(prompts):
    index, sent = PrefixIndex(1, 10_000), {row: [] for row in range(4)}
    for row, prompt in prompts:
        pieces = index.pieces(prompt, "")
        cached = index.cached(pieces, 8)
        for other, known in sent.items():
            shared = [sum(1 for _ in iter_shared(prompt, one)) for one in known]
            assert (0 if cached is None else cached[other]) == max(shared, default=0)
        index.remember(pieces, [row])
        sent[row].append(prompt)


def iter_shared(one, other):
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=30))
def test_the_index_is_bounded_and_keeps_what_was_used_last(max_pieces, prompts):
    index = PrefixIndex(1, max_pieces)
    for prompt in prompts:
        index.remember(index.pieces(prompt, ""), [0])
        assert index._num_bytes <= 8 * max_pieces
        if 0 < len(prompt) <= max_pieces:
            assert index.cached(index.pieces(prompt, ""), 1)[0] == len(prompt)
    assert index._num_bytes == sum(len(run.pieces) for run in index._runs)
    index.clear()
    assert index._num_bytes == 0
