"""Requests of a model with a window on a decode node hold the pages of the window, however long they get."""

from typing import Any

import pytest
from support.scheduling.single_nodes import PAGE, DecodeNode

from common.cache.kv_window import KVWindow
from common.cache.page_allocator import Owner
from common.errors import RequestError
from common.request import Request
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits

#: Pages of a ring in which a request grows: a token sees 10 tokens before it, on at most 4 pages with its own.
MOST = 4
#: Pages of a ring in which up to 11 tokens are computed at once.
RING = 6


def node_of(num_pages: int, **limits: Any) -> DecodeNode:
    return DecodeNode(num_pages=num_pages, kv_window=KVWindow.of_decode(PAGE, 11, 11, num_pages), **limits)


def num_held(node: DecodeNode) -> int:
    return node.allocator.num_pages - node.allocator.num_free - node.cache.num_evictable_pages


def test_only_the_pages_of_the_window_are_granted() -> None:
    node = node_of(20)
    request = node.submit("a", 99, new=50)
    assert node.grant() == ["a"]
    reservation = node.scheduler._reservations.by_key[request.key]
    assert (reservation.first, reservation.num_cached, reservation.num_pages) == (22, 0, 25)
    assert node.allocator.count(Owner.GRANT) == 3
    node.receive("a")
    assert node.allocator.count(Owner.GRANT) == 0
    assert len(request.pages) == 25
    assert set(request.pages) == set(request.own)


@pytest.mark.parametrize("length", [3, 10, 11, 99])
def test_an_output_of_any_length_fits_into_a_pool_as_large_as_a_ring(length: int) -> None:
    node = node_of(RING)
    request = node.submit("a", length, new=500)
    node.grant()
    node.receive("a")
    held = []
    while node.table.requests:
        assert node.step() == ["a"]
        held.append(num_held(node))
    num_cached = length // PAGE if length < 11 else 0
    assert max(held) == MOST + num_cached
    assert len(request.output) == 500


def test_a_prompt_within_the_window_is_cached_and_never_overwritten() -> None:
    node = node_of(20)
    node.submit("a", 10, new=60, first=0)
    node.submit("b", 10, new=60, first=0)
    assert node.grant() == ["a"], "the second waits for the prefix"
    node.receive("a")
    assert node.grant() == ["b"]
    node.receive("b")
    cached = node.cache.match(tuple(range(8))).pages
    while node.table.requests:
        node.step()
    assert node.cache.match(tuple(range(8))).pages == cached
    assert node.cache.num_pages == 2, "nothing of requests that have wrapped is cached"


def test_as_many_requests_run_as_rings_fit() -> None:
    node = node_of(5 * MOST, reserved_tokens=200)
    for number in range(8):
        node.submit(f"r{number}", 400, new=200)
    assert len(node.run()) == 8
    assert node.scheduler.totals()["retractions"] == 0, "growth within a ring needs no page"


def test_a_retracted_request_computes_its_tokens_again_in_a_ring() -> None:
    node = node_of(RING)
    first = node.run_in("first", 50, priority=1, new=300)
    while len(first.own) < MOST:
        node.step()
    urgent = node.submit("urgent", 300, priority=9, new=50)
    node.step()
    assert not first.pages
    node.run()
    assert (len(first.output), len(urgent.output)) == (300, 50)
    assert node.scheduler.totals()["retractions"] >= 1


def test_local_prompts_are_computed_in_a_ring_beside_running_requests() -> None:
    node = node_of(RING + MOST + 2)
    node.run_in("running", 60, new=400)
    local = node.submit("local", 500, new=40, is_local=True)
    node.step()
    assert len(local.own) == RING
    while node.table.requests:
        node.step()
        assert num_held(node) <= RING + MOST


def test_a_local_prompt_in_a_ring_waits_for_no_prefix() -> None:
    kv_window = KVWindow.of_decode(PAGE, 41, 11, 60)
    node = DecodeNode(num_pages=60, kv_window=kv_window, sharing=InBatchPrefixLimits(max_cached=32, min_shared=4))
    first = node.submit("first", 36, is_local=True, first=0)
    for _ in range(4):
        node.step()
    assert first.num_computed == 32
    within = node.submit("within the window", 38, is_local=True, first=0)
    ring = node.submit("ring", 90, is_local=True, first=0)
    scheduler = node.scheduler
    for request, waits in ((within, True), (ring, False)):
        assert scheduler._local._waits_for_prefix(request, scheduler._queue.sharing(), node.now) is waits
        assert scheduler._preemptor._waits_for_another(request, node.now) is waits, "it may preempt others"
    node.step()
    assert within.num_computed == 0 < ring.num_computed


def test_no_room_is_kept_beyond_a_ring() -> None:
    def admitted(kv_window: KVWindow | None) -> list[str]:
        node = DecodeNode(num_pages=40, kv_window=kv_window, reserved_tokens=150)
        for number in range(3):
            node.submit(f"r{number}", 9, new=150, is_local=True)
        for _ in range(6):
            node.step()
        return [request.rid for request in running(node)]

    assert admitted(None) == ["r0"]
    assert admitted(KVWindow.of_decode(PAGE, 11, 11, 40)) == ["r0", "r1", "r2"]


def running(node: DecodeNode) -> list[Request]:
    return [*node.table.running.values(), *node.table.extending.values()]


def test_a_pool_smaller_than_a_ring_refuses_what_it_cannot_hold() -> None:
    node = node_of(5)
    with pytest.raises(RequestError, match="the decode node's pool holds 20"):
        node.submit("a", 20)
