"""The live advice in virtual time: followed, it holds the objectives, and it agrees with the planner."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from common.config.cli import parse
from common.config.shared import ROLES, Role
from gateway.advice.advisor import Advice
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.planning.command import make_service_plan
from scripts.simulator.planning.planner import Planner
from scripts.simulator.report import Figures
from scripts.simulator.simulation import Simulation

COSTS = ("--step-cost=5ms", "--prompt-token-cost=0.2ms", "--row-cost=1ms", "--context-token-cost=0")
OBJECTIVES = ("--slo-ttft=500ms", "--slo-itl=60ms")
#: How often the advice is followed, and how long a node takes to start.
FOLLOW_EVERY_S, START_S = 15, 20.0


def write_trace(path: Path, rates: Sequence[tuple[float, float]], *, num_input: int, num_output: int) -> Path:
    """A trace of random arrivals at rates that change linearly from instant to instant; lengths vary by half."""
    random = np.random.default_rng(0)
    instants, values = zip(*rates, strict=True)
    rows, at = [], 0.0
    while at < instants[-1]:
        at += random.exponential(1 / np.interp(at, instants, values))
        lengths = [int(random.integers(mean // 2, mean * 3 // 2)) for mean in (num_input, num_output)]
        rows.append({"at": at, "input_length": lengths[0], "output_length": lengths[1]})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class AdvisedService:
    """A simulated service whose gateway advises once a second.

    Args:
        is_followed: nodes are started and drained as advised.

    Attributes:
        history: instant and advice of each second.
    """

    def __init__(self, *words: str, is_followed: bool) -> None:
        config = parse(SimulateConfig, words, command="simulate")
        self._simulation = Simulation(config, make_plan(config))
        self._is_followed = is_followed
        self._num_starting: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self.history: list[tuple[float, Advice]] = []

    def run(self) -> Figures:
        self._simulation.cluster.events.background_after(1.0, self._tick)
        return self._simulation.run()

    def counts(self, role: Role) -> list[int]:
        """The number of nodes of a role, second by second."""
        place = ROLES.index(role)
        return [advice.roles[place].num_nodes for _, advice in self.history]

    def _tick(self) -> None:
        cluster = self._simulation.cluster
        pool, now = cluster.gateway.pool, cluster.events.now()
        for incarnation in list(pool.registry.workers):
            pool.registry.on_heartbeat(incarnation, cluster.nodes[incarnation].heartbeat(), now)
        pool.advisor.tick(
            list(pool.registry.workers.values()),
            num_in_flight=pool.admission.num_in_flight,
            num_waiting=len(pool.queue),
            now=now,
        )
        self.history.append((now, pool.advisor.advice))
        if self._is_followed and len(self.history) % FOLLOW_EVERY_S == 0:
            self._follow(pool.advisor.advice)
        cluster.events.background_after(1.0, self._tick)

    def _follow(self, advice: Advice) -> None:
        cluster = self._simulation.cluster
        for role in advice.roles:
            missing = role.advised - role.num_nodes - self._num_starting[role.role]
            for _ in range(missing):
                self._num_starting[role.role] += 1
                cluster.events.after(START_S, self._start, role.role)
            nodes = [worker for worker in cluster.gateway.pool.registry.workers.values() if not worker.is_draining]
            for worker in [one for one in nodes if one.register.role == role.role][: max(-missing, 0)]:
                cluster.drain(cluster.nodes[worker.incarnation], lambda: None)

    def _start(self, role: Role) -> None:
        self._num_starting[role] -= 1
        self._simulation.cluster.start(role)


@pytest.mark.slow
def test_followed_advice_holds_the_objectives_of_a_load_that_grows_and_falls(tmp_path: Path) -> None:
    """One node of each role is enough at first and at the end, and not in between."""
    rates = [(0, 1), (60, 1), (300, 8), (360, 8), (480, 1), (900, 1)]
    trace = write_trace(tmp_path / "trace.jsonl", rates, num_input=700, num_output=60)
    words = ("--prefill=1", "--decode=1", f"--trace={trace}", *COSTS, *OBJECTIVES)
    followed = AdvisedService(*words, is_followed=True)
    found = followed.run()
    assert found["requests"]["answered"] == found["requests"]["sent"]
    assert found["service"]["share"] >= 0.9
    alone = AdvisedService(*words, is_followed=False).run()
    assert alone["service"]["share"] < 0.6
    for role in ROLES:
        counts = followed.counts(role)
        assert counts[0] == counts[-1] == 1
        assert max(counts) <= 3
    assert max(followed.counts("prefill")) >= 2  # 8 requests/s x 700 tokens x 0.2 ms are 1.1 nodes' work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "num_input", "num_output", "limits"),
    [
        (6.0, 700, 60, ()),
        (3.0, 1_200, 20, ()),
        (5.0, 100, 300, ()),
        (5.0, 400, 200, ("--max-total-tokens=6000",)),
        (16.0, 100, 60, ("--max-running-requests=16",)),
    ],
    ids=["both", "prompts", "outputs", "pages", "slots"],
)
def test_advice_for_a_steady_load_differs_from_the_plan_by_at_most_a_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    num_input: int,
    num_output: int,
    limits: Sequence[str],
) -> None:
    # What the planner says of other nodes, settings and loads.
    for part in ("_colocated_starts", "_variants", "_rows", "_capacities"):
        monkeypatch.setattr(Planner, part, lambda *_: ())
    trace = write_trace(tmp_path / "trace.jsonl", [(0, rate), (240, rate)], num_input=num_input, num_output=num_output)
    words = (f"--trace={trace}", *COSTS, *OBJECTIVES, *limits, "--chunked-prefill-size=2048", "--local-prefill=never")
    planning = ("--plan", "--plan-processes=1", "--plan-windows=3", "--plan-requests=300")
    plan, _ = make_service_plan(parse(SimulateConfig, [*words, *planning], command="simulate"))
    assert plan.best is not None
    planned = [plan.best.deployment.num_prefill, plan.best.deployment.num_decode]
    service = AdvisedService(*words, f"--prefill={planned[0]}", f"--decode={planned[1]}", is_followed=False)
    service.run()
    during = [advice for at, advice in service.history if 100 <= at < 230]
    for place, count in enumerate(planned):
        needs = sorted(advice.roles[place].needed for advice in during)
        assert abs(needs[len(needs) // 2] - count) <= 1, (planned, during[-1].roles)
