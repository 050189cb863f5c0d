"""One prefill batch within its budgets, computed by hand. Pages have 4 tokens unless a test says otherwise."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.scheduling.adder_pool import CONTINUE, NO_TOKEN, OTHER, Pool, chunks_of, compute, request

from common.cache.page_allocator import Owner
from common.cache.request_kv import release
from common.request import Request

# ---- the total budget ----


def test_a_request_is_admitted_only_if_it_needs_less_than_the_budget() -> None:
    pool = Pool(10)
    assert pool.adder(total=8).add_one_req(request(5)) is NO_TOKEN  # 5 tokens are 2 pages, 8 tokens
    assert pool.adder(total=9).add_one_req(request(5)) is CONTINUE


def test_budgets_are_spent_in_whole_pages() -> None:
    adder = Pool(10).adder(total=25)
    assert adder.add_one_req(request(5)) is CONTINUE
    assert adder.total_left == 17
    assert adder.add_one_req(request(17)) is NO_TOKEN  # 20
    assert adder.add_one_req(request(16)) is CONTINUE
    assert adder.total_left == 1
    assert adder.add_one_req(request(1)) is NO_TOKEN


def test_outputs_are_reserved_only_on_the_node_that_decodes_them() -> None:
    pool = Pool(10)
    assert pool.adder(total=20, reserve_output=True).add_one_req(request(8, max_new=12)) is NO_TOKEN
    adder = pool.adder(total=20, reserve_output=True)
    assert adder.add_one_req(request(8, max_new=11)) is CONTINUE
    assert adder.total_left == 20 - 8 - 11
    assert pool.adder(total=20).add_one_req(request(8, max_new=12)) is CONTINUE


def test_reserved_output_is_clipped_and_excludes_generated_tokens() -> None:
    pool = Pool(10)
    assert (
        pool.adder(total=20, reserve_output=True, reserved_tokens=11).add_one_req(request(8, max_new=500)) is CONTINUE
    )
    resumed = request(4, max_new=15)
    resumed.output = [1, 2, 3, 4]  # 8 tokens to extend, 11 to come
    assert pool.adder(total=20, reserve_output=True).add_one_req(resumed) is CONTINUE
    assert resumed.num_cached == 0


def test_a_lone_request_is_admitted_whatever_its_output() -> None:
    assert Pool(4).adder(reserve_output=True, is_alone=True).add_one_req(request(8, 1000)) is CONTINUE


def test_a_request_with_more_output_than_the_pool_holds_runs_alone() -> None:
    pool = Pool(10)
    assert pool.adder(total=39, reserve_output=True).add_one_req(request(8, max_new=500)) is NO_TOKEN
    assert pool.adder(total=40, reserve_output=True).add_one_req(request(8, max_new=500)) is CONTINUE


def test_a_cached_prefix_costs_the_pages_that_its_lock_makes_unevictable() -> None:
    pool = Pool(5)
    pool.cached(*range(12))
    # 20 tokens of memory; 12 of them become unevictable by the lock; 8 remain for the 8 to compute: not strictly less.
    assert pool.adder().add_one_req(request(20, start=0)) is NO_TOKEN
    adder = pool.adder(total=21)
    assert adder.add_one_req(request(20, start=0)) is CONTINUE
    assert adder.total_left == 21 - 12 - 8
    pool.check()


def test_a_prefix_that_is_locked_already_costs_nothing() -> None:
    pool = Pool(5)
    pool.cached(*range(12))
    pool.cache.lock(pool.cache.match(range(12)).node)
    adder = pool.adder(total=9)
    assert adder.add_one_req(request(20, start=0)) is CONTINUE
    assert adder.total_left == 1


def test_admission_evicts_cached_pages_but_not_the_matched_prefix() -> None:
    pool = Pool(6)
    pool.cached(*range(8))
    pool.cached(*range(500, 512))
    mine = request(17, start=0)
    assert pool.adder(total=100).add_one_req(mine) is CONTINUE
    assert mine.num_cached == 8
    assert pool.cache.match(range(500, 512)).num_tokens == 4  # two of its pages went
    pool.check()


@pytest.mark.parametrize(("total", "inputs", "chunk"), [(20, 1000, None), (1000, 12, None), (1000, 1000, 8)])
def test_a_failed_admission_leaves_everything_as_it_was(total: int, inputs: int, chunk: int | None) -> None:
    pool = Pool(8)
    pool.cached(*range(12))
    adder = pool.adder(total, inputs, chunk)
    adder.add_one_req(request(5))
    mine = request(20, start=0)
    locks = [node.locks for node in pool.cache.nodes()]
    before = state_of(mine), (adder.total_left, adder.input_left, adder.chunk_left, list(adder.chunks))
    assert adder.add_one_req(mine) is (NO_TOKEN if total == 20 else OTHER)
    assert (state_of(mine), (adder.total_left, adder.input_left, adder.chunk_left, adder.chunks)) == before
    assert [node.locks for node in pool.cache.nodes()] == locks
    assert (pool.allocator.num_free, pool.cache.num_evictable_pages) == (3, 3)
    pool.check()


def state_of(request: Request) -> list[Any]:
    values = [getattr(request, name) for name in request.__slots__ if name != "packed"]
    return [list(value) if isinstance(value, list) else value for value in values]


def test_a_large_total_budget_cannot_spend_missing_pages() -> None:
    pool = Pool(5)
    pool.allocator.alloc(3, Owner.GRANT)
    pool.cached(*range(4))
    assert pool.adder(total=1000).add_one_req(request(12)) is NO_TOKEN
    assert pool.cache.num_pages == 1  # nothing was evicted in vain
    assert pool.adder(total=1000).add_one_req(request(8)) is CONTINUE
    pool.check()


def test_evicted_pages_that_linger_admit_a_request_at_once() -> None:
    pool = Pool(4)
    pool.cached(*range(16))
    pool.allocator.begin_step(1)
    assert pool.adder(total=1000).add_one_req(request(7)) is CONTINUE
    pool.check()
    pool.allocator.end_step(1)
    pool.check()


# ---- what is cached ----


def test_at_least_the_last_token_is_computed() -> None:
    pool = Pool(10)
    pool.cached(*range(12))
    whole = request(12, start=0)
    adder = pool.adder()
    assert adder.add_one_req(whole) is CONTINUE
    assert chunks_of(adder) == [(8, 4, True)]
    assert (whole.num_cached, whole.num_computed, len(whole.own)) == (8, 8, 1)
    one_more = request(13, start=0)
    assert adder.add_one_req(one_more) is CONTINUE
    assert chunks_of(adder)[1] == (12, 1, True)
    assert whole.pages[:2] == one_more.pages[:2]
    pool.check()


def test_requests_with_different_salts_share_no_prefix() -> None:
    pool = Pool(10)
    pool.cached(*range(12))
    salted = replace(request(12, start=0), salt="mine")
    assert pool.adder().add_one_req(salted) is CONTINUE
    assert salted.num_cached == 0


# ---- input, chunk and the number of requests ----


def test_the_first_request_may_exceed_the_input_budget_and_a_second_waits() -> None:
    adder = Pool(100).adder(inputs=16)
    assert adder.add_one_req(request(50)) is CONTINUE
    assert adder.add_one_req(request(1)) is OTHER
    adder = Pool(100).adder(inputs=16)
    assert adder.add_one_req(request(5)) is CONTINUE  # 8, in pages
    assert adder.add_one_req(request(9)) is OTHER  # 12 > 8
    assert adder.add_one_req(request(8)) is CONTINUE
    assert adder.input_left == 0


def test_without_chunking_a_prompt_is_computed_whole() -> None:
    adder = Pool(1000).adder(chunk=None)
    assert adder.add_one_req(request(3001)) is CONTINUE
    assert chunks_of(adder) == [(0, 3001, True)]


def test_a_long_prompt_is_cut_at_pages_and_its_memory_is_allocated_at_once() -> None:
    pool = Pool(100)
    long = request(25)
    adder = pool.adder(chunk=10)
    assert adder.add_one_req(long) is CONTINUE
    assert chunks_of(adder) == [(0, 8, False)]
    assert len(long.pages) == 7
    assert adder.total_left == 400 - 28
    compute(pool, adder)
    for expected in [(8, 8, False), (16, 9, True)]:  # a tail that fits is not cut again
        adder = pool.adder(chunk=10)
        assert adder.add_chunked_req(long) is CONTINUE
        assert chunks_of(adder) == [expected]
        assert adder.total_left == pool.num_tokens
        compute(pool, adder)
    assert len(long.own) == 1
    release(pool.cache, pool.allocator, long)
    assert pool.cache.num_evictable_pages == 6
    pool.check()


def test_a_chunk_that_leaves_one_token_is_not_the_last() -> None:
    pool = Pool(10)
    mine = request(9)
    adder = pool.adder(chunk=8)
    adder.add_one_req(mine)
    assert chunks_of(adder) == [(0, 8, False)]
    assert not adder.chunks[0].to_row().sample
    compute(pool, adder)
    adder = pool.adder(chunk=8)
    adder.add_chunked_req(mine)
    assert chunks_of(adder) == [(8, 1, True)]


def test_a_step_is_filled_by_a_tail_whole_requests_and_a_head() -> None:
    pool = Pool(100)
    adder = pool.adder(chunk=32)
    long = request(41)
    assert adder.add_one_req(long) is CONTINUE
    compute(pool, adder)
    adder = pool.adder(chunk=32)
    assert adder.add_chunked_req(long) is CONTINUE  # 9 tokens, 12 in pages: 20 left
    assert adder.add_one_req(request(3)) is CONTINUE  # 16 left
    assert adder.add_one_req(request(4)) is CONTINUE  # 12 left
    head = request(100)
    assert adder.add_one_req(head) is CONTINUE
    assert chunks_of(adder) == [(32, 9, True), (0, 3, True), (0, 4, True), (0, 12, False)]
    assert adder.chunk_left == 0
    assert adder.add_one_req(request(1)) is OTHER
    compute(pool, adder)


def test_a_request_is_never_cut_to_nothing() -> None:
    adder = Pool(100).adder(chunk=6)
    assert adder.add_one_req(request(4)) is CONTINUE
    assert adder.chunk_left == 2
    assert adder.add_one_req(request(9)) is OTHER
    assert adder.add_one_req(request(2)) is CONTINUE  # what fits whole may still go
    assert len(adder.chunks) == 2


def test_a_chunk_budget_below_a_page_is_one_page() -> None:
    pool = Pool(10, page_size=64)
    adder = pool.adder(chunk=16)
    assert adder.add_one_req(request(100)) is CONTINUE
    assert chunks_of(adder) == [(0, 64, False)]


def test_the_head_of_a_request_longer_than_the_input_budget_fills_the_step() -> None:
    adder = Pool(100).adder(inputs=30, chunk=20)
    assert adder.add_one_req(request(8)) is CONTINUE
    assert adder.add_one_req(request(60)) is CONTINUE
    assert chunks_of(adder) == [(0, 8, True), (0, 12, False)]


def test_an_admitted_request_waits_when_the_step_is_full_and_never_for_memory() -> None:
    pool = Pool(20)
    long = request(40)
    first = pool.adder(chunk=8)
    first.add_one_req(long)
    compute(pool, first)
    assert pool.adder(total=0, chunk=8).add_chunked_req(long) is CONTINUE
    full = pool.adder(chunk=8)
    full.add_one_req(request(8))
    assert full.add_chunked_req(long) is OTHER


# ---- all of it ----


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 4]), chunk=st.sampled_from([None, 1, 7, 16]))
def test_budgets_hold_all_requests_end_and_all_pages_return(
    data: st.DataObject, page_size: int, chunk: int | None
) -> None:
    pool = Pool(data.draw(st.integers(48 // page_size, 90 // page_size)), page_size)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 20])), min_size=1, max_size=8))
    waiting = [request(length, start=start) for length, start in lengths]
    going: list[Request] = []
    num_steps = 0
    while waiting or going:
        num_steps += 1
        assert num_steps < 1000
        adder = pool.adder(chunk=chunk, inputs=data.draw(st.sampled_from([5, 24, 100])))
        for mine in going:
            adder.add_chunked_req(mine)
        while waiting and adder.add_one_req(waiting[0]) is CONTINUE:
            going.append(waiting.pop(0))
        assert adder.chunks, "no request advances"
        pool.check()
        if chunk is not None:
            assert sum(part.num_tokens for part in adder.chunks) <= max(chunk, page_size)
        for part in adder.chunks:
            assert part.num_tokens > 0
            assert part.start == part.request.num_computed
            assert part.is_last or (part.start + part.num_tokens) % page_size == 0
        compute(pool, adder)
        for part in adder.chunks:
            if part.is_last or data.draw(st.integers(0, 9)) == 0:
                going.remove(part.request)
                release(pool.cache, pool.allocator, part.request)
                if not part.is_last:
                    waiting.insert(0, part.request)
                pool.check()
    pool.cache.clear()
    assert pool.allocator.num_free == pool.allocator.num_pages
