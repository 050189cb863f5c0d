"""Chooses the prefill node and the decode node of each request. Pure.

Both are chosen by least cost. A prefill node costs the time that it takes to compute the tokens that it has been given
and those of this prompt that it has probably not cached; tokens count alike until every node has measured what one
takes. A decode node costs the tokens that its requests hold or will hold, as a share of its pool, less the part of this
prompt that it has cached; a node that runs its maximum of requests comes after the others. What a node has cached is
guessed from what it was sent (``gateway.workers.routing.prefix_index``).

What is known of the nodes is kept in arrays (``gateway.workers.routing.candidates``), so that the costs of a thousand
nodes are a few operations of numpy. The nodes of a request are a ``NodeGroup``, which is made once for each tuple of
nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.config.shared import LocalPrefillMode
from gateway.workers.routing.candidates import (
    ALL_NODES,
    NUM_ROWS,
    Candidate,
    Column,
    NodeArrays,
    NodeFilter,
    NodeGroup,
    Rows,
    can_pair,
    pairable,
)
from gateway.workers.routing.placement import DecodePlace, PrefillPlace
from gateway.workers.routing.prefix_index import PrefixIndex

#: The rows of nodes that are gone are given to other nodes once there are at least this many of them, and no fewer than
#: there are nodes.
MIN_STALE_ROWS = 64
#: Larger numbers that nodes send count as this one, so that sums with those of the gateway's own requests stay exact.
MAX_TOKENS = 1 << 52
#: Groups that are kept, the most recently used: one, and one for each LoRA adapter that requests ask for.
MAX_GROUPS = 64
#: Pieces of prompts that are remembered for all nodes together (``PrefixIndex``).
REMEMBERED_PIECES = 200_000


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
        num_hold: tokens of prompt and expected output, which a decode node holds unless it is bounded.
        cached: tokens of the prompt that nodes have probably cached, by row; None: none have any.
    """

    now: float
    num_prompt: int
    num_hold: int
    cached: Column | None

    def num_lacking(self, row: int) -> int:
        """Tokens of the prompt that a node has to compute or to receive."""
        return self.num_prompt if self.cached is None else self.num_prompt - int(self.cached[row])

    def all_lacking(self, rows: Rows) -> Column | int:
        """The same for several nodes."""
        return self.num_prompt if self.cached is None else self.num_prompt - self.cached[rows]


class Router:
    """Chooses pairs and keeps count of what each node was given.

    Args:
        piece_tokens: tokens of a piece of a prompt (``PrefixIndex``).
        local_prefill: whether decode nodes compute prompts: never, always, or (auto) where it costs less.
        local_threshold: with auto, they compute prompts of which they lack fewer tokens than this, whatever it costs;
            None: by cost.
        max_dispatch_ahead: requests sent beyond those that decode nodes run at once, for each node that computes
            prompts, so that these nodes always have work.
    """

    def __init__(
        self, *, piece_tokens: int = 64, local_prefill: LocalPrefillMode = "never",
        local_threshold: int | None = None, max_dispatch_ahead: int = 64,
    ) -> None:  # fmt: skip
        self._max_dispatch_ahead = max_dispatch_ahead
        self._local_prefill = local_prefill
        self._local_threshold = local_threshold
        self.prefixes = PrefixIndex(piece_tokens, REMEMBERED_PIECES)
        self._arrays = NodeArrays()
        self._rows: dict[str, int] = {}  # of each node, by incarnation
        self._names: dict[int, str] = {}  # the reverse
        self._free_rows = list(range(NUM_ROWS - 1, -1, -1))
        self._groups: dict[tuple[int, int], NodeGroup] = {}
        self._num_chosen = 0

    @property
    def uses_costs(self) -> bool:
        """Whether measured times decide, which the nodes' heartbeats bring."""
        return self._local_prefill == "auto" and self._local_threshold is None

    def dispatch_capacity(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> int:
        """Requests that may be sent now; negative if nodes have gone."""
        if not decodes or not (prefills or self._local_prefill == "always"):
            return 0
        group, arrays = self._group(prefills, decodes), self._arrays
        ahead = self._max_dispatch_ahead * (len(prefills) or len(decodes))
        room = arrays.max_running[group.decode_rows] - arrays.num_requests[group.decode_rows]
        return ahead + int(room.sum()) - int(arrays.num_requests[group.prefill_rows].sum())

    # ---- the choice -------------------------------------------------------------------------------------------------

    def choose(
        self, prefills: Sequence[Candidate], decodes: Sequence[Candidate], prompt: Sequence[int],
        *, num_new: int, num_expected: int = 0, salt: str = "", is_local: bool = False, among: NodeFilter = ALL_NODES,
        now: float = 0.0,
    ) -> WorkerPair | None:  # fmt: skip
        """The pair for one request, counted as sent to it; None if no pair that can exchange pages has large enough
        pools.

        Args:
            prefills, decodes: tuples or lists. What is computed of tuples is kept for the next call, so their nodes
                change by ``observe`` alone. Lists cost more.
            num_new: maximum of output tokens; a pool must hold them.
            num_expected: predicted output tokens, for which the request is counted; 0 without a prediction.
            is_local: the decode node computes the prompt, whatever ``local_prefill`` says.
            among: which of the nodes may take the request.
            now: the instant, by which nodes have computed a part of what they were given.
        """
        num_prompt = len(prompt)
        num_hold = num_prompt + _output_to_hold(num_new, num_expected)
        is_local_only = is_local or self._local_prefill == "always"
        group = self._group(prefills, decodes)
        if among != ALL_NODES:
            group = self._narrowed(group, among)
        able = self._able(group, num_prompt, num_prompt + num_new, is_local_only=is_local_only)
        if able is None:
            return None
        p_rows, d_rows, can = able
        is_choice = len(p_rows) > 1 or len(d_rows) > 1 or self._local_prefill == "auto"
        pieces = self.prefixes.pieces(prompt, salt) if is_choice else b""
        cached = self.prefixes.cached(pieces, len(self._arrays.load)) if pieces else None
        needs = _Needs(now, num_prompt, num_hold, cached)
        if num_new == 1 and not is_local_only:
            return self._chosen(self._cheapest_prefill(p_rows, needs), None, needs, pieces)
        place = self._cheapest_decode(d_rows, needs)
        decode = int(d_rows[place])
        if is_local_only:
            return self._chosen(None, decode, needs, pieces)
        prefill = self._cheapest_prefill(p_rows if can is None else p_rows[can[:, place]], needs)
        if self._local_prefill == "auto":
            local = self._local_node(prefill, decode, d_rows, needs)
            if local is not None:
                return self._chosen(None, local, needs, pieces)
        return self._chosen(prefill, decode, needs, pieces)

    def _narrowed(self, group: NodeGroup, among: NodeFilter) -> NodeGroup:
        """The group without the nodes that may not take a request."""
        arrays = self._arrays
        kept: list[NDArray[np.bool_]] = []
        for rows, counts in ((group.prefill_rows, arrays.load), (group.decode_rows, arrays.num_requests)):
            able = np.ones(len(rows), np.bool_)
            if among.revision:
                able &= arrays.revision[rows] == hash(among.revision)
            if rows is group.decode_rows and among.decode is not None:
                able &= rows == self._rows.get(among.decode, -1)
            else:
                for incarnation in among.avoid:
                    able &= rows != self._rows.get(incarnation, -1)
            if among.prefers_idle and (idle := able & (counts[rows] == 0)).any():
                able = idle
            kept.append(able)
        prefills, decodes = kept
        return group._replace(
            prefill_rows=group.prefill_rows[prefills],
            decode_rows=group.decode_rows[decodes],
            can_pair=None if group.can_pair is None else group.can_pair[np.ix_(prefills, decodes)],
        )

    def _able(
        self, group: NodeGroup, num_prompt: int, num_most: int, *, is_local_only: bool
    ) -> tuple[Rows, Rows, NDArray[np.bool_] | None] | None:
        """The rows of the prefill and of the decode nodes with large enough pools, and which can pair; None if none."""
        prefills, decodes, can = group.prefill_rows, group.decode_rows, group.can_pair
        longest = self._arrays.longest
        if is_local_only:
            prefills, can = prefills[:0], None
        elif num_prompt > group.min_prefill:
            fits = longest[prefills] >= num_prompt
            prefills, can = prefills[fits], None if can is None else can[fits]
        if num_most > group.min_decode:
            fits = longest[decodes] >= num_most
            decodes, can = decodes[fits], None if can is None else can[:, fits]
        if can is not None:
            paired = can.any(axis=0)
            if not paired.all():
                decodes, can = decodes[paired], can[:, paired]
        if not len(decodes) or not (len(prefills) or is_local_only):
            return None
        return prefills, decodes, can

    def _cheapest_prefill(self, rows: Rows, needs: _Needs) -> int:
        """The row of the node that computes the prompt first."""
        if len(rows) == 1:
            return int(rows[0])
        token_s = self._arrays.prompt_token_s[rows]
        if token_s[token_s.argmin()]:
            costs = self._wait_s(rows, needs.now) + needs.all_lacking(rows) * token_s
        else:
            costs = self._arrays.load[rows] + needs.all_lacking(rows)
        return int(rows[self._least(rows, costs)])

    def _cheapest_decode(self, rows: Rows, needs: _Needs) -> int:
        """The place of the node, among these rows, that has most room for the request."""
        if len(rows) == 1:
            return 0
        arrays = self._arrays
        hold = arrays.load[rows] + np.minimum(needs.num_hold, arrays.most_held[rows])
        if needs.cached is not None:
            hold -= needs.cached[rows]
        costs = hold / arrays.capacity[rows]
        is_full = arrays.num_requests[rows] >= arrays.max_running[rows]
        if not is_full.all():
            costs[is_full] = np.inf
        return self._least(rows, costs)

    def _least(self, rows: Rows, costs: Column) -> int:
        """The place of the least cost; of equal ones that of the node that was chosen longest ago."""
        places = (costs == costs[costs.argmin()]).nonzero()[0]
        if len(places) == 1:
            return int(places[0])
        return int(places[self._arrays.turn[rows[places]].argmin()])

    def _wait_s(self, rows: Rows | int, now: float) -> Column:
        """Seconds that prefill nodes still take for the tokens that they were given, as far as is known."""
        arrays, token_s = self._arrays, self._arrays.prompt_token_s[rows]
        least, most = (min, max) if isinstance(rows, int) else (np.minimum, np.maximum)  # numpy is slow for one number
        own_s = most(arrays.idle_at[rows] - now, 0.0)
        wait_s: Column = least(own_s + arrays.other_load[rows] * token_s, arrays.load[rows] * token_s)
        return wait_s

    def _local_node(self, prefill: int, decode: int, decodes: Rows, needs: _Needs) -> int | None:
        """The row of a decode node that computes the prompt at less cost than this pair; None if there is none."""
        if self._local_threshold is not None:
            return decode if needs.num_lacking(decode) < self._local_threshold else None
        arrays = self._arrays
        token_s = float(arrays.prompt_token_s[prefill])
        if not token_s:
            return None
        there = PrefillPlace(
            wait_s=float(self._wait_s(prefill, needs.now)),
            num_to_compute=needs.num_lacking(prefill),
            token_s=token_s,
            num_to_send=needs.num_lacking(decode),
            send_s=float(arrays.send_token_s[prefill]),
        )
        return self._cheaper_decode(decodes, needs, there)

    def _cheaper_decode(self, rows: Rows, needs: _Needs, there: PrefillPlace) -> int | None:
        """The row of the cheapest decode node with room that costs less than a prefill node; None if none does.

        The nodes that cost more by themselves already, without the delay of others, are left out first.
        """
        arrays, limit_s = self._arrays, there.cost_s
        token_s, num_lacking = self._token_s(rows, there.token_s), needs.all_lacking(rows)
        own_s = arrays.step_s[rows] + (arrays.local_load[rows] + num_lacking) * token_s
        cheap = (own_s < limit_s).nonzero()[0]
        if not len(cheap):
            return None
        rows = rows[cheap]
        num_begun = arrays.num_begun[rows]
        costs = DecodePlace(
            own_s=own_s[cheap],
            prompt_s=(num_lacking * token_s)[cheap],
            num_outputs=num_begun,
            num_coming=np.maximum(arrays.num_requests[rows] - num_begun, 0.0),
            coming_s=there.wait_s,
        ).cost_s
        while len(rows):
            best = self._least(rows, costs)
            if costs[best] >= limit_s:
                return None
            if self._has_room(rows[best : best + 1], needs.num_hold).all():
                return int(rows[best])
            able = self._has_room(rows, needs.num_hold)
            rows, costs = rows[able], costs[able]
        return None

    def _has_room(self, rows: Rows, num_hold: int) -> NDArray[np.bool_]:
        """Which decode nodes can take one more request now."""
        arrays = self._arrays
        hold = arrays.load[rows] + np.minimum(num_hold, arrays.most_held[rows])
        has_room: NDArray[np.bool_] = hold <= arrays.capacity[rows]
        return has_room & (arrays.num_requests[rows] < arrays.max_running[rows])

    def _token_s(self, rows: Rows, fallback_s: float) -> Column:
        """What a prompt token takes on decode nodes; one that has computed none yet counts as fast as the others."""
        token_s: Column = self._arrays.prompt_token_s[rows]
        if not token_s[token_s.argmin()]:
            known = token_s[token_s > 0]
            token_s[token_s == 0] = known.sum() / len(known) if len(known) else fallback_s
        return token_s

    def _chosen(self, prefill: int | None, decode: int | None, needs: _Needs, pieces: bytes) -> WorkerPair:
        """Count a request as sent to the nodes of these rows; without a prefill node the decode node computes it."""
        rows = [row for row in (prefill, decode) if row is not None]
        num_hold = 0 if decode is None else self._num_hold(decode, needs.num_hold)
        names = [None if row is None else self._names[row] for row in (prefill, decode)]
        pair = WorkerPair(names[0], names[1], needs.num_lacking(rows[0]), num_hold)
        if prefill is not None:
            self._extend_idle_at(prefill, needs.now, pair.num_compute)
        self._count_in(pair)
        if pieces:
            self.prefixes.remember(pieces, rows)
        return pair

    def _num_hold(self, row: int, num_tokens: int) -> int:
        """Tokens of its pool that a decode node holds for a request of ``num_tokens``."""
        return min(num_tokens, int(self._arrays.most_held[row]))

    def _extend_idle_at(self, row: int, now: float, num_compute: int) -> None:
        """Move the instant at which a prefill node will be idle by what a further prompt takes."""
        arrays = self._arrays
        if token_s := arrays.prompt_token_s[row]:
            arrays.idle_at[row] = max(arrays.idle_at[row], now) + num_compute * token_s

    def _estimate_idle_at(self, row: int, now: float) -> None:
        """Estimate again when a prefill node will be idle, if that instant has passed: prompts took longer than
        expected, or were sent before anything was measured. All tokens of unfinished prompts count."""
        arrays = self._arrays
        if arrays.idle_at[row] <= now:
            arrays.idle_at[row] = now + (arrays.load[row] - arrays.other_load[row]) * arrays.prompt_token_s[row]

    def choose_again(
        self, pair: WorkerPair, prefills: Sequence[Candidate], decodes: Sequence[Candidate],
        *, num_new: int, num_expected: int = 0,
    ) -> WorkerPair | None:  # fmt: skip
        """The same pair for another sample of the prompt, which costs only its output.

        None if its nodes no longer take requests together.
        """
        able = self._group(prefills, decodes).by_incarnation
        nodes = [able[incarnation] for incarnation in pair.nodes if incarnation in able]
        if len(nodes) < len(pair.nodes) or (len(nodes) == 2 and not can_pair(nodes[0], nodes[1])):
            return None
        num_output = _output_to_hold(num_new, num_expected)
        num_hold = 0 if pair.decode is None else self._num_hold(self._rows[pair.decode], num_output)
        sample = WorkerPair(pair.prefill, pair.decode, 0, num_hold)
        self._count_in(sample)
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
        arrays, rows = self._arrays, self._group((), decodes).decode_rows
        has_room = arrays.longest[rows] >= num_tokens + num_new
        has_room &= arrays.num_requests[rows] < arrays.max_running[rows]
        places = has_room.nonzero()[0]
        rows = rows[places]
        best_first = places[np.lexsort((arrays.turn[rows], arrays.load[rows] / arrays.capacity[rows]))]
        others = (decodes[place] for place in best_first if decodes[place].incarnation != source.incarnation)
        target = next((node for node in others if can_pair(source, node)), None)
        if target is None:
            return None
        num_output = _output_to_hold(num_new, num_expected)
        num_hold = self._num_hold(self._rows[target.incarnation], num_tokens + num_output)
        pair = WorkerPair(source.incarnation, target.incarnation, 0, num_hold)
        self._count_in(pair)
        return pair

    # ---- what nodes have to do --------------------------------------------------------------------------------------

    def observe(self, node: Candidate) -> None:
        """Take in what a node has measured, and how many requests it takes now."""
        row = self._rows.get(node.incarnation)
        if row is not None:
            self._take_in(row, node)

    def load(self, incarnation: str) -> int:
        """Tokens that a node still has to compute (prefill) or holds (decode), for all gateways."""
        row = self._rows.get(incarnation)
        return 0 if row is None else int(self._arrays.load[row])

    def set_other_load(self, incarnation: str, num_tokens: int) -> None:
        """What a node has to do for other gateways, as it says itself."""
        row, arrays = self._row(incarnation), self._arrays
        num_tokens = min(num_tokens, MAX_TOKENS)
        arrays.load[row] += num_tokens - arrays.other_load[row]
        arrays.other_load[row] = num_tokens

    def num_requests(self, incarnation: str) -> int:
        """Requests in flight whose last token this node makes."""
        row = self._rows.get(incarnation)
        return 0 if row is None else int(self._arrays.num_requests[row])

    def prefill_done(self, pair: WorkerPair, now: float = 0.0) -> None:
        """The first token has arrived, or never will."""
        arrays, last = self._arrays, self._rows.get(pair.last)  # a removed node has no counts
        if last is not None:
            arrays.num_begun[last] += 1
        if pair.prefill is None:
            _subtract(arrays.local_load, last, pair.num_compute)
        else:
            prefill = self._rows.get(pair.prefill)
            _subtract(arrays.load, prefill, pair.num_compute)
            if prefill is not None and pair.num_compute:
                self._estimate_idle_at(prefill, now)

    def decode_done(self, pair: WorkerPair) -> None:
        arrays, last = self._arrays, self._rows.get(pair.last)
        _subtract(arrays.load, last, pair.num_hold)
        if last is not None:
            arrays.num_requests[last] -= 1
            arrays.num_begun[last] -= 1

    def set_paused(self, pair: WorkerPair, *, is_paused: bool) -> None:
        """The request gives its place in the batch of the last node to another one, or takes it back."""
        row = self._rows.get(pair.last)
        if row is not None:
            self._arrays.num_requests[row] += -1 if is_paused else 1

    def note_cached(self, prompt: Sequence[int], salt: str, incarnation: str) -> None:
        """A node has this prompt in its cache."""
        self.prefixes.remember(self.prefixes.pieces(prompt, salt), [self._row(incarnation)])

    def clear_prefixes(self) -> None:
        """All caches have been emptied."""
        self.prefixes.clear()

    def _count_in(self, pair: WorkerPair) -> None:
        self._num_chosen += 1
        arrays, last = self._arrays, self._row(pair.last)
        if pair.prefill is not None:
            prefill = self._row(pair.prefill)
            arrays.load[prefill] += pair.num_compute
            arrays.turn[prefill] = self._num_chosen
        else:
            arrays.local_load[last] += pair.num_compute
        arrays.load[last] += pair.num_hold
        arrays.num_requests[last] += 1
        if pair.decode is not None:
            arrays.turn[last] = self._num_chosen

    # ---- nodes that come and go -------------------------------------------------------------------------------------

    def rename_worker(self, previous: str, incarnation: str) -> None:
        """A node goes on under another incarnation, with its cache and without requests."""
        self._groups.clear()
        row = self._rows.pop(previous, None)
        if row is None:
            return
        self._arrays.clear(row)
        known = self._rows.get(incarnation)
        if known is not None:  # it has been given requests already
            self._arrays.copy(known, row)
            self.remove_worker(incarnation)
        self._rows[incarnation], self._names[row] = row, incarnation

    def remove_worker(self, incarnation: str) -> None:
        """A node is gone, and its cache with it."""
        self._groups.clear()
        row = self._rows.pop(incarnation, None)
        if row is None:
            return
        self._arrays.clear(row)
        del self._names[row]
        if self.prefixes.remove(row) >= max(MIN_STALE_ROWS, len(self._rows)):
            self._free_rows += self.prefixes.sweep()

    def _group(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> NodeGroup:
        """The group of these nodes, which is kept for tuples."""
        key = id(prefills), id(decodes)
        group = self._groups.get(key)
        if group is not None and group.prefills is prefills and group.decodes is decodes:
            self._groups[key] = self._groups.pop(key)  # the least recently used group comes first
            return group
        nodes = [*prefills, *decodes]
        for node in nodes:
            self._take_in(self._row(node.incarnation), node)
        is_free = not any(node.failed_peers for node in nodes) and len({node.revision for node in nodes}) == 1
        group = NodeGroup(
            prefills,
            decodes,
            prefill_rows=np.array([self._rows[node.incarnation] for node in prefills], np.intp),
            decode_rows=np.array([self._rows[node.incarnation] for node in decodes], np.intp),
            can_pair=None if is_free else pairable(prefills, decodes),
            min_prefill=min([node.longest_tokens for node in prefills], default=0),
            min_decode=min([node.longest_tokens for node in decodes], default=0),
            by_incarnation={node.incarnation: node for node in nodes},
        )
        if isinstance(prefills, tuple) and isinstance(decodes, tuple):
            if len(self._groups) >= MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
            self._groups[key] = group
        return group

    def _row(self, incarnation: str) -> int:
        """The row of a node; a new node gets one that is free."""
        row = self._rows.get(incarnation)
        if row is None:
            if not self._free_rows:
                self._free_rows = list(range(2 * len(self._arrays.load) - 1, len(self._arrays.load) - 1, -1))
                self._arrays.grow()
            row = self._free_rows.pop()
            self._rows[incarnation], self._names[row] = row, incarnation
        return row

    def _take_in(self, row: int, node: Candidate) -> None:
        arrays = self._arrays
        arrays.capacity[row] = min(node.capacity_tokens, MAX_TOKENS)
        arrays.longest[row] = min(node.longest_tokens, MAX_TOKENS)
        arrays.most_held[row] = min(node.most_held_tokens or MAX_TOKENS, MAX_TOKENS)
        arrays.revision[row] = hash(node.revision)
        arrays.max_running[row] = min(node.max_running, MAX_TOKENS)
        arrays.step_s[row], arrays.prompt_token_s[row] = node.step_s, node.prompt_token_s
        arrays.send_token_s[row] = node.send_token_s


def _output_to_hold(num_new: int, num_expected: int) -> int:
    """Output tokens for which a request is counted: those predicted, or without a prediction the maximum."""
    return min(num_expected, num_new) or num_new


def _subtract(counts: Column, row: int | None, number: int) -> None:
    if row is not None:
        assert counts[row] >= number
        counts[row] -= number
