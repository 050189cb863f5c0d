"""A request moves from one decode node to another with its pages; its tokens are those of the undisturbed run."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster.fake_engine import expected_of_both, expected_output
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released, prompt_of, sampling

from common.errors import ErrorCode
from common.wire.messages import Abort, Move
from decode_node.moves import MOVE_TIMEOUT_S
from decode_node.request_state import TABLE, Event, State

PROMPT = prompt_of(37)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster(num_decode=2, page_size=4)
    yield cluster
    cluster.close()


def test_only_a_request_that_holds_all_its_pages_can_move() -> None:
    assert {state for state, event in TABLE if event is Event.MOVE} == {State.READY, State.RUNNING, State.PAUSED}
    assert {TABLE[state, Event.MOVE] for state, event in TABLE if event is Event.MOVE} == {State.MOVING}
    assert [event for state, event in TABLE if state is State.MOVING] == [Event.END]


@pytest.mark.parametrize("num_outstanding", [1, 2])
@pytest.mark.parametrize("num_before", [1, 2, 9])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_moved_request_goes_on_with_the_same_tokens(num_outstanding: int, num_before: int, page_size: int) -> None:
    cluster = LocalCluster(num_decode=2, page_size=page_size, num_outstanding=num_outstanding)
    cluster.submit("r", PROMPT, sampling(20))
    cluster.run_until("r", num_before)
    cluster.move("r", 1)
    cluster.run()
    assert cluster.answers["r"].output == expected_output(PROMPT, 20)
    cluster.settle()
    assert_all_pages_are_released(cluster)
    old, new = (cluster.counters(node) for node in cluster.decode)
    assert (old["requests_moved"], old["failed_moves"]) == (1, 0)
    assert new["continued_requests"] == 1
    assert cluster.counters(cluster.prefill[0])["prompt_tokens_computed"] == len(PROMPT), "the prompt was computed once"
    assert new["prompt_tokens_computed"] == 0, "the other node computed nothing that travelled"
    assert new["pages_received"] >= -(-len(PROMPT) // page_size)
    cluster.close()


@pytest.mark.parametrize("num_before", [1, 9])
def test_a_moved_request_takes_the_window_pages_of_its_window_only(num_before: int) -> None:
    cluster = LocalCluster(num_decode=2, page_size=4, chunk_tokens=8, window=11, window_pages=(8, 8))
    cluster.submit("r", PROMPT, sampling(20))
    cluster.run_until("r", num_before)
    cluster.move("r", 1)
    cluster.run()
    assert cluster.answers["r"].output == expected_of_both(PROMPT, 20, 11)
    cluster.settle()
    assert_all_pages_are_released(cluster)
    new = cluster.counters(cluster.decode[1])
    assert new["prompt_tokens_computed"] == 0
    num_pages = -(-(len(PROMPT) + num_before) // 4)
    assert num_pages < new["pages_received"] <= num_pages + 5
    cluster.close()


@pytest.mark.parametrize(
    "pools", [{"decode_pages": 17}, {"window": 11, "window_pages": (12, 7), "chunk_tokens": 8}], ids=["full", "window"]
)
def test_of_two_requests_that_change_places_without_room_one_is_refused_at_once(pools: dict[str, Any]) -> None:
    cluster = LocalCluster(num_decode=2, page_size=4, **pools)
    for number, rid in enumerate("ab"):
        cluster.submit(rid, prompt_of(37, number), sampling(20), pair=(0, number))
        cluster.run_until(rid, 3)
    cluster.move("a", 1)
    cluster.move("b", 0)
    cluster.run(100)
    refused, moved = cluster.answers["a"], cluster.answers["b"]
    assert refused.error is not None and refused.error.code is ErrorCode.QUEUE_FULL
    window = pools.get("window")
    expected = expected_of_both(prompt_of(37, 1), 20, window) if window else expected_output(prompt_of(37, 1), 20)
    assert moved.output == expected
    cluster.settle()
    assert_all_pages_are_released(cluster)
    cluster.close()


def test_a_request_moves_there_and_back(cluster: LocalCluster) -> None:
    cluster.submit("r", PROMPT, sampling(30))
    for to, num_tokens in ((1, 5), (0, 12), (1, 20)):
        cluster.run_until("r", num_tokens)
        cluster.move("r", to)
    cluster.run()
    assert cluster.answers["r"].output == expected_output(PROMPT, 30)
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_pages_that_the_other_node_has_cached_do_not_travel(cluster: LocalCluster) -> None:
    cluster.submit("warm", PROMPT, sampling(1), pair=(None, 1))
    cluster.run()
    before = cluster.counters(cluster.decode[1])["pages_received"]
    cluster.submit("r", PROMPT, sampling(12))
    cluster.run_until("r", 6)
    cluster.move("r", 1)
    cluster.run()
    assert cluster.answers["r"].output == expected_output(PROMPT, 12)
    num_pages = -(-(len(PROMPT) + 12) // 4)
    assert cluster.counters(cluster.decode[1])["pages_received"] - before < num_pages - len(PROMPT) // 4 + 1


def test_a_request_without_complete_pages_is_refused(cluster: LocalCluster) -> None:
    cluster.submit("r", PROMPT, sampling(12))
    cluster.move("r", 1)
    cluster.step()
    error = cluster.answers["r"].error
    assert error is not None and error.code is ErrorCode.SHUTTING_DOWN
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_an_order_for_an_unknown_request_is_ignored(cluster: LocalCluster) -> None:
    cluster.tell(cluster.decode[0], Move("nothing", 0, 1, cluster.decode[1].peer))
    cluster.settle()
    assert cluster.decode[0].role.outbox.gateway == []


@pytest.mark.parametrize("attempt", [0, 1])
def test_an_abort_of_either_attempt_releases_the_pages(cluster: LocalCluster, attempt: int) -> None:
    cluster.submit("r", PROMPT, sampling(12))
    cluster.run_until("r", 6)
    answer = cluster.answers["r"]
    cluster.tell(cluster.decode[0], Move("r", 0, 1, cluster.decode[1].peer))
    cluster.settle(3)  # no node asks for the pages
    assert cluster.decode[0].role.load().num_running == 1
    cluster.tell(cluster.decode[0], Abort("r", attempt))
    answer.finish = "aborted"
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_pages_that_nobody_asks_for_are_released_after_a_while(cluster: LocalCluster) -> None:
    cluster.submit("r", PROMPT, sampling(12))
    cluster.run_until("r", 6)
    cluster.tell(cluster.decode[0], Move("r", 0, 1, cluster.decode[1].peer))
    cluster.settle(3)
    cluster.clock.advance(MOVE_TIMEOUT_S)
    cluster.settle(3)
    assert cluster.decode[0].role.load().num_running == 0
    assert cluster.counters(cluster.decode[0])["failed_moves"] == 1


def test_the_gateway_hears_of_a_move_for_which_the_other_node_never_had_room() -> None:
    cluster = LocalCluster(num_decode=2, page_size=4, decode_pages=16)
    cluster.submit("big", prompt_of(45, 1), sampling(12), pair=(0, 1))
    cluster.submit("r", PROMPT, sampling(12))
    cluster.run_until("r", 4)
    cluster.run_until("big", 1)
    cluster.move("r", 1)
    cluster.settle(4)
    assert cluster.answers["r"].attempt == 1 and not cluster.answers["r"].is_over
    cluster.decode[1].plans.clear()  # its engine hangs, so that no room comes
    cluster.clock.advance(MOVE_TIMEOUT_S)
    cluster.decode[0].role.tick(cluster.clock.now())
    cluster._deliver()
    error = cluster.answers["r"].error
    assert error is not None and (error.attempt, error.code) == (1, ErrorCode.TRANSFER_FAILED)
    assert cluster.decode[0].role.load().num_running == 0
    cluster.close()


@pytest.mark.parametrize("dead", [0, 1])
def test_the_loss_of_either_node_during_a_move_releases_the_pages_of_the_other(dead: int) -> None:
    cluster = LocalCluster(num_decode=2, page_size=4, latency=50)
    cluster.submit("r", PROMPT, sampling(12))
    cluster.run_until("r", 6)
    cluster.move("r", 1)
    for _ in range(8):
        cluster.step()
    answer = cluster.answers["r"]
    assert answer.attempt == 1 and not answer.is_over
    cluster.kill(cluster.decode[dead])
    cluster.settle(60)
    assert answer.error is not None and answer.error.code is ErrorCode.NODE_LOST
    assert_all_pages_are_released(cluster)
    cluster.close()
