"""Transfers that end early, at every point: by cancel, abort, lost connection or missing message."""

from collections.abc import Callable

import pytest
from support.couples import KEY, couple, failure, shipped, slow
from support.kv_fakes import PREFILL, Couple

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import AbortTransfer, Closed, PagesWritten, PrefillDone, TransferAck
from kv_transfer.events import Completed, Finished, TransferFailed
from kv_transfer.receive.table import RECLAIM_S
from kv_transfer.send import table as outgoing_module
from kv_transfer.send import tombstones as tombs_module
from kv_transfer.send.table import EARLY_LEASE_S
from kv_transfer.send.tombstones import LEASE_S, Reason

__all__ = ["couple"]


# ---- cancels ----------------------------------------------------------------------------------------------------


def _scripts() -> list[Callable[[Couple], object]]:
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
    couple = slow()
    for act in _scripts()[:point]:
        act(couple)
    had_completed = KEY in couple.events
    couple.cancel(KEY)
    couple.run()
    assert (KEY in couple.events) == had_completed, "an event was reported after the cancel"
    if had_completed:
        couple.give_back(KEY)
    if KEY not in couple.source_pages:
        couple.open(KEY, 4)  # the request arrives late; no transfer may start
        couple.run()
    assert couple.released[KEY].ok == had_completed
    couple.assert_nothing_is_held()


@pytest.mark.parametrize("reason", ["aborted", "failed", "finished"])
@pytest.mark.parametrize("point", POINTS)
def test_abort_at_every_point(point: int, reason: Reason) -> None:
    couple = slow()
    for act in _scripts()[:point]:
        act(couple)
    has_granted = KEY in couple.grants
    if KEY not in couple.source_pages:
        couple.open(KEY, 4)
    couple.sender.abort(KEY, reason, "because")
    couple.settle()
    couple.run()
    if not has_granted:
        couple.begin(KEY, 4)
        couple.run()
    event = couple.events[KEY]
    if isinstance(event, Completed):
        couple.give_back(KEY)
    elif reason == "finished":
        assert event == Finished(KEY)
    else:
        code = ErrorCode.ABORTED if reason == "aborted" else ErrorCode.TRANSFER_FAILED
        assert event == TransferFailed(KEY, code, "because")
    couple.assert_nothing_is_held()


@pytest.mark.parametrize("point", POINTS)
def test_a_lost_connection_at_every_point(point: int) -> None:
    couple = slow()
    for act in _scripts()[:point]:
        act(couple)
    couple.disconnect()
    couple.poll()
    if KEY in couple.grants:
        event = couple.events[KEY]
        if isinstance(event, Completed):
            couple.give_back(KEY)
        else:
            assert failure(couple).code is ErrorCode.NODE_LOST
    if KEY not in couple.source_pages:
        couple.open(KEY, 4)
        couple.sender.abort(KEY, "aborted")
        couple.settle()
    couple.assert_nothing_is_held()
    couple.connect()
    other = ("r", 1)
    couple.open(other, 4)
    couple.begin(other, 4)
    couple.finish(other)
    couple.run()
    assert isinstance(couple.events[other], Completed)


def test_pages_that_stay_in_quarantine_too_long_are_reclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    couple = slow()
    reclaimed: list[tuple[str, int]] = []
    monkeypatch.setattr(couple.reader, "reclaim", lambda *words: reclaimed.append(words))
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.finish(KEY)
    couple.receiver.poll(50.0)
    couple.receiver.cancel(KEY)
    for now in (100.0, 100.0 + RECLAIM_S - 0.1):
        couple.receiver.poll(now)
    assert reclaimed == []
    for now in (100.0 + RECLAIM_S, 101.0 + RECLAIM_S):
        couple.receiver.poll(now)
    assert reclaimed == [(PREFILL, 1), (PREFILL, 1)]
    couple.run()
    assert couple.allocator.count(Owner.QUARANTINE) == 0
    couple.receiver.poll(1_000.0)
    assert len(reclaimed) == 2


def test_cancelled_pages_stay_in_quarantine_until_the_writer_sends_closed() -> None:
    couple = slow()
    couple.open(KEY, 4)
    couple.begin(KEY, 4)
    couple.hear_decode()
    couple.compute(KEY, 3)
    couple.pump()
    couple.cancel(KEY)
    assert couple.allocator.count(Owner.QUARANTINE) == 4
    couple.now = 1e6  # a timeout alone frees nothing
    couple.poll()
    assert couple.allocator.count(Owner.QUARANTINE) == 4
    couple.hear_decode()
    assert not couple.to_decode  # three writes are in flight: not closed yet, and the source pages are still held
    assert KEY not in couple.released
    for _ in range(2):
        couple.tick()
        couple.pump()
        assert couple.allocator.count(Owner.QUARANTINE) == 4
        assert not couple.to_decode
    couple.tick()
    assert couple.writer.num_in_quarantine == 3
    couple.pump()
    assert list(couple.to_decode) == [Closed("r", 0, "cancelled", "the decode node does not want it any more")]
    assert not couple.released[KEY].ok
    couple.hear_prefill()
    couple.assert_nothing_is_held()
    assert couple.receiver.counters()["pages_quarantined"] == 4


def test_late_messages_of_a_cancelled_transfer_are_ignored(couple: Couple) -> None:
    shipped(couple, 2)
    assert [type(message) for message in couple.to_decode] == [PrefillDone, PagesWritten]
    couple.cancel(KEY)
    couple.hear_prefill()
    couple.hear_prefill()
    assert couple.allocator.count(Owner.QUARANTINE) == 2
    assert couple.receiver.counters()["stale_messages"] == 2
    assert couple.target.num_landed == 0
    couple.run()
    assert KEY not in couple.events
    couple.assert_nothing_is_held()


def test_pages_that_were_never_granted_are_free_at_once() -> None:
    couple = Couple()
    couple.begin(KEY, 3)
    couple.cancel(KEY)
    couple.assert_nothing_is_held()
    couple.begin(("s", 0), 3)
    couple.receiver.peer_lost(PREFILL)
    couple.settle()
    assert failure(couple, ("s", 0)).code is ErrorCode.NODE_LOST
    couple.assert_nothing_is_held()


def test_a_cancel_drops_an_event_that_was_not_taken(couple: Couple) -> None:
    shipped(couple, 2)
    while couple.to_decode:
        couple.receiver.on_message(PREFILL, couple.to_decode.popleft(), 0.0)
    couple.receiver.cancel(KEY)
    messages, events = couple.receiver.take()
    assert messages == [(PREFILL, TransferAck("r", 0))]
    assert events == []
    assert couple.allocator.num_free == couple.num_pages


def test_a_request_cancelled_before_it_is_known_is_never_written(couple: Couple) -> None:
    couple.to_prefill.append(AbortTransfer("r", 0))
    couple.hear_decode()
    assert couple.to_decode.pop() == Closed("r", 0, "cancelled", "cancelled before the request was known")
    couple.open(KEY, 2)
    assert not couple.released[KEY].ok
    couple.compute(KEY, 1)
    couple.finish(KEY)
    couple.begin(KEY, 2)
    couple.run()
    assert failure(couple).code is ErrorCode.ABORTED
    assert not couple.writer.written


# ---- leases -----------------------------------------------------------------------------------------------------


def test_a_grant_for_a_request_that_never_arrives_is_closed_when_its_lease_expires(couple: Couple) -> None:
    couple.begin(KEY, 2)
    couple.run()
    couple.now = EARLY_LEASE_S - 0.1
    couple.run()
    assert KEY not in couple.events
    couple.now = EARLY_LEASE_S
    couple.run()
    assert failure(couple).message == "the request did not come within 30 s of the grant"
    couple.open(KEY, 2)
    assert not couple.released[KEY].ok
    couple.assert_nothing_is_held()


def test_a_request_whose_early_grant_ended_with_its_pair_is_released_on_arrival(couple: Couple) -> None:
    couple.begin(KEY, 2)
    couple.run()
    couple.disconnect()
    couple.open(KEY, 2)
    assert not couple.released[KEY].ok


def test_tombstones_expire(couple: Couple) -> None:
    couple.to_prefill.append(AbortTransfer("r", 0))
    couple.hear_decode()
    couple.now = LEASE_S
    couple.pump()
    couple.open(KEY, 2)
    assert KEY not in couple.released


def test_tombstones_and_early_grants_are_bounded(couple: Couple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombs_module, "MAX_TOMBSTONES", 3)
    monkeypatch.setattr(outgoing_module, "MAX_EARLY", 2)
    for attempt in range(10):
        couple.to_prefill.append(AbortTransfer("c", attempt))
        couple.hear_decode()
    assert len(couple.sender._table.tombstones) == 3
    for attempt in range(3):
        couple.begin(("g", attempt), 1)
    couple.run()
    assert failure(couple, ("g", 2)).message == "2 grants already wait for their requests"
    assert ("g", 1) not in couple.events
    assert couple.sender.counters()["refused_grants"] == 1
