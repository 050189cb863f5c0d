"""Slots of the executor's request table, and the steps that are planned but not committed. Pure.

A scheduler may plan a second step before it commits the first. A request may leave its slot in between: it ends, is
paused or is retracted, and it may even be admitted again, into the same slot or another. So every stay in a slot has an
admission number of its own, a planned row remembers the number, and a result whose number is not that of its request
any more is dropped. Nothing is lost by that: sampling is a function of seed and position.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from common.cache.page_allocator import PageAllocator
from common.errors import invariant
from common.request import Request

E = TypeVar("E")


class SlotPool:
    """The free slots ``0 .. num_slots``, given out last returned first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_admissions = 0

    def __len__(self) -> int:
        """Free slots."""
        return len(self._free)

    def take(self, request: Request) -> None:
        """Begin a stay of this request; a slot must be free."""
        assert request.slot < 0, f"{request.key} has slot {request.slot} already"
        self._num_admissions += 1
        request.slot, request.admission = self._free.pop(), self._num_admissions

    def give_back(self, request: Request) -> None:
        """End the stay, if there is one; what planned steps still compute for it counts no more."""
        if request.slot >= 0:
            self._free.append(request.slot)
            request.slot, request.admission = -1, 0
        request.num_scheduled, request.num_sampling = request.num_computed, 0

    def check(self, requests: Iterable[Request]) -> None:
        """Prove that every slot is free or held by exactly one of ``requests``; raises ``InvariantError``."""
        held = [request.slot for request in requests if request.slot >= 0]
        invariant(sorted(self._free + held) == list(range(self._num_slots)), "a slot is lost or taken twice")


class OutstandingSteps(Generic[E]):
    """Planned steps in order, until each is committed.

    Args:
        allocator: keep freed pages from being given out while a step may still use them.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._steps: deque[tuple[int, E]] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, step: E) -> int:
        """Number a planned step."""
        self._last += 1
        self._steps.append((self._last, step))
        self._allocator.begin_step(self._last)
        return self._last

    def newest(self, number: int) -> E:
        """The step that was planned last."""
        last, step = self._steps[-1]
        assert last == number, f"step {last} was planned after step {number}"
        return step

    def oldest(self, number: int) -> E:
        """The step whose result has come; steps are committed in the order in which they were planned."""
        assert self._steps, f"step {number} was never planned"
        first, step = self._steps[0]
        assert first == number, f"step {number} is committed before step {first}"
        return step

    def end(self) -> None:
        """The oldest step is committed: pages that were freed while it ran may be given out again."""
        number, _ = self._steps.popleft()
        self._allocator.end_step(number)
