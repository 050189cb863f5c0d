"""Ageing bounds the wait for a prefill node and for a row of a decode node, in virtual time.

``tests/support/ageing.py`` and ``docs/scheduling.md`` derive the formulas.
"""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ageing import (
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
    Sent,
    arriving,
    longest_backlog_s,
    overtaken_s,
    patient,
    places_lost,
    served,
    stream,
)
from support.simulated import Limits, Service

from scripts.simulator.costs import Costs

CHUNK, TOKEN_S = 32, 0.001

# ---- prompts: the gateway's queue, and prefill nodes ----------------------------------------------------------------

PROMPTS = Costs(STEP_S, TOKEN_S, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)


def prompt_s(length: int, *, is_sent_late: bool = False) -> float:
    """The longest time of a prefill node that a prompt takes: its tokens, and the steps that it would fill alone.

    If the prompt may be dispatched while the node is idle, two messages are added: its own, and the one that reports
    the end of the request before it.
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
)
def test_no_prompt_waits_longer_than_the_ageing_bound(
    kinds: list[tuple[int, int, int | None, int]], load: float, head: int, burst_s: float, rate: float,
    lookahead: int, num_rows: int, threshold: int,
) -> None:  # fmt: skip
    """A first token comes after at most ``D + B`` plus the current step and the step in which the prompt ends.

    With a small lookahead prompts wait in the gateway, with a large one on the prefill node. There, with few slots and
    no threshold, they preempt each other. A shared prefix is computed for one of them while the others wait.
    """
    is_sent_late = lookahead < 1_000
    sizes = [kinds[number % len(kinds)] for number in range(100)]
    works_s = [prompt_s(length, is_sent_late=is_sent_late) for length, *_ in sizes]
    arrivals = arriving(works_s, load, head, burst_s)
    backlog_s = longest_backlog_s(list(zip(arrivals, works_s, strict=True)))
    requests = [
        Sent(at, length, 1, priority, group, num_shared)
        for at, (length, priority, group, num_shared) in zip(arrivals, sizes, strict=True)
    ]
    service = served(
        requests,
        Limits(4_000, 4_000, page_size=PAGE, chunk_tokens=CHUNK, max_running=num_rows),
        PROMPTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        gateway_lookahead=lookahead,
    )
    rest_s = 2 * (STEP_S + TOKEN_S * CHUNK) + 4 * MESSAGE_S
    for number, sent in enumerate(requests):
        waited_s = service.ended[f"r{number}"].stamps_s[0] - sent.at
        assert waited_s <= overtaken_s(sent.priority, rate) + backlog_s + rest_s + 1e-9
    places_lost(service, rate)


# ---- rows of a decode node ------------------------------------------------------------------------------------------

#: A step of prompts costs the same whatever their number, so that only the decode node is a bottleneck.
OUTPUTS = Costs(STEP_S, 0.0, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)


def row_s(max_new: int, num_rows: int, *, is_sent_late: bool = False) -> float:
    """The longest time that a request occupies a row of a full batch: a step for each token but the first, one to join.

    If it may be dispatched only when the row is free, the time until it is ready and two messages are added.
    """
    return max_new * (STEP_S + TOKEN_S * num_rows) + (READY_S + 2 * MESSAGE_S) * is_sent_late


def rows_bound_s(
    sent: Sent, rate: float, requests: Sequence[Sent], num_rows: int, *, is_sent_late: bool = False
) -> float:
    """The latest end of an output: ``D + B + L (m - 1) / m`` plus its own steps.

    L is the longest output, which the other rows may have had when requests began to wait. The time until a request is
    ready counts twice: its own, and that of a request before it or of the request whose prefix it waits for.
    """
    rows_s = [row_s(each.max_new, num_rows, is_sent_late=is_sent_late) for each in requests]
    shares = [(each.at, each_s / num_rows) for each, each_s in zip(requests, rows_s, strict=True)]
    longest_s = max(rows_s) * (num_rows - 1) / num_rows
    step_s = STEP_S + TOKEN_S * num_rows
    waited_s = overtaken_s(sent.priority, rate) + longest_backlog_s(shares) + longest_s
    return waited_s + row_s(sent.max_new, num_rows) + 2 * READY_S + 2 * step_s + MESSAGE_S


def in_rows(requests: Sequence[Sent], num_rows: int, rate: float, threshold: int, *, lookahead: int = 1_000) -> Service:
    """A service with enough pages and few rows."""
    return served(
        requests,
        Limits(4_000, 4_000, page_size=PAGE, chunk_tokens=4_000, max_running=num_rows, prefill_running=400),
        OUTPUTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        gateway_lookahead=lookahead,
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
)
def test_no_output_ends_after_the_ageing_bound_when_rows_are_short(
    kinds: list[tuple[int, int, int | None]], load: float, head: int, burst_s: float, rate: float, lookahead: int,
    num_rows: int, threshold: int,
) -> None:  # fmt: skip
    """With and without preemption of rows, and with requests that wait in the gateway or on the nodes."""
    is_sent_late = lookahead < 1_000
    sizes = [kinds[number % len(kinds)] for number in range(60)]
    arrivals = arriving(
        [row_s(max_new, num_rows, is_sent_late=is_sent_late) / num_rows for max_new, *_ in sizes], load, head, burst_s
    )
    requests = [
        Sent(at, 3 * PAGE, max_new, priority, group, 2 * PAGE)
        for at, (max_new, priority, group) in zip(arrivals, sizes, strict=True)
    ]
    service = in_rows(requests, num_rows, rate, threshold, lookahead=lookahead)
    for number, sent in enumerate(requests):
        ended_s = service.ended[f"r{number}"].ended_at - sent.at
        assert ended_s <= rows_bound_s(sent, rate, requests, num_rows, is_sent_late=is_sent_late) + 1e-9
    places_lost(service, rate)


# ---- while urgent ones keep arriving -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "lookahead"), [(400, 1_000), (4, 4), (1, 0)])
def test_the_least_urgent_prompt_is_served_while_urgent_ones_keep_arriving(num_rows: int, lookahead: int) -> None:
    """Time spent in the gateway counts on the nodes."""
    each_s = prompt_s(54, is_sent_late=lookahead < 1_000)
    requests = [Sent(0.01, 8, 1, 0), *(Sent(at, 54, 1, HIGHEST) for at in stream(each_s, 12.0))]
    limits = Limits(4_000, 4_000, page_size=PAGE, chunk_tokens=CHUNK, max_running=num_rows)

    def ended_at(rate: float) -> float:
        service = served(requests, limits, PROMPTS, priority_aging_per_second=rate, gateway_lookahead=lookahead)
        return patient(service, requests)

    backlog_s = longest_backlog_s(sorted((sent.at, each_s) for sent in requests))
    step_s = STEP_S + TOKEN_S * CHUNK
    assert 2.5 < ended_at(4.0) <= 0.01 + overtaken_s(0, 4.0) + backlog_s + 2 * step_s + 4 * MESSAGE_S
    assert ended_at(1e-6) > 11.0  # after all of them


@pytest.mark.parametrize("threshold", [2, 10])
def test_the_least_urgent_output_finally_keeps_its_row(threshold: int) -> None:
    """It has the row first. With a threshold below the difference it is preempted several times before it keeps the
    row."""
    requests = [Sent(0.0, PAGE, 40, 0), *(Sent(at + 0.1, PAGE, 10, HIGHEST) for at in stream(row_s(10, 1), 12.0))]
    ended_at = patient(in_rows(requests, 1, 4.0, threshold), requests)
    assert ended_at <= rows_bound_s(requests[0], 4.0, sorted(requests, key=lambda sent: sent.at), 1)
    if threshold == 2:
        assert ended_at > 2.5
        assert patient(in_rows(requests, 1, 1e-6, threshold), requests) > 11.0  # after all of them
