"""Processes killed, or stopped for longer than every timeout, at every step of a transfer on every transport.

Afterwards the page counts of the survivors balance, no page given to another use was touched, and the next requests
succeed; the last of them uses every page of the pool. The test carries the control messages, so it can stop a
transfer between any two of them. It tells both ends when a control connection is lost, as the control plane does.
"""

import itertools
import signal
import time
from collections.abc import Callable

import pytest
from support.kv.transfer_cluster import SOME, Cluster
from support.kv.transfer_faults import PATIENCE_S, STEPS, check_loss, check_stopped_prefill
from support.kv.transport_ends import TRANSPORTS
from support.kv.transport_process import NUM_PAGES


@pytest.mark.slow(sample=0.05)
@pytest.mark.parametrize(("transport", "victim", "step"), list(itertools.product(TRANSPORTS, ("p0", "d0"), STEPS)))
def test_either_node_is_killed_at_every_step(
    make_cluster: Callable[[str], Cluster], transport: str, victim: str, step: str
) -> None:
    cluster = make_cluster(transport)
    for name in ("p0", "d0"):
        cluster.start(name)
    check_loss(cluster, victim, step, cluster.ends[victim].process.kill)


@pytest.mark.slow(sample=0.016)
@pytest.mark.parametrize(
    ("transport", "step", "ending"), list(itertools.product(TRANSPORTS, STEPS, (signal.SIGCONT, signal.SIGKILL)))
)
def test_a_prefill_node_is_stopped_for_longer_than_every_timeout(
    make_cluster: Callable[[str], Cluster], transport: str, step: str, ending: signal.Signals
) -> None:
    check_stopped_prefill(make_cluster(transport), step, ending)


@pytest.mark.slow(sample=0.016)
@pytest.mark.parametrize(
    ("transport", "step", "ending"), list(itertools.product(TRANSPORTS, STEPS, (signal.SIGCONT, signal.SIGKILL)))
)
def test_a_decode_node_is_stopped_for_longer_than_every_timeout(
    make_cluster: Callable[[str], Cluster], transport: str, step: str, ending: signal.Signals
) -> None:
    cluster = make_cluster(transport)
    prefill = cluster.start("p0", TEST_PATIENCE_S=str(PATIENCE_S))
    decode, other = cluster.start("d0", TEST_PATIENCE_S=str(PATIENCE_S)), cluster.start("d1")
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[decode].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    if step == "writing":
        cluster.ends[prefill].answer()
    cluster.part(prefill, decode)
    cluster.serve("b", prefill, other, SOME)
    time.sleep(max(0.0, stopped_at + PATIENCE_S + 0.3 - time.monotonic()))
    cluster.ends[decode].signal(ending)
    has_kept = step == "acknowledging"
    if ending == signal.SIGCONT:
        cluster.part(decode, prefill)
        cluster.balanced(decode, SOME * has_kept)
        assert cluster.page_counts(decode)["ends"]["a"] == ("Completed" if has_kept else "TransferFailed")
    cluster.balanced(prefill)
    if ending == signal.SIGCONT:
        if has_kept:
            cluster.ask(decode, "give_back", rid="a")
        cluster.serve("c", prefill, decode, NUM_PAGES)
    cluster.ask(other, "give_back", rid="b")
    cluster.serve("d", prefill, other, NUM_PAGES)
