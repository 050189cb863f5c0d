"""A data connection that breaks while the control connection holds: how often it is retried and what is repeated."""

import pytest
from support.kv.connected_pair import KEY, break_data_connection, half_written, slow, written_unreported
from support.kv.kv_fakes import DECODE, PREFILL, TransferPair

from common.cache.page_allocator import Owner
from common.wire.messages import AttachFailed, Connect, Grant, PrefillDone, Refused, TransferAck
from kv_transfer.events import Completed
from kv_transfer.receive.connections import (
    ANSWER_S,
    BACKOFF_S,
    FIRST_ANSWER_S,
    MAX_BACKOFF_S,
    MAX_TRIES,
    PrefillConnection,
)
from kv_transfer.states import RESUME_LEASE_S
from kv_transfer.transports.base import Fenced
from scripts.simulator.service.inprocess_transport import Fault, Wire


@pytest.fixture
def pair() -> TransferPair:
    return slow()


# ---- retries -----------------------------------------------------------------------------------------------------


def test_the_pool_is_offered_again_at_once_and_then_after_a_pause_that_doubles_up_to_a_limit() -> None:
    connection = PrefillConnection(1, "p", was_attached=True)
    pauses = []
    while connection.broke("", 10.0):
        assert connection.retry_at is not None
        pauses.append(connection.retry_at - 10.0)
        connection.offered_again(2, 10.0)
        assert (connection.retry_at, connection.answer_by, connection.is_reconnecting) == (None, 10.0 + ANSWER_S, True)
    assert pauses == [pytest.approx(BACKOFF_S * factor) for factor in (0, 1, 2, 4)]
    assert len(pauses) == MAX_TRIES
    for pause_s in (8 * BACKOFF_S, 16 * BACKOFF_S, 32 * BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S):
        assert connection.retry_at == pytest.approx(10.0 + pause_s)
        assert not connection.broke("", 10.0)


def test_the_prefill_node_waits_longer_than_all_retries_take() -> None:
    assert sum(BACKOFF_S * 2**n + ANSWER_S for n in range(MAX_TRIES)) + ANSWER_S < RESUME_LEASE_S


def test_the_pool_is_offered_again_at_once_and_the_next_time_after_a_pause(pair: TransferPair) -> None:
    half_written(pair)
    break_data_connection(pair)
    pair.poll()
    [connect] = pair.to_prefill
    assert isinstance(connect, Connect)
    assert (connect.epoch, connect.resumes) == (2, True)
    pair.poll()
    assert len(pair.to_prefill) == 1
    pair.receiver.on_message(PREFILL, AttachFailed(2, "no"), pair.now)
    pair.now = BACKOFF_S - 0.01
    pair.poll()
    assert len(pair.to_prefill) == 1
    pair.now = BACKOFF_S
    pair.poll()
    assert [offer.epoch for offer in pair.to_prefill if isinstance(offer, Connect)] == [2, 3]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_first_offer_without_an_answer_is_repeated(is_refused: bool) -> None:
    """The prefill node may be waiting for writes that only a newer offer declares ended."""
    pair = TransferPair()
    pair.receiver.connect(PREFILL)
    pair.poll()
    if is_refused:
        pair.receiver.on_message(PREFILL, Refused("no", 1), 0.0)
    pair.now = FIRST_ANSWER_S - 0.1
    pair.poll()
    assert not pair.to_prefill
    pair.now = 2 * FIRST_ANSWER_S
    pair.run()
    assert pair.receiver.is_connected(PREFILL) is not is_refused
    assert pair.receiver.counters()["reconnects"] == (not is_refused)


# ---- resumed transfers -------------------------------------------------------------------------------------------


def test_only_pages_that_have_not_arrived_are_granted_again(pair: TransferPair) -> None:
    pages = half_written(pair)
    pair.hear_prefill()
    assert pair.receiver.counters()["pages_received"] == 1
    break_data_connection(pair)
    assert pair.allocator.count(Owner.GRANT) == 4
    assert KEY not in pair.released
    pair.writer.written.clear()
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert pair.writer.written == pages[1:]
    assert pair.released[KEY].ok
    assert pair.receiver.counters()["reconnects"] == pair.sender.counters()["broken_pairs"] == 1
    pair.give_back(KEY)
    pair.assert_nothing_is_held()


def test_a_page_lost_with_the_connection_is_sent_over_the_next_one() -> None:
    pair = TransferPair(Wire(faults={1: Fault("drop")}))
    pair.connect()
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert pair.pairs_lost == 0


@pytest.mark.parametrize("is_before", [True, False], ids=["prefill_done before", "prefill_done amid"])
def test_prefill_done_is_sent_once_wherever_the_connection_breaks(pair: TransferPair, is_before: bool) -> None:
    half_written(pair)
    if is_before:
        pair.finish(KEY)
    break_data_connection(pair)
    if not is_before:
        pair.finish(KEY)
    num_said = 0
    for _ in range(60):
        num_said += sum(isinstance(message, PrefillDone) for message in pair.to_decode)
        pair.drain_to_decode()
        pair.drain_to_prefill()
        pair.now += 0.01
        pair.tick()
        pair.poll()
        pair.pump()
    assert num_said == 1
    assert isinstance(pair.events[KEY], Completed)


def test_a_prefill_done_that_arrives_after_the_break_is_kept(pair: TransferPair) -> None:
    """The prefill node has not noticed the break yet and will not repeat the message."""
    half_written(pair)
    pair.finish(KEY)
    pair.writer.lose(DECODE, "a snap")
    pair.reader._news.append(Fenced(PREFILL, 1, "a snap"))
    pair.poll()
    assert pair.sender.counters()["broken_pairs"] == 0
    pair.drain_to_decode()
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_pages_whose_report_was_lost_with_the_connection_are_sent_again(pair: TransferPair) -> None:
    half_written(pair)
    break_data_connection(pair)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert pair.receiver.counters()["stale_messages"] == 2  # a report, and the break, under an epoch that has ended
    assert pair.sender.counters()["pages_sent"] == 5


def test_a_transfer_that_was_complete_at_the_break_needs_no_new_connection() -> None:
    pair = TransferPair()
    pair.connect()
    written_unreported(pair, 2)
    pair.drain_to_decode()
    assert list(pair.to_prefill) == [TransferAck("r", 0)]
    break_data_connection(pair)
    pair.hear_decode()
    assert pair.released[KEY].ok
    assert isinstance(pair.events[KEY], Completed)


def test_an_early_grant_is_granted_again(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    pair.hear_decode()
    break_data_connection(pair)
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_requests_that_begin_during_a_break_are_granted_after_it(pair: TransferPair) -> None:
    break_data_connection(pair)
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.finish(KEY)
    assert not any(isinstance(message, Grant) for message in pair.to_prefill)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_an_arriving_page_resets_the_retry_count() -> None:
    """The connection breaks nine times, and a page arrives after each break."""
    pair = TransferPair(Wire(faults={n: Fault("drop") for n in range(1, 18, 2)}), num_pages=20)
    pair.connect()
    pair.open(KEY, 18)
    pair.begin(KEY, 18)
    pair.finish(KEY)
    for _ in range(40):
        pair.drain_to_prefill()
        pair.pump(max_pages=1)
        pair.drain_to_decode()
        pair.now += 0.1
        pair.poll()
    pair.run()
    assert pair.receiver.counters()["reconnects"] > MAX_TRIES
    assert isinstance(pair.events[KEY], Completed)
