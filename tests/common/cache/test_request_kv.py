"""A request's pages in the cache after its chunks, and their release."""

from support.scheduling.adder_pool import CONTINUE, Pool, chunks_of, compute, request

from common.cache.request_kv import packed_tokens, release
from common.cache.tree_node import pack


def test_computed_pages_are_shared_while_their_request_still_runs() -> None:
    pool = Pool(100)
    first = request(14, start=0)
    adder = pool.adder(chunk=8)
    adder.add_one_req(first)
    compute(pool, adder)
    assert len(first.own) == 2
    second = request(14, start=0)
    pool.adder().add_one_req(second)
    assert second.num_cached == 8
    assert second.pages[:2] == first.pages[:2]
    assert second.own == second.pages[2:]
    release(pool.cache, pool.allocator, first)
    assert pool.cache.num_evictable_pages == 0  # the second still uses them
    release(pool.cache, pool.allocator, second)
    assert (pool.cache.num_evictable_pages, pool.allocator.num_free) == (2, 98)
    pool.check()


def test_a_duplicate_stays_with_its_request_and_later_pages_are_cached_at_the_end() -> None:
    pool = Pool(100)
    twins = [request(8, start=0), request(16, start=0)]
    adder = pool.adder()
    for twin in twins:
        assert adder.add_one_req(twin) is CONTINUE
    compute(pool, adder)
    assert twins[0].own == []
    assert (
        twins[1].own == twins[1].pages
    )  # the first was inserted before; its prefix is not locked beside the duplicate
    first, second = twins[0].pages, twins[1].pages
    release(pool.cache, pool.allocator, twins[0])
    assert pool.cache.num_evictable_pages == 2
    release(pool.cache, pool.allocator, twins[1])
    assert pool.cache.match(range(16)).pages == first + second[2:]
    assert (pool.cache.num_evictable_pages, pool.allocator.num_free) == (4, 96)
    pool.check()


def test_release_takes_all_pages_and_is_idempotent() -> None:
    pool = Pool(10)
    mine = request(10)
    pool.adder().add_one_req(mine)
    for _ in range(2):
        release(pool.cache, pool.allocator, mine)
        assert (mine.pages, mine.own, mine.node, mine.num_computed) == ([], [], None, 0)
    assert pool.allocator.num_free == 10


def test_each_token_is_packed_only_once() -> None:
    mine = request(5, start=0)
    assert packed_tokens(mine, 3) == pack((0, 1, 2))
    mine.output += [9, 8]
    assert packed_tokens(mine, 6) == pack((0, 1, 2, 3, 4, 9))
    kept = mine.packed
    assert packed_tokens(mine, 4) == pack((0, 1, 2, 3))
    assert packed_tokens(mine, 6) is kept
    assert packed_tokens(mine, 7) == pack((0, 1, 2, 3, 4, 9, 8))


def test_a_paused_request_finds_its_chunks_again() -> None:
    pool = Pool(20)
    mine = request(30)
    adder = pool.adder(chunk=16)
    adder.add_one_req(mine)
    compute(pool, adder)
    release(pool.cache, pool.allocator, mine)
    adder = pool.adder(chunk=16)
    assert adder.add_one_req(mine) is CONTINUE
    assert chunks_of(adder) == [(16, 14, True)]
    pool.check()


def test_with_a_disabled_cache_every_page_is_the_requests_own() -> None:
    pool = Pool(20, is_enabled=False)
    mine = request(10)
    adder = pool.adder()
    adder.add_one_req(mine)
    compute(pool, adder)
    assert len(mine.own) == 3
    release(pool.cache, pool.allocator, mine)
    assert pool.allocator.num_free == 20
