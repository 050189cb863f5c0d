"""Decode steps that are alike, which the simulator takes together (``DecodeScheduler.repeat``).

Each repetition still is an event of its own instant, so that events stay in the order that they have step by step. It
only notes the instant; schedulers, caches and streams are brought up to date when something looks at them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.request import Request
from common.step_plan import StepPlan
from common.wire.messages import Tokens
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.event_queue import EventQueue

#: The most tokens of one row that are looked up in advance, and of all rows of a large batch together.
MAX_REPETITIONS, MAX_TOKENS = 512, 16_384
#: Preparing repetitions of so many rows costs about as much as one repetition saves.
ROWS_PER_REPETITION = 16
LONGEST_PAUSE = 63


class Patience:
    """Decides for one node whether to prepare repetitions, which costs time for each row: not where few come of it.

    It changes no result. After a step of many rows that was repeated only a few times, some steps are taken by
    themselves; their number doubles with each such step up to ``LONGEST_PAUSE``.
    """

    def __init__(self) -> None:
        self._pause = self._num_left = 0

    @property
    def has_run_out(self) -> bool:
        """Whether steps are to be taken by themselves."""
        return self._num_left > 0

    def step_begun(self) -> None:
        self._num_left -= 1

    def ended(self, num_repetitions: int, num_rows: int) -> None:
        """A step of so many rows was repeated so often."""
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
        num_used_pages: pages in use before.
        sender: the node.
        catch_up: applies the repetitions so far.

    Attributes:
        is_over: the repetitions have been applied; there are no more.
        is_deferred: streams look for their tokens here; otherwise each repetition sends messages.
        num_done: repetitions so far.
        numbers: of the events in which the tokens of each arrive at the gateway.
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
        self.numbers: list[int] = []
        self._num_outputs = [len(request.output) for request in rows]

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
    """

    durations: list[float]
    ends: list[float]
    arrivals: list[float]
    most: int

    @classmethod
    def of(cls, plan: StepPlan, end: float, most: int, costs: Costs, *, slowness: float, until: float) -> "Schedule":
        """The schedule after a step of decode rows.

        Args:
            end: of the outstanding step.
            slowness: factor of durations.
            until: repetitions are earlier.
        """
        work = StepWork.of(plan)
        contexts = work.num_context + work.num_rows * np.arange(1, most + 1)
        # The same operations in the same order as in ``Costs.seconds`` and in the event queue, so that nothing is
        # rounded in another way.
        fixed = costs.seconds(StepWork(0, work.num_rows, 0))
        durations = (fixed + costs.context_token_s * contexts) * slowness
        ends = np.cumsum(np.concatenate(([end], durations)))
        most = int(np.searchsorted(ends[:-1], until))
        return cls(durations.tolist(), ends.tolist(), (ends[:-1] + costs.message_s).tolist(), most)


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
        steps, events, first = self.steps, self._events, self._num_taken
        arrivals = steps.schedule.arrivals
        end = bisect_left(arrivals, events.now(), first, steps.num_done)
        while end < steps.num_done and events.is_past(arrivals[end], steps.numbers[end]):
            end += 1
        self._num_taken = end
        return steps.tokens[self._row][first:end], arrivals[first:end]

    @property
    def is_empty(self) -> bool:
        """Whether no token can come any more."""
        return self.steps.is_over and self._num_taken == self.steps.num_done

    def untaken(self) -> list[tuple[float, float, Tokens]]:
        """The tokens under way as messages, with the instant and the number of the event in which each arrives.

        Those of other rows are parts of the same events; the fraction of a number is the place of this row.
        """
        steps, place = self.steps, self._row / len(self.steps.rows)
        arrivals, under_way = steps.schedule.arrivals, range(self._num_taken, steps.num_done)
        return [(arrivals[i], steps.numbers[i] + place, steps.message(self._row, i)) for i in under_way]
