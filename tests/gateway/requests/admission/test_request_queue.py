"""The order of the gateway's queue, evictions from a full queue, and waiting for nodes."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config.scheduling import PriorityRules
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import FirstComeFirstServed
from common.scheduling.policies.factory import make_policy
from gateway.requests.admission.request_queue import RequestQueue

SAMPLING = SamplingParams(max_new_tokens=4)


def request(rid, priority=0, arrived_at=0.0, **fields):
    return Request(rid, 0, (1, 2), SAMPLING, priority=priority, arrived_at=arrived_at, **fields)


def queue_of(*requests, is_enabled=True, aging_per_s=0.0):
    rules = PriorityRules(is_enabled=is_enabled, aging_per_s=aging_per_s)
    waiting = RequestQueue(RequestOrdering(FirstComeFirstServed(), rules), recovery_timeout_s=10.0)
    for one in requests:
        waiting.push(one)
    return waiting


def rids(requests):
    return [one.rid for one in requests]


def test_the_most_urgent_is_next_and_equals_are_in_order_of_arrival():
    waiting = queue_of(request("a"), request("b", 5), request("c", 5), request("d", 9))
    assert rids(waiting.first(3, 0.0)) == ["d", "b", "c"]
    assert len(waiting) == 4
    waiting.remove(waiting.first(1, 0.0)[0])
    assert rids(waiting.first(9, 0.0)) == ["b", "c", "a"]


def test_without_priorities_requests_are_in_order_of_arrival():
    assert rids(queue_of(request("a"), request("b", 5), is_enabled=False).first(2, 0.0)) == ["a", "b"]


def test_a_changed_priority_takes_effect_at_once():
    waiting = queue_of(request("a"), request("b"))
    waiting.reprioritize(waiting.requests()[1], 1, "")
    assert rids(waiting.first(1, 0.0)) == ["b"]


def test_the_least_urgent_and_newest_are_evicted_first():
    waiting = queue_of(request("a", 2), request("b", 1), request("c", 1), request("d", 3), request("e", 2))
    newcomer = request("new", 3)
    assert rids(waiting.eviction_candidates(newcomer, 1)) == ["c"]
    assert rids(waiting.eviction_candidates(newcomer, 3)) == ["c", "b", "e"]
    assert rids(waiting.eviction_candidates(newcomer, 5)) == []  # only four are less urgent, so none is evicted
    assert rids(waiting.eviction_candidates(request("equal", 1), 1)) == []


def test_without_priorities_no_request_is_evicted():
    assert queue_of(request("a", 1), is_enabled=False).eviction_candidates(request("new", 3), 1) == []


def test_no_request_is_evicted_for_another_class():
    waiting = queue_of(request("a", 1, priority_class="low"))
    assert waiting.eviction_candidates(request("new", 3, priority_class="high"), 1) == []
    assert rids(waiting.eviction_candidates(request("new", 3, priority_class="low"), 1)) == ["a"]


def test_with_ageing_an_old_request_is_not_evicted():
    waiting = queue_of(request("a", 1, arrived_at=0.0), aging_per_s=0.5)
    assert rids(waiting.eviction_candidates(request("new", 3, arrived_at=1.9), 1)) == ["a"]
    assert rids(waiting.eviction_candidates(request("new", 3, arrived_at=4.1), 1)) == []


def test_a_stranded_request_is_passed_until_a_node_registers():
    large = request("large")
    waiting = queue_of(large, request("small"))
    waiting.strand(large, 0.0)
    assert rids(waiting.first(9, 0.0)) == ["small"]
    waiting.remove(waiting.first(1, 0.0)[0])
    assert waiting.is_idle
    assert len(waiting) == 1
    waiting.retry_stranded(0.0)
    assert rids(waiting.first(9, 0.0)) == ["large"]


def test_a_stranded_request_expires():
    large = request("large")
    waiting = queue_of(large, request("small"))
    waiting.strand(large, 0.0)
    waiting.retry_stranded(6.0)
    waiting.strand(large, 6.0)
    assert waiting.expired(10.0, is_routable=True) == []
    assert rids(waiting.expired(10.1, is_routable=True)) == ["large"]


def test_the_time_in_which_a_stranded_request_waits_for_its_turn_does_not_count():
    large = request("large")
    waiting = queue_of(large)
    waiting.strand(large, 0.0)
    waiting.retry_stranded(4.0)  # its node is back, but full until it is lost again
    waiting.strand(large, 100.0)
    waiting.retry_stranded(103.0)
    waiting.strand(large, 103.0)
    assert waiting.expired(106.0, is_routable=True) == []
    assert rids(waiting.expired(106.1, is_routable=True)) == ["large"]


def test_a_stranded_request_does_not_expire_once_its_nodes_are_back():
    large = request("large")
    waiting = queue_of(large)
    waiting.strand(large, 0.0)
    waiting.retry_stranded(9.0)
    assert waiting.expired(61.0, is_routable=True) == []


def test_without_nodes_all_requests_expire_unless_a_node_registers():
    waiting = queue_of(request("a"), request("b"))
    assert waiting.expired(100.0, is_routable=False) == []
    assert waiting.expired(110.0, is_routable=False) == []
    assert waiting.expired(110.1, is_routable=True) == []
    assert waiting.expired(200.0, is_routable=False) == []
    assert rids(waiting.expired(210.1, is_routable=False)) == ["a", "b"]


@pytest.mark.parametrize(
    ("policy", "last", "expected"),
    [
        ("fcfs", 8.0, 2),
        ("lof", 8.0, 1),  # "long" may have the longer output
        ("short-first", 8.0, 1),  # "short" has the shorter prompt
        ("edf", 8.0, 1),  # the deadline of "short" is earlier
        ("hrrn", 6.0, 2),  # "long" has waited 6 s for 8 tokens by then, and the new request 2 s for 4
        ("hrrn", 9.0, 1),  # 9 s for 8 tokens, and 5 s for 4
        ("fair", 8.0, 1),  # after the first request of the other tenant
        ("lpm", 8.0, 2),  # as fcfs, since the gateway has no cache
        ("random", 8.0, 0),  # unknown
    ],
)
def test_the_policy_tells_how_many_requests_are_sent_before_a_new_one(policy, last, expected):
    waiting = RequestQueue(RequestOrdering(make_policy(policy)), recovery_timeout_s=10.0)
    waiting.push(sized("long", 8, max_new=9, deadline_at=20.0, tenant="x"))
    waiting.push(sized("short", 2, max_new=2, deadline_at=5.0, tenant="x"))
    new = sized("new", 4, max_new=4, deadline_at=10.0, tenant="y", arrived_at=4.0)
    assert waiting.num_ahead(new, 4.0, last=last) == expected
    assert len(waiting) == 2


def sized(rid, num_tokens, *, max_new, **fields):
    return Request(rid, 0, (1,) * num_tokens, SamplingParams(max_new_tokens=max_new), **fields)


def test_requests_before_a_new_one_by_priority_by_class_and_after_a_recovery():
    by_priority = queue_of(request("a", 5), request("b", 3), request("c", 3), request("d", 1))
    assert by_priority.num_ahead(request("new", 3), 0.0, last=9.0) == 3
    by_priority.put_back(request("recovered"))
    assert by_priority.num_ahead(request("urgent", 9), 0.0, last=9.0) == 1
    rules = PriorityRules(class_weights={"high": 4.0, "low": 1.0}, default_class="low")
    by_class = RequestQueue(RequestOrdering(FirstComeFirstServed(), rules), recovery_timeout_s=10.0)
    for rid in "abc":
        by_class.push(request(rid, priority_class="low"))
    assert by_class.num_ahead(request("new", priority_class="high"), 0.0, last=9.0) == 1  # classes take turns
    assert by_class.num_ahead(request("new", priority_class="low"), 0.0, last=9.0) == 3


def test_a_removed_request_leaves_no_state():
    large = request("large")
    waiting = queue_of(large)
    waiting.strand(large, 0.0)
    waiting.remove(large)
    waiting.push(replace(large))
    assert rids(waiting.first(1, 0.0)) == ["large"]
    assert waiting.expired(50.0, is_routable=True) == []


RULES = [
    PriorityRules(),
    PriorityRules(is_enabled=True),
    PriorityRules(is_enabled=True, aging_per_s=0.5),
    PriorityRules(is_enabled=True, class_weights={"": 1.0, "high": 3.0}),
]


STRANDED_FIRST = [("push", 2, 0, ""), ("push", 0, 0, "high"), ("push", 1, 1, ""), ("strand", 1, 0, "")]


@example(rules=RULES[-1], steps=STRANDED_FIRST)  # the class of a stranded request does not lose its turn
@given(
    rules=st.sampled_from(RULES),
    steps=st.lists(
        st.tuples(st.sampled_from(["push", "push", "remove", "change", "strand", "come"]), st.integers(0, 9),
                  st.integers(0, 3), st.sampled_from(["", "high"])),
        max_size=40,
    ),
)  # fmt: skip
def test_the_order_equals_that_of_sorting_all_requests(
    rules: PriorityRules, steps: list[tuple[str, int, int, str]]
) -> None:
    """The queue gives the same order as sorting all requests, after any sequence of changes."""
    waiting = RequestQueue(RequestOrdering(FirstComeFirstServed(), rules), recovery_timeout_s=10.0)
    there: dict[int, Request] = {}
    stranded: set[int] = set()
    for at, (what, number, priority, name) in enumerate(steps):
        if what == "push" and number not in there:
            there[number] = request(str(number), priority, float(at), priority_class=name)
            waiting.push(there[number])
        elif number in there and what == "remove":
            stranded.discard(number)
            waiting.remove(there.pop(number))
        elif number in there and what == "change":
            waiting.reprioritize(there[number], priority, name)
        elif number in there and what == "strand":
            stranded.add(number)
            waiting.strand(there[number], 0.0)
        elif what == "come":
            stranded.clear()
            waiting.retry_stranded(0.0)
        line = waiting.order.sort([one for one in waiting.requests() if int(one.rid) not in stranded], 0.0)
        for count in (1, 3, 99):
            assert rids(waiting.first(count, 0.0)) == rids(line[:count])
        newcomer = request("new", priority, float(at), priority_class=name)
        priority_of = waiting.order.effective_priority
        others = [one for one in reversed(waiting.requests()) if one.priority_class == name]
        lower = sorted((one for one in others if priority_of(one) < priority_of(newcomer)), key=priority_of)
        expected = lower[:2] if len(lower) >= 2 and rules.is_enabled else []
        assert rids(waiting.eviction_candidates(newcomer, 2)) == rids(expected)
