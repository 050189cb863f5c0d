"""Processor cores that the processes of one machine share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.config.shared import Role
from scripts.simulator.event_queue import EventQueue, Timer

#: How long threads stay on their cores while no core is free. With three processes on two cores of Linux 6.18, steps of
#: 55 ms took 55 ms or 118 ms, and seldom anything between; in the long run the processes had equal shares.
STAY_S = 0.1
#: How long a thread that wakes, and may run on any core, waits while all compute: most of a tick, 4 ms, of that Linux.
WAKE_S = 0.003


@dataclass(frozen=True, slots=True)
class Sharing:
    """By what factor steps take longer where there are more nodes than cores, by the role of the node; 1.0 if missing.

    What the gateway, the clients and the kernel take from the nodes is in these factors.

    Attributes:
        unpinned: while each node that computes has a core, against nodes that are pinned to cores of their own.
        crowded: while more nodes compute than there are cores, against even shares of the cores.
    """

    unpinned: Mapping[Role, float] = field(default_factory=dict)
    crowded: Mapping[Role, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Step:
    """An engine step that is under way.

    Attributes:
        role: of its node.
        alone_s: how long it takes while no other node computes.
        beside_s: how long it takes on a core of its own while a node of each role computes.
        left: the share that is still to be done.
    """

    role: Role
    alone_s: float
    beside_s: Mapping[Role, float]
    then: Callable[[], None]
    left: float = 1.0


class Cores:
    """Shared cores, and the steps that they compute, each with one thread.

    While there are more steps than cores, some have a core of their own and some share one. They take turns.

    Args:
        crowded: by what factor steps take longer than by even shares while there are more steps than cores, by role.

    Attributes:
        count: number of cores. Up to this many nodes are pinned to cores of their own.
    """

    def __init__(self, events: EventQueue, count: int, crowded: Mapping[Role, float] | None = None) -> None:
        self._events = events
        self.count = count
        self._crowded = crowded or {}
        self._steps: list[Step] = []
        self._since = 0.0  # when every `left` was computed last
        self._speeds: list[float] = []  # from then on, in shares of a step per second
        self._timer: Timer | None = None

    def run(self, role: Role, alone_s: float, beside_s: Mapping[Role, float], then: Callable[[], None]) -> None:
        """Compute a step of a node of this role, and call ``then`` at its end."""
        self._progress()
        self._steps.append(Step(role, max(alone_s, 1e-9), beside_s, then))
        self._go_on()

    @property
    def wait_s(self) -> float:
        """How long a thread of a node that may run on any core waits for one, to handle a message."""
        return WAKE_S if len(self._steps) >= self.count else 0.0

    def _progress(self) -> None:
        now = self._events.now()
        for step, speed in zip(self._steps, self._speeds, strict=True):
            step.left -= (now - self._since) * speed
        self._since = now

    def _go_on(self) -> None:
        """Divide the cores among the steps until one ends or comes, or the next takes its turn."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, count = None, len(self._steps)
        if not count:
            self._speeds = []
            return
        turn = math.floor(self._since / STAY_S + 1e-9)
        taken = turn % count
        line = [*self._steps[-taken:], *self._steps[:-taken]]
        self._speeds = [self._speed(step, line) for step in self._steps]
        waits_s = [max(0.0, step.left) / speed for step, speed in zip(self._steps, self._speeds, strict=True)]
        turn_s = (turn + 1) * STAY_S - self._since
        if count > self.count and turn_s < min(waits_s):
            self._timer = self._events.background_after(turn_s, self._take_turns)
        else:
            first = waits_s.index(min(waits_s))
            self._timer = self._events.background_after(waits_s[first], self._end, self._steps[first])

    def _speed(self, step: Step, line: Sequence[Step]) -> float:
        """Share of a step per second. The steps on other cores slow it in equal parts.

        Args:
            line: all steps; each core takes the first that no other core has taken, again and again.
        """
        if len(line) == 1:
            return 1 / step.alone_s
        core = line.index(step) % self.count
        on_core = line[core :: self.count]
        elsewhere = [other for other in line if other not in on_core] or [other for other in line if other is not step]
        beside_s = sum(step.beside_s[other.role] for other in elsewhere) / len(elsewhere)
        factor = self._crowded.get(step.role, 1.0) if len(line) > self.count else 1.0
        return 1 / max(beside_s * factor, 1e-9) / len(on_core)

    def _take_turns(self) -> None:
        self._progress()
        self._go_on()

    def _end(self, step: Step) -> None:
        self._progress()
        place = self._steps.index(step)
        del self._steps[place], self._speeds[place]
        self._go_on()
        step.then()
