"""The circuit breakers of pairs whose transfers fail."""

import pytest
from support.gateway.fake_nodes import make_register

from gateway.workers.registry import Registry
from gateway.workers.routing.pair_health import PairHealth, PairKey

PAIR = PairKey("p", "d")


def opened(now=0.0):
    health = PairHealth()
    assert [health.failed(PAIR, now, is_probe=False) for _ in range(3)] == [False, False, True]
    return health


def test_three_failures_in_a_row_open_the_breaker():
    health = PairHealth()
    for _ in range(2):
        health.failed(PAIR, 0.0, is_probe=False)
        health.failed(PAIR, 0.0, is_probe=False)
        assert health.resting() == []
        health.succeeded(PAIR, is_probe=False)
    assert opened().resting() == [PAIR]


def test_after_its_pause_one_request_probes_the_pair():
    health = opened()
    assert not health.tick(0.9)
    assert health.tick(1.0)
    assert health.resting() == []
    assert [health.sent(PAIR), health.sent(PAIR)] == [True, False]
    assert health.resting() == [PAIR]
    assert health.succeeded(PAIR, is_probe=True)
    assert health.breakers == {}


def test_pauses_double_up_to_thirty_seconds():
    health, now, pauses = opened(), 0.0, []
    for _ in range(7):
        pauses.append(health.breakers[PAIR].until - now)
        now = health.breakers[PAIR].until
        assert health.tick(now)
        health.sent(PAIR)
        assert health.failed(PAIR, now, is_probe=True)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_requests_from_before_the_breaker_opened_neither_close_nor_prolong_it():
    health = opened()
    assert not health.succeeded(PAIR, is_probe=False)
    assert not health.failed(PAIR, 0.5, is_probe=False), "the registry has nothing to bring up to date"
    assert health.resting() == [PAIR]
    assert health.breakers[PAIR].until == 1.0
    health.tick(1.0)
    assert not health.failed(PAIR, 1.1, is_probe=False)
    assert health.sent(PAIR), "the next request probes the pair"
    assert not health.failed(PAIR, 1.2, is_probe=False)
    assert health.succeeded(PAIR, is_probe=True)


def test_a_probe_without_an_answer_is_repeated_by_the_next_request():
    health = opened()
    health.tick(1.0)
    health.sent(PAIR)
    health.gave_no_answer(PAIR)
    assert health.resting() == []
    assert health.sent(PAIR)


@pytest.mark.parametrize("lost", ["p", "d"])
def test_a_lost_node_takes_its_breakers_along(lost):
    health = opened()
    health.forget(lost)
    assert health.breakers == {}


def test_a_resting_pair_gets_no_requests_but_keeps_the_limits():
    nodes = Registry(num_token_ids=320)
    nodes.register("p" * 32, make_register("prefill", "p"), 0.0)
    nodes.register("d" * 32, make_register("decode", "d"), 0.0)
    pair = PairKey("p" * 32, "d" * 32)
    for _ in range(3):
        nodes.transfer_failed(pair, 0.0, is_probe=False)
    assert (nodes.prefills, nodes.decodes) == ((), ())
    assert nodes.is_ready, "requests wait for it"
    assert nodes.tick(1.0)
    assert [node.name for node in (*nodes.prefills, *nodes.decodes)] == ["p", "d"]
    assert nodes.begins_probe(pair)
    assert nodes.decodes == ()
    nodes.transfer_succeeded(pair, is_probe=True)
    assert [node.name for node in nodes.decodes] == ["d"]
