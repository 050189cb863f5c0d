"""The log of decisions: order, bound, reasons for waiting, and formatting on reading."""

import pytest
from support.scheduling.single_nodes import DecodeNode, PrefillNode

from common.decision_log import DecisionLog
from common.scheduling.prefill_adder import LongPromptLimits
from common.wire.messages import Decision


def test_the_latest_decisions_are_returned_newest_last_with_their_age():
    decisions = DecisionLog()
    decisions.note(1.0, "a", "admit", "{} of {} pages are free", 3, 8)
    decisions.note(2.5, "b", "retract", "shortest output")
    assert decisions.last(10, 4.0) == (
        Decision(3.0, "a", "admit", "3 of 8 pages are free"),
        Decision(1.5, "b", "retract", "shortest output"),
    )
    assert decisions.last(1, 4.0) == (Decision(1.5, "b", "retract", "shortest output"),)


def test_the_oldest_decisions_are_dropped():
    decisions = DecisionLog(maxlen=2)
    for i in range(5):
        decisions.note(float(i), str(i), "admit", "in order")
    assert [decided.rid for decided in decisions.last(10, 5.0)] == ["3", "4"]


def test_a_reason_for_waiting_is_noted_once_until_another_decision():
    decisions = DecisionLog()
    for _ in range(3):
        decisions.note_wait(0.0, "a", "for {} pages", 3)
        decisions.note_wait(0.0, "b", "for {} pages", 3)
    decisions.note_wait(0.0, "a", "for the prefix of {}", "b")
    decisions.note(0.0, "b", "retract", "for the test")
    decisions.note_wait(0.0, "b", "for {} pages", 3)
    told = [(decided.rid, decided.reason) for decided in decisions.last(9, 0.0)]
    assert told == [
        ("a", "for 3 pages"), ("b", "for 3 pages"), ("a", "for the prefix of b"), ("b", "for the test"),
        ("b", "for 3 pages"),
    ]  # fmt: skip


def test_the_number_of_remembered_reasons_for_waiting_is_bounded(monkeypatch):
    monkeypatch.setattr("common.decision_log.MAX_WAITS", 2)
    decisions = DecisionLog()
    for rid in "abcca":
        decisions.note_wait(0.0, rid, "for pages")
    assert [decided.rid for decided in decisions.last(9, 0.0)] == ["a", "b", "c", "a"]


def told(node):
    return [(each.rid, each.action, each.reason) for each in node.scheduler.decisions.last(99, node.now)]


def test_a_prefill_node_notes_why_prompts_wait_and_which_overtake():
    node = PrefillNode(num_pages=10, chunk=8, long_prompts=LongPromptLimits(share=1.0))
    for rid, length in (("holder", 24), ("large", 40), ("small", 4)):
        node.submit(rid, length)
    for _ in range(4):
        node.step(is_sent=False)
    assert told(node) == [
        ("holder", "admit", "computes 24 of 24 tokens"),
        ("large", "wait", "for room for 40 tokens"),
        ("small", "admit", "computes 4 of 4 tokens, ahead of requests that do not fit"),
    ]


def test_a_decode_node_notes_why_requests_wait_and_which_overtake():
    node = DecodeNode(num_pages=12, slots=4, max_skip_ahead=2)
    node.run_in("holder", 16, 9, new=40)
    for rid, length, first in (("large", 44, None), ("one", 8, 9000), ("same", 8, 9000)):
        node.submit(rid, length, first=first)
    for _ in range(3):
        node.grant()
    node.submit("urgent", 4, 50, is_local=True)
    node.step()
    assert told(node)[1:] == [
        ("large", "wait", "for 11 pages"),
        ("one", "grant", "2 of 2 pages, ahead of requests that do not fit"),
        ("same", "wait", "for its prefix, which comes for one"),
        ("urgent", "admit", "computes 4 of 4 tokens"),
    ]


@pytest.mark.parametrize("node", [PrefillNode(), DecodeNode()])
def test_a_node_notes_the_request_whose_prefix_another_waits_for(node):
    here = {"is_local": True} if isinstance(node, DecodeNode) else {}
    node.submit("first", 40, first=9000, **here)
    node.submit("same", 40, 1, first=9000, **here)
    node.step()
    node.scheduler.reprioritize(("first", 0), 2, node.now)
    node.step()
    assert ("first", "wait", "for its prefix, which same computes") in told(node)


def test_a_decode_node_notes_when_a_paused_request_resumes():
    node = DecodeNode(slots=1)
    node.run_in("low", 8, 0, new=10)
    node.run_in("urgent", 8, 9, new=2)
    node.step()
    assert told(node)[-2:] == [
        ("low", "pause", "its row goes to the more urgent urgent"),
        ("low", "resume", "in a row again, after 10 tokens"),
    ]


def test_reasons_are_formatted_on_reading():
    class Shown:
        def __format__(self, spec):
            raise AssertionError("too early")

    DecisionLog().note(0.0, "a", "admit", "{}", Shown())


def test_a_long_reason_is_cut_to_fit_into_a_message():
    decisions = DecisionLog()
    decisions.note(1.0, "", "admit", "{}", "x" * 10_000)
    (decision,) = decisions.last(1, 0.5)
    assert decision.ago_s == 0.0  # the question has an earlier time
    assert len(decision.reason) == 4_000
