"""The request table of a decode node: one queue for each state, one slot for each row of the batch. Pure."""

from collections.abc import Iterable, MutableMapping

from common.errors import invariant
from common.request import Request, RequestKey
from common.scheduling.grammar_queue import GrammarQueue
from common.scheduling.slots import SlotPool
from common.scheduling.waiting_queue import WaitingQueue
from common.state_machine import advance
from decode_node.request_state import TABLE, Event, State


class RequestTable:
    """Every request, in the one queue of its state.

    Args:
        num_slots: rows of the largest batch.
        waiting: the queue of requests without pages; empty.

    Attributes:
        requests: all of them, in order of arrival.
        sources: the prefill node (by incarnation) that computes a request's prompt; missing for local requests.
        local: requests whose prompts are computed here, in any state.
        held: requests whose clients are slow to read, in any state; they get no slot, and no pages once retracted.
        grammars: grammars of all requests.
        compiling, waiting, receiving, ready, paused, retracted, extending, running, moving: by state, in the order in
            which they entered.
        num_moves: how often a request has come, gone, or changed its state.
        num_waiting_local: requests that are both in ``waiting`` and in ``local``.
        passed: for each request that was granted pages and has had no slot since, the requests computed here that were
            ahead of it in the queue at its grant.
    """

    def __init__(self, num_slots: int, waiting: WaitingQueue) -> None:
        self.requests: dict[RequestKey, Request] = {}
        self.states: dict[RequestKey, State] = {}
        self.sources: dict[RequestKey, str] = {}
        self.local: dict[RequestKey, None] = {}
        self.held: dict[RequestKey, None] = {}
        self.grammars = GrammarQueue()
        self.compiling = self.grammars.waiting
        self.waiting = waiting
        self.receiving: dict[RequestKey, Request] = {}
        self.ready: dict[RequestKey, Request] = {}
        self.paused: dict[RequestKey, Request] = {}
        self.retracted: dict[RequestKey, Request] = {}
        self.extending: dict[RequestKey, Request] = {}
        self.running: dict[RequestKey, Request] = {}
        self.moving: dict[RequestKey, Request] = {}
        self._queues: dict[State, MutableMapping[RequestKey, Request]] = {
            State.COMPILING: self.compiling,
            State.WAITING: self.waiting,
            State.RECEIVING: self.receiving,
            State.READY: self.ready,
            State.PAUSED: self.paused,
            State.RETRACTED: self.retracted,
            State.EXTENDING: self.extending,
            State.RUNNING: self.running,
            State.MOVING: self.moving,
        }
        self.num_moves = 0
        self.num_waiting_local = 0
        self.passed: dict[RequestKey, frozenset[RequestKey]] = {}
        self._slots = SlotPool(num_slots)

    @property
    def has_slot(self) -> bool:
        return bool(self._slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    def add(self, request: Request, *, source: str | None) -> None:
        """Enter a request, which waits for its grammar or for pages; without a source its prompt is computed here."""
        assert request.key not in self.requests
        self.num_moves += 1
        state = State.COMPILING if self.grammars.enter(request) else State.WAITING
        self.requests[request.key] = self._queues[state][request.key] = request
        self.states[request.key] = state
        if source is None:
            self.local[request.key] = None
            self.num_waiting_local += state is State.WAITING
        else:
            self.sources[request.key] = source

    def move(self, request: Request, event: Event, *, with_slot: bool | None = None) -> None:
        """Change the state of a request by the table of its lifecycle.

        Args:
            with_slot: take a slot (True), give the slot back (False), or keep what it has (None).
        """
        self.num_moves += 1
        before = self.states[request.key]
        self.num_waiting_local -= before is State.WAITING and request.key in self.local
        del self._queues[before][request.key]
        if with_slot:
            self._slots.take(request)
            self.passed.pop(request.key, None)
        elif with_slot is False:
            self._slots.give_back(request)
        self.states[request.key] = after = advance(TABLE, before, event)
        self._queues[after][request.key] = request
        self.num_waiting_local += after is State.WAITING and request.key in self.local

    def remove(self, key: RequestKey) -> Request | None:
        """Forget a request, in any state. None if it is unknown."""
        request = self.requests.pop(key, None)
        if request is None:
            return None
        self.num_moves += 1
        state = self.states.pop(key)
        advance(TABLE, state, Event.END)
        self.num_waiting_local -= state is State.WAITING and key in self.local
        del self._queues[state][key]
        self.local.pop(key, None)
        self.held.pop(key, None)
        self.sources.pop(key, None)
        self.passed.pop(key, None)
        self.grammars.leave(request)
        self._slots.give_back(request)
        return request

    def hold(self, request: Request) -> None:
        """Keep a request out of the batch until ``let_go``."""
        self.num_moves += 1
        self.held[request.key] = None

    def let_go(self, request: Request) -> None:
        self.num_moves += 1
        self.held.pop(request.key, None)

    def not_held(self, requests: Iterable[Request]) -> list[Request]:
        return [request for request in requests if request.key not in self.held] if self.held else list(requests)

    def held_with_pages(self) -> list[Request]:
        """Held requests whose pages could be taken without loss of time for a client."""
        return [r for key in self.held if (r := self.paused.get(key) or self.ready.get(key)) is not None]

    @property
    def is_settled(self) -> bool:
        """Whether no request waits for a grammar or for pages, is held, is computed here, or moves."""
        return not (self.compiling or self.waiting or self.retracted or self.extending or self.held or self.moving)

    @property
    def has_holders(self) -> bool:
        """Whether any request holds pages."""
        return bool(self.running or self.paused or self.ready or self.receiving or self.extending or self.moving)

    def holders(self) -> list[Request]:
        """Requests that hold pages and may need more."""
        return [*self.preemptible(), *self.receiving.values()]

    def preemptible(self) -> list[Request]:
        """Requests whose pages could be taken: all holders except transfers in progress, to here or to elsewhere."""
        queues: Iterable[dict[RequestKey, Request]] = (self.running, self.paused, self.ready, self.extending)
        return [request for queue in queues for request in queue.values()]

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
        invariant(self.local.keys() | self.sources.keys() == self.requests.keys(), "a request comes from nowhere")
        invariant(self.held.keys() <= self.requests.keys(), "a request that has ended is held")
        are_waiting = all(key in self.requests and self.requests[key].slot < 0 for key in self.passed)
        invariant(are_waiting, "a request that has ended or has a slot comes after others")
        self.waiting.check()
        self.grammars.check(list(self.requests.values()))
        num_here = sum(key in self.local for key in self.waiting)
        invariant(self.num_waiting_local == num_here, "waiting local requests are miscounted")
        for state, queue in self._queues.items():
            has_slot = state in (State.RUNNING, State.EXTENDING)
            right = all((request.slot >= 0) == has_slot for request in queue.values())
            invariant(right, f"a request that is {state} has a slot, or has none")
        self._slots.check(self.requests.values())
