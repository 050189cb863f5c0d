"""Goodput of a whole service under overload, in virtual time: schedulers, transfers, router and admission are real."""

import random
from dataclasses import replace
from itertools import count

import pytest
from support.simulation.simulated_service import NodeLimits, SimulatedService, prompt_of

from common.errors import RequestError
from scripts.simulator.costs import Costs

#: Eight rows, each of which makes a token in about 30 ms: a request of 8 tokens takes a quarter of a second.
COSTS = Costs(0.03, 2e-5, 1e-4, 0.0, 1e-4, 1e-4, 1e9)
LIMITS = NodeLimits(prefill_pages=512, decode_pages=512, page_size=16, chunk_tokens=256, max_running=8)
DEADLINE_S = 1.5


class Clients:
    """Clients in virtual time. A request counts if it has ended before its deadline.

    Args:
        slowness: how much longer steps, and so requests, take; deadlines are as much later.
        policy: that of nodes and gateway.
    """

    def __init__(self, *, slowness: float = 1.0, policy: str = "fcfs") -> None:
        costs = replace(COSTS, step_s=COSTS.step_s * slowness)
        self.service = SimulatedService(
            limits=LIMITS, costs=costs, max_queued_requests=64, max_dispatch_ahead=4, schedule_policy=policy
        )
        self._deadline_s = DEADLINE_S * slowness
        self.events = self.service.events
        self.gateway = self.service.cluster.gateway
        self._random = random.Random(1)
        self._numbers = count()

    @property
    def ended_at(self) -> list[float]:
        """The instants of good ends."""
        return [answer.ended_at for answer in self.service.ended.values() if answer.error is None]

    def goodput(self, begin: float, end: float) -> float:
        return sum(begin <= at < end for at in self.ended_at) / (end - begin)

    def arrivals(self, rate: float, begin: float, end: float) -> None:
        """Requests at random instants, of clients that do not come back if they are refused."""
        at = begin
        while (at := at + self._random.expovariate(rate)) < end:
            self._submit(at)

    def crowd(self, size: int, at: float) -> list["Client"]:
        """Clients that come at once, ask again and again, and heed Retry-After."""
        return [Client(self, at) for _ in range(size)]

    def _submit(self, at: float) -> str:
        rid = f"r{next(self._numbers)}"
        prompt = prompt_of(self._random.randint(20, 60), self._random.randint(0, 10_000))
        self.service.submit(rid, prompt, 8, at=at, timeout_s=self._deadline_s)
        return rid

    def run(self, until: float) -> None:
        self.events.at(until, lambda: None)
        while self.events.now() < until:
            self.service.step(is_checked=False)


class Client:
    """One client of a crowd."""

    def __init__(self, clients: Clients, at: float) -> None:
        self._clients = clients
        self._rid = ""
        self._is_gone = False
        clients.events.at(at, self._ask)

    def leave(self) -> None:
        self._is_gone = True
        self._clients.gateway.abort(self._rid)

    def _ask(self) -> None:
        clients, service = self._clients, self._clients.service
        now = clients.events.now()
        if self._is_gone:
            return
        if self._rid in service.ended or not self._rid:
            self._rid = clients._submit(now)
            clients.events.at(now, self._ask)
        elif (error := service.refused.get(self._rid)) is not None:
            assert isinstance(error, RequestError)
            self._rid = ""
            clients.events.after(error.retry_after_s or 0.1, self._ask)
        else:
            clients.events.after(0.02, self._ask)


@pytest.fixture(scope="module")
def capacity() -> float:
    """Requests per second of a queue that is never empty, without deadlines that matter."""
    clients = Clients()
    clients.crowd(12, 0.0)
    clients.run(12.0)
    return clients.goodput(2.0, 12.0)


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize(("factor", "least"), [(1.0, 0.85), (3.0, 0.9), (8.0, 0.9)])
def test_goodput_stays_near_the_capacity_at_every_load(capacity: float, factor: float, least: float) -> None:
    clients = Clients()
    clients.arrivals(factor * capacity, 0.0, 20.0)
    clients.run(20.0)
    assert clients.goodput(5.0, 20.0) >= least * capacity


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("policy", ["edf", "hrrn"])
def test_hopeless_deadlines_are_refused_under_other_policies_too(capacity: float, policy: str) -> None:
    """Without that, 0.18 and 0.84 of the capacity."""
    clients = Clients(policy=policy)
    clients.arrivals(3.0 * capacity, 0.0, 12.0)
    clients.run(12.0)
    assert clients.goodput(4.0, 12.0) >= 0.9 * capacity


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("slowness", [1.0, 5.0])
def test_goodput_recovers_within_five_seconds_of_an_abort_storm(capacity: float, slowness: float) -> None:
    clients = Clients(slowness=slowness)
    storm_at, end = 15.0 * slowness, 15.0 * slowness + 20.0
    first = clients.crowd(300, 0.0)
    clients.run(storm_at)
    before = clients.goodput(5.0 * slowness, storm_at)
    for client in first:
        client.leave()
    clients.crowd(300, storm_at)
    clients.run(end)
    after = clients.goodput(storm_at + 5.0, end)
    assert before >= 0.9 * capacity / slowness
    assert after >= 0.9 * capacity / slowness
