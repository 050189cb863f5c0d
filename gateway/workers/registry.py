"""The nodes that the gateway knows. Pure: messages and instants come in, answers go out.

The first node decides what is served here; every other must agree with it, or is refused with a sentence that says in
what it differs. A node is one start of one process: a new start under the same name is another node, welcome once the
old one is gone.
"""

from dataclasses import dataclass

import msgspec

from common.cache.page_layout import layout_conflict
from common.wire.messages import Heartbeat, PairState, Refused, Register, Registered
from gateway.workers.router import can_pair

#: What all nodes of a deployment must have in common, and how to say it.
AGREE = {
    "model": "served model",
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
class Node:
    """One start of one node, as it last described itself."""

    incarnation: str
    register: Register
    starts: int
    seen_at: float
    heartbeat: Heartbeat | None = None
    pairs: tuple[PairState, ...] = ()
    failed_peers: frozenset[str] = frozenset()  # incarnations of nodes with which it cannot exchange pages at present
    is_leaving: bool = False
    capacity_tokens: int = 0  # that its whole pool holds

    def __post_init__(self) -> None:
        self.capacity_tokens = self.register.num_pages * self.register.geometry.page_size

    @property
    def name(self) -> str:
        return self.register.name

    @property
    def max_running(self) -> int:
        return self.register.max_running


@dataclass(frozen=True, slots=True)
class Limits:
    """What the registered nodes can do for one request.

    Attributes:
        context_length: prompt and output together.
        prompt_tokens: of the largest pool in which prompts are computed.
        total_tokens, common_tokens: of the largest and of the smallest decode pool.
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
    """The table of nodes.

    Args:
        model: the name under which it is served.
        num_token_ids: size of the gateway's tokenizer.
        heartbeat_s: how often nodes are asked to give a sign of life.
        lost_after_s: without one for so long, a node is lost.
        needs_prefill: whether a request needs a prefill node; otherwise decode nodes are enough.
    """

    def __init__(
        self, *, model: str, num_token_ids: int, heartbeat_s: float = 1.0, lost_after_s: float = 10.0,
        needs_prefill: bool = True,
    ) -> None:  # fmt: skip
        self._needs_prefill = needs_prefill
        self._model = model
        self._num_token_ids = num_token_ids
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._starts: dict[str, dict[str, int]] = {}  # by name: incarnation -> number of that start
        self.nodes: dict[str, Node] = {}  # by incarnation, in order of arrival
        self._able: dict[str, list[Node]] = {}  # what able() and limits() said since nodes came or went last
        self._limits: Limits | None = None

    def register(self, incarnation: str, register: Register, now: float) -> Registered | Refused:
        """A node introduces itself, for the first time or again."""
        self._changed()
        known = self.nodes.get(incarnation)
        others = [node for node in self.nodes.values() if node is not known]
        refusal = self._refusal(incarnation, register, others)
        if refusal:
            self.nodes.pop(incarnation, None)
            return Refused(refusal)
        starts = self._starts.setdefault(register.name, {})
        if incarnation not in starts:
            starts[incarnation] = max(starts.values(), default=0) + 1
            if len(starts) > MAX_STARTS_REMEMBERED:
                del starts[next(iter(starts))]
        heartbeat = known.heartbeat if known is not None else None
        self.nodes[incarnation] = Node(incarnation, register, starts[incarnation], now, heartbeat)
        return Registered(starts[incarnation], self._heartbeat_s)

    def _refusal(self, incarnation: str, register: Register, others: list[Node]) -> str:
        """A sentence that says why this node cannot join; empty if it can."""
        if register.model != self._model:
            return f"this gateway serves {self._model!r}, the node {register.name} has {register.model!r}"
        if register.vocab_size < self._num_token_ids:
            return (
                f"the gateway's tokenizer has {self._num_token_ids} ids, the model of node {register.name} only"
                f" {register.vocab_size}: they do not belong together"
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

    def named(self, name: str) -> Node | None:
        """The present node of this name."""
        return next((node for node in self.nodes.values() if node.name == name), None)

    def heard(self, incarnation: str, now: float, heartbeat: Heartbeat | None = None) -> bool:
        """A node gave a sign of life; False if it is not registered."""
        node = self.nodes.get(incarnation)
        if node is None:
            return False
        node.seen_at = now
        if heartbeat is not None:
            node.heartbeat = heartbeat
        return True

    def set_pairs(self, incarnation: str, pairs: tuple[PairState, ...]) -> bool:
        """Record which pairs a registered node has, and which of them cannot carry pages.

        Returns:
            Whether a pair that could not carry pages may be able to now.
        """
        node = self.nodes[incarnation]
        failed, before = frozenset(pair.incarnation for pair in pairs if pair.problem), node.failed_peers
        node.pairs = pairs
        if failed != before:
            node.failed_peers = failed
            self._changed()
        return bool(before - failed)

    def leave(self, incarnation: str) -> None:
        """A node stops on purpose: no new requests for it."""
        if incarnation in self.nodes:
            self.nodes[incarnation].is_leaving = True
            self._changed()

    def remove(self, incarnation: str) -> Node | None:
        """A node is gone."""
        self._changed()
        return self.nodes.pop(incarnation, None)

    def silent(self, now: float) -> list[str]:
        """Nodes that have given no sign of life for too long."""
        return [node.incarnation for node in self.nodes.values() if now - node.seen_at > self._lost_after_s]

    def able(self, role: str) -> list[Node]:
        """Nodes of a role that take new requests, in order of arrival.

        A node that is leaving takes none, nor does a node that can exchange pages with no node of the other role.
        """
        if role not in self._able:
            own, others = self._staying(role), self._staying("prefill" if role == "decode" else "decode")
            if others and self._needs_prefill:
                prefills_first = role == "prefill"
                own = [a for a in own if any(can_pair(a, b) if prefills_first else can_pair(b, a) for b in others)]
            self._able[role] = own
        return self._able[role]

    def _staying(self, role: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.register.role == role and not node.is_leaving]

    def _changed(self) -> None:
        self._able.clear()
        self._limits = None

    @property
    def is_ready(self) -> bool:
        return self.limits() is not None

    @property
    def lacking(self) -> str:
        """What it takes before a request can be served, in words."""
        if not self._needs_prefill:
            return "decode node"
        problem = next((pair.problem for node in self.nodes.values() for pair in node.pairs if pair.problem), "")
        return "pair of a prefill and a decode node" + (problem and f" that can exchange pages ({problem})")

    def limits(self) -> Limits | None:
        """What one request may ask for; None while no nodes can serve one."""
        decodes = self.able("decode")
        prefills = self.able("prefill") if self._needs_prefill else decodes  # whoever computes prompts
        if self._limits is not None or not prefills or not decodes:
            return self._limits
        first = decodes[0].register
        self._limits = Limits(
            context_length=first.context_length,
            vocab_size=first.vocab_size,
            prompt_tokens=max(node.capacity_tokens for node in prefills),
            total_tokens=max(node.capacity_tokens for node in decodes),
            common_tokens=min(node.capacity_tokens for node in decodes),
            generation=first.generation,
            max_running=sum(node.register.max_running for node in decodes),
        )
        return self._limits


def _conflict(new: Register, other: Register) -> str:
    """Why two nodes cannot be in one deployment; empty if they can."""
    if new.name == other.name:
        return f"a node named {new.name} is already here; give this one another --name"
    for field, words in AGREE.items():
        ours, theirs = getattr(new, field), getattr(other, field)
        if ours != theirs:
            hint = WEIGHT_HINT if field == "weight_version" else ""
            return (
                f"{words} of node {new.name} is {ours}, that of node {other.name} is {theirs}; they must be equal{hint}"
            )
    theirs = other.geometry
    if new.role == other.role:  # no page goes from one to the other, so their sizes do not matter
        theirs = msgspec.structs.replace(theirs, page_size=new.geometry.page_size)
    problem = layout_conflict(new.geometry, theirs)
    if problem:
        return f"page geometry of node {new.name} does not go with that of node {other.name}: {problem}"
    if new.role != other.role and not set(new.transports) & set(other.transports):
        return (
            f"nodes {new.name} and {other.name} have no transport in common:"
            f" {', '.join(new.transports) or 'none'} and {', '.join(other.transports) or 'none'}"
        )
    return ""
