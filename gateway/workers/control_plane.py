"""The gateway's side of the control plane: nodes that register and go, and their messages.

One bound socket for the nodes of all models, read from the event loop. Requests are the dispatcher's.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import zmq

from common.clock import Clock
from common.wire.mailbox import PROBE_EVERY_S, Envelope, Mailbox
from common.wire.messages import (  # fmt: skip
    MAX_PREFILL_NODES,
    Adapters,
    Decision,
    Decisions,
    Deregister,
    Done,
    Drain,
    Failed,
    Find,
    Flush,
    Flushed,
    Found,
    GetDecisions,
    Heartbeat,
    HeartbeatAck,
    KeptOutput,
    Message,
    Moved,
    OtherLoad,
    Pairs,
    Ping,
    PrefillNodes,
    ProfileAnswer,
    Register,
    Registered,
    Spans,
    StartProfile,
    StopProfile,
    Tokens,
    Unknown,
)
from gateway.requests.admission.priority_review import PriorityReview
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.output_processor import StageReport
from gateway.tracing.timelines import Timelines
from gateway.workers.adapter_changes import AdapterChanges
from gateway.workers.pool import WorkerPool, WorkerPools
from gateway.workers.registry import Worker
from gateway.workers.role_changes import RoleChanges
from gateway.workers.rpc import NodeRpc

log = logging.getLogger(__name__)

RECEIVE_AT_ONCE = 1_000
#: Changes of the prefill nodes within this time are announced together, since each announcement sends the whole list to
#: every decode node.
ANNOUNCE_AFTER_S = 0.1
#: Keys of one ``Find``. A node takes 1,024 and answers in one frame, in which as many long outputs do not fit.
FIND_AT_ONCE = 64
#: A node with the name of a registered one waits this long for the old one's loss to be noticed, before it is refused.
NAMESAKE_WAIT_S = 0.5


class MailboxChannel:
    """The socket to all nodes, watched by the running event loop.

    Args:
        bind: ``tcp://host:port`` of the mailbox.

    Attributes:
        address: ``host:port`` that nodes dial.
    """

    def __init__(self, mailbox: Mailbox, bind: str) -> None:
        self._mailbox = mailbox
        self.address = f"{bind.removeprefix('tcp://').rpartition(':')[0]}:{mailbox.address.rpartition(':')[2]}"
        self._loop = asyncio.get_running_loop()
        self._fds = [int(socket.get(zmq.FD)) for socket in mailbox.sockets]
        self._listener: ControlPlane | None = None
        self._unsent: dict[str, list[bytes]] = {}  # encoded messages by incarnation, until the end of this turn
        self._is_turn_due = False
        self.is_closed = False

    def start(self, listener: "ControlPlane") -> None:
        """Begin to listen; the event loop calls the listener, never the caller of another method."""
        self._listener = listener
        messages, *connections = self._fds
        self._loop.add_reader(messages, listener.on_readable)
        for fd in connections:
            self._loop.add_reader(fd, listener.on_disconnect)

    def close(self) -> None:
        self._flush()
        self.is_closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._mailbox.close()

    @property
    def is_probing(self) -> bool:
        """A look for lost peers must be repeated soon."""
        return self._mailbox.is_probing

    @property
    def has_unread(self) -> bool:
        """The last call of ``receive`` may have left something."""
        return self._mailbox.has_unread

    def send(self, message: Message, *incarnations: str) -> None:
        """Send a message at the end of this turn; the listener is told of nodes that cannot be reached.

        All messages of a turn to one node leave together: each use of the socket wakes ZMQ's thread.
        """
        encoded = self._mailbox.encode(message)
        for incarnation in incarnations:
            self._unsent.setdefault(incarnation, []).append(encoded)
        self.turn_soon()

    def ping(self, incarnation: str) -> bool:
        """Whether a node can be reached, as far as ZMQ knows."""
        self.turn_soon()
        return self._mailbox.send(Ping(), target=incarnation)

    def lost_peers(self, incarnations: list[str]) -> list[str]:
        """The given nodes whose connection has closed."""
        return self._mailbox.lost_peers(incarnations)

    def receive(self, is_known: Callable[[str], bool]) -> list[Envelope]:
        """The messages that have arrived, of about ``RECEIVE_AT_ONCE`` frames at most; see ``Mailbox.receive``."""
        if self.is_closed:
            return []
        envelopes = self._mailbox.receive(RECEIVE_AT_ONCE, is_known=is_known)
        if self._mailbox.has_unread:
            self.turn_soon()
        return envelopes

    def turn_soon(self) -> None:
        """Send and receive soon. Each use of the socket may swallow the edge that announces input."""
        if not self._is_turn_due and self._listener is not None:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        if not self.is_closed and self._listener is not None:
            for incarnation in self._flush():
                self._listener.lose(incarnation)
            self._listener.on_readable()

    def _flush(self) -> list[str]:
        """Send what is due; return the nodes that cannot be reached."""
        unsent, self._unsent = self._unsent, {}
        send = self._mailbox.send_encoded
        return [incarnation for incarnation, messages in unsent.items() if not send(messages, incarnation)]


class ControlPlane:
    """Keeps the registries up to date and passes the nodes' messages to the dispatcher.

    Args:
        pools: the nodes of each model; registered and removed only here.

    Attributes:
        role_changes: changes roles of nodes.
        adapter_changes: loads and unloads LoRA adapters.
    """

    def __init__(
        self,
        channel: MailboxChannel,
        pools: WorkerPools,
        dispatcher: Dispatcher,
        *,
        clock: Clock,
        timelines: Timelines,
        review: PriorityReview,
    ) -> None:
        self.pools = pools
        self.address = channel.address
        self._channel = channel
        self._dispatcher = dispatcher
        self._clock = clock
        self._timelines = timelines
        self._review = review
        self._loop = asyncio.get_running_loop()
        self._rpc = NodeRpc(channel.send)
        self.role_changes = RoleChanges(pools, self._rpc, dispatcher.on_workers_added)
        self.adapter_changes = AdapterChanges(self._rpc, channel.send, dispatcher)
        self._is_probe_due = False
        self._unannounced: set[str] = set()  # models whose prefill nodes have changed
        self._tick_handle: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Tokens: dispatcher.on_tokens,
            Spans: self._on_spans,
            Moved: dispatcher.on_moved,
            Failed: dispatcher.on_failed,
            Heartbeat: self._on_heartbeat,
            OtherLoad: self._on_other_load,
            Pairs: self._on_pairs,
            Register: self._on_register,
            Deregister: self._on_deregister,
            Flushed: self._rpc.on_answer,
            Decisions: self._rpc.on_answer,
            ProfileAnswer: self._rpc.on_answer,
            Adapters: self._on_adapters,
            Done: self._rpc.on_answer,
            Found: self._rpc.on_answer,
            Ping: lambda sender, message: None,
        }

    def start(self) -> None:
        self._channel.start(self)
        self._tick()

    def close(self) -> None:
        """Stop listening. Requests must have ended before."""
        assert not self._dispatcher.num_in_flight
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self.role_changes.close()
        self._channel.close()

    # ---- messages -------------------------------------------------------------------------------------------------

    def on_readable(self) -> None:
        """Handle what has arrived; an unexpected error ends only the request that the message is about."""
        handlers = self._handlers
        for envelope in self._channel.receive(self.pools.has):
            message = envelope.message
            try:
                handlers[type(message)](envelope.sender, message)
            except Exception:
                log.exception("a %s message failed", type(message).__name__)
                self._dispatcher.fail_internal(getattr(message, "rid", ""))

    def on_disconnect(self) -> None:
        """Remove the nodes whose connections have closed, after handling the messages that they sent before."""
        self.on_readable()
        self._channel.turn_soon()
        for incarnation in self._channel.lost_peers([node.incarnation for node in self.pools.workers()]):
            self.lose(incarnation)
        if self._channel.is_probing and not self._is_probe_due:
            self._is_probe_due = True
            self._loop.call_later(PROBE_EVERY_S, self._probe_again)

    def _probe_again(self) -> None:
        self._is_probe_due = False
        if not self._channel.is_closed:
            self.on_disconnect()

    def _tick(self) -> None:
        self._tick_handle = self._loop.call_later(1.0, self._tick)
        self.on_disconnect()  # reads waiting heartbeats first, however late the loop is
        if not self._channel.has_unread:  # else heartbeats may wait behind what was read
            for incarnation in [one for pool in self.pools for one in pool.registry.silent_workers(self._clock.now())]:
                self.lose(incarnation)
        self._dispatcher.tick(self._clock.now())
        self._review.tick(self._clock.now())
        self.role_changes.tick(self._clock.now())
        self.adapter_changes.tick(self.pools)
        for pool in self.pools:  # last: it depends on what nodes say, and nothing depends on it
            workers = list(pool.registry.workers.values())
            num_in_flight, num_waiting = pool.admission.num_in_flight, len(pool.queue)
            pool.advisor.tick(workers, num_in_flight=num_in_flight, num_waiting=num_waiting, now=self._clock.now())

    def _on_heartbeat(self, sender: str, message: Heartbeat) -> None:
        pool = self.pools.of(sender)
        if pool is None:
            self._channel.send(Unknown(), sender)
        else:
            acknowledged = HeartbeatAck(self._clock.now(), pool.admission.num_in_flight, pool.advisor.load)
            self._channel.send(acknowledged, sender)
            takes_more = pool.registry.on_heartbeat(sender, message, self._clock.now())
            pool.router.observe(pool.registry.workers[sender])
            if takes_more:
                self._dispatcher.on_workers_added(pool)

    def _on_other_load(self, sender: str, message: OtherLoad) -> None:
        pool = self.pools.of(sender)
        if pool is not None:
            is_prefill = pool.registry.workers[sender].register.role == "prefill"
            pool.router.set_other_load(sender, message.num_to_compute if is_prefill else message.num_to_hold)

    def _on_spans(self, sender: str, message: Spans) -> None:
        """Pass spans to their output, or to the timeline of one that has ended."""
        pool = self.pools.of(sender)
        if pool is None:
            return
        node = pool.registry.workers[sender]
        report = StageReport(node.name, *node.clock.estimate(self._clock.now()), message.spans)
        if not self._dispatcher.on_spans(sender, message, report):
            self._timelines.reported(message.rid, message.attempt, report)

    def _on_pairs(self, sender: str, message: Pairs) -> None:
        pool = self.pools.of(sender)
        if pool is None:
            return
        node = pool.registry.workers[sender]
        for pair in message.pairs:
            if pair.problem and pair.incarnation not in node.failed_peers:
                log.warning("sending no requests to the pair %s and %s: %s", node.name, pair.peer, pair.problem)
        if pool.registry.set_pairs(sender, message.pairs):
            self._dispatcher.on_workers_added(pool)

    def _on_adapters(self, sender: str, message: Adapters) -> None:
        pool = self.pools.of(sender)
        if pool is None:
            return
        node = pool.registry.workers[sender]
        if message.error:
            log.warning("node %s: %s", node.name, message.error)
        self.adapter_changes.changed(pool, node, message)
        self._dispatcher.on_workers_added(pool)
        self._rpc.on_answer(sender, message)

    def _on_register(self, sender: str, message: Register) -> None:
        namesake = self.pools.namesake(message)
        if namesake is None or namesake.incarnation == sender:
            self._admit(sender, message)
        elif message.previous == namesake.incarnation:  # the same process in another role, with its cache
            self.lose(namesake.incarnation)
            self._admit(sender, message)
        elif self._channel.ping(namesake.incarnation):  # the old node may have died a moment ago
            self._loop.call_later(NAMESAKE_WAIT_S, self._admit_later, sender, message)
        else:
            self.lose(namesake.incarnation)
            self._admit(sender, message)

    def _admit_later(self, sender: str, message: Register) -> None:
        """Probe the old node once more, and then admit or refuse the new one.

        If many nodes are lost at once, the first probes do not reach all of them.
        """
        if self._channel.is_closed:
            return
        namesake = self.pools.namesake(message)
        if namesake is not None and namesake.incarnation != sender and not self._channel.ping(namesake.incarnation):
            self.lose(namesake.incarnation)
        self._admit(sender, message)

    def _admit(self, sender: str, message: Register) -> None:
        if self._channel.is_closed:
            return
        known_pool = self.pools.of(sender)
        if known_pool is not None:  # it has reconnected and ended all its requests
            self._clear_state(known_pool, sender, message.name)
        answer = self.pools.register(sender, message, self._clock.now())
        self._channel.send(answer, sender)
        if isinstance(answer, Registered):
            if known_pool is None:
                log.info("%s node %s registered (start %d)", message.role, message.name, answer.starts)
            pool = self.pools[message.model]
            node = pool.registry.workers[sender]
            self._dispatcher.on_workers_added(pool)
            self._announce_prefill_nodes(pool, sender)
            self.role_changes.registered(node)
            self.adapter_changes.registered(pool, node)
        else:
            log.warning("%s node %s refused: %s", message.role, message.name, answer.reason)
            if known_pool is not None:
                known_pool.registry.remove(sender)

    def _announce_prefill_nodes(self, pool: WorkerPool, changed: str) -> None:
        """Tell decode nodes which prefill nodes may send them pages, so that they connect before the first request.

        Args:
            changed: incarnation of the node that has come or drains; of a new decode node, nothing changes for the
                others.
        """
        came = pool.registry.workers.get(changed)
        if came is not None and came.register.role == "decode" and not came.is_draining:
            self._tell_prefill_nodes(pool, [came])
        elif pool.model not in self._unannounced:
            self._unannounced.add(pool.model)
            self._loop.call_later(ANNOUNCE_AFTER_S, self._announce_now, pool)

    def _announce_now(self, pool: WorkerPool) -> None:
        self._unannounced.discard(pool.model)
        if not self._channel.is_closed:
            decodes = [node for node in pool.registry.workers.values() if node.register.role == "decode"]
            self._tell_prefill_nodes(pool, decodes)

    def _tell_prefill_nodes(self, pool: WorkerPool, decodes: Sequence[Worker]) -> None:
        sources = pool.registry.page_sources()
        alike: dict[str, list[str]] = {}  # by revision
        for node in decodes:
            if node.is_draining:
                peers = [other.peer for other in sources[node.revision] if other is not node]
                self._channel.send(PrefillNodes(tuple(peers[:MAX_PREFILL_NODES])), node.incarnation)
            else:
                alike.setdefault(node.revision, []).append(node.incarnation)
        for revision, incarnations in alike.items():
            peers = [node.peer for node in sources.get(revision, ())]
            self._channel.send(PrefillNodes(tuple(peers[:MAX_PREFILL_NODES])), *incarnations)

    def _on_deregister(self, sender: str, message: Deregister) -> None:
        pool = self.pools.of(sender)
        if pool is not None:
            node = pool.registry.workers[sender]
            is_known = node.says_it_drains
            pool.registry.on_deregister(sender, is_empty=message.is_empty)
            if not is_known:
                num_left = self._dispatcher.num_at(sender)
                log.info("node %s takes no new requests; requests left there: %d", node.name, num_left)
                self._announce_prefill_nodes(pool, sender)
            self._dispatcher.pump_soon()

    def lose(self, incarnation: str) -> None:
        """Remove a node that is gone or cannot be reached; its requests continue on others."""
        pool = self.pools.of(incarnation)
        if pool is None:
            return
        node = pool.registry.workers[incarnation]
        pool.registry.remove(incarnation)
        level = logging.INFO if node.is_draining else logging.WARNING
        num_left = self._dispatcher.num_at(incarnation)
        log.log(level, "%s node %s is gone; requests left there: %d", node.register.role, node.name, num_left)
        self.role_changes.lost(node)
        alive_until = pool.registry.alive_until(node, self._clock.now())
        self._clear_state(pool, incarnation, node.name, is_empty=node.is_empty, alive_until=alive_until)
        if node.register.role == "prefill" or node.is_draining:
            self._announce_prefill_nodes(pool, incarnation)

    def _clear_state(
        self, pool: WorkerPool, incarnation: str, name: str, *, is_empty: bool = False, alive_until: float = math.inf
    ) -> None:
        """Clear the state of a node that is no longer registered; its requests continue on others."""
        pool.router.remove_worker(incarnation)
        self._rpc.on_node_gone(incarnation)
        self._dispatcher.on_worker_lost(incarnation, name, is_empty=is_empty, alive_until=alive_until)

    # ---- for the admin endpoints ------------------------------------------------------------------------------------

    async def flush(self, timeout_s: float) -> list[tuple[Worker, int | None]]:
        """Empty every node's prefix cache. Return each node with its dropped pages; None if it did not answer."""
        nodes = self.pools.workers()
        for pool in self.pools:
            pool.router.clear_prefixes()
        answers = await self._rpc.call([node.incarnation for node in nodes], Flush(), Flushed, timeout_s)
        pages = {incarnation: answer.num_pages for incarnation, answer in answers.items()}
        return [(node, pages.get(node.incarnation)) for node in nodes]

    async def decisions(self, node: Worker, limit: int, timeout_s: float) -> tuple[Decision, ...] | None:
        """The last decisions of a node, newest last; None if it did not answer."""
        answers = await self._rpc.call([node.incarnation], GetDecisions(limit), Decisions, timeout_s)
        answer = answers.get(node.incarnation)
        return None if answer is None else answer.decisions[-limit:]

    async def drain(self, node: Worker, drain_timeout_s: float, timeout_s: float) -> bool:
        """Have a node drain and stop; False if it did not answer."""
        answers = await self._rpc.call([node.incarnation], Drain(drain_timeout_s), Done, timeout_s)
        if node.incarnation in answers:
            self.role_changes.drained(node)
        return node.incarnation in answers

    async def profile(
        self, message: StartProfile | StopProfile, timeout_s: float
    ) -> list[tuple[Worker, ProfileAnswer | None]]:
        """Start or stop profiles on all nodes. Return each node with its answer; None if it did not answer."""
        nodes = self.pools.workers()
        answers = await self._rpc.call([node.incarnation for node in nodes], message, ProfileAnswer, timeout_s)
        return [(node, answers.get(node.incarnation)) for node in nodes]

    async def find(self, model: str, keys: Sequence[str], timeout_s: float) -> dict[str, tuple[KeptOutput, ...]]:
        """What each node of a model has of the outputs of requests with these keys, by the node's incarnation.

        Nodes end these outputs. They are asked at once, before anything that is sent to them later.
        """
        nodes = list(self.pools[model].registry.workers)
        questions = [Find(tuple(keys[at : at + FIND_AT_ONCE])) for at in range(0, len(keys), FIND_AT_ONCE)]
        answers = await asyncio.gather(*(self._rpc.call(nodes, one, Found, timeout_s) for one in questions))
        found: dict[str, tuple[KeptOutput, ...]] = {}
        for incarnation, answer in chain.from_iterable(one.items() for one in answers):
            found[incarnation] = found.get(incarnation, ()) + answer.outputs
        return found
