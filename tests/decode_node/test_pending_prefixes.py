"""A request on a decode node waits for a prefix that is being received for another request."""

from unittest.mock import Mock

import pytest
from support.scheduling.single_nodes import PAGE, DecodeNode

from common.cache.kv_window import KVWindow
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import pack
from common.config.scheduling import PriorityRules
from common.request import Request
from common.sampling_params import SamplingParams
from decode_node.page_reservation import PageReservations, Reservation


def node_with(num_pages: int, max_skip_ahead: int) -> DecodeNode:
    return DecodeNode(num_pages=num_pages, rules=PriorityRules(), max_skip_ahead=max_skip_ahead, reserved_tokens=8)


def test_pending_pages_are_counted_beyond_the_cached_ones() -> None:
    node = node_with(40, max_skip_ahead=0)
    cached = tuple(range(2 * PAGE))
    node.cache.insert(cached, node.allocator.alloc(2, Owner.REQUEST) or [])
    node.cache.insert_pending((*cached, *range(50, 50 + 4 * PAGE)), node.allocator.alloc(4, Owner.GRANT) or [])
    assert node.cache.num_pending(cached) == 0
    assert node.cache.num_pending((*cached, *range(50, 50 + 2 * PAGE), 7, 7, 7, 7)) == 2
    assert node.cache.num_pending((*cached, *range(50, 50 + 9 * PAGE))) == 4, "a pending prefix was not counted"
    assert node.cache.num_pending((7, *cached)) == 0
    assert node.cache.num_pending(cached, "of another") == 0


def test_a_request_with_a_pending_prefix_is_overtaken_only_within_the_skip_limit_or_if_pages_remain_for_it() -> None:
    node = node_with(24, max_skip_ahead=2)
    node.submit("bringer", 12, first=50)
    assert node.grant() == ["bringer"]
    # Seven pages beyond the three in flight, two for its output, and one for that of each other request.
    sharer = node.submit("sharer", 40, first=50)
    for number in range(4):
        node.submit(f"small{number}", 12)
    node.submit("tiny", 3)
    assert node.grant() == ["small0", "small1", "tiny"]
    assert sharer.num_passed == 3
    assert node.scheduler.totals()["skipped_ahead"] == 1, "the tiny request did not overtake exactly one small one"
    node.receive("bringer")
    assert node.grant()[0] == "sharer"


def test_the_prefix_that_arrived_for_an_urgent_request_is_evicted_after_that_of_another() -> None:
    allocator = PageAllocator(2)
    cache = RadixCache(allocator, PAGE, eviction="priority")
    reservations = PageReservations(cache, allocator, KVWindow(PAGE))
    urgent = Request("urgent", 0, (1,) * PAGE, SamplingParams(max_new_tokens=1), priority=5)
    other = Request("other", 0, (2,) * PAGE, SamplingParams(max_new_tokens=1))
    for request in (urgent, other):
        reservation = reservations.reserve(request, spare_tokens=0)
        assert isinstance(reservation, Reservation)
        reservations.withdraw(request, reservation.pages)  # the transfer breaks, but all of its pages have arrived
    assert cache.evict(1) == 1
    assert [node.key for node in cache.nodes()] == [pack(urgent.prompt)]


def test_the_room_for_overtaken_requests_is_added_up_once_for_a_pass_over_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = DecodeNode(num_pages=2_000, slots=64, rules=PriorityRules(), max_skip_ahead=1)
    for number in range(40):  # requests that share a prefix, between others that overtake them
        node.submit(f"sharer{number}", 12, first=50)
        node.submit(f"other{number}", 4)
    counting = Mock(side_effect=node.cache.num_pending)
    monkeypatch.setattr(node.cache, "num_pending", counting)
    granted = node.grant()
    assert len(granted) == 41, "every request but those that share a prefix"
    assert counting.call_count < 40, "the room for one request was computed several times"


def test_each_waiting_request_is_looked_up_once_in_a_pass_over_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_with(40, max_skip_ahead=8)
    for number in range(5):
        node.submit(f"sharer{number}", 12, first=50)
    counting = Mock(side_effect=node.cache.match)
    monkeypatch.setattr(node.cache, "match", counting)
    assert node.grant() == ["sharer0"]
    assert counting.call_count == 5
    decided = node.scheduler.decisions.last(1, node.now)[0]
    assert (decided.rid, decided.reason) == ("sharer4", "for its prefix, which comes for sharer0")
