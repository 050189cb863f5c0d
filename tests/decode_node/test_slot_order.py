"""Which request takes a free slot of a decode node: one that is computed there, or one whose prompt has arrived."""

from support.scheduling.single_nodes import DecodeNode as Node

from common.config.scheduling import PriorityRules
from common.scheduling.prefill_adder import LongPromptLimits
from decode_node.request_state import State

WITHOUT = PriorityRules()
PATIENT = PriorityRules(is_enabled=True, preemption_threshold=10)


def arrive(node: Node, rid: str, length: int = 8, priority: int = 0) -> None:
    """Submit a request whose prompt arrives before the next step."""
    node.submit(rid, length, priority, new=4)
    assert node.grant() == [rid]
    node.receive(rid)


def test_slots_are_taken_in_the_order_of_arrival_wherever_prompts_are_computed() -> None:
    node = Node(slots=1, rules=WITHOUT)
    node.run_in("a", 8)
    node.submit("local", 8, is_local=True)
    arrive(node, "r1")
    node.submit("later", 8, is_local=True)
    assert node.run() == ["a", "local", "r1", "later"]


def test_a_local_request_does_not_starve_while_received_ones_keep_coming() -> None:
    node = Node(slots=2, rules=WITHOUT)
    node.run_in("a", 8)
    node.run_in("b", 8)
    node.submit("local", 24, is_local=True)
    for number in range(20):
        node.submit(f"r{number}", 8)
        node.grant()
        node.receive(*[rid for rid, _ in node.table.receiving])
        node.step()
    assert node.done[:3] == ["a", "b", "r0"]  # r0 takes the second slot
    assert "local" in node.done[:6]


def test_of_two_free_slots_one_is_left_for_a_local_request() -> None:
    node = Node(slots=2, rules=WITHOUT, is_mixed=True)
    node.run_in("a", 8, new=20)
    node.run_in("b", 8, new=20)
    node.submit("local", 8, is_local=True)
    arrive(node, "r1")
    arrive(node, "r2")
    node.scheduler.abort(("a", 0))
    node.scheduler.abort(("b", 0))
    assert node.step() == ["r1", "local"]
    assert node.state("r2") is State.READY


def test_a_received_request_does_not_let_a_later_local_one_pass_an_earlier_one() -> None:
    node = Node(slots=1, rules=WITHOUT, policy="short-first")
    node.run_in("a", 8)
    node.submit("l2", 8, is_local=True)
    arrive(node, "r", 12)
    node.submit("l", 4, is_local=True)
    assert node.run() == ["a", "r", "l", "l2"]


def test_a_slot_that_one_received_request_leaves_goes_to_another_that_came_before_the_local_one() -> None:
    node = Node(slots=2, rules=WITHOUT)
    node.run_in("a", 8, new=20)
    node.run_in("b", 8, new=20)
    node.submit("r2", 8)
    node.grant()
    node.submit("local", 8, is_local=True)
    arrive(node, "r1")
    node.receive("r2")
    node.scheduler.abort(("a", 0))
    node.step()
    assert node.state("r2") is State.RUNNING
    assert node.state("r1") is State.READY


def test_an_urgent_local_request_comes_before_received_ones_that_it_may_not_preempt() -> None:
    node = Node(slots=1, rules=PATIENT)
    node.run_in("a", 8)
    arrive(node, "r1")
    node.submit("local", 8, 9, is_local=True)
    arrive(node, "urgent", priority=10)
    assert node.run() == ["a", "urgent", "local", "r1"]


def test_a_slot_is_not_kept_for_a_local_request_that_lacks_pages_nor_given_to_a_later_one() -> None:
    node = Node(num_pages=16, slots=2, rules=PATIENT)
    node.run_in("a", 8, new=20)
    node.run_in("b", 8, new=20)
    arrive(node, "r1")
    node.submit("local", 48, 1, is_local=True)
    node.submit("small", 4, is_local=True)
    node.scheduler.abort(("b", 0))
    assert node.step() == ["a", "r1"]
    assert node.state("local") is node.state("small") is State.WAITING
    assert len(node.run()) == 4


def test_a_slot_stays_free_for_a_local_request_while_it_is_the_turn_of_outputs() -> None:
    node = Node(slots=3, rules=WITHOUT)
    node.run_in("a", 8, new=20)
    node.run_in("b", 8, new=20)
    node.submit("first", 8, new=20, is_local=True)
    assert node.step() == ["first"]  # a step of chunks alone
    node.submit("local", 8, is_local=True)
    arrive(node, "r1")
    node.scheduler.abort(("b", 0))
    assert node.step() == ["a", "first"]
    assert node.state("r1") is State.READY
    assert node.step() == ["local"]
    assert node.state("r1") is State.READY


def test_a_slot_is_not_kept_for_a_local_request_while_begun_prompts_take_the_whole_step() -> None:
    node = Node(slots=3, rules=WITHOUT, long_prompts=LongPromptLimits(share=1.0))
    node.run_in("a", 8, new=20)
    node.run_in("b", 8, new=20)
    node.submit("long", 40, is_local=True)
    node.step()
    node.submit("local", 8, is_local=True)
    arrive(node, "r1")
    assert node.step() == ["a", "b"]
    node.scheduler.abort(("b", 0))
    node.step()
    assert node.chunks == [("long", 8)]
    assert node.state("r1") is State.RUNNING
    assert sorted(node.run()) == ["a", "local", "long", "r1"]
