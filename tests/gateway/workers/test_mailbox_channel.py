"""The channel to the nodes: messages of one turn leave together, and unreachable nodes are reported after it."""

import asyncio

import zmq

from common.wire.mailbox import Envelope, Mailbox
from common.wire.messages import Abort, FromGateway, FromNode, Heartbeat
from common.wire.process_id import new_incarnation
from gateway.workers.control_plane import MailboxChannel


class Listener:
    """Keeps what a channel reports."""

    def __init__(self, channel: MailboxChannel) -> None:
        self._channel = channel
        self.heard: list[Envelope] = []
        self.lost: list[str] = []

    def on_readable(self) -> None:
        self.heard += self._channel.receive(lambda incarnation: True)

    def on_disconnect(self) -> None:
        self.on_readable()

    def lose(self, incarnation: str) -> None:
        self.lost.append(incarnation)


async def until(listener: Listener, num_heard: int) -> None:
    async with asyncio.timeout(60):
        while len(listener.heard) < num_heard:
            await asyncio.sleep(0.002)


async def test_messages_of_a_turn_arrive_in_order_and_an_unreachable_node_is_lost_after_the_turn(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    bound = Mailbox(context, new_incarnation(), FromNode, bind="tcp://127.0.0.1:*")
    channel = MailboxChannel(bound, "tcp://127.0.0.1:*")
    listener = Listener(channel)
    channel.start(listener)
    nodes = [Mailbox(context, new_incarnation(), FromGateway, connect=bound.address) for _ in range(2)]
    for node in nodes:
        node.send(Heartbeat(0, 0, 0, 0, 0, {}))
    await until(listener, 2)
    unknown = new_incarnation()
    aborts = [Abort("r", attempt) for attempt in range(5)]
    for abort in aborts:
        channel.send(abort, unknown, *(node.incarnation for node in nodes))
    assert not listener.lost, "the caller is never called back"
    for node in nodes:
        got: list[Envelope] = []
        async with asyncio.timeout(60):
            while len(got) < len(aborts):
                got += node.receive()
                await asyncio.sleep(0.002)
        assert [envelope.message for envelope in got] == aborts
    assert listener.lost == [unknown]
    channel.send(Abort("last", 0), nodes[0].incarnation)
    channel.close()
    async with asyncio.timeout(60):
        while not (last := nodes[0].receive()):
            await asyncio.sleep(0.002)
    assert last[0].message == Abort("last", 0), "what is due leaves before the channel closes"
    for node in nodes:
        node.close()
