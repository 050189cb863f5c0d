"""A prefill node plans a second step before it commits the first."""

import pytest
from support.scheduling.single_nodes import PrefillNode, result_of

from common.step_plan import StepPlan
from prefill_node.request_state import State
from prefill_node.scheduler import Computed, Retracted


def plan_of(node: PrefillNode) -> StepPlan:
    plan = node.scheduler.plan(node.now)
    node.scheduler.check()
    assert plan is not None
    return plan


def commit(node: PrefillNode, plan: StepPlan) -> list[tuple[str, int, bool]]:
    """For each committed chunk: its request, its tokens, and whether it was the last."""
    effects = node.scheduler.commit(result_of(plan))
    node.scheduler.check()
    node.allocator.check()
    node.cache.check()
    return [(e.request.rid, e.num_tokens, e.first is not None) for e in effects if isinstance(e, Computed)]


def test_the_second_plan_continues_with_the_next_chunk() -> None:
    node = PrefillNode(chunk=8)
    request = node.submit("a", 20)
    first, second, third = plan_of(node), plan_of(node), plan_of(node)
    assert [row.start for plan in (first, second, third) for row in plan.rows] == [0, 8, 16]
    assert node.scheduler.plan(node.now) is None
    assert (request.num_computed, request.num_scheduled) == (0, 20)
    assert commit(node, first) == [("a", 8, False)]
    assert commit(node, second) == [("a", 8, False)]
    assert commit(node, third) == [("a", 4, True)]
    assert request.output == [7]


def test_the_next_prompt_begins_while_the_last_chunk_of_another_is_outstanding() -> None:
    node = PrefillNode(chunk=8)
    node.submit("a", 8)
    node.submit("b", 8)
    first, second = plan_of(node), plan_of(node)
    assert [len(plan.admits) for plan in (first, second)] == [1, 1]
    assert (commit(node, first), commit(node, second)) == ([("a", 8, True)], [("b", 8, True)])


def test_a_late_result_of_an_aborted_request_never_reaches_the_next_request_in_its_slot() -> None:
    node = PrefillNode(slots=1, chunk=8)
    gone = node.submit("gone", 8)
    first = plan_of(node)
    node.scheduler.abort(gone.key)
    node.submit("other", 8)
    second = plan_of(node)
    assert second.rows[0].slot == first.rows[0].slot
    assert commit(node, first) == []
    assert commit(node, second) == [("other", 8, True)]
    node.scheduler.release(gone.key)
    assert gone.output == []


def test_a_late_result_of_a_retracted_request_is_dropped_after_its_readmission() -> None:
    node = PrefillNode(num_pages=5, chunk=16)
    low = node.submit("low", 12)
    first = plan_of(node)
    pages = set(low.pages)
    urgent = node.submit("urgent", 12, 20)
    second = plan_of(node)
    assert node.scheduler.take_effects() == [Retracted(low.key)]
    assert pages & set(urgent.pages), "the second step runs after the first, and may overwrite its pages"
    assert commit(node, first) == []
    assert (low.output, node.scheduler._table.states[low.key]) == ([], State.WAITING)
    assert commit(node, second) == [("urgent", 12, True)]
    node.scheduler.release(urgent.key)
    assert commit(node, plan_of(node)) == [("low", 12, True)]


def test_a_second_step_is_planned_where_the_cache_has_filled_the_pool() -> None:
    node = PrefillNode(num_pages=12, chunk=16)
    for number in range(8):
        node.submit(str(number), 16)
    plans = [plan_of(node), plan_of(node)]
    for number in range(6):
        assert commit(node, plans.pop(0)) == [(str(number), 16, True)]
        node.scheduler.release((str(number), 0))
        plans.append(plan_of(node))


def test_a_prompt_readmitted_while_its_old_chunk_is_outstanding_is_computed_once() -> None:
    node = PrefillNode(num_pages=20, slots=1, chunk=8)
    low = node.submit("low", 8)
    first = plan_of(node)
    urgent = node.submit("urgent", 8, 20)
    second = plan_of(node)
    assert node.scheduler.take_effects() == [Retracted(low.key)]
    node.scheduler.abort(urgent.key)
    third = plan_of(node)
    assert [row.slot for row in third.rows] == [low.slot]
    assert commit(node, first) == commit(node, second) == []
    assert (low.num_computed, low.output) == (0, [])
    assert commit(node, third) == [("low", 8, True)]


def test_steps_are_committed_in_the_order_of_their_plans() -> None:
    node = PrefillNode(chunk=8)
    node.submit("a", 20)
    plan_of(node)
    second = plan_of(node)
    with pytest.raises(AssertionError, match="step 2 is committed before step 1"):
        node.scheduler.commit(result_of(second))
