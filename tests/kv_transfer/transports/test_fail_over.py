"""Pairs of real processes whose transport fails in the middle of a transfer."""

from collections.abc import Callable

import pytest
from support.kv.transfer_cluster import Cluster, incarnation
from support.kv.transport_process import LAYOUT
from support.waiting import until

from kv_transfer.transports.broken_transports import MIN_REST_S

#: Where ``auto`` chooses NIXL first: nodes whose pages leave the machine, and that see each other on another host.
FAR = {"TEST_HOST": "0.0.0.0", "TEST_FAR": "1", "UCX_TLS": "tcp"}
PREFILL, DECODE = "p0", "d0"


def carrier(cluster: Cluster) -> str:
    name: str = cluster.ask(PREFILL, "carrier", peer=incarnation(DECODE))
    return name


@pytest.mark.parametrize(("first", "environment"), [("shm", {}), ("nixl", FAR)], ids=["shm", "nixl"])
def test_a_transfer_goes_on_by_the_next_transport_and_the_pair_returns_later(
    make_cluster: Callable[[str], Cluster], first: str, environment: dict[str, str]
) -> None:
    """The decode node compares every page of every request."""
    cluster = make_cluster("auto")
    for name in (PREFILL, DECODE):
        cluster.start(name, TEST_PATIENCE_S="60", **environment)
    cluster.serve("before", PREFILL, DECODE, 2)
    assert carrier(cluster) == first
    cluster.reach("granted", "during", PREFILL, DECODE, 6)
    cluster.ask(PREFILL, "pump", max_pages=2)
    cluster.ask(PREFILL, "break_transport", peer=incarnation(DECODE))
    cluster.go_on("during", PREFILL, DECODE)
    assert carrier(cluster) == "tcp"
    moved = cluster.ask(PREFILL, "counters")
    assert moved[f"bytes_by_{first}"] >= 2 * LAYOUT.page_bytes and moved["bytes_by_tcp"] >= 4 * LAYOUT.page_bytes
    for rid in ("before", "during"):
        cluster.ask(DECODE, "give_back", rid=rid)
    cluster.ask(PREFILL, "let_pass", seconds=MIN_REST_S)
    cluster.reach("granted", "across", PREFILL, DECODE, 6)
    cluster.ask(PREFILL, "pump", max_pages=2)

    def has_returned() -> bool:
        cluster.ferry(PREFILL, DECODE)
        return carrier(cluster) == first

    until(has_returned)
    by_tcp = cluster.ask(PREFILL, "counters")["bytes_by_tcp"]
    assert by_tcp == moved["bytes_by_tcp"] + 2 * LAYOUT.page_bytes
    cluster.go_on("across", PREFILL, DECODE)
    cluster.serve("after", PREFILL, DECODE, 2)
    found = cluster.ask(PREFILL, "counters")
    assert found["bytes_by_tcp"] == by_tcp
    assert found[f"bytes_by_{first}"] == moved[f"bytes_by_{first}"] + 6 * LAYOUT.page_bytes, "a page went twice"
    for rid in ("across", "after"):
        cluster.ask(DECODE, "give_back", rid=rid)
    for name in (PREFILL, DECODE):
        cluster.balanced(name)
