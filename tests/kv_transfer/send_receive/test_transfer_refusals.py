"""Invalid and duplicate messages: each is refused with an explanation or counted, and no state changes."""

import pytest
from support.couples import KEY, couple, shipped
from support.kv_fakes import DECODE, PREFILL, Couple, MemfdStore

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
    TransferAck,
)
from kv_transfer.events import Completed
from kv_transfer.receive.receiver import Receiver
from kv_transfer.states import ReceiveState
from scripts.simulator.inprocess_transport import InProcessReader

__all__ = ["couple"]


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
def test_an_invalid_grant_ends_the_transfer(couple: Couple, first: int, pages: tuple[int, ...], why: str) -> None:
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


def test_a_duplicate_grant_is_counted_and_changes_nothing(couple: Couple) -> None:
    """The duplicate may arrive early, when some pages are written, or after a later grant."""
    pages = couple.begin(KEY, 3)
    [grant] = [message for message in couple.to_prefill if isinstance(message, Grant)]
    for _ in range(2):
        couple.sender.on_message(DECODE, grant, 0.0)
    couple.open(KEY, 3)
    couple.compute(KEY, 1)
    couple.pump()
    couple.hear_decode()
    couple.sender.on_message(DECODE, Grant("r", 0, 1, 1, grant.pages[1:]), 0.0)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert sorted(couple.writer.written) == sorted(pages), "a page was not written exactly once"
    counters = couple.sender.counters()
    assert (counters["stale_messages"], counters["refused_grants"]) == (3, 0)
    couple.give_back(KEY)
    couple.assert_nothing_is_held()


def test_an_invalid_early_grant_is_refused(couple: Couple) -> None:
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


def test_pages_beyond_the_end_of_the_prompt_are_refused_when_the_end_is_known(couple: Couple) -> None:
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


def test_another_decode_node_cannot_affect_a_transfer(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.finish(KEY)
    stranger = "x" * 32
    reader = InProcessReader(couple.wire, MemfdStore(16))
    connect = Receiver(reader, PageAllocator(16), digest="model").connect(PREFILL)
    for message in (
        connect,
        AbortTransfer("r", 0),
        TransferAck("r", 0),
        Grant("r", 0, 1, 0, (4,)),
        Grant("r", 1, 1, 0, (4,)),
    ):
        couple.sender.on_message(stranger, message, 0.0)
    messages, released = couple.sender.take()
    assert not released
    answers = [message for peer, message in messages if peer == stranger]
    assert [type(message) for message in answers] == [Connected, Closed, Closed]  # nothing about attempt 1 yet
    couple.to_decode.extend(message for peer, message in messages if peer == DECODE)
    couple.open(("r", 2), 2)
    couple.sender.on_message(stranger, Grant("r", 2, 1, 0, (5,)), 0.0)
    ((_, closed),), _ = couple.sender.take()
    assert closed == Closed("r", 2, "unknown", "this request goes to another decode node")
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_another_prefill_node_cannot_affect_a_transfer(couple: Couple) -> None:
    couple.begin(KEY, 2)
    lies = (PagesWritten("r", 0, 1, (0, 1)), PrefillDone("r", 0, 8, 1), Closed("r", 0, "failed"))
    for message in lies:
        couple.receiver.on_message("x" * 32, message, 0.0)
    couple.settle()
    assert KEY not in couple.events
    assert couple.receiver.counters()["stale_messages"] == 3


@pytest.mark.parametrize(
    "message",
    [
        PagesWritten("r", 0, 1, (0,)),  # a duplicate
        PagesWritten("r", 0, 1, (3,)),
        PagesWritten("r", 0, 1, (1, 1)),
        PagesWritten("r", 0, 1, (1,), part=1),
        PagesWritten("r", 0, 0, (1,)),
        PagesWritten("r", 0, 2, (1,)),
        PagesWritten("r", 1, 1, (1,)),
        PrefillDone("r", 0, 100, 1),
        PrefillDone("q", 0, 11, 1),
        Connected(1, "inprocess"),
        Connected(9, "inprocess"),
        Refused("late"),
        Ping(),
    ],
    ids=str,
)
def test_an_invalid_message_of_a_prefill_node_is_counted_and_ignored(couple: Couple, message: Message) -> None:
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
    [
        Grant("s", 0, 0, 0, (9,)),
        Grant("s", 0, 2, 0, (9,)),
        TransferAck("s", 0),
        TransferAck("r", 0),
        Ping(),
        Refused("no"),
    ],
    ids=str,
)
def test_an_invalid_message_of_a_decode_node_is_counted_and_ignored(couple: Couple, message: Message) -> None:
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.compute(KEY, 1)
    couple.sender.on_message(DECODE, message, 0.0)
    couple.settle()
    assert couple.sender.counters()["stale_messages"] == 1
    assert not couple.to_decode
    couple.finish(KEY)
    couple.sender.on_message(DECODE, TransferAck("r", 0), 0.0)  # the pages are not written yet
    couple.settle()
    assert KEY not in couple.released
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_duplicate_message_changes_nothing(couple: Couple) -> None:
    shipped(couple, 2)
    for message in list(couple.to_decode):
        couple.to_decode.append(message)
    couple.drain_to_decode()
    received = couple.to_prefill[0]
    couple.to_prefill.append(received)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.sender.counters()["stale_messages"] == 1
    assert couple.receiver.counters()["stale_messages"] == 2


def test_a_prompt_without_grants_may_be_retracted_and_computed_again(couple: Couple) -> None:
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


def test_a_retracted_prompt_sends_no_prefill_done_until_it_is_computed_again(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.sender.retract(KEY)
    couple.begin(KEY, 2)
    couple.run()
    assert not any(isinstance(message, PrefillDone) for message in couple.to_decode)
    assert couple.receiver._table.sessions[KEY].state is ReceiveState.GRANTED
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_granted_prompt_is_not_retracted(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    with pytest.raises(AssertionError):
        couple.sender.retract(KEY)
