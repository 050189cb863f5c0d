"""Records the owner of each KV page. Pages become free only here.

A page has exactly one ``Owner``, which keeps it as long as a request or a transfer needs it (a request's pages stay
until their transfer is over). A freed page returns to the free list at once if no step is in flight. Otherwise the page
*lingers*: it has no owner, and is granted to no transfer until every step that began before the free has ended, since
such a step may still read or write it. A later step may have it at once, since steps run one after another.

Operations are all or nothing, and assert their arguments: a page that is freed twice, or freed for the wrong owner,
fails here and not as garbage in another request. ``check()`` verifies all counts from scratch.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.errors import invariant

if TYPE_CHECKING:
    from common.cache.window_pages import WindowPages
    from common.request import Request
    from common.step_plan import PageDelta

Indices = NDArray[np.intp]


def _as_indices(pages: Sequence[int]) -> Indices:
    """Convert to a numpy index array; ``array`` reads a list twice as fast as numpy, and refuses negative numbers."""
    return np.frombuffer(array("Q", pages), np.intp)


class Owner(IntEnum):
    FREE = 0  # on the free list, or lingering
    RADIX = 1  # a node of the radix cache
    REQUEST = 2  # a single request
    GRANT = 3  # a transfer into which a peer writes
    QUARANTINE = 4  # an aborted transfer into which a peer may still write


class PageAllocator:
    """Allocates pages ``0 .. num_pages - 1``.

    The page freed last is allocated first, since its memory is warm. Equal histories give equal pages.

    Args:
        window_pages: the pages of window layers that belong to these pages; None: a page holds all layers.
    """

    def __init__(self, num_pages: int, window_pages: "WindowPages | None" = None) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self.window_pages = window_pages
        self.num_lingering = 0
        self._stack = list(range(num_pages - 1, -1, -1))
        self._owner: NDArray[np.int8] = np.zeros(num_pages, np.int8)
        self._counts = [0] * len(Owner)
        self._counts[Owner.FREE] = num_pages
        self._lingering: deque[tuple[int, Sequence[int]]] = deque()  # last step begun before the free, and its pages
        self._steps: deque[int] = deque()
        self._last_ended = 0
        self._mark: Indices = np.zeros(num_pages, np.intp)  # scratch, to find pages named twice
        self._numbers: Indices = np.arange(num_pages + 1, dtype=np.intp)

    @property
    def num_free(self) -> int:
        """Pages that ``alloc`` can return now."""
        return len(self._stack)

    @property
    def num_for_steps(self) -> int:
        """Pages that ``alloc_for_step`` can return now."""
        return len(self._stack) + self.num_lingering

    @property
    def last_step(self) -> int:
        """The highest number of a step so far; steps begin with 1."""
        return self._steps[-1] if self._steps else self._last_ended

    @property
    def step_in_flight(self) -> int:
        """The highest number of a step in flight; 0 without any."""
        return self._steps[-1] if self._steps else 0

    def count(self, owner: Owner) -> int:
        """The number of pages of this owner; lingering pages count as FREE."""
        return self._counts[owner]

    def alloc(self, count: int, owner: Owner) -> list[int] | None:
        """Allocate ``count`` pages; None if fewer are free."""
        assert count >= 0
        assert owner is not Owner.FREE
        if count > len(self._stack):
            return None
        if count == 0:
            return []
        if count == 1:  # a running request takes one page at a time
            pages = [self._stack.pop()]
            self._owner[pages[0]] = owner
        else:
            pages = self._stack[: -count - 1 : -1]
            del self._stack[-count:]
            self._owner[_as_indices(pages)] = owner
        self._counts[Owner.FREE] -= count
        self._counts[owner] += count
        return pages

    def alloc_for_step(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages for requests of the next step, free ones first; None if there are fewer."""
        missing = count - len(self._stack)
        if missing > self.num_lingering:
            return None
        while missing > 0:
            step, pages = self._lingering.popleft()
            taken, left = pages[:missing], pages[missing:]
            if left:
                self._lingering.appendleft((step, left))
            self._stack += taken
            self.num_lingering -= len(taken)
            missing -= len(taken)
        return self.alloc(count, Owner.REQUEST)

    def move(self, pages: Sequence[int], source: Owner, target: Owner) -> None:
        assert Owner.FREE not in (source, target)
        if not pages:
            return
        self._owner[self._owned(pages, source)] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)

    def free(self, pages: Sequence[int], owner: Owner) -> None:
        """Free pages of ``owner``; they linger until all steps in flight have ended."""
        assert owner is not Owner.FREE
        if not pages:
            return
        indices = self._owned(pages, owner)
        self._owner[indices] = Owner.FREE
        self._counts[owner] -= len(pages)
        self._counts[Owner.FREE] += len(pages)
        if self.window_pages is not None:
            self.window_pages.freed(pages, self.step_in_flight)
        if self._steps:
            self.num_lingering += len(pages)
            self._lingering.append((self._steps[-1], tuple(pages)))
        else:
            self._stack.extend(pages)

    def begin_step(self, step: int) -> None:
        """Record that a step goes to the engine. Step numbers rise, and steps end in the order in which they began."""
        assert step > self.last_step, f"step {step} begins after step {self.last_step}"
        self._steps.append(step)

    def end_step(self, step: int) -> None:
        """Record the end of the oldest step in flight; pages freed before the next step began become free."""
        assert self._steps, f"step {step} ends but never began"
        assert self._steps[0] == step, f"step {step} ends before step {self._steps[0]}"
        self._steps.popleft()
        self._last_ended = step
        while self._lingering and self._lingering[0][0] <= step:
            pages = self._lingering.popleft()[1]
            self.num_lingering -= len(pages)
            self._stack.extend(pages)
        if self.window_pages is not None:
            self.window_pages.end_step(step)

    def gauges(self) -> dict[str, float]:
        """Gauges of the window pages; empty without any."""
        return {} if self.window_pages is None else self.window_pages.gauges()

    def window_deltas(self, begun: Sequence["Request"], going_on: Iterable["Request"]) -> tuple["PageDelta", ...]:
        """``WindowPages.deltas``; empty without window pages."""
        return () if self.window_pages is None else self.window_pages.deltas(begun, going_on)

    # ---- transfers --------------------------------------------------------------------------------------------------

    def transfer_length(self, num_tokens: int) -> int:
        """The length of a prompt's transfer in tokens; where the node has window pages, a page of tokens per slab."""
        return num_tokens if self.window_pages is None else self.window_pages.transfer_length(num_tokens)

    def num_sent(self, num_pages: int, num_tokens: int) -> int:
        """Pages, or slabs where the node has window pages, that a transfer moves for a prompt's first ``num_pages``."""
        return num_pages if self.window_pages is None else self.window_pages.num_slabs(num_pages, num_tokens)

    def to_transfer(self, pages: Sequence[int], first: int, num_tokens: int) -> Sequence[int]:
        """Pages, or slabs, that a transfer moves for ``pages``, those of a prompt from index ``first`` on."""
        return pages if self.window_pages is None else self.window_pages.slabs(pages, first, num_tokens)

    def from_transfer(self, pages: Sequence[int]) -> Sequence[int]:
        """The pages that are complete with these pages, or slabs, of a transfer."""
        return pages if self.window_pages is None else self.window_pages.pages_of(pages)

    def _owned(self, pages: Sequence[int], owner: Owner) -> Indices:
        """Return pages as an index array; asserts that none occurs twice and that all belong to ``owner``."""
        if len(pages) == 1 and pages[0] >= 0 and self._owner[pages[0]] == owner:
            return self._numbers[pages[0] : pages[0] + 1]
        indices = _as_indices(pages)
        numbers = self._numbers[: len(indices)]
        self._mark[indices] = numbers
        assert self._mark[indices].tobytes() == numbers.tobytes(), "a page is named twice"
        assert self._owner[indices].tobytes().count(owner) == len(indices), self._complaint(indices, owner)
        return indices

    def _complaint(self, indices: Indices, owner: Owner) -> str:
        wrong = int(indices[self._owner[indices] != owner][0])
        return f"page {wrong} belongs to {Owner(int(self._owner[wrong])).name}, not to {owner.name}"

    def check(self) -> None:
        """Recompute all counts from the arrays. Raises InvariantError: a count or a list is wrong."""
        counts = np.bincount(self._owner, minlength=len(Owner)).tolist()
        invariant(counts == self._counts, f"pages by owner are {counts}, the counts say {self._counts}")
        stack = set(self._stack)
        invariant(len(stack) == len(self._stack), "a page is on the free list twice")
        unowned: set[Any] = set(np.flatnonzero(self._owner == Owner.FREE).tolist())
        invariant(stack <= unowned, "a page on the free list has an owner")
        lingering = unowned - stack
        invariant(len(lingering) == self.num_lingering, f"{len(lingering)} pages linger, not {self.num_lingering}")
        in_steps = {page for _, pages in self._lingering for page in pages}
        invariant(
            lingering == in_steps,
            f"pages {lingering ^ in_steps} linger without a step, or wait for a step without lingering",
        )
        if self.window_pages is not None:
            self.window_pages.check()
