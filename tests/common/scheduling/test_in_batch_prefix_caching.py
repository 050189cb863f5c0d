"""Prompts wait for a prefix that another request computes, so that it is computed and shipped once."""

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster.fake_engine import expected_output
from support.cluster.local_cluster import LocalCluster
from support.scheduling.waiting_requests import PAGE_SIZE, TOKENS, cache_with, request

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import adds_to_cache, packed_tokens
from common.config.scheduling import POLICIES, PriorityRules
from common.errors import ConfigError
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.in_batch_prefix_caching import InBatchPrefixes, InBatchPrefixLimits, prefix_limits_from_environ
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import FirstComeFirstServed


def sharing(*computing: Request) -> InBatchPrefixes:
    return InBatchPrefixes(PAGE_SIZE, InBatchPrefixLimits(max_cached=4, min_shared=8), computing)


def wait_at(cache: RadixCache, asking: Request) -> Request:
    asking.watch = cache.watch(packed_tokens(asking, asking.num_cacheable), asking.salt)
    return asking


def use_cached(request: Request, cache: RadixCache) -> None:
    match = cache.match(request.prompt)
    request.node, request.pages = match.node, list(match.pages)


class Busy:
    """A node on which a prompt is computed that uses what is cached of it."""

    def __init__(self, computed: Request) -> None:
        self._computed = computed
        self._sharing = sharing(computed)

    def holder_of(self, asking: Request, cache: RadixCache) -> Request | None:
        use_cached(self._computed, cache)
        return self._sharing.holder_of(wait_at(cache, asking), cache)


def test_a_prompt_is_deferred_if_it_shares_enough_beyond_its_cached_part() -> None:
    busy = Busy(request(*range(20)))
    nothing, one_page, two_pages = (
        RadixCache(PageAllocator(9), PAGE_SIZE),
        cache_with(*range(4)),
        cache_with(*range(8)),
    )
    assert busy.holder_of(request(*range(8), 70, 71), nothing)
    assert not busy.holder_of(request(*range(7), 70, 71, 72), nothing)  # one page shared, not two
    assert not busy.holder_of(request(*range(8), 70, 71), one_page)  # only four tokens to gain
    assert busy.holder_of(request(*range(12), 70, 71), one_page)
    assert not busy.holder_of(request(*range(16), 70, 71), two_pages)  # enough is cached already


def test_a_prompt_waits_for_no_prefix_that_does_not_enter_the_cache() -> None:
    cache, computed = cache_with(*range(4)), request(*range(20))
    asking = wait_at(cache, request(*range(12), 70, 71))
    assert not adds_to_cache(cache, computed)
    assert sharing(computed).holder_of(asking, cache) is None, "the cache has a page that the other one does not use"
    use_cached(computed, cache)
    assert adds_to_cache(cache, computed)
    assert sharing(computed).holder_of(asking, cache) is computed


def test_nothing_is_shared_across_salts_or_without_a_cache() -> None:
    cache = RadixCache(PageAllocator(9), PAGE_SIZE)
    assert not sharing(request(*range(20), salt="red")).holder_of(
        wait_at(cache, request(*range(20), salt="blue")), cache
    )
    assert not sharing().holder_of(wait_at(cache, request(*range(20))), cache)
    off = RadixCache(PageAllocator(9), PAGE_SIZE, is_enabled=False)
    assert not sharing(request(*range(20))).holder_of(wait_at(off, request(*range(20))), off)


@settings(deadline=None)
@given(
    page_size=st.integers(1, 5),
    limits=st.builds(InBatchPrefixLimits, max_cached=st.integers(0, 12), min_shared=st.integers(1, 12)),
    num_cached=st.integers(0, 4),
    computing=st.lists(TOKENS, max_size=4),
    mine=TOKENS,
)
def test_the_holder_is_found_as_if_every_pair_were_compared(
    page_size: int, limits: InBatchPrefixLimits, num_cached: int, computing: list[list[int]], mine: list[int]
) -> None:
    """The reference compares token by token: whole shared pages minus the cached ones."""
    allocator = PageAllocator(100)
    cache = RadixCache(allocator, page_size)
    if pages := allocator.alloc(min(num_cached, len(mine) // page_size), Owner.REQUEST):
        cache.insert(mine[: len(pages) * page_size], pages)
    others = [request(*tokens) for tokens in computing]
    for other in others:
        use_cached(other, cache)
    asking = wait_at(cache, request(*mine, 7))
    found = cache.match(mine).num_tokens
    expected = None
    for other in others:
        pairs = zip(mine, other.prompt, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) // page_size * page_size
        if found <= limits.max_cached and shared - found >= limits.min_shared:
            expected = expected or other
    busy = InBatchPrefixes(page_size, limits, others)
    assert busy.holder_of(asking, cache) is expected


def test_limits_come_from_the_environment() -> None:
    assert prefix_limits_from_environ({}) == InBatchPrefixLimits(32, 32)
    name = "BATON_IN_BATCH_PREFIX_CACHING_{}_THRESHOLD"
    assert prefix_limits_from_environ(
        {name.format("CHECK"): "0", name.format("DEPRIORITIZE"): "64"}
    ) == InBatchPrefixLimits(0, 64)
    with pytest.raises(ConfigError, match="DEPRIORITIZE_THRESHOLD=0 must be a whole number of at least 1"):
        prefix_limits_from_environ({name.format("DEPRIORITIZE"): "0"})


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_of_one_prompt_compute_and_ship_it_once(policy: str) -> None:
    cluster = LocalCluster(chunk_tokens=64, policy=policy, latency=2)
    prompt = tuple(range(500, 700))
    for number in range(4):
        cluster.submit(f"r{number}", prompt, SamplingParams(max_new_tokens=6, temperature=0.0))
    cluster.run()
    for number in range(4):
        assert cluster.answers[f"r{number}"].output == expected_output(prompt, 6)
    cluster.settle()
    # 200 tokens are 12 whole pages of 16 and half a page, which each sample computes and ships for itself.
    assert cluster.counters(cluster.prefill[0])["prompt_tokens_computed"] == 200 + 3 * 8
    assert cluster.counters(cluster.prefill[0])["pages_sent"] == 13 + 3


def test_samples_of_one_local_prompt_compute_it_once() -> None:
    cluster = LocalCluster(chunk_tokens=64)
    prompt = tuple(range(500, 700))
    for number in range(4):
        cluster.submit(f"r{number}", prompt, SamplingParams(max_new_tokens=6, temperature=0.0), pair=(None, 0))
    cluster.run()
    assert {answer.output for answer in cluster.answers.values()} == {expected_output(prompt, 6)}
    assert cluster.counters(cluster.decode[0])["prompt_tokens_computed"] == 200 + 3 * 8


def test_a_prefix_is_awaited_only_from_a_request_that_does_not_come_later() -> None:
    order = RequestOrdering(FirstComeFirstServed(), PriorityRules(is_enabled=True))
    cache = RadixCache(PageAllocator(100), PAGE_SIZE)
    low, high, other, urgent = (wait_at(cache, request(*range(20), priority=priority)) for priority in (0, 5, 0, 9))
    for computing in ([low, high], [high, low]):
        busy = InBatchPrefixes(PAGE_SIZE, InBatchPrefixLimits(4, 8), computing, comes_first=order.comes_first)
        assert busy.holder_of(other, cache) is high
        assert busy.holder_of(urgent, cache) is None
