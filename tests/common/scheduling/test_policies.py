"""Scheduling policies: the order of the waiting queue, and options that are refused."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling.waiting_requests import PAGE_SIZE, TOKENS, cache_with, insert, request, rids

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.scheduling import POLICIES, PriorityRules, SchedulingOptions
from common.errors import ConfigError
from common.node.request_messages import request_to_prefill
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import FirstComeFirstServed
from common.scheduling.policies.factory import _POLICIES, NEED_CACHE, make_ordering, make_policy
from common.scheduling.waiting_queue import WaitingQueue
from common.wire.messages import RESUMED, Generate, Resume


def queue_of(name: str, cache: RadixCache | None, *requests: Request, **options: Any) -> WaitingQueue:
    queue = WaitingQueue(make_ordering(SchedulingOptions(schedule_policy=name, **options), cache), cache)
    for number, each in enumerate(requests):
        each.rid, each.key = f"{number}", (f"{number}", 0)
        queue[each.key] = each
    return queue


def places(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    """The arrival number of each request, in the order of service."""
    return [int(rid) for rid in rids(queue, now)]


def test_every_configured_policy_exists_and_no_other() -> None:
    assert tuple(_POLICIES) == POLICIES
    assert set(NEED_CACHE) < set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_knows_its_name(name: str) -> None:
    assert make_policy(name, cache_with(*range(4))).name == name


def test_first_come_first_served_is_the_order_of_the_queue() -> None:
    queue = queue_of("fcfs", cache_with(*range(4)), request(3), request(2), request(1))
    assert places(queue) == [0, 1, 2]
    queue.put_first(request(0, rid="9"))
    assert places(queue) == [9, 0, 1, 2]


def test_longest_output_first_orders_by_allowed_output() -> None:
    assert places(queue_of("lof", None, request(1, max_new=5), request(1, max_new=9), request(1, max_new=5))) == [
        1,
        0,
        2,
    ]


@pytest.mark.parametrize(
    "message",
    [
        Resume("r", RESUMED, (1, 2, 3), timeout_s=9.0),
        Generate("r", 1, (1, 2), SamplingParams(), None, None, timeout_s=9.0, output=(3, 4)),
    ],
)
@pytest.mark.parametrize("policy", ["lof", "short-first"])
def test_tokens_that_are_only_computed_again_do_not_wait_for_every_new_prompt(
    message: Resume | Generate, policy: str
) -> None:
    """Their output has begun, and on this node they cost no more than a prompt."""
    assert places(queue_of(policy, None, request(3, max_new=999), request_to_prefill(message, 0.0))) == [1, 0]


def test_random_gives_a_new_order_each_time_and_repeats_with_its_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        queue = queue_of("random", None, *[request(1) for _ in range(20)], schedule_seed=seed)
        return [places(queue) for _ in range(5)]

    assert orders(7) == orders(7)
    assert len({tuple(order) for order in orders(7) + orders(8)}) == 10
    assert all(sorted(order) == list(range(20)) for order in orders(7))


def test_random_gives_every_place_to_each_request_equally_often() -> None:
    queue = queue_of("random", None, *[request(1) for _ in range(4)])
    firsts = Counter(places(queue)[0] for _ in range(2_000))
    assert all(400 < firsts[number] < 600 for number in range(4)), firsts


def test_longest_prefix_match_puts_the_most_cached_first_and_equals_by_arrival() -> None:
    queue = queue_of(
        "lpm",
        cache_with(*range(12)),
        request(50, 51, 52),
        request(0, 1, 2, 3, 50),
        request(*range(8), 50),
        request(0, 1, 2, 3, 60),
    )
    assert places(queue) == [2, 1, 3, 0]


def test_longest_prefix_match_puts_requests_last_that_share_an_uncached_prefix() -> None:
    shared = range(100, 140)
    queue = queue_of(
        "lpm",
        cache_with(*range(12)),
        request(*shared, 1),  # computes what the others share
        request(*shared, 2),
        request(*shared, 3),
        request(*range(4), 9),  # little of it is cached, and no other request computes it
        request(50, 51),
    )
    assert places(queue) == [3, 0, 4, 1, 2]


def test_longest_prefix_match_never_defers_a_request_with_enough_cached_tokens() -> None:
    cache = cache_with(*range(40))
    assert places(queue_of("lpm", cache, request(*range(80), 1), request(*range(80), 2), request(7))) == [0, 1, 2]


def test_longest_prefix_match_orders_queues_of_any_length() -> None:
    waiting = [*(request(9) for _ in range(200)), request(0, 1, 2, 3, 4)]
    assert places(queue_of("lpm", cache_with(*range(4)), *waiting))[:2] == [200, 0]


@pytest.mark.parametrize("name", NEED_CACHE)
def test_without_a_radix_cache_policies_over_it_are_fcfs(name: str) -> None:
    off = RadixCache(PageAllocator(8), PAGE_SIZE, is_enabled=False)
    for cache in (off, None):
        assert make_policy(name, cache).name == "fcfs"


def test_depth_first_serves_the_heaviest_branch_and_a_node_after_its_children() -> None:
    """The documented example: four wait at C and two at D, both under A; two each at F and G, under E under B."""
    a, b, c, d, e, f, g = ([letter] * PAGE_SIZE for letter in range(7))
    cache = cache_with(*a, *c)
    for prefix in ([*a, *d], [*b, *e, *f], [*b, *e, *g]):
        insert(cache, *prefix)
    ends = [[*b, *e, *g], [*a, *d], [*a, *c], [*b, *e, *f], [*a, *c], [*a, *c], [*a, *d], [*b, *e, *g], [*a, *c]]
    queue = queue_of("dfs-weight", cache, *[request(*end, 99) for end in [*ends, [*b, *e, *f]]])
    # C's four, D's two, then G's two before F's two: of equal weights the one that came first.
    assert places(queue) == [2, 4, 5, 8, 1, 6, 0, 7, 3, 9]
    in_order = [[*b, *e, *f], [*a, *d], [*a, *c], [*b, *e, *g], [*a, *c], [*a, *c], [*a, *d], [*b, *e, *f], [*a, *c]]
    queue = queue_of("dfs-weight", cache, *[request(*end, 99) for end in [*in_order, [*b, *e, *g]]])
    assert places(queue) == [2, 4, 5, 8, 1, 6, 0, 7, 3, 9]  # C, C, C, C, D, D, F, F, G, G


def test_depth_first_puts_uncached_requests_last() -> None:
    cache = cache_with(*range(8))
    insert(cache, *range(4), salt="red")
    queue = queue_of(
        "dfs-weight",
        cache,
        request(90),
        request(*range(4), 90),
        request(*range(4), 90, salt="red"),
        request(*range(8), 90),
        request(91, salt="red"),
    )
    assert places(queue) == [3, 1, 2, 0, 4]


def test_short_first_counts_uncached_and_expected_tokens() -> None:
    queue = queue_of(
        "short-first",
        cache_with(*range(40)),
        request(*range(40, 70), max_new=10),  # 30 + 0.7 * 10
        request(*range(40), *range(90, 96), max_new=40),  # 6 + 0.7 * 40
        request(*range(40, 70), max_new=1_000, expected_output=5),  # 30 + 5
        request(1, max_new=100_000),  # 1 + 0.7 * 4,096
    )
    assert places(queue) == [1, 2, 0, 3]


def test_highest_response_ratio_serves_long_requests_in_the_end() -> None:
    long, short = request(*range(100), arrived_at=0.0), request(*range(10), arrived_at=8.0)
    queue = queue_of("hrrn", None, long, short)
    assert places(queue, now=8.5) == [0, 1]  # 8.5 / 100 against 0.5 / 10
    assert places(queue, now=9.0) == [1, 0]  # 9 / 100 against 1 / 10
    cached = queue_of("hrrn", cache_with(*range(96)), request(7, 8, 9, arrived_at=0.0), request(*range(97)))
    assert places(cached, now=1.0) == [1, 0]  # one token to compute against three


def test_the_earliest_deadline_comes_first_and_missed_ones_last() -> None:
    queue = queue_of("edf", None, *[request(1, deadline_at=at) for at in (9.0, 3.0, 5.0, 4.0)])
    assert places(queue, now=2.0) == [1, 3, 2, 0]
    assert places(queue, now=4.0) == [2, 0, 1, 3]


def test_objectives_bring_a_request_forward_until_its_first_token_and_between_tokens() -> None:
    soon = request(1, arrived_at=2.0, slo_ttft_s=1.0, slo_itl_s=0.5)
    assert (request(1, deadline_at=9.0).due_at, soon.due_at) == (9.0, 3.0)
    soon.output.append(7)
    soon.last_token_at = 4.0
    assert soon.due_at == 4.5
    queue = queue_of("edf", None, request(1, deadline_at=3.5), request(1, arrived_at=2.0, slo_ttft_s=1.0))
    assert places(queue, now=2.0) == [1, 0]
    assert places(queue, now=3.2) == [0, 1]


def test_a_retracted_request_that_is_late_with_its_next_token_comes_first() -> None:
    retracted = request(1, deadline_at=60.0, slo_itl_s=0.5, output=[7], last_token_at=4.0)
    queue = queue_of("edf", None, request(2, deadline_at=20.0), retracted)
    assert places(queue, now=4.2) == places(queue, now=9.0) == [1, 0]


def test_only_the_earliest_deadline_overtakes_begun_requests() -> None:
    begun, waiting = request(1, deadline_at=9.0), request(2, deadline_at=3.0)
    for name in POLICIES:
        order = make_ordering(SchedulingOptions(schedule_policy=name))
        expected = [waiting, begun] if name == "edf" else [begun, waiting]
        assert list(order.merge([begun], [waiting], 0.0)) == expected, name


def test_priority_decides_before_the_policy() -> None:
    mixed = [request(*range(length), priority=priority) for length, priority in ((30, 0), (10, 0), (20, 5), (1, 5))]
    queue = queue_of("short-first", None, *mixed, enable_priority_scheduling=True)
    assert places(queue) == [3, 2, 1, 0]


@settings(deadline=None)
@given(
    rate=st.sampled_from([0.0, 0.5, 3.0]),
    requests=st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 20)), max_size=8),
)
def test_with_priorities_the_highest_effective_priority_comes_first(
    rate: float, requests: list[tuple[int, int]]
) -> None:
    rules = PriorityRules(is_enabled=True, aging_per_s=rate)
    order = RequestOrdering(FirstComeFirstServed(), rules)
    waiting = [request(1, priority=priority, arrived_at=float(at)) for priority, at in requests]
    assert list(order.sort(waiting, 30.0)) == sorted(waiting, key=order.effective_priority, reverse=True)


@pytest.mark.parametrize("name", ["best", "my_policies", "a.b:", ":C", "a b:C", "a:C:D"])
def test_an_unknown_policy_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--schedule-policy {name} is unknown"):
        NodeConfig(schedule_policy=name)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"schedule_seed": 5}, "--schedule-seed has no effect without --schedule-policy random"),
        (
            {"priority_scheduling_preemption_threshold": 3},
            "--priority-scheduling-preemption-threshold has no effect without --enable-priority-scheduling",
        ),
        ({"priority_function": "a:b"}, "--priority-function has no effect without --enable-priority-scheduling"),
        ({"priority_function": "ab"}, "--priority-function must be MODULE:NAME, not 'ab'"),
        ({"max_preemptions": 2}, "--max-preemptions has no effect without --enable-priority-scheduling"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], complaint: str) -> None:
    for cls in (GatewayConfig, NodeConfig):
        with pytest.raises(ConfigError, match=complaint):
            cls(**options)


@settings(deadline=None)
@given(
    name=st.sampled_from(POLICIES),
    cached=st.lists(TOKENS, max_size=4),
    prompts=st.lists(st.tuples(TOKENS, st.integers(0, 3), st.integers(1, 9), st.sampled_from("ab")), max_size=12),
    events=st.lists(st.tuples(st.sampled_from(["insert", "evict"]), TOKENS), max_size=6),
)
def test_no_policy_loses_or_invents_a_request_and_watches_are_as_fresh_matches(
    name: str,
    cached: list[list[int]],
    prompts: list[tuple[list[int], int, int, str]],
    events: list[tuple[str, list[int]]],
) -> None:
    cache = RadixCache(PageAllocator(200), PAGE_SIZE)
    for tokens in cached:
        whole = [token for token in tokens for _ in range(PAGE_SIZE)]
        insert(cache, *whole)
    requests = [
        request(*[token for token in tokens for _ in range(PAGE_SIZE)], 5, deadline_at=at, max_new=most, tenant=tenant)
        for tokens, at, most, tenant in prompts
    ]
    queue = queue_of(name, cache, *requests)
    for event, tokens in [*events, ("evict", [0])]:
        if event == "insert":
            insert(cache, *[token for token in tokens for _ in range(PAGE_SIZE)])
        else:
            cache.evict(len(tokens))
        assert sorted(places(queue, now=1.0)) == list(range(len(requests)))
        for each in requests:
            assert each.watch is not None
            fresh = cache.match(each.tokens(0, each.num_cacheable), each.salt).num_tokens
            assert each.watch.num_tokens == fresh
            assert each.num_uncached == each.num_tokens - fresh
        cache.check()
    for each in requests:
        del queue[each.key]
        assert each.watch is None
    cache.clear()
    assert not cache._roots


@settings(deadline=None)
@given(prompts=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 9)), max_size=10))
def test_lpm_and_short_first_order_as_a_fresh_match_would(prompts: list[tuple[list[int], int]]) -> None:
    cache = cache_with(*[0] * 8, *[1] * 8)
    insert(cache, *[1] * 8, *[2] * 12)
    requests = [request(*[token for token in tokens for _ in range(4)], 9, max_new=most) for tokens, most in prompts]
    cached = [cache.match(each.prompt[:-1]).num_tokens for each in requests]
    work = [
        len(each.prompt) - found + 0.7 * most for each, found, (_, most) in zip(requests, cached, prompts, strict=True)
    ]
    queue = queue_of("short-first", cache, *requests)
    assert places(queue) == sorted(range(len(requests)), key=lambda number: work[number])
    queue = queue_of("lpm", cache, *requests)
    assert places(queue) == sorted(range(len(requests)), key=lambda number: -cached[number])
