"""A page allocator that knows which pages of both pools the outstanding steps of its node read and write."""

from collections import deque
from collections.abc import Callable, Sequence

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.window_pages import WindowPages
from common.request import Request
from common.step_plan import PageDelta, Row, StepPlan


class StepsInFlight:
    """The pages of one pool that outstanding steps use.

    Args:
        first_page: the first page of a row's table that the token after so many tokens sees.

    Attributes:
        tables: the page table of each slot, as the executor knows it.
    """

    def __init__(self, page_size: int, first_page: Callable[[int], int] = lambda _: 0) -> None:
        self.tables: dict[int, list[int]] = {}
        self._page_size = page_size
        self._first_page = first_page
        self._in_use: deque[tuple[int, frozenset[int]]] = deque()

    def planned(self, plan: StepPlan, deltas: Sequence[PageDelta]) -> None:
        """Take in the changes of this pool's tables; assert that no row writes a page that another one uses."""
        for admit in plan.admits:
            self.tables[admit.slot] = []
        for slot, first, pages in deltas:
            self.tables[slot][first : first + len(pages)] = pages
        used: dict[int, int] = {}  # number of rows by page
        for row in plan.rows:
            for page in set(self.pages(row)):
                used[page] = used.get(page, 0) + 1
        for row in plan.rows:
            written = self.pages(row)[row.start // self._page_size - self._first_page(row.start) :]
            assert all(used[page] == 1 for page in written), f"two rows of step {plan.step} use a page that one writes"
        self._in_use.append((plan.step, frozenset(used)))

    def pages(self, row: Row) -> list[int]:
        """The pages that a row reads and writes, in the order of its tokens."""
        end = -(-(row.start + row.num_tokens) // self._page_size)
        return self.tables[row.slot][self._first_page(row.start) : end]

    def committed(self) -> None:
        """The oldest step has ended."""
        self._in_use.popleft()

    def assert_unused(self, pages: Sequence[int], what: str) -> None:
        for step, in_use in self._in_use:
            assert in_use.isdisjoint(pages), f"a page is allocated as {what} while step {step} still uses it"


class WatchedWindowPages(WindowPages):
    """Asserts that no peer gets a window page while a step that may use it is outstanding; see ``WatchedAllocator``."""

    steps: StepsInFlight

    def take_grant(self, request: Request) -> None:
        first = request.window_end
        super().take_grant(request)
        self.steps.assert_unused([self._page_of[page] for page in request.pages[first:]], "window page of a grant")


class WatchedAllocator(PageAllocator):
    """Asserts that no peer gets a page while a step that may read or write it is outstanding, and that each row of a
    step has the window pages of the tokens that it sees.

    A later step may have such a page at once, since steps run one after another.
    """

    def __init__(self, num_pages: int, page_size: int, window_pages: WatchedWindowPages | None = None) -> None:
        super().__init__(num_pages, window_pages)
        self._watched = window_pages
        self._steps_of_full = StepsInFlight(page_size)
        if window_pages is not None:
            window_pages.steps = StepsInFlight(page_size, window_pages.kv_window.first_seen)

    def planned(self, plan: StepPlan) -> None:
        self._steps_of_full.planned(plan, plan.pages)
        if (window_pages := self._watched) is None:
            return
        window_pages.steps.planned(plan, plan.windows)
        for row in plan.rows:
            first = window_pages.kv_window.first_seen(row.start)
            expected = [window_pages._page_of[page] for page in self._steps_of_full.pages(row)[first:]]
            assert window_pages.steps.pages(row) == expected, (
                f"a row of step {plan.step} has window pages of other tokens"
            )

    def committed(self) -> None:
        """The oldest step has ended."""
        self._steps_of_full.committed()
        if self._watched is not None:
            self._watched.steps.committed()

    def alloc(self, count: int, owner: Owner) -> list[int] | None:
        pages: Sequence[int] = super().alloc(count, owner) or ()
        if owner is not Owner.REQUEST:
            self._steps_of_full.assert_unused(pages, owner.name)
        return list(pages) if pages or not count else None
