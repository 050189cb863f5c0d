"""Admission with ``ignore_eos``: output lengths are known, so memory provably suffices."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.scheduling.adder_pool import CONTINUE, NO_TOKEN, PAGE, Pool, compute, request

from common.cache.page_allocator import Owner
from common.cache.request_kv import release
from common.request import Request
from common.scheduling import prefill_adder
from common.scheduling.ignore_eos_admission import Growth, fits


def test_pages_of_requests_that_end_earlier_count() -> None:
    # Two requests of 4 tokens in 1 page each; one has 4 tokens left, the other 8. At the first end both need a page
    # more; at the second one needs two, and two have come back.
    early = Growth(num_tokens=4, num_pages=1, num_left=4, num_private=1)
    late = Growth(num_tokens=4, num_pages=1, num_left=8, num_private=1)
    assert fits([late, early], 2, PAGE)
    assert not fits([late, early], 1, PAGE)
    # With a page that is never returned, the second request needs two more pages at its end.
    shared = replace(early, num_private=0)
    assert fits([late, shared], 2, PAGE)
    longer = replace(late, num_left=12)
    assert fits([longer, early], 2, PAGE)
    assert not fits([longer, shared], 2, PAGE)


def test_pages_of_late_requests_do_not_count() -> None:
    early = Growth(num_tokens=4, num_pages=1, num_left=4, num_private=1, is_late=True)
    late = Growth(num_tokens=4, num_pages=1, num_left=8, num_private=1)
    assert not fits([late, early], 2, PAGE)
    assert fits([late, early], 3, PAGE)


@settings(max_examples=examples(200), deadline=None)
@given(
    growths=st.lists(
        st.builds(
            Growth, st.integers(1, 60), st.integers(1, 12), st.integers(0, 30), st.integers(0, 5), st.booleans(),
            st.integers(1, 30),
        ),
        min_size=1, max_size=6,
    ),
    num_available=st.integers(0, 40),
)  # fmt: skip
def test_pages_suffice_exactly_if_they_do_token_by_token(growths: list[Growth], num_available: int) -> None:
    def taken(growth: Growth, num_new: int) -> int:
        num_pages = -(-(growth.num_tokens + min(num_new, growth.num_left)) // PAGE)
        return max(min(num_pages, growth.max_pages) - growth.num_pages, 0)

    does_suffice = True
    for num_new in range(max(growth.num_left for growth in growths) + 1):
        ended = [growth for growth in growths if growth.num_left < num_new and not growth.is_late]
        others = [growth for growth in growths if growth not in ended]
        num_free = num_available + sum(growth.num_private for growth in ended)
        does_suffice &= sum(taken(growth, num_new) for growth in others) <= num_free
    assert fits(growths, num_available, PAGE) == does_suffice


def decoding(pool: Pool, length: int, max_new: int) -> Request:
    """A request with ``ignore_eos`` that has just sampled its first token."""
    mine = request(length, max_new, ignore_eos=True)
    adder = pool.adder()
    assert adder.add_one_req(mine) is CONTINUE
    compute(pool, adder)
    mine.output.append(0)
    return mine


def test_with_ignore_eos_a_request_is_admitted_if_all_can_grow_to_their_ends() -> None:
    # The running one has 9 tokens in 2 pages and 8 to come: at its end 17 tokens, 5 pages, 3 more than now. The new one
    # takes 2 pages at once; when the other ends it has 8 + 8 tokens, 4 pages, 2 more. Together 2 + 2 + 3 + 2 = 9. After
    # that it grows into what came back. Reserving both outputs whole would have asked for more than 10.
    for num_pages, expected in [(8, NO_TOKEN), (9, CONTINUE)]:
        pool = Pool(num_pages)
        running = [decoding(pool, 8, 9)]
        adder = pool.adder(reserve_output=True, running=running)
        assert adder.add_one_req(request(8, 12, ignore_eos=True)) is expected


def test_shared_pages_are_returned_with_neither_request() -> None:
    pool = Pool(20)
    first = decoding(pool, 8, 9)
    assert Growth.of(first, 8, is_late=False).num_private == 2
    second = Request("second", 0, (*first.prompt, 5), first.sampling)
    assert pool.adder().add_one_req(second) is CONTINUE
    assert second.num_cached == 8
    assert Growth.of(first, 8, is_late=False).num_private == 0
    assert Growth.of(second, 9, is_late=False).num_private == 1
    release(pool.cache, pool.allocator, first)
    assert Growth.of(second, 9, is_late=False).num_private == 3


def test_no_pages_are_expected_from_a_prompt_that_is_still_computed() -> None:
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


def test_no_pages_are_expected_from_a_prompt_that_is_cut_in_this_step() -> None:
    # The first has 12 tokens in 3 pages and 2 to come: 1 page more. The second, of 2 tokens in a page, grows by 12: 3
    # more. Of the 2 that are free the second gets 3 only if the first has ended by then, which one that is cut may not.
    for chunk, expected in [(14, CONTINUE), (10, NO_TOKEN)]:
        adder = Pool(6).adder(chunk=chunk, reserve_output=True)
        assert adder.add_one_req(request(12, 2, ignore_eos=True)) is CONTINUE
        assert adder.chunks[0].is_last == (chunk == 14)
        assert adder.add_one_req(request(2, 12, ignore_eos=True)) is expected


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), is_enabled=st.booleans())
def test_with_ignore_eos_memory_never_runs_out(data: st.DataObject, is_enabled: bool) -> None:
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
            release(pool.cache, pool.allocator, mine)
        pool.check()


def grow(pool: Pool, mine: Request) -> None:
    """Make room for the KV of the last token. Eviction must suffice, unless the request is alone."""
    if mine.num_tokens <= len(mine.pages) * pool.page_size:
        return
    if not pool.allocator.num_free:
        pool.cache.evict(1)
    pages = pool.allocator.alloc(1, Owner.REQUEST)
    assert pages, "memory ran out"
    mine.pages += pages
    mine.own += pages


def test_nothing_is_proved_where_all_outputs_fit_or_the_prompt_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(*_: object) -> bool:
        raise AssertionError("proofs of many requests take long")

    monkeypatch.setattr(prefill_adder, "fits", prove)
    # 10 tokens at the end of the running one, 3 pages; 20 at the end of the other, 5 pages.
    pool = Pool(8)
    running = [decoding(pool, 8, 2)]
    assert pool.adder(reserve_output=True, running=running).add_one_req(request(8, 12, ignore_eos=True)) is CONTINUE
    pool = Pool(8)
    running = [decoding(pool, 8, 2)]
    assert pool.adder(reserve_output=True, running=running).add_one_req(request(28, 12, ignore_eos=True)) is NO_TOKEN


def test_a_lone_request_is_admitted_whatever_its_output() -> None:
    assert Pool(4).adder(reserve_output=True).add_one_req(request(8, 1000, ignore_eos=True)) is CONTINUE
