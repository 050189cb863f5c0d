"""Measures the nodes of one role by their heartbeats: how busy they are, and what their steps take. Pure.

A heartbeat has totals since the start of the node. The difference of two of them is an *interval*, of about a second.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.config.shared import Role
from common.wire.messages import Heartbeat
from gateway.workers.auto_roles import ARRIVING
from gateway.workers.registry import Worker

#: Intervals after which one counts half for what steps take: enough for steps of different sizes to be among them.
HALF_LIFE = 300
DECAY = 0.5 ** (1 / HALF_LIFE)
#: Step sizes that differ less than this, as a share of their mean, say nothing about what a larger step takes.
MIN_SPREAD = 0.05
#: Nothing is assumed about steps that are more than this many times as large as the largest usual ones.
MAX_EXTRAPOLATION = 2.0
#: No node does more in an interval. A fit would never forget a number that is not finite.
MAX_GAIN = 1e9


class StepModel(NamedTuple):
    """What a step takes by its size, which is its prompt tokens on prefill nodes, and its outputs on decode nodes.

    Attributes:
        largest: sizes beyond this were never seen, nor anything near them.
    """

    fixed_s: float
    each_s: float
    largest: float

    def seconds(self, size: float) -> float:
        return self.fixed_s + self.each_s * size


class StepFit:
    """A line through sizes and durations of steps, by least squares; later intervals have more weight."""

    def __init__(self) -> None:
        self._weight = self._size = self._seconds = self._square = self._product = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Take the means of the steps of one interval."""
        self._weight = self._weight * DECAY + 1.0
        self._size = self._size * DECAY + size
        self._seconds = self._seconds * DECAY + seconds
        self._square = self._square * DECAY + size * size
        self._product = self._product * DECAY + size * seconds

    def model(self) -> StepModel | None:
        """None before the first step.

        Both coefficients are at least 0. If all steps have one size, the whole duration counts as proportional to size.
        """
        if not self._size:
            return None
        size, seconds = self._size / self._weight, self._seconds / self._weight
        variance = max(self._square / self._weight - size * size, 0.0)
        share_s = seconds / size
        each_s = share_s
        if variance > (MIN_SPREAD * size) ** 2:
            slope = (self._product / self._weight - size * seconds) / variance
            each_s = min(max(slope, 0.0), share_s)
        largest = MAX_EXTRAPOLATION * (size + 2 * variance**0.5)
        return StepModel(seconds - each_s * size, each_s, largest)


class Interval(NamedTuple):
    """The time between two heartbeats of one node, and what it did in it; or the sums of several.

    Attributes:
        num_computed, num_sampled: prompt tokens that it computed, and output tokens.
        size: of its steps together.
        room: prompt tokens that fitted into them; not known of decode nodes.
        num_outputs: outputs that it was decoding at the end.
        num_held: tokens of its pool that were in use at the end.
    """

    seconds: float = 0.0
    busy_s: float = 0.0
    num_steps: float = 0.0
    num_computed: float = 0.0
    num_sampled: float = 0.0
    size: float = 0.0
    room: float = 0.0
    num_outputs: float = 0.0
    num_held: float = 0.0


def _sum(intervals: Iterable[Interval]) -> Interval:
    rows = list(intervals)
    return Interval(*map(sum, zip(*rows, strict=True))) if rows else Interval()


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """The nodes of one role over the window.

    Attributes:
        busy_share: of their time in which they computed.
        computed_per_s, sampled_per_s: prompt tokens that they computed and output tokens that they sampled, together.
        held_per_output: tokens of the pool for each output that is decoded; 0 without any.
        room_per_step: prompt tokens that fit into a step (prefill nodes; 0: not known), or outputs (decode nodes).
        capacity_tokens: of the pool of a node.
        prompt_token_s: what a prompt token takes, as the nodes say.
        steps: None before the first step.
    """

    num_nodes: int
    busy_share: float
    computed_per_s: float
    sampled_per_s: float
    held_per_output: float
    room_per_step: float
    capacity_tokens: float
    prompt_token_s: float
    steps: StepModel | None


class NodeMeter:
    """Measures the nodes of one role.

    Args:
        window_s: over which figures are averaged.
    """

    def __init__(self, role: Role, window_s: float) -> None:
        self._role = role
        self._window_s = window_s
        self._last: dict[str, tuple[float, Heartbeat]] = {}  # when it came, by incarnation
        self._intervals: deque[tuple[float, Interval]] = deque()  # once a second: of all nodes together
        self._begins_at: float | None = None  # where the first of the intervals begins
        self._fit = StepFit()
        self._capacity_tokens = self._max_running = 0.0  # of a node, the last while there is none

    def sample(self, nodes: Iterable[Worker], now: float) -> NodeFigures:
        """Take the last heartbeats of the nodes, and return the figures. Called once a second."""
        nodes = list(nodes)
        fresh: list[Interval] = []
        last: dict[str, tuple[float, Heartbeat]] = {}
        for node in nodes:
            beat, before = node.heartbeat, self._last.get(node.incarnation)
            if beat is None:
                continue
            if before is not None and beat is before[1]:
                last[node.incarnation] = before
                continue
            last[node.incarnation] = (node.seen_at, beat)
            if before is not None and node.seen_at > before[0]:
                fresh.append(self._interval(node, beat, before[1], node.seen_at - before[0]))
                self._learn(fresh[-1], node)
        self._last = last
        if self._begins_at is None:
            self._begins_at = now
        intervals = self._intervals
        intervals.append((now, _sum(fresh)))
        while now - intervals[0][0] > self._window_s:
            self._begins_at, _ = intervals.popleft()
        return self._figures(nodes, now - self._begins_at)

    def _interval(self, node: Worker, beat: Heartbeat, before: Heartbeat, seconds: float) -> Interval:
        def gain(*names: str) -> float:
            return sum(_sound(beat.counters.get(name, 0.0) - before.counters.get(name, 0.0)) for name in names)

        num_computed = gain("prompt_tokens_computed", "resumed_tokens_computed")
        num_used = node.register.num_pages - beat.num_free_pages - _sound(beat.gauges.get("evictable_pages", 0.0))
        num_arriving = sum(_sound(number) for name, number in beat.gauges.items() if name.startswith(ARRIVING))
        return Interval(
            seconds=seconds,
            busy_s=gain("busy_seconds"),
            num_steps=gain("steps"),
            num_computed=num_computed,
            num_sampled=gain("output_tokens"),
            size=num_computed if self._role == "prefill" else gain("output_tokens"),
            room=gain("budget_tokens"),
            num_outputs=max(beat.num_running - num_arriving, 0.0),
            num_held=max(num_used, 0.0) * node.register.layout.page_size,
        )

    def _learn(self, interval: Interval, node: Worker) -> None:
        """Take in what the steps of an interval took, less the prompts that a decode node computed."""
        if interval.num_steps and interval.size:
            prompts_s = interval.num_computed * node.prompt_token_s if self._role == "decode" else 0.0
            seconds = max(interval.busy_s - prompts_s, 0.0) / interval.num_steps
            self._fit.add(interval.size / interval.num_steps, seconds)

    def _figures(self, nodes: Sequence[Worker], seconds: float) -> NodeFigures:
        total = _sum(interval for _, interval in self._intervals)
        known = [node.prompt_token_s for node in nodes if node.prompt_token_s]
        if nodes:
            self._capacity_tokens = _mean([float(node.capacity_tokens) for node in nodes])
            self._max_running = _mean([float(node.register.max_running) for node in nodes])
        room = total.room / total.num_steps if total.num_steps else 0.0
        return NodeFigures(
            num_nodes=len(nodes),
            busy_share=min(total.busy_s / total.seconds, 1.0) if total.seconds else 0.0,
            computed_per_s=total.num_computed / seconds if seconds else 0.0,
            sampled_per_s=total.num_sampled / seconds if seconds else 0.0,
            held_per_output=total.num_held / total.num_outputs if total.num_outputs else 0.0,
            room_per_step=room if self._role == "prefill" else self._max_running,
            capacity_tokens=self._capacity_tokens,
            prompt_token_s=_mean(known),
            steps=self._fit.model(),
        )


def _sound(value: float) -> float:
    """A figure of a node; 0 for one that cannot be, NaN included."""
    return value if 0.0 <= value <= MAX_GAIN else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
