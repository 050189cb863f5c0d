"""Little is read of peers that have not registered, and they delay no other peer."""

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st

from common.wire.mailbox import MAX_FRAME_BYTES, Mailbox
from common.wire.messages import PROTOCOL_VERSION, FromNode, Header, Ping, Tokens
from common.wire.process_id import new_incarnation
from common.wire.unknown_peers import PEER_BURST, PEER_RATE, TOTAL_BURST, TOTAL_RATE, UnknownPeers


def test_a_peer_may_send_a_burst_and_then_so_much_each_second() -> None:
    peers = UnknownPeers()
    assert [peers.may_send("a", 100, 0.0) for _ in range(PEER_BURST + 1)] == [True] * PEER_BURST + [False]
    assert peers.may_send("b", 100, 0.0)
    assert sum(peers.may_send("a", 100, 1.0) for _ in range(PEER_BURST)) == PEER_RATE


def test_a_large_frame_counts_by_its_size() -> None:
    peers = UnknownPeers()
    assert peers.may_send("a", (PEER_BURST - 1) << 10, 0.0)
    assert not peers.may_send("a", 1, 0.0)


def test_a_frame_larger_than_the_burst_is_decoded_after_a_smaller_one() -> None:
    """A node with many adapters takes more than a burst to register, and may just have sent a heartbeat."""
    peers = UnknownPeers()
    assert peers.may_send("a", 100, 0.0)
    assert peers.may_send("a", PEER_BURST << 12, 0.0)
    assert not peers.may_send("a", 100, 0.0)
    assert peers.may_send("a", 100, 1.0), "the peer can register only minutes later"


def test_the_largest_frame_delays_others_until_the_total_rate_has_made_up_for_it() -> None:
    peers = UnknownPeers()
    assert peers.may_send("a", MAX_FRAME_BYTES, 0.0)  # 12,289 units more than the burst
    assert [peers.may_send("b", 100, now) for now in (12.0, 12.01)] == [False, True]


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 8_192), st.floats(0.0, 0.5)), max_size=300))
def test_no_number_of_names_sends_more_than_the_total(frames: list[tuple[int, int, float]]) -> None:
    peers, now, units = UnknownPeers(), 0.0, 0
    for name, num_bytes, pause_s in frames:
        now += pause_s
        if peers.may_send(str(name), num_bytes, now):
            units += 1 + num_bytes // 1_024
    assert units <= TOTAL_BURST + TOTAL_RATE * now


def test_a_flood_without_keys_is_discarded_and_a_known_peer_is_heard() -> None:
    context = zmq.Context()
    server = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:0")
    stranger, node = (
        Mailbox(context, new_incarnation(), FromNode, connect=f"tcp://{server.address.removeprefix('tcp://')}")
        for _ in range(2)
    )
    try:
        num_sent = PEER_BURST + 2_000
        for _ in range(num_sent):
            stranger.send(Ping())
        node.send(*[Tokens("r", 0, index, (1,)) for index in range(3_000)])
        heard: dict[str, int] = {stranger.incarnation: 0, node.incarnation: 0}
        while heard[node.incarnation] < 3_000 or server.dropped["unknown"] + heard[stranger.incarnation] < num_sent:
            assert server.sockets[0].poll(60_000)
            for envelope in server.receive(is_known=node.incarnation.__eq__):
                heard[envelope.sender] += 1
        assert heard[node.incarnation] == 3_000
        assert PEER_BURST <= heard[stranger.incarnation] < num_sent
    finally:
        for mailbox in (stranger, node, server):
            mailbox.close()
        context.term()


def test_a_call_of_receive_reads_a_bounded_number_of_broken_frames() -> None:
    context = zmq.Context()
    server = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:0")
    peer, name = context.socket(zmq.DEALER), new_incarnation()
    peer.set(zmq.ROUTING_ID, name.encode())
    peer.connect(f"tcp://{server.address.removeprefix('tcp://')}")
    header = msgspec.msgpack.encode(Header(PROTOCOL_VERSION, name, ""))
    try:
        for _ in range(300):
            peer.send_multipart([header, b"\xff"])
        num_calls = 0
        while server.dropped["malformed"] < 300:
            assert server.sockets[0].poll(60_000)
            before = server.dropped["malformed"]
            assert server.receive(10) == []
            num_calls += 1
            assert server.dropped["malformed"] - before <= 10
            assert server.has_unread or server.dropped["malformed"] - before < 10
        assert num_calls >= 30
    finally:
        peer.close(0)
        server.close()
        context.term()
