"""Attachments that fail: they are retried, and a pair that cannot transfer pages reports its problem."""

import logging

import pytest
from support.couples import KEY
from support.kv_fakes import DECODE, PREFILL, Couple

from common.wire.messages import AttachFailed, Connect, Connected, PairState, Refused
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.receive.connections import MAX_BACKOFF_S, MAX_TRIES

NO_WAY = "other bytes came back"


@pytest.fixture
def couple() -> Couple:
    """A couple whose pool has been offered once, in a message that the prefill node has not received yet."""
    couple = Couple()
    couple.receiver.connect(PREFILL, "prefill-0")
    return couple


def fail(couple: Couple) -> None:
    """Make the attachment of the last offer fail."""
    epoch = couple.receiver._connections.epoch
    couple.receiver.on_message(PREFILL, AttachFailed(epoch, NO_WAY), couple.now)
    couple.settle()


def next_offer(couple: Couple) -> Connect:
    """Advance the clock until the pool is offered again."""
    until = couple.now + 2 * MAX_BACKOFF_S
    while not couple.to_prefill:
        couple.now += 0.05
        assert couple.now < until, "the pool was not offered again"
        couple.poll()
    offer = couple.to_prefill.popleft()
    assert isinstance(offer, Connect)
    return offer


def attach(couple: Couple, offer: Connect) -> None:
    """Attach the prefill node to the last offer."""
    couple.sender.on_message(DECODE, offer, couple.now)
    couple.settle()
    couple.run()


def fail_all_tries(couple: Couple) -> None:
    fail(couple)
    for _ in range(MAX_TRIES):
        next_offer(couple)
        fail(couple)


def test_a_transfer_waits_while_attachments_are_retried(couple: Couple) -> None:
    couple.begin(KEY, 2)
    for _ in range(MAX_TRIES):
        fail(couple)
        offer = next_offer(couple)
    attach(couple, offer)
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    couple.give_back(KEY)
    couple.assert_nothing_is_held()


def test_waiting_transfers_fail_when_the_retries_are_exhausted(couple: Couple) -> None:
    couple.begin(KEY, 2)
    fail_all_tries(couple)
    couple.begin(("after", 0), 2)
    for key in (KEY, ("after", 0)):
        event = couple.events[key]
        assert isinstance(event, TransferFailed)
        assert event.message == (
            f"prefill node prefill-0 could not attach the pool of decode node decode-0 in 4 tries: {NO_WAY}"
        )
    assert couple.pairs_lost == 0
    assert couple.allocator.num_free == couple.num_pages


def test_a_failed_pair_is_still_retried_and_recovers(couple: Couple) -> None:
    fail_all_tries(couple)
    for _ in range(5):
        before = couple.now
        offer = next_offer(couple)
        assert couple.now - before <= MAX_BACKOFF_S + 0.1
        fail(couple)
    offer = next_offer(couple)
    attach(couple, offer)
    assert couple.receiver.is_connected(PREFILL)
    couple.begin(KEY, 2)
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_pair_reports_its_problem_until_it_is_connected(couple: Couple) -> None:
    assert couple.receiver.pairs() == []
    fail(couple)
    assert couple.receiver.pairs() == [PairState("prefill-0", PREFILL, "inprocess", "", NO_WAY)]
    offer = next_offer(couple)
    assert [pair.problem for pair in couple.receiver.pairs()] == [NO_WAY]
    attach(couple, offer)
    assert [pair.problem for pair in couple.receiver.pairs()] == [""]


def test_a_break_is_reported_until_the_pair_is_connected_again(couple: Couple) -> None:
    attach(couple, couple.receiver.connect(PREFILL, "prefill-0"))
    couple.writer.lose(DECODE, "a snap")
    couple.pump()
    couple.poll()
    assert [bool(pair.problem) for pair in couple.receiver.pairs()] == [True]
    couple.run()
    assert [pair.problem for pair in couple.receiver.pairs()] == [""]


def test_a_refusal_is_final_and_reported(couple: Couple) -> None:
    couple.receiver.on_message(PREFILL, Refused("another model", 1), couple.now)
    assert [pair.problem for pair in couple.receiver.pairs()] == ["another model"]
    couple.now += 1_000.0
    couple.poll()
    assert not couple.to_prefill


def test_a_failure_of_an_earlier_offer_is_ignored(couple: Couple) -> None:
    fail(couple)
    offer = next_offer(couple)
    couple.receiver.on_message(PREFILL, AttachFailed(1, "late"), couple.now)
    assert couple.receiver.counters()["stale_messages"] == 1
    attach(couple, offer)
    assert couple.receiver.is_connected(PREFILL)


def test_a_pool_that_cannot_be_attached_is_reported_and_logged(
    couple: Couple, caplog: pytest.LogCaptureFixture
) -> None:
    offer = couple.receiver.connect(PREFILL)
    couple.reader.withdraw(PREFILL)
    with caplog.at_level(logging.WARNING):
        couple.sender.on_message(DECODE, offer, 0.0)
    ((_, answer),), _ = couple.sender.take()
    assert isinstance(answer, AttachFailed)
    assert answer.epoch == offer.epoch
    assert "the pool of decode node decode-0 cannot be attached now: there is no offer" in caplog.text
    couple.sender.on_message(DECODE, couple.receiver.connect(PREFILL), 0.0)
    ((_, answer),), _ = couple.sender.take()
    assert isinstance(answer, Connected)
