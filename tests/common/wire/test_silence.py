"""A connection on which the other end is silent is closed at both ends, even if no end of it is ever told."""

import contextlib
import select
import socket
import threading
import time

import pytest
import zmq
from support.waiting import until

from common.wire.mailbox import Mailbox
from common.wire.messages import Abort, Deregister, FromGateway, FromNode
from common.wire.process_id import new_incarnation

SILENCE_S = 3.0  # longer than any thread of a connection may lack a core


class Cable:
    """Passes bytes on between a client of its port and ``server``. Once it is cut, nothing passes, without notice."""

    def __init__(self, server: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = server
        self._is_cut = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(60.0)
        self._listener.close()

    def _pass_on(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self._server)) as server:
            others = {client: server, server: client}
            while not self._is_over.is_set():
                for source in select.select(list(others), [], [], 0.02)[0]:
                    try:
                        data = source.recv(65_536)
                        if not self._is_cut.is_set():
                            others[source].sendall(data)
                    except OSError:
                        return
                    if not data:
                        del others[source]


def test_both_ends_notice_that_nothing_passes_any_more(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    bound = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*", silence_s=SILENCE_S)
    with contextlib.closing(Cable(bound.port)) as cable:
        address = f"tcp://127.0.0.1:{cable.port}"
        node = Mailbox(context, new_incarnation(), FromGateway, connect=address, silence_s=SILENCE_S)
        node.send(Deregister())
        until(bound.receive)
        until(lambda: node.connection_events().connected)
        assert bound.lost_peers([node.incarnation]) == []
        cable.cut()
        until(lambda: node.connection_events().disconnected)
        until(lambda: bound.lost_peers([node.incarnation]) == [node.incarnation])
        node.close()
        bound.close()


def test_a_node_that_reads_nothing_for_a_while_stays_connected_and_gets_every_message(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    bound = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*")
    node = Mailbox(context, new_incarnation(), FromGateway, connect=bound.address, silence_s=SILENCE_S)
    node.send(Deregister())
    until(bound.receive)
    for number in range(3_000):
        assert bound.send(Abort(str(number), 0), target=node.incarnation)
    time.sleep(2 * SILENCE_S)
    assert not node.connection_events().disconnected, "its probes were not answered"
    heard: list[str] = []
    until(lambda: heard.extend(envelope.message.rid for envelope in node.receive()) or len(heard) == 3_000)
    assert heard == list(map(str, range(3_000)))
    node.close()
    bound.close()


@pytest.mark.slow
def test_an_idle_connection_stays_open_for_many_times_the_silence(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    bound = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*", silence_s=10.0)
    node = Mailbox(context, new_incarnation(), FromGateway, connect=bound.address, silence_s=10.0)
    node.send(Deregister())
    until(bound.receive)
    time.sleep(25.0)
    assert not node.connection_events().disconnected
    assert bound.lost_peers([node.incarnation]) == []
    node.close()
    bound.close()
