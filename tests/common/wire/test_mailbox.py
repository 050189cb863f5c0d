"""Mailboxes: delivery, lost peers, bounded memory, and the refusal of malformed messages."""

import subprocess
import sys
import time

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from common.wire import mailbox
from common.wire.mailbox import Mailbox
from common.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Deregister,
    FromGateway,
    FromNode,
    Header,
    Heartbeat,
    Ping,
    Refused,
)
from common.wire.process_id import new_incarnation


@pytest.fixture
def bound(context):
    made = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*")
    yield made
    made.close()


def dial(context, bound):
    return Mailbox(context, new_incarnation(), FromGateway, connect=bound.address)


def test_messages_go_both_ways_with_their_sender(context, bound):
    node = dial(context, bound)
    node.send(Deregister())
    (envelope,) = until(bound.receive)
    assert (envelope.sender, envelope.message) == (node.incarnation, Deregister())
    assert bound.send(Abort("r", 0), target=node.incarnation)
    (envelope,) = until(node.receive)
    assert (envelope.sender, envelope.message) == (bound.incarnation, Abort("r", 0))
    node.close()


def test_messages_sent_together_arrive_in_order_and_share_frames(context, bound):
    node = dial(context, bound)
    small = [Heartbeat(number, 0, 0, 0, 0, {}) for number in range(300)]
    large = Heartbeat(0, 0, 0, 0, 0, {"x" * 100 + str(number): 1.0 for number in range(100)})
    sent = [*small, large, *small]
    assert node.send(*sent)
    heard = []
    until(lambda: heard.extend(bound.receive()) or len(heard) == len(sent))
    assert [envelope.message for envelope in heard] == sent
    assert {envelope.sender for envelope in heard} == {node.incarnation}
    assert bound.dropped == {}
    node.close()


@given(st.lists(st.integers(0, 4_000), max_size=60))
def test_shared_frames_hold_all_messages_in_order_and_are_small(lengths):
    messages = [msgspec.msgpack.encode(bytes([i]) * length) for i, length in enumerate(lengths)]
    found = []
    for body in mailbox._bodies(messages):
        decoded = msgspec.msgpack.decode(body)
        assert not isinstance(decoded, list) or len(body) <= mailbox.SHARED_BYTES + 3
        found += decoded if isinstance(decoded, list) else [decoded]
    assert found == [bytes([i]) * length for i, length in enumerate(lengths)]


def test_unread_messages_can_be_discarded_and_later_ones_arrive(context, bound):
    node = dial(context, bound)
    node.send(Deregister())
    until(bound.receive)
    bound.send(Abort("old", 0), target=node.incarnation)
    assert node.sockets[0].poll(60_000)
    node.discard_unread()
    bound.send(Abort("new", 0), target=node.incarnation)
    (envelope,) = until(node.receive)
    assert envelope.message == Abort("new", 0)
    node.close()


def test_one_bad_message_drops_the_frame_that_it_shares(context, bound):
    node = dial(context, bound)
    node.send(Deregister(), Abort("r", 0))
    node.send(Deregister())
    (envelope,) = until(bound.receive)
    assert envelope.message == Deregister()
    assert bound.dropped == {"malformed": 1}
    node.close()


def test_sending_to_an_unknown_peer_returns_false(bound):
    assert not bound.send(Ping(), target="f" * 32)


def test_only_the_peer_that_closes_is_lost(context, bound):
    nodes = [dial(context, bound) for _ in range(3)]
    for node in nodes:
        node.send(Deregister())
    heard = []
    until(lambda: heard.extend(bound.receive()) or len(heard) == 3)
    watched = [node.incarnation for node in nodes]
    assert bound.lost_peers(watched) == []
    nodes[1].close()
    assert until(lambda: bound.lost_peers(watched)) == [watched[1]]
    for node in (nodes[0], nodes[2]):
        node.close()


def test_repeated_probing_finds_a_peer_whose_route_closes_late(bound, monkeypatch):
    class Told:
        connected = False
        disconnected = True

    answers = iter([True, True, False])
    monkeypatch.setattr(bound, "_send", lambda header, body, target: next(answers))
    monkeypatch.setattr(bound, "connection_events", Told)
    assert bound.lost_peers(["a"]) == []
    Told.disconnected = False
    assert until(lambda: bound.lost_peers(["a"])) == ["a"]


def test_a_peer_is_found_whose_route_closes_a_third_of_a_second_late(bound, monkeypatch):
    closes_at = time.monotonic() + 0.3
    monkeypatch.setattr(bound, "_send", lambda header, body, target: time.monotonic() < closes_at)
    monkeypatch.setattr(bound, "connection_events", type("Told", (), {"connected": False, "disconnected": True}))
    assert bound.lost_peers(["a"]) in ([], ["a"])
    monkeypatch.setattr(bound, "connection_events", type("Quiet", (), {"connected": False, "disconnected": False}))
    assert until(lambda: bound.lost_peers(["a"])) == ["a"]


def test_probing_ends_after_a_few_probes(bound, monkeypatch):
    probed = []
    monkeypatch.setattr(bound, "_send", lambda header, body, target: not probed.append(target))
    monkeypatch.setattr(bound, "connection_events", type("Told", (), {"connected": False, "disconnected": True}))
    bound.lost_peers(["a"])
    monkeypatch.setattr(bound, "connection_events", type("Quiet", (), {"connected": False, "disconnected": False}))
    until(lambda: not bound.lost_peers(["a"]) and not bound.is_probing)
    assert 1 < len(probed) < 10


def test_unsent_bytes_to_a_peer_that_does_not_read_are_bounded(context, bound, monkeypatch):
    """When the peer reads again, all accepted messages arrive, and new ones are accepted."""
    monkeypatch.setattr(mailbox, "MAX_LARGE_BYTES", 1 << 20)
    silent = context.socket(zmq.DEALER)
    for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 1 << 16), (zmq.ROUTING_ID, b"s" * 32)):
        silent.set(option, value)
    silent.connect(bound.address)
    silent.send_multipart(frames(Header(PROTOCOL_VERSION, "s" * 32, ""), Deregister()))
    until(bound.receive)
    large = Refused("x" * 4_096)
    num_taken, ends = 0, time.monotonic() + 60
    while bound.send(large, target="s" * 32):
        num_taken += 1
        assert time.monotonic() < ends and num_taken < 10_000, "the bytes are not bounded"
    assert num_taken > 200
    assert bound.send(Ping(), target="s" * 32), "small messages are counted by ZMQ"
    heard = 0
    while heard < num_taken + 1:
        assert silent.poll(60_000)
        silent.recv_multipart()
        heard += 1
    assert until(lambda: bound.send(large, target="s" * 32))
    silent.close(0)


def test_a_batch_of_large_messages_ends_early(context, bound, monkeypatch):
    monkeypatch.setattr(mailbox, "MAX_BATCH_BYTES", 3)
    node = dial(context, bound)
    for _ in range(2):
        node.send(Deregister())
    for _ in range(2):
        assert len(until(bound.receive)) == 1
    node.close()


def frames(header, message):
    return [msgspec.msgpack.encode(header), msgspec.msgpack.encode(message)]


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("frames", lambda me, other: [b"one"]),
        ("frames", lambda me, other: [b"1", b"2", b"3"]),
        ("malformed", lambda me, other: [b"\xc1", b"\xc1"]),
        ("malformed", lambda me, other: frames(Header(PROTOCOL_VERSION, me, ""), {"type": "nothing"})),
        ("malformed", lambda me, other: frames(Header(PROTOCOL_VERSION, me, ""), {"type": "deregister", "more": 1})),
        ("malformed", lambda me, other: frames(Header(PROTOCOL_VERSION, me, ""), Abort("r", 0))),
        ("malformed", lambda me, other: frames(Header(PROTOCOL_VERSION, me, ""), [Deregister()] * 1_025)),
        ("malformed", lambda me, other: frames(Header(PROTOCOL_VERSION, me, ""), Heartbeat(-1, 0, 0, 0, 0, {}))),
        ("malformed", lambda me, other: [frames(Header(PROTOCOL_VERSION, me, ""), Deregister())[0], b"\x91" * 100_000]),
        ("version", lambda me, other: frames(Header(PROTOCOL_VERSION + 1, me, ""), Deregister())),
        ("sender", lambda me, other: frames(Header(PROTOCOL_VERSION, other, ""), Deregister())),
        ("target", lambda me, other: frames(Header(PROTOCOL_VERSION, me, other), Deregister())),
    ],
)
def test_a_bad_message_is_counted_and_dropped_and_the_next_one_received(context, bound, reason, make):
    me, other = new_incarnation(), new_incarnation()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, me.encode())
    socket.connect(bound.address)
    socket.send_multipart(make(me, other))
    socket.send_multipart(frames(Header(PROTOCOL_VERSION, me, bound.incarnation), Deregister()))
    (envelope,) = until(bound.receive)
    assert envelope.message == Deregister()
    assert bound.dropped == {reason: 1}
    socket.close(0)


def raw(context, bound, identity):
    """A socket without the checks of a mailbox, with this identity."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, identity.encode())
    socket.set(zmq.LINGER, 0)
    socket.connect(bound.address)
    return socket


def say(socket, me):
    socket.send_multipart(frames(Header(PROTOCOL_VERSION, me, ""), Deregister()))


def heard_by(socket):
    assert socket.poll(60_000)
    return msgspec.msgpack.decode(socket.recv_multipart()[1], type=Abort)


def test_the_newest_connection_of_a_peer_is_answered_and_older_ones_are_dropped_and_counted(context, bound):
    me = new_incarnation()
    older, newest = raw(context, bound, f"{me}.9"), raw(context, bound, f"{me}.10")
    for socket in (older, newest):
        say(socket, me)
        assert [envelope.sender for envelope in until(bound.receive)] == [me]
    say(older, me)
    until(lambda: bound.receive() or bound.dropped)
    assert bound.dropped == {"replaced": 1}
    assert bound.send(Abort("r", 0), target=me)
    assert heard_by(newest) == Abort("r", 0)
    assert not older.poll(50)
    for socket in (older, newest):
        socket.close()


def test_an_older_connection_of_a_peer_takes_the_place_of_the_newest_once_that_is_closed(context, bound):
    me = new_incarnation()
    older, newest = raw(context, bound, f"{me}.1"), raw(context, bound, f"{me}.2")
    say(newest, me)
    until(bound.receive)
    say(older, me)
    until(lambda: bound.receive() or bound.dropped)
    assert bound.dropped == {"replaced": 1}
    newest.close()
    assert until(lambda: bound.lost_peers([me])) == [me]
    say(older, me)
    (envelope,) = until(bound.receive)
    assert envelope.sender == me
    assert bound.send(Abort("r", 0), target=me)
    assert heard_by(older) == Abort("r", 0)
    older.close()


def test_the_connections_of_strangers_are_forgotten_and_those_of_known_peers_and_of_new_ones_are_not(
    context, bound, monkeypatch
):
    monkeypatch.setattr(mailbox, "MAX_ROUTES", 3)
    bound._most_routes = mailbox.MAX_ROUTES
    known, *strangers, new = (new_incarnation() for _ in range(4))
    sockets = {peer: raw(context, bound, f"{peer}.1") for peer in (known, *strangers, new)}
    for peer, socket in sockets.items():
        say(socket, peer)
        assert [one.sender for one in until(lambda: bound.receive(is_known=known.__eq__))] == [peer]
    assert bound._routes.keys() == {known, new}
    for peer in (known, new):
        assert bound.send(Abort(peer, 0), target=peer)
        assert heard_by(sockets[peer]) == Abort(peer, 0)
    for socket in sockets.values():
        socket.close()


#: Dials a name with an address of each kind, while a mailbox listens at that of one kind.
DIAL_NAME = """
import sys, time, zmq
from common.wire import mailbox
from common.wire.messages import FromGateway, FromNode
mailbox.REDIAL_S = 0.1
context = zmq.Context()
bound = mailbox.Mailbox(context, "a" * 32, FromNode, bind=f"tcp://{sys.argv[1]}:*")
node = mailbox.Mailbox(context, "b" * 32, FromGateway, connect=f"tcp://both:{bound.port}")
while not node.connection_events().connected:
    bound.connection_events()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_a_name_with_addresses_of_both_kinds_is_dialled_at_either(address, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("::1 both\n127.0.0.1 both\n")
    shell = f"mount --bind {hosts} /etc/hosts || exit 9; exec {sys.executable} -c '{DIAL_NAME}' '{address}'"
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", shell]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    if found.returncode == 9 or found.stderr.startswith("unshare:") or "Cannot assign requested" in found.stderr:
        pytest.skip(f"no name can be given both addresses here: {found.stderr}")
    assert found.returncode == 0, found.stderr
