"""A page allocator that knows which pages the outstanding steps of its node read and write."""

from collections import deque
from collections.abc import Sequence

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.window_pages import WindowPages
from common.step_plan import StepPlan


class WatchedAllocator(PageAllocator):
    """Asserts that no page is allocated while a step that may read or write it is outstanding."""

    def __init__(self, num_pages: int, page_size: int, windows: WindowPages | None = None) -> None:
        super().__init__(num_pages, windows)
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}
        self._in_use: deque[tuple[int, frozenset[int]]] = deque()

    def planned(self, plan: StepPlan) -> None:
        for admit in plan.admits:
            self._tables[admit.slot] = []
        for slot, first, pages in plan.pages:
            self._tables[slot][first : first + len(pages)] = pages
        ends = [(row.slot, -(-(row.start + row.num_tokens) // self._page_size)) for row in plan.rows]
        used = [page for slot, num_pages in ends for page in self._tables[slot][:num_pages]]
        self._in_use.append((plan.step, frozenset(used)))

    def committed(self) -> None:
        """The oldest step has ended."""
        self._in_use.popleft()

    def alloc(self, count: int, owner: Owner) -> list[int] | None:
        pages: Sequence[int] = super().alloc(count, owner) or ()
        for step, in_use in self._in_use:
            assert in_use.isdisjoint(pages), f"a page is allocated as {owner.name} while step {step} still uses it"
        return list(pages) if pages or not count else None
