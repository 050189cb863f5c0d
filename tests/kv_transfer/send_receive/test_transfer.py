"""Sender and receiver over the in-process wire: the order of pages, and that each page is released exactly once."""

from support.couples import KEY, couple, shipped, slow
from support.kv_fakes import Couple

from common.wire.messages import PagesWritten, PrefillDone
from kv_transfer.events import Completed, Finished

__all__ = ["couple"]


# ---- the common case --------------------------------------------------------------------------------------------


def test_pages_are_sent_while_later_pages_are_computed(couple: Couple) -> None:
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
    assert event.prefill_done == PrefillDone("r", 0, 11, 5)
    assert couple.released[KEY].ok
    counters = couple.sender.counters()
    assert (counters["pages_sent"], counters["bytes_sent"], counters["pages_overlapped"]) == (3, 192, 2)
    assert couple.receiver.counters()["pages_received"] == couple.target.num_landed == 3
    couple.give_back(KEY)
    couple.assert_nothing_is_held()


def test_only_pages_missing_at_the_decode_node_are_sent(couple: Couple) -> None:
    couple.open(KEY, 4)
    pages = couple.begin(KEY, 4, first=3)
    couple.compute(KEY, 3)
    couple.finish(KEY)
    assert couple.receiver.counters()["bytes_saved_by_cache"] == 0
    couple.run()
    assert couple.writer.written == pages
    assert isinstance(couple.events[KEY], Completed)
    assert couple.receiver.counters()["bytes_saved_by_cache"] == 3 * 64


def test_a_fully_cached_prompt_needs_only_prefill_done(couple: Couple) -> None:
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


def test_a_grant_may_arrive_before_the_request_is_known(couple: Couple) -> None:
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
    assert not couple.events  # prefill_done waits for the grant, because the decode node does not know the key before
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


def test_prefill_done_may_overtake_pages() -> None:
    couple = slow()
    shipped(couple, 3)
    assert [type(message) for message in couple.to_decode] == [PrefillDone]
    couple.hear_prefill()
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_a_pump_respects_its_page_limit_and_reports_that_more_is_waiting(couple: Couple) -> None:
    couple.open(KEY, 5)
    couple.begin(KEY, 5)
    couple.hear_decode()
    couple.compute(KEY, 4)
    assert couple.pump(max_pages=3)
    assert len(couple.writer.written) == 3
    assert couple.to_decode.pop() == PagesWritten("r", 0, 1, (0, 1, 2))
    assert not couple.pump(max_pages=3)


def test_requests_are_written_in_the_order_in_which_they_became_due(couple: Couple) -> None:
    pages = {}
    for rid in "ab":
        couple.open((rid, 0), 2)
        pages[rid] = couple.begin((rid, 0), 2)
        couple.hear_decode()
    couple.compute(("b", 0), 1)
    couple.compute(("a", 0), 1)
    couple.pump()
    assert couple.writer.written == [pages["b"][0], pages["a"][0]]


def test_the_request_of_lowest_rank_is_written_first(couple: Couple) -> None:
    ranks = {"a": 1.0, "b": 2.0}
    pages = {}
    for rid in "ab":
        couple.open((rid, 0), 2)
        pages[rid] = couple.begin((rid, 0), 2)
        couple.hear_decode()
    couple.compute(("b", 0), 2)
    couple.compute(("a", 0), 1)
    couple.sender.pump(0.0, 1, rank=lambda key: ranks[key[0]])
    ranks["b"] = 0.0
    couple.sender.pump(0.0, rank=lambda key: ranks[key[0]])
    couple.settle()
    assert couple.writer.written == [pages["a"][0], *pages["b"]]


def test_write_seconds_are_measured_with_the_given_clock(couple: Couple) -> None:
    class Stepping:
        def __init__(self) -> None:
            self.instants = 0.0

        def now(self) -> float:
            self.instants += 0.5
            return self.instants

    couple.sender._queue.clock = Stepping()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.hear_decode()
    couple.compute(KEY, 1)
    couple.pump()
    assert couple.sender.counters()["write_seconds"] == 0.5


# ---- requests that end with their first token -------------------------------------------------------------------


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


def test_a_grant_for_an_ended_request_is_answered_with_closed(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.sender.abort(KEY, "finished")
    couple.settle()
    couple.run()
    couple.begin(KEY, 2)
    couple.run()
    assert couple.events[KEY] == Finished(KEY)
    couple.assert_nothing_is_held()
