"""Priorities on a decode node decide about pages, slots, rows and retractions; pages are reserved for outputs."""

from collections import Counter

import pytest
from support.scheduling.single_nodes import ON, result_of
from support.scheduling.single_nodes import DecodeNode as Node

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.request import Request
from common.scheduling.ordering import RequestOrdering
from common.scheduling.prefill_adder import LongPromptLimits
from decode_node.request_state import State


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize(("first", "second", "order"), [(1, 5, "ba"), (5, 1, "ab"), (3, 3, "ab")])
def test_the_more_urgent_of_two_waiting_requests_gets_pages_and_ends_first(
    first: int, second: int, order: str, is_local: bool
) -> None:
    node = Node(slots=1)
    node.submit("a", 12, first, is_local=is_local)
    node.submit("b", 12, second, is_local=is_local)
    assert "".join(node.run()) == order


def test_received_and_local_prompts_wait_in_one_queue() -> None:
    for urgent in ("received", "computed"):
        node = Node(num_pages=4)
        node.submit("received", 12, 5 * (urgent == "received"))
        node.submit("computed", 12, 5 * (urgent == "computed"), is_local=True)
        node.grant()
        node.step()
        is_first = node.state("received") is State.RECEIVING
        assert is_first == (urgent == "received")
        assert (node.state("computed") is State.EXTENDING) == (urgent == "computed")


def test_priorities_have_no_effect_while_they_are_disabled() -> None:
    node = Node(slots=1, rules=PriorityRules())
    node.submit("a", 12, 1)
    node.submit("b", 12, 50)
    assert node.run() == ["a", "b"]


def test_an_urgent_local_prompt_overtakes_a_long_one_between_two_chunks() -> None:
    node = Node()
    node.submit("long", 32, 1, is_local=True)
    node.step()
    node.submit("urgent", 12, 2, is_local=True)
    node.step()
    assert node.step() == ["urgent"]
    assert node.run() == ["urgent", "long"]


@pytest.mark.parametrize(("difference", "is_taken"), [(2, False), (3, True)])
def test_a_slot_is_taken_only_above_the_preemption_threshold(difference: int, is_taken: bool) -> None:
    node = Node(slots=1)
    low = node.run_in("low", 8, 0, new=20)
    node.submit("urgent", 8, difference)
    node.grant()
    node.receive("urgent")
    node.step()
    assert (node.state("low") is State.PAUSED) == is_taken
    assert low.pages, "the preempted request lost its pages"
    assert node.scheduler.totals()["pauses"] == node.scheduler.totals()["preemptions"] == is_taken
    assert node.run() == (["urgent", "low"] if is_taken else ["low", "urgent"])
    assert len(low.output) == 20


def test_local_prompts_that_are_not_urgent_enough_are_not_compared_with_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[str, str]] = []
    may_preempt = RequestOrdering.may_preempt

    def counted(ordering: RequestOrdering, waiting: Request, running: Request, now: float) -> bool:
        compared.append((waiting.rid, running.rid))
        return may_preempt(ordering, waiting, running, now)

    node = Node(slots=3, is_mixed=True)
    node.run_in("low", 8, 1, new=40)
    node.run_in("high", 8, 9, new=40)
    node.submit("long", 80, 1, is_local=True)
    node.step()
    for number in range(20):
        node.submit(f"waiting {number}", 8, 3, is_local=True)
    monkeypatch.setattr(RequestOrdering, "may_preempt", counted)
    assert node.step() == ["high", "low"]
    assert not compared
    node.submit("urgent", 8, 4, is_local=True)
    node.step()
    assert node.state("long") is State.RETRACTED
    assert {waiting for waiting, _ in compared} == {"urgent"}


def test_an_urgent_prompt_of_known_length_takes_no_pages_for_its_whole_output() -> None:
    """It takes 3 pages at once; with those of the whole outputs, more than the pool has."""
    node = Node(num_pages=40, chunk=64, is_mixed=True)
    node.run_in("weak", 100, new=60, ignore_eos=True)
    node.submit("first", 10, 9, new=60, is_local=True, ignore_eos=True)
    node.step()
    assert node.state("first") in (State.EXTENDING, State.RUNNING)
    assert node.state("weak") is State.RUNNING


def test_the_cooldown_protects_pages_that_a_preempted_request_has_again_before_it_has_a_slot() -> None:
    rules = PriorityRules(is_enabled=True, preemption_threshold=2, preemption_cooldown_s=3.0)
    node = Node(num_pages=9, slots=1, rules=rules, resume_tokens=0)
    node.connected.add("prefill")
    node.run_in("runner", 4, 9, new=20)
    node.submit("weak", 16, 0)
    node.grant()
    node.receive("weak")
    urgent = node.submit("urgent", 16, 9)
    node.step()
    assert node.state("weak") is State.RETRACTED
    node.scheduler.abort(urgent.key, node.scheduler._reservations.by_key[urgent.key].pages)
    assert node.grant() == ["weak"]
    node.receive("weak")
    node.submit("second", 16, 9)
    states = []
    for _ in range(4):
        node.step()
        states.append(node.state("weak"))
    assert states == [State.READY, State.READY, State.RETRACTED, State.RETRACTED]


def test_the_newest_of_the_least_urgent_requests_is_paused() -> None:
    node = Node(slots=3)
    for rid, priority in (("low", 0), ("middle", 1), ("lower", 0)):
        node.run_in(rid, 8, priority, new=40)
    node.run_in("urgent", 8, 9)
    assert node.state("lower") is State.PAUSED
    assert {key[0] for key in node.table.running} == {"low", "middle", "urgent"}


def test_a_paused_request_continues_where_it_was_with_its_history() -> None:
    node = Node(slots=1)
    low = node.run_in("low", 8, 0, new=10)
    node.submit("urgent", 8, 9, new=2)
    node.grant()
    node.receive("urgent")
    assert node.step() == ["urgent"]
    plan = node.scheduler.plan(node.now)
    assert plan is not None
    [admit] = plan.admits
    assert admit.last_token == low.output[-1]
    assert plan.pages[0].pages == tuple(low.pages)
    assert [row.start for row in plan.rows] == [low.num_computed]
    node.scheduler.commit(result_of(plan))


def test_as_many_requests_are_retracted_as_needed_least_urgent_first() -> None:
    node = Node(num_pages=13)
    for rid, priority in (("middle", 1), ("low", 0), ("lower", 0)):
        node.run_in(rid, 12, priority, new=40)  # four pages each, including the output
    node.submit("urgent", 24, 9)
    node.step()
    assert node.granted[-1] == "urgent"
    assert {key[0] for key in node.table.retracted} == {"low", "lower"}
    assert node.scheduler.totals()["preemptions"] == node.scheduler.totals()["retractions"] == 2
    actions = [decided.action for decided in node.scheduler.decisions.last(5, node.now)]
    assert actions == ["retract", "retract", "grant", "wait", "wait"]
    assert node.run() == ["urgent", "middle", "low", "lower"]


def test_no_request_is_retracted_if_the_pages_would_not_be_enough() -> None:
    node = Node(num_pages=13)
    node.run_in("strong", 16, 8, new=40)
    node.run_in("low", 12, 0, new=40)
    node.submit("urgent", 40, 9)
    node.step()
    assert {key[0] for key in node.table.running} == {"strong", "low"}
    assert node.scheduler.totals()["retractions"] == 0


def test_a_long_local_prompt_that_may_not_begin_takes_no_pages() -> None:
    node = Node(num_pages=36, long_prompts=LongPromptLimits(max_begun=1))
    node.run_in("low", 12, 0, new=40)
    node.submit("long", 64, 9, is_local=True)
    node.step()
    node.submit("next", 64, 9, is_local=True)  # 18 pages with its output; there are 16
    for _ in range(4):
        node.step()
    assert node.state("low") is State.RUNNING
    assert node.scheduler.totals()["preemptions"] == 0
    assert node.run() == ["long", "next", "low"]


def test_a_retracted_request_does_not_take_its_pages_back() -> None:
    node = Node(num_pages=9)
    node.run_in("low", 16, 0, new=12)
    node.submit("urgent", 24, 9, new=8)
    node.step()
    assert node.state("low") is State.RETRACTED
    assert node.step() == []
    node.receive("urgent")
    assert node.step() == ["urgent"]
    assert node.run() == ["urgent", "low"]


@pytest.mark.parametrize(("rules", "victim"), [(ON, "old"), (PriorityRules(), "new")])
def test_the_victim_when_the_batch_outgrows_the_pool(rules: PriorityRules, victim: str) -> None:
    node = Node(num_pages=6, rules=rules)
    node.run_in("old", 8, 0, new=30)
    node.step()
    node.run_in("new", 8, 1, new=30)
    while not node.table.retracted:
        node.step()
    # The least urgent request, or the one with the shorter output.
    assert [key[0] for key in node.table.retracted] == [victim]


@pytest.mark.parametrize("rules", [ON, PriorityRules()])
def test_a_request_without_a_row_is_retracted_before_a_more_urgent_one_or_one_with_more_output(
    rules: PriorityRules,
) -> None:
    node = Node(num_pages=6, slots=1, rules=rules)
    node.run_in("running", 8, 9, new=12)
    node.submit("ready", 8, 0)
    assert node.grant() == ["ready"]
    node.receive("ready")
    while not node.table.retracted:
        assert node.step() == ["running"]
    assert node.state("ready") is State.RETRACTED
    assert node.run() == ["running", "ready"]


def test_the_newest_of_equal_requests_is_retracted_when_pages_run_short() -> None:
    for rules, rows in ((ON, ("old", "new")), (PriorityRules(), ("new", "old")), (PriorityRules(), ("old", "new"))):
        node = Node(num_pages=6, rules=rules)
        for rid in ("old", "new"):
            node.submit(rid, 8, new=30)
            node.now += 1.0
        node.grant()
        node.receive(*rows)
        while not node.table.retracted:
            node.step()
        assert [key[0] for key in node.table.retracted] == ["new"]


def test_tokens_of_a_step_come_in_order_of_priority() -> None:
    node = Node()
    for rid, priority in (("a", 1), ("b", 3), ("c", 2)):
        node.run_in(rid, 8, priority, new=30)
    before = Counter(node.scheduler.totals())
    assert node.step() == ["b", "c", "a"]
    assert Counter(node.scheduler.totals()) - before == {"budget_rows": 8, "budget_rows_used": 3}


@pytest.mark.parametrize(("priority", "chunks"), [(0, [("low", 8)]), (2, [("other", 8), ("low", 8)])])
def test_a_local_prompt_waits_for_its_prefix_unless_it_comes_before_the_one_that_computes_it(
    priority: int, chunks: list[tuple[str, int]]
) -> None:
    node = Node(chunk=16)
    node.submit("low", 24, 0, new=1, first=5000, is_local=True)
    node.step()
    node.submit("other", 24, priority, new=1, first=5000, is_local=True)
    node.step()
    assert node.chunks == chunks


def test_a_step_computes_at_most_max_prefill_tokens_beside_its_first_prompt() -> None:
    for most, num_begun in ((16_384, 2), (1, 1)):
        node = Node(rules=PriorityRules(), max_prefill_tokens=most)
        for rid in "ab":
            node.submit(rid, 2, is_local=True)
        plan = node.scheduler.plan(node.now)
        assert plan is not None
        assert len(plan.rows) == num_begun


def test_received_requests_without_a_slot_do_not_delay_a_more_urgent_transfer() -> None:
    node = Node(slots=1)
    node.run_in("busy", 8, 5, new=30)
    node.submit("low", 8, 0)
    assert node.grant() == ["low"]
    node.receive("low")  # low has arrived, and no slot is free
    node.submit("equal", 8, 0)
    assert node.grant() == []
    node.submit("urgent", 8, 9)
    assert node.grant() == ["urgent"]


def test_a_changed_priority_takes_effect_at_once() -> None:
    node = Node(slots=1)
    node.run_in("busy", 8, 9, new=3)
    node.submit("a", 12, 1)
    node.submit("b", 12, 0)
    node.scheduler.reprioritize(("b", 0), 2, node.now)
    node.scheduler.reprioritize(("unknown", 0), 2, node.now)
    assert node.run() == ["busy", "b", "a"]


def test_at_most_max_skip_ahead_smaller_requests_overtake_one_that_does_not_fit() -> None:
    node = Node(num_pages=12, rules=PriorityRules(), max_skip_ahead=2)
    node.run_in("holder", 16, new=3)
    large = node.submit("large", 44)
    for number in range(4):
        node.submit(f"small{number}", 3, new=2)
    assert node.grant() == ["small0", "small1"]
    assert large.num_passed == 2
    assert node.scheduler.totals()["skipped_ahead"] == 2
    node.run()
    assert node.granted[-3:] == ["large", "small2", "small3"]


def test_local_prompts_overtake_a_request_that_lacks_pages_a_limited_number_of_times() -> None:
    node = Node(num_pages=12, rules=PriorityRules(), max_skip_ahead=1)
    node.run_in("holder", 16, new=3)
    node.submit("large", 44)
    for number in range(3):
        node.submit(f"local{number}", 3, new=1, is_local=True)
    node.grant()
    node.step()
    assert {key[0] for key in node.table.waiting} == {"large", "local1", "local2"}
    assert node.run()[-3:] == ["large", "local1", "local2"]


def test_room_is_kept_for_further_outputs() -> None:
    for reserved, is_let_in in ((0, True), (20, False)):
        node = Node(num_pages=12, rules=PriorityRules(), reserved_tokens=reserved)
        node.submit("a", 8, new=40)
        node.grant()
        node.submit("b", 24, new=4)
        assert bool(node.grant()) == is_let_in


@pytest.mark.parametrize(("first", "second", "begun"), [(24, 1, 1), (4, 12, 1), (4, 11, 2)])
def test_local_prompts_that_begin_together_leave_room_for_their_outputs(first: int, second: int, begun: int) -> None:
    """The pool has 32 tokens, and each prompt 8. The first may fill the pool with its output, because nothing runs."""
    node = Node(num_pages=8, chunk=16, reserved_tokens=24)
    node.submit("first", 8, new=first, is_local=True)
    node.submit("second", 8, new=second, is_local=True)
    node.step()
    assert node.chunks == [("first", 8), ("second", 8)][:begun]


def test_a_local_prompt_without_a_slot_takes_no_pages() -> None:
    node = Node(num_pages=12, slots=1)
    node.run_in("paused", 24, 0, new=20)
    node.run_in("running", 8, 9, new=5)
    node.submit("local", 24, 5, is_local=True)
    assert node.step() == ["running"]
    assert node.state("paused") is State.PAUSED
    assert node.run() == ["running", "local", "paused"]


@pytest.mark.parametrize(("reserved", "is_retracted"), [(0, False), (50, True)])
def test_a_local_prompt_for_which_the_reserve_is_free_preempts_nothing(reserved: int, is_retracted: bool) -> None:
    """The prompt takes 24 of 80 tokens, 8 are held, and 50 may follow."""
    node = Node(num_pages=20, reserved_tokens=reserved)
    node.run_in("low", 8, 0, new=8)
    node.submit("urgent", 24, 5, new=50, is_local=True)
    node.step()
    assert node.state("urgent") is State.EXTENDING
    assert (node.state("low") is State.RETRACTED) == is_retracted


def test_a_request_that_joins_without_a_free_page_is_admitted_by_the_first_plan_that_computes_it() -> None:
    node = Node(num_pages=7)
    request = node.submit("a", 24)
    node.grant()
    elsewhere = node.allocator.alloc(1, Owner.GRANT)
    assert elsewhere is not None
    node.receive("a")
    assert node.step() == []
    assert node.state("a") is State.RUNNING
    node.allocator.free(elsewhere, Owner.GRANT)
    plan = node.scheduler.plan(node.now)
    assert plan is not None
    assert [admit.slot for admit in plan.admits] == [request.slot]
    assert plan.pages[0].pages == tuple(request.pages)


def test_another_request_joins_in_the_row_of_one_that_a_plan_retracts() -> None:
    """Each prompt of 7 tokens takes 2 of 4 pages, which have room for one token more. There is one row.

    A regression: the plan that took the pages of the first request had no row at all, so that the event loop waited.
    """
    node = Node(num_pages=4, slots=1)
    node.run_in("first", 7)
    node.submit("second", 7, 1)  # more urgent, but not by enough to take the row
    assert node.grant() == ["second"]
    node.receive("second")
    assert node.step() == ["second"]
    assert node.state("first") is State.RETRACTED
