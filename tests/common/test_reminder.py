"""A reminder is due after growing pauses."""

from common.reminder import Reminder


def test_pauses_double_up_to_eight_seconds():
    reminder = Reminder(100.0)
    due = [now for now in range(100, 140) if reminder.is_due(float(now))]
    assert due == [102, 106, 114, 122, 130, 138]


def test_time_that_was_slept_through_is_not_made_up_for():
    reminder = Reminder(0.0)
    assert reminder.is_due(1000.0)
    assert not reminder.is_due(1003.9)
    assert reminder.is_due(1004.0)
