"""Sender and receiver over the in-process wire: the order of pages, and that each page is released exactly once."""

import pytest
from support.kv.connected_pair import KEY, slow, written_unreported
from support.kv.kv_fakes import LAYOUT, TransferPair

from common.wire.messages import Coverage, PagesWritten, PrefillDone
from kv_transfer.events import Completed, Finished
from kv_transfer.send import write_queue

# ---- the common case --------------------------------------------------------------------------------------------


def test_pages_are_sent_while_later_pages_are_computed(pair: TransferPair) -> None:
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.run()
    assert not pair.writer.written
    assert not pair.sender.has_delivered(KEY)
    pair.compute(KEY, 1)
    pair.run()
    assert len(pair.writer.written) == 1
    assert pair.sender.has_delivered(KEY)
    pair.compute(KEY, 2)
    pair.run()
    assert len(pair.writer.written) == 2
    pair.finish(KEY, token=5)
    pair.run()
    event = pair.events[KEY]
    assert isinstance(event, Completed)
    assert event.prefill_done == PrefillDone("r", 0, 11, 5)
    assert pair.released[KEY].ok
    counters = pair.sender.counters()
    assert (counters["pages_sent"], counters["bytes_sent"], counters["pages_overlapped"]) == (3, 192, 2)
    assert pair.receiver.counters()["pages_received"] == pair.target.num_landed == 3
    pair.give_back(KEY)
    pair.assert_nothing_is_held()


def test_only_pages_missing_at_the_decode_node_are_sent(pair: TransferPair) -> None:
    pair.open(KEY, 4)
    pages = pair.begin(KEY, 4, first=3)
    pair.compute(KEY, 3)
    pair.finish(KEY)
    assert pair.receiver.counters()["bytes_saved_by_cache"] == 0
    pair.run()
    assert pair.writer.written == pages
    assert isinstance(pair.events[KEY], Completed)
    assert pair.receiver.counters()["bytes_saved_by_cache"] == 3 * 64


def test_a_fully_cached_prompt_needs_only_prefill_done(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2, first=2)
    pair.finish(KEY)
    pair.run()
    assert not pair.writer.written
    event = pair.events[KEY]
    assert isinstance(event, Completed)
    assert event.pages == ()
    assert pair.released[KEY].ok
    pair.assert_nothing_is_held()


def test_a_grant_may_arrive_before_the_request_is_known(pair: TransferPair) -> None:
    pair.begin(KEY, 2)
    pair.run()
    pair.open(KEY, 2)
    pair.compute(KEY, 1)
    pair.run()
    assert len(pair.writer.written) == 1
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_prompt_may_be_computed_before_anything_is_granted(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.run()
    assert not pair.events  # prefill_done waits for the grant, because the decode node does not know the key before
    assert pair.receiver.counters()["stale_messages"] == 0
    pair.begin(KEY, 2)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_transfer_may_begin_before_the_pair_is_connected() -> None:
    pair = TransferPair()
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.begin(KEY, 2)
    pair.run()
    assert not pair.writer.written
    pair.connect()
    assert isinstance(pair.events[KEY], Completed)


def test_prefill_done_may_overtake_pages() -> None:
    pair = slow()
    written_unreported(pair, 3)
    assert [type(message) for message in pair.to_decode] == [PrefillDone]
    pair.hear_prefill()
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_a_pump_respects_its_page_limit_and_reports_that_more_is_waiting(pair: TransferPair) -> None:
    pair.open(KEY, 5)
    pair.begin(KEY, 5)
    pair.hear_decode()
    pair.compute(KEY, 4)
    assert pair.pump(max_pages=3)
    assert len(pair.writer.written) == 3
    assert pair.to_decode.pop() == PagesWritten("r", 0, 1, (0, 1, 2))
    assert not pair.pump(max_pages=3)


@pytest.mark.parametrize(
    ("checksums", "sizes"),
    [("all", [64, 64, 36, 18, 9, 8, 1]), ("sampled", [64, 64, 36, 18, 9, 8, 1]), ("off", [64, 64, 64, 8])],
)
def test_half_of_the_due_pages_but_at_least_8_mb_are_written_at_once_where_they_are_compared(
    checksums: Coverage, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 pages, of which eight have as many bytes."""
    monkeypatch.setattr(write_queue, "LEAST_BYTES", 8 * LAYOUT.page_bytes)
    pair = TransferPair(num_pages=200, checksums=(checksums, "off"))
    pair.connect()
    written_unreported(pair, 200)
    num_written = [len(pair.writer.written)]
    while sum(num_written) < 200:
        pair.pump()
        num_written.append(len(pair.writer.written) - sum(num_written))
    assert num_written == sizes


def test_requests_are_written_in_the_order_in_which_they_became_due(pair: TransferPair) -> None:
    pages = {}
    for rid in "ab":
        pair.open((rid, 0), 2)
        pages[rid] = pair.begin((rid, 0), 2)
        pair.hear_decode()
    pair.compute(("b", 0), 1)
    pair.compute(("a", 0), 1)
    pair.pump()
    assert pair.writer.written == [pages["b"][0], pages["a"][0]]


def test_the_request_of_lowest_rank_is_written_first(pair: TransferPair) -> None:
    ranks = {"a": 1.0, "b": 2.0}
    pages = {}
    for rid in "ab":
        pair.open((rid, 0), 2)
        pages[rid] = pair.begin((rid, 0), 2)
        pair.hear_decode()
    pair.compute(("b", 0), 2)
    pair.compute(("a", 0), 1)
    pair.sender.pump(0.0, 1, rank=lambda key: ranks[key[0]])
    ranks["b"] = 0.0
    pair.sender.pump(0.0, rank=lambda key: ranks[key[0]])
    pair.settle()
    assert pair.writer.written == [pages["a"][0], *pages["b"]]


def test_an_aborted_prompt_and_a_less_urgent_one_do_not_fill_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "MOST_BYTES", 2 * LAYOUT.page_bytes)
    monkeypatch.setattr(write_queue, "WRITE_BYTES", LAYOUT.page_bytes)
    pair = slow()
    for rid in "abc":
        pair.open((rid, 0), 4)
        pair.begin((rid, 0), 4)
        pair.hear_decode()
        pair.finish((rid, 0))
    assert not pair.pump()  # nothing more could be written before a write is over
    assert pair.wire.num_in_flight == 2
    pair.sender.abort(("a", 0), "aborted")
    ranks = {"b": 1.0, "c": 0.0}
    while pair.wire.num_in_flight:
        pair.wire.tick()
        pair.sender.pump(0.0, rank=lambda key: ranks[key[0]])
        assert pair.wire.num_in_flight <= 2
        pair.settle()
    pair.run()
    assert pair.writer.written == [*pair.grants["a", 0][:2], *pair.grants["c", 0], *pair.grants["b", 0]]
    assert isinstance(pair.events["b", 0], Completed)


def test_a_write_that_is_over_makes_way_for_the_next_in_the_same_pump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "MOST_BYTES", LAYOUT.page_bytes)
    monkeypatch.setattr(write_queue, "WRITE_BYTES", LAYOUT.page_bytes)
    pair = slow()
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    pair.finish(KEY)
    pair.pump()
    while pair.wire.num_in_flight:
        pair.wire.tick()
    assert not pair.pump()
    assert pair.wire.num_in_flight == 1


def test_write_seconds_are_measured_with_the_given_clock(pair: TransferPair) -> None:
    class Stepping:
        def __init__(self) -> None:
            self.instants = 0.0

        def now(self) -> float:
            self.instants += 0.5
            return self.instants

    pair.sender._queue._clock = Stepping()
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    pair.compute(KEY, 1)
    pair.pump()
    assert pair.sender.counters()["write_seconds"] == 0.5


# ---- requests that end with their first token -------------------------------------------------------------------


def test_a_request_that_ends_with_its_first_token_frees_both_sides_at_once(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.compute(KEY, 1)
    pair.run()
    pair.sender.abort(KEY, "finished")
    pair.settle()
    assert pair.released[KEY].ok
    pair.run()
    assert pair.events[KEY] == Finished(KEY)
    pair.assert_nothing_is_held()


def test_a_grant_for_an_ended_request_is_answered_with_closed(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.sender.abort(KEY, "finished")
    pair.settle()
    pair.run()
    pair.begin(KEY, 2)
    pair.run()
    assert pair.events[KEY] == Finished(KEY)
    pair.assert_nothing_is_held()
