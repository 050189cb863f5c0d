"""Writes that cannot be called back, as NIXL's, when their pair is dropped.

They hold no source pages, and no message says that they are over before they are.
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
    """A transfer of two pages with one on its way that cannot be called back, and others of which nothing is."""
    couple = Couple(Wire(latency=3, can_recall=False))
    couple.connect()
    for key in (KEY, *others):
        couple.open(key, 2)
        couple.begin(key, 2)
        couple.hear_decode()
    couple.compute(KEY, 1)
    couple.pump()
    return couple


def test_writes_that_cannot_be_called_back_are_retried_after_a_break_once_they_are_over() -> None:
    """That they are over says nothing of whether they have come."""
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
    couple.sender._transport.detach(DECODE)  # as the choice of transports does, until it is let go
    couple.run()
    assert [type(couple.events[key]) for key in (KEY, other)] == [Completed] * 2
    assert couple.writer.written.count(couple.grants[KEY][0]) == 2
    assert couple.sender.counters()["pages_sent"] == 4
    couple.give_back(KEY)
    couple.give_back(other)
    couple.assert_nothing_is_held()


def test_a_lost_decode_node_holds_no_source_pages_though_writes_to_it_cannot_be_called_back() -> None:
    """What they read now goes to pages in quarantine, which come back when it is over."""
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


def test_no_transfer_is_closed_while_such_writes_are_under_way() -> None:
    """After ``Closed`` the decode node would give the pages to another request, although they may still be written."""
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
    """As ``in_flight``, through the choice of transports, which waits where letting go must."""
    couple = Couple(Wire(latency=3, can_recall=False))
    couple.sender = Sender(NegotiatingWriter([couple.writer]), digest="model")
    couple.receiver = Receiver(NegotiatingReader([couple.reader]), couple.allocator, digest="model")
    couple.connect()
    shipped(couple, 2)
    return couple


def test_writes_that_a_new_offer_voids_end_before_pages_are_granted_under_it() -> None:
    couple = chosen()
    couple.writer.voided = lambda *_: [couple.wire.tick() for _ in range(4)]  # type: ignore[method-assign,assignment,return-value]
    couple.reader.gone(couple.writer, "the pool was registered again")
    couple.poll()
    couple.now = BACKOFF_S
    couple.poll()
    couple.reader.writers[couple.writer] = (PREFILL, 1)  # it has not heard of that
    couple.hear_decode()
    couple.drain_to_decode()
    assert [type(message) for message in couple.to_prefill] == [Grant]
    couple.hear_decode()  # with no turn of the prefill node in between
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_writes_that_are_known_to_be_over_leave_nothing_of_their_transfer() -> None:
    """The new connection says it of all of them."""
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


def test_a_request_that_is_called_off_after_such_a_break_holds_nothing() -> None:
    couple = in_flight()
    couple.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_all=False, is_resumed=True)
    couple.sender.abort(KEY, "aborted")
    couple.settle()
    assert KEY in couple.released
    assert not couple.to_decode


def test_a_pair_that_breaks_after_a_request_was_called_off_holds_nothing_of_it() -> None:
    couple = in_flight()
    couple.sender.abort(KEY, "aborted")
    couple.settle()
    assert KEY not in couple.released, "its page will soon have been read"
    couple.sender._sever(DECODE, TransferEnd("failed", "a snap"), is_all=False, is_resumed=True)
    couple.settle()
    assert KEY in couple.released
    assert not couple.to_decode
