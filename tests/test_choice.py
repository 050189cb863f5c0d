"""Which transport carries a pair, what proof of a fence counts then, and writes that cannot be called back."""

from collections.abc import Sequence
from typing import Any

import pytest
from kv_fakes import DECODE, GEOMETRY, PREFILL, MemfdStore

from common.messages import Cancel, Closed, Connect, Connected, Delivered, Grant, Handoff, Refused
from common.pages import Owner, PageBooks
from kv_transfer.events import PairLost
from kv_transfer.links import RESUME_LEASE_S
from kv_transfer.pieces import Box, Piece
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.base import Attached, AttachError, Fenced, to_message
from kv_transfer.transports.choice import ChoosingReader, ChoosingWriter

NUM_PAGES = 8


class FakeWriter:
    """Attaches, fails, and lets go when a test says so."""

    def __init__(self, name: str, store: MemfdStore, refuses: str = "") -> None:
        self.name = name
        self.names: Sequence[str] = (name,)
        self.store = store
        self.refuses = refuses
        self.attached: list[tuple[str, str]] = []
        self.news: list[Attached] = []
        self.finished: list[int] = []
        self.is_draining = False
        self.num_detached = 0
        self.voided_by: list[tuple[str, str]] = []
        self._ticket = 0

    def attach(self, peer: str, connect: Connect) -> None:
        if self.refuses:
            raise AttachError(self.refuses)
        self.attached.append((peer, connect.endpoint))

    def poll(self) -> list[Attached]:
        news, self.news = self.news, []
        return news

    def write(self, peer: str, pages: Sequence[tuple[int, int]], piece: Piece | None = None) -> int:
        self._ticket += 1
        return self._ticket

    def done(self) -> list[int]:
        finished, self.finished = self.finished, []
        return finished

    def voided(self, peer: str, endpoint: str) -> None:
        self.voided_by.append((peer, endpoint))

    def detach(self, peer: str) -> bool:
        self.num_detached += 1
        return not self.is_draining

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {f"bytes_by_{self.name}": 1.0, "all": 1.0}

    def close(self) -> None:
        pass


class FakeReader:
    def __init__(self, name: str, store: MemfdStore) -> None:
        self.name = name
        self.names: Sequence[str] = (name,)
        self.store = store
        self.news: list[Fenced] = []
        self.calls: list[Any] = []
        self.is_over = False

    def offer(self, peer: str, epoch: int) -> str:
        return f"{self.name}-{epoch}"

    def withdraw(self, peer: str) -> None:
        self.calls.append("withdraw")

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        return not self.is_over

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: Box | None = None) -> None:
        self.calls.append(("allow", *pages))

    def reclaim(self, peer: str, epoch: int) -> None:
        self.calls.append(("reclaim", epoch))

    def forbid(self, pages: Sequence[int]) -> None:
        self.calls.append(("forbid", *pages))

    def poll(self, now: float) -> list[Fenced]:
        news, self.news = self.news, []
        return news

    def files(self) -> Sequence[int]:
        return ()

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def store() -> Any:
    store = MemfdStore(NUM_PAGES)
    yield store
    store.close()


def connect(reader: ChoosingReader, epoch: int = 1) -> Connect:
    endpoint = reader.offer(PREFILL, epoch)
    return Connect("decode-0", "model", epoch, to_message(GEOMETRY), NUM_PAGES, reader.name, endpoint)


def both(store: MemfdStore, *names: str) -> tuple[list[FakeWriter], ChoosingWriter, list[FakeReader], ChoosingReader]:
    writers, readers = [FakeWriter(name, store) for name in names], [FakeReader(name, store) for name in names]
    return writers, ChoosingWriter(writers), readers, ChoosingReader(readers)


# ---- the choice -------------------------------------------------------------------------------------------------


def test_the_first_that_works_is_chosen_and_no_other_is_tried(store: MemfdStore) -> None:
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    assert (a.attached, b.attached) == ([(DECODE, "a-1")], [])
    a.news = [Attached(DECODE, 1)]
    assert writer.poll() == [Attached(DECODE, 1, "", "a", "the first that worked")]
    assert b.attached == []


def test_what_failed_before_is_named_with_its_reason(store: MemfdStore) -> None:
    (a, b, c), writer, _, reader = both(store, "a", "b", "c")
    a.refuses = "not on this host"
    writer.attach(DECODE, connect(reader))
    b.news = [Attached(DECODE, 1, "no answer")]
    assert writer.poll() == []
    c.news = [Attached(DECODE, 1)]
    why = "the first that worked; a: not on this host; b: no answer"
    assert writer.poll() == [Attached(DECODE, 1, "", "c", why)]
    assert b.num_detached == 1


def test_when_none_works_all_reasons_are_told(store: MemfdStore) -> None:
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    b.refuses = "refused"
    a.news = [Attached(DECODE, 1, "no answer")]
    assert writer.poll() == [Attached(DECODE, 1, "a: no answer; b: refused")]
    b.refuses, a.refuses = "refused", "never"
    with pytest.raises(AttachError, match="a: never; b: refused"):
        writer.attach(DECODE, connect(reader, 2))


def test_news_of_a_transport_that_is_not_being_tried_counts_for_nothing(store: MemfdStore) -> None:
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


def test_of_tickets_that_end_with_their_peer_nothing_is_kept_or_heard(store: MemfdStore) -> None:
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


def test_proof_about_an_offer_that_was_withdrawn_is_not_kept(store: MemfdStore) -> None:
    _, _, (a, _), reader = both(store, "a", "b")
    connect(reader)
    a.news = [Fenced(PREFILL, 1, "left before it had the pool")]
    assert reader.poll(0.0) == []
    reader.withdraw(PREFILL)
    assert not reader._unasked


def test_a_peer_is_attached_to_anew_only_when_nothing_of_before_is_under_way(store: MemfdStore) -> None:
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


def test_a_new_offer_may_say_that_what_is_under_way_harms_nobody(store: MemfdStore) -> None:
    """Told to whom the peer is draining from; else nobody would read it before that is over."""
    (a, b), writer, _, reader = both(store, "a", "b")
    writer.attach(DECODE, connect(reader))
    a.is_draining = True
    assert writer.detach(DECODE) is False
    writer.attach(DECODE, connect(reader, 2))
    writer.attach("peer-2", connect(reader, 3))
    assert (a.voided_by, b.voided_by) == ([(DECODE, "a-2")], [(DECODE, "b-2")])


# ---- proof ------------------------------------------------------------------------------------------------------


def test_only_the_chosen_transport_proves_a_fence(store: MemfdStore) -> None:
    _, _, (a, b), reader = both(store, "a", "b")
    connect(reader)
    a.news = [Fenced(PREFILL, 1, "left before it had the pool")]
    assert reader.poll(0.0) == []
    assert reader.chosen(PREFILL, 1, "b")
    a.news = [Fenced(PREFILL, 1, "again")]
    assert reader.poll(0.0) == []
    b.news = [Fenced(PREFILL, 1, "dead")]
    assert reader.poll(0.0) == [Fenced(PREFILL, 1, "dead")]


def test_proof_that_comes_before_the_choice_is_kept(store: MemfdStore) -> None:
    _, _, (a, _), reader = both(store, "a", "b")
    connect(reader)
    a.news = [Fenced(PREFILL, 1, "dead")]
    assert reader.poll(0.0) == []
    assert reader.chosen(PREFILL, 1, "a")
    assert reader.poll(0.0) == [Fenced(PREFILL, 1, "dead")]


def test_a_transport_that_was_not_offered_cannot_be_chosen(store: MemfdStore) -> None:
    _, _, _, reader = both(store, "a", "b")
    connect(reader)
    assert not reader.chosen(PREFILL, 1, "c")
    assert not reader.chosen(PREFILL, 2, "a")
    assert not reader.chosen(DECODE, 1, "a")


def test_leave_is_given_at_the_chosen_transport_and_taken_at_all(store: MemfdStore) -> None:
    _, _, (a, b), reader = both(store, "a", "b")
    connect(reader)
    reader.chosen(PREFILL, 1, "b")
    a.calls.clear(), b.calls.clear()
    reader.allow(PREFILL, 1, [3])
    reader.forbid([3])
    assert (a.calls, b.calls) == ([("forbid", 3)], [("allow", 3), ("forbid", 3)])


def test_a_receiver_grants_nothing_by_a_transport_that_it_did_not_offer(store: MemfdStore) -> None:
    _, _, (a, _), reader = both(store, "a", "b")
    receiver = Receiver(reader, PageBooks(NUM_PAGES))
    receiver.connect(PREFILL)
    receiver.on_message(PREFILL, Connected(1, "c"))
    assert not receiver.is_connected(PREFILL)
    receiver.on_message(PREFILL, Connected(1, "a"))
    assert receiver.is_connected(PREFILL)
    assert receiver.counters()["pairs_by_a"] == 1
    a.news = [Fenced(PREFILL, 1, "dead", is_dead=True)]
    receiver.poll(0.0)
    assert receiver.take()[1] == [PairLost(PREFILL, "dead")]


def test_a_receiver_gives_leave_with_each_grant_and_takes_it_before_pages_change_hands(store: MemfdStore) -> None:
    reader, books = FakeReader("a", store), PageBooks(NUM_PAGES)
    receiver = Receiver(reader, books)
    receiver.connect(PREFILL)
    receiver.on_message(PREFILL, Connected(1, "a"))
    for rid, end in (("r", None), ("s", Closed("s", 0, "aborted")), ("t", Handoff("t", 0, 7, 9))):
        reader.calls.clear()
        pages = books.alloc(2, Owner.GRANT)
        assert pages is not None
        receiver.begin((rid, 0), PREFILL, first=0, pages=pages, num_tokens=7)
        assert reader.calls == [("allow", *pages)]
        if end is None:
            receiver.cancel((rid, 0))
        else:
            receiver.on_message(PREFILL, end)
            receiver.on_message(PREFILL, Delivered(rid, 0, 1, (0, 1)))
        assert reader.calls == [("allow", *pages), ("forbid", *pages)]


# ---- a sender whose writes cannot be called back ----------------------------------------------------------------


def granted(store: MemfdStore) -> tuple[FakeWriter, Sender]:
    """A sender with one write of one page under way, to a peer that it cannot be fenced from."""
    writer = FakeWriter("slow", store)
    sender = Sender(writer, digest="model")
    sender.on_message(DECODE, Connect("d", "model", 1, to_message(GEOMETRY), NUM_PAGES, "slow", "e"), 0.0)
    writer.news = [Attached(DECODE, 1)]
    sender.pump(0.0)
    sender.open(("r", 0), DECODE)
    sender.on_message(DECODE, Grant("r", 0, 1, 0, (5, 6)), 0.0)
    sender.computed(("r", 0), [2])
    sender.pump(0.0)
    sender.check()
    writer.is_draining = True
    assert sender.take() == ([(DECODE, Connected(1, "slow"))], [])
    return writer, sender


def test_source_pages_stay_until_a_write_that_cannot_be_called_back_is_over(store: MemfdStore) -> None:
    writer, sender = granted(store)
    sender.peer_lost(DECODE)
    sender.check()
    assert sender.take() == ([], [])
    writer.finished, writer.is_draining = [1], False
    sender.pump(0.0)
    sender.check()
    messages, released = sender.take()
    assert messages == [(DECODE, Closed("r", 0, "failed", "the decode node was lost"))]
    assert [(release.key, release.ok) for release in released] == [(("r", 0), False)]


def test_a_cancelled_transfer_of_a_lost_pair_is_closed_no_sooner(store: MemfdStore) -> None:
    writer, sender = granted(store)
    sender.on_message(DECODE, Connect("d", "model", 2, to_message(GEOMETRY), NUM_PAGES, "slow", "e"), 0.0)
    sender.on_message(DECODE, Cancel("r", 0), 0.0)
    sender.check()
    assert sender.take() == ([], [])
    writer.news = [Attached(DECODE, 2)]
    sender.pump(0.0)
    sender.open(("s", 0), DECODE)
    sender.on_message(DECODE, Grant("s", 0, 2, 0, (5,)), 0.0)
    sender.check()
    writer.finished = [1]
    sender.pump(0.0)
    sender.check()
    assert [type(message) for _, message in sender.take()[0]] == [Connected, Closed]
    assert sender.is_granted(("s", 0))


def broken(store: MemfdStore) -> tuple[FakeWriter, Sender]:
    writer, sender = granted(store)
    writer.is_draining = False
    writer.news = [Attached(DECODE, 1, "the slow connection to decode node d broke")]
    sender.pump(0.0)
    sender.check()
    assert sender.counters()["broken_pairs"] == 1
    assert sender.take() == ([], [])
    return writer, sender


@pytest.mark.parametrize("resumes", [True, False])
def test_a_pair_that_breaks_can_form_again_and_only_then_its_transfers_go_on(store: MemfdStore, resumes: bool) -> None:
    writer, sender = broken(store)
    offer = Connect("d", "model", 2, to_message(GEOMETRY), NUM_PAGES, "slow", "e", resumes=resumes)
    sender.on_message(DECODE, offer, 0.0)
    writer.news = [Attached(DECODE, 2)]
    sender.pump(0.0)
    messages, released = sender.take()
    assert messages == [(DECODE, Connected(2, "slow"))]
    if not resumes:
        [release] = released
        assert (release.ok, release.reason) == (False, "the decode node has connected anew")
        return
    assert released == []
    sender.on_message(DECODE, Grant("r", 0, 1, 0, (5,)), 0.0)
    assert sender.counters()["stale_messages"] == 1
    sender.on_message(DECODE, Grant("r", 0, 2, 0, (6, 5)), 0.0)
    sender.finish(("r", 0), Handoff("r", 0, 7, 9), [2, 3])
    sender.pump(0.0)
    writer.finished = [1, 2]  # the first is of the connection that broke
    sender.pump(0.0)
    sender.check()
    assert [m for _, m in sender.take()[0]] == [Handoff("r", 0, 7, 9), Delivered("r", 0, 2, (0, 1))]


def test_a_pair_that_breaks_for_good_ends_its_transfers_with_what_broke(store: MemfdStore) -> None:
    _, sender = broken(store)
    sender.pump(RESUME_LEASE_S - 0.1)
    assert sender.take() == ([], [])
    assert list(sender.peers()) == [DECODE]
    sender.pump(RESUME_LEASE_S)
    sender.check()
    why = "the slow connection to decode node d broke; no new connection within 60 s"
    messages, released = sender.take()
    assert messages == [(DECODE, Closed("r", 0, "failed", why))]
    assert [(release.ok, release.reason) for release in released] == [(False, why)]
    assert list(sender.peers()) == []


def test_a_pair_that_asks_for_different_transports_is_refused(store: MemfdStore) -> None:
    sender = Sender(FakeWriter("slow", store), digest="model")
    sender.on_message(DECODE, Connect("d", "model", 1, to_message(GEOMETRY), NUM_PAGES, "fast", "e"), 0.0)
    why = "the decode node transfers by 'fast', this prefill node by 'slow'"
    assert sender.take()[0] == [(DECODE, Refused(why, 1))]


def test_what_broke_before_the_peer_said_that_it_works_is_heard_of_all_the_same(store: MemfdStore) -> None:
    """Else the peer would wait for grants, and nobody for it."""
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
