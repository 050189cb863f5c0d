"""A transfer that ends early gives its first pages to the role, as far as they have arrived, and no others."""

from support.kv.connected_pair import KEY, break_data_connection, half_written, slow
from support.kv.kv_fakes import PREFILL, TransferPair

from common.cache.page_allocator import Owner
from common.wire.messages import PagesWritten
from kv_transfer.receive.session import ReceiveSession


def assert_kept(pair: TransferPair, num_pages: int) -> None:
    """``TransferPair`` has compared the bytes of the kept pages and freed them; ``WatchedWriter`` checks each write."""
    assert pair.num_kept == num_pages
    assert pair.receiver.counters()["pages_kept"] == num_pages


def test_a_cancel_keeps_the_page_that_has_arrived_and_not_the_one_in_flight() -> None:
    pair = slow()
    half_written(pair)
    pair.drain_to_decode()
    pair.cancel(KEY)
    assert_kept(pair, 1)
    assert pair.allocator.count(Owner.QUARANTINE) == 3
    pair.finish(KEY)
    pair.run()
    pair.assert_nothing_is_held()


def test_a_lost_prefill_node_leaves_the_page_that_has_arrived() -> None:
    pair = slow()
    half_written(pair)
    pair.drain_to_decode()
    pair.disconnect()
    assert_kept(pair, 1)
    assert pair.allocator.count(Owner.QUARANTINE) == 3


def test_pages_behind_one_that_is_missing_are_not_kept(pair: TransferPair) -> None:
    pair.open(KEY, 4)
    pair.begin(KEY, 4)
    pair.hear_decode()
    pair.compute(KEY, 3)
    pair.pump()
    [written] = pair.to_decode
    assert isinstance(written, PagesWritten) and written.indices == (0, 1, 2)
    pair.to_decode.clear()
    for indices in ((0,), (2,)):
        pair.receiver.on_message(PREFILL, PagesWritten(*KEY, written.epoch, indices), 0.0)
    pair.cancel(KEY)
    assert_kept(pair, 1)
    pair.run()
    assert pair.allocator.count(Owner.QUARANTINE) == 0


def test_the_last_page_of_a_prompt_is_not_kept_since_it_is_not_full(pair: TransferPair) -> None:
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.hear_decode()
    pair.finish(KEY)
    pair.pump()
    while not isinstance(pair.to_decode[0], PagesWritten):
        pair.to_decode.popleft()  # PrefillDone is missing
    pair.hear_prefill()
    pair.to_decode.clear()
    pair.cancel(KEY)
    assert_kept(pair, 2)


def test_pages_of_a_connection_that_broke_are_kept_when_their_transfer_ends(pair: TransferPair) -> None:
    pair.open(KEY, 4)
    pair.begin(KEY, 4)
    pair.hear_decode()
    pair.compute(KEY, 2)
    pair.pump()
    pair.drain_to_decode()
    break_data_connection(pair)
    pair.cancel(KEY)
    assert_kept(pair, 2)
    assert pair.allocator.num_free == pair.num_pages, "no write can come under the broken connection"


def test_a_page_is_kept_only_with_all_of_its_units() -> None:
    session = ReceiveSession(KEY, PREFILL, first=1, pages=[7, 8, 9], length=14, page_size=4)
    session.grant(1, num_token_ranges=2)
    for unit in (0, 1):
        session.deliver([1], unit)
    session.deliver([2], 1)
    session.deliver([3], 0)  # the last page has two tokens, which are one unit
    session.check()
    assert session.take_arrived() == [7]
    assert (session.first, session.pages) == (2, [8, 9])
    session.check()


def test_a_damaged_page_that_was_asked_for_again_is_not_kept() -> None:
    session = ReceiveSession(KEY, PREFILL, first=0, pages=[7, 8], length=8, page_size=4)
    session.grant(1)
    assert session.corrupt([0], 0)
    session.deliver([1], 0)
    assert session.take_arrived() == []
