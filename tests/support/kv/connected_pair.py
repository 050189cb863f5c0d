"""A connected sender and receiver, and transfers in the states from which tests begin."""

from support.kv.kv_fakes import DECODE, TransferPair

from common.request import RequestKey
from kv_transfer.events import TransferFailed
from scripts.simulator.service.inprocess_transport import Wire

KEY = ("r", 0)


def slow() -> TransferPair:
    """Return a pair whose wire moves one page (64 bytes) a tick with a latency of one tick."""
    pair = TransferPair(Wire(latency=1, bytes_per_tick=64))
    pair.connect()
    return pair


def failure(pair: TransferPair, key: RequestKey = KEY) -> TransferFailed:
    event = pair.events[key]
    assert isinstance(event, TransferFailed)
    return event


def written_unreported(pair: TransferPair, num_pages: int) -> None:
    """Bring a transfer to where all pages and PrefillDone are written but not yet reported."""
    pair.open(KEY, num_pages)
    pair.begin(KEY, num_pages)
    pair.hear_decode()
    pair.finish(KEY)
    pair.pump()


def break_data_connection(pair: TransferPair) -> None:
    """Break the data connection; both ends notice."""
    pair.writer.lose(DECODE, "connection broken")
    pair.pump()
    pair.poll()


def half_written(pair: TransferPair) -> list[int]:
    """Begin a transfer of four pages, of which one has arrived and a second is in flight."""
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
