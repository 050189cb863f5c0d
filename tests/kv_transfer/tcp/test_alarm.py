"""The timer with a descriptor."""

import ctypes
import errno
import os
import select
from types import SimpleNamespace

import pytest
from support.kv.kv_fakes import MemfdStore

from common.errors import ConfigError
from kv_transfer.transports.tcp import TcpWriter
from kv_transfer.transports.tcp import alarm as alarm_module
from kv_transfer.transports.tcp.alarm import Alarm


def has_gone_off(alarm: Alarm, within_s: float) -> bool:
    return bool(select.select([alarm], [], [], within_s)[0])


def refuse_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel refuse every timer, as it does when a process has no descriptor left."""

    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.EMFILE)
        return -1

    monkeypatch.setattr(alarm_module.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(timerfd_create=refuse))


def test_an_alarm_goes_off_once_until_it_is_disarmed() -> None:
    alarm = Alarm()
    assert not has_gone_off(alarm, 0.0)
    alarm.arm(0.001)
    assert has_gone_off(alarm, 60.0) and has_gone_off(alarm, 0.0)
    alarm.disarm()
    assert not has_gone_off(alarm, 0.0)
    alarm.arm(1e-12)
    assert has_gone_off(alarm, 60.0)
    alarm.arm(3600.5)
    assert not has_gone_off(alarm, 0.0)
    alarm.close()


def test_an_alarm_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_timers(monkeypatch)
    with pytest.raises(OSError, match="Too many open files"):
        Alarm()


def test_an_alarm_that_is_closed_twice_closes_no_other_file() -> None:
    alarm = Alarm()
    number = alarm.fileno()
    alarm.close()
    other = os.dup2(os.eventfd(0), number)
    alarm.close()
    os.fstat(other)  # would raise
    os.close(other)


def test_a_transport_without_a_timer_says_what_to_do_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_timers(monkeypatch)
    store = MemfdStore(num_pages=1)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=r"--transport tcp: cannot make a timer \(Too many open files\).*ulimit -n"):
        TcpWriter(store)
    assert set(os.listdir("/proc/self/fd")) <= set(before)
