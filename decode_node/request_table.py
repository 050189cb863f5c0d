"""The request table of a decode node. Pure."""

from collections.abc import Iterable

from common.errors import invariant
from common.request import Request, RequestKey
from common.scheduling import request_table
from common.scheduling.waiting_queue import WaitingQueue
from decode_node.request_state import TABLE, Event, State


class RequestTable(request_table.RequestTable[State, Event]):
    """Every request of a decode node, in the one queue of its state.

    Attributes:
        sources: the prefill node (by incarnation) that computes a request's prompt; missing for local requests.
        local: requests whose prompts are computed here, in any state.
        held: requests whose clients are slow to read, in any state; they get no slot, and no pages once retracted.
        num_moves: how often a request has come, gone, or changed its state.
        num_waiting_local: requests that are both in ``waiting`` and in ``local``.
        passed: for each request that was granted pages and has had no slot since, the requests computed here that were
            ahead of it in the queue at its grant.
    """

    def __init__(self, num_slots: int, waiting: WaitingQueue) -> None:
        with_slots = (State.EXTENDING, State.RUNNING)
        super().__init__(TABLE, State, with_slots=with_slots, waiting=waiting, num_slots=num_slots)
        self.sources: dict[RequestKey, str] = {}
        self.local: dict[RequestKey, None] = {}
        self.held: dict[RequestKey, None] = {}
        self.receiving = self._queue(State.RECEIVING)
        self.ready = self._queue(State.READY)
        self.paused = self._queue(State.PAUSED)
        self.retracted = self._queue(State.RETRACTED)
        self.extending = self._queue(State.EXTENDING)
        self.running = self._queue(State.RUNNING)
        self.moving = self._queue(State.MOVING)
        self.num_moves = 0
        self.num_waiting_local = 0
        self.passed: dict[RequestKey, frozenset[RequestKey]] = {}

    def enter(self, request: Request, *, source: str | None) -> None:
        """Add a request; without a source its prompt is computed here."""
        self.num_moves += 1
        self.add(request)
        if source is None:
            self.local[request.key] = None
            self.num_waiting_local += request.key in self.waiting
        else:
            self.sources[request.key] = source

    def move(self, request: Request, event: Event, *, with_slot: bool | None = None, is_first: bool = False) -> None:
        self.num_moves += 1
        is_local = request.key in self.local
        self.num_waiting_local -= is_local and self.states[request.key] is State.WAITING
        super().move(request, event, with_slot=with_slot, is_first=is_first)
        self.num_waiting_local += is_local and self.states[request.key] is State.WAITING
        if with_slot:
            self.passed.pop(request.key, None)

    def remove(self, request: Request, event: Event) -> None:
        self.num_moves += 1
        self.num_waiting_local -= request.key in self.local and self.states[request.key] is State.WAITING
        super().remove(request, event)
        self.local.pop(request.key, None)
        self.held.pop(request.key, None)
        self.sources.pop(request.key, None)
        self.passed.pop(request.key, None)

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
        super().check()
        invariant(self.local.keys() | self.sources.keys() == self.requests.keys(), "a request comes from nowhere")
        invariant(self.held.keys() <= self.requests.keys(), "a request that has ended is held")
        are_waiting = all(key in self.requests and self.requests[key].slot < 0 for key in self.passed)
        invariant(are_waiting, "a request that has ended or has a slot comes after others")
        num_here = sum(key in self.local for key in self.waiting)
        invariant(self.num_waiting_local == num_here, "waiting local requests are miscounted")
