"""The request table of a node: one queue for each state, one slot for each row of the batch. Pure."""

from collections.abc import Collection, Mapping, MutableMapping
from enum import StrEnum
from typing import Generic, TypeVar

from common.errors import invariant
from common.request import Request, RequestKey
from common.scheduling.grammar_queue import GrammarQueue
from common.scheduling.slots import SlotPool
from common.scheduling.waiting_queue import WaitingQueue
from common.state_machine import advance

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class RequestTable(Generic[S, E]):
    """Every request of a node, in the one queue of its state.

    Args:
        lifecycle: the state that follows a state at an event.
        states: all states; a request begins as ``compiling`` or ``waiting``.
        with_slots: states in which a request has a slot.
        waiting: the queue of requests without pages; empty.
        num_slots: rows of the largest batch.

    Attributes:
        requests: all of them, in order of arrival.
        states: the state of each.
        grammars: grammars of all requests.
        compiling: requests that wait for their grammars.
        waiting: requests that wait for pages.
    """

    def __init__(
        self,
        lifecycle: Mapping[tuple[S, E], S],
        states: type[S],
        *,
        with_slots: Collection[S],
        waiting: WaitingQueue,
        num_slots: int,
    ) -> None:
        self.requests: dict[RequestKey, Request] = {}
        self.states: dict[RequestKey, S] = {}
        self.grammars = GrammarQueue()
        self.compiling = self.grammars.waiting
        self.waiting = waiting
        self._lifecycle = lifecycle
        self._with_slots = with_slots
        self._compiling, self._waiting = states("compiling"), states("waiting")
        self._queues: dict[S, MutableMapping[RequestKey, Request]] = {
            self._compiling: self.compiling,
            self._waiting: self.waiting,
        }
        self._slots = SlotPool(num_slots)

    def _queue(self, state: S) -> dict[RequestKey, Request]:
        """Make the queue of a further state, in which requests stand in the order in which they entered it."""
        made: dict[RequestKey, Request] = {}
        self._queues[state] = made
        return made

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    def add(self, request: Request, *, is_first: bool = False) -> None:
        """Enter a request, which waits for its grammar or for pages.

        Args:
            is_first: it comes before all that wait for pages, among equals.
        """
        assert request.key not in self.requests
        self.requests[request.key] = request
        self._put(request, self._compiling if self.grammars.enter(request) else self._waiting, is_first=is_first)

    def move(self, request: Request, event: E, *, with_slot: bool | None = None, is_first: bool = False) -> None:
        """Change the state of a request by its lifecycle.

        Args:
            with_slot: take a slot (True), give the slot back (False), or keep what it has (None).
            is_first: as in ``add``.
        """
        before = self.states[request.key]
        del self._queues[before][request.key]
        if with_slot:
            self._slots.take(request)
        elif with_slot is False:
            self._slots.give_back(request)
        self._put(request, advance(self._lifecycle, before, event), is_first=is_first)

    def _put(self, request: Request, state: S, *, is_first: bool) -> None:
        self.states[request.key] = state
        if is_first and state is self._waiting:
            self.waiting.put_first(request)
        else:
            self._queues[state][request.key] = request

    def remove(self, request: Request, event: E) -> None:
        """Forget a request, which ends by this event."""
        state = self.states.pop(request.key)
        advance(self._lifecycle, state, event)
        del self._queues[state][request.key], self.requests[request.key]
        self.grammars.leave(request)
        self._slots.give_back(request)

    def check(self) -> None:
        """Prove that every request is in the queue of its state alone, and every slot in one place.

        Raises:
            InvariantError: it is not so.
        """
        for key in self.requests:
            homes = [state for state, queue in self._queues.items() if key in queue]
            invariant(homes == [self.states[key]], f"{key} is {self.states[key]} but stands in {homes}")
        is_whole = sum(map(len, self._queues.values())) == len(self.requests) == len(self.states)
        invariant(is_whole, "a request is in two queues, or in none")
        self.grammars.check(list(self.requests.values()))
        for state, queue in self._queues.items():
            right = all((request.slot >= 0) == (state in self._with_slots) for request in queue.values())
            invariant(right, f"a request that is {state} has a slot, or has none")
        self._slots.check(self.requests.values())
