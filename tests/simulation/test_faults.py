"""Faults in virtual time: nodes that hang, are cut off or slow, drain, change roles; clocks that jump; 100 at once."""

import itertools

import pytest
from support.simulation.simulated_service import SimulatedService, prompt_of

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.faults import FAULT_NAMES
from scripts.simulator.service.node import Node
from scripts.simulator.simulation import Simulation

TIMEOUT_S = 5.0
WORDS = ["--rate=50", "--input-len=lognormal:120:0.8:max=600", "--output-len=uniform:2:60"]
EVERYTHING = "--faults=" + ",".join(FAULT_NAMES)


def assert_all_are_exact(service: SimulatedService, count: int) -> None:
    assert len(service.ended) == count
    for rid, answer in service.ended.items():
        assert answer.error is None, answer.error
        service.assert_exact_tokens(rid)
    service.assert_all_is_released()


def test_a_node_that_hangs_goes_on_where_it_stopped() -> None:
    service = SimulatedService()
    service.submit("a", prompt_of(8), 30)
    node = service.cluster.of("decode")[0]
    service.events.at(0.1, lambda: service.cluster.hang(node, 3.0, node_timeout_s=TIMEOUT_S))
    service.run()
    stamps = service.ended["a"].stamps_s
    longest = max(after - before for before, after in itertools.pairwise(stamps))
    assert longest == pytest.approx(3.0, abs=0.05)
    assert service.cluster.gateway.dispatcher.recoveries.total() == 0
    assert_all_are_exact(service, 1)


def test_a_node_that_hangs_while_its_pages_are_on_their_way_notices_their_arrival_when_it_wakes() -> None:
    service = SimulatedService()
    service.submit("a", prompt_of(8), 5)
    node, network = service.cluster.of("prefill")[0], service.cluster.network
    while not network.num_in_flight:
        service.step()
    service.cluster.hang(node, 1.0, node_timeout_s=TIMEOUT_S)
    service.events.at(20.0, lambda: None)  # nothing else happens before
    service.run()
    assert service.ended["a"].last_at < 2.0
    assert_all_are_exact(service, 1)


def busy_service(role: str) -> tuple[SimulatedService, Node]:
    """A service with six requests, and one of its nodes."""
    service = SimulatedService(2, 2)
    for number in range(6):
        service.submit(f"r{number}", prompt_of(30, number), 20, at=0.01 * number)
    return service, service.cluster.of(role)[0]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_of_a_node_that_hangs_for_long_continue_elsewhere(role: str) -> None:
    service, node = busy_service(role)
    service.events.at(0.06, lambda: service.cluster.hang(node, 9.0, node_timeout_s=TIMEOUT_S))
    service.submit("later", prompt_of(10, 9), 5, at=20.0)
    service.run()
    assert service.cluster.gateway.dispatcher.recoveries.total() > 0
    assert node.incarnation in service.cluster.gateway.pool.registry.workers, "it has registered again"
    assert_all_are_exact(service, 7)


@pytest.mark.parametrize("seconds", [1.0, 12.0])
def test_two_nodes_that_are_cut_off_for_a_while_work_together_again(seconds: float) -> None:
    service = SimulatedService()
    for number in range(4):
        service.submit(f"r{number}", prompt_of(40, number), 8, at=0.01 * number)
    [prefill], [decode] = service.cluster.of("prefill"), service.cluster.of("decode")
    service.events.at(0.05, lambda: service.cluster.cut(prefill, decode, seconds, node_timeout_s=TIMEOUT_S))
    service.submit("later", prompt_of(10, 9), 5, at=40.0)
    service.run()
    assert_all_are_exact(service, 5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("seconds", [1.0, 9.0])
def test_requests_of_a_node_that_is_cut_off_from_all_others_wait_or_continue_elsewhere(
    role: str, seconds: float
) -> None:
    service, node = busy_service(role)
    service.events.at(0.06, lambda: service.cluster.cut_off(node, seconds, node_timeout_s=TIMEOUT_S))
    service.submit("later", prompt_of(10, 9), 5, at=20.0)
    service.run()
    assert (service.cluster.gateway.dispatcher.recoveries.total() > 0) == (seconds > TIMEOUT_S)
    assert node.incarnation in service.cluster.gateway.pool.registry.workers
    assert_all_are_exact(service, 7)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_requests_of_a_node_that_drains_end_without_a_recovery(role: str) -> None:
    service, node = busy_service(role)
    gone: list[float] = []
    service.events.at(0.2, lambda: service.cluster.drain(node, lambda: gone.append(service.events.now())))
    service.run()
    assert len(gone) == 1
    assert not node.is_alive
    assert service.cluster.gateway.dispatcher.recoveries.total() == 0
    assert_all_are_exact(service, 6)


def test_a_clock_that_jumps_changes_no_token() -> None:
    service = SimulatedService(2, 2)
    for number in range(12):
        service.submit(f"r{number}", prompt_of(30, number), 20, at=0.02 * number)
    for number, node in enumerate(service.cluster.nodes.values()):
        service.events.at(0.05 + 0.05 * number, node.clock.jump, 45.0)
    service.run()
    assert_all_are_exact(service, 12)


def simulation(*words: str) -> Simulation:
    config = parse(SimulateConfig, [*WORDS, *words], command="simulate")
    return Simulation(config, make_plan(config))


@pytest.mark.slow
def test_a_hundred_nodes_lose_nothing_under_all_faults() -> None:
    faults = [EVERYTHING, "--kill-every=0.5", "--fault-every=0.08"]
    simulated = simulation("--prefill=50", "--decode=50", "--num-requests=300", *faults)
    found = simulated.run()
    assert sum(found["faults"]["injected"].values()) > 60
    assert set(found["faults"]["injected"]) == set(FAULT_NAMES)
    assert found["faults"]["wrong_answers"] == 0
    num_gone = found["faults"]["injected"]["vanish"]
    assert found["requests"]["errors"] == {"aborted": num_gone}
    assert found["requests"]["answered"] + num_gone == found["requests"]["sent"] == 300
    assert simulated.cluster.gateway.dispatcher.recoveries.total() > 0
    assert_idle(simulated)


def assert_idle(simulated: Simulation) -> None:
    """Let the last messages arrive, and assert that no node holds anything."""
    cluster = simulated.cluster
    assert simulated._faults is not None
    simulated._faults._schedule = iter(())
    until = cluster.events.now() + 120.0
    cluster.events.at(until, lambda: None)
    while cluster.events.now() < until:
        cluster.events.step()
    cluster.check()
    for node in cluster.nodes.values():
        if node.is_alive:
            load = node.role.load()
            assert (load.num_running, load.num_waiting, load.num_quarantined_pages) == (0, 0, 0), node.incarnation
            assert load.num_free_pages + load.num_cached_pages == node.capacity.num_pages, "a page leaked"
            assert cluster.gateway.pool.router.load(node.incarnation) == 0


def test_the_only_node_of_a_role_is_hit_too() -> None:
    simulated = simulation("--num-requests=100", "--faults=drain,pause", "--fault-every=0.5")
    found = simulated.run()
    assert all(found["faults"]["injected"][name] > 0 for name in ("drain", "pause"))
    assert found["requests"]["answered"] == 100
    assert_idle(simulated)


def test_a_seed_gives_the_same_faults_and_results() -> None:
    words = ["--prefill=3", "--decode=3", "--num-requests=50", "--rate=10", "--kill-every=2", EVERYTHING]
    first, again = simulation(*words).run(), simulation(*words).run()
    for found in (first, again):
        del found["wall_s"], found["row_steps_per_minute"]
    assert first == again


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--faults flood is not a fault; choose from kill"):
        parse(SimulateConfig, ["--faults=flood"], command="simulate")
