"""Who owns each KV page, and who still looks at it. The only place where a page becomes free.

A page has exactly one ``Owner`` and any number of *holds* (an outgoing transfer that reads it, say). A page that its
owner frees goes back to the free list at once if nobody holds it and no step is in flight; otherwise it *lingers*: it
belongs to no one, is counted, and cannot be given out until its last hold is gone and every step begun before the free
has ended, since such a step may still read or write it.

Everything is all or nothing and asserts what it is told: a page freed twice, or freed by one who does not own it, is
our own bug and must surface here, not as another request's garbage. ``check()`` proves the books from scratch.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]


def _as_indices(pages: Sequence[int]) -> Indices:
    """For numpy; raises OverflowError on a negative number. (``array`` reads a list twice as fast as numpy does.)"""
    return np.frombuffer(array("I", pages), np.uint32).astype(np.intp)


class Owner(IntEnum):
    """Whose a page is."""

    FREE = 0  # nobody's: on the free list, or lingering
    RADIX = 1  # a node of the radix cache
    REQUEST = 2  # one request's own
    GRANT = 3  # reserved for a transfer that a peer writes
    QUARANTINE = 4  # a peer may still write into it although nobody waits for that any more


class PageBooks:
    """Owners and holds of pages ``0 .. num_pages``.

    Pages are given out last freed first (their memory is warm), so equal histories give equal pages.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self.num_lingering = 0
        self._stack = list(range(num_pages - 1, -1, -1))
        self._owner: NDArray[np.int8] = np.zeros(num_pages, np.int8)
        self._holds: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        self._num_held = 0  # pages with at least one hold
        self._counts = [0] * len(Owner)
        self._counts[Owner.FREE] = num_pages
        # Of a lingering page: the last step begun before it was freed.
        self._freed_in: NDArray[np.int64] = np.full(num_pages, -1, np.int64)
        self._waiting: deque[tuple[int, Indices]] = deque()
        self._steps: deque[int] = deque()
        self._last_ended = -1
        self._mark: Indices = np.zeros(num_pages, np.intp)  # scratch, to find pages named twice
        self._numbers: Indices = np.arange(num_pages + 1, dtype=np.intp)

    @property
    def num_free(self) -> int:
        """Pages that ``alloc`` can give out now."""
        return len(self._stack)

    def count(self, owner: Owner) -> int:
        """Pages of this owner; lingering ones count as FREE."""
        return self._counts[owner]

    def alloc(self, count: int, owner: Owner) -> list[int] | None:
        """Give out ``count`` pages, or none at all if there are fewer."""
        assert count >= 0
        assert owner is not Owner.FREE
        if count > len(self._stack):
            return None
        if count == 0:
            return []
        pages = self._stack[: -count - 1 : -1]
        del self._stack[-count:]
        self._owner[_as_indices(pages)] = owner
        self._counts[Owner.FREE] -= count
        self._counts[owner] += count
        return pages

    def move(self, pages: Sequence[int], source: Owner, target: Owner) -> None:
        """Hand pages from one owner to another; their holds stay."""
        assert Owner.FREE not in (source, target)
        if not pages:
            return
        self._owner[self._owned(pages, source)] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)

    def free(self, pages: Sequence[int], owner: Owner) -> None:
        """The owner lets go. The pages are free now, or linger until nobody can be looking at them."""
        assert owner is not Owner.FREE
        if not pages:
            return
        indices = self._owned(pages, owner)
        self._owner[indices] = Owner.FREE
        self._counts[owner] -= len(pages)
        self._counts[Owner.FREE] += len(pages)
        if not self._steps and not self._num_held:
            self._stack.extend(pages)
            return
        self.num_lingering += len(pages)
        last_begun = self._steps[-1] if self._steps else self._last_ended
        self._freed_in[indices] = last_begun
        if self._steps:
            self._waiting.append((last_begun, indices))
        else:
            self._settle(indices)

    def hold(self, pages: Sequence[int]) -> None:
        """One more look at each of these owned pages; a page may be held any number of times."""
        indices = self._indices(pages)
        assert self._owner[indices].all(), "a page that nobody owns cannot be held"
        self._num_held += int((self._holds[indices] == 0).sum())
        self._holds[indices] += 1

    def unhold(self, pages: Sequence[int]) -> None:
        """One look less; a lingering page whose last hold this was becomes free when its steps are over too."""
        indices = self._indices(pages)
        assert (self._holds[indices] > 0).all(), "a page is let go of that is not held"
        self._holds[indices] -= 1
        loose = indices[self._holds[indices] == 0]
        self._num_held -= len(loose)
        lingering = loose[self._owner[loose] == Owner.FREE]
        self._settle(lingering[self._freed_in[lingering] <= self._last_ended])

    def begin_step(self, step: int) -> None:
        """A step goes to the engine. Steps have rising numbers, and end in the order in which they began."""
        last = self._steps[-1] if self._steps else self._last_ended
        assert step > last, f"step {step} begins after step {last}"
        self._steps.append(step)

    def end_step(self, step: int) -> None:
        """The oldest step in flight is over; what was freed before a younger one began becomes free."""
        assert self._steps, f"step {step} ends but never began"
        assert self._steps[0] == step, f"step {step} ends before step {self._steps[0]}"
        self._steps.popleft()
        self._last_ended = step
        while self._waiting and self._waiting[0][0] <= step:
            self._settle(self._waiting.popleft()[1])

    def _settle(self, indices: Indices) -> None:
        """Back to the free list with those of these lingering pages that nobody holds; their steps are over."""
        pages: list[int] = indices[self._holds[indices] == 0].tolist()
        self.num_lingering -= len(pages)
        self._stack.extend(pages)

    def _indices(self, pages: Sequence[int]) -> Indices:
        """Pages as an index array; asserts that each is a page, and that none comes twice."""
        indices = _as_indices(pages)
        numbers = self._numbers[: len(indices)]
        self._mark[indices] = numbers
        assert np.count_nonzero(self._mark[indices] == numbers) == len(indices), "a page is named twice"
        return indices

    def _owned(self, pages: Sequence[int], owner: Owner) -> Indices:
        indices = self._indices(pages)
        assert self._owner[indices].tobytes().count(owner) == len(indices), self._complaint(indices, owner)
        return indices

    def _complaint(self, indices: Indices, owner: Owner) -> str:
        wrong = int(indices[self._owner[indices] != owner][0])
        return f"page {wrong} belongs to {Owner(int(self._owner[wrong])).name}, not to {owner.name}"

    def check(self) -> None:
        """Recompute everything from the arrays; raises AssertionError with a sentence."""
        counts = np.bincount(self._owner, minlength=len(Owner)).tolist()
        assert counts == self._counts, f"pages by owner are {counts}, the books say {self._counts}"
        stack = set(self._stack)
        assert len(stack) == len(self._stack), "a page is on the free list twice"
        nobodys: set[Any] = set(np.flatnonzero(self._owner == Owner.FREE).tolist())
        assert stack <= nobodys, "a page on the free list has an owner"
        lingering = nobodys - stack
        assert len(lingering) == self.num_lingering, f"{len(lingering)} pages linger, not {self.num_lingering}"
        assert (self._holds >= 0).all(), "a page has fewer than no holds"
        held = set(np.flatnonzero(self._holds).tolist())
        assert len(held) == self._num_held, f"{len(held)} pages are held, the books say {self._num_held}"
        assert not held & stack, "a page on the free list is held"
        in_steps = {p for _, indices in self._waiting for p in indices.tolist()}
        assert in_steps <= lingering, "a page waits for a step and does not linger"
        assert lingering <= held | in_steps, "a page lingers although nothing keeps it"
