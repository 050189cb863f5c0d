"""Processor cores that the processes of one machine share."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.config.shared import Role
from scripts.simulator.event_queue import EventQueue, Timer

#: How long a thread that wakes, and may run on any core, waits at most while all compute: Linux 6.18 lets another
#: thread run until the end of a tick of 4 ms, and sometimes of a second one.
MAX_WAKE_S = 0.006
#: How long Linux 6.18 leaves threads on their cores, at least and at most, while there are more threads than cores.
STAY_S = (0.08, 0.42)


@dataclass(slots=True, eq=False)
class Step:
    """An engine step that is under way.

    Attributes:
        thread: name of the one that computes it; it has no other step meanwhile.
        role: of its node.
        core: number of the core that it is on.
        alone_s: how long it takes while no other node computes.
        beside_s: how long it takes on a core of its own while a node of each role computes.
        left: the share that is still to be done.
    """

    thread: str
    role: Role
    core: int
    alone_s: float
    beside_s: Mapping[Role, float]
    then: Callable[[], None]
    left: float = 1.0


class Cores:
    """Shared cores, and the steps that they compute, each with one thread.

    They place threads as Linux does. A step begins on the core of the last step of its thread, or on an idle one if
    that one is busy. Threads on one core have equal shares of it. An idle core takes a thread from one that has
    several. While there are more threads than cores, one of them goes to another core a few times a second.

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
        self._last_core: dict[str, int] = {}  # of each thread
        self._random = random.Random(0)
        self._is_move_due = False

    def run(
        self, thread: str, role: Role, alone_s: float, beside_s: Mapping[Role, float], then: Callable[[], None]
    ) -> None:
        """Compute a step of a node of this role, and call ``then`` at its end."""
        self._progress()
        core, loads = self._last_core.get(thread, 0), self._loads()
        if loads[core] and 0 in loads:
            core = loads.index(0)
        self._last_core[thread] = core
        self._steps.append(Step(thread, role, core, max(alone_s, 1e-9), beside_s, then))
        self._go_on()
        self._move_later()

    def wait_s(self) -> float:
        """How long a thread that wakes now, and may run on any core, waits for one; another time at each call."""
        return self._random.uniform(0.0, MAX_WAKE_S) if len(self._steps) >= self.count else 0.0

    def take(self, seconds: float) -> None:
        """Let another thread have a core for so long; the steps on it end later. An idle core delays none."""
        if 0 in self._loads():
            return
        self._progress()
        core = self._random.randrange(self.count)
        for step, speed in zip(self._steps, self._speeds, strict=True):
            if step.core == core:
                step.left += seconds * speed
        self._go_on()

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
        """Share of a step per second. The steps on other cores slow it in equal parts."""
        others = [other for other in self._steps if other.core != step.core]
        if not others:
            return 1 / step.alone_s / len(self._steps)
        beside_s = sum(step.beside_s[other.role] for other in others) / len(others)
        return 1 / max(beside_s, 1e-9) / (len(self._steps) - len(others))

    def _end(self, step: Step) -> None:
        self._progress()
        place = self._steps.index(step)
        del self._steps[place], self._speeds[place]
        self._go_on()
        step.then()  # its thread may go on with another step
        loads = self._loads()
        if 0 in loads and max(loads) > 1:
            self._move()

    def _loads(self) -> list[int]:
        """How many threads compute on each core."""
        cores = [step.core for step in self._steps]
        return [cores.count(core) for core in range(self.count)]

    def _move(self) -> None:
        """Move a thread from the core that has most to the one that has fewest."""
        self._progress()
        loads = self._loads()
        step = self._random.choice([step for step in self._steps if step.core == loads.index(max(loads))])
        step.core = self._last_core[step.thread] = loads.index(min(loads))
        self._go_on()

    def _move_later(self) -> None:
        if not self._is_move_due and len(self._steps) > self.count:
            self._is_move_due = True
            self._events.background_after(self._random.uniform(*STAY_S), self._move_by_time)

    def _move_by_time(self) -> None:
        self._is_move_due = False
        if len(self._steps) > self.count:
            self._move()
            self._move_later()
