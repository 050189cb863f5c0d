"""A ``LocalCluster`` with delayed messages, slow engines, broken connections and suspended nodes.

All random choices come from the given ``Random``. Messages between two nodes keep their order, as on a socket, but may
overtake those of other nodes. Every message is encoded and strictly decoded, as in production.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from support.cluster.local_cluster import Answer, LocalCluster, Member, lose_gateway

from common.errors import ErrorCode
from common.wire.messages import (
    Abort,
    Connect,
    Failed,
    FromDecode,
    FromGateway,
    FromNode,
    FromPrefill,
    Message,
    Moved,
    Tokens,
)

GATEWAY = "gateway"

ENCODE = msgspec.msgpack.Encoder().encode
DECODERS: dict[str, Any] = {
    "gateway": msgspec.msgpack.Decoder(FromGateway),
    "node": msgspec.msgpack.Decoder(FromNode),
    "prefill": msgspec.msgpack.Decoder(FromPrefill),
    "decode": msgspec.msgpack.Decoder(FromDecode),
}


class Lost:
    """Marks the end of a connection in its queue of messages."""


class FaultyCluster(LocalCluster):
    """A cluster with random faults and delays.

    Args:
        random: source of all random choices.
        slowness: maximum delay of a message or a step in ticks.
        others: arguments of ``LocalCluster``.
    """

    def __init__(self, random: Random, *, slowness: int = 3, **others: Any) -> None:
        self._random = random
        self._slowness = slowness
        self._links: dict[tuple[str, str], deque[tuple[int, Message | Lost]]] = {}
        #: Tokens that arrived before their predecessors, by request and attempt.
        self._early: dict[tuple[str, int], dict[int, tuple[Member, Tokens]]] = {}
        self._stopped_until: dict[str, int] = {}  # tick at which each node resumes
        self._is_computing: dict[str, int] = {}
        self._unnoticed: dict[
            tuple[str, str], int
        ] = {}  # broken connections, and the tick at which the prefill node notices
        self._num_events = 0
        super().__init__(**others)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _draw(self) -> int:
        return self._random.randint(0, self._slowness) if self._random.random() < 0.5 else 0

    def _compile_ticks(self) -> int:
        return self.grammar_ticks and self._random.randint(0, self.grammar_ticks)

    def _compile_grammars(self, member: Member) -> int:
        num_compiled = super()._compile_grammars(member)
        self._num_events += num_compiled  # the node can plan something that it could not plan before
        return num_compiled

    def _post(self, sender: str, to: str, message: Message | Lost) -> None:
        self._num_events += 1
        link = self._links.setdefault((sender, to), deque())
        due = self.wire.num_ticks + self._draw()
        link.append((max(due, link[-1][0] if link else 0), message))

    def tell(self, member: Member, message: Message) -> None:
        if member.is_alive:
            self._post(GATEWAY, member.name, message)

    def _collect(self) -> None:
        for member in self.members:
            outbox = member.role.outbox
            mail, outbox.peers = outbox.peers, []
            news, outbox.gateway = outbox.gateway, []
            hang_up, outbox.hang_up[:] = list(outbox.hang_up), []
            outbox.dial.clear()
            self._take_grammars(member)
            for to, message in mail:
                self._post(member.name, to, message)
            for message in news:
                self._post(member.name, GATEWAY, message)
            for peer in hang_up:
                self._links.pop((peer, member.name), None)
                self._post(member.name, peer, Lost())

    def _deliver(self) -> None:
        self._collect()
        moved = True
        while moved:
            moved = False
            for (sender, to), link in list(self._links.items()):
                if self._stopped_until.get(to, 0) > self.wire.num_ticks:
                    continue
                while link and link[0][0] <= self.wire.num_ticks:
                    self._arrive(sender, to, link.popleft()[1])
                    self._collect()
                    moved = True

    def _arrive(self, sender: str, to: str, message: Message | Lost) -> None:
        self._num_events += 1
        member = next((member for member in self.members if member.name == to), None)
        now = self.clock.now()
        if to == GATEWAY:
            self._hear_gateway(sender, message)
        elif member is None:
            pass
        elif isinstance(message, Lost) and sender == GATEWAY:
            lose_gateway(member.role, now)
        elif isinstance(message, Lost):
            member.role.peer_lost(sender, now)
        elif sender == GATEWAY:
            member.role.on_gateway(DECODERS["gateway"].decode(ENCODE(message)), now)
        else:
            if isinstance(message, Connect):
                self._unnoticed.pop((to, sender), None)
            direction = "prefill" if isinstance(message, FromPrefill) else "decode"
            member.role.on_peer(sender, DECODERS[direction].decode(ENCODE(message)), now)

    def _hear_gateway(self, sender: str, message: Message | Lost) -> None:
        """Process tokens in order, as the gateway does."""
        if isinstance(message, Lost):
            self._gateway_lost(sender)
            return
        message = DECODERS["node"].decode(ENCODE(message))
        if isinstance(message, Failed | Moved):
            self._hear(self._member(sender), message)
        elif isinstance(message, Tokens):
            early = self._early.setdefault((message.rid, message.attempt), {})
            assert message.index not in early, "a token was sent twice"
            early[message.index] = (self._member(sender), message)
            answer = self.answers[message.rid]
            while answer.attempt == message.attempt and len(answer.tokens) in early and not answer.is_over:
                self._hear(*early.pop(len(answer.tokens)))

    def _member(self, name: str) -> Member:
        return next(member for member in self._all() if member.name == name)

    def _all(self) -> list[Member]:
        return [*self.prefill, *self.decode, *self._dead]

    # ---- faults -----------------------------------------------------------------------------------------------------

    _dead: tuple[Member, ...] = ()

    def _gateway_lost(self, name: str) -> None:
        for rid, answer in self.answers.items():
            if not answer.is_over and any(node.name == name for node in answer.nodes):
                answer.error = Failed(rid, answer.attempt, ErrorCode.NODE_LOST, f"{name} was lost")
                self.abort(rid)

    def kill(self, member: Member, *, is_noticed: bool = True) -> None:
        """End a node as SIGKILL does. Its messages in flight still arrive; then each node notices at its own time."""
        member.is_alive = False
        member.plans.clear()
        self._dead = (*self._dead, member)
        member.writer.die()
        for sender, to in list(self._links):
            if to == member.name:
                del self._links[sender, to]
        self._post(member.name, GATEWAY, Lost())
        for other in self.members:
            self._post(member.name, other.name, Lost())

    def cut(self, prefill: Member, decode: Member) -> None:
        """Break the control connection of two nodes; the prefill node may notice only after the next connection."""
        for ends in ((prefill.name, decode.name), (decode.name, prefill.name)):
            self._links.pop(ends, None)
        self._post(prefill.name, decode.name, Lost())
        if self._random.random() < 0.5:
            self._post(decode.name, prefill.name, Lost())
        else:
            self._unnoticed[prefill.name, decode.name] = self.wire.num_ticks + 5

    def cut_off(self, member: Member) -> None:
        """Break the connection between a node and the gateway."""
        for ends in ((member.name, GATEWAY), (GATEWAY, member.name)):
            self._links.pop(ends, None)
            self._post(*ends, Lost())

    def stop_for(self, member: Member, num_ticks: int) -> None:
        """Stop a node as SIGSTOP does, for ``num_ticks``."""
        self._stopped_until[member.name] = self.wire.num_ticks + num_ticks

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.clock.advance(0.001)
        moving = [m for m in self.members if self._stopped_until.get(m.name, 0) <= self.wire.num_ticks]
        for member in moving:
            if len(member.plans) < self.num_outstanding:
                self.plan(member)
                self._is_computing[member.name] = self.wire.num_ticks + self._draw()
        self._deliver()
        self._each(moving, lambda member: member.role.tick(self.clock.now()))
        self.wire.tick()
        for ends, at in list(self._unnoticed.items()):
            if at <= self.wire.num_ticks:
                del self._unnoticed[ends]
                self._arrive(ends[1], ends[0], Lost())
        self._each(moving, self._compile_grammars)
        self._each(moving, self._commit)
        self._deliver()
        self.check()

    def _each(self, members: list[Member], do: Callable[[Member], Any]) -> None:
        for member in members:
            if member.is_alive:
                do(member)
                self._collect()

    def _commit(self, member: Member) -> None:
        if member.plans and self.is_due(member) and self._is_computing[member.name] <= self.wire.num_ticks:
            self._num_events += 1
            self.commit(member)
        member.role.tick(self.clock.now())

    def _is_idle(self, num_events: int) -> bool:
        """Return whether nothing has happened since ``num_events`` and nothing can until time passes."""
        return (
            self._num_events == num_events
            and not any(self._links.values())
            and all(not member.plans for member in self.members)
            and all(tick is None for member in self.members for tick in member.grammars.values())
            and not self.wire.num_in_flight
            and not self._unnoticed
            and all(until <= self.wire.num_ticks - 3 for until in self._stopped_until.values())
        )

    def finish(self, *, may_wait: bool) -> None:
        """Step until every response has ended, and some steps more.

        Args:
            may_wait: a request may wait for a lease to expire; otherwise an idle cluster is a deadlock.
        """
        for _ in range(4_000):
            if all(answer.is_over for answer in self.answers.values()):
                break
            num_events = self._num_events
            for _ in range(3):
                self.step()
            if self._is_idle(num_events) and not all(answer.is_over for answer in self.answers.values()):
                waiting = [rid for rid, answer in self.answers.items() if not answer.is_over]
                assert may_wait, f"deadlock: the cluster is idle while these wait: {waiting}"
                self.clock.advance(0.2)
        open_answers = [rid for rid, answer in self.answers.items() if not answer.is_over]
        assert not open_answers, f"not over after 4,000 rounds: {open_answers}"
        self._rest(40)
        for _ in range(8 if may_wait else 0):  # leases expire
            self.clock.advance(10.0)
            self._rest(10)

    def _rest(self, max_steps: int) -> None:
        """Step until the cluster is idle, where more steps would change nothing."""
        for _ in range(0, max_steps, 3):
            num_events = self._num_events
            for _ in range(3):
                self.step()
            if self._is_idle(num_events):
                return


def end_by_client(cluster: LocalCluster, rid: str, why: str) -> Answer:
    """End a request by a disconnect or its deadline; the gateway aborts it on both nodes."""
    answer = cluster.answers[rid]
    answer.finish = why
    for node in answer.nodes:
        cluster.tell(node, Abort(rid, answer.attempt))
    return answer
