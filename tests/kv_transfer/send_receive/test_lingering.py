"""Pairs that are dropped while writes are in flight that cannot be recalled, as with NIXL.

Such writes hold no source pages, and no message reports them as ended before they are.
"""

from support.cluster.manual_clock import ManualClock
from support.kv.connected_pair import KEY, written_unreported
from support.kv.kv_fakes import DECODE, PREFILL, TransferPair

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.request import RequestKey
from common.wire.messages import Closed, Connected, Grant
from kv_transfer.events import Completed
from kv_transfer.receive.connections import BACKOFF_S
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.send.tombstones import TransferEnd
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter
from scripts.simulator.service.inprocess_transport import Wire


def in_flight(*others: RequestKey) -> TransferPair:
    """Start transfers of two pages each, with one irrevocable write of ``KEY`` in flight and no other."""
    pair = TransferPair(Wire(latency=3, can_recall=False))
    pair.connect()
    for key in (KEY, *others):
        pair.open(key, 2)
        pair.begin(key, 2)
        pair.hear_decode()
    pair.compute(KEY, 1)
    pair.pump()
    return pair


def test_irrevocable_writes_are_repeated_after_a_break_once_they_have_ended() -> None:
    """The end of such a write does not prove that its page arrived."""
    other = ("s", 0)
    pair = in_flight(other)
    pair.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_resumed=True)
    pair.settle()
    for _ in range(4):
        pair.tick()
    pair.pump()
    assert not pair.to_decode and not pair.released
    for key in (KEY, other):
        pair.finish(key)
    pair.sender._transport.detach(DECODE)  # as the negotiating transport does until this returns True
    pair.run()
    assert [type(pair.events[key]) for key in (KEY, other)] == [Completed] * 2
    assert pair.writer.written.count(pair.grants[KEY][0]) == 2
    assert pair.sender.counters()["pages_sent"] == 4
    pair.give_back(KEY)
    pair.give_back(other)
    pair.assert_nothing_is_held()


def test_a_lost_decode_node_holds_no_source_pages_despite_irrevocable_writes() -> None:
    """The write goes to pages in quarantine, which come back when it ends."""
    pair = in_flight()
    pair.sender.peer_lost(DECODE)
    pair.settle()
    assert not pair.released[KEY].ok
    assert pair.source_allocator.num_free == pair.num_pages
    pair.receiver.peer_lost(PREFILL)
    pair.settle()
    assert pair.allocator.count(Owner.QUARANTINE) == 2
    for _ in range(4):
        pair.tick()
    assert pair.writer.num_in_quarantine == 1
    pair.pump()
    pair.hear_prefill()  # Closed
    pair.assert_nothing_is_held()


def test_the_time_of_irrevocable_writes_ends_with_their_pair() -> None:
    """Those to a node that died on another host never end. The throughput of later writes is measured all the same."""
    pair = TransferPair(Wire(latency=3, can_recall=False))
    clock = ManualClock()
    pair.sender = Sender(pair.writer, digest="model", clock=clock)
    pair.connect()
    written_unreported(pair, 2)
    clock.advance(2.0)
    pair.sender.peer_lost(DECODE)
    clock.advance(1_000.0)
    for _ in range(4):
        pair.tick()
    pair.pump()
    totals = pair.sender.counters()
    assert totals["transfer_seconds_by_inprocess"] == 2.0
    assert totals["bytes_sent"] == 0


def test_no_transfer_is_closed_while_irrevocable_writes_are_in_flight() -> None:
    """After ``Closed`` the decode node would give the pages to another request although they may still be written."""
    pair = in_flight()
    pair.sender.peer_lost(DECODE)
    pair.settle()
    pair.cancel(KEY)
    pair.hear_decode()  # Cancel
    pair.sender.reject(KEY, DECODE, "no", ErrorCode.TRANSFER_FAILED)
    pair.settle()
    assert not pair.to_decode
    for _ in range(4):
        pair.tick()
    pair.pump()
    assert [type(message) for message in pair.to_decode] == [Closed]
    pair.hear_prefill()
    pair.assert_nothing_is_held()


def chosen() -> TransferPair:
    """Like ``in_flight``, but with negotiation, which waits until a peer is detached."""
    pair = TransferPair(Wire(latency=3, can_recall=False))
    pair.sender = Sender(NegotiatingWriter([pair.writer]), digest="model")
    pair.receiver = Receiver(NegotiatingReader([pair.reader]), pair.allocator, digest="model")
    pair.connect()
    written_unreported(pair, 2)
    return pair


def test_writes_that_a_new_offer_voids_end_before_new_pages_are_granted() -> None:
    pair = chosen()
    pair.writer.voided = lambda *_: [pair.wire.tick() for _ in range(4)]  # type: ignore[method-assign,assignment,return-value]
    pair.reader.gone(pair.writer, "the pool was registered again")
    pair.poll()
    pair.now = BACKOFF_S
    pair.poll()
    pair.reader.writers[pair.writer] = (PREFILL, 1)  # the reader has not noticed yet
    pair.hear_decode()
    pair.drain_to_decode()
    assert [type(message) for message in pair.to_prefill] == [Grant]
    pair.hear_decode()  # without a poll of the prefill node in between
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_writes_that_have_ended_leave_nothing_of_their_transfer() -> None:
    """The new connection declares all earlier writes ended."""
    pair = chosen()
    pair.disconnect()
    for _ in range(4):
        pair.tick()
    pair.to_prefill.append(pair.receiver.connect(PREFILL))
    pair.hear_decode()
    assert [type(message) for message in pair.to_decode] == [Connected]
    pair.hear_prefill()
    assert not pair.sender._table.lingering
    pair.assert_nothing_is_held()


def test_a_request_aborted_after_a_break_holds_no_source_pages() -> None:
    pair = in_flight()
    pair.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_resumed=True)
    pair.sender.abort(KEY, "aborted")
    pair.settle()
    assert KEY in pair.released
    assert not pair.to_decode


def test_a_pair_that_breaks_after_an_abort_releases_the_source_pages() -> None:
    pair = in_flight()
    pair.sender.abort(KEY, "aborted")
    pair.settle()
    assert KEY not in pair.released, "the source pages were released while a write was in flight"
    pair.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_resumed=True)
    pair.settle()
    assert KEY in pair.released
    assert not pair.to_decode
