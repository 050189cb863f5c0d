"""Prefill and decode nodes in one process, stepped by hand, with real roles, schedulers, caches and transfer sessions.

Only sockets and the clock are replaced. Messages are delivered between steps, and between plan and commit as in a node
whose engine runs in a thread. Pages travel over an in-process wire, and every node is checked after every step. The
cluster acts as the gateway: it joins tokens by index and tells the other node when a request has ended.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from support.cluster.fake_engine import VOCAB_SIZE, FakeExecutor, both_groups
from support.cluster.manual_clock import ManualClock
from support.cluster.watched_allocator import WatchedAllocator, WatchedWindowPages

from common.cache.kv_window import UNBOUNDED, KVWindow
from common.cache.radix_cache import RadixCache
from common.config.scheduling import PriorityRules, SchedulingOptions
from common.errors import ErrorCode
from common.sampling_params import SamplingParams, TokenLogprobs
from common.scheduling.chunked_prefill import ChunkAlignment
from common.scheduling.grammar_queue import CompileGrammar
from common.scheduling.ordering import RequestOrdering
from common.scheduling.output_reserve import RESERVED_TOKENS
from common.scheduling.policies.factory import make_policy
from common.scheduling.prefill_adder import PrefillLimits
from common.stage_spans import StageSpan
from common.step_plan import StepPlan, StepResult
from common.wire.messages import Abort, EndReason, Failed, Generate, Message, Move, Moved, Peer, Spans, Tokens
from common.wire.packed_logprobs import unpack_logprobs
from decode_node import scheduler as decode
from decode_node.moves import OutgoingMoves
from decode_node.role import DecodeRole
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter
from prefill_node import scheduler as prefill
from prefill_node.role import PrefillRole
from scripts.simulator.service.inprocess_transport import InProcessReader, InProcessWriter, Wire


@dataclass(slots=True)
class Member:
    """A node of the cluster: its name, its role, its engine and its pages.

    Attributes:
        grammars: those that its requests need, and the tick at which each will be compiled; None once it is.
    """

    name: str
    role: Any
    executor: Any
    allocator: WatchedAllocator
    transport: Any
    writer: InProcessWriter
    plans: list[Any] = field(default_factory=list)  # outstanding, oldest first
    grammars: dict[str, int | None] = field(default_factory=dict)
    is_alive: bool = True
    is_planned_out: bool = False  # the last call of plan returned None

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.name, f"{self.name}:1")


@dataclass(slots=True)
class Answer:
    """The response to a request so far.

    Attributes:
        nodes: those that serve the present attempt.
        message: with which the present attempt began.
        target, moved: the node that the request moves to, and the message that it may go on there.
    """

    nodes: list[Member]
    message: Generate
    target: Member | None = None
    moved: Moved | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs | None] = field(default_factory=dict)
    finish: str = ""
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_messages: int = 0
    spans: list[StageSpan] = field(default_factory=list)
    error: Failed | None = None

    @property
    def attempt(self) -> int:
        return self.message.attempt

    @property
    def is_over(self) -> bool:
        return self.finish != "" or self.error is not None

    @property
    def output(self) -> tuple[int, ...]:
        assert sorted(self.tokens) == list(range(len(self.tokens))), "a token is missing"
        return tuple(self.tokens[index] for index in sorted(self.tokens))


class LocalCluster:
    """A cluster of prefill and decode nodes.

    Args:
        folder: model folder, loaded in float32; None for the engine of ``fake_engine``.
        num_prefill, num_decode: numbers of nodes.
        page_size, chunk_tokens: of all nodes.
        prefill_pages, decode_pages: size of each pool.
        latency: ticks (steps of the cluster) that a page is in flight.
        decode_page_size: page size of decode nodes, if it differs.
        limits: fields of ``PrefillLimits`` and ``DecodeLimits`` by name; each applies where the role has it.
        options: scheduling options of the policies.
        wants_checksums: verify every transferred page.
        wire: a wire instead of one with ``latency``.
        grammar_ticks: ticks that it takes to compile a grammar. A grammar whose text begins with "bad" fails then.
        num_outstanding: steps that a node plans before it commits the first of them. A step runs when it is
            committed, the latest possible moment.
        adapters: folders of LoRA adapters by the ids that requests name.
        window: tokens that a token sees in every layer; None: all.
        overrides: keys of the folder's config.json with other values than in the file.
        window_pages: pages of window layers, of each prefill node and of each decode node; other layers see all tokens.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        page_size: int = 16,
        chunk_tokens: int | None = None,
        prefill_pages: int = 256,
        decode_pages: int = 256,
        max_running: int = 8,
        latency: int = 0,
        attention: str = "auto",
        device: str = "cpu",
        is_cached: bool = True,
        max_queued: int | None = None,
        policy: str = "fcfs",
        rules: PriorityRules | None = None,
        stream_interval: int = 1,
        resume_tokens: int | None = None,
        reserved_tokens: int = RESERVED_TOKENS,
        decode_page_size: int | None = None,
        limits: Mapping[str, Any] | None = None,
        options: SchedulingOptions | None = None,
        wants_checksums: bool = False,
        wire: Wire | None = None,
        grammar_ticks: int = 0,
        num_outstanding: int = 1,
        adapters: Mapping[str, Path] | None = None,
        overrides: Mapping[str, Any] | None = None,
        window: int | None = None,
        window_pages: tuple[int, int] | None = None,
    ) -> None:
        self._adapters = adapters or {}
        self._overrides = overrides or {}
        self.clock = ManualClock()
        self.grammar_ticks = grammar_ticks
        self.num_outstanding = num_outstanding
        self.wire = wire or Wire(latency=latency)
        self.answers: dict[str, Answer] = {}
        self.num_starts = 0
        self._folder = folder
        self._page_sizes = {"prefill": page_size, "decode": decode_page_size or page_size}
        self._engine = {"attention": attention, "device": device, "num_slots": max_running, "num_threads": 1}
        self._is_cached = is_cached
        self._chunk = chunk_tokens
        self._max_running = max_running
        self._max_queued = max_queued
        self._policy = policy
        self._rules = rules
        self._resume_tokens = resume_tokens
        self._reserved_tokens = reserved_tokens
        self._limits = limits or {}
        self._window = window if window_pages is None else None
        self._groups = None if window is None or window_pages is None else both_groups(window)
        self._window_pages = dict(zip(("prefill", "decode"), window_pages or (0, 0), strict=True))
        self._options = options
        self._wants_checksums = wants_checksums
        self._stream_interval = stream_interval
        self.prefill = [self._prefill_node(f"prefill-{i}".ljust(32, "."), prefill_pages) for i in range(num_prefill)]
        self.decode = [self._decode_node(f"decode-{i}".ljust(32, "."), decode_pages) for i in range(num_decode)]

    def _load(self, role: str, num_pages: int) -> tuple[Any, tuple[int, ...]]:
        page_size, num_window_pages = self._page_sizes[role], self._window_pages[role]
        if self._folder is None and self._groups is not None:
            window = self._groups.window
            return FakeExecutor(num_pages, page_size, self._max_running, window, num_window_pages), ()
        if self._folder is None:
            return FakeExecutor(num_pages, page_size, self._max_running, self._window), ()
        from common.engine.factory import load_executor
        from common.engine.models.implementation import ModelSource, load_config

        config = load_config(ModelSource(str(self._folder), overrides=self._overrides))
        assert config.window == self._window
        if self._groups is not None:
            assert config.layer_groups is not None and config.layer_groups.window == self._groups.window
            self._groups = config.layer_groups
            self._engine |= {"groups": self._groups, "num_window_pages": lambda _: num_window_pages}
        executor = load_executor(config, dtype="float32", num_pages=num_pages, page_size=page_size, **self._engine)
        for adapter, place in self._adapters.items():
            executor.adapters[adapter] = executor.read_adapter(place, max_rank=64)
        return executor, config.eos_token_ids

    def _allocator(self, role: str, num_pages: int) -> WatchedAllocator:
        page_size, window_pages = self._page_sizes[role], None
        if self._groups is not None:
            most = self._most_at_once(page_size) or UNBOUNDED
            window_pages = WatchedWindowPages(
                self._groups, num_pages, self._window_pages[role], page_size=page_size, chunk_tokens=most
            )
        return WatchedAllocator(num_pages, page_size, window_pages)

    def _most_at_once(self, page_size: int) -> int | None:
        """The most tokens of one prompt in a step."""
        alignment: ChunkAlignment = self._limits.get("alignment", ChunkAlignment())
        return alignment.most_at_once(self._chunk, page_size)

    def _with_limits(self, limits: Any) -> Any:
        return dataclasses.replace(
            limits, **{name: value for name, value in self._limits.items() if hasattr(limits, name)}
        )

    def _order(self, cache: RadixCache) -> RequestOrdering:
        return RequestOrdering(make_policy(self._policy, cache, options=self._options), self._rules)

    def _sender(self, transport: Any, kv_window: KVWindow) -> Sender:
        store = transport.store
        longest = min(kv_window.max_tokens(store.num_pages), 1_000_000)
        return Sender(
            transport,
            digest="model",
            clock=self.clock,
            checksums="all" if self._wants_checksums else "off",
            max_pages=store.layout.num_pages(longest),
        )

    def _prefill_node(self, name: str, num_pages: int) -> Member:
        page_size = self._page_sizes["prefill"]
        executor, eos = self._load("prefill", num_pages)
        allocator = self._allocator("prefill", num_pages)
        cache = RadixCache(allocator, page_size, is_enabled=self._is_cached)
        kv_window = KVWindow.of_prefill(page_size, self._window, self._most_at_once(page_size))
        limits = PrefillLimits(self._max_running, self._max_queued, chunk_tokens=self._chunk, kv_window=kv_window)
        transport = InProcessWriter(self.wire, executor.pool)
        chosen = transport if self.wire.can_recall else NegotiatingWriter([transport])
        sender = self._sender(chosen, kv_window)
        scheduler = prefill.PrefillScheduler(
            cache,
            allocator,
            limits=self._with_limits(limits),
            ordering=self._order(cache),
            eos_token_ids=eos,
            is_granted=sender.is_granted,
        )
        return Member(
            name,
            PrefillRole(
                scheduler,
                sender,
                cache=cache,
                vocab_size=VOCAB_SIZE,
                adapters=self._adapters,
            ),
            executor,
            allocator,
            transport,
            transport,
        )

    def _decode_node(self, name: str, num_pages: int) -> Member:
        page_size = self._page_sizes["decode"]
        executor, eos = self._load("decode", num_pages)
        allocator = self._allocator("decode", num_pages)
        kv_window = KVWindow.of_decode(page_size, self._window, self._most_at_once(page_size), num_pages)
        cache = RadixCache(allocator, page_size, is_enabled=self._is_cached)
        transport = InProcessReader(self.wire, executor.pool)
        writer = InProcessWriter(self.wire, executor.pool)
        chosen = transport if self.wire.can_recall else NegotiatingReader([transport])
        receiver = Receiver(chosen, allocator, name=name, digest="model")
        scheduler = decode.DecodeScheduler(
            cache,
            allocator,
            limits=self._with_limits(
                decode.DecodeLimits(
                    self._max_running,
                    self._max_queued,
                    chunk_tokens=self._chunk,
                    resume_tokens=self._resume_tokens,
                    reserved_tokens=self._reserved_tokens,
                    is_retracted_by_priority=self._rules is not None,
                    kv_window=kv_window,
                )
            ),
            ordering=self._order(cache),
            eos_token_ids=eos,
            is_connected=receiver.is_connected,
        )
        chosen_writer = writer if self.wire.can_recall else NegotiatingWriter([writer])
        sender = self._sender(chosen_writer, kv_window)
        role = DecodeRole(
            scheduler,
            receiver,
            OutgoingMoves(lambda: sender, allocator, page_size),
            cache=cache,
            vocab_size=VOCAB_SIZE,
            adapters=self._adapters,
            stream_interval=self._stream_interval,
        )
        return Member(name, role, executor, allocator, transport, writer)

    @property
    def members(self) -> list[Member]:
        return [member for member in [*self.prefill, *self.decode] if member.is_alive]

    # ---- the client -------------------------------------------------------------------------------------------------

    def submit(
        self,
        rid: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        pair: tuple[int | None, int] = (0, 0),
        salt: str = "",
        timeout_s: float = 1e6,
        priority: int = 0,
        **others: Any,
    ) -> Answer:
        """Send a request to a pair of nodes, decode node first, or to a decode node alone."""
        where: dict[str, Any] = {"prefill": None, "decode": None, "timeout_s": timeout_s, **others}
        message = Generate(rid, 0, tuple(prompt), sampling, cache_salt=salt, priority=priority, **where)
        answer = self.answers[rid] = Answer([], message)
        self._send(answer, pair)
        return answer

    def continue_request(self, rid: str, *, pair: tuple[int | None, int] = (0, 0)) -> Answer:
        """End the present attempt, and make another one that continues after the tokens so far."""
        answer = self.answers[rid]
        self.abort(rid, "continued")
        answer.message = replace(answer.message, attempt=answer.attempt + 1, output=answer.output)
        self._send(answer, pair)
        return answer

    def move(self, rid: str, to: int) -> None:
        """Move a request to another decode node, with its pages."""
        answer = self.answers[rid]
        answer.target = self.decode[to]
        self.tell(answer.nodes[-1], Move(rid, answer.attempt, answer.attempt + 1, answer.target.peer))

    def _go_on_at_target(self, answer: Answer) -> None:
        """Continue a request that has stopped, once all of its tokens are here."""
        moved, target = answer.moved, answer.target
        if moved is None or target is None or len(answer.tokens) < moved.num_output:
            return
        assert len(answer.tokens) == moved.num_output, "a request decoded on after it had moved"
        answer.moved = answer.target = None
        answer.nodes = [answer.nodes[-1], target]
        source, attempt = answer.nodes[0].peer, answer.attempt + 1
        answer.message = replace(
            answer.message, attempt=attempt, output=answer.output, prefill=source, decode=target.peer
        )
        self.tell(target, answer.message)
        if not target.is_alive:
            answer.error = Failed(answer.message.rid, attempt, ErrorCode.NODE_LOST, f"{target.name} was lost")
            self.abort(answer.message.rid)

    def _send(self, answer: Answer, pair: tuple[int | None, int]) -> None:
        decode = self.decode[pair[1]]
        prefill = None if pair[0] is None else self.prefill[pair[0]]
        answer.nodes = [decode] if prefill is None else [prefill, decode]
        answer.moved = answer.target = None
        answer.message = replace(answer.message, prefill=prefill and prefill.peer, decode=decode.peer)
        for node in reversed(answer.nodes):
            self.tell(node, answer.message)

    def tell(self, member: Member, message: Message) -> None:
        """Deliver a message of the gateway to a node."""
        if member.is_alive:
            member.role.on_gateway(message, self.clock.now())

    def abort(self, rid: str, reason: EndReason = "aborted") -> None:
        for node in self.answers[rid].nodes:
            self.tell(node, Abort(rid, self.answers[rid].attempt, reason))

    def kill(self, member: Member, *, is_noticed: bool = True) -> None:
        """End a node as SIGKILL does. The other nodes notice unless ``is_noticed`` is false, and its requests fail."""
        member.is_alive = False
        member.plans.clear()
        member.writer.die()
        for rid, answer in self.answers.items():
            if member in answer.nodes and not answer.is_over:
                answer.error = Failed(rid, answer.attempt, ErrorCode.NODE_LOST, f"{member.name} was killed")
                self.abort(rid)
        for other in self.members:
            if is_noticed:
                other.role.peer_lost(member.name, self.clock.now())

    def replace(self, member: Member, num_pages: int) -> Member:
        """Replace a dead node by a new one."""
        nodes = self.prefill if member in self.prefill else self.decode
        self.num_starts += 1
        name = f"{member.name.split('-')[0]}-{len(nodes)}.{self.num_starts}".ljust(32, ".")
        make = self._prefill_node if nodes is self.prefill else self._decode_node
        nodes[nodes.index(member)] = fresh = make(name, num_pages)
        return fresh

    def run(self, max_steps: int = 20_000) -> None:
        """Step until every response has ended."""
        for _ in range(max_steps):
            if all(answer.is_over for answer in self.answers.values()):
                return
            self.step()
        raise AssertionError(
            f"not over after {max_steps} steps: {[r for r, a in self.answers.items() if not a.is_over]}"
        )

    def run_until(self, rid: str, num_tokens: int) -> None:
        """Step until a response has this many tokens."""
        while len(self.answers[rid].tokens) < num_tokens:
            self.step()

    def settle(self, num_steps: int = 10) -> None:
        """Run some more steps, so that the last messages arrive."""
        for _ in range(num_steps):
            self.step()

    # ---- one step of every node -------------------------------------------------------------------------------------

    def step(self) -> None:
        self.clock.advance(0.001)
        for member in self.members:
            self.plan(member)
        self._deliver()
        for member in self.members:
            member.role.tick(self.clock.now())
        self._deliver()
        self.wire.tick()
        for member in self.members:
            self._compile_grammars(member)
            if member.plans and self.is_due(member):
                self.commit(member)
            member.role.tick(self.clock.now())
        self._deliver()
        self.check()

    def plan(self, member: Member) -> None:
        """Plan one more step, if the node has anything to compute."""
        member.is_planned_out = (plan := member.role.plan(self.clock.now())) is None
        if plan is not None:
            grammars = [admit.sampling.grammar for admit in plan.admits if admit.sampling.grammar]
            assert all(member.grammars[text] is None for text in grammars), "a row's grammar is not compiled"
            member.plans.append(plan)
            member.allocator.planned(plan)
        elif not member.plans and self._policy != "random":
            # The event loop may sleep now, so only an event, or another random order, may change this.
            assert member.role.plan(self.clock.now()) is None, f"{member.name} planned nothing, and then something"

    def is_due(self, member: Member) -> bool:
        """Whether the oldest step must be committed before another is planned."""
        return len(member.plans) >= self.num_outstanding or member.is_planned_out

    def commit(self, member: Member) -> None:
        """Run the oldest step, and commit its result."""
        result = self._result(member, member.plans.pop(0))
        member.allocator.committed()
        member.role.commit(result, self.clock.now())

    def _result(self, member: Member, plan: StepPlan) -> StepResult:
        result: StepResult = member.executor.run(plan)
        return result

    def check(self) -> None:
        for member in self.members:
            member.role.check()

    def _take_grammars(self, member: Member) -> None:
        for effect in member.role.outbox.grammars:
            if isinstance(effect, CompileGrammar):
                if self._folder is not None:
                    member.executor.compile_grammar(effect.grammar).result()
                member.grammars[effect.grammar] = self.wire.num_ticks + self._compile_ticks()
            else:
                del member.grammars[effect.grammar]
                if self._folder is not None:
                    member.executor.drop_grammar(effect.grammar)
        member.role.outbox.grammars.clear()

    def _compile_ticks(self) -> int:
        return self.grammar_ticks

    def _compile_grammars(self, member: Member) -> int:
        """Tell the node which grammars have been compiled, and return their number."""
        now = self.wire.num_ticks
        ready = [text for text, tick in member.grammars.items() if tick is not None and tick <= now]
        for grammar in ready:
            member.grammars[grammar] = None
            if grammar.startswith("bad"):
                member.role.grammar_failed(grammar, f"{grammar} cannot be compiled", self.clock.now())
            else:
                member.role.grammar_compiled(grammar, self.clock.now())
        return len(ready)

    def _deliver(self) -> None:
        names = {member.name: member for member in self.members}
        moved = True
        while moved:
            moved = False
            for member in self.members:
                outbox = member.role.outbox
                mail, outbox.peers = outbox.peers, []
                news, outbox.gateway = outbox.gateway, []
                outbox.dial.clear()
                outbox.hang_up.clear()
                self._take_grammars(member)
                for to, message in mail:
                    if to in names:
                        names[to].role.on_peer(member.name, message, self.clock.now())
                for message in news:
                    self._hear(member, message)
                moved |= bool(mail or news)

    def _hear(self, sender: Member, message: Message) -> None:
        assert isinstance(message, Tokens | Spans | Failed | Moved)
        answer = self.answers[message.rid]
        if message.attempt != answer.attempt:
            return  # of an earlier attempt, as in the gateway
        if isinstance(message, Spans):
            answer.spans += message.spans
            return
        if isinstance(message, Moved):
            answer.moved = message
        elif isinstance(message, Failed):
            if not answer.is_over:
                answer.error = message
        else:
            answer.num_messages += 1
            for offset, token in enumerate(message.tokens):
                assert message.index + offset not in answer.tokens, "a token was sent twice"
                answer.tokens[message.index + offset] = token
                logprobs = unpack_logprobs(message.logprobs[offset]) if message.logprobs else None
                answer.logprobs[message.index + offset] = logprobs
            answer.finish = answer.finish or message.finish
            assert message.index == 0 or not message.prompt_logprobs, "prompt log-probabilities arrived late"
            answer.prompt_logprobs += tuple(map(unpack_logprobs, message.prompt_logprobs))
            answer.cached_tokens = max(answer.cached_tokens, message.cached_tokens)
        if answer.is_over:
            for node in answer.nodes:
                if node is not sender:
                    self.tell(node, Abort(message.rid, message.attempt))
        else:
            self._go_on_at_target(answer)

    def counters(self, member: Member) -> dict[str, float]:
        counters: dict[str, float] = member.role.counters()
        return counters

    def close(self) -> None:
        for member in [*self.prefill, *self.decode]:
            member.transport.close()
            member.writer.close()
            member.executor.close()


def sampling(max_new: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new, temperature=0.0, **others)


def prompt_of(length: int, first: int = 7) -> tuple[int, ...]:
    return tuple((first + 3 * i) % 101 for i in range(length))


def lose_gateway(role: PrefillRole | DecodeRole, now: float) -> None:
    """Do what the event loop of a node does when the gateway of all its requests is lost."""
    for rid, attempt in list(role.requests()):
        role.on_gateway(Abort(rid, attempt), now)


def assert_all_pages_are_released(cluster: LocalCluster) -> None:
    for member in cluster.members:
        load = member.role.load()
        assert load.num_running == 0
        assert load.num_waiting == 0
        assert load.num_quarantined_pages == 0
        num_pages = member.allocator.num_pages
        assert load.num_free_pages + load.num_cached_pages == num_pages, "a page leaked"
        gauges = member.allocator.gauges()
        assert gauges.get("held_window_pages", 0) == 0, "a window page leaked"
        assert gauges.get("unreserved_window_pages") == gauges.get("window_pages"), "a window page is still reserved"
