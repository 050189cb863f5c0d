"""Who waits on a decode node for a prefix that is being received for another, and what others may take meanwhile."""

from support.lone_nodes import PAGE, DecodeNode

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.request import Request


def node_with(num_pages: int, max_skip_ahead: int) -> DecodeNode:
    return DecodeNode(num_pages=num_pages, rules=PriorityRules(), max_skip_ahead=max_skip_ahead)


def num_lacking(node: DecodeNode, request: Request) -> int:
    """Pages that one with part of its own lacks."""
    return node.scheduler.line.admission.reservations[request.key].num_lacking


def test_pages_that_are_on_their_way_are_counted_beyond_those_that_are_cached() -> None:
    node = node_with(40, max_skip_ahead=0)
    cached = tuple(range(2 * PAGE))
    node.cache.insert(cached, node.books.alloc(2, Owner.REQUEST) or [])
    node.cache.insert_pending((*cached, *range(50, 50 + 4 * PAGE)), node.books.alloc(4, Owner.GRANT) or [])
    assert node.cache.num_pending(cached) == 0
    assert node.cache.num_pending((*cached, *range(50, 50 + 2 * PAGE), 7, 7, 7, 7)) == 2
    assert node.cache.num_pending((*cached, *range(50, 50 + 9 * PAGE))) == 4, "in two nodes since the last question"
    assert node.cache.num_pending((7, *cached)) == 0
    assert node.cache.num_pending(cached, "of another") == 0


def test_one_whose_prefix_is_on_its_way_is_passed_by_so_many_and_then_by_who_leaves_it_room() -> None:
    node = node_with(20, max_skip_ahead=2)
    node.submit("bringer", 12, first=50)
    assert node.grant() == ["bringer"]
    # Seven pages beyond the three on their way, and two for its output.
    sharer = node.submit("sharer", 40, first=50)
    for number in range(4):
        node.submit(f"small{number}", 12)
    node.submit("tiny", 3)
    assert node.grant() == ["small0", "small1", "tiny"]
    assert sharer.num_passed == 3
    assert node.scheduler.line.totals["skipped_ahead"] == 1, "the tiny one passed a small one"
    node.receive("bringer")
    assert node.grant()[0] == "sharer"


def test_one_with_part_of_its_pages_leaves_room_to_who_was_passed_often_enough_while_a_prefix_is_on_its_way() -> None:
    node = node_with(24, max_skip_ahead=0)
    node.run_in("busy", 24, new=3)
    node.submit("bringer", 12, first=500)
    assert node.grant() == ["bringer"]
    node.submit("sharer", 40, first=500)  # seven pages beyond those on their way, and two for its output
    large = node.submit("large", 28, new=1)
    assert node.grant() == []
    assert node.books.num_free == 9 + 1  # one for the output of the bringer
    assert num_lacking(node, large) == 3
    node.receive("bringer")
    assert sorted(node.grant()) == ["large", "sharer"]


def test_one_with_part_of_its_pages_need_not_leave_room_to_who_waits_for_its_own_prefix() -> None:
    """Although it stands a little before it, as its urgency is lent to an older one."""
    rules = PriorityRules(is_enabled=True, preemption_threshold=10, aging_per_s=1.0)
    node = DecodeNode(num_pages=38, rules=rules, max_skip_ahead=0)
    for rid, length, new in (("other", 96, 40), ("holder", 16, 3)):
        node.run_in(rid, length, new=new).expected_output = 4
    large = node.submit("large", 44, first=500)
    node.grant()
    node.now += 0.5
    node.submit("sharer", 56, 9, first=500)  # three pages beyond those of the large one, and two for its output
    node.grant()
    assert num_lacking(node, large) > 0
    while "holder" not in node.done:
        node.step()
    assert node.books.num_free < num_lacking(node, large) + 3
    assert node.grant() == ["large"]
