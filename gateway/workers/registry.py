"""The registered nodes of one model. Pure: messages and instants come in, answers go out.

The first node determines what is served; a node that differs from it is refused with a sentence that names the
difference. Configuration and weights may differ: nodes with the same are one *revision*, and a request is served by
nodes of one revision. A ``Worker`` is one start of one process: a new start under the same name is another worker,
accepted once the old one is gone.
"""

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from common.cache.page_layout import layout_conflict, ranks_conflict
from common.config.shared import Role
from common.errors import ErrorCode, RequestError
from common.wire.messages import MAX_SECONDS, Adapter, Heartbeat, PairState, Peer, Refused, Register, Registered
from gateway.workers.clock_offset import ClockOffset
from gateway.workers.routing.candidates import can_pair
from gateway.workers.routing.pair_health import PairHealth, PairKey

#: Fields that must be equal on all nodes, and their names in error messages.
AGREE = {
    "vocab_size": "vocabulary size",
    "context_length": "context length (--context-length)",
    "eos_token_ids": "end tokens",
    "generation": "generation defaults",
}
MAX_STARTS_REMEMBERED = 64
MAX_NAMES_REMEMBERED = 65_536


@dataclass(slots=True, eq=False)
class Worker:
    """One start of one node, as it last described itself.

    Attributes:
        starts: number of this start among those of nodes with its name.
        reported_peers: incarnations of workers with which it cannot exchange pages at present, as it says itself.
        failed_peers: these, and those with which transfers have failed lately.
        peer: how other nodes reach it.
        clock: how far its clock is ahead of the gateway's.
        step_s, prompt_token_s, send_token_s: what a step without prompts takes, what a prompt token adds to a step, and
            what sending the pages of a token takes, as last measured there; 0: unknown.
        is_draining: it gets no new requests, since it stops, changes its role or cannot be reached.
        says_it_drains: it drains as it says itself.
        max_running: requests that it runs at once for this gateway.
        is_reserved: it serves a request that may have killed other nodes, and gets no new ones meanwhile.
        revision: configuration digest and weight version.
        is_empty: it drains, and is done with all requests.
        adapters: ids of its LoRA adapters, by name, those included that are withdrawn.
        kind: nodes of one kind give the same answer in ``_conflict``.
    """

    incarnation: str
    register: Register
    starts: int
    seen_at: float
    heartbeat: Heartbeat | None = None
    pairs: tuple[PairState, ...] = ()
    reported_peers: frozenset[str] = frozenset()
    failed_peers: frozenset[str] = frozenset()
    is_reserved: bool = False
    is_empty: bool = False
    clock: ClockOffset = field(default_factory=ClockOffset)
    step_s: float = 0.0
    prompt_token_s: float = 0.0
    send_token_s: float = 0.0
    name: str = field(init=False)
    peer: Peer = field(init=False)
    capacity_tokens: int = field(init=False)
    longest_tokens: int = field(init=False)
    most_held_tokens: int = field(init=False)
    max_running: int = field(init=False)
    revision: str = field(init=False)
    adapters: Mapping[str, str] = field(init=False)
    kind: tuple[object, ...] = field(init=False)
    is_draining: bool = field(init=False)
    says_it_drains: bool = field(init=False)

    def __post_init__(self) -> None:
        register = self.register
        self.capacity_tokens = register.num_pages * register.layout.page_size
        self.longest_tokens = max(register.longest_tokens, self.capacity_tokens)
        self.most_held_tokens = register.most_held_tokens
        self.max_running = register.max_running if register.share is None else register.share
        self.name = register.name
        self.is_draining = self.says_it_drains = register.is_draining
        self.peer = Peer(self.name, self.incarnation, register.address, register.public_key, register.num_ranks)
        self.revision = sys.intern(f"{register.digest}/{register.weight_version}")
        agreed = [str(getattr(register, name)) for name in AGREE]
        self.kind = (register.role, self.revision, *agreed, register.layout, register.transports)
        self.set_adapters(register.adapters, register.unloaded)

    def set_adapters(self, adapters: tuple[Adapter, ...], unloaded: dict[str, int]) -> None:
        self.register = msgspec.structs.replace(self.register, adapters=adapters, unloaded=unloaded)
        self.adapters = {adapter.name: adapter.id for adapter in adapters}

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        self.heartbeat, self.seen_at = heartbeat, now
        costs = heartbeat.costs
        self.step_s, self.prompt_token_s = costs.step_s, costs.prompt_token_s
        if costs.transfer_bytes_per_s:
            send_token_s = self.register.layout.layout().bytes_per_token / costs.transfer_bytes_per_s
            self.send_token_s = min(send_token_s, MAX_SECONDS)


class LastChange(NamedTuple):
    """The last change of an adapter.

    Attributes:
        path: from which it was loaded; None if it was unloaded.
        adapter: id of what was loaded.
    """

    number: int
    path: str | None
    adapter: str = ""

    @property
    def rank(self) -> tuple[int, bool]:
        """Of two changes of a name, the one of the higher rank counts."""
        return self.number, self.path is None


NO_CHANGE = LastChange(0, "")


class SamplingDefaults(NamedTuple):
    """The sampling parameters that a model names in its generation defaults; neutral values for others."""

    temperature: float = 1.0
    top_k: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, generation: Mapping[str, float]) -> "SamplingDefaults":
        return cls(**{name: float(generation[name]) for name in cls._fields if name in generation})


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The bounds that the registered nodes set for one request.

    Attributes:
        context_length: tokens of prompt and output together.
        prompt_tokens: of the longest prompt that the pool of any node can take.
        total_tokens, common_tokens: of the longest request that the largest and the smallest decode pool can take.
        defaults: the model's own sampling defaults.
        max_running: requests that all decode nodes run at once.
    """

    context_length: int
    vocab_size: int
    prompt_tokens: int
    total_tokens: int
    common_tokens: int
    defaults: SamplingDefaults
    max_running: int


class Registry:
    """The table of workers.

    Args:
        num_token_ids, tokenizer_digest: of the gateway's tokenizer; an empty digest is not compared.
        needs_prefill: a request needs a prefill node; otherwise decode nodes compute prompts.
        recovery_timeout_s: how long new requests are accepted after the loss of the last node of a kind.

    Attributes:
        workers: by incarnation, in order of arrival.
        prefills, decodes: those that take new requests. A change of a worker that the router does not observe makes
            new tuples.
        draining: incarnations of those that drain.
        limits: None while the workers cannot serve a request.
        accepted: the limits of new requests: those of the workers, or the last ones while a request may still wait for
            workers to come back; None if new requests are refused.
        health: of the pairs; only this class changes it.
        adapters: ids of the LoRA adapters that new requests may have, by name: nodes that can serve a request together
            have equal ones. The last ones while the workers cannot serve a request.
        last_changes: of adapters, by name, as far as gateways have had them changed.
    """

    def __init__(
        self,
        *,
        num_token_ids: int,
        tokenizer_digest: str = "",
        heartbeat_s: float = 1.0,
        lost_after_s: float = 10.0,
        needs_prefill: bool = True,
        recovery_timeout_s: float = 0.0,
    ) -> None:
        self._needs_prefill = needs_prefill
        self._num_token_ids = num_token_ids
        self._tokenizer_digest = tokenizer_digest
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._starts: dict[str, dict[str, int]] = {}  # by name, oldest first: incarnation -> number of that start
        self.workers: dict[str, Worker] = {}
        self.prefills: tuple[Worker, ...] = ()
        self.decodes: tuple[Worker, ...] = ()
        self.draining: frozenset[str] = frozenset()
        self._limiting: frozenset[str] = frozenset()  # incarnations of decode nodes whose capacity the limits count
        self._holders: dict[str, tuple[tuple[Worker, ...], tuple[Worker, ...]]] = {}  # of adapters, as in ``able``
        self.limits: ServingLimits | None = None
        self.accepted: ServingLimits | None = None
        self._recovery_timeout_s = recovery_timeout_s
        self._served_at = 0.0  # when the workers could last serve a request
        self.health = PairHealth()
        self.adapters: dict[str, str] = {}
        self.last_changes: dict[str, LastChange] = {}

    def register(self, incarnation: str, register: Register, now: float) -> Registered | Refused:
        """Add a worker, or replace its description. A refused worker is removed."""
        known = self.workers.get(incarnation)
        others = [node for node in self.workers.values() if node is not known]
        refusal = self._refusal(incarnation, register, others)
        if refusal:
            self.remove(incarnation)
            return Refused(refusal)
        starts = self._starts[register.name] = self._starts.pop(register.name, {})
        if len(self._starts) > MAX_NAMES_REMEMBERED:
            del self._starts[next(iter(self._starts))]
        if incarnation not in starts:
            starts[incarnation] = starts.get(register.previous) or max(starts.values(), default=0) + 1
            if len(starts) > MAX_STARTS_REMEMBERED:
                del starts[next(iter(starts))]
        worker = Worker(incarnation, register, starts[incarnation], now)
        if known is not None:
            worker = replace(worker, clock=known.clock)
            if known.heartbeat is not None:
                worker.on_heartbeat(known.heartbeat, now)
        self.workers[incarnation] = worker
        self._changed()
        if self.limits is not None:
            self._served_at = now
        return Registered(starts[incarnation], self._heartbeat_s, sent_at=now)

    def _refusal(self, incarnation: str, register: Register, others: list[Worker]) -> str:
        """Why the worker is refused, as a sentence; empty if it is accepted."""
        if self._tokenizer_digest and register.tokenizer_digest not in ("", self._tokenizer_digest):
            return (
                f"the tokenizer.json of node {register.name} differs from the gateway's: give both the same --model and"
                " --revision"
            )
        # A tokenizer may have more ids than its own model, as that of Gemma 3 1B, which has a token for images.
        if not register.tokenizer_digest and register.vocab_size < self._num_token_ids:
            return (
                f"the gateway's tokenizer has {self._num_token_ids} ids, the model of node {register.name} only"
                f" {register.vocab_size}: give both the same --model, and the node the model's tokenizer.json"
            )
        if register.role == "prefill" and not register.address:
            return f"the prefill node {register.name} gives no address at which decode nodes reach it"
        if problem := ranks_conflict(register.layout.num_kv_heads, register.num_ranks):
            return f"node {register.name} is broken: {problem}"
        starts = self._starts.get(register.name, {})
        if incarnation in starts and starts[incarnation] < max(starts.values()):
            return f"a later start of node {register.name} has already been here"
        if any(other.name == register.name for other in others):
            return f"a node named {register.name} is registered already; give this one another --name"
        return _first_conflict(register, others)

    def named(self, name: str) -> Worker | None:
        return next((node for node in self.workers.values() if node.name == name), None)

    def on_heartbeat(self, incarnation: str, heartbeat: Heartbeat, now: float) -> bool:
        """Record the state of a worker; return whether it takes more requests of this gateway than before."""
        node = self.workers[incarnation]
        before = node.max_running
        node.max_running = node.register.max_running if heartbeat.share is None else heartbeat.share
        if node.max_running != before and self.limits is not None and incarnation in self._limiting:
            self.limits = replace(self.limits, max_running=self.limits.max_running + node.max_running - before)
            self.accepted = self.limits
        node.on_heartbeat(heartbeat, now)
        if heartbeat.gateway_sent_at:
            node.clock.sent_by_gateway(heartbeat.gateway_sent_at, heartbeat.received_at, now)
        if heartbeat.sent_at:
            node.clock.sent_by_node(heartbeat.sent_at, now)
        return node.max_running > before

    def set_pairs(self, incarnation: str, pairs: tuple[PairState, ...]) -> bool:
        """Record a worker's pairs; return whether a pair may work that did not before."""
        node = self.workers[incarnation]
        failed, before = frozenset(pair.incarnation for pair in pairs if pair.problem), node.reported_peers
        node.pairs = pairs
        if failed != before:
            node.reported_peers = failed
            self._changed()
        return bool(before - failed)

    # ---- LoRA adapters ----------------------------------------------------------------------------------------------

    def set_adapters(self, incarnation: str, adapters: tuple[Adapter, ...], unloaded: dict[str, int]) -> None:
        """Record the adapters of a worker."""
        self.workers[incarnation].set_adapters(adapters, unloaded)
        self._changed()

    def set_last_change(self, name: str, change: LastChange) -> None:
        """Let new requests have what was loaded last, or nothing after an unload, whatever nodes have."""
        self.last_changes[name] = change
        if self.adapters.get(name) != change.adapter:
            self.adapters.pop(name, None)
        self._changed()

    def forget_last_change(self, name: str) -> None:
        del self.last_changes[name]
        self._changed()

    def is_withdrawn(self, name: str) -> bool:
        """Whether an adapter is being unloaded, or has been."""
        return self.last_changes.get(name, NO_CHANGE).path is None

    def with_replaced(self, names: Collection[str]) -> list[Worker]:
        """The workers that have another adapter of one of these names than the one that was loaded last."""
        return [
            node
            for node in self.workers.values()
            if any(
                one.name in names and not self.is_withdrawn(one.name) and self._is_outdated(one)
                for one in node.register.adapters
            )
        ]

    def able(self, adapter: str) -> tuple[tuple[Worker, ...], tuple[Worker, ...]]:
        """Those of ``prefills`` and ``decodes`` that have an adapter, by its id; all of them for the model itself."""
        if not adapter:
            return self.prefills, self.decodes
        found = self._holders.get(adapter)
        if found is None:
            name = adapter.rpartition("@")[0]
            prefills = tuple([node for node in self.prefills if node.adapters.get(name) == adapter])
            decodes = tuple([node for node in self.decodes if node.adapters.get(name) == adapter])
            found = self._holders[adapter] = prefills, decodes
        return found

    def check_adapter(self, adapter: str) -> None:
        """Raises RequestError: this adapter has been unloaded or replaced since a request for it came, or no nodes can
        serve it any more."""
        name = adapter.rpartition("@")[0]
        known = self.adapters.get(name)
        if known == adapter:
            return
        error = self.refuse_adapter(name) if known is None else None
        message = f"the adapter {name!r} has been unloaded"
        raise error or RequestError(ErrorCode.MODEL_NOT_FOUND, message, param="model")

    def knows_adapter(self, name: str) -> bool:
        """Whether a worker has an adapter of this name or is to load it, or the last workers had it."""
        is_wanted = name in self.adapters or bool(self.last_changes.get(name, NO_CHANGE).adapter)
        return is_wanted or any(name in node.adapters for node in self.workers.values())

    def refuse_adapter(self, name: str) -> RequestError | None:
        """The error of a request for an adapter that is known, while no nodes can serve it together; None if it is not
        known, or withdrawn."""
        if self.is_withdrawn(name) or not self.knows_adapter(name):
            return None
        holders = ", ".join(node.name for node in self.workers.values() if name in node.adapters)
        message = f"no {self.lacking} has the same adapter {name!r} at present; it is on {holders or 'no node'}"
        return RequestError(ErrorCode.NO_ROUTE, message)

    def _adapters(self, prefills: list[Worker], decodes: list[Worker]) -> dict[str, str]:
        holders: dict[tuple[str, str], list[Worker]] = {}
        for node in prefills:
            for held in node.adapters.values():
                holders.setdefault((held, node.revision), []).append(node)
        found: dict[str, str] = {}
        for decode in decodes:
            for adapter in decode.register.adapters:
                if adapter.name in found or self._is_outdated(adapter):
                    continue
                others = holders.get((adapter.id, decode.revision), ())
                if not self._needs_prefill or any(can_pair(node, decode) for node in others):
                    found[adapter.name] = adapter.id
        return dict(sorted(found.items()))

    def _is_outdated(self, adapter: Adapter) -> bool:
        """Whether a node has missed that this adapter was unloaded, or replaced by another of its name."""
        last = self.last_changes.get(adapter.name, NO_CHANGE)
        return last.path is None or (adapter.change < last.number and adapter.id != last.adapter)

    # ---- pairs and nodes that get no requests for a while -----------------------------------------------------------

    def transfer_failed(self, pair: PairKey, now: float, *, is_probe: bool) -> None:
        """A transfer between two nodes failed; after several in a row they get no requests together for a while."""
        if not (pair.prefill in self.workers and pair.decode in self.workers):
            return
        if self.health.failed(pair, now, is_probe=is_probe):
            self._changed()

    def transfer_succeeded(self, pair: PairKey, *, is_probe: bool) -> None:
        if self.health.succeeded(pair, is_probe=is_probe):
            self._changed()

    def begins_probe(self, pair: PairKey) -> bool:
        """A request is sent to a pair. Return whether it probes it, so that the pair gets no others meanwhile."""
        is_probe = self.health.sent(pair)
        if is_probe:
            self._changed()
        return is_probe

    def ends_probe(self, pair: PairKey) -> None:
        """A request that probed a pair has ended and has not shown whether pages arrive."""
        self.health.gave_no_answer(pair)
        self._changed()

    def tick(self, now: float) -> bool:
        """Let pairs be probed whose back-off is over, and give up nodes that do not come back. Called once a second.

        Returns:
            Whether there are such pairs.
        """
        if self.limits is not None:
            self._served_at = now
        elif now - self._served_at > self._recovery_timeout_s:
            self.accepted = None
        is_due = self.health.tick(now)
        if is_due:
            self._changed()
        return is_due

    def set_reserved(self, incarnations: Iterable[str], is_reserved: bool) -> None:
        """Send no new requests to workers while they serve a suspect one, or send them some again."""
        for incarnation in incarnations:
            if incarnation in self.workers:
                self.workers[incarnation].is_reserved = is_reserved
        self._changed()

    @property
    def has_reserved(self) -> bool:
        """Whether a suspect request has workers for itself, for which others may wait."""
        return any(node.is_reserved for node in self.workers.values())

    # ---- workers that go --------------------------------------------------------------------------------------------

    def begin_drain(self, incarnation: str) -> None:
        """Send no new requests to a worker that stops or is to leave its role."""
        if incarnation in self.workers:
            self.workers[incarnation].is_draining = True
            self._changed()

    def end_drain(self, incarnation: str) -> None:
        """Take back ``begin_drain``, unless the worker says itself that it drains."""
        if incarnation in self.workers:
            self.workers[incarnation].is_draining = self.workers[incarnation].says_it_drains
            self._changed()

    def on_deregister(self, incarnation: str, *, is_empty: bool) -> None:
        """Send no new requests to a worker that drains; ``is_empty``: it has none left."""
        node = self.workers[incarnation]
        node.says_it_drains, node.is_empty = True, is_empty
        self.begin_drain(incarnation)

    def role_refusal(self, node: Worker, role: Role, *, is_forced: bool) -> str:
        """Why a worker may not change to this role, as a sentence; empty if it may.

        Args:
            is_forced: the last worker of its role may change, too.
        """
        register = node.register
        if register.role == role:
            return f"node {node.name} is a {role} node already"
        if node.is_draining:
            return f"node {node.name} drains"
        if register.fixed_role:
            return register.fixed_role
        others = [other for other in self.workers.values() if other is not node]
        if conflict := _first_conflict(msgspec.structs.replace(register, role=role), others):
            return conflict
        if is_forced or not (register.role == "decode" or self._needs_prefill):
            return ""
        staying = [other for other in others if not other.is_draining]
        same_role = [other for other in staying if other.register.role == register.role]
        advice = "start another one, or give force: true, and"
        if not same_role:
            return f"node {node.name} is the last {register.role} node: {advice} no request is served until one comes"
        same_revision = [other for other in staying if other.revision == node.revision]
        if same_revision and all(other.register.role == role for other in same_revision):
            return (
                f"node {node.name} is the last {register.role} node of its revision (same configuration and weights):"
                f" {advice} the {role} nodes of this revision serve no request until one comes"
            )
        return ""

    def remove(self, incarnation: str) -> Worker | None:
        """Remove a worker; None if it is not registered."""
        node = self.workers.pop(incarnation, None)
        self.health.forget(incarnation)
        self._changed()
        return node

    def page_sources(self) -> dict[str, list[Worker]]:
        """The nodes that may send pages to decode nodes, by revision: prefill nodes, and decode nodes that drain."""
        sources: dict[str, list[Worker]] = {}
        for node in self.workers.values():
            if node.register.role == "prefill" or node.is_draining:
                sources.setdefault(node.revision, []).append(node)
        return sources

    def alive_until(self, node: Worker, now: float) -> float:
        """Until when a worker that is lost now was probably alive: until its next heartbeat was overdue.

        So a request counts as one that may have hung it if it was sent just before the silence began, or at most two
        heartbeats after that: a worker that a request hangs at once says nothing any more.
        """
        return min(now, node.seen_at + 2 * self._heartbeat_s)

    def silent_workers(self, now: float) -> list[str]:
        """Incarnations of workers that have sent nothing for too long."""
        return [node.incarnation for node in self.workers.values() if now - node.seen_at > self._lost_after_s]

    def _changed(self) -> None:
        """Bring ``prefills``, ``decodes`` and ``limits`` up to date.

        A worker takes no new requests while it drains or is reserved, or while it can exchange pages with none of the
        other role. The limits also count those that take none only for a while: requests wait for them.
        """
        resting: dict[str, list[str]] = {}
        for pair in self.health.resting():
            resting.setdefault(pair.prefill, []).append(pair.decode)
            resting.setdefault(pair.decode, []).append(pair.prefill)
        for node in self.workers.values():
            node.failed_peers = node.reported_peers
        prefills, decodes = self._able()
        self._limiting = frozenset([node.incarnation for node in decodes])
        self.limits = self._limits(prefills, decodes)
        if self.limits is not None:
            self.adapters = self._adapters(prefills, decodes)
        self.accepted = self.limits or self.accepted
        for node in self.workers.values():
            node.failed_peers = node.reported_peers.union(resting.get(node.incarnation, ()))
        prefills, decodes = self._able()
        self.prefills = tuple([node for node in prefills if not node.is_reserved])
        self.decodes = tuple([node for node in decodes if not node.is_reserved])
        self.draining = frozenset([node.incarnation for node in self.workers.values() if node.is_draining])
        self._holders.clear()

    def _able(self) -> tuple[list[Worker], list[Worker]]:
        """The prefill and the decode nodes that can serve requests together."""
        staying = [node for node in self.workers.values() if not node.is_draining]
        prefills = [node for node in staying if node.register.role == "prefill"]
        decodes = [node for node in staying if node.register.role == "decode"]
        if not (prefills and decodes and self._needs_prefill):
            return prefills, decodes
        return (
            [node for node in prefills if any(can_pair(node, other) for other in decodes)],
            [node for node in decodes if any(can_pair(other, node) for other in prefills)],
        )

    def _limits(self, prefills: list[Worker], decodes: list[Worker]) -> ServingLimits | None:
        prompts = prefills if self._needs_prefill else decodes  # the nodes that compute prompts
        if not prompts or not decodes:
            return None
        first = decodes[0].register
        return ServingLimits(
            context_length=first.context_length,
            vocab_size=first.vocab_size,
            prompt_tokens=max(node.longest_tokens for node in prompts),
            total_tokens=max(node.longest_tokens for node in decodes),
            common_tokens=min(node.longest_tokens for node in decodes),
            defaults=SamplingDefaults.of(first.generation),
            max_running=sum(node.max_running for node in decodes),
        )

    @property
    def is_ready(self) -> bool:
        return self.limits is not None

    @property
    def lacking(self) -> str:
        """The kind of node that is missing before a request can be served, in words."""
        if not self._needs_prefill:
            return "decode node"
        roles: dict[Role, set[str]] = {}  # the revisions of each
        for node in self.workers.values():
            if not node.is_draining:
                roles.setdefault(node.register.role, set()).add(node.revision)
        if len(roles) == 1:
            return "decode node" if "prefill" in roles else "prefill node"
        if roles and not set.intersection(*roles.values()):
            return "pair of a prefill and a decode node with the same weights and options (revision in /v1/workers)"
        problem = next((pair.problem for node in self.workers.values() for pair in node.pairs if pair.problem), "")
        return "pair of a prefill and a decode node" + (problem and f" that can exchange pages ({problem})")


def _first_conflict(new: Register, others: Iterable[Worker]) -> str:
    """Why a node cannot serve one model with others, as a sentence; empty if it can."""
    alike: dict[tuple[object, ...], Worker] = {}
    for other in others:
        alike.setdefault(other.kind, other)
    return next(filter(None, (_conflict(new, other.register) for other in alike.values())), "")


def _conflict(new: Register, other: Register) -> str:
    """Why two nodes cannot serve one model, as a sentence; empty if they can. Pages go only within a revision."""
    for name, words in AGREE.items():
        ours, theirs = getattr(new, name), getattr(other, name)
        if ours != theirs:
            return f"{words} of node {new.name} is {ours}, that of node {other.name} is {theirs}; they must be equal"
    if (new.digest, new.weight_version) != (other.digest, other.weight_version):
        return ""
    theirs = other.layout.layout()
    if new.role == other.role:  # no page is sent between them, so their page sizes may differ
        theirs = replace(theirs, page_size=new.layout.page_size)
    problem = layout_conflict(new.layout.layout(), theirs)
    if problem:
        return f"page layout of node {new.name} does not fit that of node {other.name}: {problem}"
    if new.role != other.role and not set(new.transports) & set(other.transports):
        return (
            f"nodes {new.name} and {other.name} have no transport in common:"
            f" {', '.join(new.transports) or 'none'} and {', '.join(other.transports) or 'none'}"
        )
    return ""
