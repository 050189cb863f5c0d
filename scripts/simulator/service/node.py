"""One simulated node: a production role, driven in virtual time as ``common.node.event_loop.Node`` drives a real one.

One iteration of the loop is a *turn*: receive, commit, tick, plan, send. Here a turn takes no time, and a step takes as
long as ``Costs`` says.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.config.node import NodeConfig
from common.config.shared import Role
from common.node.event_loop import LONGEST_WAIT_S
from common.node.loading.memory_plan import Capacity
from common.node.monitoring.step_times import StepTimes
from common.node.role import heartbeat_of
from common.node.worker_context import WorkerContext, make_cache
from common.scheduling.grammar_queue import CompileGrammar
from common.step_plan import StepPlan, StepResult
from common.wire.messages import Abort, Heartbeat, LayoutMessage, Message, Peer, Register
from decode_node.factory import build as build_decode
from prefill_node.factory import build as build_prefill
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.event_queue import EventQueue, NodeClock, Place
from scripts.simulator.service.cores import Cores
from scripts.simulator.service.engine import ScriptedEngine
from scripts.simulator.service.network import Network, NetworkReader, NetworkWriter
from scripts.simulator.service.repeated_steps import MAX_REPETITIONS, MAX_TOKENS, RepeatBackoff, RepeatedSteps, Schedule

MODEL, DIGEST = "simulated", "simulated"
NO_STEP = StepPlan(0, (), (), ())


class Engine(Protocol):
    """An executor with its pool (a ``PageStore``)."""

    @property
    def pool(self) -> Any: ...

    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings shared by all nodes of a cluster.

    Attributes:
        config: configuration of every node; role and name are filled in.
        capacities: pages and slots, by role.
        engine: makes an engine with the given capacity.
        costs: of steps, messages and transfers.
        costs_of_role: costs of the roles for which they differ.
        takes_steps_together: decode steps that are alike (``repeated_steps``); they need a ``ScriptedEngine``.
        num_cores: processor cores that all nodes share; None if each has a device of its own.
        costs_beside: costs of steps while another node computes on shared cores; None if they are the same.
        costs_beside_decode: the same of a decode node beside another decode node; None: as ``costs_beside``.
        spread: by role, equally likely factors by which single steps differ from their costs on shared cores.
    """

    config: NodeConfig
    capacities: dict[Role, Capacity]
    engine: Callable[[Capacity], Engine]
    costs: Costs = field(default_factory=Costs)
    costs_of_role: Mapping[Role, Costs] = field(default_factory=dict)
    vocab_size: int = 32_000
    context_length: int = 131_072
    eos_token_ids: tuple[int, ...] = ()
    takes_steps_together: bool = False
    num_cores: int | None = None
    costs_beside: Costs | None = None
    costs_beside_decode: Costs | None = None
    spread: Mapping[Role, Sequence[float]] = field(default_factory=dict)


class MessageBus(Protocol):
    def to_gateway(self, sender: str, messages: Sequence[Message]) -> None: ...
    def defer_tokens(self, steps: RepeatedSteps) -> bool: ...
    def to_peer(self, sender: str, peer: str, messages: Sequence[Message]) -> None: ...
    def hang_up(self, sender: str, peer: str) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeEnds:
    """Both ends of a node's transport."""

    reader: NetworkReader
    writer: NetworkWriter


class Node:
    """A simulated node.

    Args:
        incarnation: also its name.
        cores: the cores that it shares with other nodes; None for a device of its own.
        previous: this node in the role that it has left; its engine, pages and cache are kept.

    Attributes:
        source: the node, as a source of events.
        started_at: instant at which the node started, or took this role.
    """

    def __init__(
        self,
        role: Role,
        incarnation: str,
        settings: NodeSettings,
        *,
        events: EventQueue,
        network: Network,
        bus: MessageBus,
        cores: Cores | None = None,
        previous: "Node | None" = None,
    ) -> None:  # fmt: skip
        self.kind: Role = role
        self.incarnation = incarnation
        self.source = events.new_source()
        self.started_at = events.now()
        self.capacity = settings.capacities[role]
        self.clock: NodeClock = NodeClock(events) if previous is None else previous.clock
        self._slowness = 1.0  # factor of the duration of steps
        self.engine: Engine = settings.engine(self.capacity) if previous is None else previous.engine
        self.is_alive = True
        self.is_hanging = False
        self.is_busy = False
        self.busy_s = 0.0
        self.step_times = StepTimes()
        self.work: Counter[str] = Counter()
        self.used_page_s = 0.0  # integral of the pages in use over time
        self._settings = settings
        self._costs = settings.costs_of_role.get(role, settings.costs)
        beside = settings.costs_beside or self._costs
        beside_decode = settings.costs_beside_decode if role == "decode" else None
        self._costs_beside: dict[Role, Costs] = {"prefill": beside, "decode": beside_decode or beside}
        self._events = events
        self._bus = bus
        self._cores = cores
        self._spread = settings.spread.get(role, (1.0,))
        self._random = random.Random(incarnation)
        self._has_timer = False
        self._missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # events while the node hangs
        self._used = (0, 0.0)  # pages in use, since when
        self.allocator: PageAllocator = (
            PageAllocator(self.capacity.num_pages) if previous is None else previous.allocator
        )
        self.cache: RadixCache = make_cache(settings.config, self.allocator) if previous is None else previous.cache
        self._may_repeat = settings.takes_steps_together and role == "decode"
        self._repeated: RepeatedSteps | None = None
        self._backoff = RepeatBackoff()
        self._outstanding: StepPlan = NO_STEP  # the last step, and when it begins and ends
        self._step_begun_at = self._step_end = 0.0
        self._num_awaited = 0  # events so far that end a step; the last of them counts
        self._quiet_until = 0.0  # before this instant, a tick does nothing while a step is repeated
        self._on_empty: Callable[[], None] | None = None
        self.transports = NodeEnds(
            NetworkReader(network, self.engine.pool, incarnation, self.catch_up),
            NetworkWriter(network, self.engine.pool, incarnation, self.turn),
        )
        parts = self._parts(replace(settings.config, role=role, name=incarnation))
        self.role: Any = (build_prefill if role == "prefill" else build_decode)(parts, self.transports)

    def _parts(self, config: NodeConfig) -> WorkerContext:
        return WorkerContext(
            config=config,
            capacity=self.capacity,
            pool=self.engine.pool,
            layout=self.engine.pool.layout,
            allocator=self.allocator,
            cache=self.cache,
            clock=self.clock,
            digest=DIGEST,
            incarnation=self.incarnation,
            vocab_size=self._settings.vocab_size,
            eos_token_ids=self._settings.eos_token_ids,
        )

    def register(self) -> Register:
        """The registration that the node sends to the gateway."""
        layout: LayoutMessage = LayoutMessage.of(self.engine.pool.layout)
        return Register(
            role=self.kind,
            name=self.incarnation,
            model=MODEL,
            digest=DIGEST,
            weight_version=DIGEST,
            vocab_size=self._settings.vocab_size,
            context_length=self._settings.context_length,
            eos_token_ids=self._settings.eos_token_ids,
            generation={},
            layout=layout,
            num_pages=self.capacity.num_pages,
            max_running=self.capacity.num_slots,
            max_queued=self.capacity.max_queued,
            transports=tuple(self.role.transports()),
            address=self.peer.address,
            pid=0,
            device="none",
        )

    @property
    def peer(self) -> Peer:
        return Peer(self.incarnation, self.incarnation, f"simulated {self.incarnation}")

    # ---- events -----------------------------------------------------------------------------------------------------

    def _happens(self, what: Callable[..., None], *arguments: Any) -> None:
        """Let something happen to the node, at its present instant: now, after it has hung, or never if it is dead."""
        is_interrupted = self._repeated is not None and self._apply_repetitions()
        if self.is_hanging:
            self._missed.append((what, arguments))
        elif self.is_alive:
            before = self._outstanding
            what(*arguments, self.clock.now())
            self.turn()
            if self.is_busy and self._outstanding is before:
                self._repeated = self._repeatable()
                if is_interrupted or self._repeated is not None:
                    self._await_step_end()

    def on_gateway_messages(self, messages: Sequence[Message]) -> None:
        self._happens(self._take_gateway_messages, messages)

    def _take_gateway_messages(self, messages: Sequence[Message], now: float) -> None:
        for message in messages:
            self.role.on_gateway(message, now)

    def on_peer_messages(self, sender: str, messages: Sequence[Message]) -> None:
        steps, now = self._repeated, self.clock.now()
        if steps is not None and now < self._quiet_until and all(map(self.role.leaves_steps_alone, messages)):
            self._take_peer_messages(sender, messages, now)
            self._send_messages()
            return
        self._happens(self._take_peer_messages, sender, messages)

    def _take_peer_messages(self, sender: str, messages: Sequence[Message], now: float) -> None:
        for message in messages:
            self.role.on_peer(sender, message, now)

    def lose(self, peer: str) -> None:
        """Handle the loss of the connection to another node."""
        self._happens(self.role.peer_lost, peer)

    def lose_gateway(self) -> None:
        """Handle that the gateway no longer knows this node: end its requests."""
        self._happens(self._end_requests)

    def _end_requests(self, now: float) -> None:
        for rid, attempt in list(self.role.requests()):
            self.role.on_gateway(Abort(rid, attempt), now)

    def die(self) -> None:
        """Stop as ``kill -9`` would."""
        self.catch_up()
        self.is_alive = False
        self.is_hanging = False
        self.transports.reader.die()
        self.transports.writer.die()

    def hang(self) -> None:
        """Stop as SIGSTOP would: connections stay open, and nothing is answered until ``wake``."""
        self.catch_up()
        self.is_hanging = True

    def wake(self) -> None:
        """Go on, first with everything that has happened meanwhile."""
        self.is_hanging = False
        missed, self._missed = self._missed, []
        for what, arguments in missed:
            self._happens(what, *arguments)
        if not missed:
            self.turn()  # a write may have ended meanwhile

    def slow_down(self, factor: float) -> None:
        """Let steps take ``factor`` times as long from now on."""
        self.catch_up()
        self._slowness = factor

    def leave(self, on_empty: Callable[[], None]) -> None:
        """Stop, as a node that changes its role does, once it is done with all requests; then call ``on_empty``."""
        self.catch_up()
        self._on_empty = on_empty
        self.turn()

    def _leave_if_empty(self) -> None:
        if self._on_empty is not None and not self.is_busy and not self._has_work():
            self.is_alive = False
            self.transports.reader.close()
            self.transports.writer.close()
            self._on_empty()

    def heartbeat(self) -> Heartbeat:
        self.catch_up()
        running_s = self._step_end - self._step_begun_at if self.is_busy else 0.0  # a node counts a step at its end
        return heartbeat_of(self.role, self.step_times, counters={"busy_seconds": self.busy_s - running_s})

    def turn(self) -> None:
        """Do everything that can be done now."""
        if not self.is_alive or self.is_hanging:
            return
        now = self.clock.now()
        while self.role.tick(now):
            pass  # more pages can be written at once
        if not self.is_busy:
            plan = self.role.plan(now)
            if plan is not None:
                self._begin(plan)
        if not self.is_busy or self.kind == "prefill":  # a decode node's steps may be taken together
            self._note_pages()
        self._send_messages()
        self._leave_if_empty()
        if not self._has_timer and self._has_work():
            self._has_timer = True
            self._events.background_after(LONGEST_WAIT_S, self._on_timer)

    def _on_timer(self) -> None:
        if self._repeated is not None and self.clock.now() < self._quiet_until:
            self._events.background_after(LONGEST_WAIT_S, self._on_timer)
            return
        self.catch_up()
        self._has_timer = False
        self.turn()

    def _has_work(self) -> bool:
        load = self.role.load()
        return bool(load.num_waiting or load.num_running or load.num_quarantined_pages)

    def _begin(self, plan: StepPlan) -> None:
        self.is_busy = True
        work = StepWork.of(plan)
        slowness = self._slowness if self._cores is None else self._slowness * self._random.choice(self._spread)
        seconds = self._costs.seconds(work) * slowness
        counts = self.work
        counts["steps"] += 1
        counts["rows"] += work.num_rows
        counts["prompt_tokens"] += work.num_prompt
        self.busy_s += seconds
        self.step_times.add(seconds, work.num_prompt)
        self._note_pages()
        self._outstanding, self._step_begun_at = plan, self._events.now()
        self._step_end = self._step_begun_at + seconds
        self._backoff.step_begun()
        self._repeated = self._repeatable()
        if self._cores is None:
            self._events.num_events += 1  # one for each step, however often its end is scheduled
            self._await_step_end()
        else:
            beside_s = {other: costs.seconds(work) * slowness for other, costs in self._costs_beside.items()}
            self._num_awaited += 1
            end = partial(self._step_over, self._num_awaited)
            self._cores.run(self.incarnation, self.kind, seconds, beside_s, end)

    def _await_step_end(self) -> None:
        """Schedule the end of the outstanding step, or of the last one if deferred repetitions come before."""
        steps = self._repeated
        if steps is not None and steps.is_deferred:
            self._end_step_at(steps.schedule.place(steps.schedule.most))
        else:
            self._end_step_at(Place(self._step_end, self._step_begun_at, self.source))

    def _end_step_at(self, place: Place) -> None:
        """Let a step end in an event of this place, and no longer in one that was scheduled before."""
        self._num_awaited = number = self._num_awaited + 1
        # Every number is another, and before those of messages that were sent at the same instant.
        self._events.at_place(Place(*place[:3], -number), self._step_over, number)

    # ---- steps that are alike ---------------------------------------------------------------------------------------

    def _repeatable(self) -> RepeatedSteps | None:
        """The repetitions of the outstanding step; None if the next one is another."""
        engine, plan = self.engine, self._outstanding
        if not self._may_repeat or self._on_empty is not None or self._backoff.is_pausing:
            return None
        if plan.admits or any(row.tokens is not None for row in plan.rows):
            return None
        assert isinstance(engine, ScriptedEngine)
        most = min(MAX_REPETITIONS, max(MAX_TOKENS // len(plan.rows), 16))
        tokens = {row.slot: engine.upcoming(row.slot, row.start, most) for row in plan.rows}
        found = self.role.repeatable(lambda request: tokens[request.slot])
        if found is None:
            return None
        self._quiet_until = self.role.due_at
        until = self._quiet_until - (self.clock.now() - self._events.now())
        schedule = Schedule.of(
            plan, self._step_end, found.most, self._costs,
            begun_at=self._step_begun_at, source=self.source, slowness=self._slowness, until=until,
        )  # fmt: skip
        if not schedule.most:
            return None
        steps = RepeatedSteps(
            found.rows,
            [tokens[request.slot] for request in found.rows],
            schedule,
            num_used_pages=self._num_used_pages - self.allocator.num_lingering,
            sender=self.incarnation,
            catch_up=self.catch_up,
        )
        steps.is_deferred = self._bus.defer_tokens(steps)
        return steps

    def _step_over(self, number: int) -> None:
        """End a step: plan the same once more, or whatever follows.

        Args:
            number: of the event.
        """
        if number != self._num_awaited:
            return  # the node has heard something since, and the step ends in another event
        steps = self._repeated
        if steps is None or steps.is_deferred or steps.num_done == steps.schedule.most:
            self._apply_repetitions()
            self._happens(self._commit, self._outstanding)
            return
        steps.num_done += 1
        self._events.num_events += 1
        self._end_step_at(steps.schedule.place(steps.num_done))
        self._bus.to_gateway(self.incarnation, steps.messages())

    def catch_up(self) -> None:
        """Apply the repetitions of a step so far. It is outstanding afterwards, and ends as any other."""
        if self._apply_repetitions():
            self._await_step_end()

    def _apply_repetitions(self) -> bool:
        """Apply the repetitions of a step so far; return whether there may have been more."""
        steps, self._repeated = self._repeated, None
        if steps is None:
            return False
        count, plan, grown = steps.end(self._events), self._outstanding, list[int]()
        schedule = steps.schedule
        instants, durations = schedule.ends[:count], schedule.durations[:count]
        if count:
            ahead_s = self.clock.now() - self._events.now()
            plan, grown = self.role.repeat(
                steps.rows, [tokens[:count] for tokens in steps.tokens], [instant + ahead_s for instant in instants]
            )
        self.work["steps"] += count
        self.work["rows"] += count * len(steps.rows)
        for seconds in durations:
            self.busy_s += seconds
        self.step_times.add_decode_steps(durations)
        self._note_growth(steps.num_used_pages, instants, grown)
        self._outstanding = plan
        self._step_end, self._step_begun_at, _, _ = schedule.place(count)
        self._backoff.ended(count, len(steps.rows))
        return True

    def _commit(self, plan: StepPlan, now: float) -> None:
        self.is_busy = False
        self.role.commit(self.engine.run(plan), now)

    def _on_compiled(self, grammar: str) -> None:
        self._happens(self.role.grammar_compiled, grammar)

    def _note_pages(self) -> None:
        now = self._events.now()
        used, since = self._used
        self.used_page_s += used * (now - since)
        self._used = (self._num_used_pages, now)

    def _note_growth(self, num_used: int, instants: Sequence[float], grown: Sequence[int]) -> None:
        """Note the pages in use during repetitions.

        Args:
            num_used: before the first.
            instants: of all.
            grown: number, from 1, of the repetition that took a page, for each page in order.
        """
        (used, since), total, num_grown = self._used, self.used_page_s, 0
        for number, now in enumerate(instants, 1):
            total += used * (now - since)
            while num_grown < len(grown) and grown[num_grown] == number:
                num_grown += 1
            used, since = num_used + num_grown, now
        self._used, self.used_page_s = (used, since), total

    @property
    def _num_used_pages(self) -> int:
        return self.capacity.num_pages - self.allocator.num_free - self.cache.num_evictable_pages

    def _send_messages(self) -> None:
        outbox = self.role.outbox
        outbox.dial.clear()  # every node can reach every other
        if outbox.grammars:
            for effect in outbox.grammars:
                if isinstance(effect, CompileGrammar):
                    self._events.after(self._costs.grammar_s, self._on_compiled, effect.grammar)
            outbox.grammars.clear()
        if outbox.peers:
            by_peer: dict[str, list[Message]] = {}
            for peer, message in outbox.peers:
                by_peer.setdefault(peer, []).append(message)
            outbox.peers.clear()
            for peer, messages in by_peer.items():
                self._bus.to_peer(self.incarnation, peer, messages)
        if outbox.gateway:
            messages, outbox.gateway = outbox.gateway, []
            self._bus.to_gateway(self.incarnation, messages)
        if outbox.hang_up:
            for peer in outbox.hang_up:
                self._bus.hang_up(self.incarnation, peer)
            outbox.hang_up.clear()
