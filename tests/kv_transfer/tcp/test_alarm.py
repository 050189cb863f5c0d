"""The timer with a descriptor."""

import os
import select

import pytest

from kv_transfer.transports.tcp.alarm import Alarm


def is_ringing(alarm: Alarm, within_s: float) -> bool:
    return bool(select.select([alarm], [], [], within_s)[0])


def test_an_alarm_rings_once_until_it_is_silenced() -> None:
    alarm = Alarm()
    assert not is_ringing(alarm, 0.0)
    alarm.ring_after(0.001)
    assert is_ringing(alarm, 60.0) and is_ringing(alarm, 0.0)
    alarm.silence()
    assert not is_ringing(alarm, 0.0)
    alarm.ring_after(1e-12)
    assert is_ringing(alarm, 60.0)
    alarm.ring_after(3600.5)
    assert not is_ringing(alarm, 0.0)
    alarm.close()


def test_an_alarm_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    alarm = Alarm()
    os.close(alarm.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        alarm.ring_after(1.0)
