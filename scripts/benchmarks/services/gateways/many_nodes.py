"""Many nodes without engines in one process: real registrations, heartbeats, shares and tokens over real ZMQ.

A prefill node answers a request with its first token, a decode node with the second. A decode node *holds* a request
for some time, or until it is told to release it, and then sends its last token.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop
import zmq

from common.config.shared import Role
from common.node.event_loop import LOAD_REPORT_S
from common.node.gateways.credit import Credit
from common.wire.curve import CurveKeys
from common.wire.mailbox import Mailbox
from common.wire.messages import (
    Abort,
    FromGateway,
    Generate,
    Heartbeat,
    HeartbeatAck,
    Message,
    NodeCosts,
    OtherLoad,
    Registered,
    Tokens,
)
from common.wire.process_id import new_incarnation
from scripts.benchmarks.services.gateways.baton import registration

#: ZMQ has at most 1,023 sockets in a context. A mailbox takes three, and a node has one for each of two gateways.
NODES_OF_CONTEXT = 150
BEAT_S = 1.0
#: Parts of ``BEAT_S`` among which the heartbeats of the nodes are divided.
NUM_PARTS = 20
#: Totals of a heartbeat, about as many as real nodes have.
TOTALS = tuple(f"total_{i}" for i in range(40))


@dataclass
class Order:
    """What the benchmark tells its nodes.

    Attributes:
        gateways: addresses that the nodes dial from now on; None: no change.
        hold_s: for how long decode nodes hold requests from now on; None: until they are released.
        is_release: the held requests end.
    """

    gateways: Sequence[str] | None = None
    hold_s: float | None = None
    is_release: bool = False


@dataclass
class Report:
    """What the nodes of one process say: how many are registered at each gateway, and how many requests they had.

    Attributes:
        num_held: now, on all of them.
        most: the most that each decode node had at once.
    """

    num_registered: list[int]
    num_requests: int
    num_held: int
    most: list[int]


@dataclass(eq=False)
class Link:
    """A node's connection to one gateway."""

    mailbox: Mailbox
    incarnation: str = ""
    is_registered: bool = False
    due: list[Message] = field(default_factory=list)
    is_drain_due: bool = False
    other_load: OtherLoad = field(default_factory=lambda: OtherLoad(0, 0))


class SimulatedNode:
    """A node without an engine.

    Args:
        room: requests that it runs at once.
    """

    def __init__(self, role: Role, name: str, room: int, process: "NodeProcess") -> None:
        self.role, self.name, self.room = role, name, room
        self._process = process
        self._loop = asyncio.get_running_loop()
        self.links: list[Link] = []
        self.num_requests = 0
        self.most = 0
        self.is_load_due = False
        self.held: dict[tuple[str, int], tuple[Link, Generate]] = {}
        self._credit: Credit | None = None

    def dial(self, gateways: Sequence[str], context: zmq.Context[Any], keys: CurveKeys | None) -> None:
        self._credit = None if len(gateways) == 1 else Credit(self.room)
        me = new_incarnation("" if keys is None else keys.fingerprint)
        for address in gateways:
            curve = None if keys is None else keys.client(keys.gateway)
            link = Link(Mailbox(context, me, FromGateway, connect=f"tcp://{address}", curve=curve))
            self.links.append(link)
            self._loop.add_reader(int(link.mailbox.sockets[0].get(zmq.FD)), self._drain, link)
            share = None if self._credit is None else 0
            link.due.append(registration(self.role, self.name, max_running=self.room, share=share))
            self._drain_soon(link)

    def close(self) -> None:
        for link in self.links:
            self._loop.remove_reader(int(link.mailbox.sockets[0].get(zmq.FD)))
            link.mailbox.close()
        self.links.clear()
        self.held.clear()

    def beat(self) -> None:
        in_flight = Counter(link.incarnation for link, _ in self.held.values())
        counters = dict.fromkeys(TOTALS, float(self.num_requests))
        for link in self.links:
            if link.is_registered:
                share = None if self._credit is None else self._credit.offer(link.incarnation, in_flight)
                beat = Heartbeat(0, len(self.held), 0, 0, 0, counters, share=share, costs=NodeCosts(0.01, 1e-4, 1e9))
                self._send(link, beat)

    def tell_other_loads(self) -> None:
        """Tell each of several gateways what the others have here, as soon as it has changed."""
        self.is_load_due = False
        for link in self.links if len(self.links) > 1 else ():
            others = [generate for other, generate in self.held.values() if other is not link]
            load = OtherLoad(0, sum(len(one.prompt) + one.sampling.max_new_tokens for one in others))
            if load != link.other_load:
                link.other_load = load
                self._send(link, load)

    def release(self, key: tuple[str, int]) -> None:
        """End a held request."""
        found = self.held.pop(key, None)
        self._load_changed()
        if found is not None:
            link, generate = found
            index = 2 if self._process.hold_s is None else 1
            self._send(link, Tokens(generate.rid, generate.attempt, index, generate.prompt[:1], finish="length"))

    def _load_changed(self) -> None:
        if len(self.links) > 1 and not self.is_load_due:
            self.is_load_due = True
            self._loop.call_later(LOAD_REPORT_S, self.tell_other_loads)

    def _send(self, link: Link, message: Message) -> None:
        link.due.append(message)
        self._drain_soon(link)

    def _drain_soon(self, link: Link) -> None:
        """Each use of the socket may swallow the edge that announces input."""
        if not link.is_drain_due:
            link.is_drain_due = True
            self._loop.call_soon(self._drain, link)

    def _drain(self, link: Link) -> None:
        link.is_drain_due = False
        if link not in self.links:
            return  # it is closed
        if link.due:
            link.mailbox.send(*link.due)
            link.due.clear()
            self._drain_soon(link)
        envelopes = link.mailbox.receive()
        for envelope in envelopes:
            self._on_message(link, envelope.sender, envelope.message)
        if envelopes:
            self._drain_soon(link)

    def _on_message(self, link: Link, sender: str, message: Message) -> None:
        if isinstance(message, Generate):
            self._on_generate(link, message)
            for sample in message.others:
                one = Generate(
                    sample.rid, sample.attempt, message.prompt, message.sampling, message.prefill, message.decode, 60.0
                )
                self._on_generate(link, one)
        elif isinstance(message, Registered):
            link.incarnation, link.is_registered = sender, True
            if self._credit is not None:
                self._credit.join(sender)
        elif isinstance(message, HeartbeatAck):
            if self._credit is not None:
                self._credit.acknowledge(sender, message.demand)
        elif isinstance(message, Abort):
            self.held.pop((message.rid, message.attempt), None)
            self._load_changed()

    def _on_generate(self, link: Link, generate: Generate) -> None:
        self.num_requests += 1
        if self.role == "prefill":
            is_only = generate.decode is None
            first = Tokens(generate.rid, generate.attempt, 0, generate.prompt[:1], finish="length" if is_only else "")
            self._send(link, first)
            return
        key = generate.rid, generate.attempt
        self.held[key] = link, generate
        self.most = max(self.most, len(self.held))
        self._load_changed()
        if self._process.hold_s is None:
            self._send(link, Tokens(generate.rid, generate.attempt, 1, generate.prompt[:1]))
        else:
            self._loop.call_later(self._process.hold_s, self.release, key)


class NodeProcess:
    """The nodes of one process, which its parent orders about through a pipe.

    Args:
        names: of the nodes, by role.
        room: requests that a decode node runs at once.
    """

    def __init__(self, pipe: Pipe, names: dict[Role, list[str]], room: int, keys: CurveKeys | None) -> None:
        self._pipe = pipe
        self._keys = keys
        self.hold_s: float | None = None
        self._nodes = [SimulatedNode(role, name, room, self) for role, some in names.items() for name in some]
        num_contexts = math.ceil(len(self._nodes) / NODES_OF_CONTEXT)
        self._contexts: list[zmq.Context[Any]] = [zmq.Context() for _ in range(num_contexts)]
        self._ended = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        loop.add_reader(self._pipe.fileno(), self._on_order)
        beating = asyncio.create_task(self._beat())
        await self._ended.wait()
        beating.cancel()
        self._close()
        for context in self._contexts:
            context.destroy(linger=0)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in any node ends the process, which its parent notices."""
        loop.default_exception_handler(context)
        self._ended.set()

    async def _beat(self) -> None:
        part = 0
        while True:
            await asyncio.sleep(BEAT_S / NUM_PARTS)
            part = (part + 1) % NUM_PARTS
            for node in self._nodes[part::NUM_PARTS]:
                node.beat()

    def _on_order(self) -> None:
        try:
            order = self._pipe.recv()
        except EOFError:
            order = None
        if order is None:
            self._ended.set()
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            return
        self.hold_s = order.hold_s
        if order.gateways is not None:
            self._close()
            for i, node in enumerate(self._nodes):
                node.dial(order.gateways, self._contexts[i // NODES_OF_CONTEXT], self._keys)
        if order.is_release:
            for node in self._nodes:
                for key in list(node.held):
                    node.release(key)
        num_links = max(len(node.links) for node in self._nodes)
        self._pipe.send(
            Report(
                [sum(node.links[i].is_registered for node in self._nodes) for i in range(num_links)],
                sum(node.num_requests for node in self._nodes),
                sum(len(node.held) for node in self._nodes),
                [node.most for node in self._nodes if node.role == "decode"],
            )
        )

    def _close(self) -> None:
        for node in self._nodes:
            node.close()
            node.most = 0


def run_nodes(pipe: Pipe, names: dict[Role, list[str]], room: int, keys: CurveKeys | None) -> None:
    """The whole process."""

    async def run() -> None:
        await NodeProcess(pipe, names, room, keys).run()

    uvloop.run(run())
