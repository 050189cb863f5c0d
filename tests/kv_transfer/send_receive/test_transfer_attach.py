"""Attachments that fail: they are retried, and a pair that cannot transfer pages reports its problem."""

import logging

import pytest
from support.kv.connected_pair import KEY
from support.kv.kv_fakes import DECODE, PREFILL, TransferPair

from common.wire.messages import AttachFailed, Connect, Connected, PairState, Ping, Refused
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.receive.connections import MAX_BACKOFF_S, MAX_TRIES

NO_WAY = "other bytes came back"


@pytest.fixture
def pair() -> TransferPair:
    """A pair whose pool has been offered once, in a message that the prefill node has not received yet."""
    pair = TransferPair()
    pair.receiver.connect(PREFILL, "prefill-0")
    return pair


def fail(pair: TransferPair) -> None:
    """Make the attachment of the last offer fail."""
    epoch = pair.receiver._connections.epoch
    pair.receiver.on_message(PREFILL, AttachFailed(epoch, NO_WAY), pair.now)
    pair.settle()


def next_offer(pair: TransferPair) -> Connect:
    """Advance the clock until the pool is offered again."""
    until = pair.now + 2 * MAX_BACKOFF_S
    while not pair.to_prefill:
        pair.now += 0.05
        assert pair.now < until, "the pool was not offered again"
        pair.poll()
    offer = pair.to_prefill.popleft()
    assert isinstance(offer, Connect)
    return offer


def attach(pair: TransferPair, offer: Connect) -> None:
    """Attach the prefill node to the last offer."""
    pair.sender.on_message(DECODE, offer, pair.now)
    pair.settle()
    pair.run()


def fail_all_tries(pair: TransferPair) -> None:
    fail(pair)
    for _ in range(MAX_TRIES):
        next_offer(pair)
        fail(pair)


def test_a_transfer_waits_while_attachments_are_retried(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    for _ in range(MAX_TRIES):
        fail(pair)
        offer = next_offer(pair)
    attach(pair, offer)
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    pair.give_back(KEY)
    pair.assert_nothing_is_held()


def test_waiting_transfers_fail_when_the_retries_are_exhausted(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    fail_all_tries(pair)
    pair.begin(("after", 0), 2)
    for key in (KEY, ("after", 0)):
        event = pair.events[key]
        assert isinstance(event, TransferFailed)
        assert event.message == (
            f"node prefill-0 could not attach the pool of decode node decode-0 in 4 tries: {NO_WAY}"
        )
    assert pair.pairs_lost == 0
    assert pair.allocator.num_free == pair.num_pages


def test_a_failed_pair_is_still_retried_and_recovers(pair: TransferPair) -> None:
    fail_all_tries(pair)
    for _ in range(5):
        before = pair.now
        offer = next_offer(pair)
        assert pair.now - before <= MAX_BACKOFF_S + 0.1
        fail(pair)
    offer = next_offer(pair)
    attach(pair, offer)
    assert pair.receiver.is_connected(PREFILL)
    pair.begin(KEY, 2)
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_pair_reports_its_problem_until_it_is_connected(pair: TransferPair) -> None:
    assert pair.receiver.pairs() == []
    fail(pair)
    assert pair.receiver.pairs() == [PairState("prefill-0", PREFILL, "inprocess", "", NO_WAY)]
    offer = next_offer(pair)
    assert [end.problem for end in pair.receiver.pairs()] == [NO_WAY]
    attach(pair, offer)
    assert [end.problem for end in pair.receiver.pairs()] == [""]


def test_a_break_is_reported_until_the_pair_is_connected_again(pair: TransferPair) -> None:
    attach(pair, pair.receiver.connect(PREFILL, "prefill-0"))
    pair.writer.lose(DECODE, "a snap")
    pair.pump()
    pair.poll()
    assert [bool(end.problem) for end in pair.receiver.pairs()] == [True]
    pair.run()
    assert [end.problem for end in pair.receiver.pairs()] == [""]


def test_a_refusal_is_final_and_reported(pair: TransferPair) -> None:
    pair.receiver.on_message(PREFILL, Refused("another model", 1), pair.now)
    assert [end.problem for end in pair.receiver.pairs()] == ["another model"]
    pair.now += 1_000.0
    pair.poll()
    assert not pair.to_prefill


def test_a_failure_of_an_earlier_offer_is_ignored(pair: TransferPair) -> None:
    fail(pair)
    offer = next_offer(pair)
    pair.receiver.on_message(PREFILL, AttachFailed(1, "late"), pair.now)
    assert pair.receiver.counters()["stale_messages"] == 1
    attach(pair, offer)
    assert pair.receiver.is_connected(PREFILL)


def test_a_pool_that_cannot_be_attached_is_reported_and_logged(
    pair: TransferPair, caplog: pytest.LogCaptureFixture
) -> None:
    offer = pair.receiver.connect(PREFILL)
    pair.reader.withdraw(PREFILL)
    with caplog.at_level(logging.WARNING):
        pair.sender.on_message(DECODE, offer, 0.0)
    ((_, answer),), _ = pair.sender.take()
    assert isinstance(answer, AttachFailed)
    assert answer.epoch == offer.epoch
    assert "the pool of decode node decode-0 cannot be attached now: there is no offer" in caplog.text
    pair.sender.on_message(DECODE, pair.receiver.connect(PREFILL), 0.0)
    ((_, answer),), _ = pair.sender.take()
    assert isinstance(answer, Connected)


def test_a_peer_to_which_writes_take_long_is_asked_for_a_sign_of_life_if_it_is_connected(
    pair: TransferPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(pair)
    attach(pair, next_offer(pair))
    monkeypatch.setattr(pair.sender._transport, "late", lambda: [DECODE, "another"])
    pair.sender.pump(pair.now)
    messages, _ = pair.sender.take()
    assert messages == [(DECODE, Ping())]
