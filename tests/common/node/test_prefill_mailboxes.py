"""The connections of a decode node to prefill nodes: one that cannot be dialled, and one that has started again."""

import errno
import time

import pytest
import zmq

from common.node.endpoint import ControlEndpoint
from common.node.prefill_mailboxes import PrefillMailboxes
from common.wire.mailbox import Mailbox
from common.wire.messages import Closed, FromDecode, Message, Peer, Ping, TransferAck
from common.wire.process_id import new_incarnation


def test_a_node_that_cannot_be_dialled_is_lost_and_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = new_incarnation()
    listen = Mailbox(context, incarnation, FromDecode, bind="tcp://127.0.0.1:*")
    endpoint = ControlEndpoint(context, incarnation, listen)
    connections = PrefillMailboxes(endpoint, zmq.Poller())
    peer = Peer(name="prefill-0", incarnation=new_incarnation(), address="127.0.0.1:1", public_key="")

    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr(zmq.Socket, "get_monitor_socket", refuse)
        connections.dial(peer)
    assert connections.mailboxes() == []
    assert connections.lost() == [peer.incarnation]
    assert connections.lost() == []
    connections.dial(peer)
    assert len(connections.mailboxes()) == 1
    connections.hang_up(peer.incarnation)
    listen.close()
    context.term()  # would wait for ever for a socket that is still open


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "a b:1"])
def test_a_node_that_gives_an_impossible_address_is_lost(address: str, caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = new_incarnation()
    listen = Mailbox(context, incarnation, FromDecode, bind="tcp://127.0.0.1:*")
    connections = PrefillMailboxes(ControlEndpoint(context, incarnation, listen), zmq.Poller())
    peer = Peer("prefill-0", new_incarnation(), address)
    connections.dial(peer)
    assert connections.lost() == [peer.incarnation]
    assert caplog.messages == [f"cannot dial prefill-0: its address must be HOST:PORT, not {address!r}"]
    listen.close()
    context.term()


def test_a_node_that_starts_again_at_its_address_is_reached_though_the_process_before_it_was_dialled_late() -> None:
    """ZMQ ignores a second connection of the same peer for as long as the first is open."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours = new_incarnation()
    listen = Mailbox(context, ours, FromDecode, bind="tcp://127.0.0.1:*")
    connections = PrefillMailboxes(ControlEndpoint(context, ours, listen), zmq.Poller())
    restarted = Mailbox(context, new_incarnation(), FromDecode, bind="tcp://127.0.0.1:*")
    address = f"127.0.0.1:{restarted.port}"
    before, now = (
        Peer("prefill-0", incarnation, address) for incarnation in (new_incarnation(), restarted.incarnation)
    )
    message = TransferAck("r", 0)
    ends_at = time.monotonic() + 60

    connections.dial(before)
    connections.send(before.incarnation, message)
    while not restarted.dropped["target"]:
        assert not restarted.receive() and time.monotonic() < ends_at
    connections.dial(now)
    connections.send(now.incarnation, message)
    received: list[object] = []
    while not received and time.monotonic() < ends_at:
        received = [letter.message for letter in restarted.receive()]
    assert received == [message]
    assert restarted.send(Ping(), target=ours) and restarted.send(Closed("r", 0, "aborted"), target=ours)
    answers: list[tuple[str, Message]] = []
    while len(answers) < 2 and time.monotonic() < ends_at:
        answers += connections.receive()
    sent = [Ping(), Closed("r", 0, "aborted")]
    assert answers == [(now.incarnation, message) for message in sent], "the connection of before is not answered"
    for peer in (before, now):
        connections.hang_up(peer.incarnation)
    for mailbox in (listen, restarted):
        mailbox.close()
    context.term()
