"""Decode steps that are alike, which the simulator takes together (``DecodeScheduler.repeat``).

Each repetition still is an event of its own instant, so that events stay in the order that they have step by step. It
only notes the instant; schedulers, caches and streams are brought up to date when something looks at them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from common.request import Request
from common.step_plan import StepPlan
from common.wire.messages import Tokens
from scripts.simulator.costs import Costs, StepWork
from scripts.simulator.event_queue import EventQueue


class RepeatedSteps:
    """A step of a decode node that is repeated, until the node hears something or ``most`` repetitions are over.

    Args:
        plan: the outstanding step.
        sender: the node.
        catch_up: applies the repetitions so far.
        rows: its requests.
        tokens: the next tokens of each, the one that the outstanding step samples first.
        until: instant before which the node has nothing to do but these steps.

    Attributes:
        is_deferred: streams look for their tokens here; otherwise each repetition sends messages.
        plan: the step that is outstanding now, once the repetitions have been applied.
        is_over: they have; nothing is repeated any more.
        instants: of the repetitions: of the commit of one step and the plan of the next.
        durations: of the steps that these planned.
        arrivals, numbers: instant at which the tokens of a repetition arrive at the gateway, and number of that event.
    """

    def __init__(
        self,
        plan: StepPlan,
        rows: Sequence[Request],
        tokens: Sequence[list[int]],
        *,
        sender: str,
        catch_up: Callable[[], None],
        most: int,
        until: float,
    ) -> None:
        self.plan = plan
        self.rows = rows
        self.tokens = tokens
        self.until = until
        self.sender = sender
        self.catch_up = catch_up
        self.is_deferred = False
        self.is_over = False
        self.instants: list[float] = []
        self.durations: list[float] = []
        self.arrivals: list[float] = []
        self.numbers: list[int] = []
        self._num_left = most
        self._num_outputs = [len(request.output) for request in rows]
        self._num_context = StepWork.of(plan).num_context

    def may_repeat(self, now: float) -> bool:
        return self._num_left > 0 and now < self.until

    def repeat(self, now: float, costs: Costs, slowness: float) -> float:
        """Note a repetition; returns the duration of the step that it plans."""
        self._num_left -= 1
        self._num_context += len(self.rows)
        seconds = costs.seconds(StepWork(0, len(self.rows), self._num_context)) * slowness
        self.instants.append(now)
        self.durations.append(seconds)
        return seconds

    def defer(self, arrival: float, number: int) -> None:
        """Note when the tokens of the last repetition arrive at the gateway."""
        self.arrivals.append(arrival)
        self.numbers.append(number)

    def messages(self) -> list[Tokens]:
        """The tokens of the last repetition."""
        return [self.message(row, len(self.instants) - 1) for row in range(len(self.rows))]

    def message(self, row: int, repetition: int) -> Tokens:
        request, index = self.rows[row], self._num_outputs[row] + repetition
        return Tokens(request.rid, request.attempt, index, (self.tokens[row][repetition],))

    def applied(self, plan: StepPlan) -> None:
        self.plan, self.is_over = plan, True


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
        end = bisect_left(steps.arrivals, events.now(), first)
        while end < len(steps.arrivals) and events.is_past(steps.arrivals[end], steps.numbers[end]):
            end += 1
        self._num_taken = end
        return self.steps.tokens[self._row][first:end], steps.arrivals[first:end]

    @property
    def is_empty(self) -> bool:
        """Whether no token can come any more."""
        return self.steps.is_over and self._num_taken == len(self.steps.arrivals)

    def untaken(self) -> list[tuple[float, float, Tokens]]:
        """The tokens under way as messages, with the instant and the number of the event in which each arrives.

        Those of other rows are parts of the same events; the fraction of a number is the place of this row.
        """
        steps, place = self.steps, self._row / len(self.steps.rows)
        under_way = range(self._num_taken, len(steps.arrivals))
        return [(steps.arrivals[i], steps.numbers[i] + place, steps.message(self._row, i)) for i in under_way]
