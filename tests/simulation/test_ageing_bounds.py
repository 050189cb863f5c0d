"""Ageing bounds every wait for a prefill node and for a row of a decode node; in virtual time.

``tests/support/simulation/priority_ageing.py`` and docs/scheduling.md explain the formula.
"""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulation.priority_ageing import (
    BURSTS_S,
    GROUPS,
    HIGHEST,
    LOADS,
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
from common.scheduling.prefill_adder import LongPromptLimits
from scripts.simulator.costs import Costs

CHUNK, TOKEN_S = 32, 0.001

# ---- prompts: the gateway's queue, and prefill nodes ----------------------------------------------------------------

PROMPTS = Costs(STEP_S, TOKEN_S, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)


def prompt_s(length: int, *, is_sent_late: bool = False) -> float:
    """Longest work of a prompt on a prefill node: its tokens, and the steps that it would fill alone.

    With ``is_sent_late`` the node may be idle until the prompt arrives, which adds two messages.
    """
    return TOKEN_S * length + STEP_S * math.ceil(length / CHUNK) + 2 * MESSAGE_S * is_sent_late


@SETTINGS
@given(
    kinds=st.lists(
        st.tuples(st.integers(1, 100), PRIORITIES, GROUPS, st.sampled_from([8, 64, 90])), min_size=1, max_size=8
    ),
    load=LOADS,
    head=st.integers(0, 40),
    burst_s=BURSTS_S,
    rate=RATES,
    lookahead=st.sampled_from([0, 1, 4, 1_000]),
    num_rows=st.sampled_from([1, 2, 400]),
    threshold=st.sampled_from([0, 10]),
    policy=st.sampled_from(POLICIES),
)
def test_ageing_bounds_the_wait_of_every_prompt_under_every_policy(
    kinds: list[tuple[int, int, int | None, int]], load: float, head: int, burst_s: float, rate: float,
    lookahead: int, num_rows: int, threshold: int, policy: str,
) -> None:  # fmt: skip
    """A first token comes after at most ``D + B``, the running step and its own last step; ``B`` at the rate that the
    prompt's kind has while long prompts share the steps with others.

    With a small lookahead prompts wait in the gateway, with a large one on the prefill node, where with few slots and
    no threshold they preempt each other. A shared prefix is computed for one prompt while the others wait.
    """
    is_sent_late = lookahead < 1_000
    sizes = [kinds[number % len(kinds)] for number in range(100)]
    works_s = [prompt_s(length, is_sent_late=is_sent_late) for length, *_ in sizes]
    arrivals = arrival_times(works_s, load, head, burst_s)
    backlog_s = longest_backlog_s(list(zip(arrivals, works_s, strict=True)))
    requests = [
        SentRequest(at, length, 1, priority, group, num_shared)
        for at, (length, priority, group, num_shared) in zip(arrivals, sizes, strict=True)
    ]
    service = run_requests(
        requests,
        NodeLimits(4_000, 4_000, page_size=PAGE, chunk_tokens=CHUNK, max_running=num_rows),
        PROMPTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        max_dispatch_ahead=lookahead,
        schedule_policy=policy,
    )
    rest_s = 2 * (STEP_S + TOKEN_S * CHUNK) + 4 * MESSAGE_S
    for number, sent in enumerate(requests):
        waited_s = service.ended[f"r{number}"].stamps_s[0] - sent.at
        share = LongPromptLimits().share
        slower = 2 / share if sent.length > CHUNK else 1 / (1 - share)
        assert waited_s <= overtaking_window_s(sent.priority, rate) + slower * backlog_s + rest_s + 1e-9
    count_preemptions(service, rate)


# ---- rows of a decode node ------------------------------------------------------------------------------------------

#: All prompts of a step cost one step, so that only the decode node is a bottleneck.
OUTPUTS = Costs(STEP_S, 0.0, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)


def row_s(max_new: int, num_rows: int, *, is_sent_late: bool = False) -> float:
    """Longest time of a request in a row of a full batch: a step for each token but the first, and one to join.

    With ``is_sent_late`` the row may be free until the request arrives.
    """
    return max_new * (STEP_S + TOKEN_S * num_rows) + (READY_S + 2 * MESSAGE_S) * is_sent_late


def rows_bound_s(
    sent: SentRequest, rate: float, requests: Sequence[SentRequest], num_rows: int, *, is_sent_late: bool = False
) -> float:
    """The latest end of an output: ``D + B + L (m - 1) / m`` and its own steps.

    L is the longest output, for the other rows at the moment when a request first had to wait. The transfer counts
    twice: its own, and that of requests before it or whose prefix it waits for.
    """
    rows_s = [row_s(each.max_new, num_rows, is_sent_late=is_sent_late) for each in requests]
    shares = [(each.at, each_s / num_rows) for each, each_s in zip(requests, rows_s, strict=True)]
    longest_s = max(rows_s) * (num_rows - 1) / num_rows
    step_s = STEP_S + TOKEN_S * num_rows
    waited_s = overtaking_window_s(sent.priority, rate) + longest_backlog_s(shares) + longest_s
    return waited_s + row_s(sent.max_new, num_rows) + 2 * READY_S + 2 * step_s + MESSAGE_S


def in_rows(
    requests: Sequence[SentRequest], num_rows: int, rate: float, threshold: int, *, lookahead: int = 1_000,
    policy: str = "fcfs",
) -> SimulatedService:  # fmt: skip
    """Run outputs with enough pages and few rows."""
    return run_requests(
        requests,
        NodeLimits(4_000, 4_000, page_size=PAGE, chunk_tokens=4_000, max_running=num_rows, prefill_running=400),
        OUTPUTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        max_dispatch_ahead=lookahead,
        schedule_policy=policy,
    )


@SETTINGS
@given(
    kinds=st.lists(st.tuples(st.integers(2, 40), PRIORITIES, GROUPS), min_size=1, max_size=8),
    load=LOADS,
    head=st.integers(0, 20),
    burst_s=BURSTS_S,
    rate=RATES,
    lookahead=st.sampled_from([0, 4, 1_000]),
    num_rows=st.sampled_from([1, 2, 5]),
    threshold=st.sampled_from([0, 5, 10]),
    policy=st.sampled_from(POLICIES),
)
def test_ageing_bounds_the_end_of_every_output_where_rows_are_short_under_every_policy(
    kinds: list[tuple[int, int, int | None]], load: float, head: int, burst_s: float, rate: float, lookahead: int,
    num_rows: int, threshold: int, policy: str,
) -> None:  # fmt: skip
    """Covers runs with and without preemption of rows, and requests that wait in the gateway or on the nodes."""
    is_sent_late = lookahead < 1_000
    sizes = [kinds[number % len(kinds)] for number in range(60)]
    arrivals = arrival_times(
        [row_s(max_new, num_rows, is_sent_late=is_sent_late) / num_rows for max_new, *_ in sizes], load, head, burst_s
    )
    requests = [
        SentRequest(at, 3 * PAGE, max_new, priority, group, 2 * PAGE)
        for at, (max_new, priority, group) in zip(arrivals, sizes, strict=True)
    ]
    service = in_rows(requests, num_rows, rate, threshold, lookahead=lookahead, policy=policy)
    for number, sent in enumerate(requests):
        ended_s = service.ended[f"r{number}"].ended_at - sent.at
        assert ended_s <= rows_bound_s(sent, rate, requests, num_rows, is_sent_late=is_sent_late) + 1e-9
    count_preemptions(service, rate)


# ---- a steady load of urgent requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "lookahead"), [(400, 1_000), (4, 4), (1, 0)])
def test_the_least_urgent_prompt_is_served_among_urgent_ones(num_rows: int, lookahead: int) -> None:
    """Time spent in the gateway counts as waiting time on the nodes."""
    each_s = prompt_s(54, is_sent_late=lookahead < 1_000)
    requests = [SentRequest(0.01, 8, 1, 0), *(SentRequest(at, 54, 1, HIGHEST) for at in stream(each_s, 12.0))]
    limits = NodeLimits(4_000, 4_000, page_size=PAGE, chunk_tokens=CHUNK, max_running=num_rows)

    def ended_at(rate: float) -> float:
        service = run_requests(requests, limits, PROMPTS, priority_aging_per_second=rate, max_dispatch_ahead=lookahead)
        return end_of_lowest_priority(service, requests)

    backlog_s = longest_backlog_s(sorted((sent.at, each_s) for sent in requests))
    step_s = STEP_S + TOKEN_S * CHUNK
    assert 2.5 < ended_at(4.0) <= 0.01 + overtaking_window_s(0, 4.0) + backlog_s + 2 * step_s + 4 * MESSAGE_S
    assert ended_at(1e-6) > 11.0  # after all urgent requests


@pytest.mark.parametrize("threshold", [2, 10])
def test_the_least_urgent_output_finally_keeps_its_row(threshold: int) -> None:
    """A threshold below the difference lets urgent requests take its row repeatedly at first."""
    requests = [
        SentRequest(0.0, PAGE, 40, 0),
        *(SentRequest(at + 0.1, PAGE, 10, HIGHEST) for at in stream(row_s(10, 1), 12.0)),
    ]
    ended_at = end_of_lowest_priority(in_rows(requests, 1, 4.0, threshold), requests)
    assert ended_at <= rows_bound_s(requests[0], 4.0, sorted(requests, key=lambda sent: sent.at), 1)
    if threshold == 2:
        assert ended_at > 2.5
        assert end_of_lowest_priority(in_rows(requests, 1, 1e-6, threshold), requests) > 11.0  # after all urgent ones
