"""The in-process wire and its faults, tick by tick."""

from collections.abc import Mapping

import pytest
from support.kv.kv_fakes import DECODE, JUNK, LAYOUT, PREFILL, MemfdStore

from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import Attached, Fenced
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter
from scripts.simulator.service.inprocess_transport import Fault, InProcessReader, InProcessWriter, Wire


class Ends:
    """An attached writer and reader, and four pages at the writer, filled with 1, 2, 3 and 4."""

    def __init__(self, faults: Mapping[int, Fault], *, can_recall: bool = True) -> None:
        self.wire = Wire(latency=1, faults=faults, can_recall=can_recall)
        self.source, self.target = MemfdStore(4), MemfdStore(4)
        for page in range(4):
            self.source.fill(page, page + 1)
            self.target.fill(page, JUNK)
        self.writer = InProcessWriter(self.wire, self.source, PREFILL)
        self.reader = InProcessReader(self.wire, self.target, DECODE)
        self.writer.attach(DECODE, self.offer(1))
        assert self.writer.poll() == [Attached(DECODE, 1)]

    def offer(self, epoch: int) -> Connect:
        endpoint = self.reader.offer(PREFILL, epoch)
        return Connect("decode-0", "model", epoch, LayoutMessage.of(LAYOUT), 4, "inprocess", endpoint)

    def write(self, *pages: int) -> int:
        """Write each page to the page of the same number; return the ticket."""
        return self.writer.write(DECODE, [(page, page) for page in pages])

    def tick(self) -> list[int]:
        """Advance the wire by one tick; return the first byte of each page of the reader."""
        self.wire.tick()
        return [self.target.read(page)[0] for page in range(4)]


@pytest.fixture(autouse=True)
def _close(monkeypatch: pytest.MonkeyPatch) -> object:
    made: list[Ends] = []
    init = Ends.__init__
    monkeypatch.setattr(Ends, "__init__", lambda self, *a, **k: (init(self, *a, **k), made.append(self))[0])
    yield
    for ends in made:
        ends.source.close()
        ends.target.close()


def test_without_faults_pages_arrive_in_order_and_each_write_ends() -> None:
    ends = Ends({})
    tickets = [ends.write(0, 1), ends.write(2)]
    assert ends.tick() == [1, 2, 3, JUNK]
    assert ends.writer.done() == tickets


def test_a_reordered_page_is_overtaken_by_later_pages() -> None:
    ends = Ends({0: Fault("reorder", 2)})
    first, second = ends.write(0), ends.write(1)
    assert ends.tick() == [JUNK, 2, JUNK, JUNK]
    assert ends.writer.done() == [second]
    ends.tick()
    assert ends.tick() == [1, 2, JUNK, JUNK]
    assert ends.writer.done() == [first]


def test_a_delayed_page_delays_later_pages() -> None:
    ends = Ends({1: Fault("delay", 2)})
    tickets = [ends.write(0), ends.write(1), ends.write(2)]
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.writer.done() == tickets[:1]
    assert ends.tick() == [1, 2, 3, JUNK]
    assert ends.writer.done() == tickets[1:]


def test_the_write_of_a_duplicated_page_ends_with_the_second_copy() -> None:
    ends = Ends({0: Fault("duplicate", 2)})
    ticket = ends.write(0)
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.writer.done() == []
    ends.target.fill(0, JUNK)
    ends.tick()
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.writer.done() == [ticket]


def test_a_corrupt_page_differs_in_one_byte_and_its_write_ends_normally() -> None:
    ends = Ends({1: Fault("corrupt")})
    ticket = ends.write(0, 1)
    ends.tick()
    assert ends.target.read(0) == ends.source.read(0)
    different = [a ^ b for a, b in zip(ends.source.read(1), ends.target.read(1), strict=True) if a != b]
    assert different == [0xFF]
    assert ends.writer.done() == [ticket]


def test_a_lost_page_breaks_the_connection() -> None:
    ends = Ends({1: Fault("drop")})
    ends.write(0, 1, 2)
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.writer.done() == []
    [news] = ends.writer.poll()
    assert (news.peer, news.epoch) == (DECODE, 1) and "lost" in news.problem
    assert ends.wire.num_in_flight == 0
    assert ends.writer.detach(DECODE) is True
    assert [fenced.epoch for fenced in ends.reader.poll(0)] == [1]


def test_nothing_passes_a_partition_until_it_heals() -> None:
    ends = Ends({1: Fault("partition", 2)})
    ticket = ends.write(0, 1, 2)
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.tick() == [1, 2, 3, JUNK]
    assert ends.writer.done() == [ticket]


def test_a_writer_can_be_killed_at_a_page() -> None:
    ends = Ends({1: Fault("restart")})
    ends.write(0, 1, 2)
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.reader.poll(0) == [Fenced(PREFILL, 1, "the writer has died")]
    assert ends.wire.num_in_flight == 0
    again = InProcessWriter(ends.wire, ends.source, "q" * 32)
    again.attach(DECODE, ends.offer(2))
    again.write(DECODE, [(3, 3)])
    assert ends.tick() == [1, JUNK, JUNK, 4]


def test_an_irrevocable_write_keeps_its_pair_until_it_ends() -> None:
    ends = Ends({}, can_recall=False)
    ticket = ends.write(0)
    assert ends.writer.detach(DECODE) is False
    assert ends.reader.poll(0) == []
    assert ends.tick() == [1, JUNK, JUNK, JUNK]
    assert ends.writer.done() == [ticket]
    assert ends.writer.detach(DECODE) is True
    assert [fenced.epoch for fenced in ends.reader.poll(0)] == [1]


def test_the_write_of_a_page_lost_after_its_pair_was_detached_has_ended() -> None:
    ends = Ends({0: Fault("drop")}, can_recall=False)
    ticket = ends.write(0)
    assert ends.writer.detach(DECODE) is False
    assert ends.tick() == [JUNK] * 4
    assert ends.writer.done() == [ticket]
    assert ends.writer.poll() == []
    assert ends.writer.detach(DECODE) is True


def test_the_write_of_a_page_lost_before_its_pair_drains_has_ended() -> None:
    ends = Ends({0: Fault("drop")}, can_recall=False)
    lost = ends.write(0)
    ends.tick()
    assert ends.writer.done() == []
    ticket = ends.write(1)  # begins before any poll
    assert ends.writer.detach(DECODE) is False
    assert ends.writer.done() == [lost]
    ends.tick()
    assert ends.writer.done() == [ticket]
    assert ends.writer.detach(DECODE) is True


def test_a_negotiating_pair_reattaches_only_when_no_irrevocable_write_is_in_flight() -> None:
    ends = Ends({}, can_recall=False)
    writer, reader = NegotiatingWriter([ends.writer]), NegotiatingReader([ends.reader])
    assert ends.writer.detach(DECODE)
    ends.reader.poll(0)

    def offer(epoch: int) -> Connect:
        return Connect("decode-0", "model", epoch, LayoutMessage.of(LAYOUT), 4, "auto", reader.offer(PREFILL, epoch))

    writer.attach(DECODE, offer(2))
    assert [news.problem for news in writer.poll()] == [""]
    writer.write(DECODE, [(0, 0)])
    assert writer.detach(DECODE) is False
    writer.attach(DECODE, offer(3))
    assert writer.poll() == []
    ends.tick()
    assert [(news.epoch, news.problem) for news in writer.poll()] == [(3, "")]
