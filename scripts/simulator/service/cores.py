"""Processor cores that the processes of one machine share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.config.shared import Role
from scripts.simulator.event_queue import EventQueue, Timer

#: How long a thread that wakes, and may run on any core, waits while all compute: most of a tick of Linux 6.18, 4 ms.
WAKE_S = 0.003


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

    While there are more steps than cores, each has an equal share of them.

    Attributes:
        count: number of cores. Up to this many nodes are pinned to cores of their own.
    """

    def __init__(self, events: EventQueue, count: int) -> None:
        self._events = events
        self.count = count
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
        """Divide the cores among the steps until one ends or comes."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._speeds = None, [self._speed(step) for step in self._steps]
        if self._steps:
            waits_s = [max(0.0, step.left) / speed for step, speed in zip(self._steps, self._speeds, strict=True)]
            first = waits_s.index(min(waits_s))
            self._timer = self._events.background_after(waits_s[first], self._end, self._steps[first])

    def _speed(self, step: Step) -> float:
        """Share of a step per second. The other steps slow it in equal parts."""
        others = [other for other in self._steps if other is not step]
        if not others:
            return 1 / step.alone_s
        beside_s = sum(step.beside_s[other.role] for other in others) / len(others)
        return min(1.0, self.count / len(self._steps)) / max(beside_s, 1e-9)

    def _end(self, step: Step) -> None:
        self._progress()
        place = self._steps.index(step)
        del self._steps[place], self._speeds[place]
        self._go_on()
        step.then()
