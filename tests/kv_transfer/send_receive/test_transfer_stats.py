"""Figures about transfers: stages by transport, write times, and failures by reason."""

from support.kv.connected_pair import KEY, break_data_connection, slow
from support.kv.kv_fakes import TransferPair

from kv_transfer.transfer_stats import WriteTime, stage_gauges


def now_at(gauges: dict[str, float]) -> list[str]:
    """Stages at which transfers are now."""
    return [name.split("_by_")[1] for name, count in gauges.items() for _ in range(int(count))]


def test_a_transfer_passes_all_stages() -> None:
    pair = slow()
    seen = []
    pair.open(KEY, 2)
    seen += now_at(pair.sender.gauges())
    pair.begin(KEY, 2)
    assert now_at(pair.receiver.gauges()) == ["receiving"]
    pair.hear_decode()
    seen += now_at(pair.sender.gauges())
    pair.compute(KEY, 1)
    seen += now_at(pair.sender.gauges())
    pair.pump()
    seen += now_at(pair.sender.gauges())
    pair.finish(KEY)
    for _ in range(8):
        pair.pump()
        pair.tick()
    pair.pump()
    seen += now_at(pair.sender.gauges())
    pair.run()
    assert seen == ["waiting_for_grant", "computing", "waiting_to_write", "writing", "waiting_for_ack"]
    assert now_at(pair.sender.gauges()) == now_at(pair.receiver.gauges()) == []


def test_a_transfer_over_a_connection_that_broke_waits_on_both_sides(pair: TransferPair) -> None:
    pair.open(KEY, 2)
    pair.begin(KEY, 2)
    pair.hear_decode()
    break_data_connection(pair)
    assert now_at(pair.sender.gauges()) == ["waiting_for_grant"]
    assert now_at(pair.receiver.gauges()) == ["waiting_for_connection"]


def test_transfers_are_counted_by_transport_and_stages_without_any_are_0() -> None:
    gauges = stage_gauges(("a", "b"), ["tcp", "", "tcp"], [("a", "tcp"), ("a", "tcp"), ("b", "")])
    assert gauges == {
        "transfers_by_a_by_tcp": 2.0, "transfers_by_b_by_tcp": 0.0,
        "transfers_by_a_by_none": 0.0, "transfers_by_b_by_none": 1.0,
    }  # fmt: skip
    assert stage_gauges(("a",), [], []) == {"transfers_by_a_by_none": 0.0}


def test_writes_at_the_same_time_are_timed_once() -> None:
    times = WriteTime()
    times.begin("tcp", 1.0)
    times.begin("tcp", 2.0)
    times.begin("shm", 2.0)
    times.end("tcp", 3.0)
    assert times.counters() == {"transfer_seconds_by_tcp": 2.0, "transfer_seconds_by_shm": 0.0}
    times.end("tcp", 4.0)
    times.end("shm", 2.5)
    times.begin("tcp", 9.0)
    times.end("tcp", 10.0)
    assert times.counters() == {"transfer_seconds_by_tcp": 4.0, "transfer_seconds_by_shm": 0.5}


def test_failures_are_counted_by_reason_at_both_ends_and_aborts_are_none(pair: TransferPair) -> None:
    for number in range(4):
        key = (f"r{number}", 0)
        pair.open(key, 2)
        pair.begin(key, 2)
    pair.drain_to_prefill()
    pair.sender.abort(("r0", 0), "aborted", "the client left")
    pair.sender.abort(("r1", 0), "failed", "it was too late")
    pair.cancel(("r2", 0))
    pair.run()
    pair.disconnect()  # takes the last one with it
    for end in (pair.sender, pair.receiver):
        totals = end.counters()
        assert totals["transfers_failed_by_transfer_failed"] == 1
        assert totals["transfers_failed_by_node_lost"] == 1
