"""Ageing bounds every wait for pages of a decode node, retractions and shared prefixes included; in virtual time.

``tests/support/simulation/priority_ageing.py`` and docs/scheduling.md explain the formula.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulation.priority_ageing import (
    BURSTS_S,
    GROUPS,
    HIGHEST,
    LOADS,
    MAX_DECISIONS,
    MESSAGE_S,
    PAGE,
    PRIORITIES,
    RATES,
    READY_S,
    SETTINGS,
    STEP_S,
    SentRequest,
    arrival_times,
    count_preemptions,
    end_of_lowest_priority,
    longest_backlog_s,
    overtaking_window_s,
    run_requests,
    stream,
)
from support.simulation.simulated_service import NodeLimits, SimulatedService

from common.config.scheduling import POLICIES
from common.scheduling.output_reserve import RESERVED_TOKENS
from scripts.simulator.costs import Costs

NUM_PAGES = 24
#: The cost of a step does not depend on its rows, so that only pages are short.
COSTS = Costs(STEP_S, 0.0, 0.0, 0.0, MESSAGE_S, 0.0, 1e12)
#: Pages of prompt and output, output tokens, priority, group, shared tokens.
KINDS = st.tuples(st.integers(2, 10), st.integers(2, 36), PRIORITIES, GROUPS, st.sampled_from([4, 8, 16, 24]))
Kind = tuple[int, int, int, int | None, int]


def held_s(max_new: int, num_retracted: int = 0) -> float:
    """Longest time for which a request holds pages: the transfer of its prompt, its steps, and one to join.

    Each retraction adds the lost token, a step to compute the request again, and one to join.
    """
    return READY_S + (max_new + 1 + 3 * num_retracted) * STEP_S


def num_pages(sent: SentRequest) -> int:
    return (sent.length + sent.max_new) // PAGE


def pages_bound_s(
    number: int, rate: float, requests: Sequence[SentRequest], skip_ahead: int, retracted: Counter[str]
) -> float:
    """The latest end of an output: ``D + B + H (P + k (r + 1) s) / (P - s)`` and its own steps.

    A request of s pages waits only if fewer than s of the pool's P pages are left; so while any request waits, at least
    P - s are in use, for the largest s. A request holds its pages, and at most one more for a partly filled last page,
    for at most H over all its stays: repeated work is load, too. At most P pages are in use when a request first has to
    wait. Each time that this one waits, once more than its r retractions, k smaller ones may pass.
    """
    largest = 1 + max(map(num_pages, requests))
    capacity = NUM_PAGES - largest
    held = [held_s(sent.max_new, retracted[f"r{each}"]) for each, sent in enumerate(requests)]
    shares = [(sent.at, (num_pages(sent) + 1) * each_s / capacity) for sent, each_s in zip(requests, held, strict=True)]
    num_passes = skip_ahead * (retracted[f"r{number}"] + 1)
    waited_s = overtaking_window_s(requests[number].priority, rate) + longest_backlog_s(shares)
    waited_s += max(held) * (NUM_PAGES + num_passes * largest) / capacity
    return waited_s + held[number] + READY_S + 2 * STEP_S + MESSAGE_S


def in_pages(
    requests: Sequence[SentRequest], rate: float, *, threshold: int, skip_ahead: int, num_pages: int = NUM_PAGES,
    reserved: int = RESERVED_TOKENS, lookahead: int = 1_000, policy: str = "fcfs",
) -> SimulatedService:  # fmt: skip
    """Run outputs with enough rows and few pages."""
    return run_requests(
        requests,
        NodeLimits(4_000, num_pages, page_size=PAGE, chunk_tokens=4_000, max_running=num_pages, prefill_running=400),
        COSTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        max_skip_ahead=skip_ahead,
        num_reserved_decode_tokens=reserved,
        max_dispatch_ahead=lookahead,
        schedule_policy=policy,
    )


def retractions(service: SimulatedService) -> Counter[str]:
    """How often each request was retracted."""
    retracted: Counter[str] = Counter()
    num_retractions = 0
    for node in service.cluster.nodes.values():
        decided = node.role._scheduler.decisions.last(MAX_DECISIONS, service.events.now())
        retracted.update(each.rid for each in decided if each.action == "retract")
        num_retractions += node.role.counters()["retractions"]
    assert retracted.total() == num_retractions
    return retracted


@pytest.mark.slow
@SETTINGS
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=8),
    load=LOADS,
    head=st.integers(0, 20),
    burst_s=BURSTS_S,
    rate=RATES,
    skip_ahead=st.sampled_from([0, 2, 8]),
    threshold=st.sampled_from([0, 2, 5, 10]),
    reserved=st.sampled_from([RESERVED_TOKENS, 1]),
    lookahead=st.sampled_from([0, 4, 1_000]),
    policy=st.sampled_from(POLICIES),
)
def test_ageing_bounds_the_end_of_every_output_where_pages_are_short_under_every_policy(
    kinds: list[Kind], load: float, head: int, burst_s: float, rate: float, skip_ahead: int, threshold: int,
    reserved: int, lookahead: int, policy: str,
) -> None:  # fmt: skip
    """Covers runs with and without preemption, and a reserve so small that the batch outgrows the pool."""
    sizes = [kinds[number % len(kinds)] for number in range(60)]
    sizes = [(size, min(max_new, size * PAGE - 1), *rest) for size, max_new, *rest in sizes]
    capacity = NUM_PAGES - 1 - max(size for size, *_ in sizes)
    works_s = [(size + 1) * held_s(max_new) / capacity for size, max_new, *_ in sizes]
    arrivals = arrival_times(works_s, load, head, burst_s)
    requests = [
        SentRequest(at, size * PAGE - max_new, max_new, *rest)
        for at, (size, max_new, *rest) in zip(arrivals, sizes, strict=True)
    ]
    service = in_pages(
        requests, rate, threshold=threshold, skip_ahead=skip_ahead, reserved=reserved, lookahead=lookahead,
        policy=policy,
    )  # fmt: skip
    retracted = retractions(service)
    for number, sent in enumerate(requests):
        ended_s = service.ended[f"r{number}"].ended_at - sent.at
        assert ended_s <= pages_bound_s(number, rate, requests, skip_ahead, retracted) + 1e-9
    assert count_preemptions(service, rate) <= retracted


@pytest.mark.slow
def test_the_least_urgent_output_finally_keeps_its_pages() -> None:
    """Three requests of 0.09 s each fit at a time. The output has pages first, loses them, and then keeps them."""
    each_s = 0.09 / 3
    requests = [SentRequest(0.0, 4, 28, 0), *(SentRequest(at + 0.15, 24, 8, HIGHEST) for at in stream(each_s, 12.0))]
    service = in_pages(requests, 4.0, threshold=2, skip_ahead=0, num_pages=27)
    assert count_preemptions(service, 4.0)["r0"] > 0
    backlog_s = longest_backlog_s([(sent.at, each_s) for sent in requests])
    assert 2.5 < end_of_lowest_priority(service, requests) <= overtaking_window_s(0, 4.0) + backlog_s + 2 * held_s(28)
    service = in_pages(requests, 1e-6, threshold=2, skip_ahead=0, num_pages=27)
    assert end_of_lowest_priority(service, requests) > 11.0  # after nearly all urgent requests
