"""The ring of decisions: newest last, oldest forgotten, sentences made when somebody asks."""

from common.decisions import Decided, Decisions
from common.messages import Decision


def test_the_latest_are_told_newest_last_with_their_age():
    decisions = Decisions()
    decisions.note(1.0, "a", "admit", "{} of {} pages are free", 3, 8)
    decisions.note(2.5, "b", "retract", "shortest output")
    assert decisions.last(10, 4.0) == (
        Decided(3.0, "a", "admit", "3 of 8 pages are free"),
        Decided(1.5, "b", "retract", "shortest output"),
    )
    assert decisions.last(1, 4.0) == (Decided(1.5, "b", "retract", "shortest output"),)


def test_the_oldest_are_forgotten_and_still_counted():
    decisions = Decisions(maxlen=2)
    for i in range(5):
        decisions.note(float(i), str(i), "admit", "in order")
    assert [decided.rid for decided in decisions.last(10, 5.0)] == ["3", "4"]
    assert decisions.num_noted == 5


def test_no_sentence_is_made_before_somebody_asks():
    class Shown:
        def __format__(self, spec):
            raise AssertionError("too early")

    Decisions().note(0.0, "a", "admit", "{}", Shown())


def test_what_is_told_fits_into_a_message():
    decisions = Decisions()
    decisions.note(1.0, "", "adapt", "{}", "x" * 10_000)
    decision = Decision(*decisions.last(1, 0.5)[0])
    assert decision.ago_s == 0.0  # a clock read a moment earlier
    assert len(decision.reason) == 4_000
