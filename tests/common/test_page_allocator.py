"""The page books: all or nothing, one owner, and nothing reused while somebody may still look at it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.cache.page_allocator import Owner, PageAllocator


def test_pages_are_given_out_all_or_none() -> None:
    books = PageAllocator(4)
    assert books.alloc(5, Owner.REQUEST) is None
    assert books.num_free == 4
    assert books.alloc(3, Owner.REQUEST) == [0, 1, 2]
    assert books.alloc(2, Owner.GRANT) is None
    assert books.alloc(0, Owner.GRANT) == []
    assert (books.num_free, books.count(Owner.REQUEST), books.count(Owner.GRANT)) == (1, 3, 0)
    books.check()


def test_the_page_freed_last_is_given_out_first() -> None:
    books = PageAllocator(8)
    books.alloc(6, Owner.REQUEST)
    books.free([2, 5], Owner.REQUEST)
    assert books.alloc(3, Owner.RADIX) == [5, 2, 6]
    books.check()


def test_pages_change_owner_and_are_counted() -> None:
    books = PageAllocator(8)
    pages = books.alloc(5, Owner.GRANT) or []
    books.move(pages[:2], Owner.GRANT, Owner.RADIX)
    books.move(pages[2:3], Owner.GRANT, Owner.QUARANTINE)
    assert [books.count(owner) for owner in Owner] == [3, 2, 0, 2, 1]
    books.check()


@pytest.mark.parametrize("wrong", [[3], [0, 3], [7]])
def test_nobody_frees_or_moves_what_is_not_theirs(wrong: list[int]) -> None:
    books = PageAllocator(8)
    books.alloc(3, Owner.REQUEST)
    books.alloc(2, Owner.RADIX)
    with pytest.raises(AssertionError, match=r"page . belongs to (RADIX|FREE), not to REQUEST"):
        books.free(wrong, Owner.REQUEST)
    with pytest.raises(AssertionError, match="not to REQUEST"):
        books.move(wrong, Owner.REQUEST, Owner.GRANT)
    books.check()


def test_a_page_is_not_freed_twice() -> None:
    books = PageAllocator(4)
    books.alloc(2, Owner.REQUEST)
    with pytest.raises(AssertionError, match="named twice"):
        books.free([1, 1], Owner.REQUEST)
    books.free([1], Owner.REQUEST)
    with pytest.raises(AssertionError, match="belongs to FREE"):
        books.free([1], Owner.REQUEST)
    books.check()


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_that_does_not_exist_is_refused(page: int) -> None:
    books = PageAllocator(4)
    books.alloc(4, Owner.REQUEST)
    with pytest.raises((IndexError, OverflowError)):
        books.free([page], Owner.REQUEST)


def test_a_page_freed_during_two_steps_is_reused_only_after_both() -> None:
    books = PageAllocator(2)
    books.alloc(2, Owner.REQUEST)
    books.begin_step(1)
    books.begin_step(2)
    books.free([0], Owner.REQUEST)
    books.end_step(1)
    assert books.num_free == 0
    books.begin_step(3)  # began after the free: it cannot know the page
    books.free([1], Owner.REQUEST)
    books.end_step(2)
    assert books.alloc(1, Owner.GRANT) == [0]
    books.check()
    books.end_step(3)
    assert books.num_free == 1
    books.check()


def test_steps_end_in_the_order_in_which_they_began() -> None:
    books = PageAllocator(1)
    books.begin_step(1)
    books.begin_step(2)
    with pytest.raises(AssertionError, match="before step 1"):
        books.end_step(2)
    with pytest.raises(AssertionError, match="after step 2"):
        books.begin_step(2)
    books.end_step(1)
    books.end_step(2)
    with pytest.raises(AssertionError, match="never began"):
        books.end_step(2)


class BooksMachine(RuleBasedStateMachine):
    """Random events on the books, beside a model that keeps one record for each page."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.books = PageAllocator(num_pages)
        self.owner: dict[int, Owner] = {}
        self.num_pages = num_pages
        self.steps_of: dict[int, set[int]] = {}  # lingering page -> steps in flight when it was freed
        self.in_flight: list[int] = []
        self.num_steps = 0

    def pick(self, data: st.DataObject, pages: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))

    def of(self, owner: Owner) -> list[int]:
        return [page for page, whose in self.owner.items() if whose is owner]

    def settle(self) -> None:
        for page in list(self.steps_of):
            if not self.steps_of[page]:
                del self.steps_of[page]

    @rule(count=st.integers(0, 13), owner=st.sampled_from(list(Owner)[1:]))
    def alloc(self, count: int, owner: Owner) -> None:
        num_free = self.num_pages - len(self.owner) - len(self.steps_of)
        pages = self.books.alloc(count, owner)
        assert (pages is None) == (count > num_free)
        for page in pages or []:
            assert page not in self.owner
            assert page not in self.steps_of
            self.owner[page] = owner

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), receiver=st.sampled_from(list(Owner)[1:]))
    def move(self, data: st.DataObject, receiver: Owner) -> None:
        source = data.draw(st.sampled_from(sorted(set(self.owner.values()))))
        pages = self.pick(data, self.of(source))
        self.books.move(pages, source, receiver)
        self.owner.update(dict.fromkeys(pages, receiver))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(set(self.owner.values()))))
        pages = self.pick(data, self.of(owner))
        self.books.free(pages, owner)
        for page in pages:
            del self.owner[page]
            self.steps_of[page] = set(self.in_flight)
        self.settle()

    @rule()
    def begin_step(self) -> None:
        self.num_steps += 1
        self.in_flight.append(self.num_steps)
        self.books.begin_step(self.num_steps)

    @precondition(lambda self: self.in_flight)
    @rule()
    def end_step(self) -> None:
        step = self.in_flight.pop(0)
        self.books.end_step(step)
        for steps in self.steps_of.values():
            steps.discard(step)
        self.settle()

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "books"):
            self.books.check()
            assert self.books.num_lingering == len(self.steps_of)
            assert self.books.num_free == self.num_pages - len(self.owner) - len(self.steps_of)
            for owner in list(Owner)[1:]:
                assert self.books.count(owner) == len(self.of(owner))


TestBooksMachine = BooksMachine.TestCase
TestBooksMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class LongerBooksMachine(BooksMachine):
    """The same, for longer."""


TestLongerBooksMachine = pytest.mark.slow(LongerBooksMachine.TestCase)
TestLongerBooksMachine.settings = settings(max_examples=2000, stateful_step_count=100, deadline=None)
