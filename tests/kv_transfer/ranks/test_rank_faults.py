"""The faults of ``test_transfer_faults``, between nodes with different numbers of ranks, each a process of its own.

Afterwards the page counts of the survivors balance, no page given to another use was touched at any rank, and the next
requests succeed.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from support.kv.transfer_cluster import SOME, Cluster
from support.kv.transport_ends import until
from support.kv.transport_process import NUM_PAGES
from support.service.fork_server import ForkServer

STEPS = ("offered", "attaching", "granted", "writing", "written", "acknowledging")
RANKS = ((1, 2), (2, 1))
PATIENCE_S = 6.0

Make = Callable[[str, tuple[int, int]], Cluster]


@pytest.fixture
def make(fork_server: ForkServer) -> Iterator[Make]:
    clusters: list[Cluster] = []

    def begin(transport: str, ranks: tuple[int, int]) -> Cluster:
        clusters.append(Cluster(fork_server, transport, {"p": ranks[0], "d": ranks[1]}))
        return clusters[-1]

    yield begin
    for cluster in clusters:
        for end in cluster.ends.values():
            end.close()


@pytest.mark.parametrize(
    ("transport", "ranks"), [("tcp", (1, 2)), ("shm", (2, 1)), ("cuda-ipc", (1, 2)), ("cuda-ipc", (2, 1))]
)
def test_requests_pass_between_nodes_of_different_ranks(make: Make, transport: str, ranks: tuple[int, int]) -> None:
    cluster = make(transport, ranks)
    prefill, decode = cluster.start("p0"), cluster.start("d0")
    cluster.serve("a", prefill, decode, SOME)
    cluster.ask(decode, "give_back", rid="a")
    cluster.serve("b", prefill, decode, NUM_PAGES)
    cluster.balanced(prefill)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_requests_pass_from_two_ranks_to_four(make: Make, transport: str) -> None:
    """The model has two KV heads, so that two of the four ranks have the same one each."""
    test_requests_pass_between_nodes_of_different_ranks(make, transport, (2, 4))


#: Ranks, the node that is lost, and whether its rank 1 is killed, after which rank 0 ends by itself, or its rank 0.
LOSSES = (((2, 1), "p0", True), ((1, 2), "d0", True), ((2, 1), "p0", False), ((1, 2), "p0", False))
TRANSPORTS = ("tcp", "shm", "cuda-ipc")


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize(("step", "loss"), list(itertools.product(range(len(STEPS)), range(len(LOSSES)))))
def test_a_node_whose_rank_is_killed_ends_and_the_other_node_goes_on(make: Make, step: int, loss: int) -> None:
    transport, (ranks, victim, is_other) = TRANSPORTS[(step + loss) % 3], LOSSES[loss]
    check_loss(make(transport, ranks), victim, STEPS[step], is_other=is_other)


def check_loss(cluster: Cluster, victim: str, step: str, *, is_other: bool) -> None:
    prefill, decode = cluster.start("p0"), cluster.start("d0")
    survivor = prefill if victim == decode else decode
    others = cluster.ask(victim, "ranks")
    cluster.reach(step, "a", prefill, decode, SOME)
    node = cluster.ends[victim].process
    if is_other:
        os.kill(others[0], signal.SIGKILL)
    else:
        node.kill()
    node.wait()
    if victim == decode and step == "writing":
        cluster.ends[prefill].answer()
    cluster.part(survivor, victim)
    has_kept = victim == prefill and step == "acknowledging"
    cluster.balanced(survivor, SOME if has_kept else 0)
    ends = cluster.page_counts(survivor)["ends"]["a"]
    assert ends == ("Completed" if has_kept else "TransferFailed" if victim == prefill else False)
    replacement = cluster.start(victim[0] + "1")
    pair = (replacement, decode) if victim == prefill else (prefill, replacement)
    cluster.serve("b", *pair, SOME)
    for rid in ("a", "b") if has_kept else ("b",):
        cluster.ask(pair[1], "give_back", rid=rid)
    cluster.serve("c", *pair, NUM_PAGES)
    cluster.balanced(pair[0])


@pytest.mark.slow(sample=0.1)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("ranks", "ending"), [(RANKS[0], signal.SIGCONT), (RANKS[1], signal.SIGKILL)])
def test_a_prefill_node_is_stopped_for_longer_than_every_timeout(
    make: Make, ranks: tuple[int, int], step: str, ending: signal.Signals
) -> None:
    """Pages that any rank of the stopped node may still write stay in quarantine at every rank of the decode node."""
    transport = TRANSPORTS[(STEPS.index(step) + RANKS.index(ranks)) % 3]
    cluster = make(transport, ranks)
    decode = cluster.start("d0", TEST_PATIENCE_S=str(PATIENCE_S))
    prefill, other = cluster.start("p0", TEST_PATIENCE_S=str(PATIENCE_S)), cluster.start("p1")
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[prefill].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    cluster.part(decode, prefill)
    has_kept = step == "acknowledging"
    expected = "Completed" if has_kept else "TransferFailed"
    assert until(lambda: cluster.page_counts(decode)["ends"].get("a")) == expected
    cluster.serve("b", other, decode, SOME)
    time.sleep(max(0.0, stopped_at + PATIENCE_S + 0.3 - time.monotonic()))
    may_write = transport != "tcp" and step in ("granted", "writing", "written")
    assert cluster.page_counts(decode)["aside"] == (SOME if may_write else 0)
    cluster.ends[prefill].signal(ending)
    if ending == signal.SIGCONT:
        if step == "writing":
            cluster.ends[prefill].answer()
        cluster.part(prefill, decode)
        cluster.balanced(prefill)
    cluster.balanced(decode, SOME + SOME * has_kept)
    cluster.ask(decode, "give_back", rid="b")
    if has_kept:
        cluster.ask(decode, "give_back", rid="a")
    cluster.serve("c", prefill if ending == signal.SIGCONT else other, decode, NUM_PAGES)
