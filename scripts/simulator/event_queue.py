"""Virtual time: a queue of events and a clock that jumps from one event to the next.

Events of one instant run in the order in which they were scheduled, so that a run is reproducible.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    __slots__ = ("_arguments", "_do")

    def __init__(self, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._do: Callable[..., None] | None = do
        self._arguments = arguments

    def cancel(self) -> None:
        self._do, self._arguments = None, ()

    def fire(self) -> None:
        if self._do is not None:
            self._do(*self._arguments)


class EventQueue:
    """Scheduled calls, and the clock (``common.clock.Clock``) that they advance."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, float, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0.0  # of the event that is being handled
        self.num_events = 0
        self.num_background = 0  # pending calls made with `background_after`

    def now(self) -> float:
        return self._now

    def at(self, when: float, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do(*arguments)`` at ``when``, in seconds, or now if that is past."""
        self.num_events += 1
        heapq.heappush(self._heap, (when if when > self._now else self._now, self.num_events, do, arguments))

    def after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        self.at(self._now + seconds, do, *arguments)

    def at_with_reserved(self, when: float, do: Callable[..., None], *arguments: Any) -> int:
        """Like ``at``, and count one more event, which happens without a call.

        Returns:
            The number of that event, which orders it among those of its instant.
        """
        self.num_events += 2
        heapq.heappush(self._heap, (when, self.num_events - 1, do, arguments))
        return self.num_events

    def at_reserved(self, when: float, number: float, do: Callable[..., None], *arguments: Any) -> None:
        """Make a reserved event, which lies ahead, or a part of it, happen by a call after all.

        Args:
            number: plus a fraction below 1 that orders the parts.
        """
        heapq.heappush(self._heap, (when, number, do, arguments))

    def is_past(self, when: float, number: int) -> bool:
        """Whether a reserved event has happened by now."""
        return (when, number) < (self._now, self._number)

    def background_after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> Timer:
        """Like ``after``, for periodic work: the call can be cancelled and does not count against ``is_idle``."""
        self.num_background += 1
        timer = Timer(do, arguments)
        self.after(seconds, self._run_background, timer)
        return timer

    def _run_background(self, timer: Timer) -> None:
        self.num_background -= 1
        timer.fire()

    @property
    def is_idle(self) -> bool:
        """Whether only idle calls are pending."""
        return len(self._heap) == self.num_background

    def step(self) -> None:
        self._now, self._number, do, arguments = heapq.heappop(self._heap)
        do(*arguments)


class NodeClock:
    """The clock of one node: virtual time, ahead of it by the jumps that it has made."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._ahead_s = 0.0

    def now(self) -> float:
        return self._events.now() + self._ahead_s

    def jump(self, seconds: float) -> None:
        assert seconds >= 0.0, "a clock never goes back"
        self._ahead_s += seconds
