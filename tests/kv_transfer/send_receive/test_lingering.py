"""Pairs that are dropped while writes are in flight that cannot be recalled, as with NIXL.

Such writes hold no source pages, and no message reports them as ended before they are.
"""

from support.couples import KEY, shipped
from support.kv_fakes import DECODE, PREFILL, Couple

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
from scripts.simulator.inprocess_transport import Wire


def in_flight(*others: RequestKey) -> Couple:
    """Start transfers of two pages each, with one irrevocable write of ``KEY`` in flight and no other."""
    couple = Couple(Wire(latency=3, can_recall=False))
    couple.connect()
    for key in (KEY, *others):
        couple.open(key, 2)
        couple.begin(key, 2)
        couple.hear_decode()
    couple.compute(KEY, 1)
    couple.pump()
    return couple


def test_irrevocable_writes_are_repeated_after_a_break_once_they_have_ended() -> None:
    """The end of such a write does not prove that its page arrived."""
    other = ("s", 0)
    couple = in_flight(other)
    couple.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_all=False, is_resumed=True)
    couple.settle()
    for _ in range(4):
        couple.tick()
    couple.pump()
    assert not couple.to_decode and not couple.released
    for key in (KEY, other):
        couple.finish(key)
    couple.sender._transport.detach(DECODE)  # as the negotiating transport does until this returns True
    couple.run()
    assert [type(couple.events[key]) for key in (KEY, other)] == [Completed] * 2
    assert couple.writer.written.count(couple.grants[KEY][0]) == 2
    assert couple.sender.counters()["pages_sent"] == 4
    couple.give_back(KEY)
    couple.give_back(other)
    couple.assert_nothing_is_held()


def test_a_lost_decode_node_holds_no_source_pages_despite_irrevocable_writes() -> None:
    """The write goes to pages in quarantine, which come back when it ends."""
    couple = in_flight()
    couple.sender.peer_lost(DECODE)
    couple.settle()
    assert not couple.released[KEY].ok
    assert couple.source_allocator.num_free == couple.num_pages
    couple.receiver.peer_lost(PREFILL)
    couple.settle()
    assert couple.allocator.count(Owner.QUARANTINE) == 2
    for _ in range(4):
        couple.tick()
    assert couple.writer.num_in_quarantine == 1
    couple.pump()
    couple.hear_prefill()  # Closed
    couple.assert_nothing_is_held()


def test_no_transfer_is_closed_while_irrevocable_writes_are_in_flight() -> None:
    """After ``Closed`` the decode node would give the pages to another request although they may still be written."""
    couple = in_flight()
    couple.sender.peer_lost(DECODE)
    couple.settle()
    couple.cancel(KEY)
    couple.hear_decode()  # Cancel
    couple.sender.reject(KEY, DECODE, "no", ErrorCode.TRANSFER_FAILED)
    couple.settle()
    assert not couple.to_decode
    for _ in range(4):
        couple.tick()
    couple.pump()
    assert [type(message) for message in couple.to_decode] == [Closed]
    couple.hear_prefill()
    couple.assert_nothing_is_held()


def chosen() -> Couple:
    """Like ``in_flight``, but with negotiation, which waits until a peer is detached."""
    couple = Couple(Wire(latency=3, can_recall=False))
    couple.sender = Sender(NegotiatingWriter([couple.writer]), digest="model")
    couple.receiver = Receiver(NegotiatingReader([couple.reader]), couple.allocator, digest="model")
    couple.connect()
    shipped(couple, 2)
    return couple


def test_writes_that_a_new_offer_voids_end_before_new_pages_are_granted() -> None:
    couple = chosen()
    couple.writer.voided = lambda *_: [couple.wire.tick() for _ in range(4)]  # type: ignore[method-assign,assignment,return-value]
    couple.reader.gone(couple.writer, "the pool was registered again")
    couple.poll()
    couple.now = BACKOFF_S
    couple.poll()
    couple.reader.writers[couple.writer] = (PREFILL, 1)  # the reader has not noticed yet
    couple.hear_decode()
    couple.drain_to_decode()
    assert [type(message) for message in couple.to_prefill] == [Grant]
    couple.hear_decode()  # without a poll of the prefill node in between
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_writes_that_have_ended_leave_nothing_of_their_transfer() -> None:
    """The new connection declares all earlier writes ended."""
    couple = chosen()
    couple.disconnect()
    for _ in range(4):
        couple.tick()
    couple.to_prefill.append(couple.receiver.connect(PREFILL))
    couple.hear_decode()
    assert [type(message) for message in couple.to_decode] == [Connected]
    couple.hear_prefill()
    assert not couple.sender._table.lingering
    couple.assert_nothing_is_held()


def test_a_request_aborted_after_a_break_holds_no_source_pages() -> None:
    couple = in_flight()
    couple.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_all=False, is_resumed=True)
    couple.sender.abort(KEY, "aborted")
    couple.settle()
    assert KEY in couple.released
    assert not couple.to_decode


def test_a_pair_that_breaks_after_an_abort_releases_the_source_pages() -> None:
    couple = in_flight()
    couple.sender.abort(KEY, "aborted")
    couple.settle()
    assert KEY not in couple.released, "the source pages were released while a write was in flight"
    couple.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_all=False, is_resumed=True)
    couple.settle()
    assert KEY in couple.released
    assert not couple.to_decode
