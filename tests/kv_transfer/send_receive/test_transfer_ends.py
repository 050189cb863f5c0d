"""Transfers that end early, at every point: by cancel, abort, lost connection or missing message."""

from collections.abc import Callable

import pytest
from support.kv.connected_pair import KEY, failure, slow, written_unreported
from support.kv.kv_fakes import PREFILL, TransferPair

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import AbortTransfer, Closed, CloseReason, PagesWritten, PrefillDone, TransferAck
from kv_transfer.events import Completed, Finished, TransferFailed
from kv_transfer.receive.table import RECLAIM_S
from kv_transfer.send import table as outgoing_module
from kv_transfer.send import tombstones as tombs_module
from kv_transfer.send.table import EARLY_LEASE_S
from kv_transfer.send.tombstones import LEASE_S

# ---- cancels ----------------------------------------------------------------------------------------------------


def _scripts() -> list[Callable[[TransferPair], object]]:
    """One transfer of four pages over a slow wire, one event at a time."""
    return [
        lambda c: c.begin(KEY, 4),
        lambda c: c.hear_decode(),
        lambda c: c.open(KEY, 4),
        lambda c: c.compute(KEY, 2),
        lambda c: c.pump(),
        lambda c: c.tick(),
        lambda c: c.tick(),
        lambda c: c.pump(),
        lambda c: c.hear_prefill() if c.to_decode else None,
        lambda c: c.tick(),
        lambda c: c.finish(KEY),
        lambda c: c.pump(),
        lambda c: c.hear_prefill(),
        lambda c: c.tick(),
        lambda c: c.tick(),
        lambda c: c.tick(),
        lambda c: c.pump(),
        lambda c: [c.hear_prefill() for _ in list(c.to_decode)],
        lambda c: c.hear_decode(),
    ]


POINTS = range(len(_scripts()) + 1)


@pytest.mark.parametrize("point", POINTS[1:])
def test_cancel_at_every_point(point: int) -> None:
    pair = slow()
    for act in _scripts()[:point]:
        act(pair)
    had_completed = KEY in pair.events
    pair.cancel(KEY)
    pair.run()
    assert (KEY in pair.events) == had_completed, "an event was reported after the cancel"
    if had_completed:
        pair.give_back(KEY)
    if KEY not in pair.source_pages:
        pair.open(KEY, 4)  # the request arrives late; no transfer may start
        pair.run()
    assert pair.released[KEY].ok == had_completed
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("reason", ["aborted", "failed", "finished"])
@pytest.mark.parametrize("point", POINTS)
def test_abort_at_every_point(point: int, reason: CloseReason) -> None:
    pair = slow()
    for act in _scripts()[:point]:
        act(pair)
    has_granted = KEY in pair.grants
    if KEY not in pair.source_pages:
        pair.open(KEY, 4)
    pair.sender.abort(KEY, reason, "because")
    pair.settle()
    pair.run()
    if not has_granted:
        pair.begin(KEY, 4)
        pair.run()
    event = pair.events[KEY]
    if isinstance(event, Completed):
        pair.give_back(KEY)
    elif reason == "finished":
        assert event == Finished(KEY)
    else:
        code = ErrorCode.ABORTED if reason == "aborted" else ErrorCode.TRANSFER_FAILED
        assert event == TransferFailed(KEY, code, "because")
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("point", POINTS)
def test_a_lost_connection_at_every_point(point: int) -> None:
    pair = slow()
    for act in _scripts()[:point]:
        act(pair)
    pair.disconnect()
    pair.poll()
    if KEY in pair.grants:
        event = pair.events[KEY]
        if isinstance(event, Completed):
            pair.give_back(KEY)
        else:
            assert failure(pair).code is ErrorCode.NODE_LOST
    if KEY not in pair.source_pages:
        pair.open(KEY, 4)
        pair.sender.abort(KEY, "aborted")
        pair.settle()
    pair.assert_nothing_is_held()
    pair.connect()
    other = ("r", 1)
    pair.open(other, 4)
    pair.begin(other, 4)
    pair.finish(other)
    pair.run()
    assert isinstance(pair.events[other], Completed)


def test_pages_that_stay_in_quarantine_too_long_are_reclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = slow()
    reclaimed: list[tuple[str, int]] = []
    monkeypatch.setattr(pair.reader, "reclaim", lambda *words: reclaimed.append(words))
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.finish(KEY)
    pair.receiver.poll(50.0)
    pair.receiver.cancel(KEY)
    for now in (100.0, 100.0 + RECLAIM_S - 0.1):
        pair.receiver.poll(now)
    assert reclaimed == []
    for now in (100.0 + RECLAIM_S, 101.0 + RECLAIM_S):
        pair.receiver.poll(now)
    assert reclaimed == [(PREFILL, 1), (PREFILL, 1)]
    pair.run()
    assert pair.allocator.count(Owner.QUARANTINE) == 0
    pair.receiver.poll(1_000.0)
    assert len(reclaimed) == 2


def test_cancelled_pages_stay_in_quarantine_until_the_writer_sends_closed() -> None:
    pair = slow()
    pair.open(KEY, 4)
    pair.begin(KEY, 4)
    pair.hear_decode()
    pair.compute(KEY, 3)
    pair.pump()
    pair.cancel(KEY)
    assert pair.allocator.count(Owner.QUARANTINE) == 4
    pair.now = 1e6  # a timeout alone frees nothing
    pair.poll()
    assert pair.allocator.count(Owner.QUARANTINE) == 4
    pair.hear_decode()
    assert not pair.to_decode  # three writes are in flight: not closed yet, and the source pages are still held
    assert KEY not in pair.released
    for _ in range(2):
        pair.tick()
        pair.pump()
        assert pair.allocator.count(Owner.QUARANTINE) == 4
        assert not pair.to_decode
    pair.tick()
    assert pair.writer.num_in_quarantine == 3
    pair.pump()
    assert list(pair.to_decode) == [Closed("r", 0, "cancelled", "the decode node does not want it any more")]
    assert not pair.released[KEY].ok
    pair.hear_prefill()
    pair.assert_nothing_is_held()
    assert pair.receiver.counters()["pages_quarantined"] == 4


def test_late_messages_of_a_cancelled_transfer_are_ignored(pair: TransferPair) -> None:
    written_unreported(pair, 2)
    assert [type(message) for message in pair.to_decode] == [PrefillDone, PagesWritten]
    pair.cancel(KEY)
    pair.hear_prefill()
    pair.hear_prefill()
    assert pair.allocator.count(Owner.QUARANTINE) == 2
    assert pair.receiver.counters()["stale_messages"] == 2
    assert pair.target.num_landed == 0
    pair.run()
    assert KEY not in pair.events
    pair.assert_nothing_is_held()


def test_pages_that_were_never_granted_are_free_at_once() -> None:
    pair = TransferPair()
    pair.begin(KEY, 3)
    pair.cancel(KEY)
    pair.assert_nothing_is_held()
    pair.begin(("s", 0), 3)
    pair.receiver.peer_lost(PREFILL)
    pair.settle()
    assert failure(pair, ("s", 0)).code is ErrorCode.NODE_LOST
    pair.assert_nothing_is_held()


def test_a_cancel_drops_an_event_that_was_not_taken(pair: TransferPair) -> None:
    written_unreported(pair, 2)
    while pair.to_decode:
        pair.receiver.on_message(PREFILL, pair.to_decode.popleft(), 0.0)
    pair.receiver.cancel(KEY)
    messages, events = pair.receiver.take()
    assert messages == [(PREFILL, TransferAck("r", 0))]
    assert events == []
    assert pair.allocator.num_free == pair.num_pages


def test_a_request_cancelled_before_it_is_known_is_never_written(pair: TransferPair) -> None:
    pair.to_prefill.append(AbortTransfer("r", 0))
    pair.hear_decode()
    assert pair.to_decode.pop() == Closed("r", 0, "cancelled", "cancelled before the request was known")
    pair.open(KEY, 2)
    assert not pair.released[KEY].ok
    pair.compute(KEY, 1)
    pair.finish(KEY)
    pair.begin(KEY, 2)
    pair.run()
    assert failure(pair).code is ErrorCode.ABORTED
    assert not pair.writer.written


# ---- leases -----------------------------------------------------------------------------------------------------


def test_a_grant_for_a_request_that_never_arrives_is_closed_when_its_lease_expires(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    pair.run()
    pair.now = EARLY_LEASE_S - 0.1
    pair.run()
    assert KEY not in pair.events
    pair.now = EARLY_LEASE_S
    pair.run()
    assert failure(pair).message == "the request did not come within 30 s of the grant"
    pair.open(KEY, 2)
    assert not pair.released[KEY].ok
    pair.assert_nothing_is_held()


def test_a_request_whose_early_grant_ended_with_its_pair_is_released_on_arrival(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    pair.run()
    pair.disconnect()
    pair.open(KEY, 2)
    assert not pair.released[KEY].ok


def test_tombstones_expire(pair: TransferPair) -> None:
    pair.to_prefill.append(AbortTransfer("r", 0))
    pair.hear_decode()
    pair.now = LEASE_S
    pair.pump()
    pair.open(KEY, 2)
    assert KEY not in pair.released


def test_tombstones_and_early_grants_are_bounded(pair: TransferPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombs_module, "MAX_TOMBSTONES", 3)
    monkeypatch.setattr(outgoing_module, "MAX_EARLY", 2)
    for attempt in range(10):
        pair.to_prefill.append(AbortTransfer("c", attempt))
        pair.hear_decode()
    assert len(pair.sender._table.tombstones) == 3
    for attempt in range(3):
        pair.begin(("g", attempt), 1)
    pair.run()
    assert failure(pair, ("g", 2)).message == "2 grants already wait for their requests"
    assert ("g", 1) not in pair.events
    assert pair.sender.counters()["refused_grants"] == 1
