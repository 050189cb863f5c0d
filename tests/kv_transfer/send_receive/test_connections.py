"""Connections between a prefill and a decode node: which pairs are accepted, and what an old epoch may still do."""

import msgspec
from support.couples import KEY, couple, failure, shipped, slow
from support.kv_fakes import DECODE, PREFILL, Couple

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import AttachFailed, Connected, LayoutMessage, PagesWritten, Refused
from kv_transfer.events import Completed, TransferFailed

__all__ = ["couple"]


# ---- pairs ------------------------------------------------------------------------------------------------------


def test_an_incompatible_pair_is_refused_with_an_explanation() -> None:
    base = Couple().receiver.connect(PREFILL)
    wrong: dict[str, dict[str, object]] = {
        "serves a model with digest other": {"digest": "other"},
        "transfers by 'nixl', this prefill node by 'inprocess'": {"transport": "nixl"},
        "of the page sizes 6 and 4 one must be a multiple of the other": {
            "layout": LayoutMessage(1, 1, 2, 6, "float32")
        },
        "kv heads 2 and 1 must be equal": {"layout": LayoutMessage(1, 2, 2, 4, "float32")},
        "layers 3 and 1 must be equal": {"layout": LayoutMessage(3, 1, 2, 4, "float32")},
        "head dim 4 and 2 must be equal": {"layout": LayoutMessage(1, 1, 4, 4, "float32")},
        "dtype float16 and float32 must be equal": {"layout": LayoutMessage(1, 1, 2, 8, "float16")},
        "there is no offer 'nowhere'": {"endpoint": "nowhere"},
    }
    for sentence, change in wrong.items():
        couple = Couple()
        couple.sender.connect(DECODE, msgspec.structs.replace(base, **change))
        ((_, refused),), _ = couple.sender.take()
        assert isinstance(refused, AttachFailed if "endpoint" in change else Refused)
        assert sentence in refused.reason
        assert list(couple.sender.peers()) == []


def test_transfers_of_a_refused_pair_fail_at_once() -> None:
    couple = Couple()
    couple.begin(("before", 0), 2)
    couple.receiver.connect(PREFILL)
    couple.settle()
    couple.begin(("amid", 0), 2)
    couple.to_decode.append(Refused("another model", 1))
    couple.hear_prefill()
    couple.begin(("after", 0), 2)
    for rid in ("before", "amid", "after"):
        assert couple.events[rid, 0] == TransferFailed((rid, 0), ErrorCode.TRANSFER_FAILED, "another model")
    couple.assert_nothing_is_held()


def test_a_lost_connection_alone_frees_nothing() -> None:
    couple = slow()
    shipped(couple, 3)
    couple.receiver.peer_lost(PREFILL)  # the prefill node has not noticed and keeps writing
    couple.settle()
    assert failure(couple).code is ErrorCode.NODE_LOST
    couple.poll()
    assert couple.allocator.count(Owner.QUARANTINE) == 3
    for _ in range(4):
        couple.tick()
    assert couple.writer.num_in_quarantine == 3
    couple.writer.die()
    couple.poll()
    assert couple.allocator.count(Owner.QUARANTINE) == 0
    assert couple.allocator.num_free == couple.num_pages


def test_death_of_a_writer_fails_its_transfers_and_frees_their_pages() -> None:
    couple = slow()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.begin(("early", 0), 2)
    couple.run()
    couple.writer.die()
    couple.poll()
    assert failure(couple).code is ErrorCode.NODE_LOST
    assert couple.pairs_lost == 1
    assert couple.allocator.num_free == couple.num_pages
    assert list(couple.receiver.peers()) == []


def test_a_new_connection_proves_that_writes_of_the_old_one_have_ended() -> None:
    couple = slow()
    couple.open(KEY, 3)
    couple.begin(KEY, 3)
    couple.hear_decode()
    couple.compute(KEY, 2)
    couple.pump()
    couple.to_prefill.append(couple.receiver.connect(PREFILL))  # before the prefill node notices
    couple.settle()
    assert couple.allocator.count(Owner.QUARANTINE) == 3
    couple.hear_decode()
    assert not couple.released[KEY].ok
    assert couple.wire.num_in_flight == 0
    couple.hear_prefill()
    assert couple.allocator.count(Owner.QUARANTINE) == 0
    assert couple.receiver.is_connected(PREFILL)
    couple.assert_nothing_is_held()


def test_an_attachment_of_an_earlier_connection_does_not_connect_a_later_one() -> None:
    couple = Couple()
    couple.receiver.connect(PREFILL)
    couple.receiver.connect(PREFILL)
    couple.receiver.on_message(PREFILL, Connected(1, "inprocess"))
    assert not couple.receiver.is_connected(PREFILL)
    assert couple.receiver.counters()["stale_messages"] == 1


def test_a_refusal_of_an_earlier_connection_does_not_refuse_a_later_one() -> None:
    couple = Couple()
    couple.receiver.connect(PREFILL)
    couple.begin(KEY, 2)
    couple.to_prefill.append(couple.receiver.connect(PREFILL))
    couple.to_decode.append(Refused("it took too long", 1))
    couple.open(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)
    assert couple.receiver.counters()["stale_messages"] == 1


def test_grants_and_deliveries_of_an_earlier_epoch_are_refused(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    old_grant = couple.to_prefill.popleft()
    couple.connect()
    couple.to_prefill.append(old_grant)
    couple.hear_decode()
    assert couple.sender.counters()["stale_messages"] == 1
    couple.compute(KEY, 1)
    couple.run()
    assert not couple.writer.written
    couple.begin(("s", 0), 2)
    couple.receiver.on_message(PREFILL, PagesWritten("s", 0, 1, (0, 1)), 0.0)
    couple.settle()
    assert couple.target.num_landed == 0


def test_a_late_fence_of_an_earlier_epoch_does_not_affect_the_current_one(couple: Couple) -> None:
    couple.to_prefill.append(couple.receiver.connect(PREFILL))
    couple.settle()
    couple.hear_decode()  # detaches epoch 1; the reader's transport reports it at the next poll
    couple.hear_prefill()
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.poll()
    assert KEY not in couple.events
    assert couple.receiver.is_connected(PREFILL)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_an_old_offer_is_counted_and_ignored(couple: Couple) -> None:
    first = couple.receiver.connect(PREFILL)
    second = couple.receiver.connect(PREFILL)
    couple.sender.connect(DECODE, second)
    couple.sender.connect(DECODE, first)
    couple.settle()
    assert [type(message) for message in couple.to_decode] == [Connected]
    assert couple.sender.counters()["stale_messages"] == 1


def test_requests_without_a_grant_survive_a_new_connection(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.open(("granted", 0), 2)
    couple.begin(("granted", 0), 2)
    couple.run()
    couple.connect()
    assert ("granted", 0) in couple.released
    assert KEY not in couple.released
    couple.begin(KEY, 2)
    couple.finish(KEY)
    couple.run()
    assert isinstance(couple.events[KEY], Completed)


def test_close_releases_everything(couple: Couple) -> None:
    couple.open(KEY, 2)
    couple.begin(KEY, 2)
    couple.run()
    couple.sender.close()
    couple.settle()
    assert not couple.released[KEY].ok
    couple.poll()
    assert couple.allocator.count(Owner.GRANT) == 2  # the prefill node may come back
    couple.receiver.close()
    couple.settle()
    assert failure(couple).code is ErrorCode.NODE_LOST
    couple.assert_nothing_is_held()
