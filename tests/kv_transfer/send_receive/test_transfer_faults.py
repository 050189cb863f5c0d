"""Processes killed, or stopped for longer than every timeout, at every step of a transfer on every transport.

Afterwards the page counts of the survivors balance, no page given to another use was touched, and the next requests
succeed; the last of them uses every page of the pool. The test carries the control messages, so it can stop a
transfer between any two of them. It tells both ends when a control connection is lost, as the control plane does.
"""

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kv.transfer_cluster import SOME, Cluster
from support.kv.transport_ends import TRANSPORTS, until
from support.kv.transport_process import NUM_PAGES
from support.service.fork_server import ForkServer

STEPS = ("offered", "attaching", "granted", "writing", "written", "acknowledging")
#: Longer than a healthy peer needs on a busy machine. The other node is stopped for longer than this.
PATIENCE_S = 6.0


@pytest.fixture
def make(fork_server: ForkServer) -> Iterator[Callable[[str], Cluster]]:
    clusters: list[Cluster] = []

    def begin(transport: str) -> Cluster:
        clusters.append(Cluster(fork_server, transport))
        return clusters[-1]

    yield begin
    for cluster in clusters:
        for end in cluster.ends.values():
            end.close()


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize(("transport", "victim", "step"), list(itertools.product(TRANSPORTS, ("p0", "d0"), STEPS)))
def test_either_node_is_killed_at_every_step(
    make: Callable[[str], Cluster], transport: str, victim: str, step: str
) -> None:
    cluster = make(transport)
    prefill, decode = cluster.start("p0"), cluster.start("d0")
    survivor = prefill if victim == decode else decode
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[victim].kill()
    if victim == decode and step == "writing":
        cluster.ends[prefill].answer()
    cluster.part(survivor, victim)
    has_kept = victim == prefill and step == "acknowledging"
    cluster.balanced(survivor, SOME if has_kept else 0)
    assert cluster.page_counts(survivor)["ends"]["a"] == ("Completed" if has_kept else _failed(victim)), step
    replacement = cluster.start(victim[0] + "1")
    pair = (replacement, decode) if victim == prefill else (prefill, replacement)
    cluster.serve("b", *pair, SOME)
    for rid in ("a", "b") if has_kept else ("b",):
        cluster.ask(pair[1], "give_back", rid=rid)
    cluster.serve("c", *pair, NUM_PAGES)
    cluster.balanced(pair[0])


def _failed(victim: str) -> Any:
    """The outcome that the survivor reports for the request."""
    return "TransferFailed" if victim.startswith("p") else False


@pytest.mark.slow(sample=0.04)
@pytest.mark.parametrize(
    ("transport", "step", "ending"), list(itertools.product(TRANSPORTS, STEPS, (signal.SIGCONT, signal.SIGKILL)))
)
def test_a_prefill_node_is_stopped_for_longer_than_every_timeout(
    make: Callable[[str], Cluster], transport: str, step: str, ending: signal.Signals
) -> None:
    """Pages that the stopped node may still write stay in quarantine. Another node serves from the rest of the pool,
    and what the stopped node writes when it wakes up reaches no page in use.
    """
    cluster = make(transport)
    decode = cluster.start("d0", TEST_PATIENCE_S=str(PATIENCE_S))
    prefill, other = cluster.start("p0", TEST_PATIENCE_S=str(PATIENCE_S)), cluster.start("p1")
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[prefill].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    cluster.part(decode, prefill)
    has_kept = step == "acknowledging"
    assert until(lambda: cluster.page_counts(decode)["ends"].get("a")) == (
        "Completed" if has_kept else "TransferFailed"
    )
    cluster.serve("b", other, decode, SOME)
    time.sleep(max(0.0, stopped_at + PATIENCE_S + 0.3 - time.monotonic()))
    # The node is stopped, not dead. Where it writes the pool itself, only its message or its death frees these pages.
    may_write = transport in ("shm", "cuda-ipc", "nixl") and step in ("granted", "writing", "written")
    assert cluster.page_counts(decode)["aside"] == (SOME if may_write else 0)
    cluster.ends[prefill].signal(ending)
    if ending == signal.SIGCONT:
        if step == "writing":
            cluster.ends[prefill].answer()
        cluster.part(prefill, decode)
        cluster.balanced(prefill)
    cluster.balanced(decode, SOME + SOME * has_kept)
    cluster.ask(decode, "give_back", rid="b")  # compares the pages again
    if has_kept:
        cluster.ask(decode, "give_back", rid="a")
    cluster.serve("c", prefill if ending == signal.SIGCONT else other, decode, NUM_PAGES)


@pytest.mark.slow(sample=0.04)
@pytest.mark.parametrize(
    ("transport", "step", "ending"), list(itertools.product(TRANSPORTS, STEPS, (signal.SIGCONT, signal.SIGKILL)))
)
def test_a_decode_node_is_stopped_for_longer_than_every_timeout(
    make: Callable[[str], Cluster], transport: str, step: str, ending: signal.Signals
) -> None:
    cluster = make(transport)
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
