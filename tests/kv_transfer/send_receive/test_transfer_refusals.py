"""Invalid and duplicate messages: each is refused with an explanation or counted, and no state changes."""

import pytest
from support.kv.connected_pair import KEY, half_written, slow, written_unreported
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore, TransferPair

from common.cache.page_allocator import PageAllocator
from common.wire.messages import (
    AbortTransfer,
    Closed,
    Connected,
    Grant,
    Message,
    PagesWritten,
    Ping,
    PrefillDone,
    Refused,
    Resend,
    TransferAck,
)
from kv_transfer.events import Completed
from kv_transfer.receive.receiver import Receiver
from kv_transfer.states import ReceiveState
from scripts.simulator.service.inprocess_transport import InProcessReader

STRANGER = "x" * 32
CANCELLED = "the decode node does not want it any more"


# ---- invalid messages -------------------------------------------------------------------------------------------


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
def test_an_invalid_grant_ends_the_transfer(pair: TransferPair, first: int, pages: tuple[int, ...], why: str) -> None:
    pair.open(KEY, 3)
    pair.sender.on_message(DECODE, Grant("r", 0, 1, 0, (0, 1)), 0.0)
    pair.sender.on_message(DECODE, Grant("r", 0, 1, first, pages), 0.0)
    pair.settle()
    closed = pair.to_decode.pop()
    assert isinstance(closed, Closed)
    assert closed.reason == "failed"
    assert why in closed.message or (first, why) == (0, "a page is granted twice")
    assert not pair.released[KEY].ok
    assert pair.sender.counters()["refused_grants"] == 1
    pair.run()
    assert not pair.writer.written


def test_a_duplicate_grant_is_counted_and_changes_nothing(pair: TransferPair) -> None:
    """The duplicate may arrive early, when some pages are written, or after a later grant."""
    pages = pair.begin(KEY, 3)
    [grant] = [message for message in pair.to_prefill if isinstance(message, Grant)]
    for _ in range(2):
        pair.sender.on_message(DECODE, grant, 0.0)
    pair.open(KEY, 3)
    pair.compute(KEY, 1)
    pair.pump()
    pair.hear_decode()
    pair.sender.on_message(DECODE, Grant("r", 0, 1, 1, grant.pages[1:]), 0.0)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert sorted(pair.writer.written) == sorted(pages), "a page was not written exactly once"
    counters = pair.sender.counters()
    assert (counters["stale_messages"], counters["refused_grants"]) == (3, 0)
    pair.give_back(KEY)
    pair.assert_nothing_is_held()


def test_an_invalid_early_grant_is_refused(pair: TransferPair) -> None:
    pair.sender.on_message(DECODE, Grant("r", 0, 1, 0, (99,)), 0.0)
    pair.settle()
    closed = pair.to_decode.pop()
    assert isinstance(closed, Closed)
    assert closed.reason == "failed"
    pair.open(KEY, 1)
    assert not pair.released[KEY].ok


def test_a_page_cannot_be_granted_to_two_transfers(pair: TransferPair) -> None:
    pair.open(("a", 0), 2)
    pair.open(("b", 0), 2)
    pair.sender.on_message(DECODE, Grant("a", 0, 1, 0, (5,)), 0.0)
    pair.sender.on_message(DECODE, Grant("b", 0, 1, 0, (5,)), 0.0)
    pair.settle()
    assert ("b", 0) in pair.released
    assert ("a", 0) not in pair.released


def test_pages_beyond_the_end_of_the_prompt_are_refused_when_the_end_is_known(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.sender.on_message(DECODE, Grant("r", 0, 1, 0, (0, 1, 2)), 0.0)
    pair.finish(KEY)
    assert not pair.released[KEY].ok
    other = ("s", 0)
    pair.open(other, 2)
    pair.finish(other)
    pair.sender.on_message(DECODE, Grant("s", 0, 1, 1, (3, 4)), 0.0)
    pair.settle()
    assert not pair.released[other].ok
    assert all(isinstance(message, Closed) for message in pair.to_decode)


def test_another_decode_node_cannot_affect_a_transfer(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    pair.finish(KEY)
    reader = InProcessReader(pair.wire, MemfdStore(16))
    connect = Receiver(reader, PageAllocator(16), digest="model").connect(PREFILL)
    for message in (
        connect,
        AbortTransfer("r", 0),
        TransferAck("r", 0),
        Grant("r", 0, 1, 0, (4,)),
        Grant("r", 1, 1, 0, (4,)),
    ):
        pair.sender.on_message(STRANGER, message, 0.0)
    messages, released = pair.sender.take()
    assert not released
    answers = [message for peer, message in messages if peer == STRANGER]
    assert [type(message) for message in answers] == [Connected, Closed, Closed]  # nothing about attempt 1 yet
    pair.to_decode.extend(message for peer, message in messages if peer == DECODE)
    pair.open(("r", 2), 2)
    pair.sender.on_message(STRANGER, Grant("r", 2, 1, 0, (5,)), 0.0)
    ((_, closed),), _ = pair.sender.take()
    assert closed == Closed("r", 2, "unknown", "this request goes to another decode node")
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def grant_early(pair: TransferPair) -> None:
    """Let another decode node connect, and grant pages for ``KEY`` before the prefill node knows the request."""
    reader = InProcessReader(pair.wire, MemfdStore(16))
    connect = Receiver(reader, PageAllocator(16), digest="model").connect(PREFILL)
    for message in (connect, Grant("r", 0, 1, 0, (4,))):
        pair.sender.on_message(STRANGER, message, 0.0)
    assert [type(message) for _, message in pair.sender.take()[0]] == [Connected]


def end_early(pair: TransferPair) -> None:
    """Let the early grant of another decode node end."""
    pair.sender.on_message(STRANGER, AbortTransfer("r", 0), 0.0)
    assert pair.sender.take() == ([(STRANGER, Closed("r", 0, "cancelled", CANCELLED))], [])
    pair.check()


def test_the_end_of_an_early_grant_of_another_decode_node_keeps_the_prefill_done_of_a_transfer(
    pair: TransferPair,
) -> None:
    grant_early(pair)
    pair.open(KEY, 2)
    pair.finish(KEY)
    end_early(pair)
    pair.begin(KEY, 2)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_the_end_of_an_early_grant_of_another_decode_node_keeps_the_due_pages_of_a_transfer(pair: TransferPair) -> None:
    grant_early(pair)
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    pair.finish(KEY)
    end_early(pair)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_the_end_of_an_early_grant_of_another_decode_node_keeps_the_end_of_a_transfer() -> None:
    pair = slow()
    grant_early(pair)
    half_written(pair)
    pair.cancel(KEY)
    pair.drain_to_prefill()
    end_early(pair)
    assert KEY not in pair.released
    pair.run()
    assert not pair.released[KEY].ok
    pair.assert_nothing_is_held()


def test_another_prefill_node_cannot_affect_a_transfer(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    lies = (PagesWritten("r", 0, 1, (0, 1)), PrefillDone("r", 0, 8, 1), Closed("r", 0, "failed"))
    for message in lies:
        pair.receiver.on_message(STRANGER, message, 0.0)
    pair.settle()
    assert KEY not in pair.events
    assert pair.receiver.counters()["stale_messages"] == 3


@pytest.mark.parametrize(
    "message",
    [
        PagesWritten("r", 0, 1, (0,)),  # a duplicate
        PagesWritten("r", 0, 1, (3,)),
        PagesWritten("r", 0, 1, (1, 1)),
        PagesWritten("r", 0, 1, (1,), unit=1),
        PagesWritten("r", 0, 0, (1,)),
        PagesWritten("r", 0, 2, (1,)),
        PagesWritten("r", 1, 1, (1,)),
        PagesWritten("r", 0, 1, ()),
        PagesWritten("r", 0, 1, (), unit=7, checksums=(0,)),
        PrefillDone("r", 0, 100, 1),
        PrefillDone("q", 0, 11, 1),
        Connected(1, "inprocess"),
        Connected(9, "inprocess"),
        Refused("late"),
    ],
    ids=str,
)
def test_an_invalid_message_of_a_prefill_node_is_counted_and_ignored(pair: TransferPair, message: Message) -> None:
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.hear_decode()
    pair.compute(KEY, 1)
    pair.pump()
    pair.hear_prefill()
    pair.receiver.on_message(PREFILL, message, 0.0)
    pair.settle()
    assert pair.receiver.counters()["stale_messages"] == 1
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


@pytest.mark.parametrize(
    "message",
    [
        Grant("s", 0, 0, 0, (9,)),
        Grant("s", 0, 2, 0, (9,)),
        TransferAck("s", 0),
        TransferAck("r", 0),
        Resend("r", 0, 1, (), 0, 1),
        Ping(),
        Refused("no"),
    ],
    ids=str,
)
def test_an_invalid_message_of_a_decode_node_is_counted_and_ignored(pair: TransferPair, message: Message) -> None:
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.hear_decode()
    pair.compute(KEY, 1)
    pair.sender.on_message(DECODE, message, 0.0)
    pair.settle()
    assert pair.sender.counters()["stale_messages"] == 1
    assert not pair.to_decode
    pair.finish(KEY)
    pair.sender.on_message(DECODE, TransferAck("r", 0), 0.0)  # the pages are not written yet
    pair.settle()
    assert KEY not in pair.released
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_duplicate_message_changes_nothing(pair: TransferPair) -> None:
    written_unreported(pair, 2)
    for message in list(pair.to_decode):
        pair.to_decode.append(message)
    pair.drain_to_decode()
    received = pair.to_prefill[0]
    pair.to_prefill.append(received)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert pair.sender.counters()["stale_messages"] == 1
    assert pair.receiver.counters()["stale_messages"] == 2


def test_a_prompt_without_grants_may_be_retracted_and_computed_again(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.finish(KEY)
    assert not pair.sender.is_granted(KEY)
    pair.sender.retract(KEY)
    pair.settle()
    pair.begin(KEY, 2)
    pair.run()
    assert not pair.writer.written
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_retracted_prompt_sends_no_prefill_done_until_it_is_computed_again(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.sender.retract(KEY)
    pair.begin(KEY, 2)
    pair.run()
    assert not any(isinstance(message, PrefillDone) for message in pair.to_decode)
    assert pair.receiver._table.sessions[KEY].state is ReceiveState.GRANTED
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_granted_prompt_is_not_retracted(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    with pytest.raises(AssertionError):
        pair.sender.retract(KEY)
