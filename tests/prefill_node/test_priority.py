"""Priorities on a prefill node decide about the queue, chunks, slots and pages."""

import pytest
from support.scheduling.single_nodes import PrefillNode as Node

from common.config.scheduling import PriorityRules
from common.scheduling.prefill_adder import LongPromptLimits
from common.scheduling.skip_ahead import SkipAhead


@pytest.mark.parametrize(("first", "second", "order"), [(1, 5, "ba"), (5, 1, "ab"), (3, 3, "ab")])
def test_the_more_urgent_of_two_waiting_prompts_is_computed_first(first: int, second: int, order: str) -> None:
    node = Node(slots=1)
    node.submit("a", 12, first)
    node.submit("b", 12, second)
    assert "".join(node.run()) == order


def test_priorities_have_no_effect_while_they_are_disabled() -> None:
    node = Node(slots=1, rules=PriorityRules(is_enabled=False))
    node.submit("a", 12, 1)
    node.submit("b", 12, 50)
    assert node.run() == ["a", "b"]


def test_an_urgent_prompt_overtakes_a_long_one_between_two_of_its_chunks() -> None:
    node = Node()
    node.submit("long", 32, 1)
    assert node.step() == [("long", 8)]
    node.submit("urgent", 12, 2)
    assert node.step() == [("urgent", 8)]
    assert node.step() == [("urgent", 4), ("long", 4)]
    assert (node.scheduler.totals()["budget_tokens"], node.scheduler.totals()["budget_tokens_used"]) == (24, 24)
    assert node.run() == ["urgent", "long"]
    assert node.scheduler.totals()["preemptions"] == 0, "a request was retracted without need"


def test_an_equal_prompt_does_not_overtake_where_nothing_is_shared() -> None:
    node = Node(long_prompts=LongPromptLimits(share=1.0))
    node.submit("long", 32, 1)
    node.step()
    node.submit("other", 12, 1)
    assert node.run() == ["long", "other"]


def test_ageing_puts_a_prompt_before_much_later_ones() -> None:
    # At 2 per second, priority 0 outranks priority 10 if it arrived more than 5 s earlier.
    node = Node(slots=1, chunk=None, rules=PriorityRules(is_enabled=True, aging_per_s=2.0))
    node.submit("busy", 4, 100)
    node.submit("old", 4, 0)
    node.now = 4.0
    node.submit("soon", 4, 10)
    node.now = 6.0
    node.submit("late", 4, 10)
    assert node.run() == ["busy", "soon", "old", "late"]


@pytest.mark.parametrize(("difference", "is_taken"), [(10, False), (11, True)])
def test_a_slot_is_taken_only_above_the_preemption_threshold(difference: int, is_taken: bool) -> None:
    node = Node(slots=1)
    node.submit("a", 32, 0)
    node.step()
    node.submit("b", 8, difference)
    assert node.run() == (["b", "a"] if is_taken else ["a", "b"])
    assert node.scheduler.totals()["preemptions"] == is_taken


def test_no_prompt_gives_way_to_one_of_its_class_that_is_not_first_in_the_queue() -> None:
    classes = PriorityRules(is_enabled=True, class_weights={"high": 8.0, "low": 1.0}, default_class="low")
    node = Node(num_pages=8, rules=classes)
    node.submit("running", 24, 1)
    other = node.submit("other", 24)
    node.scheduler.reprioritize(other.key, 0, node.now, priority_class="high")
    assert node.step() == [("running", 8)]
    node.submit("urgent", 16, 50)  # low has been served more, so that the other class would get the pages
    assert node.step() == [("running", 8)]
    assert node.scheduler.totals()["preemptions"] == 0
    assert node.run() == ["running", "other", "urgent"]


def test_what_a_retracted_prompt_has_computed_counts_neither_as_cached_nor_as_time_in_the_queue() -> None:
    node = Node(slots=1)
    node.submit("before", 8, first=0)
    node.step()
    low = node.submit("low", 32, first=0)
    assert node.step() == [("low", 8)]
    node.submit("urgent", 8, 50)
    assert node.run() == ["before", "urgent", "low"]
    assert node.scheduler.totals()["preemptions"] == 1
    assert low.num_cached == 8
    assert low.admitted_at == 2.0 < low.placed_at, "it has waited until its first chunk"
    reasons = [decided.reason for decided in node.scheduler.decisions.last(9, node.now) if decided.action == "admit"]
    assert reasons[-1] == "computes 16 of 32 tokens"


def test_the_newest_of_the_least_urgent_prompts_is_retracted() -> None:
    node = Node(num_pages=12, chunk=None)  # 48 tokens
    for rid, priority in (("low", 0), ("middle", 5), ("lower", 0)):
        node.submit(rid, 16, priority)
        node.step(is_sent=False)
    node.submit("urgent", 16, 50)
    node.step()
    assert {key[0] for key in node.scheduler._table.waiting} == {"lower"}
    assert [decided.action for decided in node.scheduler.decisions.last(3, node.now)] == ["retract", "admit", "wait"]
    assert node.run() == ["low", "middle", "lower", "urgent", "lower"]


@pytest.mark.parametrize(("length", "is_taken"), [(40, True), (44, False)])
def test_a_prompt_that_lacks_a_slot_and_pages_takes_both_or_nothing(length: int, is_taken: bool) -> None:
    node = Node(num_pages=14, slots=1)
    node.granted.add(node.submit("granted", 16).key)
    for _ in range(2):
        node.step(is_sent=False)  # the prompt keeps its four pages
    node.submit("low", 32)
    node.step()
    node.submit("urgent", length, 50)  # ten pages; without low there are ten
    assert node.step() == [("urgent" if is_taken else "low", 8)]
    assert node.scheduler.totals()["preemptions"] == is_taken


def test_a_prompt_that_lacks_both_takes_a_slot_first_and_no_more_pages_than_it_needs() -> None:
    node = Node(num_pages=12, slots=1)
    node.submit("weak", 16)
    for _ in range(2):
        node.step(is_sent=False)  # four pages, and its slot is free again
    node.submit("slow", 24, 1)
    node.step()
    node.submit("urgent", 32, 50)
    assert node.step() == [("urgent", 8)]
    assert {key[0] for key in node.scheduler._table.waiting} == {"slow"}


def test_no_request_is_retracted_if_the_pages_would_not_be_enough() -> None:
    node = Node(num_pages=12, chunk=None)
    granted = node.submit("granted", 24, 0)
    node.granted.add(granted.key)
    node.submit("low", 16, 0)
    node.step(is_sent=False)
    node.submit("urgent", 40, 50)  # 10 pages; without low there are 6
    assert node.step(is_sent=False) == []
    assert {key[0] for key in node.scheduler._table.waiting} == {"urgent"}
    assert node.scheduler.totals()["preemptions"] == 0


def test_a_long_prompt_that_may_not_begin_takes_no_pages() -> None:
    node = Node(num_pages=34, long_prompts=LongPromptLimits(max_begun=1))
    node.submit("low", 16, 0)
    for _ in range(2):
        node.step(is_sent=False)  # four pages
    node.submit("long", 64, 20)
    node.step()
    node.submit("next", 64, 20)  # 16 pages; there are 14, and 18 without low
    assert node.step() == [("long", 8)]
    assert node.scheduler.totals()["preemptions"] == 0
    assert node.run() == ["low", "long", "next"]


def test_a_retracted_prompt_does_not_recompute_what_is_still_cached() -> None:
    node = Node(slots=1)
    node.submit("a", 32, 0)
    node.step()
    node.step()  # 16 of 32 tokens
    node.submit("b", 8, 50)
    node.step()
    assert node.step() == [("a", 8)]
    assert node.step() == [("a", 8)]
    assert node.done == ["b", "a"]


@pytest.mark.parametrize(("priority", "chunks"), [(0, [("low", 8)]), (9, [("other", 8), ("low", 8)])])
def test_a_prompt_waits_for_its_prefix_unless_it_comes_before_the_one_that_computes_it(
    priority: int, chunks: list[tuple[str, int]]
) -> None:
    node = Node(chunk=16)
    node.submit("low", 24, 0, first=5000)
    assert node.step() == [("low", 16)]
    node.submit("other", 24, priority, first=5000)
    assert node.step() == chunks


def test_a_changed_priority_takes_effect_in_the_next_step() -> None:
    node = Node()
    node.submit("a", 32, 1)
    node.submit("b", 32, 1)
    assert node.step() == [("a", 8)]
    node.scheduler.reprioritize(("b", 0), 2, node.now)
    node.scheduler.reprioritize(("unknown", 0), 2, node.now)
    assert node.step() == [("b", 8)]
    assert node.run() == ["b", "a"]


def test_at_most_max_skip_ahead_small_prompts_overtake_one_that_does_not_fit() -> None:
    node = Node(num_pages=10, skip_ahead=2)
    node.submit("holder", 24)
    node.step(is_sent=False)
    node.step(is_sent=False)
    node.step(is_sent=False)  # the prompt keeps its six pages
    large = node.submit("large", 40)
    for number in range(4):
        node.submit(f"small{number}", 4)
    node.step()
    node.step()
    assert node.done == ["holder", "small0", "small1"]
    assert large.num_passed == 2
    assert node.scheduler.totals()["skipped_ahead"] == 2
    node.scheduler.release(("holder", 0))
    assert node.run()[3:] == ["large", "small2", "small3"]


def test_without_skip_ahead_no_prompt_overtakes() -> None:
    node = Node(num_pages=10, skip_ahead=0)
    node.submit("holder", 24)
    for _ in range(3):
        node.step(is_sent=False)
    node.submit("large", 40)
    node.submit("small", 4)
    assert node.step() == []


def test_a_granted_prompt_takes_pages_from_ungranted_ones_of_any_priority() -> None:
    node = Node(num_pages=8, chunk=4)
    node.submit("high", 24, 90)
    node.step()
    granted = node.submit("granted", 16, 0)
    node.granted.add(granted.key)
    node.step()
    assert {key[0] for key in node.scheduler._table.waiting} == {"high"}
    assert node.run() == ["granted", "high"]


def test_a_prompt_that_needs_no_decode_node_takes_pages_from_computed_ones_that_wait_for_theirs() -> None:
    node = Node(num_pages=8, chunk=None)
    for rid in ("old", "new"):
        node.submit(rid, 16)
        node.step(is_sent=False)  # it keeps its pages, since its decode node is full
    node.submit("blocked", 16)
    node.submit("single", 12, new=1)
    assert node.step() == [("single", 12)]
    assert {key[0] for key in node.scheduler._table.waiting} == {"new", "blocked"}
    assert node.scheduler.totals()["preemptions"] == 0


def test_a_prompt_that_needs_no_decode_node_takes_no_pages_while_another_one_fits() -> None:
    node = Node(num_pages=10, chunk=None)
    node.submit("computed", 16)
    node.step(is_sent=False)
    node.submit("fits", 24)
    node.submit("single", 28, new=1)
    assert node.step(is_sent=False) == [("fits", 24)]
    assert node.step() == [("single", 28)]
    assert {key[0] for key in node.scheduler._table.waiting} == {"computed", "fits"}


def test_a_prompt_that_needs_no_decode_node_takes_no_pages_from_more_urgent_ones() -> None:
    node = Node(num_pages=8, chunk=None)
    node.submit("urgent", 32, 1)
    node.step(is_sent=False)
    node.submit("single", 12, new=1)
    assert node.step() == []
    node.scheduler.release(("urgent", 0))
    assert node.run() == ["urgent", "single"]


def test_prompts_that_need_no_decode_node_overtake_others_that_do_not_fit_but_not_their_own_kind() -> None:
    node = Node(num_pages=10, skip_ahead=1)
    node.granted.add(node.submit("sent", 24).key)
    for _ in range(3):
        node.step(is_sent=False)
    blocked = node.submit("blocked", 40)
    for number in range(4):
        node.submit(f"single{number}", 4, new=1)
        node.step()
    assert node.done == ["sent", *(f"single{number}" for number in range(4))]
    node.submit("large", 40, new=1)
    node.submit("single4", 4, new=1)
    assert node.step() == []
    assert blocked.num_passed == 4


def test_a_granted_prompt_that_waits_for_its_prefix_takes_no_pages() -> None:
    node = Node(num_pages=40)
    node.submit("computes the prefix", 80, 0, first=0)
    node.step()
    node.submit("urgent", 60, 9)
    node.submit("granted", 80, 0, first=0)
    node.granted |= {("computes the prefix", 0), ("granted", 0)}
    for _ in range(8):
        assert node.step()[0][0] == "urgent"
    assert node.scheduler.totals()["retractions"] == 0
    assert node.run()[0] == "urgent" and len(node.done) == 3


def test_no_prompt_overtakes_a_granted_one_that_does_not_fit() -> None:
    node = Node(num_pages=8, chunk=None)
    for rid, length in (("held", 16), ("granted", 20)):
        request = node.submit(rid, length)
        node.granted.add(request.key)
    node.step(is_sent=False)
    node.submit("small", 4)
    assert node.step() == [], "free pages went to a prompt without grants"


def test_the_overtaking_count_restarts_after_an_admission() -> None:
    large, small = Node().submit("large", 4), Node().submit("small", 4)
    for _ in range(3):
        line = SkipAhead(1)
        line.refuse(large)
        assert not line.is_closed
        assert line.admit(small)
        assert line.is_closed
        assert not SkipAhead(1).admit(large)


def test_a_granted_prompt_gets_its_pages_though_they_did_not_suffice_at_first() -> None:
    """Everything would stand still if it kept its place at the head of the queue without taking pages again."""
    node = Node(num_pages=12, chunk=None)
    node.submit("granted", 16)
    node.submit("sent", 16, 9)
    node.granted.add(("granted", 0))
    node.step(is_sent=False)
    large = node.submit("large", 44)
    node.granted.add(large.key)
    assert node.step() == []  # the pages of ``sent`` and the free ones are not enough, so nothing is taken
    assert node.scheduler.totals()["retractions"] == 0
    small = node.submit("small", 4, 9)
    node.granted.add(small.key)  # it is more urgent, and would fit
    node.scheduler.release(("granted", 0))
    assert node.step()[0] == ("large", 44)
    assert sorted(node.run()) == ["granted", "large", "sent", "sent", "small"]
