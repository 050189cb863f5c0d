"""One simulated node: a production role, turned as ``common.node.event_loop.Node`` turns it, in virtual time.

What the loop of a real node does between two waits is a *turn*: hear, commit, tick, plan, speak. Here a turn takes no
time, and a step takes what ``Costs`` says.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from common.cache.page_allocator import PageAllocator
from common.config.node import NodeConfig
from common.config.shared import Role
from common.node.event_loop import LONGEST_WAIT_S
from common.node.memory_plan import Capacity
from common.node.worker_context import Parts, cache_for
from common.step_plan import StepPlan, StepResult
from common.wire.messages import Geometry, Message, Peer, Register
from decode_node.__main__ import build as build_decode
from kv_transfer.transports.base import to_message
from prefill_node.__main__ import build as build_prefill
from scripts.simulator.costs import Costs, Work
from scripts.simulator.event_queue import Agenda
from scripts.simulator.inprocess_transport import InProcessReader
from scripts.simulator.network import TimedWire, TimedWriter

MODEL, DIGEST = "simulated", "simulated"


class Engine(Protocol):
    """An executor with its pool (a ``PageStore``)."""

    @property
    def pool(self) -> Any: ...

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Make:
    """What all nodes of a cluster are made of.

    Attributes:
        config: of every node; its role and name are filled in.
        capacities: by role.
        engine: makes the engine of a node that has these pages and slots.
    """

    config: NodeConfig
    capacities: dict[Role, Capacity]
    engine: Callable[[Capacity], Engine]
    costs: Costs = field(default_factory=Costs)
    vocab_size: int = 32_000
    context_length: int = 131_072
    eos_token_ids: tuple[int, ...] = ()


class Mail(Protocol):
    """Carries what a node says."""

    def to_gateway(self, sender: str, messages: Sequence[Message]) -> None: ...
    def to_peer(self, sender: str, peer: str, messages: Sequence[Message]) -> None: ...
    def hang_up(self, sender: str, peer: str) -> None: ...


class Node:
    """Args:
    incarnation: also its name.
    wire: carries its pages.
    """

    def __init__(
        self, role: Role, incarnation: str, make: Make, *, agenda: Agenda, wire: TimedWire, mail: Mail
    ) -> None:
        self.kind: Role = role
        self.incarnation = incarnation
        self.capacity = make.capacities[role]
        self.engine = make.engine(self.capacity)
        self.is_alive = True
        self.is_busy = False
        self.busy_s = 0.0
        self.work: Counter[str] = Counter()
        self.used_page_s = 0.0  # pages that somebody needs, times the seconds for which somebody did
        self._make = make
        self._costs = make.costs
        self._agenda = agenda
        self._mail = mail
        self._has_timer = False
        self._used = (0, 0.0)  # pages that somebody needs, since when
        self.books = PageAllocator(self.capacity.num_pages)
        self.cache = cache_for(make.config, self.books)
        self.transport: InProcessReader | TimedWriter
        parts = self._parts(replace(make.config, role=role, name=incarnation))
        if role == "prefill":
            self.transport = TimedWriter(wire, self.engine.pool, incarnation, self.turn)
            self.role: Any = build_prefill(parts, self.transport)
        else:
            self.transport = InProcessReader(wire, self.engine.pool, incarnation)
            self.role = build_decode(parts, self.transport)

    def _parts(self, config: NodeConfig) -> Parts:
        return Parts(
            config=config,
            capacity=self.capacity,
            pool=self.engine.pool,
            books=self.books,
            cache=self.cache,
            clock=self._agenda,
            digest=DIGEST,
            incarnation=self.incarnation,
            vocab_size=self._make.vocab_size,
            eos_token_ids=self._make.eos_token_ids,
        )

    def register(self) -> Register:
        """What it tells the gateway of itself."""
        geometry: Geometry = to_message(self.engine.pool.geometry)
        return Register(
            role=self.kind,
            name=self.incarnation,
            model=MODEL,
            digest=DIGEST,
            weight_version=DIGEST,
            vocab_size=self._make.vocab_size,
            context_length=self._make.context_length,
            eos_token_ids=self._make.eos_token_ids,
            generation={},
            geometry=geometry,
            num_pages=self.capacity.num_pages,
            max_running=self.capacity.num_slots,
            max_queued=self.capacity.max_queued,
            transports=tuple(self.role.transports()),
            address="in this process",
            pid=0,
            device="none",
        )

    @property
    def peer(self) -> Peer:
        return Peer(self.incarnation, self.incarnation, "in this process")

    # ---- events -----------------------------------------------------------------------------------------------------

    def hear_gateway(self, messages: Sequence[Message]) -> None:
        if self.is_alive:
            now = self._agenda.now()
            for message in messages:
                self.role.on_gateway(message, now)
            self.turn()

    def hear_peer(self, sender: str, messages: Sequence[Message]) -> None:
        if self.is_alive:
            now = self._agenda.now()
            for message in messages:
                self.role.on_peer(sender, message, now)
            self.turn()

    def lose(self, peer: str) -> None:
        """The connection to another node is gone."""
        if self.is_alive:
            self.role.peer_lost(peer, self._agenda.now())
            self.turn()

    def die(self) -> None:
        """As kill -9."""
        self.is_alive = False
        self.transport.die()

    def turn(self) -> None:
        """Whatever can be done now."""
        if not self.is_alive:
            return
        now = self._agenda.now()
        more = self.role.tick(now)
        if not self.is_busy:
            plan = self.role.plan(now)
            if plan is not None:
                self._begin(plan)
        self._speak()
        if more:
            self._agenda.at(now, self.turn)
        elif not self._has_timer and self._has_work():
            self._has_timer = True
            self._agenda.idle_after(LONGEST_WAIT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._has_timer = False
        self.turn()

    def _has_work(self) -> bool:
        load = self.role.load()
        return bool(load.num_waiting or load.num_running or load.num_quarantined_pages)

    def _begin(self, plan: StepPlan) -> None:
        self.is_busy = True
        work = Work.of(plan)
        seconds = self._costs.seconds(work)
        counts = self.work
        counts["steps"] += 1
        counts["rows"] += work.num_rows
        counts["prompt_tokens"] += work.num_prompt
        self.busy_s += seconds
        self._note_pages()
        self._agenda.after(seconds, self._end, plan)

    def _end(self, plan: StepPlan) -> None:
        if not self.is_alive:
            return
        self.is_busy = False
        self.role.commit(self.engine.run(plan), self._agenda.now())
        self.turn()

    def _note_pages(self) -> None:
        now = self._agenda.now()
        used, since = self._used
        self.used_page_s += used * (now - since)
        self._used = (self.capacity.num_pages - self.books.num_free - self.cache.num_evictable_pages, now)

    def _speak(self) -> None:
        outbox = self.role.outbox
        outbox.dial.clear()  # everybody can reach everybody
        if outbox.peers:
            by_peer: dict[str, list[Message]] = {}
            for peer, message in outbox.peers:
                by_peer.setdefault(peer, []).append(message)
            outbox.peers.clear()
            for peer, messages in by_peer.items():
                self._mail.to_peer(self.incarnation, peer, messages)
        if outbox.gateway:
            messages, outbox.gateway = outbox.gateway, []
            self._mail.to_gateway(self.incarnation, messages)
        for peer in outbox.hang_up:
            self._mail.hang_up(self.incarnation, peer)
        outbox.hang_up.clear()
