"""A request's class can change in every state. Turns and charges follow the new class from then on."""

import pytest
from support.scheduling.single_nodes import DecodeNode, PrefillNode

from common.config.scheduling import PriorityRules
from common.decision_log import DecisionLog
from common.scheduling.policies.fair import INPUT_WEIGHT, OUTPUT_WEIGHT
from decode_node.request_state import Event

CLASSES = PriorityRules(class_weights={"high": 8.0, "low": 1.0}, default_class="low")


def value(node: PrefillNode | DecodeNode, name: str) -> float:
    classes = node.scheduler._ordering._classes
    assert classes is not None
    return classes.value(name)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_request_waiting_on_a_prefill_node_takes_its_turn_in_the_new_class(is_changed: bool) -> None:
    node = PrefillNode(slots=1, chunk=None, rules=CLASSES)
    for rid in "abcd":
        node.submit(rid, 8)
    assert node.step() == [("a", 8)]  # low has been served now
    if is_changed:
        node.scheduler.reprioritize(("d", 0), 0, node.now, priority_class="high")
    assert node.run() == (["a", "b", "d", "c"] if is_changed else ["a", "b", "c", "d"])
    # The counter of high starts at that of low, and is charged an eighth.
    assert value(node, "high") == (INPUT_WEIGHT * 8 + INPUT_WEIGHT * 8 / 8) * is_changed


@pytest.mark.parametrize(("is_local", "order"), [(False, "abdc"), (True, "adbc")])
def test_a_request_waiting_on_a_decode_node_takes_its_turn_in_the_new_class(is_local: bool, order: str) -> None:
    """If prompts are received, b already has its pages."""
    node = DecodeNode(slots=1, rules=CLASSES)
    for rid in "abcd":
        node.submit(rid, 8, is_local=is_local)
    node.grant()
    node.receive(*[key[0] for key in node.table.receiving])
    node.step()
    node.scheduler.reprioritize(("d", 0), 0, node.now, priority_class="high")
    assert "".join(node.run()) == order


def test_the_new_class_of_a_running_request_is_charged_for_later_tokens() -> None:
    node = DecodeNode(rules=CLASSES)
    node.run_in("a", 8, new=9)
    before = value(node, "low")
    node.scheduler.reprioritize(("a", 0), 0, node.now, priority_class="high")
    node.step()
    node.step()
    assert (value(node, "low"), value(node, "high")) == (before, 2 * OUTPUT_WEIGHT / 8)
    assert node.run() == ["a"]


def test_retracted_and_extending_requests_continue_in_the_new_class() -> None:
    node = DecodeNode(rules=CLASSES)
    request = node.run_in("a", 8, new=9)
    node.submit("b", 32, is_local=True)
    node.step()
    node.scheduler._preemptor.retract(request, node.now, "for the test")
    for rid in "ab":
        node.scheduler.reprioritize((rid, 0), 0, node.now, priority_class="high")
    assert sorted(node.run()) == ["a", "b"]
    assert {name for name in ("high", "low") if value(node, name)} == {"high", "low"}


def test_a_change_is_logged_with_both_classes() -> None:
    decisions = DecisionLog()
    decisions.note_change(0.0, "a", (1, "low"), (2, "high"))
    decisions.note_change(0.0, "a", (2, "high"), (3, None))
    assert [decided.reason for decided in decisions.last(2, 0.0)] == [
        "from 1 to 2, from the class low to high",
        "from 2 to 3",
    ]


BOTH = PriorityRules(is_enabled=True, class_weights={"high": 8.0, "low": 1.0}, default_class="low")


def test_a_row_goes_to_the_least_served_class_whatever_the_priorities() -> None:
    node = DecodeNode(slots=1, rules=BOTH)
    node.run_in("busy", 8, 90, new=3)
    for rid, name, priority in (("a", "low", 90), ("b", "high", 1)):
        request = node.submit(rid, 8, priority)
        node.scheduler.reprioritize(request.key, priority, node.now, priority_class=name)
        node.scheduler._reservations.reserve(request, spare_tokens=0)
        node.table.move(request, Event.GRANT)
    node.receive("a", "b")
    assert node.run() == ["busy", "b", "a"]


def test_when_pages_run_short_the_most_served_class_is_retracted() -> None:
    node = DecodeNode(num_pages=10, rules=BOTH)
    for rid, name, priority in (("a", "low", 90), ("b", "high", 1)):
        node.submit(rid, 8, priority, new=24)
        node.scheduler.reprioritize((rid, 0), priority, node.now, priority_class=name)
    node.grant()
    node.receive("a", "b")
    while not node.table.retracted:
        node.step()
    assert [key[0] for key in node.table.retracted] == ["a"]
