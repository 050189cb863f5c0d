"""A sender and a receiver that are connected, as most tests of transfers begin; a slow wire, and one that breaks."""

import pytest
from support.kv_fakes import DECODE, Couple

from common.request import RequestKey
from kv_transfer.events import TransferFailed
from scripts.simulator.inprocess_transport import Wire

KEY = ("r", 0)


@pytest.fixture
def couple() -> Couple:
    couple = Couple()
    couple.connect()
    return couple


def slow() -> Couple:
    """One page (64 bytes) a tick, and a tick of latency."""
    couple = Couple(Wire(latency=1, bytes_per_tick=64))
    couple.connect()
    return couple


def failure(couple: Couple, key: RequestKey = KEY) -> TransferFailed:
    event = couple.events[key]
    assert isinstance(event, TransferFailed)
    return event


def shipped(couple: Couple, num_pages: int) -> None:
    """A transfer whose pages and PrefillDone have been written and not reported yet."""
    couple.open(KEY, num_pages)
    couple.begin(KEY, num_pages)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()


def snap(couple: Couple) -> None:
    """The data connection breaks; both ends notice."""
    couple.writer.lose(DECODE, "a snap")
    couple.pump()
    couple.poll()


def halfway(couple: Couple) -> list[int]:
    """A transfer of four pages, of which one has arrived and a second is on its way."""
    couple.open(KEY, 4)
    pages = couple.begin(KEY, 4)
    couple.hear_decode()
    for num_pages in (1, 2):
        couple.compute(KEY, num_pages)
        couple.pump()
    couple.tick()
    couple.pump()
    assert couple.wire.num_in_flight == 1
    return pages
