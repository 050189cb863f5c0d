"""The router's rule written down once more, node by node: slow, and without arrays, rows and runs."""

from collections import defaultdict
from dataclasses import dataclass, field

from gateway.workers.routing.candidates import can_pair
from gateway.workers.routing.placement import DELAY_WEIGHT
from gateway.workers.routing.router import WorkerPair


@dataclass
class NodeState:
    """What one node was given."""

    load: int = 0
    other_load: int = 0
    num_requests: int = 0
    num_begun: int = 0
    local_load: int = 0
    idle_at: float = 0.0
    turn: int = 0
    prefixes: set = field(default_factory=set)


def held(node, num_tokens):
    return min(num_tokens, node.most_held_tokens or num_tokens)


class ExhaustiveRouter:
    def __init__(self, piece_tokens, local_prefill="never", local_threshold=None):
        self.piece_tokens, self.mode, self.threshold = piece_tokens, local_prefill, local_threshold
        self.states = defaultdict(NodeState)
        self.num_chosen = 0

    def pieces(self, prompt, salt):
        size = self.piece_tokens
        return [(salt, *prompt[:end]) for end in range(size, len(prompt) + 1, size)]

    def lacking(self, node, prompt, pieces):
        """Tokens that a node has to compute: all but the longest prefix that it was sent."""
        num_cached = 0
        for number, piece in enumerate(pieces, 1):
            if piece not in self.states[node.incarnation].prefixes:
                break
            num_cached = number * self.piece_tokens
        return len(prompt) - num_cached

    def choose(self, prefills, decodes, prompt, *, num_new, num_expected=0, salt="", now=0.0):
        num_hold = len(prompt) + (min(num_expected, num_new) or num_new)
        is_always = self.mode == "always"
        prefills = [] if is_always else [node for node in prefills if node.longest_tokens >= len(prompt)]
        decodes = [node for node in decodes if node.longest_tokens >= len(prompt) + num_new]
        if not is_always:
            decodes = [node for node in decodes if any(can_pair(other, node) for other in prefills)]
        if not decodes:
            return None
        is_choice = self.mode == "auto" or len(prefills) > 1 or len(decodes) > 1  # else no prefix matters
        pieces = self.pieces(prompt, salt) if is_choice else []
        lacking = {node.incarnation: self.lacking(node, prompt, pieces) for node in (*prefills, *decodes)}
        if num_new == 1 and not is_always:
            prefill = self.cheapest_prefill(prefills, lacking, now)
            pair = WorkerPair(prefill.incarnation, None, lacking[prefill.incarnation], 0)
            return self.give(prefill, None, pair, pieces, now)
        decode = min(
            decodes, key=lambda node: self.decode_cost(node, num_hold, len(prompt) - lacking[node.incarnation])
        )
        local = decode if is_always else None
        if not is_always:
            able = [node for node in prefills if can_pair(node, decode)]
            prefill = self.cheapest_prefill(able, lacking, now)
            if self.mode == "auto":
                local = self.local_node(prefill, decode, decodes, lacking, num_hold, now)
        if local is not None:
            pair = WorkerPair(None, local.incarnation, lacking[local.incarnation], held(local, num_hold))
            return self.give(None, local, pair, pieces, now)
        num_hold = held(decode, num_hold)
        pair = WorkerPair(prefill.incarnation, decode.incarnation, lacking[prefill.incarnation], num_hold)
        return self.give(prefill, decode, pair, pieces, now)

    def choose_again(self, pair, prefills, decodes, *, num_new):
        able = {node.incarnation: node for node in (*prefills, *decodes)}
        nodes = [able[incarnation] for incarnation in pair.nodes if incarnation in able]
        if len(nodes) < len(pair.nodes) or (len(nodes) == 2 and not can_pair(*nodes)):
            return None
        prefill, decode = (able.get(incarnation) for incarnation in (pair.prefill, pair.decode))
        num_hold = 0 if decode is None else held(decode, num_new)
        return self.give(prefill, decode, WorkerPair(pair.prefill, pair.decode, 0, num_hold), [], 0.0)

    def choose_target(self, source, decodes, *, num_tokens, num_new):
        able = [
            node
            for node in decodes
            if node.incarnation != source.incarnation
            and can_pair(source, node)
            and node.longest_tokens >= num_tokens + num_new
            and self.states[node.incarnation].num_requests < node.max_running
        ]
        if not able:
            return None
        states = self.states
        target = min(
            able, key=lambda node: (states[node.incarnation].load / node.capacity_tokens, states[node.incarnation].turn)
        )
        num_hold = held(target, num_tokens + num_new)
        return self.give(source, target, WorkerPair(source.incarnation, target.incarnation, 0, num_hold), [], 0.0)

    def set_paused(self, pair, *, is_paused):
        if pair.last in self.states:
            self.states[pair.last].num_requests += -1 if is_paused else 1

    def cheapest_prefill(self, nodes, lacking, now):
        is_measured = all(node.prompt_token_s for node in nodes)

        def cost(node):
            state, num_lacking = self.states[node.incarnation], lacking[node.incarnation]
            if not is_measured:
                return state.load + num_lacking, state.turn
            return self.wait_s(node, now) + num_lacking * node.prompt_token_s, state.turn

        return min(nodes, key=cost)

    def wait_s(self, node, now):
        state, token_s = self.states[node.incarnation], node.prompt_token_s
        return min(max(state.idle_at - now, 0.0) + state.other_load * token_s, state.load * token_s)

    def decode_cost(self, node, num_hold, num_cached):
        state = self.states[node.incarnation]
        share = (state.load + held(node, num_hold) - num_cached) / node.capacity_tokens
        return state.num_requests >= node.max_running, share, state.turn

    def local_node(self, prefill, decode, decodes, lacking, num_hold, now):
        if self.threshold is not None:
            return decode if lacking[decode.incarnation] < self.threshold else None
        if not prefill.prompt_token_s:
            return None
        wait_s = self.wait_s(prefill, now)
        there_s = wait_s + lacking[prefill.incarnation] * prefill.prompt_token_s
        there_s += lacking[decode.incarnation] * prefill.send_token_s
        known = [node.prompt_token_s for node in decodes if node.prompt_token_s]
        usual_s = sum(known) / len(known) if known else prefill.prompt_token_s

        def cost(node):
            state, token_s = self.states[node.incarnation], node.prompt_token_s or usual_s
            if state.load + held(node, num_hold) > node.capacity_tokens or state.num_requests >= node.max_running:
                return float("inf"), state.turn
            seconds = lacking[node.incarnation] * token_s
            coming_s = seconds * seconds / (2 * wait_s) if seconds < wait_s else seconds - wait_s / 2
            others_s = state.num_begun * seconds + max(state.num_requests - state.num_begun, 0) * coming_s
            own_s = node.step_s + (state.local_load + lacking[node.incarnation]) * token_s
            return own_s + DELAY_WEIGHT * others_s, state.turn

        best = min(decodes, key=cost)
        return best if cost(best)[0] < there_s else None

    def give(self, prefill, decode, pair, pieces, now):
        self.num_chosen += 1
        last = self.states[pair.last]
        if prefill is None:
            last.local_load += pair.num_compute
        else:
            state = self.states[prefill.incarnation]
            state.load += pair.num_compute
            state.turn = self.num_chosen
            if prefill.prompt_token_s:
                begins_at = max(state.idle_at, now)
                state.idle_at = begins_at + pair.num_compute * prefill.prompt_token_s
        last.load += pair.num_hold
        last.num_requests += 1
        if decode is not None:
            last.turn = self.num_chosen
        for incarnation in pair.nodes:
            self.states[incarnation].prefixes.update(pieces)
        return pair

    def prefill_done(self, pair, nodes, now):
        if pair.last in self.states:  # it is not gone
            self.states[pair.last].num_begun += 1
        if pair.prefill is None and pair.last in self.states:
            self.states[pair.last].local_load -= pair.num_compute
        elif pair.prefill in self.states:
            state = self.states[pair.prefill]
            state.load -= pair.num_compute
            if pair.num_compute and state.idle_at <= now:
                state.idle_at = now + (state.load - state.other_load) * nodes[pair.prefill].prompt_token_s

    def decode_done(self, pair):
        if pair.last in self.states:
            last = self.states[pair.last]
            last.load -= pair.num_hold
            last.num_requests -= 1
            last.num_begun -= 1

    def set_other_load(self, incarnation, num_tokens):
        state = self.states[incarnation]
        state.load += num_tokens - state.other_load
        state.other_load = num_tokens

    def remove_worker(self, incarnation):
        self.states.pop(incarnation, None)
