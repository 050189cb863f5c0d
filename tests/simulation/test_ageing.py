"""Ageing protects a request: once it ranks first it keeps its slot, its row and its pages.

Priorities rise by 2 per second and the threshold is 2, so a request of priority 0 ranks before one of priority 10
that arrived more than 5 s later, and is its equal if that arrived more than 4.5 s later.
"""

import pytest
from support.scheduling.single_nodes import DecodeNode, PrefillNode

from common.config.scheduling import PriorityRules
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import FirstComeFirstServed
from decode_node.request_state import State

AGING = PriorityRules(is_enabled=True, preemption_threshold=2, aging_per_s=2.0)


def request(rid: str, priority: int, arrived_at: float) -> Request:
    return Request(rid, 0, (1, 2), SamplingParams(max_new_tokens=4), priority=priority, arrived_at=arrived_at)


@pytest.mark.parametrize(
    ("difference", "seconds_later", "is_taken"),
    [(2, 0.0, False), (3, 0.0, True), (10, 4.5, True), (10, 5.1, False), (-1, -9.0, False), (3, -9.0, True)],
)
def test_preemption_needs_the_threshold_and_a_higher_effective_priority(
    difference: int, seconds_later: float, is_taken: bool
) -> None:
    order = RequestOrdering(FirstComeFirstServed(), AGING)
    running, waiting = request("running", 0, 100.0), request("waiting", difference, 100.0 + seconds_later)
    assert order.may_preempt(waiting, running, 0.0) == is_taken
    assert not (is_taken and order.may_preempt(running, waiting, 0.0)), "two requests preempt each other in turn"


@pytest.mark.parametrize(("comes_at", "is_taken"), [(4.5, True), (5.1, False)])
def test_an_aged_request_keeps_its_row(comes_at: float, is_taken: bool) -> None:
    node = DecodeNode(slots=1, rules=AGING)
    node.run_in("old", 8, 0, new=20)
    node.now = comes_at
    node.submit("urgent", 8, 10, new=20)
    assert node.run() == (["urgent", "old"] if is_taken else ["old", "urgent"])
    assert node.scheduler.totals()["pauses"] == is_taken


@pytest.mark.parametrize(("comes_at", "is_taken"), [(4.5, True), (5.1, False)])
def test_an_aged_request_keeps_its_pages(comes_at: float, is_taken: bool) -> None:
    node = DecodeNode(num_pages=8, rules=AGING)
    node.run_in("old", 16, 0, new=8)
    node.now = comes_at
    node.submit("urgent", 16, 10, new=8)
    assert node.run() == (["urgent", "old"] if is_taken else ["old", "urgent"])
    assert node.scheduler.totals()["retractions"] == is_taken


@pytest.mark.parametrize(("comes_at", "victim"), [(4.0, "old"), (5.1, "urgent")])
def test_an_aged_request_stays_when_the_batch_outgrows_the_pool(comes_at: float, victim: str) -> None:
    node = DecodeNode(num_pages=8, rules=AGING)
    node.run_in("old", 8, 0, new=40)
    node.now = comes_at
    node.run_in("urgent", 8, 10, new=40)
    while not node.table.retracted:
        node.step()
    assert [key[0] for key in node.table.retracted] == [victim]


def test_the_lowest_effective_priority_is_preempted() -> None:
    node = DecodeNode(slots=2, rules=AGING)
    node.run_in("old", 8, 0, new=40)
    node.now = 8.0
    node.run_in("newer", 8, 3, new=40)
    node.submit("urgent", 8, 30)
    node.grant()
    node.receive("urgent")
    node.step()
    assert (node.state("old"), node.state("newer")) == (State.RUNNING, State.PAUSED)


def test_later_transfers_do_not_delay_the_grant_of_an_aged_request() -> None:
    node = DecodeNode(slots=1, rules=AGING)
    node.run_in("busy", 8, 50, new=30)
    node.now = 20.0
    node.submit("urgent", 8, 10)
    assert node.grant() == ["urgent"]
    node.receive("urgent")  # its prompt has arrived, but there is no free row
    late = request("old", 0, 1.0)  # waited in the gateway until now
    node.scheduler.submit(late, source="prefill")
    assert node.grant() == ["old"]


def preempts_the_old_prompt(node: PrefillNode, comes_at: float, *, old: int, urgent: int) -> bool:
    """Whether an urgent prompt that arrives while an older one is computed preempts it and ends first."""
    node.submit("old", old, 0)
    node.step()
    node.now = comes_at
    node.submit("urgent", urgent, 10)
    is_first = node.run() == ["urgent", "old"]
    assert node.scheduler.totals()["preemptions"] == is_first
    return is_first


@pytest.mark.parametrize(("comes_at", "is_taken"), [(4.5, True), (5.1, False)])
def test_an_aged_prompt_keeps_its_prefill_slot(comes_at: float, is_taken: bool) -> None:
    assert preempts_the_old_prompt(PrefillNode(slots=1, rules=AGING), comes_at, old=64, urgent=32) == is_taken


@pytest.mark.parametrize(("comes_at", "is_taken"), [(4.5, True), (5.1, False)])
def test_an_aged_prompt_keeps_its_pages_on_a_prefill_node(comes_at: float, is_taken: bool) -> None:
    assert preempts_the_old_prompt(PrefillNode(num_pages=8, rules=AGING), comes_at, old=24, urgent=16) == is_taken
