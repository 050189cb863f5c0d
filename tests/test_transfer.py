"""Sender and receiver over the in-process wire: what leaves when, and that every page comes back exactly once."""

from collections.abc import Callable

import msgspec
import pytest
from kv_fakes import DECODE, PREFILL, Couple, MemfdStore

from common.errors import ErrorCode
from common.messages import (
    Cancel,
    Closed,
    Connected,
    Delivered,
    Geometry,
    Grant,
    Handoff,
    Message,
    Ping,
    Received,
    Refused,
)
from common.pages import Owner, PageBooks
from kv_transfer import outgoing as outgoing_module
from kv_transfer import tombs as tombs_module
from kv_transfer.events import Completed, Finished, TransferFailed
from kv_transfer.lifecycle import Receiving
from kv_transfer.outgoing import EARLY_LEASE_S
from kv_transfer.receiver import Receiver
from kv_transfer.tombs import LEASE_S, Reason
from kv_transfer.transports.inprocess import InProcessReader, Wire

KEY = ("r", 0)


@pytest.fixture
def couple() -> Couple:
    couple = Couple()
    couple.connect()
    return couple


def slow() -> Couple:
    """One page (64 bytes) a tick, and a tick of latency."""
    couple = Couple(Wire(latency=1, bytes_per_tick=64))
    couple.connect()
    return couple


def failure(couple: Couple, key: tuple[str, int] = KEY) -> TransferFailed:
    event = couple.events[key]
    assert isinstance(event, TransferFailed)
    return event


# ---- the main path ----------------------------------------------------------------------------------------------


def test_pages_leave_while_later_ones_are_computed(couple: Couple) -> None:
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.run()
    assert not couple.writer.written
    assert not couple.sender.has_delivered(KEY)
    couple.compute(KEY, 1)
    couple.run()
    assert len(couple.writer.written) == 1
    assert couple.sender.has_delivered(KEY)
    couple.compute(KEY, 2)
    couple.run()
    assert len(couple.writer.written) == 2
    couple.finish(KEY, token=5)
    couple.run()
    event = couple.events[KEY]
    assert isinstance(event, Completed)
    assert event.handoff == Handoff("r", 0, 11, 5)
    assert couple.released[KEY].ok
    counters = couple.sender.counters()
    assert (counters["pages_sent"], counters["bytes_sent"], counters["pages_overlapped"]) == (3, 192, 2)
    assert couple.receiver.counters()["pages_received"] == couple.target.num_landed == 3
    couple.give_back(KEY)
    couple.assert_nothing_is_held()


def test_only_what_the_decode_node_lacks_is_shipped(couple: Couple) -> None:
    couple.open(KEY, 4)
    pages = couple.begin(KEY, 4, first=3)
    couple.compute(KEY, 3)
    couple.finish(KEY)
    assert couple.receiver.counters()["bytes_saved_by_cache"] == 0
    couple.run()
    assert couple.writer.written == pages
    assert isinstance(couple.events[KEY], Completed)
    assert couple.receiver.counters()["bytes_saved_by_cache"] == 3 * 64


def test_a_prompt_that_is_wholly_there_needs_the_handoff_alone(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2, first=2)
    couple.finish(KEY)
    couple.run()
    assert not couple.writer.written
    event = couple.events[KEY]
    assert isinstance(event, Completed)
    assert event.pages == ()
    assert couple.released[KEY].ok
    couple.assert_nothing_is_held()


def test_a_grant_may_come_before_the_request_is_known(couple: Couple) -> None:
    couple.begin(KEY, 2)
    couple.run()
    couple.open(KEY, 2)
    couple.compute(KEY, 1)
    couple.run()
    assert len(couple.writer.written) == 1
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_prompt_may_be_computed_before_anything_is_granted(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert not couple.events  # the handoff waits for the grant: before it, the decode node does not know the key
    assert couple.receiver.counters()["stale_messages"] == 0
    couple.begin(KEY, 2)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_transfer_may_begin_before_the_pair_is_connected() -> None:
    couple = Couple()
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.begin(KEY, 2)
    couple.run()
    assert not couple.writer.written
    couple.connect()
    assert isinstance(couple.events[KEY], Completed)


def test_grants_may_come_in_pieces(couple: Couple) -> None:
    couple.open(KEY, 5)
    couple.begin(KEY, 5, first=1, reserve=2)
    couple.finish(KEY)
    couple.run()
    assert len(couple.writer.written) == 2
    assert KEY not in couple.events
    couple.extend(KEY, 1)
    couple.run()
    assert KEY not in couple.events
    couple.extend(KEY, 1)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_pages_may_be_reserved_in_pieces_before_the_pair_is_connected() -> None:
    couple = Couple()
    couple.open(KEY, 3)
    couple.begin(KEY, 3, reserve=1)
    couple.extend(KEY, 2)
    couple.finish(KEY)
    couple.connect()
    assert isinstance(couple.events[KEY], Completed)


def test_the_handoff_overtakes_pages() -> None:
    couple = slow()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    assert [type(message) for message in couple.to_decode] == [Handoff]
    couple.hear_prefill()
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_pump_writes_no_more_than_it_may_and_says_that_more_is_waiting(couple: Couple) -> None:
    couple.open(KEY, 5)
    couple.begin(KEY, 5)
    couple.hear_decode()
    couple.compute(KEY, 4)
    assert couple.pump(max_pages=3)
    assert len(couple.writer.written) == 3
    assert couple.to_decode.pop() == Delivered("r", 0, 1, (0, 1, 2))
    assert not couple.pump(max_pages=3)


def test_requests_are_written_in_the_order_in_which_they_became_ready(couple: Couple) -> None:
    pages = {}
    for rid in "ab":
        couple.open((rid, 0), 2)
        pages[rid] = couple.begin((rid, 0), 2)
        couple.hear_decode()
    couple.compute(("b", 0), 1)
    couple.compute(("a", 0), 1)
    couple.pump()
    assert couple.writer.written == [pages["b"][0], pages["a"][0]]


def test_with_ranks_the_lowest_is_written_first(couple: Couple) -> None:
    ranks = {"a": 1.0, "b": 2.0}
    couple.sender.order_by(lambda key: ranks[key[0]])
    pages = {}
    for rid in "ab":
        couple.open((rid, 0), 2)
        pages[rid] = couple.begin((rid, 0), 2)
        couple.hear_decode()
    couple.compute(("b", 0), 2)
    couple.compute(("a", 0), 1)
    couple.pump(max_pages=1)
    ranks["b"] = 0.0
    couple.pump()
    assert couple.writer.written == [pages["a"][0], *pages["b"]]


def test_how_long_writes_take_is_measured_by_the_clock_handed_in(couple: Couple) -> None:
    class Stepping:
        def __init__(self) -> None:
            self.instants = 0.0

        def now(self) -> float:
            self.instants += 0.5
            return self.instants

    couple.sender._writes.clock = Stepping()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.now = 3.0
    couple.compute(KEY, 1)
    couple.pump()
    assert couple.sender.counters()["write_seconds"] == 0.5
    assert couple.sender.first_delivered_at(KEY) == 3.0


# ---- a request that ends with its first token -------------------------------------------------------------------


def test_a_request_that_ends_with_its_first_token_frees_both_sides_at_once(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.compute(KEY, 1)
    couple.run()
    couple.sender.abort(KEY, "finished")
    couple.settle()
    assert couple.released[KEY].ok
    couple.run()
    assert couple.events[KEY] == Finished(KEY)
    couple.assert_nothing_is_held()


def test_a_grant_for_a_request_that_has_ended_is_answered_with_closed(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.sender.abort(KEY, "finished")
    couple.settle()
    couple.run()
    couple.begin(KEY, 2)
    couple.run()
    assert couple.events[KEY] == Finished(KEY)
    couple.assert_nothing_is_held()


# ---- the decode node gives up -----------------------------------------------------------------------------------


def _scripts() -> list[Callable[[Couple], object]]:
    """One transfer of four pages, over a slow wire, event by event."""
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
    assert (KEY in couple.events) == had_completed, "an event came after the cancel"
    if had_completed:
        couple.give_back(KEY)
    if KEY not in couple.source_pages:
        couple.open(KEY, 4)  # the request comes late; nothing may start
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


def test_cancelled_pages_stay_in_quarantine_until_the_writer_says_closed() -> None:
    couple = slow()
    couple.open(KEY, 4)
    couple.begin(KEY, 4)
    couple.hear_decode()
    couple.compute(KEY, 3)
    couple.pump()
    couple.cancel(KEY)
    assert couple.books.count(Owner.QUARANTINE) == couple.receiver.num_quarantined == 4
    couple.now = 1e6  # a timeout alone frees nothing
    couple.poll()
    assert couple.receiver.num_quarantined == 4
    couple.hear_decode()
    assert not couple.to_decode  # three writes are under way: not closed yet, and the source is still held
    assert KEY not in couple.released
    for _ in range(2):
        couple.tick()
        couple.pump()
        assert couple.receiver.num_quarantined == 4
        assert not couple.to_decode
    couple.tick()
    assert couple.writer.num_in_quarantine == 3
    couple.pump()
    assert list(couple.to_decode) == [Closed("r", 0, "cancelled", "the decode node does not want it any more")]
    assert not couple.released[KEY].ok
    couple.hear_prefill()
    couple.assert_nothing_is_held()
    assert couple.receiver.counters()["pages_quarantined"] == 4


def test_late_news_of_a_cancelled_transfer_is_ignored(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    assert [type(message) for message in couple.to_decode] == [Handoff, Delivered]
    couple.cancel(KEY)
    couple.hear_prefill()
    couple.hear_prefill()
    assert couple.receiver.num_quarantined == 2
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


def test_a_cancel_takes_back_an_event_that_nobody_has_seen(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    while couple.to_decode:
        couple.receiver.on_message(PREFILL, couple.to_decode.popleft(), 0.0)
    couple.receiver.cancel(KEY)
    messages, events = couple.receiver.take()
    assert messages == [(PREFILL, Received("r", 0))]
    assert events == []
    assert couple.books.num_free == couple.num_pages


def test_a_cancel_before_the_request_is_known_keeps_it_from_ever_being_written(couple: Couple) -> None:
    couple.to_prefill.append(Cancel("r", 0))
    couple.hear_decode()
    assert couple.to_decode.pop() == Closed("r", 0, "unknown", "cancelled before the request was known")
    couple.open(KEY, 2)
    assert not couple.released[KEY].ok
    couple.compute(KEY, 1)
    couple.finish(KEY)
    couple.begin(KEY, 2)
    couple.run()
    assert failure(couple).code is ErrorCode.TRANSFER_FAILED
    assert not couple.writer.written


# ---- leases -----------------------------------------------------------------------------------------------------


def test_a_grant_for_a_request_that_never_comes_is_answered_when_its_lease_is_over(couple: Couple) -> None:
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


def test_a_request_whose_early_grant_went_with_its_pair_is_let_go_of_when_it_comes(couple: Couple) -> None:
    couple.begin(KEY, 2)
    couple.run()
    couple.disconnect()
    couple.open(KEY, 2)
    assert not couple.released[KEY].ok


def test_tombstones_go_when_their_lease_is_over(couple: Couple) -> None:
    couple.to_prefill.append(Cancel("r", 0))
    couple.hear_decode()
    couple.now = LEASE_S
    couple.pump()
    couple.open(KEY, 2)
    assert KEY not in couple.released


def test_tombstones_and_early_grants_are_bounded(couple: Couple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombs_module, "MAX_TOMBS", 3)
    monkeypatch.setattr(outgoing_module, "MAX_EARLY", 2)
    for attempt in range(10):
        couple.to_prefill.append(Cancel("c", attempt))
        couple.hear_decode()
    assert len(couple.sender._outgoing.tombs) == 3
    for attempt in range(3):
        couple.begin(("g", attempt), 1)
    couple.run()
    assert failure(couple, ("g", 2)).message == "2 grants wait for requests already"
    assert ("g", 1) not in couple.events
    assert couple.sender.counters()["refused_grants"] == 1


# ---- what cannot be true ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "pages", "why"),
    [
        (0, (16,), "a pool of 16 pages does not have"),
        (0, (-1,), "a pool of 16 pages does not have"),
        (0, (3, 3), "a page is granted twice"),
        (16, (3,), "pages 16 to 17 are granted, the prompt has at most 16"),
        (2**62, (3,), "the prompt has at most 16"),
        (1, (9,), "two pages are granted for one page of the prompt"),
        (2, (1,), "a page is granted twice"),
    ],
    ids=["beyond the pool", "negative", "twice", "beyond any prompt", "huge", "index again", "page again"],
)
def test_a_grant_that_cannot_be_meant_ends_the_transfer(
    couple: Couple, first: int, pages: tuple[int, ...], why: str
) -> None:
    couple.open(KEY, 3)
    couple.sender.on_message(DECODE, Grant("r", 0, 1, 0, (0, 1)), 0.0)
    couple.sender.on_message(DECODE, Grant("r", 0, 1, first, pages), 0.0)
    couple.settle()
    closed = couple.to_decode.pop()
    assert isinstance(closed, Closed)
    assert closed.reason == "failed"
    assert why in closed.message or (first, why) == (0, "a page is granted twice")
    assert not couple.released[KEY].ok
    assert couple.sender.counters()["refused_grants"] == 1
    couple.run()
    assert not couple.writer.written


def test_an_early_grant_that_cannot_be_meant_is_refused_too(couple: Couple) -> None:
    couple.sender.on_message(DECODE, Grant("r", 0, 1, 0, (99,)), 0.0)
    couple.settle()
    closed = couple.to_decode.pop()
    assert isinstance(closed, Closed)
    assert closed.reason == "failed"
    couple.open(KEY, 1)
    assert not couple.released[KEY].ok


def test_a_page_cannot_be_granted_to_two_transfers(couple: Couple) -> None:
    couple.open(("a", 0), 2)
    couple.open(("b", 0), 2)
    couple.sender.on_message(DECODE, Grant("a", 0, 1, 0, (5,)), 0.0)
    couple.sender.on_message(DECODE, Grant("b", 0, 1, 0, (5,)), 0.0)
    couple.settle()
    assert ("b", 0) in couple.released
    assert ("a", 0) not in couple.released


def test_pages_beyond_the_prompts_end_are_refused_when_the_end_is_known(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.sender.on_message(DECODE, Grant("r", 0, 1, 0, (0, 1, 2)), 0.0)
    couple.finish(KEY)
    assert not couple.released[KEY].ok
    other = ("s", 0)
    couple.open(other, 2)
    couple.finish(other)
    couple.sender.on_message(DECODE, Grant("s", 0, 1, 1, (3, 4)), 0.0)
    couple.settle()
    assert not couple.released[other].ok
    assert all(isinstance(message, Closed) for message in couple.to_decode)


def test_another_decode_node_cannot_touch_a_transfer(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    stranger = "x" * 32
    reader = InProcessReader(couple.wire, MemfdStore(16))
    connect = Receiver(reader, PageBooks(16), digest="model").connect(PREFILL)
    for message in (connect, Cancel("r", 0), Received("r", 0), Grant("r", 0, 1, 0, (4,)), Grant("r", 1, 1, 0, (4,))):
        couple.sender.on_message(stranger, message, 0.0)
    messages, released = couple.sender.take()
    assert not released
    answers = [message for peer, message in messages if peer == stranger]
    assert [type(message) for message in answers] == [Connected, Closed, Closed]  # nothing yet about attempt 1
    couple.to_decode.extend(message for peer, message in messages if peer == DECODE)
    couple.open(("r", 2), 2)
    couple.sender.on_message(stranger, Grant("r", 2, 1, 0, (5,)), 0.0)
    ((_, closed),), _ = couple.sender.take()
    assert closed == Closed("r", 2, "unknown", "this request goes to another decode node")
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_another_prefill_node_cannot_touch_a_transfer(couple: Couple) -> None:
    couple.begin(KEY, 2)
    lies = (Delivered("r", 0, 1, (0, 1)), Handoff("r", 0, 8, 1), Closed("r", 0, "failed"))
    for message in lies:
        couple.receiver.on_message("x" * 32, message, 0.0)
    couple.settle()
    assert KEY not in couple.events
    assert couple.receiver.counters()["stale_messages"] == 3


@pytest.mark.parametrize(
    "message",
    [
        Delivered("r", 0, 1, (0,)),  # again
        Delivered("r", 0, 1, (3,)),
        Delivered("r", 0, 1, (1, 1)),
        Delivered("r", 0, 1, (1,), part=1),
        Delivered("r", 0, 0, (1,)),
        Delivered("r", 0, 2, (1,)),
        Delivered("r", 1, 1, (1,)),
        Handoff("r", 0, 100, 1),
        Handoff("q", 0, 11, 1),
        Connected(1, "inprocess"),
        Connected(9, "inprocess"),
        Refused("late"),
        Ping(),
    ],
    ids=str,
)
def test_what_a_prefill_node_cannot_mean_is_counted_and_ignored(couple: Couple, message: Message) -> None:
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.compute(KEY, 1)
    couple.pump()
    couple.hear_prefill()
    couple.receiver.on_message(PREFILL, message, 0.0)
    couple.settle()
    assert couple.receiver.counters()["stale_messages"] == 1
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


@pytest.mark.parametrize(
    "message",
    [Grant("s", 0, 0, 0, (9,)), Grant("s", 0, 2, 0, (9,)), Received("s", 0), Received("r", 0), Ping(), Refused("no")],
    ids=str,
)
def test_what_a_decode_node_cannot_mean_is_counted_and_ignored(couple: Couple, message: Message) -> None:
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.compute(KEY, 1)
    couple.sender.on_message(DECODE, message, 0.0)
    couple.settle()
    assert couple.sender.counters()["stale_messages"] == 1
    assert not couple.to_decode
    couple.finish(KEY)
    couple.sender.on_message(DECODE, Received("r", 0), 0.0)  # pages are not written yet
    couple.settle()
    assert KEY not in couple.released
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_the_same_message_twice_changes_nothing(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    for message in list(couple.to_decode):
        couple.to_decode.append(message)
    while couple.to_decode:
        couple.hear_prefill()
    received = couple.to_prefill[0]
    couple.to_prefill.append(received)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.sender.counters()["stale_messages"] == 1
    assert couple.receiver.counters()["stale_messages"] == 2


def test_an_ungranted_prompt_may_be_retracted_and_computed_again(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.finish(KEY)
    assert not couple.sender.is_granted(KEY)
    couple.sender.retract(KEY)
    couple.settle()
    couple.begin(KEY, 2)
    couple.run()
    assert not couple.writer.written
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_retracted_prompt_hands_nothing_over_until_it_is_computed_again(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.sender.retract(KEY)
    couple.begin(KEY, 2)
    couple.run()
    assert not any(isinstance(message, Handoff) for message in couple.to_decode)
    assert couple.receiver._incoming.sessions[KEY].state is Receiving.GRANTED
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_granted_prompt_is_not_retracted(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    with pytest.raises(AssertionError):
        couple.sender.retract(KEY)


# ---- pairs ------------------------------------------------------------------------------------------------------


def test_a_pair_that_cannot_work_is_refused_with_a_sentence() -> None:
    base = Couple().receiver.connect(PREFILL)
    wrong: dict[str, dict[str, object]] = {
        "serves a model with digest other": {"digest": "other"},
        "transfers by 'nixl', this prefill node by 'inprocess'": {"transport": "nixl"},
        "of the page sizes 6 and 4 one must be a multiple of the other": {"geometry": Geometry(1, 1, 2, 6, "float32")},
        "kv heads 2 and 1 must be equal": {"geometry": Geometry(1, 2, 2, 4, "float32")},
        "layers 3 and 1 must be equal": {"geometry": Geometry(3, 1, 2, 4, "float32")},
        "head dim 4 and 2 must be equal": {"geometry": Geometry(1, 1, 4, 4, "float32")},
        "dtype float16 and float32 must be equal": {"geometry": Geometry(1, 1, 2, 8, "float16")},
        "there is no offer 'nowhere'": {"endpoint": "nowhere"},
    }
    for sentence, change in wrong.items():
        couple = Couple()
        couple.sender.connect(DECODE, msgspec.structs.replace(base, **change))
        ((_, refused),), _ = couple.sender.take()
        assert isinstance(refused, Refused)
        assert sentence in refused.reason
        assert list(couple.sender.peers()) == []


def test_transfers_of_a_refused_pair_fail_at_once() -> None:
    couple = Couple()
    couple.begin(("before", 0), 2)
    couple.receiver.connect(PREFILL)
    couple.settle()
    couple.begin(("amid", 0), 2)
    couple.to_decode.append(Refused("another model", 1))
    couple.hear_prefill()
    couple.begin(("after", 0), 2)
    for rid in ("before", "amid", "after"):
        assert couple.events[rid, 0] == TransferFailed((rid, 0), ErrorCode.TRANSFER_FAILED, "another model")
    couple.assert_nothing_is_held()


def test_a_lost_connection_alone_frees_nothing() -> None:
    couple = slow()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    couple.receiver.peer_lost(PREFILL)  # the prefill node has not noticed, and goes on writing
    couple.settle()
    assert failure(couple).code is ErrorCode.NODE_LOST
    couple.poll()
    assert couple.receiver.num_quarantined == 3
    for _ in range(4):
        couple.tick()
    assert couple.writer.num_in_quarantine == 3
    couple.writer.die()
    couple.poll()
    assert couple.receiver.num_quarantined == 0
    assert couple.books.num_free == couple.num_pages


def test_a_dead_writer_fails_its_transfers_and_frees_their_pages() -> None:
    couple = slow()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.begin(("early", 0), 2)
    couple.run()
    couple.writer.die()
    couple.poll()
    assert failure(couple).code is ErrorCode.NODE_LOST
    assert couple.pairs_lost == 1
    assert couple.books.num_free == couple.num_pages
    assert list(couple.receiver.peers()) == []


def test_a_new_connection_proves_that_the_old_one_writes_no_more() -> None:
    couple = slow()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.compute(KEY, 2)
    couple.pump()
    couple.to_prefill.append(couple.receiver.connect(PREFILL))  # says so before the prefill node sees anything
    couple.settle()
    assert couple.receiver.num_quarantined == 3
    couple.hear_decode()
    assert not couple.released[KEY].ok
    assert couple.wire.num_in_flight == 0
    couple.hear_prefill()
    assert couple.receiver.num_quarantined == 0
    assert couple.receiver.is_connected(PREFILL)
    couple.assert_nothing_is_held()


def test_news_of_an_earlier_connection_connects_no_later_one() -> None:
    couple = Couple()
    couple.receiver.connect(PREFILL)
    couple.receiver.connect(PREFILL)
    couple.receiver.on_message(PREFILL, Connected(1, "inprocess"))
    assert not couple.receiver.is_connected(PREFILL)
    assert couple.receiver.counters()["stale_messages"] == 1


def test_a_refusal_of_an_earlier_connection_refuses_no_later_one() -> None:
    couple = Couple()
    couple.receiver.connect(PREFILL)
    couple.begin(KEY, 2)
    couple.to_prefill.append(couple.receiver.connect(PREFILL))
    couple.to_decode.append(Refused("it took too long", 1))
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.receiver.counters()["stale_messages"] == 1


def test_grants_and_deliveries_of_an_earlier_epoch_are_refused(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    old_grant = couple.to_prefill.popleft()
    couple.connect()
    couple.to_prefill.append(old_grant)
    couple.hear_decode()
    assert couple.sender.counters()["stale_messages"] == 1
    couple.compute(KEY, 1)
    couple.run()
    assert not couple.writer.written
    couple.begin(("s", 0), 2)
    couple.receiver.on_message(PREFILL, Delivered("s", 0, 1, (0, 1)), 0.0)
    couple.settle()
    assert couple.target.num_landed == 0


def test_late_proof_about_an_earlier_epoch_says_nothing_about_this_one(couple: Couple) -> None:
    couple.to_prefill.append(couple.receiver.connect(PREFILL))
    couple.settle()
    couple.hear_decode()  # lets go of the pool under epoch 1; the reader's transport will say so when it is asked
    couple.hear_prefill()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.poll()
    assert KEY not in couple.events
    assert couple.receiver.is_connected(PREFILL)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_an_old_offer_is_counted_and_ignored(couple: Couple) -> None:
    first = couple.receiver.connect(PREFILL)
    second = couple.receiver.connect(PREFILL)
    couple.sender.connect(DECODE, second)
    couple.sender.connect(DECODE, first)
    couple.settle()
    assert [type(message) for message in couple.to_decode] == [Connected]
    assert couple.sender.counters()["stale_messages"] == 1


def test_requests_that_were_granted_nothing_survive_a_new_connection(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.open(("granted", 0), 2)
    couple.begin(("granted", 0), 2)
    couple.run()
    couple.connect()
    assert ("granted", 0) in couple.released
    assert KEY not in couple.released
    couple.begin(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_close_lets_go_of_everything(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.run()
    couple.sender.close()
    couple.settle()
    assert not couple.released[KEY].ok
    couple.poll()
    assert couple.books.count(Owner.GRANT) == 2  # it may come back
    couple.receiver.close()
    couple.settle()
    assert failure(couple).code is ErrorCode.NODE_LOST
    couple.assert_nothing_is_held()
