"""A decode node plans a second step before it commits the first."""

import pytest
from support.scheduling.single_nodes import DecodeNode, result_of

from common.config.scheduling import PriorityRules
from common.request import Request
from common.step_plan import StepPlan, StepResult
from decode_node.request_state import State
from decode_node.scheduler import Sampled, Stopped


def plan_of(node: DecodeNode) -> StepPlan:
    plan = node.scheduler.plan(node.now)
    node.take_grants()
    node.check()
    assert plan is not None
    return plan


def commit(node: DecodeNode, plan: StepPlan, *, token: int = 7) -> list[tuple[str, int]]:
    """Requests that got a token in this step, with the token."""
    result = StepResult(plan.step, tuple(token for row in plan.rows if row.sample))
    effects = node.scheduler.commit(result)
    node.check()
    return [(effect.request.rid, effect.token) for effect in effects if isinstance(effect, Sampled)]


def ready(node: DecodeNode, rid: str, length: int, priority: int = 0, *, new: int = 9) -> Request:
    """Add a request whose prompt has arrived."""
    request = node.submit(rid, length, priority, new=new)
    assert node.grant() == [rid]
    node.receive(rid)
    return request


def test_the_second_plan_continues_after_the_first() -> None:
    node = DecodeNode()
    request = ready(node, "a", 6)
    first, second = plan_of(node), plan_of(node)
    assert [(row.start, row.tokens) for plan in (first, second) for row in plan.rows] == [(6, None), (7, None)]
    assert (request.num_computed, request.num_scheduled, request.num_sampling) == (6, 8, 2)
    assert commit(node, first, token=1) == [("a", 1)]
    assert commit(node, second, token=2) == [("a", 2)]
    assert request.output == [7, 1, 2]
    assert (request.num_computed, request.num_scheduled, request.num_sampling) == (8, 8, 0)


def test_a_page_is_allocated_for_a_token_that_an_outstanding_step_samples() -> None:
    node = DecodeNode()
    request = ready(node, "a", 7)
    assert [delta.pages for delta in plan_of(node).pages] == [tuple(request.pages)]
    [delta] = plan_of(node).pages
    assert (delta.first, delta.pages) == (2, (request.pages[2],))


def test_every_row_is_in_every_step_while_pages_can_be_evicted() -> None:
    node = DecodeNode(num_pages=20)
    node.run_in("old", 40, new=2)
    node.step()
    ready(node, "a", 21, new=20)
    ready(node, "b", 13, new=20)
    assert (node.cache.num_evictable_pages, node.allocator.num_free) == (10, 0)
    plans = [plan_of(node), plan_of(node)]
    for _ in range(14):  # in which each request enters four pages
        assert len(plans[-1].rows) == 2
        commit(node, plans.pop(0))
        plans.append(plan_of(node))
    assert node.cache.num_pages == 10 + 5 + 3 - 8, "more of the cache was evicted than the requests needed"


def test_no_token_beyond_the_longest_output_is_scheduled() -> None:
    node = DecodeNode()
    ready(node, "a", 6, new=3)  # the first token came with the prompt
    first, second = plan_of(node), plan_of(node)
    assert node.scheduler.plan(node.now) is None
    commit(node, first)
    assert commit(node, second) == [("a", 7)]
    assert not node.scheduler.requests


def test_a_row_planned_after_the_last_token_of_its_request_is_ignored() -> None:
    node = DecodeNode()
    node.scheduler._eos = frozenset({2})
    ready(node, "a", 6)
    first, second = plan_of(node), plan_of(node)
    assert commit(node, first, token=2) == [("a", 2)]
    assert commit(node, second) == []
    assert node.allocator.num_free + node.cache.num_pages == node.allocator.num_pages


def test_a_late_result_of_an_aborted_request_never_reaches_the_next_request_in_its_slot() -> None:
    node = DecodeNode(slots=1)
    gone = ready(node, "gone", 6)
    slot = (first := plan_of(node)).rows[0].slot
    node.scheduler.abort(gone.key)
    other = ready(node, "other", 6)
    second = plan_of(node)
    assert second.rows[0].slot == slot
    assert commit(node, first, token=1) == []
    assert commit(node, second, token=2) == [("other", 2)]
    assert (gone.output, other.output) == ([7], [7, 2])


def test_a_late_result_of_a_retracted_request_is_dropped_after_its_readmission() -> None:
    node = DecodeNode()
    request = ready(node, "a", 6)
    first = plan_of(node)
    node.scheduler._preemptor.retract(request, node.now, "for the test")
    second = plan_of(node)
    assert node.state("a") is State.EXTENDING
    assert second.rows[0].tokens is not None
    assert commit(node, first, token=1) == []
    assert request.output == [7]
    assert commit(node, second, token=2) == [("a", 2)]
    assert request.output == [7, 2]


def test_a_late_result_of_a_paused_request_is_dropped_after_it_resumes() -> None:
    node = DecodeNode(slots=1)
    low = ready(node, "low", 6)
    first = plan_of(node)
    urgent = ready(node, "urgent", 6, 9)
    second = plan_of(node)
    assert node.state("low") is State.PAUSED
    node.scheduler.abort(urgent.key)
    third = plan_of(node)
    assert [(row.slot, row.start) for row in third.rows] == [(low.slot, 6)]
    assert [admit.last_token for admit in third.admits] == [7]
    assert commit(node, first, token=1) == commit(node, second, token=2) == []
    assert commit(node, third, token=3) == [("low", 3)]
    assert low.output == [7, 3]


def test_the_pages_of_one_retracted_request_serve_the_next_step_at_once() -> None:
    node = DecodeNode(num_pages=6, rules=PriorityRules())
    for rid in ("a", "b", "c"):
        ready(node, rid, 7).expected_output = 1  # two pages each, both full after one more token
    first, second = plan_of(node), plan_of(node)
    assert len(node.table.retracted) == 1, "more requests were retracted than necessary"
    assert len(commit(node, first)) == len(second.rows) == len(commit(node, second)) == 2


def test_no_more_of_the_cache_is_evicted_for_waiting_requests_than_they_need_while_a_step_runs() -> None:
    node = DecodeNode(num_pages=20)
    node.run_in("old", 40, new=2)
    node.step()
    ready(node, "running", 39)
    assert (node.cache.num_pages, node.allocator.num_free) == (10 + 9, 0)
    plan = plan_of(node)
    for rid in ("a", "b"):
        node.submit(rid, 8)
    for _ in range(5):  # after each event, such as a message
        assert node.grant() == []
    assert (node.cache.num_pages, node.allocator.num_lingering) == (10 + 9 - 4, 4)
    commit(node, plan)
    assert node.grant() == ["a", "b"]


def test_pages_evicted_during_a_step_of_a_local_prompt_are_granted_at_its_end() -> None:
    node = DecodeNode(num_pages=24, rules=PriorityRules())
    node.submit("old", 40, new=1, is_local=True)
    node.run()
    node.submit("long", 40, is_local=True)
    plan = plan_of(node)
    node.submit("waiting", 24)  # six pages
    assert node.grant() == []
    assert (node.allocator.num_free, node.allocator.num_lingering) == (4, 2)
    assert commit(node, plan) == []
    assert node.grant() == ["waiting"]


def test_a_prompt_is_granted_its_pages_as_soon_as_a_local_one_has_cached_enough_of_it() -> None:
    node = DecodeNode(num_pages=15, rules=PriorityRules())
    node.submit("long", 40, is_local=True, first=0)
    plan = plan_of(node)
    node.submit("waiting", 24, first=0)  # six pages; there are five
    assert node.grant() == []
    assert commit(node, plan) == []
    assert node.cache.num_pages == 2
    assert node.grant() == ["waiting"]


def test_steps_are_committed_in_the_order_of_their_plans() -> None:
    node = DecodeNode()
    ready(node, "a", 6)
    plan_of(node)
    second = plan_of(node)
    with pytest.raises(AssertionError, match="step 2 is committed before step 1"):
        node.scheduler.commit(result_of(second))


def test_a_request_moves_only_when_no_outstanding_step_writes_to_its_pages() -> None:
    """It was paused after the step was planned, so that its result is ignored; but the step still writes its KV."""
    node = DecodeNode()
    request = ready(node, "a", 6)
    first = plan_of(node)
    node.scheduler.set_paused(request.key, is_paused=True)
    assert node.scheduler.plan(node.now) is None
    assert node.state("a") is State.PAUSED
    node.scheduler.stop_decoding(request.key)
    assert node.scheduler.take_effects() == []
    result = StepResult(first.step, (7,))
    assert node.scheduler.commit(result) == [Stopped(request, has_pages=True)]
    assert node.state("a") is State.MOVING
