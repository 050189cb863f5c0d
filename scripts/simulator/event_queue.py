"""Virtual time: a queue of events and a clock that jumps from one event to the next.

Events of one instant run in the order in which they were scheduled. Those that were also scheduled at one instant run
by the number of their source, and last those without a source, in the order of the calls. So the place of an event with
a source is known before it is scheduled, and a run is reproducible.
"""

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple


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


NO_SOURCE = 1 << 30


class Place(NamedTuple):
    """The place of an event among all events.

    Attributes:
        when: the instant at which it happens.
        scheduled_at: the instant at which it was, or would have been, scheduled.
        source: number of what schedules it; ``NO_SOURCE`` for events whose order nothing needs to know in advance.
        number: orders the events of one source that are scheduled at one instant for one instant.
    """

    when: float
    scheduled_at: float
    source: int
    number: float = 0


class EventQueue:
    """Scheduled calls, and the clock (``common.clock.Clock``) that they advance."""

    def __init__(self) -> None:
        self._now = 0.0
        # The fields of `Place`, the call and its arguments.
        self._heap: list[tuple[float, float, int, float, Callable[..., None], tuple[Any, ...]]] = []
        self._place: tuple[float, float, int, float] | tuple[Any, ...] = Place(0.0, 0.0, 0)  # of the present event
        self._num_sources = 0
        self.num_events = 0
        self.num_background = 0  # pending calls made with `background_after`

    def now(self) -> float:
        return self._now

    def new_source(self) -> int:
        """A number for a source of events."""
        self._num_sources += 1
        return self._num_sources

    def at(self, when: float, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do(*arguments)`` at ``when``, in seconds, or now if that is past."""
        now = self._now
        self.num_events += 1
        heapq.heappush(self._heap, (when if when > now else now, now, NO_SOURCE, self.num_events, do, arguments))

    def after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        self.at(self._now + seconds, do, *arguments)

    def of_source(self, source: int, when: float, do: Callable[..., None], *arguments: Any) -> None:
        """Like ``at``, for an event of a source; at a later instant, or it would come before the present event."""
        self.num_events += 1
        self.at_place(Place(when, self._now, source, self.num_events), do, *arguments)

    def at_place(self, place: Place, do: Callable[..., None], *arguments: Any) -> None:
        """Like ``at``, for an event that takes the place of one that was not scheduled; it is not counted."""
        heapq.heappush(self._heap, (*place, do, arguments))

    def is_past(self, place: Place) -> bool:
        """Whether an event of this place, had it been scheduled, would have happened by now."""
        return place < self._place

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
        """Whether no call is pending but those made with ``background_after``."""
        return len(self._heap) == self.num_background

    def step(self) -> None:
        self._place = event = heapq.heappop(self._heap)
        self._now = event[0]
        event[4](*event[5])


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
