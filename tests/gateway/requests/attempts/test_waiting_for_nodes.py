"""Requests that wait for the nodes of their next attempt: in which order, how long, and for which nodes."""

import pytest
from support.gateway.played_cluster import PlayedCluster, output_of

from common.errors import ErrorCode


def test_a_recovered_request_goes_before_those_that_have_not_been_sent() -> None:
    cluster = PlayedCluster(decodes=1, max_dispatch_ahead=0)
    rids = [f"r{i}" for i in range(8)]
    cluster.come(*rids, prompt=(5,))
    cluster.come("waits", prompt=(6,))
    lost = cluster.node_of("decode", "r0")
    cluster.lose(lost)
    node = cluster.start("decode", "decode-9")
    assert [message.rid for message in cluster.work[node]] == rids


def test_the_most_urgent_of_several_recovered_requests_goes_first() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1, enable_priority_scheduling=True, max_dispatch_ahead=0)
    for rid in "abcd":
        cluster.come(rid, priority=1)
    cluster.come("urgent", priority=5)
    cluster.come("changed", priority=1)
    lost = cluster.node_of("decode", "a")
    cluster.lose(lost)
    cluster.dispatcher.change_priority("changed", 9)
    node = cluster.start("decode", "decode-9", max_running=3)
    assert [message.rid for message in cluster.work[node]] == ["changed", "urgent", "a"]


def test_without_a_node_a_request_waits_and_then_ends_with_what_was_lacking() -> None:
    cluster = PlayedCluster(decodes=1, recovery_timeout=10.0)
    stream = cluster.come("a")
    cluster.lose(cluster.node_of("decode", "a"))
    cluster.wait(9.9)
    assert not stream.is_ended
    cluster.wait(0.2)
    assert stream.error.code is ErrorCode.NODE_LOST
    assert stream.error.message == (
        "node decode-0 was lost while it worked on the request; no decode node came within --recovery-timeout 10 s"
    )
    cluster.check_idle()


def test_a_request_with_one_token_left_is_continued_shortly_before_its_deadline() -> None:
    cluster = PlayedCluster(prefills=1)
    rids = [f"served{i}" for i in range(16)]
    cluster.come(*rids)
    cluster.wait(20.0)
    for rid in rids:
        cluster.finish(rid)
    stream = cluster.come("late", timeout_s=12.0)
    cluster.prefill("late")
    cluster.decode("late", 18)
    cluster.wait(8.0)  # 20 tokens would take longer than 4 s, even at twice the speed
    cluster.lose(cluster.node_of("decode", "late"))
    cluster.finish("late")
    assert (stream.ids, stream.error) == (output_of(stream), None)
    cluster.check_idle()


@pytest.mark.parametrize("is_read", [False, True], ids=["its client does not read", "its prompt is long"])
def test_time_at_its_nodes_does_not_count_towards_the_recovery_timeout(is_read: bool) -> None:
    cluster = PlayedCluster(decodes=3, recovery_timeout=60.0)
    stream = cluster.come("a")
    if not is_read:
        cluster.prefill("a")
        cluster.dispatcher.set_paused("a", True)
    for _ in range(2):
        cluster.lose(cluster.node_of("decode", "a"))
        for _ in range(9):
            cluster.wait(10.0)
    assert (stream.num_attempts, stream.error) == (3, None)
    cluster.dispatcher.set_paused("a", False)
    cluster.finish("a")
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_a_turn_at_full_nodes_does_not_count_towards_the_recovery_timeout() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0, recovery_timeout=60.0)
    for name in ("decode-a", "decode-b"):
        cluster.start("decode", name, max_running=1)
    stream, _ = cluster.come("a"), cluster.come("b")
    cluster.prefill("a")
    cluster.lose(cluster.node_of("decode", "a"))
    for _ in range(9):
        cluster.wait(10.0)
    assert not stream.is_ended
    cluster.finish("b")
    cluster.prefill("a")
    cluster.decode("a", 20)
    assert (stream.ids, stream.num_attempts) == (output_of(stream), 2)
    cluster.check_idle()


def test_a_request_does_not_wait_for_room_on_nodes_that_are_too_small_for_it() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0, recovery_timeout=60.0)
    cluster.start("decode", "decode-large", num_pages=64, max_running=1)
    stream = cluster.come("a", max_new=500)
    cluster.prefill("a")
    cluster.start("decode", "decode-small", num_pages=8, max_running=1)
    cluster.lose(cluster.node_of("decode", "a"))
    cluster.come("b")
    for _ in range(7):
        cluster.wait(10.0)
    assert "no pair of nodes with room for it" in stream.error.message
    cluster.finish("b")
    cluster.check_idle()


def test_a_request_does_not_wait_for_room_on_nodes_with_other_weights() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0, recovery_timeout=60.0)
    cluster.start("decode", "decode-old", max_running=1)
    stream = cluster.come("a")
    cluster.prefill("a")
    cluster.start("prefill", "prefill-new", digest="d2")
    cluster.start("decode", "decode-new", digest="d2", max_running=1)
    cluster.come("b")
    cluster.lose(cluster.node_of("decode", "a"))
    for _ in range(7):
        cluster.wait(10.0)
    assert "no decode node with the weights that began the output" in stream.error.message
    cluster.finish("b")
    cluster.check_idle()


def test_a_request_that_fits_no_other_node_ends_with_an_error_unless_a_large_one_comes_back() -> None:
    for comes_back in (True, False):
        cluster = PlayedCluster(decodes=0, recovery_timeout=10.0)
        cluster.start("decode", "decode-large", num_pages=64)
        stream = cluster.come("a", max_new=500)
        cluster.start("decode", "decode-small", num_pages=8)
        cluster.prefill("a")
        cluster.decode("a", 3)
        cluster.lose(cluster.node_of("decode", "a"))
        if comes_back:
            cluster.start("decode", "decode-large", num_pages=64)
            cluster.prefill("a")
            cluster.decode("a", 600)
            assert stream.ids == output_of(stream)
        else:
            cluster.wait(10.1)
            assert "no pair of nodes with room for it" in stream.error.message
        cluster.check_idle()


def test_a_time_without_nodes_says_nothing_about_how_long_nodes_take() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0, recovery_timeout=60.0)
    lost = cluster.start("decode", "decode-0", max_running=16)
    rids = [f"r{i}" for i in range(16)]
    cluster.come(*rids)
    cluster.lose(lost)
    cluster.wait(50.0)
    cluster.start("decode", "decode-1", max_running=16)
    for rid in rids:
        cluster.finish(rid)
    cluster.come(*[f"busy{i}" for i in range(16)])
    streams = [cluster.come(rid, timeout_s=20.0) for rid in ("waits", "waits too")]
    for i in range(16):
        cluster.finish(f"busy{i}")
    for stream in streams:
        cluster.finish(stream.request.rid)
        assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_the_ends_of_recovered_requests_show_that_nodes_work_again() -> None:
    cluster = PlayedCluster(prefills=1, decodes=0, max_dispatch_ahead=0, recovery_timeout=60.0)
    lost = cluster.start("decode", "decode-0", max_running=16)
    early, recovered = [f"early{i}" for i in range(16)], [f"r{i}" for i in range(16)]
    cluster.come(*early)
    cluster.wait(1.0)
    for rid in early:
        cluster.finish(rid)
    cluster.come(*recovered)
    cluster.lose(lost)
    cluster.wait(20.0)
    cluster.come(*[f"busy{i}" for i in range(16)], *[f"waits{i}" for i in range(16)])
    cluster.start("decode", "decode-1", max_running=16)
    for rid in recovered:
        cluster.finish(rid)
    assert not cluster.come("in time", timeout_s=10.0).is_ended  # 16 wait ahead of it, and 16 run at once for 1 s each
