"""Orders of the waiting queue, and prompts that wait for a prefix that is just being computed."""

import pytest

from common.config import NodeConfig
from common.errors import ConfigError
from common.pages import Owner, PageBooks
from common.policy import _POLICIES, make_policy
from common.radix import RadixCache
from common.request import Request
from common.sampling import SamplingParams
from common.scheduling import POLICIES, POLICIES_NOT_YET, SchedulingOptions
from common.sharing import Sharing, SharingLimits
from tests.fake_engine import expected_output
from tests.local_cluster import LocalCluster

PAGE_SIZE = 4


def request(*prompt: int, rid: str = "r", salt: str = "") -> Request:
    return Request(rid, 0, prompt, SamplingParams(), salt=salt)


def cache_with(*tokens: int) -> RadixCache:
    books = PageBooks(100)
    cache = RadixCache(books, PAGE_SIZE)
    pages = books.alloc(len(tokens) // PAGE_SIZE, Owner.REQUEST)
    assert pages
    cache.insert(tokens, pages)
    return cache


def test_every_configured_policy_exists_and_no_other() -> None:
    assert tuple(_POLICIES) == POLICIES


def test_first_come_first_served_is_the_order_of_the_queue() -> None:
    waiting = [request(3), request(2), request(1)]
    assert list(make_policy("fcfs", cache_with(*range(4))).order(waiting, 0.0)) == waiting


def test_longest_prefix_match_puts_the_most_cached_first_and_equals_by_arrival() -> None:
    cache = cache_with(*range(12))
    nothing, four, eight = request(50, 51, 52), request(0, 1, 2, 3, 50), request(*range(8), 50)
    other_four = request(0, 1, 2, 3, 60)
    waiting = [nothing, four, eight, other_four]
    assert list(make_policy("lpm", cache).order(waiting, 0.0)) == [eight, four, other_four, nothing]


def test_longest_prefix_match_gives_up_on_long_queues() -> None:
    cache = cache_with(*range(4))
    waiting = [request(9), request(8), request(0, 1, 2, 3, 4)]
    assert (
        list(make_policy("lpm", cache, options=SchedulingOptions(lpm_degrade_threshold=2)).order(waiting, 0.0))
        == waiting
    )
    assert (
        next(iter(make_policy("lpm", cache, options=SchedulingOptions(lpm_degrade_threshold=3)).order(waiting, 0.0)))
        is waiting[2]
    )


def test_without_a_radix_cache_lpm_is_fcfs() -> None:
    cache = RadixCache(PageBooks(8), PAGE_SIZE, is_enabled=False)
    waiting = [request(2), request(1)]
    assert list(make_policy("lpm", cache).order(waiting, 0.0)) == waiting


@pytest.mark.parametrize("name", [*POLICIES_NOT_YET, "best"])
def test_a_policy_that_does_not_work_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--schedule-policy {name} is"):
        NodeConfig(schedule_policy=name)


def sharing(*computing: Request) -> Sharing:
    return Sharing(PAGE_SIZE, SharingLimits(max_cached=4, min_shared=8), computing)


def test_a_prompt_is_held_back_if_what_it_shares_beyond_its_cached_part_is_worth_it() -> None:
    busy = sharing(request(*range(20)))
    nothing, one_page, two_pages = (RadixCache(PageBooks(9), PAGE_SIZE), cache_with(*range(4)), cache_with(*range(8)))
    assert busy.waits_for(request(*range(8), 70, 71), nothing)
    assert not busy.waits_for(request(*range(7), 70, 71, 72), nothing)  # one page shared, not two
    assert not busy.waits_for(request(*range(8), 70, 71), one_page)  # only four tokens to gain
    assert busy.waits_for(request(*range(12), 70, 71), one_page)
    assert not busy.waits_for(request(*range(16), 70, 71), two_pages)  # enough is cached already


def test_a_prompt_shares_nothing_across_salts_nor_with_nobody_nor_without_a_cache() -> None:
    cache = RadixCache(PageBooks(9), PAGE_SIZE)
    assert not sharing(request(*range(20), salt="red")).waits_for(request(*range(20), salt="blue"), cache)
    assert not sharing().waits_for(request(*range(20)), cache)
    off = RadixCache(PageBooks(9), PAGE_SIZE, is_enabled=False)
    assert not sharing(request(*range(20))).waits_for(request(*range(20)), off)


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


def test_samples_of_one_prompt_that_a_decode_node_computes_by_itself_compute_it_once() -> None:
    cluster = LocalCluster(chunk_tokens=64)
    prompt = tuple(range(500, 700))
    for number in range(4):
        cluster.submit(f"r{number}", prompt, SamplingParams(max_new_tokens=6, temperature=0.0), pair=(None, 0))
    cluster.run()
    assert {answer.output for answer in cluster.answers.values()} == {expected_output(prompt, 6)}
    assert cluster.counters(cluster.decode[0])["prompt_tokens_computed"] == 200 + 3 * 8


def test_tokens_may_travel_several_to_a_message() -> None:
    for interval, num_messages in ((1, 10), (4, 4), (100, 2)):
        cluster = LocalCluster(stream_interval=interval)
        answer = cluster.submit("a", (1, 2, 3), SamplingParams(max_new_tokens=10, temperature=0.0))
        cluster.run()
        assert answer.output == expected_output((1, 2, 3), 10)
        assert answer.num_messages == num_messages  # the first token alone, then 9 by fours: 4, 4, 1
