"""The registered nodes of one model. Pure: messages and instants come in, answers go out.

The first node determines what is served; a node that differs from it is refused with a sentence that names the
difference. A ``Worker`` is one start of one process: a new start under the same name is another worker, accepted once
the old one is gone.
"""

from dataclasses import dataclass, field, replace

from common.cache.page_layout import layout_conflict
from common.wire.messages import Heartbeat, PairState, Refused, Register, Registered
from gateway.workers.clock_offset import ClockOffset
from gateway.workers.router import can_pair

#: Fields that must be equal on all nodes, and their names in error messages.
AGREE = {
    "digest": "configuration digest",
    "weight_version": "weight version",
    "vocab_size": "vocabulary size",
    "context_length": "context length",
    "eos_token_ids": "end tokens",
    "generation": "generation defaults",
}
#: Two checkpoints of one configuration, such as two fine-tunes, differ in nothing else.
WEIGHT_HINT = (
    ": their weights differ. Give both nodes the same --model and --revision, or, if their files hold the same weights"
    " in another form, the same --weight-version"
)
MAX_STARTS_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class Worker:
    """One start of one node, as it last described itself.

    Attributes:
        starts: number of this start among those of nodes with its name.
        failed_peers: incarnations of workers with which it cannot exchange pages at present.
        clock: how far its clock is ahead of the gateway's.
        is_leaving: it stops on purpose or cannot be reached, and gets no new requests.
        max_running: requests that it runs at once for this gateway.
    """

    incarnation: str
    register: Register
    starts: int
    seen_at: float
    heartbeat: Heartbeat | None = None
    pairs: tuple[PairState, ...] = ()
    failed_peers: frozenset[str] = frozenset()
    is_leaving: bool = False
    clock: ClockOffset = field(default_factory=ClockOffset)
    name: str = field(init=False)
    capacity_tokens: int = field(init=False)
    max_running: int = field(init=False)

    def __post_init__(self) -> None:
        self.capacity_tokens = self.register.num_pages * self.register.layout.page_size
        self.max_running = self.register.max_running if self.register.share is None else self.register.share
        self.name = self.register.name


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The bounds that the registered nodes set for one request.

    Attributes:
        context_length: tokens of prompt and output together.
        prompt_tokens: capacity of the largest pool that takes prompts.
        total_tokens, common_tokens: capacity of the largest and of the smallest decode pool.
        generation: the model's own sampling defaults.
        max_running: requests that all decode nodes run at once.
    """

    context_length: int
    vocab_size: int
    prompt_tokens: int
    total_tokens: int
    common_tokens: int
    generation: dict[str, float]
    max_running: int


class Registry:
    """The table of workers.

    Args:
        num_token_ids, tokenizer_digest: of the gateway's tokenizer; an empty digest is not compared.
        needs_prefill: a request needs a prefill node; otherwise decode nodes compute prompts.

    Attributes:
        workers: by incarnation, in order of arrival.
        prefills, decodes: those that take new requests.
        limits: None while the workers cannot serve a request.
    """

    def __init__(
        self,
        *,
        num_token_ids: int,
        tokenizer_digest: str = "",
        heartbeat_s: float = 1.0,
        lost_after_s: float = 10.0,
        needs_prefill: bool = True,
    ) -> None:
        self._needs_prefill = needs_prefill
        self._num_token_ids = num_token_ids
        self._tokenizer_digest = tokenizer_digest
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._starts: dict[str, dict[str, int]] = {}  # by name: incarnation -> number of that start
        self.workers: dict[str, Worker] = {}
        self.prefills: list[Worker] = []
        self.decodes: list[Worker] = []
        self.limits: ServingLimits | None = None

    def register(self, incarnation: str, register: Register, now: float) -> Registered | Refused:
        """Adds a worker, or replaces its description. A refused worker is removed."""
        known = self.workers.get(incarnation)
        others = [node for node in self.workers.values() if node is not known]
        refusal = self._refusal(incarnation, register, others)
        if refusal:
            self.remove(incarnation)
            return Refused(refusal)
        starts = self._starts.setdefault(register.name, {})
        if incarnation not in starts:
            starts[incarnation] = max(starts.values(), default=0) + 1
            if len(starts) > MAX_STARTS_REMEMBERED:
                del starts[next(iter(starts))]
        worker = Worker(incarnation, register, starts[incarnation], now)
        if known is not None:
            worker = replace(worker, heartbeat=known.heartbeat, clock=known.clock)
        self.workers[incarnation] = worker
        self._changed()
        return Registered(starts[incarnation], self._heartbeat_s, sent_at=now)

    def _refusal(self, incarnation: str, register: Register, others: list[Worker]) -> str:
        """Why the worker is refused, as a sentence; empty if it is accepted."""
        if register.vocab_size < self._num_token_ids:
            return (
                f"the gateway's tokenizer has {self._num_token_ids} ids, the model of node {register.name} only"
                f" {register.vocab_size}: give both the same --model"
            )
        if self._tokenizer_digest and register.tokenizer_digest not in ("", self._tokenizer_digest):
            return (
                f"the tokenizer.json of node {register.name} differs from the gateway's: give both the same --model and"
                " --revision"
            )
        if register.role == "prefill" and not register.address:
            return f"the prefill node {register.name} gives no address at which decode nodes reach it"
        starts = self._starts.get(register.name, {})
        if incarnation in starts and starts[incarnation] < max(starts.values()):
            return f"a later start of node {register.name} has already been here"
        for other in others:
            refusal = _conflict(register, other.register)
            if refusal:
                return refusal
        return ""

    def named(self, name: str) -> Worker | None:
        return next((node for node in self.workers.values() if node.name == name), None)

    def on_heartbeat(self, incarnation: str, heartbeat: Heartbeat, now: float) -> bool:
        """Records the state of a worker; returns whether it takes more requests of this gateway than before."""
        node = self.workers[incarnation]
        before = node.max_running
        node.max_running = node.register.max_running if heartbeat.share is None else heartbeat.share
        if node.max_running != before:
            self._changed()
        node.heartbeat, node.seen_at = heartbeat, now
        if heartbeat.gateway_sent_at:
            node.clock.sent_by_gateway(heartbeat.gateway_sent_at, heartbeat.received_at, now)
        if heartbeat.sent_at:
            node.clock.sent_by_node(heartbeat.sent_at, now)
        return node.max_running > before

    def set_pairs(self, incarnation: str, pairs: tuple[PairState, ...]) -> bool:
        """Records a worker's pairs; returns whether a pair may work that did not before."""
        node = self.workers[incarnation]
        failed, before = frozenset(pair.incarnation for pair in pairs if pair.problem), node.failed_peers
        node.pairs = pairs
        if failed != before:
            node.failed_peers = failed
            self._changed()
        return bool(before - failed)

    def leave(self, incarnation: str) -> None:
        """Sends no new requests to a worker that stops or cannot be reached."""
        if incarnation in self.workers:
            self.workers[incarnation].is_leaving = True
            self._changed()

    def remove(self, incarnation: str) -> Worker | None:
        """Removes a worker; None if it is not registered."""
        node = self.workers.pop(incarnation, None)
        self._changed()
        return node

    def silent_workers(self, now: float) -> list[str]:
        """Incarnations of workers that have sent nothing for too long."""
        return [node.incarnation for node in self.workers.values() if now - node.seen_at > self._lost_after_s]

    def _changed(self) -> None:
        """Brings ``prefills``, ``decodes`` and ``limits`` up to date.

        A worker takes no new requests while it is leaving, or while it can exchange pages with none of the other role.
        """
        staying = [node for node in self.workers.values() if not node.is_leaving]
        prefills = [node for node in staying if node.register.role == "prefill"]
        decodes = [node for node in staying if node.register.role == "decode"]
        self.prefills, self.decodes = prefills, decodes
        if prefills and decodes and self._needs_prefill:
            self.prefills = [node for node in prefills if any(can_pair(node, other) for other in decodes)]
            self.decodes = [node for node in decodes if any(can_pair(other, node) for other in prefills)]
        self.limits = self._limits()

    def _limits(self) -> ServingLimits | None:
        decodes = self.decodes
        prompts = self.prefills if self._needs_prefill else decodes  # the nodes that compute prompts
        if not prompts or not decodes:
            return None
        first = decodes[0].register
        return ServingLimits(
            context_length=first.context_length,
            vocab_size=first.vocab_size,
            prompt_tokens=max(node.capacity_tokens for node in prompts),
            total_tokens=max(node.capacity_tokens for node in decodes),
            common_tokens=min(node.capacity_tokens for node in decodes),
            generation=first.generation,
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
        problem = next((pair.problem for node in self.workers.values() for pair in node.pairs if pair.problem), "")
        return "pair of a prefill and a decode node" + (problem and f" that can exchange pages ({problem})")


def _conflict(new: Register, other: Register) -> str:
    """Why two nodes cannot be in one deployment, as a sentence; empty if they can."""
    if new.name == other.name:
        return f"a node named {new.name} is registered already; give this one another --name"
    for name, words in AGREE.items():
        ours, theirs = getattr(new, name), getattr(other, name)
        if ours != theirs:
            hint = WEIGHT_HINT if name == "weight_version" else ""
            return (
                f"{words} of node {new.name} is {ours}, that of node {other.name} is {theirs}; they must be equal{hint}"
            )
    theirs = other.layout.layout()
    if new.role == other.role:  # no page is sent between them, so their page sizes may differ
        theirs = replace(theirs, page_size=new.layout.page_size)
    problem = layout_conflict(new.layout.layout(), theirs)
    if problem:
        return f"page layout of node {new.name} does not go with that of node {other.name}: {problem}"
    if new.role != other.role and not set(new.transports) & set(other.transports):
        return (
            f"nodes {new.name} and {other.name} have no transport in common:"
            f" {', '.join(new.transports) or 'none'} and {', '.join(other.transports) or 'none'}"
        )
    return ""
