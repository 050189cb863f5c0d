"""NIXL writers on another host: pages granted to a lost writer come back although nothing proves it dead.

Processes of this host stand for other hosts: they have no watch address, another host id, and UCX limited to TCP with
small socket buffers. The decode node is stopped while pages are in flight, so that writes are still queued in the
writer when it is stopped too.
"""

import signal
import time
from collections.abc import Callable

import pytest
from support.kv.transfer_cluster import SOME, Cluster
from support.kv.transport_process import LAYOUT, NUM_PAGES
from support.waiting import until

#: Pages of a lost writer stay in quarantine until ``reclaim``, however slow the machine is.
FAR = {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "32k", "UCX_TCP_RCVBUF": "32k", "TEST_FAR": "1", "TEST_RECLAIM_S": "600"}


@pytest.fixture
def cluster(make_cluster: Callable[[str], Cluster]) -> Cluster:
    cluster = make_cluster("nixl")
    for name in ("d0", "p0", "p1"):
        cluster.start(name, **FAR)
    return cluster


def stop_in_mid_write(cluster: Cluster, rids: dict[str, str]) -> None:
    """Stop each of these nodes while the pages of its request are in flight."""
    for name, rid in rids.items():
        cluster.reach("granted", rid, name, "d0", SOME)
    cluster.ends["d0"].signal(signal.SIGSTOP)
    for name in rids:
        cluster.ask(name, "begin_write", max_pages=SOME)
        assert cluster.ask(name, "counters")["bytes_by_nixl"] == 0, "the write ended before the node was stopped"
        cluster.ends[name].signal(signal.SIGSTOP)
    cluster.ends["d0"].signal(signal.SIGCONT)


def reclaim(cluster: Cluster) -> None:
    """Let the time be over after which the decode node takes pages back."""
    cluster.ask("d0", "set", TEST_RECLAIM_S="0")


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_pages_of_a_lost_writer_come_back_and_it_never_writes_them_again(
    cluster: Cluster, ending: signal.Signals
) -> None:
    stop_in_mid_write(cluster, {"p0": "a"})
    cluster.part("d0", "p0")
    assert cluster.page_counts("d0")["aside"] == SOME
    reclaim(cluster)
    cluster.balanced("d0")
    assert cluster.ask("d0", "counters")["nixl_invalidations"] == 1
    cluster.serve("b", "p1", "d0", NUM_PAGES - 1)
    cluster.reach("granted", "e", "p1", "d0", 1)  # keeps the decode node polling its data connections
    cluster.ends["p0"].signal(ending)
    if ending == signal.SIGCONT:
        until(lambda: cluster.ask("p0", "counters")["stuck_writes"] == 1)
    time.sleep(0.5)
    cluster.ask("d0", "give_back", rid="b")  # checks every byte
    cluster.go_on("e", "p1", "d0")
    cluster.ask("d0", "give_back", rid="e")
    if ending == signal.SIGCONT:
        cluster.part("p0", "d0")
        assert cluster.page_counts("p0")["free"] == NUM_PAGES
        cluster.serve("c", "p0", "d0", SOME)
        cluster.ask("d0", "give_back", rid="c")
        cluster.balanced("p0")
        cluster.serve("d", "p0", "d0", NUM_PAGES)
        cluster.ask("d0", "give_back", rid="d")
        cluster.balanced("p0")
    cluster.balanced("d0")


def test_writes_of_other_pairs_that_an_invalidation_breaks_are_repeated(cluster: Cluster) -> None:
    """The writes of the other pair fail, and only the new offer proves that they have ended."""
    stop_in_mid_write(cluster, {"p0": "a", "p1": "b"})
    cluster.part("d0", "p0")
    cluster.ends["p0"].signal(signal.SIGKILL)
    reclaim(cluster)
    until(lambda: cluster.ask("d0", "counters")["nixl_invalidations"])
    cluster.ends["p1"].signal(signal.SIGCONT)
    until(lambda: cluster.ask("p1", "counters")["stuck_writes"] == 1)
    cluster.go_on("b", "p1", "d0")
    cluster.serve("c", "p1", "d0", SOME)
    for rid in "bc":
        cluster.ask("d0", "give_back", rid=rid)
    for name in ("d0", "p1"):
        cluster.balanced(name)


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_a_lost_decode_node_holds_no_pages_of_the_prefill_node(cluster: Cluster, ending: signal.Signals) -> None:
    """Other requests use the pages while the write still reads them. If the decode node wakes up, the write ends in
    pages that are not in use.
    """
    cluster.start("d1", **FAR)
    cluster.reach("granted", "a", "p0", "d0", SOME)
    cluster.ends["d0"].signal(signal.SIGSTOP)
    cluster.ask("p0", "pump", max_pages=SOME)
    time.sleep(0.3)
    assert cluster.ask("p0", "counters")["bytes_by_nixl"] == 0, "the write ended before the node was lost"
    assert cluster.page_counts("p0")["free"] == NUM_PAGES - SOME
    if ending == signal.SIGKILL:
        cluster.ends["d0"].kill()
        until(lambda: cluster.ask("p0", "counters")["stuck_writes"] == 1)
        assert cluster.page_counts("p0")["free"] == NUM_PAGES - SOME, "pages that a repeated write needs were released"
    cluster.part("p0", "d0")
    assert cluster.page_counts("p0") == {"free": NUM_PAGES, "aside": 0, "ends": {"a": False}}
    cluster.serve("b", "p0", "d1", NUM_PAGES)
    if ending == signal.SIGCONT:
        cluster.ends["d0"].signal(ending)
        until(lambda: cluster.ask("p0", "counters")["bytes_by_nixl"] > NUM_PAGES * LAYOUT.page_bytes)
        assert cluster.page_counts("d0")["free"] == NUM_PAGES - SOME, "the late write changed a page count"
        cluster.part("d0", "p0")
        assert cluster.page_counts("d0")["aside"] == SOME
        cluster.serve("c", "p0", "d0", SOME)
        cluster.ask("d0", "give_back", rid="c")
        cluster.balanced("d0")
        cluster.serve("d", "p0", "d0", NUM_PAGES)
        cluster.balanced("p0")
    cluster.ask("d1", "give_back", rid="b")
    cluster.serve("e", "p0", "d1", NUM_PAGES)
    cluster.balanced("p0")
