"""Window pages where requests are paused, retracted, or wait for one another on a decode node."""

from dataclasses import replace

import pytest
from support.cluster.fake_engine import both_groups, expected_of_both
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released, prompt_of, sampling
from support.cluster.watched_allocator import WatchedAllocator, WatchedWindowPages

from common.cache.kv_window import KVWindow
from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.request import Request
from common.scheduling.in_batch_prefix_caching import InBatchPrefixLimits
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.simulator.service.inprocess_transport import Fault, Wire

#: 8 pages, each with 4 tokens, and 3 window pages for a window of 5 tokens.
NUM_PAGES, PAGE_SIZE = 8, 4
STRICT = PriorityRules(is_enabled=True, preemption_threshold=0)


def watched_step() -> tuple[WatchedAllocator, WatchedWindowPages, Request, StepPlan]:
    """A step in flight that computes 8 tokens of a request on two pages."""
    windows = WatchedWindowPages(both_groups(5), NUM_PAGES, 3, page_size=PAGE_SIZE, chunk_tokens=8)
    allocator = WatchedAllocator(NUM_PAGES, PAGE_SIZE, windows)
    request = Request("r", 0, tuple(range(8)), sampling(1), slot=0)
    request.own = allocator.alloc(2, Owner.REQUEST) or []
    request.pages = list(request.own)
    windows.admit(request, 0, 3)
    windows.advance(request, 0, 8)
    plan = StepPlan(
        1,
        (Admit(0, sampling(1), 8, None),),
        (PageDelta(0, 0, tuple(request.pages)),),
        (Row(0, 0, tuple(range(8)), True),),
        windows.deltas([request], []),
    )
    return allocator, windows, request, plan


def test_the_watch_notices_a_row_with_window_pages_of_other_tokens() -> None:
    allocator, _, _, plan = watched_step()
    (delta,) = plan.windows
    with pytest.raises(AssertionError, match="a row of step 1 has window pages of other tokens"):
        allocator.planned(replace(plan, windows=(delta._replace(pages=delta.pages[::-1]),)))
    allocator, _, _, plan = watched_step()
    allocator.planned(plan)


def test_the_watch_notices_a_window_page_that_a_peer_gets_too_soon() -> None:
    allocator, windows, request, plan = watched_step()
    allocator.planned(plan)
    windows.release(request)
    other = Request("other", 0, tuple(range(50, 65)), sampling(1))
    assert windows.reserve_grant(other, [], 15, last_step=0), "as if no step were in flight"
    other.pages = allocator.alloc(4, Owner.GRANT) or []
    with pytest.raises(AssertionError, match="as window page of a grant while step 1 still uses it"):
        windows.take_grant(other)


def test_the_watch_notices_two_rows_that_use_a_page_that_one_of_them_writes() -> None:
    allocator, _, _, plan = watched_step()
    admits, (delta,) = (*plan.admits, plan.admits[0]._replace(slot=1)), plan.pages
    rows = (*plan.rows, plan.rows[0]._replace(slot=1))
    with pytest.raises(AssertionError, match="two rows of step 1 use a page that one writes"):
        allocator.planned(replace(plan, admits=admits, pages=(delta, delta._replace(slot=1)), rows=rows))


@pytest.mark.parametrize(("page_size", "window"), [(4, 5), (4, 9), (4, 8), (1, 6)])
def test_a_request_that_is_paused_as_it_enters_a_page_keeps_its_window(page_size: int, window: int) -> None:
    """What is scheduled and not computed is computed again after the pause, one token earlier."""
    for num_before in range(1, 2 * max(page_size, 2) + 2):
        cluster = LocalCluster(
            page_size=page_size,
            chunk_tokens=8,
            window=window,
            window_pages=(60, 60),
            max_running=1,
            num_outstanding=2,
            limits={"is_mixed": True},
            rules=STRICT,
        )
        paused = cluster.submit("paused", prompt_of(21), sampling(20))
        cluster.run_until("paused", num_before)
        urgent = cluster.submit("urgent", prompt_of(9, 1), sampling(3), pair=(None, 0), priority=9)
        cluster.run(400)
        assert paused.output == expected_of_both(prompt_of(21), 20, window), num_before
        assert urgent.output == expected_of_both(prompt_of(9, 1), 3, window), num_before
        cluster.settle()
        assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("num_extra", [0, 1, 2, 6])
def test_a_request_retracted_for_a_local_prompt_leaves_its_window_pages_to_it(num_extra: int) -> None:
    of_one = KVWindow(2, 8, 9).max_span(9)
    cluster = LocalCluster(
        page_size=2,
        chunk_tokens=8,
        window=8,
        window_pages=(40, of_one + num_extra),
        resume_tokens=0,
        reserved_tokens=0,
        rules=STRICT,
    )
    weak = cluster.submit("weak", prompt_of(20), sampling(12))
    cluster.run_until("weak", 2)
    urgent = cluster.submit("urgent", prompt_of(37, 1), sampling(10), pair=(None, 0), priority=9)
    cluster.run(200)
    assert weak.output == expected_of_both(prompt_of(20), 12, 8)
    assert urgent.output == expected_of_both(prompt_of(37, 1), 10, 8)
    assert cluster.counters(cluster.decode[0])["retractions"] <= 1


def test_a_prompt_computed_here_gives_its_chunk_back_when_it_is_computed() -> None:
    of_one = KVWindow(2, 8, 33).max_span(33)
    cluster = LocalCluster(page_size=2, chunk_tokens=32, window=8, window_pages=(60, of_one + 4))
    local = cluster.submit("local", prompt_of(60), sampling(100), pair=(None, 0))
    cluster.run_until("local", 2)
    window_pages = cluster.decode[0].allocator.window_pages
    assert window_pages is not None
    assert window_pages.num_reserved == KVWindow(2, 8).max_span(3) < of_one
    other = cluster.submit("other", prompt_of(20, 1), sampling(4))
    for _ in range(30):
        cluster.step()
    assert other.is_over
    assert not local.is_over


def test_a_request_waits_only_for_a_prefix_in_transfer_that_it_can_use() -> None:
    """Window pages come for the last tokens of a prompt only, here from page 13 on."""
    cluster = LocalCluster(page_size=4, window=9, window_pages=(60, 60), wire=Wire(latency=40))
    long = prompt_of(60)
    prompts = {
        "long": long,
        "same": long,
        "beginning": (*long[:24], *prompt_of(10, 50)),  # its own window begins where the common part ends
        "within the window": (*long[:8], *prompt_of(2, 50)),
    }
    for rid, prompt in prompts.items():
        cluster.submit(rid, prompt, sampling(5))
    cluster.settle(5)
    scheduler = cluster.decode[0].role._scheduler
    assert [rid for rid in prompts if scheduler.is_receiving((rid, 0))] == ["long", "within the window"]
    cluster.run(400)
    for rid, prompt in prompts.items():
        assert cluster.answers[rid].output == expected_of_both(prompt, 5, 9)
    cluster.settle()
    assert_all_pages_are_released(cluster)
    num_received = {"long": 15 + 2, "same": 0, "beginning": 3 + 3, "within the window": 3 + 3}
    assert cluster.counters(cluster.decode[0])["pages_received"] == sum(num_received.values())


def test_a_common_beginning_is_sent_once_though_its_window_pages_are_gone() -> None:
    cluster = LocalCluster(page_size=4, chunk_tokens=8, window=9, window_pages=(60, 6))
    beginning = prompt_of(40)
    for number in range(3):
        prompt = (*beginning, *prompt_of(20, 50 + number))
        answer = cluster.submit(f"r{number}", prompt, sampling(5))
        cluster.run(400)
        assert answer.output == expected_of_both(prompt, 5, 9)
        num_received = cluster.counters(cluster.decode[0])["pages_received"]
        assert num_received == (15 + 2) + number * (5 + 2)
    cluster.settle()
    assert_all_pages_are_released(cluster)


#: 23 full pages come alone, and two with their window pages.
@pytest.mark.parametrize("num_arrived", [0, 1, 12, 22, 23, 25])
def test_a_transfer_that_goes_on_at_another_prefill_node_sends_what_has_not_arrived(num_arrived: int) -> None:
    wire = Wire(latency=1, faults={num_arrived: Fault("partition", 10_000)})
    cluster = LocalCluster(num_prefill=2, page_size=4, chunk_tokens=4, window=9, window_pages=(60, 12), wire=wire)
    [first, second], [decode] = cluster.prefill, cluster.decode
    answer = cluster.submit("r", prompt_of(100), sampling(20))
    cluster.settle(30)
    assert cluster.counters(decode)["pages_received"] == num_arrived
    cluster.kill(first)
    answer.error = None
    cluster.continue_request("r", pair=(1, 0))
    cluster.run(1_000)
    assert answer.output == expected_of_both(prompt_of(100), 20, 9)
    assert cluster.counters(second)["pages_sent"] == 25 + 2 - num_arrived
    cluster.settle()
    assert_all_pages_are_released(cluster)


@pytest.mark.parametrize("pair", [(0, 0), (None, 0)])
def test_a_prompt_waits_for_no_other_one_that_the_cache_does_not_take(pair: tuple[int | None, int]) -> None:
    """The cache has the beginning of the prompts without window pages, and so takes nothing of them meanwhile."""
    cluster = LocalCluster(
        page_size=4,
        chunk_tokens=8,
        window=9,
        window_pages=(12, 12),
        limits={"sharing": InBatchPrefixLimits(max_cached=32, min_shared=8)},
    )
    beginning = prompt_of(16)
    for number, prompt in enumerate([beginning, *(prompt_of(12, 40 + first) for first in range(5))]):
        cluster.submit(f"before {number}", prompt, sampling(2), pair=pair)
        cluster.run(200)
    node = (cluster.decode if pair[0] is None else cluster.prefill)[0]
    cache = node.role._cache
    prompt = (*beginning, *prompt_of(60, 70))
    assert len(cache.match_all(prompt).pages) == 4 > len(cache.match(prompt).pages)
    for rid in ("first", "second"):
        cluster.submit(rid, prompt, sampling(2), pair=pair)
    for _ in range(3):
        cluster.step()
    scheduler = node.role._scheduler
    assert scheduler.requests["first", 0].num_computed > 16
    sharing = scheduler._queue.sharing() if pair[0] is None else scheduler._sharing()
    assert sharing.holder_of(scheduler.requests["second", 0], cache) is None
    cluster.run(400)
    for rid in ("first", "second"):
        assert cluster.answers[rid].output == expected_of_both(prompt, 2, 9)
    cluster.settle()
    assert_all_pages_are_released(cluster)
