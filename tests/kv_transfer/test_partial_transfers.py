"""Prompts that arrive at a decode node before there is room for all of them, and what may end them amid that."""

from collections.abc import Callable

import pytest
from support.fake_engine import expected_output
from support.local_cluster import LocalCluster, assert_all_pages_are_back, prompt_of, sampling

from common.errors import ErrorCode
from common.wire.messages import Grant


def crowded(latency: int = 0) -> LocalCluster:
    """A decode node of 24 pages, half of which somebody will need who runs; and a prompt of twelve begins to come."""
    cluster = LocalCluster(page_size=4, chunk_tokens=8, decode_pages=24, latency=latency, max_running=4)
    cluster.submit("busy", prompt_of(28, 1), sampling(30))
    cluster.settle(12)
    cluster.submit("large", prompt_of(46, 2), sampling(6))
    for _ in range(3):
        cluster.step()
    return cluster


def test_pages_are_shipped_before_there_is_room_for_all_of_them() -> None:
    cluster = crowded()
    decode = cluster.decode[0]
    before = cluster.counters(decode)["pages_received"]
    cluster.settle(6)
    counters = cluster.counters(decode)
    assert not cluster.answers["busy"].is_over
    assert counters["partial_grants"] == 1
    assert 0 < counters["pages_received"] - 7 < 12
    assert before >= 7
    cluster.run()
    cluster.settle()
    for rid, prompt, new in (("busy", prompt_of(28, 1), 30), ("large", prompt_of(46, 2), 6)):
        assert cluster.answers[rid].output == expected_output(prompt, new)
    assert cluster.counters(decode)["pages_received"] == 7 + 12, "a page came twice"
    assert_all_pages_are_back(cluster)


def test_pages_that_the_last_one_loses_are_granted_at_once_although_nothing_is_computed() -> None:
    cluster = LocalCluster(page_size=4, chunk_tokens=8, decode_pages=24, max_running=4)
    node = cluster.decode[0]
    cluster.submit("busy", prompt_of(28, 1), sampling(60))
    cluster.settle(12)
    busy = node.role._scheduler.places.running["busy", 0]
    busy.expected_output = len(busy.output) + 3
    cluster.submit("large", prompt_of(77, 2), sampling(6))
    cluster.settle(1)
    assert node.role._scheduler.line.partial is not None
    while (plan := node.role.plan(cluster.clock.now())) is not None:
        node.role.commit(node.executor.run(plan), cluster.clock.now())
        node.role.outbox.peers.clear()
    assert cluster.counters(node)["retractions"] == 1
    assert [type(message) for _, message in node.role.outbox.peers] == [Grant]


def test_times_of_its_way_add_up() -> None:
    cluster = crowded()
    cluster.run()
    timings = cluster.answers["large"].timings
    assert all(timings[name] >= 0 for name in ("decode_queue_s", "prompt_wait_s", "transfer_s", "join_s"))
    assert timings["decode_queue_s"] > timings["transfer_s"], "it waited for room, not for the wire"


ENDS: dict[str, Callable[[LocalCluster], None]] = {
    "abort": lambda cluster: cluster.abort("large"),
    "prefill dies": lambda cluster: cluster.kill(cluster.prefill[0]),
    "decode dies": lambda cluster: cluster.kill(cluster.decode[0]),
    "connection is lost": lambda cluster: cluster.decode[0].role.peer_lost(
        cluster.prefill[0].name, cluster.clock.now()
    ),
}


@pytest.mark.parametrize("latency", [0, 3])
@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_it_amid_its_pages_every_page_comes_back(end: str, latency: int) -> None:
    cluster = crowded(latency)
    role = cluster.decode[0].role
    assert role._scheduler.line.partial is not None
    if end == "abort":
        cluster.answers["large"].finish = "aborted"
    ENDS[end](cluster)
    cluster.run()
    cluster.settle(30)
    assert role._scheduler.line.partial is None or end == "decode dies"
    error = cluster.answers["large"].error
    assert (end == "abort") == (error is None)
    assert error is None or error.code is ErrorCode.NODE_LOST
    assert_all_pages_are_back(cluster)
