"""Transfers that begin before there is room for all of their pages: who may, what they get, and that nobody waits for
each other. Pages of four tokens, of which the last token of an output takes none."""

from dataclasses import replace

import pytest
from support.lone_nodes import ON, PAGE
from support.lone_nodes import DecodeNode as Node

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.request import LOWEST_PRIORITY, Request
from common.sampling_params import SamplingParams
from decode_node.page_reservation import Reservation
from decode_node.request_state import State

OFF = PriorityRules()


def node_with_holder(num_pages: int = 12, *, rules: PriorityRules = OFF, new: int = 3, predicted: int = 0) -> Node:
    """One that runs, has five pages and has said two tokens; three more fit into them."""
    node = Node(num_pages=num_pages, rules=rules)
    node.run_in("holder", 16, new=new).expected_output = predicted
    assert len(node.places.running["holder", 0].pages) == 5
    return node


def reservation_of(node: Node, request: Request) -> Reservation:
    return node.scheduler.line.admission.reservations[request.key]


def share(node: Node, request: Request) -> tuple[int, int]:
    """Pages that it has been given, and those that it lacks."""
    reservation = reservation_of(node, request)
    return len(reservation.pages), reservation.num_lacking


def give_back(node: Node, request: Request) -> None:
    """Ends it amid its transfer; its pages are freed as the receiver does after the fence."""
    pages = reservation_of(node, request).pages
    node.scheduler.end(request.key)
    node.books.free(pages, Owner.GRANT)
    node.check()


# ---- what it gets ---------------------------------------------------------------------------------------------------


def test_the_first_that_is_short_begins_with_what_is_left_and_gets_the_rest_when_pages_come_free() -> None:
    node = node_with_holder()
    large = node.submit("large", 44)  # eleven pages; seven are free
    assert node.grant() == []
    assert node.state("large") is State.RECEIVING
    assert share(node, large) == (7, 4)
    assert node.grant() == []
    assert share(node, large) == (7, 4)
    node.step()
    assert node.done == ["holder"]
    assert node.grant() == ["large"]
    assert share(node, large) == (11, 0)
    assert large.pages == reservation_of(node, large).pages
    assert node.scheduler.line.totals["partial_grants"] == 1
    said = [one.reason for one in node.scheduler.decisions.last(2, node.now)]
    assert said == ["7 of 11 pages, and 4 more when there is room", "the last 4 of 11 pages"]
    assert node.run() == ["holder", "large"]


def test_it_grows_page_by_page_as_others_end_and_all_others_are_granted_whole_or_not_at_all() -> None:
    node = Node(num_pages=16, rules=OFF)
    for rid in "abc":
        node.run_in(rid, 12, new=40 if rid == "c" else 5).expected_output = 5  # four pages each
    large, other = node.submit("large", 60), node.submit("other", 60)
    node.grant()
    assert share(node, large) == (4, 11)
    assert node.state("other") is State.WAITING
    node.step()
    node.step()
    assert node.done == ["a", "b"]
    node.grant()
    assert share(node, large) == (12, 3)
    assert not other.pages
    assert node.run()[:3] == ["a", "b", "large"]


@pytest.mark.parametrize(("predicted", "given"), [(4, (7, 4)), (5, (7, 4)), (12, (5, 6)), (0, None)])
def test_room_that_running_requests_may_still_need_is_not_given_away(
    predicted: int, given: tuple[int, int] | None
) -> None:
    """Sixteen tokens and twelve more take seven pages, forty more fourteen: more than there are."""
    node = node_with_holder(new=40, predicted=predicted)
    large = node.submit("large", 44)
    node.grant()
    assert (share(node, large) if large.pages else None) == given


def test_all_but_one_page_at_most_come_before_there_is_room_for_what_it_will_say() -> None:
    node = node_with_holder()
    large = node.submit("large", 26, new=40)  # seven pages, the last with room for two tokens
    large.expected_output = 3
    node.grant()
    assert share(node, large) == (6, 1)
    node.step()
    assert node.grant() == ["large"]


def test_its_last_page_comes_only_with_room_for_what_it_will_say_while_others_run() -> None:
    node = node_with_holder(new=40, predicted=12)
    large = node.submit("large", 26, new=40)
    large.expected_output = 3
    node.grant()
    assert share(node, large) == (5, 2)
    node.places.running["holder", 0].expected_output = 4
    node.scheduler.line.changed()
    large.expected_output = 12  # two in its last page, and three pages: there are two
    node.grant()
    assert share(node, large) == (6, 1)


def test_with_nobody_left_who_runs_it_need_not_have_room_for_what_it_will_say() -> None:
    node = node_with_holder(11)
    large = node.submit("large", 43, new=40)  # all pages, with room for one token more
    large.expected_output = 4
    node.grant()
    assert share(node, large) == (6, 5)
    node.step()
    assert node.grant() == ["large"]


def test_it_takes_no_place_among_the_transfers_that_there_are_rows_for() -> None:
    node = Node(num_pages=12, slots=1, rules=OFF)
    holder = node.run_in("holder", 16, new=40)
    holder.expected_output = 12
    large = node.submit("large", 40)
    node.grant()
    assert share(node, large) == (5, 5)
    small = node.submit("small", 3, new=2)
    holder.expected_output = 4
    node.grant()
    assert small.pages


def test_what_it_has_is_pending_so_that_its_prefix_comes_once() -> None:
    node = node_with_holder()
    large = node.submit("large", 44, first=500)
    node.grant()
    same = node.submit("same", 40, first=500)
    node.grant()
    assert node.state("same") is State.WAITING
    node.step()
    node.grant()
    assert share(node, large) == (11, 0)
    assert node.state("same") is State.WAITING
    node.receive("large")
    node.grant()
    assert (node.state("same"), share(node, same)) == (State.RECEIVING, (0, 0))
    assert sorted(node.run()) == ["holder", "large", "same"]


def test_a_request_that_ends_amid_it_makes_way_for_the_next() -> None:
    node = node_with_holder()
    large, next_one = node.submit("large", 44), node.submit("next", 40)
    node.grant()
    give_back(node, large)
    node.grant()
    assert share(node, next_one) == (7, 3)
    assert node.run() == ["holder", "next"]


def test_a_retracted_request_that_its_prefill_node_computes_again_may_begin_with_part_too() -> None:
    node = Node(num_pages=12, rules=OFF, resume_tokens=4)
    node.scheduler.line.can_resume = lambda key: True
    large = node.run_in("large", 34, new=9)
    node.scheduler.giving_way.retract(large, node.now, "for the test")
    node.cache.clear()
    node.submit("holder", 16, new=3, is_local=True)
    for _ in range(3):
        node.step()
    assert len(node.places.running["holder", 0].pages) == 5
    node.grant()
    assert share(node, large) == (7, 2)
    node.scheduler.not_received(large.key, node.now)
    assert node.scheduler.line.partial is None
    assert node.state("large") is State.RETRACTED


# ---- who passes it, and whom it passes -----------------------------------------------------------------------------


def test_smaller_ones_pass_it_with_pages_that_come_free_but_only_so_many() -> None:
    node = Node(num_pages=12, rules=OFF, max_skip_ahead=2)
    for number in range(4):
        node.run_in(f"holder{number}", 4, new=5)  # two pages each; the first has ended when the last begins
    large = node.submit("large", 36)
    node.grant()
    assert share(node, large) == (6, 3)
    for number in range(4):
        node.submit(f"small{number}", 3, new=2)
    node.step()
    assert node.grant() == ["small0", "small1"]
    assert (share(node, large), large.num_passed) == ((6, 3), 2)
    node.step()
    assert node.grant() == []
    assert share(node, large) == (8, 1)
    node.step()
    assert node.grant() == ["large", "small2"]
    assert node.scheduler.line.totals["skipped_ahead"] == 2


@pytest.mark.parametrize(("length", "may_begin"), [(36, True), (40, False)])
def test_it_does_not_begin_if_one_before_it_would_have_to_wait_until_it_ends(length: int, may_begin: bool) -> None:
    """Of sixteen pages eleven are free and five can be taken. The one before it, computed here, needs seven."""
    node = node_with_holder(16, new=40, predicted=4)
    node.submit("local", 20, new=4, is_local=True)
    large = node.submit("large", length)
    node.grant()
    assert (share(node, large) if large.pages else None) == ((4, 5) if may_begin else None)


def test_it_does_not_begin_where_what_it_will_say_leaves_one_before_it_no_room() -> None:
    """Of fourteen pages large needs three, with eight tokens in reserve; local eight, with nine tokens."""
    node = Node(num_pages=14, rules=ON, reserved_tokens=8, clip_tokens=2)
    node.submit("local", 29, 9, new=20, is_local=True)
    large = node.submit("large", 12, new=20)
    node.grant()
    assert not large.pages, "it would lose them to the one before it, and begin again, for ever"
    assert node.run() == ["local", "large"]


@pytest.mark.parametrize(("length", "is_let_in"), [(4, True), (9, True), (10, False)])
def test_a_more_urgent_one_comes_first_if_both_can_have_their_pages(length: int, is_let_in: bool) -> None:
    """Three pages are free, since the holder was going to need them, and five could be taken from it. The large one
    lacks four and will need another, as will the urgent one."""
    node = node_with_holder(new=40, predicted=15, rules=PriorityRules(is_enabled=True, preemption_threshold=100))
    large = node.submit("large", 32)
    node.grant()
    assert share(node, large) == (4, 4)
    node.places.running["holder", 0].expected_output = 4
    urgent = node.submit("urgent", length, 9)
    node.grant()
    assert bool(urgent.pages) == is_let_in
    assert is_let_in or share(node, large) == (7, 1), "who can have its pages only later keeps nothing back"
    assert (large.inherited_priority == 9) == (not is_let_in)


def test_who_is_more_urgent_and_can_have_its_pages_soon_is_left_what_comes_free() -> None:
    node = Node(num_pages=16, rules=PriorityRules(is_enabled=True, preemption_threshold=100))
    for rid in "abc":
        node.run_in(rid, 12, new=40 if rid == "c" else 5).expected_output = 5
    large = node.submit("large", 28)
    node.grant()
    assert share(node, large) == (4, 3)
    urgent = node.submit("urgent", 24, 9)
    node.step()
    assert node.done == ["a"]
    node.grant()
    assert (share(node, large), urgent.pages) == ((4, 3), [])
    node.step()
    assert node.done == ["a", "b"]
    assert node.grant() == ["urgent"]
    assert share(node, large) == (5, 2), "one of two is left, the urgent one will grow by the other"
    assert node.run()[:3] == ["a", "b", "urgent"]


def test_less_urgent_ones_lose_their_pages_to_it_as_soon_as_that_is_enough() -> None:
    node = Node(num_pages=14, rules=ON)
    node.run_in("strong", 12, 8, new=5)
    node.run_in("low", 12, 0, new=30).expected_output = 5
    urgent = node.submit("urgent", 44, 9)
    node.step()
    node.grant()
    assert share(node, urgent) == (6, 5)  # with low's four it would still lack one
    assert node.state("low") is State.RUNNING
    while "strong" not in node.done:
        node.step()
    node.step()
    assert node.state("low") is State.RETRACTED
    assert share(node, urgent) == (11, 0)
    assert node.run() == ["strong", "urgent", "low"]


def test_it_stands_before_its_equals_whatever_the_policy_says() -> None:
    node = Node(num_pages=16, rules=PriorityRules(), policy="short-first")
    for rid in ("a", "b"):
        node.run_in(rid, 12, new=30).expected_output = 5
    large = node.submit("large", 44)
    node.grant()
    assert share(node, large) == (8, 3)
    small = node.submit("small", 40)
    assert list(node.scheduler.line.sort(node.now)) == [large, small]


@pytest.mark.parametrize("skip_ahead", [0, 8])
def test_one_that_is_not_urgent_is_completed_at_others_cost_for_one_that_waits_for_it(skip_ahead: int) -> None:
    node = Node(num_pages=16, rules=ON, max_skip_ahead=skip_ahead)
    for rid in ("a", "b"):
        node.run_in(rid, 12, 0, new=30).expected_output = 5
    large = node.submit("large", 44, 0)
    node.grant()
    assert share(node, large) == (8, 3)
    node.submit("urgent", 36, 9)  # nine pages: never while large has eight
    for _ in range(3):  # also if the large one, which is before it in line now, lets nobody pass
        node.grant()
        node.scheduler.line.changed()
        assert large.inherited_priority == 9
    assert node.scheduler.line.loans.changed == [(large.key, 9)]
    node.step()
    node.grant()
    assert share(node, large) == (11, 0)
    assert len(node.places.retracted) == 1
    node.receive("large")
    assert node.run()[0] == "urgent"


def test_nobody_gives_way_to_it_for_the_sake_of_another_class() -> None:
    """Once it had all of its pages it was as little urgent as before, and those who had given way took them back: for
    ever, where it was begun again at once."""
    node = Node(num_pages=16, rules=replace(ON, class_weights={"high": 4.0, "low": 1.0}, default_class="low"))
    for rid in ("a", "b"):
        node.run_in(rid, 12, 0, new=30).expected_output = 5
    large = node.submit("large", 44, 0)
    node.grant()
    assert share(node, large) == (8, 3)
    new = SamplingParams(max_new_tokens=4)
    urgent = Request("urgent", 0, tuple(range(9000, 9036)), new, priority=9, priority_class="high")
    node.scheduler.submit(urgent)
    node.grant()
    assert large.inherited_priority == LOWEST_PRIORITY
    node.step()
    node.grant()
    assert share(node, large) == (8, 3)
    assert not node.places.retracted


# ---- nobody waits for each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cached", [0, 4])
@pytest.mark.parametrize(
    ("other", "length", "may_begin"), [(19, 40, True), (19, 44, False), (20, 36, True), (20, 40, False)]
)
def test_it_does_not_begin_if_its_pages_would_have_to_come_from_other_transfers(
    other: int, length: int, may_begin: bool, num_cached: int
) -> None:
    """Of sixteen pages another transfer has five, some of them in the cache already, where nobody may evict them while
    it is under way; of twenty tokens it will need another, as will the large one."""
    node = node_with_holder(16, new=40, predicted=4)
    if pages := node.books.alloc(num_cached, Owner.REQUEST):
        node.cache.insert(range(50, 50 + PAGE * num_cached), pages)
    node.submit("other", other, new=2, first=50)
    assert node.grant() == ["other"]
    node.submit("large", length)
    node.grant()
    assert (node.state("large") is State.RECEIVING) == may_begin


def test_the_last_that_runs_gives_way_to_it_where_it_outgrows_what_was_predicted() -> None:
    node = node_with_holder(new=20, predicted=5)
    large = node.submit("large", 44)
    node.grant()
    for _ in range(3):
        node.step()
    assert share(node, large) == (7, 4)
    assert node.step() == []
    assert node.state("holder") is State.RETRACTED
    assert node.grant() == ["large"]
    assert node.run() == ["large", "holder"]


def test_with_nothing_else_left_to_end_it_gets_its_pages_before_everybody() -> None:
    """What ended left pages for which a retracted request stands before it in the line."""
    node = node_with_holder(new=20, predicted=5)
    large = node.submit("large", 44)
    node.grant()
    holder = node.places.running["holder", 0]
    node.scheduler.giving_way.retract(holder, node.now, "for the test")
    assert [request.rid for request in node.scheduler.line.sort(node.now)] == ["holder", "large"]
    assert node.grant() == ["large"]
    assert share(node, large) == (11, 0)


def test_pages_that_a_step_still_looks_at_are_given_once_it_is_over() -> None:
    node = node_with_holder(new=20, predicted=5)
    large = node.submit("large", 44)
    node.grant()
    node.books.begin_step(100)
    node.scheduler.end(("holder", 0))
    node.cache.clear()
    node.grant()
    assert share(node, large) == (7, 4)
    node.check()
    node.books.end_step(100)
    assert node.grant() == ["large"]
