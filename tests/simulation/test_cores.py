"""Cores that nodes share: who is done when, worked out by hand."""

from collections import Counter
from collections.abc import Collection
from functools import partial

import pytest

from common.config.cli import parse
from common.config.shared import Role
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.costs import Costs
from scripts.simulator.event_queue import EventQueue
from scripts.simulator.service.cores import MAX_WAKE_S, Cores
from scripts.simulator.service.engine import EmptyPageStore, simulated_layout
from scripts.simulator.service.network import Network, NetworkWriter
from scripts.simulator.simulation import Simulation

SAME: dict[Role, float] = {"prefill": 1.0, "decode": 1.0}


def ends_of(
    count: int,
    steps: dict[str, tuple[float, float]],
    *,
    slower_beside: dict[Role, float] = SAME,
    prefill: Collection[str] = (),
) -> dict[str, float]:
    """When each step ends, of (begin, seconds alone). Each has a thread of its own.

    Args:
        slower_beside: factor of the seconds, by the role of the other node.
        prefill: steps of prefill nodes; the others are of decode nodes.
    """
    events = EventQueue()
    cores = Cores(events, count)
    ends: dict[str, float] = {}
    for name, (begin_s, seconds) in steps.items():
        end = partial(lambda name: ends.setdefault(name, events.now()), name)
        beside_s = {role: factor * seconds for role, factor in slower_beside.items()}
        events.at(begin_s, cores.run, name, "prefill" if name in prefill else "decode", seconds, beside_s, end)
    while len(ends) < len(steps):
        events.step()
    return ends


def test_steps_on_cores_of_their_own_do_not_delay_each_other() -> None:
    assert ends_of(4, {"a": (0.0, 1.0), "b": (0.5, 1.0)}) == pytest.approx({"a": 1.0, "b": 1.5})


def test_steps_beside_others_take_longer_even_on_a_core_of_their_own() -> None:
    found = ends_of(2, {"a": (0.0, 1.0), "b": (0.0, 2.0)}, slower_beside={"prefill": 1.0, "decode": 1.5})
    assert found == pytest.approx({"a": 1.5, "b": 2.5})  # b does two thirds of a second's work in the first 1.5 s


def test_the_role_of_the_other_node_says_how_much_longer() -> None:
    slower: dict[Role, float] = {"prefill": 2.0, "decode": 4.0}
    found = ends_of(2, {"a": (0.0, 1.0), "b": (0.0, 1.0)}, slower_beside=slower, prefill="a")
    # In 2 s beside a prefill node b is done; a has then done half of its work beside a decode node.
    assert found == pytest.approx({"a": 2.5, "b": 2.0})


def test_steps_of_both_roles_slow_another_one_by_their_mean() -> None:
    slower: dict[Role, float] = {"prefill": 2.0, "decode": 4.0}
    found = ends_of(3, {"a": (0.0, 1.0), "b": (0.0, 0.1), "c": (0.0, 1.0)}, slower_beside=slower, prefill="a")
    assert found["b"] == pytest.approx(0.3)


def test_a_step_that_comes_later_takes_half_of_the_core() -> None:
    found = ends_of(1, {"long": (0.0, 2.0), "short": (1.0, 0.5)})
    assert found == pytest.approx({"long": 2.5, "short": 2.0})


def test_of_three_threads_two_share_a_core_until_another_one_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.simulator.service.cores.STAY_S", (9.0, 9.0))
    found = ends_of(2, {"a": (0.0, 1.0), "b": (0.0, 1.0), "c": (0.0, 2.0)})
    assert found == pytest.approx({"a": 1.5, "b": 1.0, "c": 2.5})


def test_three_threads_take_turns_at_having_a_core_alone() -> None:
    found = ends_of(2, dict.fromkeys("abc", (0.0, 60.0)))
    assert all(85.0 < end < 95.0 for end in found.values()), "90 s each, if shares were equal"


def test_a_thread_goes_on_with_its_next_step_on_the_same_core() -> None:
    events = EventQueue()
    cores, ends = Cores(events, 2), Counter[str]()

    def run(thread: str) -> None:
        cores.run(thread, "decode", 0.001, {"decode": 0.001}, partial(end, thread))

    def end(thread: str) -> None:
        ends[thread] += 1
        run(thread)

    for thread in "abc":
        run(thread)
    while events.now() < 0.05:
        events.step()
    assert ends == pytest.approx({"a": 25, "b": 50, "c": 25}, abs=1), "a and c share a core"


def test_a_step_without_work_ends_at_once() -> None:
    assert ends_of(1, {"none": (1.0, 0.0), "long": (0.0, 3.0)}) == pytest.approx({"none": 1.0, "long": 3.0})


def test_a_waking_thread_waits_while_all_cores_compute() -> None:
    events = EventQueue()
    cores = Cores(events, 2)
    assert cores.wait_s() == 0.0
    ended: list[str] = []
    cores.run("a", "decode", 1.0, SAME, lambda: ended.append("a"))
    assert cores.wait_s() == 0.0
    cores.run("b", "decode", 2.0, SAME, lambda: ended.append("b"))
    waits = [cores.wait_s() for _ in range(100)]
    assert 0.0 <= min(waits) < max(waits) <= MAX_WAKE_S
    while not ended:
        events.step()
    assert cores.wait_s() == 0.0


def simulated(*words: str) -> Simulation:
    load = ["--rate=4", "--num-requests=30", "--input-len=400", "--output-len=20", "--prompt-token-cost=300us"]
    config = parse(SimulateConfig, [*load, *words], command="simulate")
    simulation = Simulation(config, make_plan(config))
    simulation.run()
    return simulation


def stamps_of(simulation: Simulation) -> list[list[float]]:
    return [one.stamps_s for one in simulation.client.outcomes]


def test_nodes_with_a_core_each_do_what_nodes_with_devices_do() -> None:
    alone, shared = simulated("--decode=2"), simulated("--decode=2", "--cores=3")
    for one, other in zip(stamps_of(alone), stamps_of(shared), strict=True):
        assert one == pytest.approx(other)


def test_nodes_without_cores_of_their_own_answer_every_request() -> None:
    shared = simulated("--prefill=2", "--decode=2", "--cores=2")
    assert all(one.is_ok and one.num_output == 20 for one in shared.client.outcomes)


def test_another_thread_delays_the_steps_of_a_core_unless_one_is_idle() -> None:
    events, ends = EventQueue(), list[float]()
    cores = Cores(events, 2)
    cores.run("a", "decode", 1.0, SAME, lambda: ends.append(events.now()))
    cores.take(9.0)
    cores.run("b", "decode", 1.0, SAME, lambda: ends.append(events.now()))
    cores.take(0.5)
    while len(ends) < 2:
        events.step()
    assert ends == pytest.approx([1.0, 1.5])


def test_a_write_waits_for_the_threads_that_copy_and_report_it() -> None:
    events, costs = EventQueue(), Costs(wire_s=0.5, wire_bytes_per_s=100.0)
    network = Network(events, costs, lambda sender, receiver, what, arguments: what(*arguments), wait_s=lambda: 2.0)
    writer = NetworkWriter(network, EmptyPageStore(simulated_layout(256, 1), 4), "writer", wake=lambda: None)
    landed: list[float] = []
    network.carry(writer, "reader", 1, 4, lambda: landed.append(events.now()))
    events.step()
    assert landed == pytest.approx([2.0 + 2.0 + 4 * writer.page_bytes / 100.0 + 0.5])


def test_nodes_that_share_a_core_answer_later() -> None:
    alone, shared = simulated(), simulated("--cores=1")
    ends = [[stamps[-1] for stamps in stamps_of(one)] for one in (alone, shared)]
    assert all(early <= late + 1e-9 for early, late in zip(*ends, strict=True))
    assert sum(ends[1]) > sum(ends[0]) + 0.1
    # The steps took as much processor time.
    busy = [sum(node.busy_s for node in one.cluster.nodes.values()) for one in (alone, shared)]
    assert busy[0] == pytest.approx(busy[1], rel=0.2)
