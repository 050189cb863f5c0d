"""A sender whose writes cannot be recalled or whose pair breaks: when pages are released and what is reported."""

import pytest
from support.kv.fake_transports import FakeWriter
from support.kv.kv_fakes import DECODE, LAYOUT, MemfdStore

from common.errors import ErrorCode
from common.wire.messages import (
    AbortTransfer,
    AttachFailed,
    Closed,
    Connect,
    Connected,
    Grant,
    LayoutMessage,
    PagesWritten,
    Ping,
    PrefillDone,
)
from kv_transfer.send.sender import Sender
from kv_transfer.states import RESUME_LEASE_S
from kv_transfer.transports.base import Attached

NUM_PAGES = 8


def granted(store: MemfdStore) -> tuple[FakeWriter, Sender]:
    """A sender with one write of one page in flight, over a transport that cannot fence its peer."""
    writer = FakeWriter("slow", store)
    sender = Sender(writer, digest="model")
    sender.on_message(DECODE, Connect("d", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "slow", "e"), 0.0)
    writer.news = [Attached(DECODE, 1)]
    sender.pump(0.0)
    sender.open(("r", 0), DECODE)
    sender.on_message(DECODE, Grant("r", 0, 1, 0, (5, 6)), 0.0)
    sender.computed(("r", 0), [2])
    sender.pump(0.0)
    sender.check()
    writer.is_draining = True
    assert sender.take() == ([(DECODE, Ping()), (DECODE, Connected(1, "slow"))], [])
    return writer, sender


def test_a_lost_pair_releases_source_pages_at_once_and_sends_closed_after_the_write_ends(
    store: MemfdStore,
) -> None:
    writer, sender = granted(store)
    sender.peer_lost(DECODE)
    sender.check()
    messages, released = sender.take()
    assert messages == []
    assert [(release.key, release.ok) for release in released] == [(("r", 0), False)]
    writer.finished, writer.is_draining = [1], False
    sender.pump(0.0)
    sender.check()
    assert sender.take() == ([(DECODE, Closed("r", 0, "failed", "the decode node was lost", ErrorCode.NODE_LOST))], [])


def test_a_transfer_aborted_after_its_pair_was_replaced_is_closed_after_the_write_ends(store: MemfdStore) -> None:
    writer, sender = granted(store)
    sender.on_message(DECODE, Connect("d", "model", 2, LayoutMessage.of(LAYOUT), NUM_PAGES, "slow", "e"), 0.0)
    sender.on_message(DECODE, AbortTransfer("r", 0), 0.0)
    sender.check()
    messages, released = sender.take()
    assert messages == [(DECODE, Ping())]
    assert [(release.key, release.ok) for release in released] == [(("r", 0), False)]
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
    assert sender.take() == ([(DECODE, AttachFailed(1, "the slow connection to decode node d broke"))], [])
    return writer, sender


@pytest.mark.parametrize("resumes", [True, False])
def test_transfers_continue_only_after_their_pair_is_connected_again(store: MemfdStore, resumes: bool) -> None:
    writer, sender = broken(store)
    offer = Connect("d", "model", 2, LayoutMessage.of(LAYOUT), NUM_PAGES, "slow", "e", resumes=resumes)
    sender.on_message(DECODE, offer, 0.0)
    writer.news = [Attached(DECODE, 2)]
    sender.pump(0.0)
    messages, released = sender.take()
    assert messages == [(DECODE, Ping()), (DECODE, Connected(2, "slow"))]
    if not resumes:
        [release] = released
        assert (release.ok, release.reason) == (False, "the decode node has connected again")
        return
    assert released == []
    sender.on_message(DECODE, Grant("r", 0, 1, 0, (5,)), 0.0)
    assert sender.counters()["stale_messages"] == 1
    sender.on_message(DECODE, Grant("r", 0, 2, 0, (6, 5)), 0.0)
    sender.finish(("r", 0), PrefillDone("r", 0, 7, 9), [2, 3])
    sender.pump(0.0)
    writer.finished = [1, 2]  # ticket 1 belongs to the connection that broke
    sender.pump(0.0)
    sender.check()
    assert [m for _, m in sender.take()[0]] == [PrefillDone("r", 0, 7, 9), PagesWritten("r", 0, 2, (0, 1))]


def test_a_pair_that_breaks_permanently_ends_its_transfers_with_the_cause(store: MemfdStore) -> None:
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
