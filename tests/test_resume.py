"""A data connection that breaks while the control connection holds: mended a few times, and what it costs."""

import pytest
from kv_fakes import DECODE, PREFILL, Couple, content, owner_of

from common.errors import ErrorCode
from common.messages import Connect, Grant, Handoff, Received, Refused, Resend
from common.pages import Owner
from kv_transfer.events import Completed, TransferFailed
from kv_transfer.links import ANSWER_S, BACKOFF_S, MAX_TRIES, RESUME_LEASE_S, Link
from kv_transfer.transports.base import Fenced
from kv_transfer.transports.inprocess import Fault, Wire

KEY = ("r", 0)


def snap(couple: Couple) -> None:
    """The data connection breaks; both ends notice."""
    couple.writer.lose(DECODE, "a snap")
    couple.pump()
    couple.poll()


@pytest.fixture
def couple() -> Couple:
    """One page (64 bytes) a tick, and a tick of latency."""
    couple = Couple(Wire(latency=1, bytes_per_tick=64))
    couple.connect()
    return couple


def halfway(couple: Couple) -> list[int]:
    """A transfer of four pages, of which one has arrived and a second is on its way."""
    couple.open(KEY, 4)
    pages = couple.begin(KEY, 4)
    couple.hear_decode()
    for num_pages in (1, 2):
        couple.compute(KEY, num_pages)
        couple.pump()
    couple.tick()
    couple.pump()
    assert couple.wire.num_in_flight == 1
    return pages


# ---- how often, and when --------------------------------------------------------------------------------------------


def test_pauses_double_and_end() -> None:
    link = Link(1, "p")
    pauses = []
    while link.broke(10.0):
        assert link.retry_at is not None
        pauses.append(link.retry_at - 10.0)
        link.try_again(2, 10.0)
        assert (link.retry_at, link.until, link.is_resuming) == (None, 10.0 + ANSWER_S, True)
    assert pauses == [pytest.approx(BACKOFF_S * factor) for factor in (1, 2, 4, 8)]
    assert len(pauses) == MAX_TRIES


def test_the_prefill_node_waits_for_longer_than_all_tries_take() -> None:
    assert sum(BACKOFF_S * 2**n + ANSWER_S for n in range(MAX_TRIES)) + ANSWER_S < RESUME_LEASE_S


def test_nothing_is_tried_before_its_time(couple: Couple) -> None:
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


# ---- transfers go on ------------------------------------------------------------------------------------------------


def test_only_what_has_not_arrived_is_granted_anew_and_shipped(couple: Couple) -> None:
    pages = halfway(couple)
    couple.hear_prefill()
    assert couple.receiver.counters()["pages_received"] == 1
    snap(couple)
    assert couple.books.count(Owner.GRANT) == 4
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


def test_a_page_that_is_lost_with_the_connection_is_shipped_by_the_next() -> None:
    couple = Couple(Wire(faults={1: Fault("drop")}))
    couple.connect()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.pairs_lost == 0


@pytest.mark.parametrize("is_before", [True, False], ids=["handoff before", "handoff amid"])
def test_the_handoff_is_said_once_whenever_the_connection_breaks(couple: Couple, is_before: bool) -> None:
    halfway(couple)
    if is_before:
        couple.finish(KEY)
    snap(couple)
    if not is_before:
        couple.finish(KEY)
    num_said = 0
    for _ in range(60):
        num_said += sum(isinstance(message, Handoff) for message in couple.to_decode)
        while couple.to_decode:
            couple.hear_prefill()
        while couple.to_prefill:
            couple.hear_decode()
        couple.now += 0.01
        couple.tick()
        couple.poll()
        couple.pump()
    assert num_said == 1
    assert isinstance(couple.events[KEY], Completed)


def test_a_handoff_that_comes_after_the_decode_node_noticed_is_kept(couple: Couple) -> None:
    """The prefill node has not noticed yet, and will not say it again."""
    halfway(couple)
    couple.finish(KEY)
    couple.writer.lose(DECODE, "a snap")
    couple.reader._news.append(Fenced(PREFILL, 1, "a snap"))
    couple.poll()
    assert couple.sender.counters()["broken_pairs"] == 0
    while couple.to_decode:
        couple.hear_prefill()
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_what_was_delivered_and_not_heard_of_before_the_break_is_shipped_once_more(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.receiver.counters()["stale_messages"] == 1  # of a page under an epoch that was over
    assert couple.sender.counters()["pages_sent"] == 5


def test_a_transfer_that_was_complete_when_the_connection_broke_needs_no_other() -> None:
    couple = Couple()
    couple.connect()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    while couple.to_decode:
        couple.hear_prefill()
    assert list(couple.to_prefill) == [Received("r", 0)]
    snap(couple)
    couple.hear_decode()
    assert couple.released[KEY].ok
    assert isinstance(couple.events[KEY], Completed)


def test_an_early_grant_is_granted_anew(couple: Couple) -> None:
    couple.begin(KEY, 2)
    couple.hear_decode()
    snap(couple)
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_requests_that_begin_amid_a_break_are_granted_when_it_is_mended(couple: Couple) -> None:
    snap(couple)
    couple.open(KEY, 3)
    couple.begin(KEY, 3, reserve=1)
    couple.extend(KEY, 1)
    couple.finish(KEY)
    assert not any(isinstance(message, Grant) for message in couple.to_prefill)
    couple.run()
    couple.extend(KEY, 1)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_page_in_between_lets_the_count_begin_anew() -> None:
    """Nine breaks, after each of which a page arrives."""
    couple = Couple(Wire(faults={n: Fault("drop") for n in range(1, 18, 2)}), num_pages=20)
    couple.connect()
    couple.open(KEY, 18)
    couple.begin(KEY, 18)
    couple.finish(KEY)
    for _ in range(40):
        while couple.to_prefill:
            couple.hear_decode()
        couple.pump(max_pages=1)
        while couple.to_decode:
            couple.hear_prefill()
        couple.now += 0.1
        couple.poll()
    couple.run()
    assert couple.receiver.counters()["reconnects"] > MAX_TRIES
    assert isinstance(couple.events[KEY], Completed)


# ---- and when they do not -------------------------------------------------------------------------------------------


def test_a_cancel_amid_a_break_frees_the_pages_at_once(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.cancel(KEY)
    assert couple.books.num_free == couple.num_pages
    couple.run()
    assert not couple.released[KEY].ok
    couple.assert_nothing_is_held()


def test_an_abort_amid_a_break_reaches_the_other_side(couple: Couple) -> None:
    halfway(couple)
    snap(couple)
    couple.sender.abort(KEY, "aborted", "because")
    couple.settle()
    couple.run()
    assert couple.events[KEY] == TransferFailed(KEY, ErrorCode.ABORTED, "because")
    couple.assert_nothing_is_held()


def test_pages_of_a_cancelled_transfer_leave_quarantine_with_the_break(couple: Couple) -> None:
    halfway(couple)
    couple.cancel(KEY)
    assert couple.receiver.num_quarantined == 4
    couple.to_prefill.clear()  # the word is slow
    snap(couple)
    assert couple.receiver.num_quarantined == 0


def test_a_connection_that_breaks_at_once_each_time_ends_in_an_error_that_names_pair_and_transport() -> None:
    couple = Couple(Wire(faults={n: Fault("drop") for n in range(50)}))
    couple.to_prefill.append(couple.receiver.connect(PREFILL, "prefill-7"))
    couple.settle()
    couple.run()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.finish(KEY)
    couple.run()
    why = (
        "inprocess from prefill node prefill-7 to decode node decode-0 broke and could not be mended in 4 tries: "
        "the writer has let go"
    )
    assert couple.events[KEY] == TransferFailed(KEY, ErrorCode.TRANSFER_FAILED, why)
    assert couple.pairs_lost == 1
    assert couple.receiver.counters()["reconnects"] == MAX_TRIES
    assert couple.books.num_free == couple.num_pages
    couple.sender.peer_lost(DECODE)  # the role hangs up
    couple.settle()
    couple.assert_nothing_is_held()


@pytest.mark.parametrize("is_silent", [True, False], ids=["silence", "refusal"])
def test_a_try_that_is_refused_or_not_answered_counts_as_one(couple: Couple, is_silent: bool) -> None:
    halfway(couple)
    snap(couple)
    num_connects = 0
    for _ in range(200):
        couple.now += 0.5
        couple.poll()
        if couple.to_prefill:
            assert isinstance(couple.to_prefill.popleft(), Connect)
            num_connects += 1
            if not is_silent:
                couple.to_decode.appendleft(Refused("no way there", couple.receiver._links.epoch))
                couple.hear_prefill()
    assert num_connects == MAX_TRIES
    event = couple.events[KEY]
    assert isinstance(event, TransferFailed)
    assert event.message.endswith("it did not answer" if is_silent else "no way there")
    assert couple.books.num_free == couple.num_pages


def test_a_prefill_node_that_nobody_connects_to_again_gives_up_by_itself(couple: Couple) -> None:
    halfway(couple)
    couple.writer.lose(DECODE, "a snap")
    couple.pump()
    assert couple.sender.peers() == [DECODE]
    couple.now = RESUME_LEASE_S + 1
    couple.pump()
    reason = couple.released[KEY].reason
    assert reason.startswith("the wire to") and reason.endswith("no new connection within 60 s")


def test_death_is_no_break(couple: Couple) -> None:
    halfway(couple)
    couple.writer.die()
    couple.poll()
    assert couple.pairs_lost == 1
    event = couple.events[KEY]
    assert isinstance(event, TransferFailed) and event.code is ErrorCode.NODE_LOST
    assert couple.books.num_free == couple.num_pages


def test_proof_about_an_offer_that_was_never_taken_up_is_a_break_too(couple: Couple) -> None:
    """The answer to that offer, which comes late, says nothing any more."""
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


def test_writes_that_cannot_be_called_back_end_their_transfer_and_others_go_on() -> None:
    couple = Couple(Wire(latency=3, can_recall=False))
    couple.connect()
    other = ("s", 0)
    for key in (KEY, other):
        couple.open(key, 2)
        couple.begin(key, 2)
        couple.hear_decode()
    couple.compute(KEY, 1)
    couple.pump()
    couple.sender._sever(DECODE, "a snap", is_all=False, is_resumed=True)
    couple.settle()
    assert KEY not in couple.released, "its page is still being read"
    assert other not in couple.released
    for _ in range(4):
        couple.tick()
    couple.pump()
    assert not couple.released[KEY].ok
    couple.finish(other)
    couple.sender._transport.detach(DECODE)  # as the choice of transports does, until it is let go
    couple.run()
    assert isinstance(couple.events[other], Completed)
    assert set(couple.target.read(couple.grants[other][0])) == {content(other, 0)}


def test_a_break_before_a_damaged_page_is_asked_for_again_loses_no_count_of_it() -> None:
    """The decode node waited for the second writing of a page that the prefill node was to write for the first time."""
    couple = Couple(Wire(faults={0: Fault("corrupt")}), wants_checksums=(True, True))
    couple.connect()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    couple.pump()
    while couple.to_decode:
        couple.hear_prefill()
    assert [type(message) for message in couple.to_prefill] == [Resend]
    snap(couple)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def turns(couple: Couple) -> None:
    """A few of both nodes, whatever is under way for ever."""
    for _ in range(5):
        couple.poll()
        couple.pump()
        while couple.to_prefill:
            couple.hear_decode()
        while couple.to_decode:
            couple.hear_prefill()


def test_a_break_that_nobody_can_prove_to_be_over_ends_the_transfers_soon_and_keeps_the_pages_aside() -> None:
    """As when NIXL breaks between two hosts: the decode node does not see it, and granted on for ever."""
    couple = Couple(Wire(faults={0: Fault("drop"), 1: Fault("delay", 10**6)}, can_recall=False))
    couple.connect()
    other, later = ("s", 0), ("t", 0)
    for key in (KEY, other):
        couple.open(key, 1)
        couple.begin(key, 1)
        couple.hear_decode()
        couple.finish(key)
    couple.pump()  # the first write breaks the connection, the second is under way by then
    turns(couple)
    couple.open(later, 1)
    couple.begin(later, 1)
    couple.now = ANSWER_S - 0.1
    turns(couple)
    assert couple.events.keys() == {KEY}, "its write is over"
    couple.now = ANSWER_S
    turns(couple)
    assert couple.pairs_lost == 1
    assert [couple.events[key].code for key in (other, later)] == [ErrorCode.NODE_LOST] * 2
    assert couple.books.count(Owner.QUARANTINE) == 1, "something may still write this"
    assert owner_of(couple.books, couple.grants[other][0], Owner.QUARANTINE) is Owner.QUARANTINE


def test_a_break_that_is_proven_to_be_over_in_time_is_mended() -> None:
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
    couple.sender._transport.detach(DECODE)  # as the choice of transports does, until it is let go
    couple.run()
    couple.now += BACKOFF_S
    couple.run()
    assert isinstance(couple.events[later], Completed)
    assert couple.books.count(Owner.QUARANTINE) == 0
