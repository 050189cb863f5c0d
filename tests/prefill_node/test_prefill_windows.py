"""Prompts of a model with a window on a prefill node: whole and cached where there is room, else in a ring."""

import pytest
from support.scheduling.single_nodes import PAGE, PrefillNode

from common.cache.kv_window import KVWindow
from common.errors import ErrorCode, RequestError

#: A token sees 10 tokens before it; with at most 11 new ones, 21 tokens lie on at most 6 pages.
WINDOW = KVWindow.of_prefill(PAGE, 11, 11)
RING = 6


def test_a_prompt_of_any_length_is_computed_in_a_pool_as_large_as_a_ring() -> None:
    node = PrefillNode(num_pages=RING, kv_window=WINDOW)
    request = node.submit("long", 1_000)
    node.step(is_sent=False)
    assert len(request.own) == RING
    assert len(request.pages) == 250
    while not node.done:
        node.step(is_sent=False)
        assert len(set(request.pages[-RING:])) == RING
    node.scheduler.release(request.key)
    assert node.allocator.num_free == RING, "nothing of it is cached"


def test_a_prompt_is_kept_whole_and_cached_while_there_is_room() -> None:
    node = PrefillNode(num_pages=40, kv_window=WINDOW)
    node.submit("a", 100, first=0)
    node.run()
    assert node.cache.num_pages == 25
    again = node.submit("b", 100, first=0)
    node.run()
    assert again.num_cached == 96


def test_budgets_count_only_what_a_ring_holds() -> None:
    node = PrefillNode(num_pages=25 + 2 * RING, kv_window=WINDOW)
    whole, *ringed, late = (node.submit(rid, 100) for rid in ("whole", "second", "third", "late"))
    while not set(node.done) >= {"whole", "second", "third"}:
        node.step(is_sent=False)
        assert not late.pages, "there is no room for another ring"
    assert not whole.is_wrapped
    assert [len(request.own) for request in ringed] == [RING, RING]
    node.scheduler.release(ringed[0].key)
    assert node.run()[-1] == "late"


def test_prompts_wait_for_the_prefix_of_a_whole_prompt_but_not_of_one_in_a_ring() -> None:
    for num_pages, is_deferred in ((60, True), (2 * RING, False)):
        node = PrefillNode(num_pages=num_pages, kv_window=WINDOW)
        first = node.submit("first", 100, first=0)
        node.step()
        second = node.submit("second", 100, first=0)
        node.step()
        assert first.is_wrapped is not is_deferred
        node.run()
        assert sorted(node.done) == ["first", "second"]
        assert (second.num_cached > 0) is is_deferred


def test_an_urgent_prompt_takes_as_many_pages_as_its_ring_needs() -> None:
    node = PrefillNode(num_pages=2 * RING, kv_window=WINDOW)
    weak = [node.submit(f"weak{number}", 400) for number in range(2)]
    while not all(request.pages for request in weak):
        node.step()
    urgent = node.submit("urgent", 400, priority=50)
    node.step()
    assert urgent.is_wrapped
    assert sum(bool(request.pages) for request in weak) == 1
    assert sorted(node.run()) == ["urgent", "weak0", "weak1"]


def test_a_pool_smaller_than_a_ring_refuses_what_it_cannot_hold() -> None:
    node = PrefillNode(num_pages=RING - 1, kv_window=WINDOW)
    node.submit("fits", PAGE * (RING - 1))
    with pytest.raises(RequestError, match="the prefill node's pool holds 20") as refused:
        node.submit("long", PAGE * (RING - 1) + 1)
    assert refused.value.code is ErrorCode.POOL_TOO_SMALL
    assert node.run() == ["fits"]
