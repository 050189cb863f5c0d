"""Ageing bounds every wait: in the gateway, on prefill nodes, for rows and for pages of decode nodes; in virtual time.

The formula is the same everywhere (docs/scheduling.md). A request of priority p stands before whatever arrives more
than D = (highest priority - p) / rate after it: later ones neither pass it nor take what it has. What is there at that
moment may come first, and what is there is bounded where the load is below capacity: B, the longest backlog that a
server of that capacity would ever have of these arrivals (Lindley's recursion), and what it takes until a place that is
taken comes free. So a request is served, or has ended, after at most D + B + that, and its own work.
"""

import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import Limits, Service

from scripts.sim.costs import Costs

PAGE, CHUNK = 4, 32
STEP_S, TOKEN_S, MESSAGE_S = 0.01, 0.001, 0.001
HIGHEST = 10
RATES = st.sampled_from([1.0, 5.0, 20.0])
LOADS = st.sampled_from([0.6, 0.9, 0.98])
#: What requests are, in turn: their size, and a priority.
Kind = tuple[int, int]
PRIORITIES = st.sampled_from([0, 3, 10, 10])
SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def unlike(number: int, length: int) -> tuple[int, ...]:
    """A prompt that begins like no other."""
    return (1_000 + number, *range(1, length))


def arriving(works_s: Sequence[float], load: float, head: int, burst_s: float) -> list[float]:
    """When these come, at ``load`` times what can be served: the first ``head`` at once, and those of every
    ``burst_s`` seconds."""
    instants, at = [], 0.0
    for number, work_s in enumerate(works_s):
        instants.append(at if not burst_s else at // burst_s * burst_s)
        at += work_s / load if number >= head else 0.0
    return instants


def longest_backlog_s(arrivals: Sequence[tuple[float, float]]) -> float:
    """The most work that ever waits for a server that works whenever there is any; each is an instant and its work."""
    backlog = most = last = 0.0
    for at, work_s in arrivals:
        backlog = max(0.0, backlog - (at - last)) + work_s
        most, last = max(most, backlog), at
    return most


def overtaken_s(priority: int, rate: float) -> float:
    """D: for so long later ones may still pass."""
    return (HIGHEST - priority) / rate


def served(requests: Sequence[tuple[float, int, int, int]], limits: Limits, costs: Costs, **options: object) -> Service:
    """All of these (instant, prompt, output, priority), through one prefill and one decode node, to their ends."""
    service = Service(limits=limits, costs=costs, enable_priority_scheduling=True, default_priority_value=0, **options)
    for number, (at, length, max_new, priority) in enumerate(requests):
        service.ask(f"r{number}", unlike(number, length), max_new, at=at, priority=priority, timeout_s=1e6)
    service.run(is_checked=False, max_events=1_000_000)
    assert not service.refused
    return service


def assert_places_are_lost_only_to_who_stands_before(service: Service, rate: float) -> int:
    """Slots, rows and pages went to nobody who came later than by the difference in priority. Returns how many went."""
    num_lost = 0
    for node in service.cluster.nodes.values():
        decisions = node.role._scheduler.decisions
        assert decisions.num_noted <= 1_024, "the ring has forgotten some"
        for decided in decisions.last(1_024, service.agenda.now()):
            if "goes to the more urgent" in decided.reason or "go to the more urgent" in decided.reason:
                loser, winner = service.ended[decided.rid], service.ended[decided.reason.rsplit(" ", 1)[1]]
                difference = winner.ask.priority - loser.ask.priority
                assert winner.started_at - loser.started_at <= difference / rate
                num_lost += 1
    return num_lost


# ---- prompts: the gateway's queue, and prefill nodes ----------------------------------------------------------------

PROMPTS = Costs(STEP_S, TOKEN_S, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)


def prompt_s(length: int, *, is_sent_late: bool = False) -> float:
    """At most so much time of a prefill node goes into a prompt: its tokens, and the steps that it would fill alone.

    If it may have to be sent while the node has nothing to do, also the way there and the news of the end before it.
    """
    return TOKEN_S * length + STEP_S * math.ceil(length / CHUNK) + 2 * MESSAGE_S * is_sent_late


@SETTINGS
@given(
    kinds=st.lists(st.tuples(st.integers(1, 100), PRIORITIES), min_size=1, max_size=8),
    load=LOADS,
    head=st.integers(0, 40),
    burst_s=st.sampled_from([0.0, 0.5, 2.0]),
    rate=RATES,
    lookahead=st.sampled_from([0, 1, 4, 1_000]),
    num_rows=st.sampled_from([1, 2, 400]),
    threshold=st.sampled_from([0, 10]),
)
def test_no_prompt_waits_longer_than_ageing_lets_it(
    kinds: list[Kind], load: float, head: int, burst_s: float, rate: float, lookahead: int, num_rows: int,
    threshold: int,
) -> None:  # fmt: skip
    """A first token comes after at most ``D + B``, the step that is under way and the one that it ends in.

    With a small lookahead prompts wait in the gateway, with a large one on the prefill node, and there, with few slots
    and no threshold, they take each other's.
    """
    is_sent_late = lookahead < 1_000
    sizes = [kinds[number % len(kinds)] for number in range(100)]
    works_s = [prompt_s(length, is_sent_late=is_sent_late) for length, _ in sizes]
    arrivals = arriving(works_s, load, head, burst_s)
    backlog_s = longest_backlog_s(list(zip(arrivals, works_s, strict=True)))
    service = served(
        [(at, length, 1, priority) for at, (length, priority) in zip(arrivals, sizes, strict=True)],
        Limits(4_000, 4_000, page_size=PAGE, chunk_tokens=CHUNK, max_running=num_rows),
        PROMPTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        gateway_lookahead=lookahead,
    )
    rest_s = 2 * (STEP_S + TOKEN_S * CHUNK) + 4 * MESSAGE_S
    for number, (at, (_, priority)) in enumerate(zip(arrivals, sizes, strict=True)):
        waited_s = service.ended[f"r{number}"].stamps_s[0] - at
        assert waited_s <= overtaken_s(priority, rate) + backlog_s + rest_s + 1e-9
    assert_places_are_lost_only_to_who_stands_before(service, rate)


# ---- rows of a decode node ------------------------------------------------------------------------------------------

#: Prompts cost a step, however many there are, so that only the decode node is short of anything.
OUTPUTS = Costs(STEP_S, 0.0, TOKEN_S, 0.0, MESSAGE_S, 0.0, 1e12)
#: A prompt is computed and here after at most so long: two steps and five messages.
READY_S = 2 * STEP_S + 5 * MESSAGE_S


def row_s(max_new: int, num_rows: int) -> float:
    """At most so long a request is in a row of a full batch: a step for each token but the first, and one to join."""
    return max_new * (STEP_S + TOKEN_S * num_rows)


def rows_bound_s(
    max_new: int, priority: int, rate: float, arrivals: Sequence[tuple[float, int]], num_rows: int
) -> float:
    """The latest end of an output: ``D + B + L`` and its own steps, where L is the longest output: that of the others
    in the rows when somebody had to wait first. Twice its way here: its own, and that of those that stand before it."""
    shares = [(at, row_s(each, num_rows) / num_rows) for at, each in arrivals]
    longest_s = max(row_s(each, num_rows) for _, each in arrivals) * (num_rows - 1) / num_rows
    step_s = STEP_S + TOKEN_S * num_rows
    waited_s = overtaken_s(priority, rate) + longest_backlog_s(shares) + longest_s
    return waited_s + row_s(max_new, num_rows) + 2 * READY_S + 2 * step_s + MESSAGE_S


def in_rows(requests: Sequence[tuple[float, int, int]], num_rows: int, rate: float, threshold: int) -> Service:
    """Outputs (instant, tokens, priority) that have pages enough and few rows."""
    return served(
        [(at, PAGE, max_new, priority) for at, max_new, priority in requests],
        Limits(4_000, 4_000, page_size=PAGE, chunk_tokens=4_000, max_running=num_rows, prefill_running=400),
        OUTPUTS,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        gateway_lookahead=1_000,
    )


@SETTINGS
@given(
    kinds=st.lists(st.tuples(st.integers(2, 40), PRIORITIES), min_size=1, max_size=8),
    load=LOADS,
    head=st.integers(0, 20),
    burst_s=st.sampled_from([0.0, 0.5, 2.0]),
    rate=RATES,
    num_rows=st.sampled_from([1, 2, 5]),
    threshold=st.sampled_from([0, 5, 10]),
)
def test_no_output_ends_later_than_ageing_lets_it_where_rows_are_short(
    kinds: list[Kind], load: float, head: int, burst_s: float, rate: float, num_rows: int, threshold: int
) -> None:
    """Whether rows are taken from one another (pauses) or not."""
    sizes = [kinds[number % len(kinds)] for number in range(60)]
    arrivals = arriving([row_s(max_new, num_rows) / num_rows for max_new, _ in sizes], load, head, burst_s)
    requests = [(at, *size) for at, size in zip(arrivals, sizes, strict=True)]
    service = in_rows(requests, num_rows, rate, threshold)
    known = [(at, max_new) for at, max_new, _ in requests]
    for number, (at, max_new, priority) in enumerate(requests):
        ended_s = service.ended[f"r{number}"].ended_at - at
        assert ended_s <= rows_bound_s(max_new, priority, rate, known, num_rows) + 1e-9
    assert_places_are_lost_only_to_who_stands_before(service, rate)


# ---- pages of a decode node -----------------------------------------------------------------------------------------

NUM_PAGES = 24
#: Steps cost the same however many rows they have, so that only pages are short.
PAGES = Costs(STEP_S, 0.0, 0.0, 0.0, MESSAGE_S, 0.0, 1e12)


def held_s(max_new: int) -> float:
    """For at most so long a request holds pages: until its prompt is here, and its steps, with one to join."""
    return READY_S + (max_new + 1) * STEP_S


def pages_bound_s(kind: tuple[int, int], priority: int, rate: float, arrivals: Sequence[tuple[float, int, int]],
                  skip_ahead: int) -> float:  # fmt: skip
    """The latest end of an output of ``(pages, tokens)``: ``D + B + H (P + k s) / C`` and its own steps.

    A request of s pages is refused only if fewer than s are left of the pool's P; so whenever somebody waits, at least
    C = P - s are in use, for the largest s. A request takes its pages, and at most one more for what its last page has
    room for, for as long as it holds them, at most H. What is in use when somebody has to wait first is at most P; and
    k smaller ones may pass.
    """
    largest = 1 + max(size for _, size, _ in arrivals)
    capacity = NUM_PAGES - largest
    shares = [(at, (size + 1) * held_s(max_new) / capacity) for at, size, max_new in arrivals]
    longest_s = max(held_s(max_new) for _, _, max_new in arrivals)
    waited_s = overtaken_s(priority, rate) + longest_backlog_s(shares)
    waited_s += longest_s * (NUM_PAGES + skip_ahead * largest) / capacity
    return waited_s + held_s(kind[1]) + READY_S + 2 * STEP_S + MESSAGE_S


def in_pages(
    requests: Sequence[tuple[float, int, int, int]], rate: float, *, threshold: int, skip_ahead: int,
    num_pages: int = NUM_PAGES,
) -> Service:  # fmt: skip
    """Outputs (instant, pages, tokens, priority) that have rows enough and few pages."""
    return served(
        [(at, size * PAGE - max_new, max_new, priority) for at, size, max_new, priority in requests],
        Limits(4_000, num_pages, page_size=PAGE, chunk_tokens=4_000, max_running=num_pages, prefill_running=400),
        PAGES,
        priority_aging_per_second=rate,
        priority_scheduling_preemption_threshold=threshold,
        max_skip_ahead=skip_ahead,
        gateway_lookahead=1_000,
    )


@SETTINGS
@given(
    kinds=st.lists(st.tuples(st.integers(2, 10), st.integers(2, 36), PRIORITIES), min_size=1, max_size=8),
    load=LOADS,
    head=st.integers(0, 20),
    burst_s=st.sampled_from([0.0, 0.5, 2.0]),
    rate=RATES,
    skip_ahead=st.sampled_from([0, 2, 8]),
    threshold=st.sampled_from([0, 10]),
)
def test_no_output_ends_later_than_ageing_lets_it_where_pages_are_short(
    kinds: list[tuple[int, int, int]], load: float, head: int, burst_s: float, rate: float, skip_ahead: int,
    threshold: int,
) -> None:  # fmt: skip
    """The bound is of a threshold above all differences: what is computed again after a retraction is further load."""
    sizes = [kinds[number % len(kinds)] for number in range(60)]
    sizes = [(size, min(max_new, size * PAGE - 1), priority) for size, max_new, priority in sizes]
    capacity = NUM_PAGES - 1 - max(size for size, _, _ in sizes)
    works_s = [(size + 1) * held_s(max_new) / capacity for size, max_new, _ in sizes]
    arrivals = arriving(works_s, load, head, burst_s)
    requests = [(at, *size) for at, size in zip(arrivals, sizes, strict=True)]
    service = in_pages(requests, rate, threshold=threshold, skip_ahead=skip_ahead)
    num_lost = assert_places_are_lost_only_to_who_stands_before(service, rate)
    assert sum(node.role.counters()["retractions"] for node in service.cluster.nodes.values()) == num_lost
    if threshold < HIGHEST:
        return
    known = [(at, size, max_new) for at, size, max_new, _ in requests]
    for number, (at, size, max_new, priority) in enumerate(requests):
        ended_s = service.ended[f"r{number}"].ended_at - at
        assert ended_s <= pages_bound_s((size, max_new), priority, rate, known, skip_ahead) + 1e-9


# ---- while urgent ones keep coming ----------------------------------------------------------------------------------


def stream(each_s: float, seconds: float, load: float = 0.95) -> list[float]:
    """Instants: at first two seconds' work, then ``load`` of what can be served."""
    return [0.0] * round(2.0 / each_s) + [number * each_s / load for number in range(1, round(seconds / each_s * load))]


def patient(service: Service, priorities: Sequence[int]) -> float:
    """When the one that is not urgent ended."""
    return service.ended[f"r{list(priorities).index(0)}"].ended_at


@pytest.mark.parametrize(("num_rows", "lookahead"), [(400, 1_000), (4, 4), (1, 0)])
def test_the_least_urgent_prompt_is_served_while_urgent_ones_keep_coming(num_rows: int, lookahead: int) -> None:
    """What it waited in the gateway counts on the nodes."""
    each_s = prompt_s(54, is_sent_late=lookahead < 1_000)
    requests = [(0.01, 8, 1, 0), *((at, 54, 1, HIGHEST) for at in stream(each_s, 12.0))]
    limits = Limits(4_000, 4_000, page_size=PAGE, chunk_tokens=CHUNK, max_running=num_rows)

    def ended_at(rate: float) -> float:
        service = served(requests, limits, PROMPTS, priority_aging_per_second=rate, gateway_lookahead=lookahead)
        return patient(service, [priority for *_, priority in requests])

    backlog_s = longest_backlog_s(sorted((at, each_s) for at, *_ in requests))
    step_s = STEP_S + TOKEN_S * CHUNK
    assert 2.5 < ended_at(4.0) <= 0.01 + overtaken_s(0, 4.0) + backlog_s + 2 * step_s + 4 * MESSAGE_S
    assert ended_at(1e-6) > 11.0  # after all of them


@pytest.mark.parametrize("threshold", [2, 10])
def test_the_least_urgent_output_keeps_its_row_in_the_end_while_urgent_ones_keep_coming(threshold: int) -> None:
    """It has the row first, and with a threshold below the difference loses it, again and again at first."""
    requests = [(0.0, 40, 0), *((at + 0.1, 10, HIGHEST) for at in stream(row_s(10, 1), 12.0))]
    service = in_rows(requests, 1, 4.0, threshold)
    ended_at = patient(service, [priority for *_, priority in requests])
    known = sorted((at, max_new) for at, max_new, _ in requests)
    assert ended_at <= rows_bound_s(40, 0, 4.0, known, 1)
    if threshold == 2:
        assert ended_at > 2.5
        late = patient(in_rows(requests, 1, 1e-6, threshold), [priority for *_, priority in requests])
        assert late > 11.0  # after all of them


def test_the_least_urgent_output_keeps_its_pages_in_the_end_while_urgent_ones_keep_coming() -> None:
    """Three of them fit at a time, 0.09 s each: it has its pages first, loses them, and then never more."""
    each_s = 0.09 / 3
    requests = [(0.0, 8, 28, 0), *((at + 0.15, 8, 8, HIGHEST) for at in stream(each_s, 12.0))]
    priorities = [priority for *_, priority in requests]
    service = in_pages(requests, 4.0, threshold=2, skip_ahead=0, num_pages=27)
    assert assert_places_are_lost_only_to_who_stands_before(service, 4.0) > 0
    backlog_s = longest_backlog_s([(at, each_s) for at, *_ in requests])
    assert 2.5 < patient(service, priorities) <= overtaken_s(0, 4.0) + backlog_s + 2 * held_s(28)
    service = in_pages(requests, 1e-6, threshold=2, skip_ahead=0, num_pages=27)
    assert patient(service, priorities) > 11.0  # after nearly all of them
