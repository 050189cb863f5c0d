"""A sender and a receiver that are connected, as most tests of transfers begin; a slow wire, and one that breaks."""

import pytest
from support.kv_fakes import DECODE, TransferPair

from common.request import RequestKey
from kv_transfer.events import TransferFailed
from scripts.simulator.inprocess_transport import Wire

KEY = ("r", 0)


@pytest.fixture
def pair() -> TransferPair:
    pair = TransferPair()
    pair.connect()
    return pair


def slow() -> TransferPair:
    """One page (64 bytes) a tick, and a tick of latency."""
    pair = TransferPair(Wire(latency=1, bytes_per_tick=64))
    pair.connect()
    return pair


def failure(pair: TransferPair, key: RequestKey = KEY) -> TransferFailed:
    event = pair.events[key]
    assert isinstance(event, TransferFailed)
    return event


def written_unreported(pair: TransferPair, num_pages: int) -> None:
    """A transfer whose pages and PrefillDone have been written and not reported yet."""
    pair.open(KEY, num_pages)
    pair.begin(KEY, num_pages)
    pair.hear_decode()
    pair.finish(KEY)
    pair.pump()


def break_data_connection(pair: TransferPair) -> None:
    """The data connection breaks; both ends notice."""
    pair.writer.lose(DECODE, "a snap")
    pair.pump()
    pair.poll()


def half_written(pair: TransferPair) -> list[int]:
    """A transfer of four pages, of which one has arrived and a second is on its way."""
    pair.open(KEY, 4)
    pages = pair.begin(KEY, 4)
    pair.hear_decode()
    for num_pages in (1, 2):
        pair.compute(KEY, num_pages)
        pair.pump()
    pair.tick()
    pair.pump()
    assert pair.wire.num_in_flight == 1
    return pages
