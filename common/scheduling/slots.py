"""Slots of the executor's request table, and the steps that are planned but not committed. Pure.

A scheduler may plan a second step before it commits the first. In between, a request may leave its slot because it
ends, is paused or is retracted, and it may be admitted again, into the same slot or another. Each stay in a slot
therefore has an admission number. A planned row keeps the number, and a result is dropped if its request has another
number by then. Nothing is lost, because sampling is a function of seed and position.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from common.cache.page_allocator import PageAllocator
from common.errors import invariant
from common.request import Request

E = TypeVar("E")


class SlotPool:
    """The free slots ``0 .. num_slots - 1``; the slot returned last is used first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self._free)

    def take(self, request: Request) -> None:
        """Give the request a slot; one must be free."""
        assert request.slot < 0, f"{request.key} already has slot {request.slot}"
        self._num_admissions += 1
        request.slot, request.admission = self._free.pop(), self._num_admissions

    def give_back(self, request: Request) -> None:
        """Free the request's slot, if it has one. Results of planned steps for it are dropped."""
        if request.slot >= 0:
            self._free.append(request.slot)
            request.slot, request.admission = -1, 0
        request.num_scheduled, request.num_sampling = request.num_computed, 0

    def check(self, requests: Iterable[Request]) -> None:
        """Raises InvariantError unless every slot is free or held by exactly one of ``requests``."""
        held = [request.slot for request in requests if request.slot >= 0]
        invariant(sorted(self._free + held) == list(range(self._num_slots)), "a slot is lost or taken twice")


class OutstandingSteps(Generic[E]):
    """Planned steps in order, until each is committed. The allocator holds back pages that are freed meanwhile."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._steps: deque[tuple[int, E]] = deque()
        self._last = allocator.last_step  # of the role that the node had before

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[E]:
        return (step for _, step in self._steps)

    def begin(self, step: E) -> int:
        """Add a planned step and return its number."""
        self._last += 1
        self._steps.append((self._last, step))
        self._allocator.begin_step(self._last)
        return self._last

    def newest(self, number: int) -> E:
        """The step planned last, which must have this number."""
        last, step = self._steps[-1]
        assert last == number, f"step {last} was planned after step {number}"
        return step

    def oldest(self, number: int) -> E:
        """The step to commit next, which must have this number; steps are committed in the order of their plans."""
        assert self._steps, f"step {number} was never planned"
        first, step = self._steps[0]
        assert first == number, f"step {number} is committed before step {first}"
        return step

    def begin_again(self, step: E, count: int) -> int:
        """Begin a step as if it had begun and ended ``count - 1`` times before; return its number."""
        self._last += count - 1
        return self.begin(step)

    def end(self) -> None:
        """Remove the oldest step after its commit, so that pages freed while it ran can be allocated again."""
        number, _ = self._steps.popleft()
        self._allocator.end_step(number)
