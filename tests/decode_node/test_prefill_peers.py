"""Prefill nodes that the gateway names are dialled at once, dialled again after a loss, and let go when gone."""

import msgspec
import pytest
from support.cluster.fake_engine import expected_output
from support.cluster.local_cluster import LocalCluster, Member, assert_all_pages_are_released, prompt_of, sampling

from common.errors import ErrorCode
from common.wire.messages import AttachFailed, Connect, Failed, Generate, Pairs, PairState, Peer, PrefillNodes
from decode_node.prefill_peers import ANSWER_S, FIRST_PAUSE_S, MAX_PAUSE_S, UNNAMED_S, PrefillPeers

A, B = Peer("a", "a" * 32, "host:1"), Peer("b", "b" * 32, "host:2")
SUCCESSOR = Peer("a", "c" * 32, A.address)


def test_named_nodes_are_dialled_once() -> None:
    peers = PrefillPeers()
    peers.name([A, B], 0.0)
    assert peers.due(0.0) == [A, B]
    assert [peers.dial(A, 0.0), peers.dial(A, 0.0)] == [True, False]
    assert peers.due(0.0) == [B]
    peers.name([A, B], 0.0)
    assert peers.due(0.0) == [B]
    assert peers.overdue(ANSWER_S) == [A.incarnation]


def test_a_lost_node_is_dialled_again_after_pauses_that_double() -> None:
    peers, now = PrefillPeers(), 0.0
    peers.name([A], 0.0)
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        peers.dial(A, now)
        assert peers.lost(A.incarnation, "it is silent", now)
        assert not peers.lost(A.incarnation, "it is silent", now)
        assert peers.problems("tcp") == [PairState("a", A.incarnation, "tcp", "", "it is silent")]
        assert peers.due(now + pause_s - 0.01) == []
        now += pause_s
        assert peers.due(now) == [A]
    peers.dial(A, now)
    assert peers.problems("tcp"), "it has not answered yet"
    peers.answered(A.incarnation, now)
    assert peers.problems("tcp") == []
    peers.lost(A.incarnation, "again", now)
    assert peers.due(now + FIRST_PAUSE_S) == [A]
    for _ in range(40):
        now += MAX_PAUSE_S
        peers.dial(A, now)
        peers.lost(A.incarnation, "again", now)
    assert peers.due(now + MAX_PAUSE_S) == [A]


def test_a_long_problem_is_cut_so_that_the_gateway_takes_the_message_with_all_pairs() -> None:
    peers = PrefillPeers()
    peers.name([A], 0.0)
    peers.dial(A, 0.0)
    peers.lost(A.incarnation, "nccl: " + "no route; " * 100, 0.0)  # as a prefill node may say in ``Refused``
    encoded = msgspec.msgpack.encode(Pairs(tuple(peers.problems("nccl"))))
    [pair] = msgspec.msgpack.decode(encoded, type=Pairs).pairs
    assert pair.problem.startswith("nccl: no route")


def test_a_node_that_does_not_answer_is_overdue() -> None:
    peers = PrefillPeers()
    peers.dial(A, 5.0)
    assert peers.overdue(5.0 + ANSWER_S - 0.01) == []
    assert peers.overdue(5.0 + ANSWER_S) == [A.incarnation]
    peers.answered(A.incarnation, 5.5)
    assert peers.overdue(1e9) == []


def test_a_node_that_only_a_request_named_is_forgotten_when_it_is_lost() -> None:
    peers = PrefillPeers()
    peers.dial(A, 0.0)
    assert peers.unnamed(1e9) == [], "the gateway has named none yet"
    peers.name([B], 0.0)
    assert peers.unnamed(UNNAMED_S) == [A.incarnation]
    assert peers.lost(A.incarnation, "it is silent", 0.0)
    assert (peers.due(1e9), peers.problems("tcp")) == ([B], [])


def test_a_node_that_is_no_longer_named_stays_connected_for_a_grace() -> None:
    peers = PrefillPeers()
    peers.name([A, B], 0.0)
    for peer in (A, B):
        peers.dial(peer, 0.0)
        peers.answered(peer.incarnation, 0.0)
    peers.name([], 100.0)  # a new gateway, at which no prefill node has registered yet
    assert peers.unnamed(100.0 + UNNAMED_S - 0.01) == []
    peers.name([A], 101.0)
    assert (peers.due(101.0), peers.unnamed(100.0 + UNNAMED_S)) == ([], [B.incarnation])


def test_a_lost_node_that_is_no_longer_named_is_forgotten() -> None:
    peers = PrefillPeers()
    peers.name([A], 0.0)
    peers.dial(A, 0.0)
    peers.lost(A.incarnation, "it is silent", 0.0)
    peers.name([], 0.0)
    assert (peers.due(1e9), peers.problems("tcp")) == ([], [])


def answer(peers: PrefillPeers, peer: Peer, now: float) -> list[str]:
    peers.dial(peer, now)
    return peers.answered(peer.incarnation, now)


def test_a_node_is_not_dialled_any_more_once_another_process_has_answered_at_its_address() -> None:
    peers = PrefillPeers()
    peers.name([A, B], 0.0)
    assert answer(peers, A, 0.0) == []
    peers.name([A, B, SUCCESSOR], 1.0)  # a gateway has not noticed yet
    peers.dial(SUCCESSOR, 1.0)
    assert not peers.has_ended(A), "the new process has not answered"
    assert peers.answered(SUCCESSOR.incarnation, 2.0) == [A.incarnation]
    assert (peers.has_ended(A), peers.has_ended(SUCCESSOR)) == (True, False)
    assert peers.lost(A.incarnation, "it has ended", 2.0)
    assert peers.answered(SUCCESSOR.incarnation, 3.0) == [], "only the first answer shows it"
    assert (peers.dial(A, 1e6), peers.due(1e6)) == (False, [B])
    peers.dial(B, 5.0)
    assert peers.due_at == 5.0 + ANSWER_S, "the node that has ended is not to be dialled"
    peers.name([B, SUCCESSOR], 6.0)
    assert not peers.has_ended(A), "nothing is known of it any more"


def test_a_node_is_dialled_again_when_its_successor_is_forgotten() -> None:
    peers = PrefillPeers()
    peers.name([A, SUCCESSOR], 0.0)
    answer(peers, A, 0.0)
    answer(peers, SUCCESSOR, 1.0)
    for peer in (A, SUCCESSOR):
        peers.lost(peer.incarnation, "it is silent", 2.0)
    assert peers.due(1e6) == [SUCCESSOR]
    peers.name([A], 3.0)
    assert peers.due(1e6) == [A]


def test_a_process_that_never_answers_ends_no_other_one_at_its_address() -> None:
    peers, now = PrefillPeers(), 0.0
    peers.name([A, SUCCESSOR], now)
    answer(peers, A, now)
    for _ in range(10):
        assert peers.dial(SUCCESSOR, now)
        now += ANSWER_S
        assert peers.overdue(now) == [SUCCESSOR.incarnation]
        peers.lost(SUCCESSOR.incarnation, "it did not answer", now)
        now += MAX_PAUSE_S
        assert peers.due(now) == [SUCCESSOR]
        assert not peers.has_ended(A)


def test_a_process_that_is_heard_of_after_its_successor_does_not_end_it() -> None:
    """One of two gateways may name the process that has ended later than the other one names the new process."""
    peers = PrefillPeers()
    peers.name([SUCCESSOR], 0.0)
    answer(peers, SUCCESSOR, 0.0)
    peers.name([SUCCESSOR, A], 1.0)
    assert peers.dial(A, 1.0)
    assert not peers.has_ended(SUCCESSOR) and not peers.has_ended(A)
    assert peers.due(1.0) == [] and peers.overdue(1.0 + ANSWER_S) == [A.incarnation]


# ---- the role --------------------------------------------------------------------------------------------------------


def named(*members: Member) -> PrefillNodes:
    return PrefillNodes(tuple(member.peer for member in members))


def paired_with(decode: Member) -> list[str]:
    return [pair.incarnation for pair in decode.role.pairs()]


def test_a_decode_node_offers_its_pool_to_named_nodes_before_the_first_request() -> None:
    cluster = LocalCluster(num_prefill=2)
    [decode], prefill = cluster.decode, cluster.prefill
    cluster.tell(decode, named(*prefill))
    assert decode.role.outbox.dial == [member.peer for member in prefill]
    assert [to for to, message in decode.role.outbox.peers if isinstance(message, Connect)] == [m.name for m in prefill]
    cluster.settle(2)
    assert [(pair.incarnation, pair.problem) for pair in decode.role.pairs()] == [(m.name, "") for m in prefill]


def test_a_decode_node_hangs_up_from_a_node_that_has_not_been_named_for_long_and_has_no_transfers() -> None:
    cluster = LocalCluster(num_prefill=2, chunk_tokens=16, latency=3)
    [decode], [first, second] = cluster.decode, cluster.prefill
    cluster.tell(decode, named(first, second))
    answer = cluster.submit("a", prompt_of(64), sampling(20))
    for _ in range(3):
        cluster.step()
    cluster.tell(decode, named(second))
    assert paired_with(decode) == [first.name, second.name], "a transfer is in progress"
    cluster.run()
    assert answer.output == expected_output(prompt_of(64), 20)
    assert paired_with(decode) == [first.name, second.name], "it may be named again soon"
    cluster.clock.advance(UNNAMED_S)
    cluster.settle()
    assert paired_with(decode) == [second.name]
    assert_all_pages_are_released(cluster)


def test_a_lost_pair_is_reported_with_its_problem_until_it_is_connected_again() -> None:
    cluster = LocalCluster()
    [decode], [prefill] = cluster.decode, cluster.prefill
    cluster.tell(decode, named(prefill))
    cluster.settle(2)
    decode.role.peer_lost(prefill.name, cluster.clock.now())
    [pair] = decode.role.pairs()
    assert (pair.incarnation, pair.problem) == (prefill.name, "the prefill node was lost")
    decode.role.outbox.dial.clear()
    decode.role.tick(cluster.clock.now())
    assert decode.role.outbox.dial == []
    cluster.clock.advance(FIRST_PAUSE_S)
    cluster.settle(2)
    [pair] = decode.role.pairs()
    assert (pair.incarnation, pair.problem) == (prefill.name, "")
    answer = cluster.submit("a", prompt_of(64), sampling(20))
    cluster.run()
    assert answer.output == expected_output(prompt_of(64), 20)


def test_a_request_dials_a_lost_node_at_once() -> None:
    cluster = LocalCluster()
    [decode], [prefill] = cluster.decode, cluster.prefill
    cluster.tell(decode, named(prefill))
    cluster.settle(2)
    decode.role.peer_lost(prefill.name, cluster.clock.now())
    message = Generate("a", 0, prompt_of(8), sampling(3), prefill.peer, decode.peer, 9.0)
    decode.role.on_gateway(message, cluster.clock.now())
    assert decode.role.outbox.dial[-1] == prefill.peer


def test_a_node_that_starts_again_takes_the_place_of_the_process_before_it_once_it_answers() -> None:
    cluster = LocalCluster()
    [decode], [prefill] = cluster.decode, cluster.prefill
    before = Peer("prefill-0", "x" * 32, prefill.peer.address)
    cluster.tell(decode, PrefillNodes((before,)))
    decode.role.on_peer(before.incarnation, AttachFailed(0, "it starts"), cluster.clock.now())  # an answer
    waiting = Generate("a", 0, prompt_of(8), sampling(3), before, decode.peer, 9.0)
    decode.role.on_gateway(waiting, cluster.clock.now())
    cluster.clock.advance(0.1)
    cluster.tell(decode, PrefillNodes((before, prefill.peer)))
    assert decode.role.outbox.dial == [before, prefill.peer]
    assert failures(decode) == decode.role.outbox.hang_up == []
    decode.role.on_peer(prefill.name, AttachFailed(0, "it starts"), cluster.clock.now())
    late = Generate("b", 0, prompt_of(8), sampling(3), before, decode.peer, 9.0)
    decode.role.on_gateway(late, cluster.clock.now())
    assert failures(decode) == [("a", ErrorCode.NODE_LOST), ("b", ErrorCode.NODE_LOST)]
    assert decode.role.outbox.hang_up == [before.incarnation]
    decode.role.outbox.gateway.clear()
    cluster.settle(2)
    assert working_pairs(decode) == [prefill.name]
    answer = cluster.submit("c", prompt_of(64), sampling(20))
    cluster.run()
    assert answer.output == expected_output(prompt_of(64), 20)


@pytest.mark.parametrize("is_heard_of_first", [True, False])
def test_a_node_works_though_a_process_that_never_answers_is_named_at_its_address(is_heard_of_first: bool) -> None:
    cluster = LocalCluster()
    [decode], [prefill] = cluster.decode, cluster.prefill
    silent = Peer("other", "x" * 32, prefill.peer.address)
    cluster.tell(decode, PrefillNodes((silent,) if is_heard_of_first else (prefill.peer,)))
    cluster.settle(2)
    cluster.tell(decode, PrefillNodes((prefill.peer, silent)))
    cluster.settle(2)
    for name in "abc":
        answer = cluster.submit(name, prompt_of(64), sampling(20))
        cluster.run()
        assert answer.output == expected_output(prompt_of(64), 20)
        cluster.clock.advance(ANSWER_S + MAX_PAUSE_S)
        cluster.settle(2)
    assert working_pairs(decode) == [prefill.name]
    assert failures(decode) == []
    assert_all_pages_are_released(cluster)


def test_a_node_that_takes_long_to_attach_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several transports may take as long as a decode node waits for a node that may not be there."""
    cluster = LocalCluster()
    [decode], [prefill] = cluster.decode, cluster.prefill
    answer = cluster.submit("a", prompt_of(64), sampling(20))
    with monkeypatch.context() as slow:
        slow.setattr(prefill.writer, "poll", list)
        cluster.settle(2)
        cluster.clock.advance(2 * ANSWER_S)
        cluster.settle(2)
    cluster.run()
    assert answer.output == expected_output(prompt_of(64), 20)
    assert working_pairs(decode) == [prefill.name]
    assert decode.role.counters()["stale_messages"] == 0
    assert_all_pages_are_released(cluster)


def failures(decode: Member) -> list[tuple[str, ErrorCode]]:
    return [(one.rid, one.code) for one in decode.role.outbox.gateway if isinstance(one, Failed)]


def working_pairs(decode: Member) -> list[str]:
    return [pair.incarnation for pair in decode.role.pairs() if pair.transport and not pair.problem]
