"""Attempts that show whether nodes can be trusted: they have nodes for themselves, and others wait for them."""

import pytest
from support.gateway.played_cluster import PlayedCluster, output_of

from common.errors import ErrorCode
from common.wire.messages import Heartbeat, SetPaused, Tokens
from gateway.requests.attempts.recovery import NUM_PROGRESS


def pauses(cluster: PlayedCluster) -> list[bool]:
    """What decode nodes were told: to pause a request, or to go on."""
    return [message.is_paused for message, _ in cluster.sent if isinstance(message, SetPaused)]


def lose_decode_node(cluster: PlayedCluster, rid: str, successor: str) -> None:
    cluster.lose(cluster.node_of("decode", rid))
    cluster.start("decode", successor)


def test_a_suspect_request_has_its_nodes_for_itself_and_ends_if_they_are_lost_again() -> None:
    cluster = PlayedCluster(prefills=3, decodes=3)
    stream = cluster.come("killer")
    for _ in range(2):
        cluster.prefill("killer")
        cluster.lose(cluster.node_of("decode", "killer"))
        cluster.start("decode", f"new-decode-{_}"[4:])
    node = cluster.node_of("decode", "killer")
    for i in range(12):
        cluster.come(f"b{i}", prompt=(i,))
    assert [message.rid for message in cluster.work[node]] == ["killer"]
    assert [m.rid for m in cluster.work[cluster.node_of("prefill", "killer")]] == ["killer"]
    cluster.lose(node)
    assert stream.error.code is ErrorCode.NODE_LOST
    assert "the last with the nodes for itself" in stream.error.message
    for i in range(12):
        cluster.prefill(f"b{i}")
        cluster.decode(f"b{i}", 20)
    cluster.check_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_told_by_its_peer", [False, True])
def test_a_request_whose_steps_fail_three_nodes_in_a_row_ends(role: str, is_told_by_its_peer: bool) -> None:
    """Both nodes of a pair report it, and either message may come first."""
    cluster = PlayedCluster(prefills=5, decodes=5)
    stream = cluster.come("killer")
    for num_left in (2, 1, 0):
        failed = cluster.node_of(role, "killer")
        if is_told_by_its_peer:
            peer = cluster.node_of("decode" if role == "prefill" else "prefill", "killer")
            cluster.fail(peer, "killer", ErrorCode.NODE_LOST)
        else:
            cluster.fail(failed, "killer", ErrorCode.INTERNAL)
        cluster.lose(failed)
        cluster.wait(1.0)
        assert (stream.error is None) == bool(num_left)
    assert stream.error.code is ErrorCode.NODE_LOST
    assert stream.error.message.endswith("the last with the nodes for itself, so the request is not tried again")
    cluster.check_idle()


def test_a_request_is_not_suspected_for_nodes_that_were_silent_before_they_got_it() -> None:
    cluster = PlayedCluster(prefills=3, decodes=1)
    stream = cluster.come("a")
    for i in range(6):
        node = cluster.node_of("decode", "a")
        silent_since = cluster.clock.now() - 0.5
        cluster.wait(5.0)
        cluster.start("decode", f"decode-{i + 1}")
        cluster.lose(node, alive_until=silent_since)
    assert stream.num_attempts == 7
    assert not cluster.pool.registry.workers[cluster.node_of("decode", "a")].is_reserved
    cluster.finish("a")
    assert stream.ids == output_of(stream)
    cluster.check_idle()


def test_a_request_that_hangs_each_node_before_it_says_anything_is_suspected_and_ends() -> None:
    cluster = PlayedCluster(prefills=3, decodes=4)
    registry = cluster.pool.registry
    cluster.wait(0.5)  # since the last heartbeat
    stream = cluster.come("killer")
    for _ in range(3):
        node = registry.workers[cluster.node_of("decode", "killer")]
        for other in registry.workers.values():
            if other is not node:
                registry.on_heartbeat(other.incarnation, Heartbeat(0, 0, 0, 0, 0, {}), cluster.clock.now() + 5.0)
        cluster.wait(5.5)
        cluster.lose(node.incarnation, alive_until=registry.alive_until(node, cluster.clock.now()))
    assert stream.error is not None
    assert "the last with the nodes for itself" in stream.error.message
    cluster.check_idle()


def test_requests_that_shared_two_losses_take_turns_for_longer_than_the_recovery_timeout() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1, recovery_timeout=60.0)
    rids = [f"r{i}" for i in range(10)]
    streams = cluster.come(*rids)
    prefill = cluster.node_of("prefill", "r0")
    for i in range(2):
        for rid in rids:
            cluster.prefill(rid)
        cluster.lose(cluster.node_of("decode", "r0"))
        cluster.start("decode", f"decode-{i + 1}")
    for _ in rids:
        for _ in range(10):  # a turn takes ten seconds
            cluster.wait(1.0)
        [alone] = cluster.work[prefill]
        cluster.finish(alone.rid)
    assert [stream.error for stream in streams] == [None] * 10
    assert [stream.ids for stream in streams] == [output_of(stream) for stream in streams]
    cluster.check_idle()


def test_a_suspect_request_does_not_end_by_a_loss_that_others_share() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    cluster.come("other", max_new=100)
    suspect = cluster.come("suspect")
    for i in range(6):
        cluster.prefill("other")
        cluster.decode("other", 9)
        cluster.lose(cluster.node_of("decode", "other"))
        cluster.start("decode", f"decode-{i + 1}")
    assert suspect.error is None and suspect.num_attempts == 7
    assert len(cluster.work[cluster.node_of("decode", "suspect")]) == 2
    cluster.finish("other")
    cluster.finish("suspect")
    cluster.check_idle()


def test_a_loss_that_a_node_reports_counts_against_a_request_once_the_gateway_sees_it() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    stream = cluster.come("a")
    for i in range(3):
        prefill, decode = cluster.node_of("prefill", "a"), cluster.node_of("decode", "a")
        cluster.fail(decode, "a", ErrorCode.NODE_LOST)
        assert stream.error is None
        cluster.lose(prefill)
        cluster.start("prefill", f"prefill-{i + 1}")
        cluster.wait(5.0)
    assert stream.error is not None and "the last with the nodes for itself" in stream.error.message
    cluster.check_idle()


def test_nodes_that_only_lose_each_other_do_not_make_a_request_suspect() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    stream = cluster.come("a")
    for _ in range(4):
        cluster.fail(cluster.node_of("decode", "a"), "a", ErrorCode.NODE_LOST)
        for _ in range(8):
            cluster.wait(1.0)
    cluster.finish("a")
    assert stream.ids == output_of(stream)


def test_requests_wait_while_the_only_nodes_serve_a_suspect_one_that_shows_no_progress() -> None:
    cluster = PlayedCluster(prefills=1, decodes=2)
    stream = cluster.come("suspect")
    cluster.prefill("suspect")
    for _ in range(2):
        cluster.lose(cluster.node_of("decode", "suspect"))
        if _ == 0:
            cluster.prefill("suspect")
    assert stream.num_attempts == 2, "no node is left"
    cluster.start("decode", "decode-7")
    other = cluster.come("other")
    assert len(cluster.pool.queue) == 1
    cluster.prefill("suspect")
    cluster.decode("suspect", 8)
    assert len(cluster.pool.queue) == 0, "eight tokens are enough"
    for rid in ("other", "suspect"):
        if rid == "other":
            cluster.prefill(rid)
        cluster.decode(rid, 20)
    assert (stream.ids, other.ids) == (output_of(stream), output_of(other))
    cluster.check_idle()


def test_a_pair_whose_transfers_fail_is_avoided_and_then_probed_by_one_request() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    streams = cluster.come("a", "b", "c")
    node = cluster.node_of("decode", "a")
    for rid in "abc":
        cluster.fail(node, rid, ErrorCode.TRANSFER_FAILED)
    cluster.wait(0.5)
    assert not cluster.work[node], "the pair rests"
    cluster.wait(0.5)
    assert [message.rid for message in cluster.work[node]] == ["a"], "one probes it"
    cluster.prefill("a")
    assert len(cluster.work[node]) == 1
    cluster.decode("a")
    assert [message.rid for message in cluster.work[node]] == ["a", "b", "c"]
    for rid in "bc":
        cluster.prefill(rid)
    for rid in "abc":
        cluster.decode(rid, 20)
    assert [stream.ids for stream in streams] == [output_of(stream) for stream in streams]
    assert not cluster.pool.registry.health.breakers
    cluster.check_idle()


def test_a_suspect_request_whose_client_does_not_read_is_paused_once_its_nodes_have_proved_themselves() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    slow = cluster.come("slow", max_new=100)
    cluster.prefill("slow")
    cluster.dispatcher.set_paused("slow", True)
    lose_decode_node(cluster, "slow", "decode-1")
    assert pauses(cluster) == [True, True], "the second attempt is paused too"
    lose_decode_node(cluster, "slow", "decode-2")
    other = cluster.come("other")
    cluster.prefill("slow")
    cluster.decode("slow", NUM_PROGRESS - 1)
    assert pauses(cluster) == [True, True]
    assert not other.sent_at
    cluster.decode("slow", 1)
    assert pauses(cluster) == [True, True, True]
    assert other.sent_at
    cluster.finish("other")
    cluster.dispatcher.set_paused("slow", False)
    assert pauses(cluster)[3:] == [False]
    cluster.decode("slow", 100)
    assert slow.ids == output_of(slow)
    cluster.check_idle()


def test_a_request_whose_client_does_not_read_shows_whether_pages_arrive_before_it_is_paused() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    cluster.come("slow", "a", "b")
    cluster.prefill("slow")
    cluster.dispatcher.set_paused("slow", True)
    decode = cluster.node_of("decode", "slow")
    for rid in ("slow", "a", "b"):
        cluster.fail(decode, rid, ErrorCode.TRANSFER_FAILED)
    for _ in range(3):
        cluster.wait(1.0)
    assert [message.rid for message in cluster.work[decode]] == ["slow"], "it probes the pair"
    assert pauses(cluster) == [True]
    cluster.prefill("slow")
    cluster.decode("slow", 1)
    assert pauses(cluster) == [True, True]
    assert {message.rid for message in cluster.work[decode]} == {"slow", "a", "b"}
    cluster.dispatcher.set_paused("slow", False)
    cluster.decode("slow", 100)
    for rid in ("a", "b"):
        cluster.finish(rid)
    cluster.check_idle()


def test_the_turns_of_suspect_requests_do_not_count_towards_the_timeout_of_one_that_was_never_sent() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1, recovery_timeout=60.0)
    rids = [f"r{i}" for i in range(10)]
    cluster.come(*rids)
    for successor in ("decode-1", "decode-2"):
        for rid in rids:
            cluster.prefill(rid)
        lose_decode_node(cluster, "r0", successor)
    fresh = cluster.come("fresh", prompt=(9,))
    prefill = cluster.node_of("prefill", "r0")
    for _ in rids:
        for _ in range(10):
            cluster.wait(1.0)
        [turn] = cluster.work[prefill]
        cluster.finish(turn.rid)
    assert fresh.error is None
    cluster.finish("fresh")
    cluster.check_idle()


def test_a_suspect_request_avoids_the_node_that_failed_it_even_if_only_that_one_is_idle() -> None:
    cluster = PlayedCluster(prefills=1, decodes=3)
    stream = cluster.come("a")
    cluster.prefill("a")
    cluster.lose(cluster.node_of("decode", "a"))
    cluster.prefill("a")
    broken = cluster.node_of("decode", "a")
    [healthy] = [node for node in cluster.work if cluster.names[node].startswith("decode") and node != broken]
    while not cluster.work[healthy]:
        cluster.come(f"b{len(cluster.dispatcher._in_flight)}", prompt=(2,))
    for message in cluster.work[broken]:
        if message.rid != "a":
            cluster.dispatcher.abort(message.rid)
    attempt = cluster.generate(broken, "a").attempt
    cluster.dispatcher.on_tokens(broken, Tokens("a", attempt, 1, (10**6,)))
    cluster.wait(1.0)
    assert cluster.node_of("decode", "a") == healthy
    assert stream.error is None


def test_a_request_that_probed_a_lost_pair_probes_no_other() -> None:
    cluster = PlayedCluster(prefills=1, decodes=1)
    cluster.come("a", "b", "c")
    first = cluster.node_of("decode", "a")
    for rid in "abc":
        cluster.fail(first, rid, ErrorCode.TRANSFER_FAILED)
    for _ in range(2):
        cluster.wait(0.5)
    assert [message.rid for message in cluster.work[first]] == ["a"]
    second = cluster.start("decode", "decode-1")
    cluster.lose(first)
    cluster.fail(second, "a", ErrorCode.TRANSFER_FAILED)
    [breaker] = cluster.pool.registry.health.breakers.values()
    assert (breaker.state, breaker.num_failures) == ("closed", 1)
