"""Transfers that do not continue after a broken data connection: cancels, aborts, deaths and failed retries."""

import pytest
from support.kv.connected_pair import KEY, break_data_connection, half_written, slow, written_unreported
from support.kv.kv_fakes import DECODE, PREFILL, TransferPair, owner_of

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import Connect, Refused, Resend
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.receive.connections import ANSWER_S, BACKOFF_S, MAX_TRIES
from kv_transfer.states import RESUME_LEASE_S
from kv_transfer.transports.base import Fenced
from scripts.simulator.service.inprocess_transport import Fault, Wire


@pytest.fixture
def pair() -> TransferPair:
    return slow()


def test_a_cancel_during_a_break_frees_the_pages_at_once(pair: TransferPair) -> None:
    half_written(pair)
    break_data_connection(pair)
    pair.cancel(KEY)
    assert pair.allocator.num_free == pair.num_pages
    pair.run()
    assert not pair.released[KEY].ok
    pair.assert_nothing_is_held()


def test_an_abort_during_a_break_reaches_the_other_side(pair: TransferPair) -> None:
    half_written(pair)
    break_data_connection(pair)
    pair.sender.abort(KEY, "aborted", "because")
    pair.settle()
    pair.run()
    assert pair.events[KEY] == TransferFailed(KEY, ErrorCode.ABORTED, "because")
    pair.assert_nothing_is_held()


def test_pages_of_a_cancelled_transfer_leave_quarantine_at_the_break(pair: TransferPair) -> None:
    half_written(pair)
    pair.cancel(KEY)
    assert pair.allocator.count(Owner.QUARANTINE) == 4
    pair.to_prefill.clear()  # the message is delayed
    break_data_connection(pair)
    assert pair.allocator.count(Owner.QUARANTINE) == 0


def test_a_connection_that_always_breaks_ends_in_an_error_that_names_pair_and_transport() -> None:
    pair = TransferPair(Wire(faults={n: Fault("drop") for n in range(50)}))
    pair.connect("prefill-7")
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.finish(KEY)
    pair.run()
    why = (
        "inprocess from node prefill-7 to decode node decode-0 broke and could not be mended in 4 tries: "
        f"the wire to {DECODE} broke: page 0 was lost"
    )
    assert pair.events[KEY] == TransferFailed(KEY, ErrorCode.TRANSFER_FAILED, why)
    assert pair.pairs_lost == 0
    assert pair.receiver.counters()["broken_pairs"] == MAX_TRIES + 1
    pair.assert_nothing_is_held()
    assert pair.receiver.is_connected(PREFILL), "the pool was not offered again"


@pytest.mark.parametrize("is_silent", [True, False], ids=["silence", "refusal"])
def test_a_refused_or_unanswered_retry_counts_as_failed(pair: TransferPair, is_silent: bool) -> None:
    half_written(pair)
    break_data_connection(pair)
    num_connects = 0
    for _ in range(200):
        pair.now += 0.5
        pair.poll()
        if pair.to_prefill and isinstance(pair.to_prefill.popleft(), Connect):
            num_connects += KEY not in pair.events
            if not is_silent:
                pair.to_decode.appendleft(Refused("no way there", pair.receiver._connections.epoch))
                pair.hear_prefill()
    assert num_connects == MAX_TRIES
    event = pair.events[KEY]
    assert isinstance(event, TransferFailed)
    assert event.message.endswith("it did not answer" if is_silent else "no way there")
    assert [end.problem for end in pair.receiver.pairs()] != [""], "the pair was not reported as failed"
    assert pair.allocator.num_free == pair.num_pages


def test_a_prefill_node_gives_up_when_no_new_connection_comes(pair: TransferPair) -> None:
    half_written(pair)
    pair.writer.lose(DECODE, "a snap")
    pair.pump()
    assert pair.sender.peers() == [DECODE]
    pair.now = RESUME_LEASE_S + 1
    pair.pump()
    reason = pair.released[KEY].reason
    assert reason.startswith("the wire to") and reason.endswith("no new connection within 60 s")


def test_the_death_of_a_writer_is_not_retried(pair: TransferPair) -> None:
    half_written(pair)
    pair.writer.die()
    pair.poll()
    assert pair.pairs_lost == 1
    event = pair.events[KEY]
    assert isinstance(event, TransferFailed) and event.code is ErrorCode.NODE_LOST
    assert pair.allocator.num_free == pair.num_pages


def test_a_fence_of_an_offer_that_was_never_used_counts_as_a_break() -> None:
    """A late answer to that offer is ignored."""
    late = TransferPair()
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
    pair = TransferPair(Wire(faults={0: Fault("corrupt")}), checksums=("all", "all"))
    pair.connect()
    written_unreported(pair, 2)
    pair.drain_to_decode()
    assert [type(message) for message in pair.to_prefill] == [Resend]
    break_data_connection(pair)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def turns(pair: TransferPair) -> None:
    """Run a few turns of both nodes, even if something stays in flight."""
    for _ in range(5):
        pair.poll()
        pair.pump()
        pair.drain_to_prefill()
        pair.drain_to_decode()


def test_a_break_without_a_fence_ends_the_transfers_and_keeps_the_pages_in_quarantine() -> None:
    """This is a NIXL break between two hosts: the decode node does not see it and must not keep granting pages."""
    pair = TransferPair(Wire(faults={0: Fault("drop"), 1: Fault("delay", 10**6)}, can_recall=False))
    pair.connect()
    reclaimed: list[tuple[str, int]] = []
    pair.reader.reclaim = lambda *what: reclaimed.append(what)  # type: ignore[method-assign]
    other, later = ("s", 0), ("t", 0)
    for key in (KEY, other):
        pair.open(key, 1)
        pair.begin(key, 1)
        pair.hear_decode()
        pair.finish(key)
    pair.pump()  # the first write breaks the connection while the second is in flight
    turns(pair)
    pair.open(later, 1)
    pair.begin(later, 1)
    pair.now = ANSWER_S - 0.1
    turns(pair)
    assert not pair.events, "pages were reclaimed although their transfers may be retried"
    assert set(reclaimed) == {(PREFILL, 1)}
    pair.now = ANSWER_S
    turns(pair)
    assert pair.pairs_lost == 1
    assert [pair.events[key].code for key in (KEY, other, later)] == [ErrorCode.NODE_LOST] * 3
    assert pair.allocator.count(Owner.QUARANTINE) == 2, "pages left quarantine although they may still be written"
    assert owner_of(pair.allocator, pair.grants[other][0], Owner.QUARANTINE) is Owner.QUARANTINE


def test_a_break_whose_writes_are_fenced_in_time_is_resumed() -> None:
    pair = TransferPair(Wire(faults={0: Fault("drop"), 1: Fault("delay", 3)}, can_recall=False))
    pair.connect()
    other, later = ("s", 0), ("t", 0)
    for key in (KEY, other):
        pair.open(key, 1)
        pair.begin(key, 1)
        pair.hear_decode()
        pair.finish(key)
    pair.pump()
    pair.run()
    pair.open(later, 1)
    pair.begin(later, 1)
    pair.finish(later)
    for _ in range(4):
        pair.tick()
    pair.pump()
    pair.sender._transport.detach(DECODE)  # as the negotiating transport does until this returns True
    pair.run()
    pair.now += BACKOFF_S
    pair.run()
    assert isinstance(pair.events[later], Completed)
    assert pair.allocator.count(Owner.QUARANTINE) == 0
