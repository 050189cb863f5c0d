"""Attempts that show whether nodes can be trusted: they have nodes for themselves, and others wait for them."""

from support.gateway.played_cluster import PlayedCluster, output_of

from common.errors import ErrorCode
from common.wire.messages import SetPaused, Tokens
from gateway.requests.attempts.recovery import NUM_PROGRESS


def pauses(cluster: PlayedCluster) -> list[bool]:
    """What decode nodes were told: to pause a request, or to go on."""
    return [message.is_paused for message, _ in cluster.sent if isinstance(message, SetPaused)]


def lose_decode_node(cluster: PlayedCluster, rid: str, successor: str) -> None:
    cluster.lose(cluster.node_of("decode", rid))
    cluster.start("decode", successor)


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
