"""A data connection that breaks while the control connection holds: how often it is retried and what is repeated."""

import pytest
from support.couples import KEY, halfway, shipped, slow, snap
from support.kv_fakes import DECODE, PREFILL, Couple

from common.cache.page_allocator import Owner
from common.wire.messages import Connect, Grant, PrefillDone, Refused, TransferAck
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
from scripts.simulator.inprocess_transport import Fault, Wire


@pytest.fixture
def couple() -> Couple:
    return slow()


# ---- retries -----------------------------------------------------------------------------------------------------


def test_the_backoff_doubles_up_to_a_limit() -> None:
    connection = PrefillConnection(1, "p", was_attached=True)
    pauses = []
    while connection.broke("", 10.0):
        assert connection.retry_at is not None
        pauses.append(connection.retry_at - 10.0)
        connection.offered_again(2, 10.0)
        assert (connection.retry_at, connection.answer_by, connection.is_reconnecting) == (None, 10.0 + ANSWER_S, True)
    assert pauses == [pytest.approx(BACKOFF_S * factor) for factor in (1, 2, 4, 8)]
    assert len(pauses) == MAX_TRIES
    connection = PrefillConnection(1, "p", num_tries=1_000)
    connection.broke("", 10.0)
    assert connection.retry_at == 10.0 + MAX_BACKOFF_S


def test_the_prefill_node_waits_longer_than_all_retries_take() -> None:
    assert sum(BACKOFF_S * 2**n + ANSWER_S for n in range(MAX_TRIES)) + ANSWER_S < RESUME_LEASE_S


def test_the_pool_is_not_offered_again_before_the_backoff_ends(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.now = BACKOFF_S - 0.01
    couple.poll()
    assert not couple.to_prefill
    couple.now = BACKOFF_S
    couple.poll()
    [connect] = couple.to_prefill
    assert isinstance(connect, Connect)
    assert (connect.epoch, connect.resumes) == (2, True)
    couple.poll()
    assert len(couple.to_prefill) == 1


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_first_offer_without_an_answer_is_repeated(is_refused: bool) -> None:
    """The prefill node may be waiting for writes that only a newer offer declares ended."""
    couple = Couple()
    couple.receiver.connect(PREFILL)
    couple.poll()
    if is_refused:
        couple.receiver.on_message(PREFILL, Refused("no", 1))
    couple.now = FIRST_ANSWER_S - 0.1
    couple.poll()
    couple.now = 2 * FIRST_ANSWER_S
    couple.poll()
    assert not couple.to_prefill
    couple.run()
    assert couple.receiver.is_connected(PREFILL) is not is_refused
    assert couple.receiver.counters()["reconnects"] == (not is_refused)


# ---- resumed transfers -------------------------------------------------------------------------------------------


def test_only_pages_that_have_not_arrived_are_granted_again(couple: Couple) -> None:
    pages = halfway(couple)
    couple.hear_prefill()
    assert couple.receiver.counters()["pages_received"] == 1
    snap(couple)
    assert couple.allocator.count(Owner.GRANT) == 4
    assert KEY not in couple.released
    couple.writer.written.clear()
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.writer.written == pages[1:]
    assert couple.released[KEY].ok
    assert couple.receiver.counters()["reconnects"] == couple.sender.counters()["broken_pairs"] == 1
    couple.give_back(KEY)
    couple.assert_nothing_is_held()


def test_a_page_lost_with_the_connection_is_sent_over_the_next_one() -> None:
    couple = Couple(Wire(faults={1: Fault("drop")}))
    couple.connect()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.pairs_lost == 0


@pytest.mark.parametrize("is_before", [True, False], ids=["prefill_done before", "prefill_done amid"])
def test_prefill_done_is_sent_once_wherever_the_connection_breaks(couple: Couple, is_before: bool) -> None:
    halfway(couple)
    if is_before:
        couple.finish(KEY)
    snap(couple)
    if not is_before:
        couple.finish(KEY)
    num_said = 0
    for _ in range(60):
        num_said += sum(isinstance(message, PrefillDone) for message in couple.to_decode)
        couple.drain_to_decode()
        couple.drain_to_prefill()
        couple.now += 0.01
        couple.tick()
        couple.poll()
        couple.pump()
    assert num_said == 1
    assert isinstance(couple.events[KEY], Completed)


def test_a_prefill_done_that_arrives_after_the_break_is_kept(couple: Couple) -> None:
    """The prefill node has not noticed the break yet and will not repeat the message."""
    halfway(couple)
    couple.finish(KEY)
    couple.writer.lose(DECODE, "a snap")
    couple.reader._news.append(Fenced(PREFILL, 1, "a snap"))
    couple.poll()
    assert couple.sender.counters()["broken_pairs"] == 0
    couple.drain_to_decode()
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_pages_whose_report_was_lost_with_the_connection_are_sent_again(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.receiver.counters()["stale_messages"] == 1  # a report under an epoch that has ended
    assert couple.sender.counters()["pages_sent"] == 5


def test_a_transfer_that_was_complete_at_the_break_needs_no_new_connection() -> None:
    couple = Couple()
    couple.connect()
    shipped(couple, 2)
    couple.drain_to_decode()
    assert list(couple.to_prefill) == [TransferAck("r", 0)]
    snap(couple)
    couple.hear_decode()
    assert couple.released[KEY].ok
    assert isinstance(couple.events[KEY], Completed)


def test_an_early_grant_is_granted_again(couple: Couple) -> None:
    couple.begin(KEY, 2)
    couple.hear_decode()
    snap(couple)
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_requests_that_begin_during_a_break_are_granted_after_it(couple: Couple) -> None:
    snap(couple)
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.finish(KEY)
    assert not any(isinstance(message, Grant) for message in couple.to_prefill)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_an_arriving_page_resets_the_retry_count() -> None:
    """The connection breaks nine times, and a page arrives after each break."""
    couple = Couple(Wire(faults={n: Fault("drop") for n in range(1, 18, 2)}), num_pages=20)
    couple.connect()
    couple.open(KEY, 18)
    couple.begin(KEY, 18)
    couple.finish(KEY)
    for _ in range(40):
        couple.drain_to_prefill()
        couple.pump(max_pages=1)
        couple.drain_to_decode()
        couple.now += 0.1
        couple.poll()
    couple.run()
    assert couple.receiver.counters()["reconnects"] > MAX_TRIES
    assert isinstance(couple.events[KEY], Completed)
