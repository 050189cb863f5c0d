"""Transfers that do not continue after a broken data connection: cancels, aborts, deaths and failed retries."""

import pytest
from support.couples import KEY, halfway, shipped, slow, snap
from support.kv_fakes import DECODE, PREFILL, Couple, owner_of

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import Connect, Refused, Resend
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.receive.connections import ANSWER_S, BACKOFF_S, MAX_TRIES
from kv_transfer.states import RESUME_LEASE_S
from kv_transfer.transports.base import Fenced
from scripts.simulator.inprocess_transport import Fault, Wire


@pytest.fixture
def couple() -> Couple:
    return slow()


def test_a_cancel_during_a_break_frees_the_pages_at_once(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.cancel(KEY)
    assert couple.allocator.num_free == couple.num_pages
    couple.run()
    assert not couple.released[KEY].ok
    couple.assert_nothing_is_held()


def test_an_abort_during_a_break_reaches_the_other_side(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.sender.abort(KEY, "aborted", "because")
    couple.settle()
    couple.run()
    assert couple.events[KEY] == TransferFailed(KEY, ErrorCode.ABORTED, "because")
    couple.assert_nothing_is_held()


def test_pages_of_a_cancelled_transfer_leave_quarantine_at_the_break(couple: Couple) -> None:
    halfway(couple)
    couple.cancel(KEY)
    assert couple.allocator.count(Owner.QUARANTINE) == 4
    couple.to_prefill.clear()  # the message is delayed
    snap(couple)
    assert couple.allocator.count(Owner.QUARANTINE) == 0


def test_a_connection_that_always_breaks_ends_in_an_error_that_names_pair_and_transport() -> None:
    couple = Couple(Wire(faults={n: Fault("drop") for n in range(50)}))
    couple.connect("prefill-7")
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.finish(KEY)
    couple.run()
    why = (
        "inprocess from prefill node prefill-7 to decode node decode-0 broke and could not be mended in 4 tries: "
        "the writer has detached"
    )
    assert couple.events[KEY] == TransferFailed(KEY, ErrorCode.TRANSFER_FAILED, why)
    assert couple.pairs_lost == 0
    assert couple.receiver.counters()["broken_pairs"] == MAX_TRIES + 1
    couple.assert_nothing_is_held()
    assert couple.receiver.is_connected(PREFILL), "the pool was not offered again"


@pytest.mark.parametrize("is_silent", [True, False], ids=["silence", "refusal"])
def test_a_refused_or_unanswered_retry_counts_as_failed(couple: Couple, is_silent: bool) -> None:
    halfway(couple)
    snap(couple)
    num_connects = 0
    for _ in range(200):
        couple.now += 0.5
        couple.poll()
        if couple.to_prefill and isinstance(couple.to_prefill.popleft(), Connect):
            num_connects += KEY not in couple.events
            if not is_silent:
                couple.to_decode.appendleft(Refused("no way there", couple.receiver._connections.epoch))
                couple.hear_prefill()
    assert num_connects == MAX_TRIES
    event = couple.events[KEY]
    assert isinstance(event, TransferFailed)
    assert event.message.endswith("it did not answer" if is_silent else "no way there")
    assert [pair.problem for pair in couple.receiver.pairs()] != [""], "the pair was not reported as failed"
    assert couple.allocator.num_free == couple.num_pages


def test_a_prefill_node_gives_up_when_no_new_connection_comes(couple: Couple) -> None:
    halfway(couple)
    couple.writer.lose(DECODE, "a snap")
    couple.pump()
    assert couple.sender.peers() == [DECODE]
    couple.now = RESUME_LEASE_S + 1
    couple.pump()
    reason = couple.released[KEY].reason
    assert reason.startswith("the wire to") and reason.endswith("no new connection within 60 s")


def test_the_death_of_a_writer_is_not_retried(couple: Couple) -> None:
    halfway(couple)
    couple.writer.die()
    couple.poll()
    assert couple.pairs_lost == 1
    event = couple.events[KEY]
    assert isinstance(event, TransferFailed) and event.code is ErrorCode.NODE_LOST
    assert couple.allocator.num_free == couple.num_pages


def test_a_fence_of_an_offer_that_was_never_used_counts_as_a_break(couple: Couple) -> None:
    """A late answer to that offer is ignored."""
    late = Couple()
    late.begin(KEY, 2)
    connect = late.receiver.connect(PREFILL)
    late.sender.on_message(DECODE, connect, 0.0)
    late.settle()
    late.reader._news.append(Fenced(PREFILL, connect.epoch, "cut"))
    late.poll()
    late.hear_prefill()  # Connected
    assert not late.receiver.is_connected(PREFILL)
    late.open(KEY, 2)
    late.finish(KEY)
    late.run()
    assert isinstance(late.events[KEY], Completed)


def test_a_break_before_a_resend_resets_the_resend_count_at_both_ends() -> None:
    """Otherwise the decode node waits for a resend of a page that the prefill node is to write for the first time."""
    couple = Couple(Wire(faults={0: Fault("corrupt")}), wants_checksums=(True, True))
    couple.connect()
    shipped(couple, 2)
    couple.drain_to_decode()
    assert [type(message) for message in couple.to_prefill] == [Resend]
    snap(couple)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def turns(couple: Couple) -> None:
    """Run a few turns of both nodes, even if something stays in flight."""
    for _ in range(5):
        couple.poll()
        couple.pump()
        couple.drain_to_prefill()
        couple.drain_to_decode()


def test_a_break_without_a_fence_ends_the_transfers_and_keeps_the_pages_in_quarantine() -> None:
    """This is a NIXL break between two hosts: the decode node does not see it and must not keep granting pages."""
    couple = Couple(Wire(faults={0: Fault("drop"), 1: Fault("delay", 10**6)}, can_recall=False))
    couple.connect()
    reclaimed: list[tuple[str, int]] = []
    couple.reader.reclaim = lambda *what: reclaimed.append(what)  # type: ignore[method-assign]
    other, later = ("s", 0), ("t", 0)
    for key in (KEY, other):
        couple.open(key, 1)
        couple.begin(key, 1)
        couple.hear_decode()
        couple.finish(key)
    couple.pump()  # the first write breaks the connection while the second is in flight
    turns(couple)
    couple.open(later, 1)
    couple.begin(later, 1)
    couple.now = ANSWER_S - 0.1
    turns(couple)
    assert not couple.events, "pages were reclaimed although their transfers may be retried"
    assert set(reclaimed) == {(PREFILL, 1)}
    couple.now = ANSWER_S
    turns(couple)
    assert couple.pairs_lost == 1
    assert [couple.events[key].code for key in (KEY, other, later)] == [ErrorCode.NODE_LOST] * 3
    assert couple.allocator.count(Owner.QUARANTINE) == 2, "pages left quarantine although they may still be written"
    assert owner_of(couple.allocator, couple.grants[other][0], Owner.QUARANTINE) is Owner.QUARANTINE


def test_a_break_whose_writes_are_fenced_in_time_is_resumed() -> None:
    couple = Couple(Wire(faults={0: Fault("drop"), 1: Fault("delay", 3)}, can_recall=False))
    couple.connect()
    other, later = ("s", 0), ("t", 0)
    for key in (KEY, other):
        couple.open(key, 1)
        couple.begin(key, 1)
        couple.hear_decode()
        couple.finish(key)
    couple.pump()
    couple.run()
    couple.open(later, 1)
    couple.begin(later, 1)
    couple.finish(later)
    for _ in range(4):
        couple.tick()
    couple.pump()
    couple.sender._transport.detach(DECODE)  # as the negotiating transport does until this returns True
    couple.run()
    couple.now += BACKOFF_S
    couple.run()
    assert isinstance(couple.events[later], Completed)
    assert couple.allocator.count(Owner.QUARANTINE) == 0
