"""The schedule of faults: the same for one seed, in order, and never against the contract."""

from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from scripts.chaos_harness.schedule import FaultKind, NodeState, PlannedFault, choose_target, fault_schedule

KILL = FaultKind("kill", True, ("prefill", "decode"), (0.0, 0.0))
HANG = FaultKind("hang", True, ("prefill", "decode"), (6.0, 9.0))
PAUSE = FaultKind("pause", False, ("decode",), (0.1, 2.0))
HOSTILE = FaultKind("hostile", False, (), (1.0, 4.0))


def first(count: int, seed: int) -> list[PlannedFault]:
    kinds = [KILL, HANG, PAUSE, HOSTILE]
    return list(islice(fault_schedule(kinds, kill_every=15.0, fault_every=2.0, seed=seed), count))


def test_a_seed_gives_the_same_faults_again() -> None:
    assert first(50, 3) == first(50, 3) != first(50, 4)


@given(st.integers(0, 1000))
def test_losses_and_smaller_faults_keep_their_distances(seed: int) -> None:
    faults = first(100, seed)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    for is_loss, every_s in ((True, 15.0), (False, 2.0)):
        instants = [0.0, *(fault.at_s for fault in faults if fault.kind.is_loss is is_loss)]
        gaps = [after - before for before, after in pairwise(instants)]
        assert all(every_s <= gap + 1e-9 and gap <= every_s * 1.25 + 1e-9 for gap in gaps)
    assert {fault.kind.name for fault in faults} == {"kill", "hang", "pause", "hostile"}


def at(draw: float, kind: FaultKind = KILL) -> PlannedFault:
    return PlannedFault(0.0, kind, 1.0, draw)


NODES = [NodeState("p0", "prefill", True), NodeState("d0", "decode", True), NodeState("d1", "decode", True)]


def test_the_last_node_of_a_role_is_not_hit() -> None:
    assert [choose_target(at(draw), NODES) for draw in (0.0, 0.49, 0.5, 0.99)] == ["d0", "d0", "d1", "d1"]
    one_down = [NODES[0], NODES[1], NodeState("d1", "decode", False)]
    assert choose_target(at(0.0), one_down) == ""


def test_the_only_node_of_a_role_is_hit_since_it_comes_back() -> None:
    assert choose_target(at(0.0), NODES, ["prefill"]) == "p0"
    assert choose_target(at(0.0), [NodeState("p0", "prefill", False)], ["prefill"]) == ""


def test_a_fault_hits_nodes_of_its_roles_only() -> None:
    assert choose_target(at(0.0, PAUSE), [*NODES, NodeState("p1", "prefill", True)]) == "d0"
    assert choose_target(at(0.0, HOSTILE), NODES) == ""
