"""A sender and a receiver that are connected, as most tests of transfers begin; and one whose wire is slow."""

import pytest
from kv_fakes import Couple

from kv_transfer.events import TransferFailed
from kv_transfer.session import Key
from kv_transfer.transports.inprocess import Wire

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


def failure(couple: Couple, key: Key = KEY) -> TransferFailed:
    event = couple.events[key]
    assert isinstance(event, TransferFailed)
    return event
