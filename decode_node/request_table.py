"""Where every request of a decode node stands: one queue for each state, one slot for each row. Pure bookkeeping."""

from collections.abc import Iterable, MutableMapping

from common.request import Request
from common.scheduling.waiting_queue import WaitingQueue
from common.state_machine import advance
from decode_node.request_state import TABLE, Event, State

Key = tuple[str, int]


class RequestTable:
    """Every request in exactly one place.

    Args:
        num_slots: rows of the largest batch.
        waiting: where those stand that have no pages yet; empty.

    Attributes:
        requests: all of them, in the order in which they came.
        local: those whose prompts are computed here, wherever they stand.
        waiting, receiving, ready, paused, retracted, extending, running: by state, as they came there.
        num_moves: how often anybody has come, gone, or changed places.
        num_waiting_here: how many of ``waiting`` are ``local``.
    """

    def __init__(self, num_slots: int, waiting: WaitingQueue) -> None:
        self.requests: dict[Key, Request] = {}
        self.states: dict[Key, State] = {}
        self.local: dict[Key, None] = {}
        self.waiting = waiting
        self.receiving: dict[Key, Request] = {}
        self.ready: dict[Key, Request] = {}
        self.paused: dict[Key, Request] = {}
        self.retracted: dict[Key, Request] = {}
        self.extending: dict[Key, Request] = {}
        self.running: dict[Key, Request] = {}
        self._queues: dict[State, MutableMapping[Key, Request]] = {
            State.WAITING: self.waiting,
            State.RECEIVING: self.receiving,
            State.READY: self.ready,
            State.PAUSED: self.paused,
            State.RETRACTED: self.retracted,
            State.EXTENDING: self.extending,
            State.RUNNING: self.running,
        }
        self.num_moves = 0
        self.num_waiting_here = 0  # of ``waiting``, those whose prompts are computed here
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def has_slot(self) -> bool:
        return bool(self._free)

    def add(self, request: Request, *, is_local: bool) -> None:
        """A new one; it waits."""
        assert request.key not in self.requests
        self.num_moves += 1
        self.requests[request.key] = self.waiting[request.key] = request
        self.states[request.key] = State.WAITING
        if is_local:
            self.local[request.key] = None
            self.num_waiting_here += 1

    def move(self, request: Request, event: Event, *, with_slot: bool | None = None) -> None:
        """What has happened to a request, by the table of its life.

        Args:
            with_slot: it takes a slot now (True), gives its slot back (False), or keeps what it has.
        """
        self.num_moves += 1
        before = self.states[request.key]
        self.num_waiting_here -= before is State.WAITING and request.key in self.local
        del self._queues[before][request.key]
        if with_slot:
            request.slot = self._free.pop()
        elif with_slot is False:
            self._give_slot(request)
        self.states[request.key] = after = advance(TABLE, before, event)
        self._queues[after][request.key] = request

    def remove(self, key: Key) -> Request | None:
        """It has ended, wherever it stood. None if it is unknown."""
        request = self.requests.pop(key, None)
        if request is None:
            return None
        self.num_moves += 1
        state = self.states.pop(key)
        advance(TABLE, state, Event.END)
        self.num_waiting_here -= state is State.WAITING and key in self.local
        del self._queues[state][key]
        self.local.pop(key, None)
        self._give_slot(request)
        return request

    def _give_slot(self, request: Request) -> None:
        if request.slot >= 0:
            self._free.append(request.slot)
            request.slot = -1

    @property
    def has_holders(self) -> bool:
        """Whether anybody holds pages now."""
        return bool(self.running or self.paused or self.ready or self.receiving or self.extending)

    def holders(self) -> list[Request]:
        """Those that hold pages now."""
        return [*self.yielding(), *self.receiving.values()]

    def yielding(self) -> list[Request]:
        """Those that hold pages which could be taken from them: all but transfers under way."""
        queues: Iterable[dict[Key, Request]] = (self.running, self.paused, self.ready, self.extending)
        return [request for queue in queues for request in queue.values()]

    def check(self) -> None:
        """Every request is in the place its state says and in no other, and every slot is in one place."""
        for key in self.requests:
            homes = [state for state, queue in self._queues.items() if key in queue]
            assert homes == [self.states[key]], f"{key} is {self.states[key]} but stands in {homes}"
        assert sum(map(len, self._queues.values())) == len(self.requests) == len(self.states)
        assert self.local.keys() <= self.requests.keys()
        self.waiting.check()
        assert self.num_waiting_here == sum(key in self.local for key in self.waiting)
        with_slot = [*self.running.values(), *self.extending.values()]
        assert all(request.slot < 0 for request in self.requests.values() if request not in with_slot)
        slots = sorted(self._free + [request.slot for request in with_slot])
        assert slots == list(range(self._num_slots)), "a slot is lost or taken twice"
