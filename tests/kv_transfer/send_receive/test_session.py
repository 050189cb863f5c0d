"""State tables of both ends of a transfer, and the page arithmetic of their sessions."""

from enum import StrEnum
from typing import Any

import pytest

from common.errors import InvariantError
from kv_transfer.page_mapping import Units, units_of
from kv_transfer.receive.session import ReceiveSession
from kv_transfer.send.session import SendSession
from kv_transfer.send.tombstones import TransferEnd
from kv_transfer.states import MAX_RESENDS, RECEIVE_TABLE, SEND_TABLE, ReceiveEvent, ReceiveState, SendEvent, SendState

KEY = ("r", 0)
PAGES = Units(1)  # equal on both nodes

# Rows are states, columns are events, and "." is impossible. Written by hand from the design, not from the code.
SEND = """
          open grant     compute finish    start     written   resend    suspend   acknowledged retract end     fence
early     open early     .       .         .         .         .         early     .            .       closing .
open      .    open      open    prefilled open      open      open      open      .            open    closing .
prefilled .    prefilled .       .         prefilled prefilled prefilled prefilled closed       open    closing .
closing   .    .         .       .         .         closing   .         .         .            .       .       closed
closed    .    .         .       .         .         .         .         .         .            .       .       .
"""
RECEIVE = """
             grant      deliver    corrupt    land      prefill_done  suspend   cancel       lose         close  fence
reserved     granted    .          .          .         reserved      .         freed        freed        freed  freed
granted      granted    granted    granted    landed    prefilled     reserved  quarantined  quarantined  freed  freed
prefilled    prefilled  prefilled  prefilled  complete  .             reserved  quarantined  quarantined  freed  freed
landed       .          .          .          .         complete      reserved  quarantined  quarantined  freed  freed
complete     .          .          .          .         .             .         .            .            .      .
quarantined  .          .          .          .         .             .         .            .            freed  freed
freed        .          .          .          .         .             .         .            .            .      .
"""


def _cells(grid: str, states: type[StrEnum], events: type[StrEnum]) -> list[tuple[StrEnum, StrEnum, str]]:
    header, *rows = [line.split() for line in grid.strip().splitlines()]
    assert header == list(events)
    assert [row[0] for row in rows] == list(states)
    return [(states(row[0]), events(event), row[1 + i]) for row in rows for i, event in enumerate(header)]


def check_cell(session: Any, event: StrEnum, after: str) -> None:
    state = session.state
    assert session.accepts(event) == (after != ".")
    if after == ".":
        with pytest.raises(InvariantError):
            session.apply(event)
        assert session.state is state
    else:
        session.apply(event)
        assert session.state == after


@pytest.mark.parametrize(("state", "event", "after"), _cells(SEND, SendState, SendEvent))
def test_the_sending_end_follows_the_table(state: SendState, event: SendEvent, after: str) -> None:
    check_cell(SendSession(KEY, "peer", state), event, after)


@pytest.mark.parametrize(("state", "event", "after"), _cells(RECEIVE, ReceiveState, ReceiveEvent))
def test_the_receiving_end_follows_the_table(state: ReceiveState, event: ReceiveEvent, after: str) -> None:
    session = receive_session(first=0, pages=[0], length=1)
    session.state = state
    check_cell(session, event, after)


def receive_session(*, first: int, pages: list[int], length: int, page_size: int = 1) -> ReceiveSession:
    return ReceiveSession(KEY, "peer", first=first, pages=pages, length=length, page_size=page_size)


def test_the_tables_cover_every_state_and_event() -> None:
    assert len(SEND_TABLE) == sum(after != "." for _, _, after in _cells(SEND, SendState, SendEvent))
    assert len(RECEIVE_TABLE) == sum(after != "." for _, _, after in _cells(RECEIVE, ReceiveState, ReceiveEvent))


def test_a_page_is_due_once_it_is_both_granted_and_computed() -> None:
    session = SendSession(KEY, "peer")
    session.compute([10, 11])
    assert session.num_due == 0
    session.grant(1, 1, [5, 6, 7], PAGES)  # indices 1, 2, 3
    assert session.num_due == 1
    session.compute([10, 11, 12])
    assert list(session.start(8)) == [1, 2]
    assert [(session.sources[i], session.targets[i]) for i in (1, 2)] == [(11, 5), (12, 6)]
    session.check()
    session.finish([10, 11, 12, 13], 4)
    assert list(session.start(8)) == [3]
    assert session.num_in_flight == 3
    assert not session.is_all_written
    session.written([1, 2, 3])
    assert session.is_all_written
    session.check()


def test_a_start_takes_no_more_pages_than_its_limit_and_no_page_twice() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [0, 1, 2], PAGES)
    session.compute([3, 4, 5])
    assert list(session.start(2)) == [0, 1]
    assert list(session.start(2)) == [2]
    assert list(session.start(2)) == []


def test_nothing_is_due_after_the_end_and_the_fence_waits_for_writes() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [0, 1], PAGES)
    session.compute([3, 4])
    assert list(session.start(1)) == [0]
    session.end(TransferEnd("aborted", ""))
    assert session.num_due == 0
    with pytest.raises(AssertionError):
        session.fence()
    session.written([0])
    session.fence()
    assert session.state is SendState.CLOSED


def test_a_severed_session_is_closed_with_writes_in_flight() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [0], PAGES)
    session.compute([3])
    session.start(1)
    session.sever(TransferEnd("failed", ""))
    assert session.state is SendState.CLOSED


def test_a_grant_of_too_many_pages_is_detected_when_the_prompt_ends() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 1, [4, 5], PAGES)
    session.finish([1, 2], 2)
    assert session.has_ungrantable()


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_parts_of_a_last_page_that_lie_behind_the_prompt_are_not_sent(num_tokens: int) -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [7, 8], units_of(1, 4))
    session.finish(list(range(num_tokens)), num_tokens)
    assert list(session.start(2)) == [0, 1]
    assert list(session.start(8)) == list(range(2, num_tokens))
    assert session.has_ungrantable() == (num_tokens <= 4), "the second page has no token"
    session.written(range(num_tokens))
    assert session.is_all_written == (num_tokens > 4)


def test_a_unit_is_written_once() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [7, 8], PAGES)
    session.compute([1, 2])
    session.start(1)
    with pytest.raises(AssertionError):
        session.written([1])


def test_the_number_of_computed_pages_cannot_shrink() -> None:
    session = SendSession(KEY, "peer")
    session.compute([1, 2])
    with pytest.raises(AssertionError):
        session.compute([1])


def test_a_page_has_arrived_when_all_its_parts_have() -> None:
    session = receive_session(first=2, pages=[8, 9], length=8, page_size=2)
    session.grant(3, 2)
    assert session.deliver([2, 3], unit=0) == []
    assert session.deliver([3], unit=1) == [9]
    assert not session.is_landed
    assert session.deliver([2], unit=1) == [8]
    assert session.state is ReceiveState.LANDED
    session.check()


@pytest.mark.parametrize(
    ("indices", "unit"),
    [([1], 0), ([4], 0), ([2], 0), ([3, 3], 0), ([3], 1), ([3, 4], 0), ([], 0)],
    ids=["held already", "beyond", "twice", "twice in one", "no such unit", "partly beyond", "none"],
)
def test_an_impossible_delivery_is_not_expected(indices: list[int], unit: int) -> None:
    session = receive_session(first=2, pages=[8, 9], length=4)
    session.grant(1)
    session.deliver([2], unit=0)
    assert not session.is_expected(indices, unit)
    assert session.is_expected([3], 0)


def test_a_prompt_without_missing_pages_is_complete_when_it_is_granted() -> None:
    session = receive_session(first=2, pages=[], length=2)
    session.grant(1)
    assert session.state is ReceiveState.LANDED


@pytest.mark.parametrize("pages", [[], [1, 2]], ids=["fewer", "more"])
def test_a_session_has_one_page_for_each_missing_page_of_the_prompt(pages: list[int]) -> None:
    with pytest.raises(AssertionError):
        receive_session(first=2, pages=pages, length=3)


def test_only_a_written_page_is_resent_and_only_a_limited_number_of_times() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [5, 6, 7, 8], PAGES)
    session.compute([1, 2, 3])
    assert list(session.start(2)) == [0, 1]
    session.written([0])
    assert [session.is_written([unit]) for unit in (0, 1, 2, 3, 4)] == [True, False, False, False, False]
    assert not session.is_written([0, 0])
    for _ in range(MAX_RESENDS):
        assert session.resend([0])
        assert not session.is_written([0])
        session.check()
        assert 0 in session.start(9)
        session.written([0])
    assert not session.resend([0])


def test_a_damaged_part_is_expected_again_a_limited_number_of_times() -> None:
    session = receive_session(first=0, pages=[8, 9], length=4, page_size=2)
    session.grant(1, 2)
    for _ in range(MAX_RESENDS):
        assert session.corrupt([0, 1], 1)
        assert session.is_expected([0, 1], 1)
    assert session.corrupt([0], 0)
    assert not session.corrupt([1], 1)
    session.check()


def test_after_a_break_only_newly_granted_pages_are_due() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [5, 6, 7], PAGES)
    session.compute([1, 2])
    assert list(session.start(1)) == [0]
    session.suspend()
    assert (session.num_due, session.num_in_flight, session.is_granted) == (0, 0, True)
    session.finish([1, 2, 3], 3)
    assert not session.is_all_written, "the session did not remember that it was short of pages"
    session.check()
    session.grant(2, 1, [6, 7], PAGES)
    assert list(session.start(9)) == [1, 2]
    session.written([1, 2])
    assert session.is_all_written


def test_a_prompt_written_completely_before_the_break_needs_nothing_more() -> None:
    session = SendSession(KEY, "peer")
    session.grant(1, 0, [5, 6], PAGES)
    session.finish([1, 2], 2)
    session.written(session.start(9))
    session.suspend()
    session.suspend()
    assert session.is_all_written


def test_after_a_break_only_pages_that_have_not_fully_arrived_are_missing() -> None:
    session = receive_session(first=1, pages=[11, 12, 13, 14, 15, 16], length=14, page_size=2)
    session.grant(1, 2)
    for unit in (0, 1):
        session.deliver([2, 5], unit)
    session.deliver([3], 0)
    session.suspend()
    assert (session.state, session.epoch) == (ReceiveState.RESERVED, 0)
    assert session.lacking() == [(1, [11]), (3, [13, 14]), (6, [16])]
    session.grant(2, 2)
    assert session.is_expected([3], 0)
    assert not session.is_expected([2], 0)
    session.check()
