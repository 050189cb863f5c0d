"""One prefill batch under its budgets, with sums done by hand. Pages have 4 tokens unless a test says otherwise."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.growth import Growth, fits
from common.pages import Owner, PageBooks
from common.prefill_adder import AddResult, Budgets, PrefillAdder
from common.radix import RadixCache, pack
from common.request import Request
from common.request_pages import cache_computed, packed_tokens, release
from common.sampling import SamplingParams

CONTINUE, NO_TOKEN, OTHER = AddResult.CONTINUE, AddResult.NO_TOKEN, AddResult.OTHER
PAGE = 4
_names = count()


class Pool:
    """Books, cache and the makings of an adder."""

    def __init__(self, num_pages: int, page_size: int = PAGE, *, is_enabled: bool = True) -> None:
        self.page_size = page_size
        self.books = PageBooks(num_pages)
        self.cache = RadixCache(self.books, page_size, is_enabled=is_enabled)

    @property
    def num_tokens(self) -> int:
        """Free and evictable memory."""
        return (self.books.num_free + self.cache.num_evictable_pages) * self.page_size

    def adder(
        self, total: int | None = None, inputs: int = 10_000, chunk: int | None = None, **rest: Any
    ) -> PrefillAdder:
        budgets = Budgets(self.num_tokens if total is None else total, inputs, chunk)
        rest.setdefault("reserve_output", False)
        return PrefillAdder(self.cache, self.books, self.page_size, budgets, **rest)

    def cached(self, *tokens: int) -> None:
        """Put these tokens into the cache."""
        pages = self.books.alloc(len(tokens) // self.page_size, Owner.REQUEST)
        assert pages is not None
        self.cache.insert(tokens, pages)

    def check(self) -> None:
        self.books.check()
        self.cache.check()


def request(length: int, max_new: int = 1, *, start: int | None = None, ignore_eos: bool = False) -> Request:
    """A request of its own tokens, or of ``start, start + 1, ...``."""
    number = next(_names)
    first = number * 1000 if start is None else start
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=ignore_eos)
    return Request(f"r{number}", 0, tuple(range(first, first + length)), sampling)


def taken(adder: PrefillAdder) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.num_tokens, chunk.is_last) for chunk in adder.chunks]


def compute(pool: Pool, adder: PrefillAdder) -> None:
    """What a role does after the step: count the chunks as computed and cache them."""
    for chunk in adder.chunks:
        chunk.request.num_computed += chunk.num_tokens
        cache_computed(pool.cache, pool.books, chunk.request)
    pool.check()


# ---- the total budget ----


def test_a_request_is_admitted_only_if_it_needs_strictly_less_than_there_is() -> None:
    pool = Pool(10)
    assert pool.adder(total=8).add_one_req(request(5)) is NO_TOKEN  # 5 tokens are 2 pages, 8 tokens
    assert pool.adder(total=9).add_one_req(request(5)) is CONTINUE


def test_what_is_admitted_is_spent_in_whole_pages() -> None:
    adder = Pool(10).adder(total=25)
    assert adder.add_one_req(request(5)) is CONTINUE
    assert adder.total_left == 17
    assert adder.add_one_req(request(17)) is NO_TOKEN  # 20
    assert adder.add_one_req(request(16)) is CONTINUE
    assert adder.total_left == 1
    assert adder.add_one_req(request(1)) is NO_TOKEN


def test_outputs_are_reserved_only_where_they_are_decoded() -> None:
    pool = Pool(10)
    assert pool.adder(total=20, reserve_output=True).add_one_req(request(8, max_new=12)) is NO_TOKEN
    adder = pool.adder(total=20, reserve_output=True)
    assert adder.add_one_req(request(8, max_new=11)) is CONTINUE
    assert adder.total_left == 20 - 8 - 11
    assert pool.adder(total=20).add_one_req(request(8, max_new=12)) is CONTINUE


def test_reserved_output_is_clipped_and_what_was_generated_no_longer_counts() -> None:
    pool = Pool(10)
    assert pool.adder(total=20, reserve_output=True, clip=11).add_one_req(request(8, max_new=500)) is CONTINUE
    resumed = request(4, max_new=15)
    resumed.output = [1, 2, 3, 4]  # 8 tokens to extend, 11 to come
    assert pool.adder(total=20, reserve_output=True).add_one_req(resumed) is CONTINUE
    assert resumed.num_cached == 0


def test_a_request_that_allows_more_output_than_the_pool_holds_runs_once_it_has_it_alone() -> None:
    pool = Pool(10)
    assert pool.adder(total=39, reserve_output=True).add_one_req(request(8, max_new=500)) is NO_TOKEN
    assert pool.adder(total=40, reserve_output=True).add_one_req(request(8, max_new=500)) is CONTINUE


def test_a_cached_prefix_costs_what_locking_it_makes_unevictable() -> None:
    pool = Pool(5)
    pool.cached(*range(12))
    # 20 tokens of memory; 12 of them become unevictable by the lock; 8 remain for the 8 to compute: not strictly less.
    assert pool.adder().add_one_req(request(20, start=0)) is NO_TOKEN
    adder = pool.adder(total=21)
    assert adder.add_one_req(request(20, start=0)) is CONTINUE
    assert adder.total_left == 21 - 12 - 8
    pool.check()


def test_a_prefix_that_another_has_locked_already_costs_nothing() -> None:
    pool = Pool(5)
    pool.cached(*range(12))
    pool.cache.lock(pool.cache.match(range(12)).node)
    adder = pool.adder(total=9)
    assert adder.add_one_req(request(20, start=0)) is CONTINUE
    assert adder.total_left == 1


def test_the_cache_gives_way_to_a_new_request_but_not_what_it_matched() -> None:
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
    assert (pool.books.num_free, pool.cache.num_evictable_pages) == (3, 3)
    pool.check()


def state_of(request: Request) -> list[Any]:
    values = [getattr(request, name) for name in request.__slots__ if name != "packed"]
    return [list(value) if isinstance(value, list) else value for value in values]


def test_a_generous_total_budget_still_cannot_spend_pages_that_are_not_there() -> None:
    pool = Pool(5)
    pool.books.alloc(3, Owner.GRANT)
    pool.cached(*range(4))
    assert pool.adder(total=1000).add_one_req(request(12)) is NO_TOKEN
    assert pool.cache.num_pages == 1  # nothing was evicted in vain
    assert pool.adder(total=1000).add_one_req(request(8)) is CONTINUE
    pool.check()


def test_evicted_pages_that_linger_admit_the_request_one_step_later() -> None:
    pool = Pool(4)
    pool.cached(*range(16))
    pool.books.begin_step(1)
    mine = request(7)
    assert pool.adder(total=1000).add_one_req(mine) is NO_TOKEN
    pool.check()
    pool.books.end_step(1)
    assert pool.adder(total=1000).add_one_req(mine) is CONTINUE
    pool.check()


# ---- what is cached ----


def test_at_least_the_last_token_is_computed() -> None:
    pool = Pool(10)
    pool.cached(*range(12))
    whole = request(12, start=0)
    adder = pool.adder()
    assert adder.add_one_req(whole) is CONTINUE
    assert taken(adder) == [(8, 4, True)]
    assert (whole.num_cached, whole.num_computed, len(whole.own)) == (8, 8, 1)
    one_more = request(13, start=0)
    assert adder.add_one_req(one_more) is CONTINUE
    assert taken(adder)[1] == (12, 1, True)
    assert whole.pages[:2] == one_more.pages[:2]
    pool.check()


def test_salts_do_not_share() -> None:
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


def test_no_more_requests_than_allowed() -> None:
    adder = Pool(100).adder(max_requests=2)
    assert [adder.add_one_req(request(4)) for _ in range(3)] == [CONTINUE, CONTINUE, OTHER]


def test_without_chunking_a_prompt_goes_whole() -> None:
    adder = Pool(1000).adder(chunk=None)
    assert adder.add_one_req(request(3001)) is CONTINUE
    assert taken(adder) == [(0, 3001, True)]


def test_a_long_prompt_is_cut_at_pages_and_its_memory_is_allocated_at_once() -> None:
    pool = Pool(100)
    long = request(25)
    adder = pool.adder(chunk=10)
    assert adder.add_one_req(long) is CONTINUE
    assert taken(adder) == [(0, 8, False)]
    assert len(long.pages) == 7
    assert adder.total_left == 400 - 28
    compute(pool, adder)
    for expected in [(8, 8, False), (16, 9, True)]:  # a tail that fits is not cut again
        adder = pool.adder(chunk=10)
        assert adder.add_chunked_req(long) is CONTINUE
        assert taken(adder) == [expected]
        assert adder.total_left == pool.num_tokens
        compute(pool, adder)
    assert len(long.own) == 1
    release(pool.cache, pool.books, long, keep=True)
    assert pool.cache.num_evictable_pages == 6
    pool.check()


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
    assert taken(adder) == [(32, 9, True), (0, 3, True), (0, 4, True), (0, 12, False)]
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
    assert taken(adder) == [(0, 64, False)]


def test_the_head_of_a_request_longer_than_the_input_budget_fills_the_step() -> None:
    adder = Pool(100).adder(inputs=30, chunk=20)
    assert adder.add_one_req(request(8)) is CONTINUE
    assert adder.add_one_req(request(60)) is CONTINUE
    assert taken(adder) == [(0, 8, True), (0, 12, False)]


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


# ---- after the computing ----


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
    release(pool.cache, pool.books, first, keep=False)
    assert pool.cache.num_evictable_pages == 0  # the second still uses them
    release(pool.cache, pool.books, second, keep=False)
    assert (pool.cache.num_evictable_pages, pool.books.num_free) == (2, 98)
    pool.check()


def test_a_duplicate_stays_with_its_request_and_what_follows_it_is_cached_at_the_end() -> None:
    pool = Pool(100)
    twins = [request(8, start=0), request(16, start=0)]
    adder = pool.adder()
    for twin in twins:
        assert adder.add_one_req(twin) is CONTINUE
    compute(pool, adder)
    assert twins[0].own == []
    assert twins[1].own == twins[1].pages  # the first was faster; it is not held beside the duplicate
    first, second = twins[0].pages, twins[1].pages
    release(pool.cache, pool.books, twins[0], keep=True)
    assert pool.cache.num_evictable_pages == 2
    release(pool.cache, pool.books, twins[1], keep=True)
    assert pool.cache.match(range(16)).pages == first + second[2:]
    assert (pool.cache.num_evictable_pages, pool.books.num_free) == (4, 96)
    pool.check()


def test_a_released_request_has_nothing_and_may_be_released_again() -> None:
    pool = Pool(10)
    mine = request(10)
    pool.adder().add_one_req(mine)
    for _ in range(2):
        release(pool.cache, pool.books, mine, keep=False)
        assert (mine.pages, mine.own, mine.node, mine.num_computed) == ([], [], None, 0)
    assert pool.books.num_free == 10


def test_each_token_is_packed_once_however_often_and_far_it_is_asked_for() -> None:
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
    release(pool.cache, pool.books, mine, keep=True)
    adder = pool.adder(chunk=16)
    assert adder.add_one_req(mine) is CONTINUE
    assert taken(adder) == [(16, 14, True)]
    pool.check()


def test_with_the_cache_off_every_page_is_the_requests_own() -> None:
    pool = Pool(20, is_enabled=False)
    mine = request(10)
    adder = pool.adder()
    adder.add_one_req(mine)
    compute(pool, adder)
    assert len(mine.own) == 3
    release(pool.cache, pool.books, mine, keep=True)
    assert pool.books.num_free == 20


@settings(max_examples=150, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 4]), chunk=st.sampled_from([None, 1, 7, 16]))
def test_whatever_comes_the_budgets_hold_everyone_ends_and_every_page_comes_back(
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
        assert adder.chunks, "nobody advances"
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
                release(pool.cache, pool.books, part.request, keep=data.draw(st.booleans()))
                if not part.is_last:
                    waiting.insert(0, part.request)
                pool.check()
    pool.cache.clear()
    assert pool.books.num_free == pool.books.num_pages


# ---- outputs of known length ----


def test_the_walk_counts_what_ends_before() -> None:
    # Two requests of 4 tokens in 1 page each; one has 4 tokens left, the other 8. At the first end both need a page
    # more; at the second one needs two, and two have come back.
    early = Growth(num_tokens=4, num_pages=1, num_left=4, num_private=1)
    late = Growth(num_tokens=4, num_pages=1, num_left=8, num_private=1)
    assert fits([late, early], 2, PAGE)
    assert not fits([late, early], 1, PAGE)
    # With a page that comes back to nobody, the second end needs two of its own.
    shared = replace(early, num_private=0)
    assert fits([late, shared], 2, PAGE)
    longer = replace(late, num_left=12)
    assert fits([longer, early], 2, PAGE)
    assert not fits([longer, shared], 2, PAGE)


def test_the_walk_does_not_count_on_those_whose_end_is_uncertain() -> None:
    early = Growth(num_tokens=4, num_pages=1, num_left=4, num_private=1, is_late=True)
    late = Growth(num_tokens=4, num_pages=1, num_left=8, num_private=1)
    assert not fits([late, early], 2, PAGE)
    assert fits([late, early], 3, PAGE)


def decoding(pool: Pool, length: int, max_new: int) -> Request:
    """A request under ignore-EOS that has just sampled its first token here."""
    mine = request(length, max_new, ignore_eos=True)
    adder = pool.adder()
    assert adder.add_one_req(mine) is CONTINUE
    compute(pool, adder)
    mine.output.append(0)
    return mine


def test_under_ignore_eos_a_request_is_admitted_if_all_can_grow_to_their_ends() -> None:
    # The running one has 9 tokens in 2 pages and 8 to come: at its end 17 tokens, 5 pages, 3 more than now. The new one
    # takes 2 pages at once; when the other ends it has 8 + 8 tokens, 4 pages, 2 more. Together 2 + 2 + 3 + 2 = 9. After
    # that it grows into what came back. Reserving both outputs whole would have asked for more than 10.
    for num_pages, expected in [(8, NO_TOKEN), (9, CONTINUE)]:
        pool = Pool(num_pages)
        running = [decoding(pool, 8, 9)]
        adder = pool.adder(reserve_output=True, running=running)
        assert adder.add_one_req(request(8, 12, ignore_eos=True)) is expected


def test_pages_that_two_requests_share_come_back_with_neither() -> None:
    pool = Pool(20)
    first = decoding(pool, 8, 9)
    assert Growth.of(first, 8, is_late=False).num_private == 2
    second = Request("second", 0, (*first.prompt, 5), first.sampling)
    assert pool.adder().add_one_req(second) is CONTINUE
    assert second.num_cached == 8
    assert Growth.of(first, 8, is_late=False).num_private == 0
    assert Growth.of(second, 9, is_late=False).num_private == 1
    release(pool.cache, pool.books, first, keep=True)
    assert Growth.of(second, 9, is_late=False).num_private == 3


def test_under_ignore_eos_nothing_is_expected_back_from_a_prompt_still_being_computed() -> None:
    # One prompt of 16 tokens holds 4 pages, is half computed and has 4 tokens to come: 1 page more. The new one takes a
    # page and grows by 12 tokens, 3 more: 4 + 1 + 1 + 3 = 9. By counting steps the first would have ended by then.
    for num_pages, expected in [(8, NO_TOKEN), (9, CONTINUE)]:
        pool = Pool(num_pages)
        half = request(16, 4, ignore_eos=True)
        adder = pool.adder(chunk=8)
        assert adder.add_one_req(half) is CONTINUE
        compute(pool, adder)
        adder = pool.adder(reserve_output=True, running=[half])
        assert adder.add_one_req(request(4, 12, ignore_eos=True)) is expected


@settings(max_examples=400, deadline=None)
@given(data=st.data(), is_enabled=st.booleans())
def test_under_ignore_eos_memory_never_runs_out(data: st.DataObject, is_enabled: bool) -> None:
    pool = Pool(data.draw(st.integers(12, 40)), is_enabled=is_enabled)
    shapes = st.tuples(st.integers(1, 16), st.integers(1, 24), st.sampled_from([0, 0, 50]))
    waiting = [
        request(n, out, start=start, ignore_eos=True) for n, out, start in data.draw(st.lists(shapes, max_size=8))
    ]
    extending: list[Request] = []
    running: list[Request] = []
    while waiting or extending or running:
        adder = pool.adder(
            chunk=data.draw(st.sampled_from([4, 8, None])), reserve_output=True, running=[*running, *extending]
        )
        for mine in extending:
            adder.add_chunked_req(mine)
        while waiting and adder.add_one_req(waiting[0]) is CONTINUE:
            extending.append(waiting.pop(0))
        assert adder.chunks or running
        for mine in running:
            grow(pool, mine)
        compute(pool, adder)
        for mine in running:
            mine.output.append(len(mine.output))
            mine.num_computed += 1
        for chunk in adder.chunks:
            if chunk.is_last:
                extending.remove(chunk.request)
                running.append(chunk.request)
                chunk.request.output.append(0)
        for mine in [mine for mine in running if mine.num_left == 0]:
            running.remove(mine)
            release(pool.cache, pool.books, mine, keep=data.draw(st.booleans()))
        pool.check()


def grow(pool: Pool, mine: Request) -> None:
    """Room for the KV of the token sampled last; there must be some, by evicting at most, unless it is alone."""
    if mine.num_tokens <= len(mine.pages) * pool.page_size:
        return
    if not pool.books.num_free:
        pool.cache.evict(1)
    pages = pool.books.alloc(1, Owner.REQUEST)
    assert pages, "memory ran out"
    mine.pages += pages
    mine.own += pages


def test_a_request_alone_is_admitted_whatever_it_may_produce() -> None:
    assert Pool(4).adder(reserve_output=True).add_one_req(request(8, 1000, ignore_eos=True)) is CONTINUE
