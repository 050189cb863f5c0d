"""A decode node that has no descriptor left to dial a prefill node goes on, and counts that node as lost."""

import errno

import pytest
import zmq

from common.node.endpoint import ControlEndpoint
from common.node.prefill_connections import PrefillConnections
from common.wire.mailbox import Mailbox
from common.wire.messages import FromDecode, Peer
from common.wire.process_id import new_incarnation


def test_a_node_that_cannot_be_dialled_is_lost_and_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = new_incarnation()
    listen = Mailbox(context, incarnation, FromDecode, bind="tcp://127.0.0.1:*")
    endpoint = ControlEndpoint(context, incarnation, listen)
    connections = PrefillConnections(endpoint, zmq.Poller())
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
