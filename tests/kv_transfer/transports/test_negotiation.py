"""Which transport a pair chooses, and which fences are then accepted."""

import json

import msgspec
import pytest
from support.kv.fake_transports import FakeReader, FakeWriter
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore

from common.cache.page_allocator import Owner, PageAllocator
from common.wire.messages import Closed, Connect, Connected, LayoutMessage, PagesWritten, PrefillDone, Refused
from kv_transfer.events import PairLost
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.base import Attached, AttachError, Fenced
from kv_transfer.transports.broken_transports import MIN_REST_S
from kv_transfer.transports.negotiation import PATIENCE_S, NegotiatingReader, NegotiatingWriter

NUM_PAGES = 8


def connect(reader: NegotiatingReader, epoch: int = 1) -> Connect:
    endpoint = reader.offer(PREFILL, epoch)
    return Connect("decode-0", "model", epoch, LayoutMessage.of(LAYOUT), NUM_PAGES, reader.name, endpoint)


def both(
    store: MemfdStore, *names: str
) -> tuple[list[FakeWriter], NegotiatingWriter, list[FakeReader], NegotiatingReader]:
    writers, readers = [FakeWriter(name, store) for name in names], [FakeReader(name, store) for name in names]
    return writers, NegotiatingWriter(writers), readers, NegotiatingReader(readers)


# ---- choosing a transport ---------------------------------------------------------------------------------------


def test_the_first_working_transport_is_chosen_and_no_other_is_tried(store: MemfdStore) -> None:
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    assert (a.attached, b.attached) == ([(DECODE, "a-1")], [])
    a.news = [Attached(DECODE, 1)]
    assert writer.poll() == [Attached(DECODE, 1, "", "a", "the first that worked")]
    assert b.attached == []


def test_transports_that_failed_before_the_chosen_one_are_named_with_their_reasons(store: MemfdStore) -> None:
    (a, b, c), writer, _, reader = both(store, "a", "b", "c")
    a.refuses = "not on this host"
    writer.attach(DECODE, connect(reader))
    b.news = [Attached(DECODE, 1, "no answer")]
    assert writer.poll() == []
    c.news = [Attached(DECODE, 1)]
    why = "the first that worked; a: not on this host; b: no answer"
    assert writer.poll() == [Attached(DECODE, 1, "", "c", why)]
    assert b.num_detached == 1


def test_all_reasons_are_named_when_no_transport_works(store: MemfdStore) -> None:
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    b.refuses = "refused"
    a.news = [Attached(DECODE, 1, "no answer")]
    assert writer.poll() == [Attached(DECODE, 1, "a: no answer; b: refused")]
    b.refuses, a.refuses = "refused", "never"
    with pytest.raises(AttachError, match="a: never; b: refused"):
        writer.attach(DECODE, connect(reader, 2))


def test_reports_of_a_transport_that_is_not_being_tried_are_ignored(store: MemfdStore) -> None:
    (_, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    b.news = [Attached(DECODE, 1)]
    assert writer.poll() == []


def test_tickets_of_two_transports_do_not_collide(store: MemfdStore) -> None:
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach("peer-1", connect(reader))
    a.news = [Attached("peer-1", 1)]
    writer.poll()
    a.refuses = "no"
    writer.attach("peer-2", connect(reader))
    b.news = [Attached("peer-2", 1)]
    writer.poll()
    first, second = writer.write("peer-1", [(0, 0)]), writer.write("peer-2", [(0, 0)])
    b.finished = [1]
    assert (first != second, writer.done()) == (True, [second])


def test_tickets_end_with_their_peer(store: MemfdStore) -> None:
    (a, _), writer, _, reader = both(store, "a", "b")
    for peer in ("peer-1", "peer-2"):
        writer.attach(peer, connect(reader))
        a.news = [Attached(peer, 1)]
        writer.poll()
    lost, kept = writer.write("peer-1", [(0, 0)]), writer.write("peer-2", [(0, 0)])
    assert lost != kept
    assert writer.detach("peer-1")
    assert len(writer._tickets) == 1
    a.finished = [1, 2]
    assert writer.done() == [kept]
    assert not writer._tickets


def test_a_fence_of_a_withdrawn_offer_is_not_kept(store: MemfdStore) -> None:
    _, _, (a, _), reader = both(store, "a", "b")
    connect(reader)
    a.news = [Fenced(PREFILL, 1, "left before it had the pool")]
    assert reader.poll(0.0) == []
    reader.withdraw(PREFILL)
    assert not reader._unasked


def test_a_peer_is_reattached_only_when_no_earlier_write_is_in_flight(store: MemfdStore) -> None:
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    a.news = [Attached(DECODE, 1)]
    writer.poll()
    a.is_draining = True
    assert writer.detach(DECODE) is False
    writer.attach(DECODE, connect(reader, 2))
    writer.poll()
    assert (len(a.attached), len(b.attached)) == (1, 0)
    a.is_draining = False
    writer.poll()
    assert a.attached == [(DECODE, "a-1"), (DECODE, "a-2")]


def test_a_new_offer_may_void_writes_in_flight(store: MemfdStore) -> None:
    """The transports from which the peer is draining receive the new offer; otherwise they would read it too late."""
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    a.is_draining = True
    assert writer.detach(DECODE) is False
    writer.attach(DECODE, connect(reader, 2))
    writer.attach("peer-2", connect(reader, 3))
    assert (a.voided_by, b.voided_by) == ([(DECODE, "a-2")], [(DECODE, "b-2")])


def test_a_pair_configured_with_different_transports_is_refused(store: MemfdStore) -> None:
    sender = Sender(FakeWriter("slow", store), digest="model")
    sender.on_message(DECODE, Connect("d", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "fast", "e"), 0.0)
    why = "the decode node transfers by 'fast', this prefill node by 'slow'"
    assert sender.take()[0] == [(DECODE, Refused(why, 1))]


# ---- a transport that breaks ------------------------------------------------------------------------------------


class Pair:
    """A writer with the transports ``a``, ``b`` and ``c`` and one peer, in a time that the test sets."""

    def __init__(self, store: MemfdStore) -> None:
        names = ("a", "b", "c")
        self.parts = {name: FakeWriter(name, store) for name in names}
        self.readers = {name: FakeReader(name, store) for name in names}
        self.reader = NegotiatingReader(list(self.readers.values()))
        self.now = 0.0
        self.writer = NegotiatingWriter(list(self.parts.values()), clock=lambda: self.now)
        self.epoch = 0

    def attach(self, *, resumes: bool, works: str = "abc") -> Attached:
        """Offer the pool again; the transports in ``works`` attach. Return how it ended."""
        self.writer.detach(DECODE)
        self.epoch += 1
        offer = msgspec.structs.replace(connect(self.reader, self.epoch), resumes=resumes)
        self.writer.attach(DECODE, offer)
        while True:
            tried = next(part for part in self.parts.values() if (DECODE, f"{part.name}-{self.epoch}") in part.attached)
            tried.attached.clear()
            tried.news = [Attached(DECODE, self.epoch, "" if tried.name in works else "no answer")]
            if news := self.writer.poll():
                return news[0]

    def carry_a_page(self) -> None:
        """Write a page by whichever transport is attached, to its end."""
        self.begin_page()
        self.end_page()

    def begin_page(self) -> None:
        self.ticket = self.writer.write(DECODE, [(0, 0)])

    def end_page(self) -> None:
        for part in self.parts.values():
            part.finished = [part._ticket]
        assert self.writer.done() == [self.ticket]


@pytest.fixture
def pair(store: MemfdStore) -> Pair:
    return Pair(store)


def test_a_pair_whose_transport_breaks_goes_on_with_the_next(pair: Pair) -> None:
    assert pair.attach(resumes=False).transport == "a"
    pair.begin_page()
    pair.parts["a"].news = [Attached(DECODE, 1, "it broke")]
    assert pair.writer.poll() == [Attached(DECODE, 1, "it broke")]
    assert pair.attach(resumes=True) == Attached(DECODE, 2, "", "b", "the first that worked; a: it has broken lately")
    assert pair.attach(resumes=True).transport == "c"


def test_a_transport_that_could_not_attach_does_not_hold_up_the_pair_when_another_breaks(pair: Pair) -> None:
    assert pair.attach(resumes=False, works="bc").transport == "b"
    assert pair.attach(resumes=True).why == "the first that worked; b: it has broken lately"
    pair.writer.detach(DECODE)
    assert pair.attach(resumes=False).transport == "a"


def test_a_peer_that_begins_from_scratch_has_broken_nothing(pair: Pair) -> None:
    assert pair.attach(resumes=False).transport == "a"
    assert pair.attach(resumes=False).transport == "a"


def test_a_transport_that_broke_is_used_if_no_other_works(pair: Pair) -> None:
    pair.attach(resumes=False)
    assert pair.attach(resumes=True, works="a").transport == "a"


def test_a_transport_that_does_not_answer_soon_is_left_for_the_next_when_a_pair_is_mended(pair: Pair) -> None:
    """The decode node waits for an answer for a shorter time than some transports take to give up."""
    pair.attach(resumes=False)
    pair.writer.detach(DECODE)
    pair.epoch += 1
    pair.writer.attach(DECODE, msgspec.structs.replace(connect(pair.reader, pair.epoch), resumes=True))
    assert pair.parts["b"].attached == [(DECODE, "b-2")]
    pair.now += PATIENCE_S - 0.1
    assert pair.writer.poll() == []
    assert pair.parts["c"].attached == []
    pair.now += 0.1
    assert pair.writer.poll() == []
    pair.parts["b"].news = [Attached(DECODE, 2)]  # too late
    pair.parts["c"].news = [Attached(DECODE, 2)]
    (attached,) = pair.writer.poll()
    assert (attached.transport, attached.problem) == ("c", "")
    assert "b: no answer within 5 s" in attached.why


def return_to_better(pair: Pair) -> None:
    """Bring a pair that goes by ``b`` to the point where ``a`` is to be tried again."""
    pair.attach(resumes=False)
    pair.attach(resumes=True)
    assert pair.reader.chosen(PREFILL, pair.epoch, "b")
    pair.now += MIN_REST_S
    pair.carry_a_page()
    assert pair.writer.poll() == []
    assert pair.writer.returns() == [DECODE]
    assert pair.writer.returns() == []


def offer_beside(pair: Pair) -> Connect:
    """The offer of better transports; the one that carries pages is not among them."""
    endpoint = pair.reader.offer_beside(PREFILL, pair.epoch + 1)
    assert json.loads(endpoint) == {"a": f"a-{pair.epoch + 1}"}
    layout = LayoutMessage.of(LAYOUT)
    return Connect("decode-0", "model", pair.epoch + 1, layout, NUM_PAGES, "auto", endpoint, beside=pair.epoch)


def test_a_pair_returns_to_a_better_transport_once_it_works_and_nothing_is_under_way(pair: Pair) -> None:
    return_to_better(pair)
    offer = offer_beside(pair)
    pair.writer.attach_beside(DECODE, offer)
    assert pair.parts["a"].attached == [(DECODE, "a-3")]
    pair.carry_a_page()
    assert pair.writer.poll() == [], "pages go on meanwhile"
    pair.begin_page()
    assert not pair.writer.is_changing(DECODE)
    pair.parts["a"].news = [Attached(DECODE, 3)]
    assert pair.writer.poll() == [], "a page is under way"
    assert pair.writer.is_changing(DECODE)
    pair.end_page()
    assert pair.writer.poll() == [Attached(DECODE, 3, "", "a", "it works again")]
    assert not pair.writer.is_changing(DECODE)
    assert pair.writer.poll() == []
    assert pair.parts["b"].num_detached == 2, "the peer does not know yet"
    assert pair.reader.chosen(PREFILL, 3, "a")
    pair.writer.prepare(DECODE, [0])
    assert pair.parts["b"].num_detached == 3
    pair.carry_a_page()
    pair.now += 10 * MIN_REST_S
    assert pair.writer.poll() == [] == pair.writer.returns(), "it is on the best"


def test_a_pair_that_begins_from_scratch_returns_to_the_transport_of_before_once_that_works(pair: Pair) -> None:
    assert pair.attach(resumes=False).transport == "a"
    assert pair.attach(resumes=False, works="bc").transport == "b"
    pair.now += MIN_REST_S
    pair.carry_a_page()
    assert pair.writer.poll() == []
    assert pair.writer.returns() == [DECODE]


def test_the_transport_that_a_pair_has_left_may_end_first(pair: Pair) -> None:
    return_to_better(pair)
    pair.writer.attach_beside(DECODE, offer_beside(pair))
    pair.parts["a"].news = [Attached(DECODE, 3)]
    assert len(pair.writer.poll()) == 1
    pair.parts["b"].news = [Attached(DECODE, 2, "the reader closed it")]
    assert pair.writer.poll() == []
    assert pair.parts["b"].num_detached == 3
    pair.writer.prepare(DECODE, [0])
    assert pair.parts["b"].num_detached == 3
    pair.parts["a"].news = [Attached(DECODE, 3, "it broke")]
    assert pair.writer.poll() == [Attached(DECODE, 3, "it broke")]


def test_a_pair_whose_peer_cannot_offer_more_leaves_its_transport_first(pair: Pair) -> None:
    return_to_better(pair)
    pair.writer.attach_beside(DECODE, None)
    pair.begin_page()
    assert pair.writer.poll() == [], "a page is under way"
    pair.end_page()
    assert pair.writer.poll() == [Attached(DECODE, 2, "pages to decode node decode-0: a is tried again instead of b")]
    assert pair.writer.poll() == []
    assert pair.attach(resumes=True).transport == "a"


def test_an_idle_pair_stays_with_what_works(pair: Pair) -> None:
    pair.attach(resumes=False)
    pair.attach(resumes=True)
    pair.now += 2 * MIN_REST_S
    assert pair.writer.poll() == [] == pair.writer.returns()
    pair.carry_a_page()
    assert pair.writer.poll() == []
    assert pair.writer.returns() == [DECODE]


@pytest.mark.parametrize("how", ["problem", "no answer", "no offer", "refused", "garbage", "a write does not end"])
def test_a_transport_that_does_not_come_back_is_left_alone_for_longer(pair: Pair, how: str) -> None:
    return_to_better(pair)
    if how == "refused":
        pair.parts["a"].refuses = "it cannot be"
    if how != "no offer":
        endpoint = {"endpoint": "no json"} if how == "garbage" else {}
        pair.writer.attach_beside(DECODE, msgspec.structs.replace(offer_beside(pair), **endpoint))
    if how == "problem":
        pair.parts["a"].news = [Attached(DECODE, 3, "no answer")]
    if how == "a write does not end":
        pair.begin_page()
        pair.parts["a"].news = [Attached(DECODE, 3)]
        assert pair.writer.poll() == []
    if how in ("no answer", "no offer", "a write does not end"):
        pair.now += PATIENCE_S
    assert pair.writer.poll() == []
    assert not pair.writer.is_changing(DECODE)
    if how == "a write does not end":
        pair.end_page()
    if how == "no offer":  # it comes too late
        pair.writer.attach_beside(DECODE, offer_beside(pair))
        assert pair.parts["a"].attached == []
    pair.carry_a_page()
    pair.now += 2 * MIN_REST_S - 1
    assert pair.writer.poll() == [] == pair.writer.returns()
    pair.now += 1
    assert pair.writer.poll() == []
    assert pair.writer.returns() == [DECODE]


def test_a_pair_that_breaks_while_a_better_transport_is_tried_begins_anew(pair: Pair) -> None:
    return_to_better(pair)
    pair.writer.attach_beside(DECODE, offer_beside(pair))
    pair.parts["a"].news = [Attached(DECODE, 3)]
    pair.parts["b"].news = [Attached(DECODE, 2, "it broke")]
    assert pair.writer.poll() == [Attached(DECODE, 2, "it broke")]
    pair.epoch += 1
    assert pair.attach(resumes=True).transport == "a"


def test_the_best_transport_offers_no_better_one(pair: Pair) -> None:
    pair.attach(resumes=False)
    assert pair.reader.offer_beside(PREFILL, 2) == ""
    assert pair.reader.chosen(PREFILL, 1, "a")
    assert pair.reader.offer_beside(PREFILL, 2) == ""


def test_a_break_is_no_return_even_if_the_better_transport_is_due(pair: Pair) -> None:
    pair.attach(resumes=False)
    pair.attach(resumes=True)
    pair.carry_a_page()
    pair.now += MIN_REST_S
    pair.parts["b"].news = [Attached(DECODE, 2, "it broke")]
    assert pair.writer.poll() == [Attached(DECODE, 2, "it broke")]
    assert pair.attach(resumes=True, works="bc").transport == "c", "b has broken"


# ---- fences -----------------------------------------------------------------------------------------------------


def test_only_the_chosen_transport_provides_a_fence(store: MemfdStore) -> None:
    _, _, (a, b), reader = both(store, "a", "b")
    connect(reader)
    a.news = [Fenced(PREFILL, 1, "left before it had the pool")]
    assert reader.poll(0.0) == []
    assert reader.chosen(PREFILL, 1, "b")
    a.news = [Fenced(PREFILL, 1, "again")]
    assert reader.poll(0.0) == []
    b.news = [Fenced(PREFILL, 1, "dead")]
    assert reader.poll(0.0) == [Fenced(PREFILL, 1, "dead")]


def test_a_fence_that_arrives_before_the_choice_is_kept(store: MemfdStore) -> None:
    _, _, (a, _), reader = both(store, "a", "b")
    connect(reader)
    a.news = [Fenced(PREFILL, 1, "dead")]
    assert reader.poll(0.0) == []
    assert reader.chosen(PREFILL, 1, "a")
    assert reader.poll(0.0) == [Fenced(PREFILL, 1, "dead")]


def test_the_fence_of_a_return_that_was_given_up_is_not_that_of_the_next_return(pair: Pair) -> None:
    return_to_better(pair)
    assert pair.reader.offer_beside(PREFILL, 3)
    pair.readers["a"].news = [Fenced(PREFILL, 3, "unmapped")]
    assert pair.reader.poll(0.0) == []
    assert pair.reader.offer_beside(PREFILL, 4)
    assert pair.reader.chosen(PREFILL, 4, "a")
    assert pair.reader.poll(0.0) == []
    pair.readers["a"].news = [Fenced(PREFILL, 4, "dead")]
    assert pair.reader.poll(0.0) == [Fenced(PREFILL, 4, "dead")]


def test_a_transport_that_was_not_offered_cannot_be_chosen(store: MemfdStore) -> None:
    _, _, _, reader = both(store, "a", "b")
    connect(reader)
    assert not reader.chosen(PREFILL, 1, "c")
    assert not reader.chosen(PREFILL, 2, "a")
    assert not reader.chosen(DECODE, 1, "a")


def test_permissions_are_granted_at_the_chosen_transport_and_revoked_at_all(store: MemfdStore) -> None:
    _, _, (a, b), reader = both(store, "a", "b")
    connect(reader)
    reader.chosen(PREFILL, 1, "b")
    a.calls.clear(), b.calls.clear()
    reader.allow(PREFILL, 1, [3])
    reader.forbid([3])
    assert (a.calls, b.calls) == ([("forbid", 3)], [("allow", 3), ("forbid", 3)])


def test_a_receiver_grants_nothing_over_a_transport_that_it_did_not_offer(store: MemfdStore) -> None:
    _, _, (a, _), reader = both(store, "a", "b")
    receiver = Receiver(reader, PageAllocator(NUM_PAGES))
    receiver.connect(PREFILL)
    receiver.on_message(PREFILL, Connected(1, "c"), 0.0)
    assert not receiver.is_connected(PREFILL)
    receiver.on_message(PREFILL, Connected(1, "a"), 0.0)
    assert receiver.is_connected(PREFILL)
    assert receiver.counters()["pairs_by_a"] == 1
    a.news = [Fenced(PREFILL, 1, "dead", is_dead=True)]
    receiver.poll(0.0)
    assert receiver.take()[1] == [PairLost(PREFILL, "dead")]


def test_a_receiver_permits_writes_with_each_grant_and_forbids_them_before_a_release(store: MemfdStore) -> None:
    """Pages in quarantine stay permitted: NIXL over TCP places bytes only while pages are expected, and ``Closed``
    comes when all bytes under way have been placed.
    """
    reader, allocator = FakeReader("a", store), PageAllocator(NUM_PAGES)
    receiver = Receiver(reader, allocator)
    receiver.connect(PREFILL)
    receiver.on_message(PREFILL, Connected(1, "a"), 0.0)
    for rid, end in (("r", None), ("s", Closed("s", 0, "aborted")), ("t", PrefillDone("t", 0, 7, 9))):
        reader.calls.clear()
        pages = allocator.alloc(2, Owner.GRANT)
        assert pages is not None
        receiver.begin((rid, 0), PREFILL, first=0, pages=pages, length=7)
        assert reader.calls == [("allow", *pages)]
        if end is None:
            receiver.cancel((rid, 0))
            assert reader.calls == [("allow", *pages)]
            receiver.on_message(PREFILL, Closed(rid, 0, "cancelled"), 0.0)
        else:
            receiver.on_message(PREFILL, end, 0.0)
            receiver.on_message(PREFILL, PagesWritten(rid, 0, 1, (0, 1)), 0.0)
        assert reader.calls == [("allow", *pages), ("forbid", *pages)]


def test_a_break_before_the_peers_answer_is_reported(store: MemfdStore) -> None:
    """Otherwise the peer would wait for grants forever."""
    _, _, (a, b), reader = both(store, "a", "b")
    connect(reader)
    b.news, a.is_over, b.is_over = [Fenced(PREFILL, 1, "broke")], True, True
    assert reader.poll(0.0) == []
    assert reader.chosen(PREFILL, 1, "a") is False
    assert reader.chosen(PREFILL, 1, "b") is True
    assert reader.poll(0.0) == [Fenced(PREFILL, 1, "broke")]


def test_pages_are_reclaimed_by_the_transport_that_carries_them(store: MemfdStore) -> None:
    _, _, (a, b), reader = both(store, "a", "b")
    connect(reader)
    reader.reclaim(PREFILL, 1)
    reader.chosen(PREFILL, 1, "b")
    reader.reclaim(PREFILL, 1)
    reader.reclaim(PREFILL, 2)
    assert ("reclaim", 1) not in a.calls
    assert b.calls.count(("reclaim", 1)) == 1
