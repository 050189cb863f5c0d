"""The page allocator: all or nothing, one owner per page, and no reuse while a step may still read a page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from common.cache.page_allocator import Owner, PageAllocator


def test_alloc_returns_all_pages_or_none() -> None:
    allocator = PageAllocator(4)
    assert allocator.alloc(5, Owner.REQUEST) is None
    assert allocator.num_free == 4
    assert allocator.alloc(3, Owner.REQUEST) == [0, 1, 2]
    assert allocator.alloc(2, Owner.GRANT) is None
    assert allocator.alloc(0, Owner.GRANT) == []
    assert (allocator.num_free, allocator.count(Owner.REQUEST), allocator.count(Owner.GRANT)) == (1, 3, 0)
    allocator.check()


def test_the_page_freed_last_is_allocated_first() -> None:
    allocator = PageAllocator(8)
    allocator.alloc(6, Owner.REQUEST)
    allocator.free([2, 5], Owner.REQUEST)
    assert allocator.alloc(3, Owner.RADIX) == [5, 2, 6]
    allocator.check()


def test_pages_change_owner_and_are_counted() -> None:
    allocator = PageAllocator(8)
    pages = allocator.alloc(5, Owner.GRANT) or []
    allocator.move(pages[:2], Owner.GRANT, Owner.RADIX)
    allocator.move(pages[2:3], Owner.GRANT, Owner.QUARANTINE)
    assert [allocator.count(owner) for owner in Owner] == [3, 2, 0, 2, 1]
    allocator.check()


@pytest.mark.parametrize("wrong", [[3], [0, 3], [7]])
def test_only_the_owner_can_free_or_move_a_page(wrong: list[int]) -> None:
    allocator = PageAllocator(8)
    allocator.alloc(3, Owner.REQUEST)
    allocator.alloc(2, Owner.RADIX)
    with pytest.raises(AssertionError, match=r"page . belongs to (RADIX|FREE), not to REQUEST"):
        allocator.free(wrong, Owner.REQUEST)
    with pytest.raises(AssertionError, match="not to REQUEST"):
        allocator.move(wrong, Owner.REQUEST, Owner.GRANT)
    allocator.check()


def test_a_page_is_not_freed_twice() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2, Owner.REQUEST)
    with pytest.raises(AssertionError, match="named twice"):
        allocator.free([1, 1], Owner.REQUEST)
    allocator.free([1], Owner.REQUEST)
    with pytest.raises(AssertionError, match="belongs to FREE"):
        allocator.free([1], Owner.REQUEST)
    allocator.check()


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_that_does_not_exist_is_refused(page: int) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(4, Owner.REQUEST)
    with pytest.raises((IndexError, OverflowError)):
        allocator.free([page], Owner.REQUEST)


def test_a_page_freed_during_two_steps_is_reused_only_after_both() -> None:
    allocator = PageAllocator(2)
    allocator.alloc(2, Owner.REQUEST)
    allocator.begin_step(1)
    allocator.begin_step(2)
    allocator.free([0], Owner.REQUEST)
    allocator.end_step(1)
    assert allocator.num_free == 0
    allocator.begin_step(3)  # began after the free, so it cannot read the page
    allocator.free([1], Owner.REQUEST)
    allocator.end_step(2)
    assert allocator.alloc(1, Owner.GRANT) == [0]
    allocator.check()
    allocator.end_step(3)
    assert allocator.num_free == 1
    allocator.check()


def test_steps_end_in_the_order_in_which_they_began() -> None:
    allocator = PageAllocator(1)
    allocator.begin_step(1)
    allocator.begin_step(2)
    with pytest.raises(AssertionError, match="before step 1"):
        allocator.end_step(2)
    with pytest.raises(AssertionError, match="after step 2"):
        allocator.begin_step(2)
    allocator.end_step(1)
    allocator.end_step(2)
    with pytest.raises(AssertionError, match="never began"):
        allocator.end_step(2)


def test_the_next_step_takes_free_pages_first_and_then_those_that_linger_longest() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3, Owner.REQUEST)
    assert pages == [0, 1, 2]
    for step, page in enumerate(pages, 1):
        allocator.begin_step(step)
        allocator.free([page], Owner.REQUEST)
    assert (allocator.num_free, allocator.num_for_steps) == (1, 4)
    assert allocator.alloc(2, Owner.GRANT) is None, "a peer may write before the steps in flight have ended"
    assert allocator.alloc_for_step(5) is None
    assert allocator.alloc_for_step(1) == [3]
    assert allocator.alloc_for_step(2) == [1, 0]
    allocator.end_step(1)
    assert (allocator.num_free, allocator.num_lingering) == (0, 1)
    allocator.end_step(2)
    allocator.end_step(3)
    assert (allocator.num_free, allocator.num_lingering) == (1, 0)
    allocator.check()


class AllocatorMachine(RuleBasedStateMachine):
    """Random events, compared with a model that has one record for each page."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
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
        pages = self.allocator.alloc(count, owner)
        assert (pages is None) == (count > num_free)
        for page in pages or []:
            assert page not in self.owner
            assert page not in self.steps_of
            self.owner[page] = owner

    @rule(count=st.integers(0, 13))
    def alloc_for_step(self, count: int) -> None:
        num_unowned = self.num_pages - len(self.owner)
        pages = self.allocator.alloc_for_step(count)
        assert (pages is None) == (count > num_unowned)
        for page in pages or []:
            assert page not in self.owner
            self.steps_of.pop(page, None)
            self.owner[page] = Owner.REQUEST

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), receiver=st.sampled_from(list(Owner)[1:]))
    def move(self, data: st.DataObject, receiver: Owner) -> None:
        source = data.draw(st.sampled_from(sorted(set(self.owner.values()))))
        pages = self.pick(data, self.of(source))
        self.allocator.move(pages, source, receiver)
        self.owner.update(dict.fromkeys(pages, receiver))

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(set(self.owner.values()))))
        pages = self.pick(data, self.of(owner))
        self.allocator.free(pages, owner)
        for page in pages:
            del self.owner[page]
            self.steps_of[page] = set(self.in_flight)
        self.settle()

    @rule()
    def begin_step(self) -> None:
        self.num_steps += 1
        self.in_flight.append(self.num_steps)
        self.allocator.begin_step(self.num_steps)

    @precondition(lambda self: self.in_flight)
    @rule()
    def end_step(self) -> None:
        step = self.in_flight.pop(0)
        self.allocator.end_step(step)
        for steps in self.steps_of.values():
            steps.discard(step)
        self.settle()

    @invariant()
    def the_allocator_agrees_with_the_model(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert self.allocator.num_lingering == len(self.steps_of)
            assert self.allocator.num_free == self.num_pages - len(self.owner) - len(self.steps_of)
            for owner in list(Owner)[1:]:
                assert self.allocator.count(owner) == len(self.of(owner))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)


class LongerAllocatorMachine(AllocatorMachine):
    """The same with more and longer histories."""


TestLongerAllocatorMachine = pytest.mark.slow(LongerAllocatorMachine.TestCase)
TestLongerAllocatorMachine.settings = settings(max_examples=250, stateful_step_count=100, deadline=None)
