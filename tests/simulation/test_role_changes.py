"""Nodes change their roles in virtual time: no request fails, every token is exact, and nothing leaks."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.simulation.simulated_service import NodeLimits, SimulatedService, prompt_of

from common.config.cli import parse
from common.config.shared import Role
from scripts.simulator.config import SimulateConfig
from scripts.simulator.main import simulate

LIMITS = NodeLimits(prefill_pages=64, decode_pages=64)


def change(service: SimulatedService, role: Role) -> None:
    """Change the role of the newest node of the other role, if it is not the last that takes requests."""
    registry = service.cluster.gateway.pool.registry
    nodes = [worker for worker in registry.workers.values() if worker.register.role != role and not worker.is_draining]
    if len(nodes) > 1:
        service.cluster.change_role(service.cluster.nodes[nodes[-1].incarnation], role)


def assert_all_succeeded(service: SimulatedService) -> None:
    assert not service.refused
    for rid, answer in service.ended.items():
        assert answer.error is None, answer.error
        service.assert_exact_tokens(rid)
    service.assert_all_is_released()


def test_nodes_change_their_roles_and_back_under_load() -> None:
    service = SimulatedService(2, 2, limits=LIMITS)
    for number in range(60):
        service.submit(f"r{number}", prompt_of(5 + number * 7 % 40, number % 5), 1 + number % 9, at=number * 0.03)
    roles: list[Role] = ["prefill", "decode", "decode", "prefill"]
    for number, role in enumerate(roles):
        service.events.at(0.2 + 0.4 * number, change, service, role)
    service.run()
    assert_all_succeeded(service)
    assert [role for _, role in service.cluster.role_changes] == roles
    assert (len(service.cluster.of("prefill")), len(service.cluster.of("decode"))) == (2, 2)


def test_a_node_has_its_cache_and_the_router_knows_it() -> None:
    service = SimulatedService(1, 2, limits=NodeLimits(prefill_pages=64, decode_pages=64))
    prompt = prompt_of(128)
    service.submit("first", prompt, 3)
    service.run()
    decode = next(node for node in service.cluster.of("decode") if node.work["rows"])
    service.cluster.change_role(decode, "prefill")
    service.settle(1.0)
    [first] = [node for node in service.cluster.of("prefill") if node.work["prompt_tokens"]]
    service.cluster.kill(first)
    service.settle(1.0)
    service.submit("again", prompt, 3, at=service.events.now())
    service.run()
    assert_all_succeeded(service)
    assert service.ended["again"].cached_tokens >= 124


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.lists(
        st.tuples(st.floats(0.0, 2.0), st.sampled_from(["prefill", "decode"])), min_size=1, max_size=8
    ),
    requests=st.lists(
        st.tuples(st.floats(0.0, 2.0), st.integers(1, 60), st.integers(0, 4), st.integers(1, 20)),
        min_size=1, max_size=30,
    ),
    num_nodes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)  # fmt: skip
def test_requests_survive_changes_at_any_instant(
    changes: list[tuple[float, Role]], requests: list[tuple[float, int, int, int]], num_nodes: tuple[int, int]
) -> None:
    service = SimulatedService(*num_nodes, limits=LIMITS)
    for number, (at, length, first, max_new) in enumerate(requests):
        service.submit(f"r{number}", prompt_of(length, first), max_new, at=at)
    for at, role in changes:
        service.events.at(at, change, service, role)
    service.run()
    service.settle()
    assert_all_succeeded(service)
    assert sum(len(service.cluster.of(role)) for role in ("prefill", "decode")) == sum(num_nodes)


def test_automatic_roles_follow_a_load_that_needs_more_prefill_nodes(tmp_path: Path) -> None:
    """Two of four nodes compute 5,000 prompt tokens a second, three 7,500; 6,000 come."""
    trace = tmp_path / "trace.jsonl"
    line = '{{"at": {}, "input_length": 2000, "output_length": 4}}'
    trace.write_text("\n".join(line.format(number / 3) for number in range(180)))
    words = ["--prefill=2", "--decode=2", f"--trace={trace}", "--step-cost=1ms", "--prompt-token-cost=0.4ms"]
    fixed, _ = simulate(parse(SimulateConfig, words, command="simulate"))
    found, _ = simulate(parse(SimulateConfig, [*words, "--auto-roles"], command="simulate"))
    assert not fixed["role_changes"]
    assert [change["role"] for change in found["role_changes"]] == ["prefill"]
    assert found["requests"]["answered"] == 180
    assert found["latency_s"]["ttft"]["p99"] < fixed["latency_s"]["ttft"]["p99"] / 2
