"""Connections between a prefill and a decode node: which pairs are accepted, and what an old epoch may still do."""

import msgspec
from support.kv.connected_pair import KEY, failure, slow, written_unreported
from support.kv.kv_fakes import DECODE, PREFILL, TransferPair

from common.cache.page_allocator import Owner
from common.errors import ErrorCode
from common.wire.messages import AttachFailed, Connected, LayoutMessage, PagesWritten, Refused
from kv_transfer.events import Completed, TransferFailed

# ---- pairs ------------------------------------------------------------------------------------------------------


def test_an_incompatible_pair_is_refused_with_an_explanation() -> None:
    base = TransferPair().receiver.connect(PREFILL)
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
        "give both nodes the same --dtype and --kv-cache-dtype": {"layout": LayoutMessage(1, 1, 2, 4, "fp8_e4m3")},
        "value dim 1 and 2 must be equal": {"layout": LayoutMessage(1, 1, 2, 4, "float32", value_dim=1)},
        "one has latent pages, the other keys and values": {
            "layout": LayoutMessage(1, 1, 2, 4, "float32", is_latent=True)
        },
        "a page would come in 8192 units (page_size 32 and num_ranks 1024 there, 4 and 1 here)": {
            "layout": LayoutMessage(1, 1, 2, 32, "float32"),
            "num_ranks": 1_024,
        },
        "there is no offer 'nowhere'": {"endpoint": "nowhere"},
    }
    for sentence, change in wrong.items():
        pair = TransferPair()
        pair.sender.on_message(DECODE, msgspec.structs.replace(base, **change), 0.0)
        ((_, refused),), _ = pair.sender.take()
        assert isinstance(refused, AttachFailed if "endpoint" in change else Refused)
        assert sentence in refused.reason
        assert list(pair.sender.peers()) == []


def test_transfers_of_a_refused_pair_fail_at_once() -> None:
    pair = TransferPair()
    pair.begin(("before", 0), 2)
    pair.receiver.connect(PREFILL)
    pair.settle()
    pair.begin(("amid", 0), 2)
    pair.to_decode.append(Refused("another model", 1))
    pair.hear_prefill()
    pair.begin(("after", 0), 2)
    for rid in ("before", "amid", "after"):
        assert pair.events[rid, 0] == TransferFailed((rid, 0), ErrorCode.TRANSFER_FAILED, "another model")
    pair.assert_nothing_is_held()


def test_a_lost_connection_alone_frees_nothing() -> None:
    pair = slow()
    written_unreported(pair, 3)
    pair.receiver.peer_lost(PREFILL)  # the prefill node has not noticed and keeps writing
    pair.settle()
    assert failure(pair).code is ErrorCode.NODE_LOST
    pair.poll()
    assert pair.allocator.count(Owner.QUARANTINE) == 3
    for _ in range(4):
        pair.tick()
    assert pair.writer.num_in_quarantine == 3
    pair.writer.die()
    pair.poll()
    assert pair.allocator.count(Owner.QUARANTINE) == 0
    assert pair.allocator.num_free == pair.num_pages


def test_death_of_a_writer_fails_its_transfers_and_frees_their_pages() -> None:
    pair = slow()
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.begin(("early", 0), 2)
    pair.run()
    pair.writer.die()
    pair.poll()
    assert failure(pair).code is ErrorCode.NODE_LOST
    assert pair.pairs_lost == 1
    assert pair.allocator.num_free == pair.num_pages
    assert not pair.receiver.is_connected(PREFILL)


def test_a_new_connection_proves_that_writes_of_the_old_one_have_ended() -> None:
    pair = slow()
    pair.open(KEY, 3)
    pair.begin(KEY, 3)
    pair.hear_decode()
    pair.compute(KEY, 2)
    pair.pump()
    pair.to_prefill.append(pair.receiver.connect(PREFILL))  # before the prefill node notices
    pair.settle()
    assert pair.allocator.count(Owner.QUARANTINE) == 3
    pair.hear_decode()
    assert not pair.released[KEY].ok
    assert pair.wire.num_in_flight == 0
    pair.hear_prefill()
    assert pair.allocator.count(Owner.QUARANTINE) == 0
    assert pair.receiver.is_connected(PREFILL)
    pair.assert_nothing_is_held()


def test_an_attachment_of_an_earlier_connection_does_not_connect_a_later_one() -> None:
    pair = TransferPair()
    pair.receiver.connect(PREFILL)
    pair.receiver.connect(PREFILL)
    pair.receiver.on_message(PREFILL, Connected(1, "inprocess"), 0.0)
    assert not pair.receiver.is_connected(PREFILL)
    assert pair.receiver.counters()["stale_messages"] == 1


def test_a_refusal_of_an_earlier_connection_does_not_refuse_a_later_one() -> None:
    pair = TransferPair()
    pair.receiver.connect(PREFILL)
    pair.begin(KEY, 2)
    pair.to_prefill.append(pair.receiver.connect(PREFILL))
    pair.to_decode.append(Refused("it took too long", 1))
    pair.open(KEY, 2)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)
    assert pair.receiver.counters()["stale_messages"] == 1


def test_grants_and_deliveries_of_an_earlier_epoch_are_refused(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    old_grant = pair.to_prefill.popleft()
    pair.connect()
    pair.to_prefill.append(old_grant)
    pair.hear_decode()
    assert pair.sender.counters()["stale_messages"] == 1
    pair.compute(KEY, 1)
    pair.run()
    assert not pair.writer.written
    pair.begin(("s", 0), 2)
    pair.receiver.on_message(PREFILL, PagesWritten("s", 0, 1, (0, 1)), 0.0)
    pair.settle()
    assert pair.target.num_landed == 0


def test_a_late_fence_of_an_earlier_epoch_does_not_affect_the_current_one(pair: TransferPair) -> None:
    pair.to_prefill.append(pair.receiver.connect(PREFILL))
    pair.settle()
    pair.hear_decode()  # detaches epoch 1; the reader's transport reports it at the next poll
    pair.hear_prefill()
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.poll()
    assert KEY not in pair.events
    assert pair.receiver.is_connected(PREFILL)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_an_old_offer_is_counted_and_ignored(pair: TransferPair) -> None:
    first = pair.receiver.connect(PREFILL)
    second = pair.receiver.connect(PREFILL)
    pair.sender.on_message(DECODE, second, 0.0)
    pair.sender.on_message(DECODE, first, 0.0)
    pair.settle()
    assert [type(message) for message in pair.to_decode] == [Connected]
    assert pair.sender.counters()["stale_messages"] == 1


def test_requests_without_a_grant_survive_a_new_connection(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.open(("granted", 0), 2)
    pair.begin(("granted", 0), 2)
    pair.run()
    pair.connect()
    assert ("granted", 0) in pair.released
    assert KEY not in pair.released
    pair.begin(KEY, 2)
    pair.finish(KEY)
    pair.run()
    assert isinstance(pair.events[KEY], Completed)


def test_nodes_that_lose_each_other_release_everything(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.run()
    pair.sender.peer_lost(DECODE)
    pair.settle()
    assert not pair.released[KEY].ok
    pair.poll()
    assert pair.allocator.count(Owner.GRANT) == 2  # the prefill node may come back
    pair.receiver.peer_lost(PREFILL)
    pair.settle()
    assert failure(pair).code is ErrorCode.NODE_LOST
    pair.assert_nothing_is_held()
