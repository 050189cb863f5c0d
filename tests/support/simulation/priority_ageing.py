"""Request series below capacity, and the bound on waiting times under priority aging; for tests in virtual time.

docs/scheduling.md derives the formula. Requests that arrive D = (highest priority - p + 1) / rate after a request of
priority p neither overtake it nor take its resources. Earlier arrivals may run first. Below capacity their work is
bounded by B, the longest backlog of a server of that capacity under these arrivals (Lindley's recursion), and by the
time until a slot becomes free. So a request is served after at most D + B + that time, plus its own work.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from support.examples import examples
from support.simulation.simulated_service import NodeLimits, SimulatedService

from scripts.simulator.costs import Costs

PAGE = 4
MAX_DECISIONS = 100_000
STEP_S, MESSAGE_S = 0.01, 0.001
HIGHEST = 10
RATES = st.sampled_from([1.0, 5.0, 20.0, 1_000.0])
LOADS = st.sampled_from([0.6, 0.9, 0.98])
BURSTS_S = st.sampled_from([0.0, 0.5, 2.0])
PRIORITIES = st.sampled_from([0, 3, 10, 10])
#: Prompts of one group share a prefix; None for no group.
GROUPS = st.sampled_from([None, None, 0, 0, 1])
#: Without shrinking, which would take minutes.
SETTINGS = settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
#: Longest time until a prompt is computed and transferred: two steps and five messages.
READY_S = 2 * STEP_S + 5 * MESSAGE_S


@dataclass(frozen=True)
class SentRequest:
    """A request of a series.

    Attributes:
        at: arrival in seconds.
        group: requests of one group share their first ``num_shared`` tokens.
    """

    at: float
    length: int
    max_new: int
    priority: int
    group: int | None = None
    num_shared: int = 0

    def prompt(self, number: int) -> tuple[int, ...]:
        num_shared = 0 if self.group is None else min(self.num_shared, self.length - 1)
        shared = [10_000 * (1 + (self.group or 0)) + index for index in range(num_shared)]
        return (*shared, 1_000 + number, *range(1, self.length - num_shared))


def arrival_times(works_s: Sequence[float], load: float, head: int, burst_s: float) -> list[float]:
    """Return arrivals at ``load`` times the capacity: ``head`` at once, then bursts every ``burst_s`` seconds."""
    instants, at = [], 0.0
    for number, work_s in enumerate(works_s):
        instants.append(at if not burst_s else at // burst_s * burst_s)
        at += work_s / load if number >= head else 0.0
    return instants


def longest_backlog_s(arrivals: Sequence[tuple[float, float]]) -> float:
    """Return the longest backlog of a work-conserving server; each arrival is an instant and its work."""
    backlog = most = last = 0.0
    for at, work_s in arrivals:
        backlog = max(0.0, backlog - (at - last)) + work_s
        most, last = max(most, backlog), at
    return most


def overtaking_window_s(priority: int, rate: float) -> float:
    """Return D, by how many seconds a request may arrive later and still overtake."""
    return (HIGHEST - priority + 1) / rate


def run_requests(
    requests: Sequence[SentRequest], limits: NodeLimits, costs: Costs, **options: object
) -> SimulatedService:
    """Run all requests through one prefill and one decode node."""
    service = SimulatedService(
        limits=limits, costs=costs, enable_priority_scheduling=True, default_priority_value=0, **options
    )
    for number, sent in enumerate(requests):
        service.submit(
            f"r{number}", sent.prompt(number), sent.max_new, at=sent.at, priority=sent.priority, timeout_s=1e6
        )
    for node in service.cluster.nodes.values():
        node.role._scheduler.decisions._ring = deque(maxlen=MAX_DECISIONS)  # keep all decisions
    service.run(is_checked=False, max_events=1_000_000)
    assert not service.refused
    return service


def count_preemptions(service: SimulatedService, rate: float) -> Counter[str]:
    """Count how often each request lost pages or its slot, and assert that the other request arrived within D."""
    lost: Counter[str] = Counter()
    for node in service.cluster.nodes.values():
        decisions = node.role._scheduler.decisions
        assert len(decisions._ring) < MAX_DECISIONS, "the ring dropped some decisions"
        for decided in decisions.last(MAX_DECISIONS, service.events.now()):
            if "goes to the more urgent" in decided.reason or "go to the more urgent" in decided.reason:
                loser, winner = service.ended[decided.rid], service.ended[decided.reason.rsplit(" ", 1)[1]]
                difference = winner.request.priority - loser.request.priority
                assert winner.started_at - loser.started_at <= difference / rate
                lost[decided.rid] += 1
    return lost


def stream(each_s: float, seconds: float) -> list[float]:
    """Return arrivals: two seconds of work at once, then 95 % of the capacity."""
    return [0.0] * round(2.0 / each_s) + [number * each_s / 0.95 for number in range(1, round(seconds / each_s * 0.95))]


def end_of_lowest_priority(service: SimulatedService, requests: Sequence[SentRequest]) -> float:
    """Return the instant at which the request with priority 0 ended."""
    return service.ended[f"r{[sent.priority for sent in requests].index(0)}"].ended_at
