"""A request of a model with a window holds the pages of a ring, whatever its length."""

from hypothesis import given
from hypothesis import strategies as st

from common.cache.kv_window import UNBOUNDED, KVWindow, reuse_page, ring_table
from common.cache.tree_node import Match
from common.request import Request
from common.sampling_params import SamplingParams

PAGE = 4
NOTHING = Match()
windows = st.builds(KVWindow.of_prefill, st.integers(1, 9), st.integers(1, 40), st.integers(1, 20))


def request_of(num_tokens: int, pages: list[int], own: list[int]) -> Request:
    request = Request("r", 0, tuple(range(num_tokens)), SamplingParams(max_new_tokens=99))
    request.pages, request.own = pages, own
    request.num_scheduled = num_tokens
    return request


def test_without_a_window_every_page_is_needed_and_cached() -> None:
    kv_window = KVWindow.of_decode(PAGE, None, 8, num_pages=2)
    assert not kv_window.is_bounded
    assert kv_window.is_cached(10**9)
    assert kv_window.first_held(10**9) == 0
    assert kv_window.pages_to_compute(401) == 101
    assert kv_window.max_tokens(25) == 100
    assert not kv_window.prefers_ring(100, NOTHING, 25)
    request = request_of(100, list(range(25)), list(range(25)))
    assert kv_window.room_left(request) > 10**9
    assert not reuse_page(kv_window, request)


def test_the_pages_of_a_window_are_those_that_the_next_token_sees() -> None:
    kv_window = KVWindow.of_decode(PAGE, 11, 8, num_pages=100)
    assert [kv_window.is_cached(count) for count in (10, 11)] == [True, False]
    # The token at position 30 sees positions 20 to 30; position 20 is the first of page 5.
    assert kv_window.first_held(30) == 5
    assert kv_window.first_held(29) == 4
    # 11 tokens lie on 4 pages if they begin at the end of one.
    assert kv_window.max_span(1) == 4
    # The first token of a chunk of 8 sees 10 before it: 18 tokens.
    assert kv_window.max_span(8) == kv_window.pages_to_compute(1000) == 6
    assert kv_window.pages_to_compute(11) == 3


def test_a_page_before_a_received_window_is_full() -> None:
    assert KVWindow.of_decode(16, 4, 16, num_pages=100).first_held(35) == 1, "page 2 has only three tokens"


def test_a_decode_pool_without_room_for_ring_and_cached_pages_caches_nothing() -> None:
    # A ring of 6 pages for chunks, or 2 cached pages beside a ring of 4.
    assert KVWindow.of_decode(PAGE, 11, 8, num_pages=6).cached_tokens == 10
    assert KVWindow.of_decode(PAGE, 31, 1, num_pages=15).cached_tokens == 0, "7 cached pages and a ring of 9"
    assert KVWindow.of_decode(PAGE, 31, 1, num_pages=16).cached_tokens == 30
    assert KVWindow.of_decode(PAGE, 31, 1, num_pages=8).cached_tokens == 30, "requests are no longer than the pool"


def test_requests_of_any_length_fit_into_a_pool_with_room_for_a_ring() -> None:
    kv_window = KVWindow.of_prefill(PAGE, 11, 8)
    assert kv_window.max_tokens(6) == UNBOUNDED
    assert kv_window.max_tokens(5) == 20
    assert KVWindow.of_prefill(PAGE, 11, None).max_tokens(5) == 20, "a chunk may have any length"


def test_a_ring_is_preferred_where_it_takes_fewer_pages_or_is_the_only_way() -> None:
    kv_window = KVWindow.of_prefill(PAGE, 11, 8)
    most_is_cached = Match(list(range(20)), 80, NOTHING.node)
    assert kv_window.prefers_ring(100, NOTHING, 50)
    assert not kv_window.prefers_ring(100, most_is_cached, 50), "only five pages are missing"
    assert kv_window.prefers_ring(100, most_is_cached, 24)
    assert not kv_window.prefers_ring(24, NOTHING, 50)


@given(windows, st.data())
def test_no_page_of_a_ring_is_written_while_a_token_of_the_chunk_sees_it(
    kv_window: KVWindow, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, 200))
    num_pages = kv_window.num_pages(length)
    table = ring_table(range(kv_window.pages_to_compute(length)), num_pages)
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, min(length, start + kv_window.chunk_tokens)))
    seen = range(max(0, start - kv_window.tokens + 1) // kv_window.page_size, (end - 1) // kv_window.page_size + 1)
    assert len({table[index] for index in seen}) == len(seen)


@given(windows, st.integers(1, 60), st.integers(0, 3))
def test_a_growing_request_uses_its_own_pages_again_and_only_those_that_no_token_sees(
    kv_window: KVWindow, length: int, num_cached: int
) -> None:
    size = kv_window.page_size
    num_pages = kv_window.num_pages(length)
    num_cached = min(num_cached, length // size)
    request = request_of(length, list(range(num_pages)), list(range(num_cached, num_pages)))
    request.num_computed = length - 1
    most = kv_window.max_pages(request)
    for position in range(length, length + 120):
        request.num_scheduled = position
        if len(request.pages) * size <= position and not reuse_page(kv_window, request):
            assert len(request.pages) < most
            request.pages.append(len(request.pages))
            request.own.append(request.pages[-1])
        first_seen = max(0, position - kv_window.tokens + 1) // size
        seen = request.pages[first_seen : position // size + 1]
        assert len(set(seen)) == len(seen)
        assert request.own == request.pages[len(request.pages) - len(request.own) :]
        assert request.pages[:num_cached] == list(range(num_cached)), "a cached page is never used again"
    assert len(request.own) <= max(kv_window.max_span(1), num_pages - num_cached)


def test_pages_that_will_be_cached_count_as_kept_before_they_are_computed() -> None:
    # 6 tokens in 2 pages of 4, of which the first will enter the cache and is not used again.
    kv_window = KVWindow(4, 8, 8, 7)
    request = request_of(6, [0, 1], [0, 1])
    assert kv_window.max_pages(request) == 1 + kv_window.max_span(1)
    request.own, request.num_computed = [1], 6  # the first page is in the cache
    request.output.append(0)
    assert kv_window.max_pages(request) == 1 + kv_window.max_span(1)
