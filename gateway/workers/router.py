"""Chooses the prefill node and the decode node of each request. Pure.

Both are chosen by least cost. A prefill node costs the time that it takes to compute the tokens that it has been given
and those of this prompt that it has probably not cached; tokens count alike until every node has measured what one
takes. A decode node costs the tokens that its requests hold or will hold, as a share of its pool, less the part of this
prompt that it has cached; a node that runs its maximum of requests comes after the others. What a node has cached is
guessed from what it was sent: chained hashes of prompt prefixes are remembered with the nodes that got them, and the
least recently used are forgotten first. Each node is a bit, so that the nodes of a prefix are one integer and a long
prompt costs a few operations for each piece.

A pair may be a decode node alone, which then computes the prompt too: always, or where this costs less
(``gateway.workers.placement``). It is a prefill node alone if the output has one token at most.
"""

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from gateway.workers.placement import DecodePlace, PrefillPlace

MAX_PIECES = 512

LocalPrefill = Literal["never", "auto", "always"]


class Candidate(Protocol):
    """A node that could take a request."""

    @property
    def incarnation(self) -> str: ...
    @property
    def capacity_tokens(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def revision(self) -> str:
        """Stands for its weights; pages go only between nodes of one revision."""
        ...

    @property
    def step_s(self) -> float:
        """What a step without prompts takes there."""
        ...

    @property
    def prompt_token_s(self) -> float:
        """What a prompt token adds to a step; 0: not measured yet."""
        ...

    @property
    def send_token_s(self) -> float:
        """What sending the pages of a token takes."""
        ...

    @property
    def failed_peers(self) -> frozenset[str]:
        """Incarnations of nodes with which it gets no requests at present, since pages do not arrive."""
        ...


def can_pair(prefill: Candidate, decode: Candidate) -> bool:
    """Whether pages can go from one to the other, as far as is known."""
    return (
        prefill.revision == decode.revision
        and prefill.incarnation not in decode.failed_peers
        and decode.incarnation not in prefill.failed_peers
    )


def _can_pair_freely(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> bool:
    """Whether all of these can be paired; found faster than pair by pair."""
    nodes = [*prefills, *decodes]
    return bool(prefills) and not any(node.failed_peers for node in nodes) and len({n.revision for n in nodes}) == 1


class WorkerPair(NamedTuple):
    """The nodes of one request.

    Attributes:
        prefill: incarnation of the prefill node; None if the decode node computes the prompt.
        decode: incarnation of the decode node; None if the prefill node makes the only token.
        num_compute: prompt tokens that will probably be computed.
        num_hold: tokens of the decode node's pool that the request will hold.
    """

    prefill: str | None
    decode: str | None
    num_compute: int
    num_hold: int

    @property
    def nodes(self) -> tuple[str, ...]:
        """Incarnations, in the order in which the nodes are sent the request."""
        if self.prefill is None or self.decode is None:
            return (self.last,)
        return (self.prefill, self.decode)

    @property
    def last(self) -> str:
        """Incarnation of the node that makes the last token."""
        last = self.prefill if self.decode is None else self.decode
        assert last is not None, "a pair has a node"
        return last


class _Needs(NamedTuple):
    """What a request needs of its nodes.

    Attributes:
        now: the instant.
        num_prompt: tokens of its prompt.
        num_hold: tokens of the decode node's pool that it will hold.
        cached: tokens of the prompt that nodes have probably cached, by incarnation.
    """

    now: float
    num_prompt: int
    num_hold: int
    cached: Mapping[str, int]

    def num_lacking(self, node: Candidate) -> int:
        """Tokens of the prompt that a node has to compute or to receive."""
        return self.num_prompt - self.cached.get(node.incarnation, 0)

    def local_pair(self, node: Candidate) -> WorkerPair:
        return WorkerPair(None, node.incarnation, self.num_lacking(node), self.num_hold)


class Router:
    """Chooses pairs and keeps count of what each node was given.

    Args:
        piece_tokens: prompts are remembered in pieces of this many tokens.
        max_pieces: remembered for all nodes together.
        local_prefill: whether decode nodes compute prompts: never, always, or (auto) where it costs less.
        local_threshold: with auto, they compute prompts of which they lack fewer tokens than this, whatever it costs;
            None: by cost.
        max_dispatch_ahead: requests sent beyond those that decode nodes run at once, for each node that computes
            prompts, so that these nodes always have work.
    """

    def __init__(
        self, *, piece_tokens: int = 64, max_pieces: int = 200_000, local_prefill: LocalPrefill = "never",
        local_threshold: int | None = None, max_dispatch_ahead: int = 64,
    ) -> None:  # fmt: skip
        self._max_dispatch_ahead = max_dispatch_ahead
        self._local_prefill = local_prefill
        self._local_threshold = local_threshold
        self._piece_tokens = piece_tokens
        self._max_pieces = max_pieces
        self._holders: OrderedDict[int, int] = OrderedDict()  # hash of a prefix -> bits of the nodes that got it
        self._bits: dict[str, int] = {}  # of the nodes that got a request
        self._load: dict[str, int] = {}
        self._other_load: dict[str, int] = {}  # the part of it that other gateways have sent
        self._num_requests: dict[str, int] = {}  # in flight, by the node that makes the last token
        self._num_begun: dict[str, int] = {}  # those of them that have a token
        self._local_load: dict[str, int] = {}  # prompt tokens that a decode node still has to compute
        self._idle_at: dict[str, float] = {}  # when a prefill node will have computed what this gateway has sent
        self._turn: dict[str, int] = {}  # when a node was chosen last; equals take turns
        self._num_chosen = 0

    @property
    def uses_costs(self) -> bool:
        """Whether measured times decide, which the nodes' heartbeats bring."""
        return self._local_prefill == "auto" and self._local_threshold is None

    def dispatch_capacity(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> int:
        """Requests that may be sent now; negative if nodes have gone."""
        if not decodes or not (prefills or self._local_prefill == "always"):
            return 0
        capacity = self._max_dispatch_ahead * (len(prefills) or len(decodes))
        num_requests = self._num_requests
        for node in decodes:
            capacity += node.max_running - num_requests.get(node.incarnation, 0)
        for node in prefills:
            capacity -= num_requests.get(node.incarnation, 0)
        return capacity

    def choose(
        self, prefills: Sequence[Candidate], decodes: Sequence[Candidate], prompt: Sequence[int],
        *, num_new: int, num_expected: int = 0, salt: str = "", is_local: bool = False, now: float = 0.0,
    ) -> WorkerPair | None:  # fmt: skip
        """The pair for one request, counted as sent to it; None if no pair that can exchange pages has large enough
        pools.

        Args:
            num_new: maximum of output tokens; a pool must hold them.
            num_expected: predicted output tokens, for which the request is counted; 0 without a prediction.
            is_local: the decode node computes the prompt, whatever ``local_prefill`` says.
            now: the instant, by which nodes have computed a part of what they were given.
        """
        num_prompt = len(prompt)
        num_most = num_prompt + num_new
        num_hold = num_prompt + (min(num_expected, num_new) or num_new)
        is_always = is_local or self._local_prefill == "always"
        prefills = [] if is_always else [node for node in prefills if node.capacity_tokens >= num_prompt]
        decodes = [node for node in decodes if node.capacity_tokens >= num_most]
        is_free = is_always or _can_pair_freely(prefills, decodes)
        if not is_free:
            decodes = [node for node in decodes if any(can_pair(prefill, node) for prefill in prefills)]
        if not decodes:
            return None
        is_choice = len(prefills) > 1 or len(decodes) > 1 or self._local_prefill == "auto"
        pieces = self._pieces(prompt, salt) if is_choice else []
        needs = _Needs(now, num_prompt, num_hold, self._cached(pieces) if pieces else {})
        if num_new == 1 and not is_always:
            prefill = self._cheapest_prefill(prefills, needs)
            self._keep_busy(prefill, needs)
            return self._chosen(WorkerPair(prefill.incarnation, None, needs.num_lacking(prefill), 0), pieces)
        decode = self._cheapest_decode(decodes, needs)
        if is_always:
            return self._chosen(needs.local_pair(decode), pieces)
        able = prefills if is_free else [node for node in prefills if can_pair(node, decode)]
        prefill = self._cheapest_prefill(able, needs)
        local = self._local_node(prefill, decode, decodes, needs) if self._local_prefill == "auto" else None
        if local is not None:
            return self._chosen(needs.local_pair(local), pieces)
        pair = WorkerPair(prefill.incarnation, decode.incarnation, needs.num_lacking(prefill), num_hold)
        self._keep_busy(prefill, needs)
        return self._chosen(pair, pieces)

    def _keep_busy(self, node: Candidate, needs: "_Needs") -> None:
        """Notes until when a prefill node will compute a further prompt."""
        if not node.prompt_token_s:
            return
        begins_at = max(self._idle_at.get(node.incarnation, 0.0), needs.now)
        self._idle_at[node.incarnation] = begins_at + needs.num_lacking(node) * node.prompt_token_s

    def _wait_s(self, node: Candidate, now: float) -> float:
        """Seconds that a prefill node still takes for the tokens that it was given, as far as is known."""
        name = node.incarnation
        own_s = max(self._idle_at.get(name, 0.0) - now, 0.0)
        return min(own_s + self._other_load.get(name, 0) * node.prompt_token_s, self.load(name) * node.prompt_token_s)

    def _local_node(
        self, prefill: Candidate, decode: Candidate, decodes: Sequence[Candidate], needs: "_Needs"
    ) -> Candidate | None:
        """The decode node that had better compute the prompt than this pair; None if none had."""
        if self._local_threshold is not None:
            return decode if needs.num_lacking(decode) < self._local_threshold else None
        if not prefill.prompt_token_s:
            return None
        there = PrefillPlace(
            wait_s=self._wait_s(prefill, needs.now),
            num_to_compute=needs.num_lacking(prefill),
            token_s=prefill.prompt_token_s,
            num_to_send=needs.num_lacking(decode),
            send_s=prefill.send_token_s,
        )
        known = [node.prompt_token_s for node in decodes if node.prompt_token_s]
        usual_s = sum(known) / len(known) if known else prefill.prompt_token_s

        def cost(node: Candidate) -> tuple[float, int]:
            place = self._decode_place(node, needs, usual_s, there.wait_s)
            return place.cost_s, self._turn.get(node.incarnation, 0)

        best = min(decodes, key=cost)
        return best if cost(best)[0] < there.cost_s else None

    def _decode_place(
        self, node: Candidate, needs: "_Needs", usual_token_s: float, prefill_wait_s: float
    ) -> DecodePlace:
        """A decode node as a place for a prompt; one that has computed none yet counts as fast as the others."""
        name = node.incarnation
        num_outputs = self._num_begun.get(name, 0)
        is_full = self.load(name) + needs.num_hold > node.capacity_tokens
        return DecodePlace(
            num_queued=self._local_load.get(name, 0),
            num_to_compute=needs.num_lacking(node),
            num_outputs=num_outputs,
            num_coming=max(self.num_requests(name) - num_outputs, 0),
            coming_s=prefill_wait_s,
            token_s=node.prompt_token_s or usual_token_s,
            step_s=node.step_s,
            is_full=is_full or self.num_requests(name) >= node.max_running,
        )

    def _cheapest_prefill(self, nodes: Sequence[Candidate], needs: "_Needs") -> Candidate:
        if len(nodes) == 1:
            return nodes[0]
        load, turn = self._load, self._turn
        is_measured = all(node.prompt_token_s for node in nodes)

        def cost(node: Candidate) -> tuple[float, int]:
            name = node.incarnation
            num_lacking = needs.num_lacking(node)
            if is_measured:
                return self._wait_s(node, needs.now) + num_lacking * node.prompt_token_s, turn.get(name, 0)
            return load.get(name, 0) + num_lacking, turn.get(name, 0)

        return min(nodes, key=cost)

    def _cheapest_decode(self, nodes: Sequence[Candidate], needs: "_Needs") -> Candidate:
        if len(nodes) == 1:
            return nodes[0]
        load, num_requests, turn = self._load, self._num_requests, self._turn
        num_hold, cached = needs.num_hold, needs.cached

        def cost(node: Candidate) -> tuple[bool, float, int]:
            name = node.incarnation
            hold = load.get(name, 0) + num_hold - cached.get(name, 0)
            return num_requests.get(name, 0) >= node.max_running, hold / node.capacity_tokens, turn.get(name, 0)

        return min(nodes, key=cost)

    def _chosen(self, pair: WorkerPair, pieces: list[int]) -> WorkerPair:
        self._give(pair)
        if pieces:
            self._remember(pieces, pair)
        return pair

    def choose_again(
        self, pair: WorkerPair, prefills: Sequence[Candidate], decodes: Sequence[Candidate],
        *, num_new: int, num_expected: int = 0,
    ) -> WorkerPair | None:  # fmt: skip
        """The same pair for another sample of the prompt, which costs only its output.

        None if its nodes no longer take requests together.
        """
        able = {node.incarnation: node for node in (*prefills, *decodes)}
        nodes = [able[incarnation] for incarnation in pair.nodes if incarnation in able]
        if len(nodes) < len(pair.nodes) or (len(nodes) == 2 and not can_pair(nodes[0], nodes[1])):
            return None
        num_hold = 0 if pair.decode is None else min(num_expected, num_new) or num_new
        sample = WorkerPair(pair.prefill, pair.decode, 0, num_hold)
        self._give(sample)
        return sample

    def choose_target(
        self, source: Candidate, decodes: Sequence[Candidate], *, num_tokens: int, num_new: int, num_expected: int = 0
    ) -> WorkerPair | None:
        """The decode node that a running request moves to from another one, counted as sent there; None if none has
        room now.

        Args:
            num_tokens: that the request has by now, prompt and output.
            num_new: maximum of further tokens.
            num_expected: predicted further tokens; 0 without a prediction.
        Returns:
            A pair whose prefill node is the source, which has computed all pages.
        """
        able = [
            node
            for node in decodes
            if node.incarnation != source.incarnation
            and node.capacity_tokens >= num_tokens + num_new
            and self.num_requests(node.incarnation) < node.max_running
            and can_pair(source, node)
        ]
        if not able:
            return None

        def cost(node: Candidate) -> tuple[float, int]:
            return self.load(node.incarnation) / node.capacity_tokens, self._turn.get(node.incarnation, 0)

        num_hold = num_tokens + (min(num_expected, num_new) or num_new)
        pair = WorkerPair(source.incarnation, min(able, key=cost).incarnation, 0, num_hold)
        self._give(pair)
        return pair

    def load(self, incarnation: str) -> int:
        """Tokens that a node still has to compute (prefill) or holds (decode), for all gateways."""
        return self._load.get(incarnation, 0)

    def set_other_load(self, incarnation: str, num_tokens: int) -> None:
        """What a node has to do for other gateways, as it says itself."""
        more = num_tokens - self._other_load.get(incarnation, 0)
        self._other_load[incarnation] = num_tokens
        self._load[incarnation] = self.load(incarnation) + more

    def num_requests(self, incarnation: str) -> int:
        """Requests in flight whose last token this node makes."""
        return self._num_requests.get(incarnation, 0)

    def prefill_done(self, pair: WorkerPair) -> None:
        """The first token has arrived, or never will."""
        last = pair.last
        if last in self._num_begun:
            self._num_begun[last] += 1
        if pair.prefill is not None:
            self._subtract(self._load, pair.prefill, pair.num_compute)
        else:
            self._subtract(self._local_load, last, pair.num_compute)

    def decode_done(self, pair: WorkerPair) -> None:
        last = pair.last
        self._subtract(self._load, last, pair.num_hold)
        if last in self._num_requests:
            self._num_requests[last] -= 1
            self._num_begun[last] -= 1

    def set_paused(self, pair: WorkerPair, *, is_paused: bool) -> None:
        """The request gives its place in the batch of the last node to another one, or takes it back."""
        if pair.last in self._num_requests:
            self._num_requests[pair.last] += -1 if is_paused else 1

    def cached(self, prompt: Sequence[int], salt: str, incarnation: str) -> None:
        """A node has this prompt in its cache."""
        self._remember(self._pieces(prompt, salt), WorkerPair(None, incarnation, 0, 0))

    def clear_prefixes(self) -> None:
        """All caches have been emptied."""
        self._holders.clear()

    def rename_worker(self, previous: str, incarnation: str) -> None:
        """A node goes on under another incarnation, with its cache and without requests."""
        if previous in self._bits:
            self._bits[incarnation] = self._bits.pop(previous)
        self.remove_worker(previous)

    def remove_worker(self, incarnation: str) -> None:
        """A node is gone, and its cache with it."""
        self._load.pop(incarnation, None)
        self._other_load.pop(incarnation, None)
        self._num_requests.pop(incarnation, None)
        self._num_begun.pop(incarnation, None)
        self._local_load.pop(incarnation, None)
        self._idle_at.pop(incarnation, None)
        self._turn.pop(incarnation, None)
        bit = self._bits.pop(incarnation, 0)
        for piece, holders in self._holders.items():
            if holders & bit:
                self._holders[piece] = holders ^ bit

    def _give(self, pair: WorkerPair) -> None:
        self._num_chosen += 1
        load, last = self._load, pair.last
        if pair.prefill is not None:
            load[pair.prefill] = load.get(pair.prefill, 0) + pair.num_compute
        else:
            self._local_load[last] = self._local_load.get(last, 0) + pair.num_compute
        load[last] = load.get(last, 0) + pair.num_hold
        self._num_requests[last] = self._num_requests.get(last, 0) + 1
        self._num_begun.setdefault(last, 0)
        if pair.prefill is not None:
            self._turn[pair.prefill] = self._num_chosen
        if pair.decode is not None:
            self._turn[pair.decode] = self._num_chosen

    @staticmethod
    def _subtract(load: dict[str, int], incarnation: str, num_tokens: int) -> None:
        before = load.get(incarnation)
        if before is not None:  # a removed node has no count
            assert before >= num_tokens
            load[incarnation] = before - num_tokens

    def _pieces(self, prompt: Sequence[int], salt: str) -> list[int]:
        """Chained hashes of the prompt's leading whole pieces; each covers everything up to its end."""
        size = self._piece_tokens
        value = zlib.crc32(salt.encode())
        pieces = []
        for end in range(size, min(len(prompt), MAX_PIECES * size) + 1, size):
            value = hash((value, tuple(prompt[end - size : end])))  # of integers alone, the same in every process
            pieces.append(value)
        return pieces

    def _cached(self, pieces: list[int]) -> dict[str, int]:
        """Tokens of the prompt that each node has probably cached; nodes without any are left out."""
        holders = self._holders
        having = -1  # bits of the nodes that have all pieces so far
        depths: list[tuple[int, int]] = []  # bits of nodes that have some pieces and no more, and how many
        for depth, piece in enumerate(pieces):
            now = having & holders.get(piece, 0)
            if now != having:
                if depth:
                    depths.append((having ^ now, depth))
                having = now
                if not now:
                    break
            holders.move_to_end(piece)
        else:
            depths.append((having, len(pieces)))
        size = self._piece_tokens
        return {
            incarnation: count * size for bits, count in depths for incarnation, bit in self._bits.items() if bits & bit
        }

    def _remember(self, pieces: list[int], pair: WorkerPair) -> None:
        holders, bits = self._holders, 0
        for incarnation in pair.nodes:
            bits |= self._bit(incarnation)
        for piece in pieces:
            holders[piece] = holders.get(piece, 0) | bits
        while len(holders) > self._max_pieces:
            holders.popitem(last=False)

    def _bit(self, incarnation: str) -> int:
        """The bit of a node; a new node gets the lowest that is free."""
        bit = self._bits.get(incarnation, 0)
        if not bit:
            used = sum(self._bits.values())
            bit = self._bits[incarnation] = ~used & (used + 1)
        return bit
