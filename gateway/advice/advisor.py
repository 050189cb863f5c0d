"""Says how many nodes of each role the present load of one model needs, and why (``/v1/advice``). Pure.

The formulas are those with which the planner begins its search (``common.capacity``), fed with what the gateway and the
nodes measure. A node is planned for a share of its time, or of its largest batch (``--advice-utilization``).

- Prefill nodes compute the prompt tokens that arrive and are not cached, in steps as full as they may be. With an
  objective for the first token, few prompts may wait longer than it leaves.
- Decode nodes sample the output tokens of the requests that arrive. The largest batch is bounded by the slots, by the
  pages that an output holds, by the objective between two tokens, and by what has been seen of larger steps.

The advice rises at once. It falls once a lower number has been enough for a whole ``--advice-hold``; so does the number
of nodes at the start, of which nothing is measured yet.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from common import capacity
from common.config.shared import ROLES, Role
from common.wire.messages import ClientLoad
from gateway.advice.load_meter import LoadMeter, Objectives
from gateway.advice.node_meter import NodeFigures, NodeMeter, StepModel
from gateway.workers.registry import Worker


@dataclass(frozen=True, slots=True)
class AdviceSettings:
    """The options ``--advice-*``; the objectives are those while no request has ended."""

    window_s: float
    hold_s: float
    utilization: float
    objectives: Objectives


@dataclass(frozen=True, slots=True)
class Need:
    """Nodes that one role needs for the load of the window.

    Attributes:
        count: 0 if the role is not needed at all.
        work: nodes that would be busy all the time, with batches as large as they may be.
        reason: a sentence.
    """

    count: int
    work: float
    reason: str


@dataclass(frozen=True, slots=True)
class RoleAdvice:
    """What is advised for one role.

    Attributes:
        num_nodes: nodes that serve now.
        advised: the number to have.
        needed, work, reason: as in ``Need``; fewer nodes than advised may be needed now.
    """

    role: Role
    num_nodes: int = 0
    advised: int = 0
    needed: int = 0
    work: float = 0.0
    busy_share: float = 0.0
    reason: str = "nothing is measured yet"


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for one model.

    Attributes:
        window_s: the time that the load covers.
        load: of all gateways.
    """

    window_s: float
    load: ClientLoad
    objectives: Objectives
    roles: tuple[RoleAdvice, ...]


def prefill_need(load: ClientLoad, nodes: NodeFigures, ttft_s: float, utilization: float) -> Need:
    """The prefill nodes that the prompts need.

    A prompt waits for the step that the node computes, and then for its own steps.

    Args:
        load: of prompts that prefill nodes compute.
    """
    steps = nodes.steps
    tokens_per_s = max(load.prompt_tokens, nodes.computed_per_s)
    if steps is None or not tokens_per_s:
        return Need(1, 0.0, "no prompts are computed; 1 node is enough")
    size = min(nodes.room_per_step or math.inf, steps.largest)
    token_s = steps.seconds(size) / size
    work = tokens_per_s * token_s
    if not load.prompt_tokens or not load.requests or math.isinf(ttft_s):
        count = capacity.nodes_for(work, utilization)
        return Need(count, work, _busy_reason(work, count, utilization))
    mean = load.prompt_tokens / load.requests
    variation = max(load.prompt_squares / load.requests / mean**2 - 1, 0.0)
    prompts = capacity.PromptWork(work, mean * token_s, variation)
    least_s = 2 * steps.fixed_s + prompts.mean_s
    count = capacity.prefill_nodes(prompts, ttft_s - least_s, utilization=utilization)
    if least_s >= ttft_s:
        reason = f"; a prompt takes {least_s:.2g} s, and more nodes do not make it faster than {ttft_s:g} s"
        return Need(count, work, _busy_reason(work, count, utilization) + reason)
    fewer = capacity.nodes_for(work, utilization)
    if fewer == count:
        return Need(count, work, _busy_reason(work, count, utilization))
    late = capacity.share_waiting(fewer, prompts, ttft_s - least_s)
    reason = f"{_busy_reason(work, fewer, utilization)} for it, but {late:.0%} of first tokens would take longer than"
    return Need(count, work, f"{reason} {ttft_s:g} s; {_nodes_are(count)} needed")


def decode_need(load: ClientLoad, nodes: NodeFigures, itl_s: float, utilization: float, local_s: float) -> Need:
    """The decode nodes that the outputs need.

    Args:
        local_s: seconds per second that they compute prompts.
    """
    steps = nodes.steps
    tokens_per_s = max(load.output_tokens, nodes.sampled_per_s)
    if steps is None or not tokens_per_s:
        count = capacity.nodes_for(local_s, utilization)
        why = f"prompts are {_busy_reason(local_s, count, utilization)}" if local_s else f"{_nodes_are(count)} enough"
        return Need(count, local_s, f"no outputs are decoded; {why}")
    largest, limit = _largest_batch(steps, nodes, itl_s)
    batch = capacity.planned_batch(largest, utilization)
    outputs = capacity.decode_work(tokens_per_s, steps.seconds, batch)
    count = capacity.whole_nodes(outputs + local_s / utilization)
    num_outputs = tokens_per_s * steps.seconds(batch)
    reason = (
        f"{num_outputs:.3g} outputs at once, and a node decodes at most {largest} ({limit}), of which {batch} are"
        f" planned ({utilization:.0%})"
    )
    if local_s:
        reason += f"; prompts keep {local_s:.2f} nodes busy besides"
    return Need(count, outputs + local_s, f"{reason}; {_nodes_are(count)} enough")


def _largest_batch(steps: StepModel, nodes: NodeFigures, itl_s: float) -> tuple[int, str]:
    """The largest batch of a decode node, and what bounds it."""
    bounds = [(int(steps.largest), "larger batches have not been seen")]
    bounds.append((int(nodes.room_per_step), "--max-running-requests"))
    if nodes.held_per_output:
        size = nodes.held_per_output
        bounds.append((int(nodes.capacity_tokens / size), f"its pages, as an output holds {size:.0f} tokens"))
    if not math.isinf(itl_s):
        fast = capacity.largest_batch(steps.seconds, itl_s, max(1, min(bounds)[0]))
        bounds.append((fast, f"a larger step takes too long for {itl_s * 1000:g} ms between tokens"))
    largest, limit = min(bounds, key=lambda bound: bound[0])
    return max(largest, 1), limit


def _busy_reason(work: float, count: int, utilization: float) -> str:
    return f"{work:.2f} nodes of work at {utilization:.0%} target load; {_nodes_are(count)} enough"


def _nodes_are(count: int) -> str:
    return "1 node is" if count == 1 else f"{count} nodes are"


@dataclass(slots=True)
class _RecentMax:
    """The largest need of the last seconds."""

    hold_s: float
    _needs: deque[tuple[float, int]] = field(default_factory=deque)  # falling

    def largest(self, count: int, now: float) -> int:
        needs = self._needs
        while needs and needs[-1][1] <= count:
            needs.pop()
        needs.append((now, count))
        while now - needs[0][0] > self.hold_s:
            needs.popleft()
        return needs[0][1]


class Advisor:
    """The advice for one model.

    Args:
        meter: counts the requests of this gateway.
        needs_prefill: prefill nodes compute prompts; otherwise decode nodes do.

    Attributes:
        advice: as of the last ``tick``.
        load: what clients ask of this gateway alone, which nodes pass on to their other gateways.
    """

    def __init__(self, settings: AdviceSettings, meter: LoadMeter, *, needs_prefill: bool) -> None:
        self._settings = settings
        self._needs_prefill = needs_prefill
        self._nodes = {role: NodeMeter(role, settings.window_s) for role in ROLES}
        self._recent_needs = {role: _RecentMax(settings.hold_s) for role in ROLES}
        self._meter = meter
        self.advice = Advice(0.0, ClientLoad(), settings.objectives, tuple(map(RoleAdvice, ROLES)))
        self.load = ClientLoad()

    def tick(self, workers: Sequence[Worker], *, num_in_flight: int, num_waiting: int, now: float) -> None:
        """Take in a second. Nodes that drain do not count."""
        settings, meter = self._settings, self._meter
        meter.sample(num_in_flight, now)
        self.load = meter.load(num_waiting)
        staying = [node for node in workers if not node.is_draining]
        figures = {
            role: self._nodes[role].sample([node for node in staying if node.register.role == role], now)
            for role in ROLES
        }
        load = _with_others(self.load, staying)
        objectives = meter.objectives()
        is_young = meter.seconds < settings.window_s
        needs = self._needs(load, objectives, figures)
        roles = tuple(self._advice(role, needs[role], figures[role], is_young=is_young, now=now) for role in ROLES)
        self.advice = Advice(meter.seconds, load, objectives, roles)

    def _needs(
        self, load: ClientLoad, objectives: Objectives, figures: Mapping[Role, NodeFigures]
    ) -> Mapping[Role, Need]:
        prefill, decode = figures["prefill"], figures["decode"]
        utilization = self._settings.utilization
        computed = prefill.computed_per_s + decode.computed_per_s
        local_share = decode.computed_per_s / computed if computed else 0.0
        if not self._needs_prefill:
            local_share = 1.0
        local_tokens = max(load.prompt_tokens * local_share, decode.computed_per_s)
        first_per_s = (1 - local_share) * load.requests  # first tokens, which prefill nodes sample
        later = msgspec.structs.replace(load, output_tokens=max(load.output_tokens - first_per_s, 0.0))
        outputs = decode_need(
            later, decode, objectives.itl_s, utilization, local_s=local_tokens * decode.prompt_token_s
        )
        if not self._needs_prefill:
            return {
                "prefill": Need(0, 0.0, "decode nodes compute all prompts (--local-prefill always)"),
                "decode": outputs,
            }
        prompts = _scaled(load, 1 - local_share)
        return {"prefill": prefill_need(prompts, prefill, objectives.ttft_s, utilization), "decode": outputs}

    def _advice(self, role: Role, need: Need, nodes: NodeFigures, *, is_young: bool, now: float) -> RoleAdvice:
        count = max(need.count, nodes.num_nodes) if is_young else need.count
        advised = self._recent_needs[role].largest(count, now)
        reason = need.reason
        if advised > need.count:
            reason += f"; {advised} are advised until fewer have been enough for {self._settings.hold_s:g} s"
        return RoleAdvice(role, nodes.num_nodes, advised, need.count, need.work, nodes.busy_share, reason)


def _scaled(load: ClientLoad, share: float) -> ClientLoad:
    return ClientLoad(*(value * share for value in msgspec.structs.astuple(load)))


def _with_others(load: ClientLoad, nodes: Sequence[Worker]) -> ClientLoad:
    """A gateway's load with that of the other gateways, as reported by the node that knows of most."""
    others = [node.heartbeat.other_load for node in nodes if node.heartbeat is not None]
    most = max(others, key=lambda other: other.requests, default=ClientLoad())
    pairs = zip(msgspec.structs.astuple(load), msgspec.structs.astuple(most), strict=True)
    return ClientLoad(*map(sum, pairs))
