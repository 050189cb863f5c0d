"""Bounds that policies guarantee, checked on whole services in virtual time under random loads.

- ``fair``: backlogged tenants get equal service within the bound of the VTC paper.
- ``edf``: feasible deadlines are met.
"""

from collections import Counter
from itertools import takewhile
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.cluster.fake_engine import FakeExecutor
from support.examples import examples
from support.simulation.simulated_service import NodeLimits, SimulatedService

from common.node.loading.memory_plan import Capacity
from common.scheduling.policies.fair import INPUT_WEIGHT, OUTPUT_WEIGHT
from common.step_plan import StepPlan, StepResult
from scripts.simulator.costs import Costs

PAGE, CHUNK = 4, 32
STEP_S, TOKEN_S, MESSAGE_S = 0.01, 0.001, 0.001
COSTS = Costs(STEP_S, TOKEN_S, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)


def unlike(number: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no prefix with others."""
    return (1_000 + number, *range(1, length))


# ---- fair -----------------------------------------------------------------------------------------------------------


class Metered(FakeExecutor):
    """Records the service of each tenant: a prompt counts when it starts, a token when it is generated."""

    def __init__(self, capacity: Capacity, tenants: list[str]) -> None:
        super().__init__(capacity.num_pages, PAGE, capacity.num_slots)
        self._tenants = tenants
        self._slots: dict[int, str] = {}
        self._begun: dict[int, None] = {}
        self.num_begun: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.history: list[tuple[Counter[str], Counter[str]]] = []  # (served, begun) before every step

    def run(self, plan: StepPlan) -> StepResult:
        self.history.append((self.served.copy(), self.num_begun.copy()))
        for admit in plan.admits:
            tenant = self._slots[admit.slot] = self._tenants[admit.sampling.seed]
            if admit.sampling.seed not in self._begun:
                self._begun[admit.sampling.seed] = None
                self.num_begun[tenant] += 1
                self.served[tenant] += int(INPUT_WEIGHT * admit.prompt_len)
        for row in plan.rows:
            self.served[self._slots[row.slot]] += int(OUTPUT_WEIGHT * row.sample)
        return super().run(plan)


NUM_EACH = 60
#: Tokens of the prompt and of the output of a tenant's requests, in rotation.
KINDS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    heavy=KINDS,
    light=KINDS,
    max_running=st.integers(1, 4),
    weight=st.sampled_from([1, 1, 3]),
    lookahead=st.sampled_from([0, 1, 1_000]),
    late_s=st.sampled_from([0.0, 0.3, 1.0]),
)
@example(heavy=[(1, 2)], light=[(1, 2)], max_running=1, weight=1, lookahead=1, late_s=0.0)
def test_backlogged_tenants_get_equal_service_within_the_vtc_bound(
    heavy: list[tuple[int, int]],
    light: list[tuple[int, int]],
    max_running: int,
    weight: int,
    lookahead: int,
    late_s: float,
) -> None:
    """Check the bound of Sheng et al. (OSDI'24, theorem 4.4).

    While two tenants both have waiting requests, their service differs by at most 2 * max(w_p * L_input, w_q * M),
    where L_input is the longest prompt and M the tokens that fit into a batch.

    Service is divided by the tenant's weight. A tenant that arrives later starts at the counter of the other. Requests
    that the gateway dispatches ahead count as part of the batch, unless it dispatches all: then the node chooses.
    """
    tenants = ["heavy"] * NUM_EACH + ["light"] * NUM_EACH
    requests = [kinds[number % len(kinds)] for kinds in (heavy, light) for number in range(NUM_EACH)]
    meters: list[Metered] = []
    has_come: list[int] = []  # number of steps before both had arrived

    def engine(capacity: Capacity) -> Metered:
        meters.append(Metered(capacity, tenants))
        return meters[-1]

    service = SimulatedService(
        0,
        1,
        limits=NodeLimits(decode_pages=200, page_size=PAGE, chunk_tokens=16, max_running=max_running),
        costs=COSTS,
        engine=engine,
        local_prefill="always",
        schedule_policy="fair",
        tenant_shares=(f"heavy:{weight}", "light:1"),
        tenant_header=True,
        max_dispatch_ahead=lookahead,
    )
    for number, (length, max_new) in enumerate(requests):
        tenant = tenants[number]
        at = late_s if tenant == "light" else 0.0
        service.submit(f"r{number}", unlike(number, length), max_new, at=at, tenant=tenant, seed=number)
    service.events.at(late_s, lambda: has_come.append(len(meters[0].history)))
    service.run(is_checked=False)
    longest = max(length for length, _ in requests)
    num_promised = max_running + (lookahead if lookahead < NUM_EACH else 0)
    in_batch = sum(sorted((length + max_new for length, max_new in requests), reverse=True)[:num_promised])
    bound = 2 * max(INPUT_WEIGHT * longest, OUTPUT_WEIGHT * min(in_batch, 200 * PAGE))
    both_wait = takewhile(lambda one: NUM_EACH not in one[1].values(), meters[0].history[has_come[0] + 1 :])
    ahead = [served["heavy"] / weight - served["light"] for served, _ in both_wait]
    assert max(ahead, default=0) - min(ahead, default=0) <= bound


def test_a_tenant_with_ten_times_the_load_gets_no_more_service() -> None:
    """Forty prompts of one tenant arrive before ten of another; without ``fair`` all of them would be served first."""
    tenants = ["heavy"] * 40 + ["light"] * 10
    meters: list[Metered] = []

    def engine(capacity: Capacity) -> Metered:
        meters.append(Metered(capacity, tenants))
        return meters[-1]

    service = SimulatedService(
        0,
        1,
        limits=NodeLimits(decode_pages=200, page_size=PAGE, chunk_tokens=16, max_running=2),
        costs=COSTS,
        engine=engine,
        local_prefill="always",
        schedule_policy="fair",
    )
    for number, tenant in enumerate(tenants):
        service.submit(f"r{number}", unlike(number, 16), 8, tenant=tenant, seed=number)
    service.run(is_checked=False)
    begun = [begun for _, begun in meters[0].history if begun["light"] < 10]
    # Two are sent before the other tenant's requests arrive; then they alternate.
    assert max(abs(each["heavy"] - each["light"]) for each in begun) <= 4


# ---- edf ------------------------------------------------------------------------------------------------------------

CHUNK_S = STEP_S + TOKEN_S * PAGE


def some_schedule(jobs: list[tuple[float, int]], seed: int) -> list[float]:
    """Instants at which the jobs (release, chunks) end in a random schedule with preemption between chunks."""
    ranks = Random(seed).sample(range(len(jobs)), len(jobs))
    left = [chunks for _, chunks in jobs]
    ends = [0.0] * len(jobs)
    now = 0.0
    while any(left):
        ready = [i for i, (released, _) in enumerate(jobs) if left[i] and released <= now]
        if not ready:
            now = min(released for i, (released, _) in enumerate(jobs) if left[i])
            continue
        chosen = min(ready, key=lambda i: ranks[i])
        now += CHUNK_S
        left[chosen] -= 1
        ends[chosen] = now
    return ends


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    jobs=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 8)), min_size=1, max_size=20),
    seed=st.integers(0, 1_000_000),
)
def test_edf_meets_every_feasible_set_of_deadlines(jobs: list[tuple[float, int]], seed: int) -> None:
    """With one node, one prompt per step and known times, ``edf`` meets all deadlines that some schedule meets.

    The deadlines are the ends of a random schedule. Earliest deadline first is optimal for work that can be preempted
    at any time (Horn, 1974). Chunks cannot, so each deadline allows for one more chunk, which runs when a prompt
    arrives, and for two messages.
    """
    ends = some_schedule(jobs, seed)
    service = SimulatedService(
        limits=NodeLimits(4_000, 4_000, page_size=PAGE, chunk_tokens=PAGE, max_running=100),
        costs=COSTS,
        schedule_policy="edf",
        max_prefill_tokens=1,
        max_dispatch_ahead=1_000,
    )
    for number, ((released, chunks), end) in enumerate(zip(jobs, ends, strict=True)):
        timeout_s = end - released + CHUNK_S + 2 * MESSAGE_S + 1e-6
        service.submit(f"r{number}", unlike(number, chunks * PAGE), 1, at=released, timeout_s=timeout_s)
    service.run(is_checked=False)
    late = [rid for rid, answer in service.ended.items() if answer.error is not None]
    assert not late, f"{late} missed deadlines that could be met"
