"""Decode steps that are alike, which the simulator takes together (``DecodeScheduler.repeat``).

Instants and places of all repetitions are known in advance (``event_queue.Place``), so that everything happens in the
order that it has step by step. Schedulers, caches and streams are brought up to date when something looks at them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.request import Request
from common.step_plan import StepPlan
from common.wire.messages import Tokens
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.event_queue import EventQueue, Place

#: The most tokens of one row that are looked up in advance, and of all rows of a large batch together.
MAX_REPETITIONS, MAX_TOKENS = 512, 16_384
#: Preparing repetitions of this many rows costs about as much as one repetition saves.
ROWS_PER_REPETITION = 16
LONGEST_PAUSE = 63
#: Numbers of repetitions, from 1 on.
NUMBERS = np.arange(1, MAX_REPETITIONS + 1)


class RepeatBackoff:
    """Decides for one node whether preparing repetitions, which costs time for each row, is worthwhile.

    It changes no result. After a step of many rows that was repeated only a few times, some steps are taken by
    themselves; their number doubles with each such step up to ``LONGEST_PAUSE``.
    """

    def __init__(self) -> None:
        self._pause = self._num_left = 0

    @property
    def is_pausing(self) -> bool:
        """Whether steps are to be taken by themselves."""
        return self._num_left > 0

    def step_begun(self) -> None:
        self._num_left -= 1

    def ended(self, num_repetitions: int, num_rows: int) -> None:
        """A step of ``num_rows`` rows was repeated ``num_repetitions`` times."""
        is_worthwhile = num_repetitions >= num_rows // ROWS_PER_REPETITION
        self._pause = 0 if is_worthwhile else min(2 * self._pause + 1, LONGEST_PAUSE)
        self._num_left = self._pause


class RepeatedSteps:
    """A step of a decode node that is repeated, until the node hears something or no repetition is left.

    A repetition is the commit of one step and the plan of the next.

    Args:
        rows: the requests of the outstanding step.
        tokens: the next tokens of each, the one that the outstanding step samples first.
        schedule: when the repetitions happen.
        num_used_pages: pages in use when the outstanding step has ended.
        sender: the node.
        catch_up: applies the repetitions so far.

    Attributes:
        is_over: the repetitions have been applied; there are no more.
        is_deferred: streams look for their tokens here; otherwise each repetition is an event, which sends messages.
        num_done: repetitions so far; of deferred ones, known when they are over.
    """

    def __init__(
        self,
        rows: Sequence[Request],
        tokens: Sequence[list[int]],
        schedule: "Schedule",
        *,
        num_used_pages: int,
        sender: str,
        catch_up: Callable[[], None],
    ) -> None:
        self.rows = rows
        self.tokens = tokens
        self.schedule = schedule
        self.num_used_pages = num_used_pages
        self.sender = sender
        self.catch_up = catch_up
        self.is_over = self.is_deferred = False
        self.num_done = 0
        self._num_outputs = [len(request.output) for request in rows]

    def end(self, events: EventQueue) -> int:
        """End the repetitions; return how many there were."""
        if self.is_deferred:
            self.num_done = self.schedule.num_past(events)
            events.num_events += 2 * self.num_done  # the ends of steps, and the arrivals of their tokens
        self.is_over = True
        return self.num_done

    def messages(self) -> list[Tokens]:
        """The tokens of the last repetition."""
        return [self.message(row, self.num_done - 1) for row in range(len(self.rows))]

    def message(self, row: int, repetition: int) -> Tokens:
        request, index = self.rows[row], self._num_outputs[row] + repetition
        return Tokens(request.rid, request.attempt, index, (self.tokens[row][repetition],))


class Schedule(NamedTuple):
    """The instants of repetitions.

    Attributes:
        durations: of the steps that they plan.
        ends: of the outstanding step, and of each of these; so ``ends[i]`` is the instant of repetition ``i``.
        arrivals: instants at which their tokens arrive at the gateway.
        most: repetitions that may happen.
        begun_at: instant at which the outstanding step began.
        source: the node, as a source of events.
    """

    durations: list[float]
    ends: list[float]
    arrivals: list[float]
    most: int
    begun_at: float
    source: int

    @classmethod
    def of(
        cls, plan: StepPlan, end: float, most: int, costs: Costs,
        *, begun_at: float, source: int, slowness: float, until: float,
    ) -> "Schedule":  # fmt: skip
        """The schedule after a step of decode rows.

        Args:
            end: of the outstanding step.
            slowness: factor of durations.
            until: repetitions are earlier.
        """
        work = StepWork.of(plan)
        contexts = NUMBERS[:most] * work.num_rows
        contexts += work.num_context
        # The same operations in the same order as in ``Costs.seconds`` and in the event queue, so that nothing is
        # rounded in another way.
        fixed = costs.seconds(StepWork(0, work.num_rows, 0))
        durations = contexts * costs.context_token_s
        durations += fixed
        durations *= slowness
        ends = np.empty(most + 1)
        ends[0], ends[1:] = end, durations
        np.add.accumulate(ends, out=ends)
        instants = ends.tolist()
        most = bisect_left(instants, until, 0, most) if durations[0] > 0 else 0
        arrivals = (ends[:-1] + costs.message_s).tolist()
        return cls(durations.tolist(), instants, arrivals, most, begun_at, source)

    def place(self, number: int) -> Place:
        """The place of the event in which the outstanding step, or the one that such a repetition begins, ends."""
        return Place(self.ends[number], self.ends[number - 1] if number else self.begun_at, self.source)

    def place_of_arrival(self, repetition: int, row: float = 0.0) -> Place:
        """The place of the event in which the tokens of a repetition arrive.

        Args:
            row: the place among them, below 1.
        """
        return Place(self.arrivals[repetition], self.ends[repetition], self.source, row)

    def num_past(self, events: EventQueue) -> int:
        """Repetitions that have happened by now."""
        number = bisect_left(self.ends, events.now(), 0, self.most)
        return number + (number < self.most and events.is_past(self.place(number)))

    def num_arrived(self, events: EventQueue, first: int, most: int) -> int:
        """Repetitions before ``most`` whose tokens have arrived by now; those before ``first`` are known to have."""
        number = bisect_left(self.arrivals, events.now(), first, most)
        return number + (number < most and events.is_past(self.place_of_arrival(number)))


class TokenFeed:
    """The tokens of one row on their way to its stream.

    Args:
        row: of the request among those of the step.
        on_end: called when the stream ends before its tokens.
    """

    __slots__ = ("_events", "_num_taken", "_on_end", "_row", "steps")

    def __init__(
        self, steps: RepeatedSteps, row: int, events: EventQueue, on_end: Callable[["TokenFeed"], None]
    ) -> None:
        self.steps = steps
        self._row = row
        self._events = events
        self._on_end = on_end
        self._num_taken = 0

    def end(self) -> None:
        """The stream has ended."""
        if not self.is_empty:
            self._on_end(self)

    def take(self) -> tuple[list[int], list[float]]:
        """The tokens that have arrived since the last call, and when each did."""
        steps, schedule, first = self.steps, self.steps.schedule, self._num_taken
        most = steps.num_done if steps.is_over else schedule.most
        self._num_taken = end = schedule.num_arrived(self._events, first, most)
        return steps.tokens[self._row][first:end], schedule.arrivals[first:end]

    @property
    def is_empty(self) -> bool:
        """Whether no token can come any more."""
        return self.steps.is_over and self._num_taken == self.steps.num_done

    def untaken(self) -> list[tuple[Place, Tokens]]:
        """The tokens under way as messages, with the place of the event in which each arrives.

        Those of other rows are parts of the same events.
        """
        steps, row = self.steps, self._row
        under_way = range(self._num_taken, steps.num_done)
        return [(steps.schedule.place_of_arrival(i, row / len(steps.rows)), steps.message(row, i)) for i in under_way]
