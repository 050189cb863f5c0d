"""Virtual time: what is to happen when. The next event is at once, however far away it is.

Events at one instant happen in the order in which they were put down, so that equal beginnings give equal histories.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """Something that is to happen unless it is called off."""

    __slots__ = ("_arguments", "_do")

    def __init__(self, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._do: Callable[..., None] | None = do
        self._arguments = arguments

    def cancel(self) -> None:
        self._do, self._arguments = None, ()

    def go_off(self) -> None:
        if self._do is not None:
            self._do(*self._arguments)


class Agenda:
    """A clock (``common.clock.Clock``) that goes from event to event."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_events = 0
        self.num_idle = 0  # of those that wait: after them, all may be as before

    def now(self) -> float:
        return self._now

    def at(self, when: float, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do(*arguments)`` at that instant, in seconds; what is past happens now."""
        self.num_events += 1
        heapq.heappush(self._heap, (when if when > self._now else self._now, self.num_events, do, arguments))

    def after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        """Call it so many seconds from now."""
        self.at(self._now + seconds, do, *arguments)

    def idle_after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> "Timer":
        """As ``after``, but whoever waits for something to happen need not wait for this, and it can be called off."""
        self.num_idle += 1
        timer = Timer(do, arguments)
        self.after(seconds, self._idle, timer)
        return timer

    def _idle(self, timer: "Timer") -> None:
        self.num_idle -= 1
        timer.go_off()

    @property
    def is_still(self) -> bool:
        """Nothing but idle events is to come."""
        return len(self._heap) == self.num_idle

    def step(self) -> None:
        """The next event."""
        self._now, _, do, arguments = heapq.heappop(self._heap)
        do(*arguments)
