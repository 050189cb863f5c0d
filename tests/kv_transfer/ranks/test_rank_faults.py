"""The faults of ``test_transfer_faults``, between nodes with different numbers of ranks, each a process of its own.

Afterwards the page counts of the survivors balance, no page given to another use was touched at any rank, and the next
requests succeed.
"""

import itertools
import os
import signal
from collections.abc import Callable

import pytest
from support.kv.transfer_cluster import SOME, Cluster
from support.kv.transfer_faults import STEPS, check_loss, check_stopped_prefill
from support.kv.transport_process import NUM_PAGES

RANKS = ((1, 2), (2, 1))

Make = Callable[[str, tuple[int, int]], Cluster]


@pytest.fixture
def make(make_cluster: Callable[..., Cluster]) -> Make:
    return lambda transport, ranks: make_cluster(transport, {"p": ranks[0], "d": ranks[1]})


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
    cluster = make(transport, ranks)
    for name in ("p0", "d0"):
        cluster.start(name)
    rank_1 = cluster.ask(victim, "ranks")[0] if is_other else 0
    check_loss(
        cluster,
        victim,
        STEPS[step],
        lambda: os.kill(rank_1, signal.SIGKILL) if is_other else cluster.ends[victim].process.kill(),
    )


@pytest.mark.slow(sample=0.04)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("ranks", "ending"), [(RANKS[0], signal.SIGCONT), (RANKS[1], signal.SIGKILL)])
def test_a_prefill_node_is_stopped_for_longer_than_every_timeout(
    make: Make, ranks: tuple[int, int], step: str, ending: signal.Signals
) -> None:
    """Pages that any rank of the stopped node may still write stay in quarantine at every rank of the decode node."""
    transport = TRANSPORTS[(STEPS.index(step) + RANKS.index(ranks)) % 3]
    check_stopped_prefill(make(transport, ranks), step, ending)
