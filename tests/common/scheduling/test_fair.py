"""Virtual token counters: the turns of tenants and of priority classes."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling.waiting_requests import rids

from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.scheduling import PriorityRules, SchedulingOptions
from common.errors import ConfigError
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import FirstComeFirstServed
from common.scheduling.policies.factory import make_ordering
from common.scheduling.policies.fair import Fair, TokenCounters
from common.scheduling.waiting_queue import WaitingQueue


def request(rid: str, *, tenant: str = "", length: int = 10, klass: str = "", priority: int = 0) -> Request:
    return Request(
        rid, 0, tuple(range(length)), SamplingParams(), tenant=tenant, priority_class=klass, priority=priority
    )


def queue_of(order: RequestOrdering, *requests: Request) -> WaitingQueue:
    queue = WaitingQueue(order)
    for each in requests:
        queue[each.key] = each
    return queue


def test_tenants_take_turns_by_the_cost_of_their_prompts() -> None:
    queue = queue_of(
        RequestOrdering(Fair({})),
        *[request(f"a{i}", tenant="a", length=10) for i in range(4)],
        *[request(f"b{i}", tenant="b", length=20) for i in range(2)],
    )
    # a is at 0 and came first; then b at 0; a is at 10 when b is at 20, and then both are at 20.
    assert rids(queue) == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_a_tenant_with_three_shares_is_served_three_times_as_much() -> None:
    queue = queue_of(
        RequestOrdering(Fair({"a": 3.0})),
        *[request(f"a{i}", tenant="a", length=30) for i in range(4)],
        *[request(f"b{i}", tenant="b", length=30) for i in range(2)],
    )
    assert rids(queue) == ["a0", "b0", "a1", "a2", "a3", "b1"]


def test_output_tokens_count_twice() -> None:
    order = RequestOrdering(Fair({}))
    first, second = request("a", tenant="a"), request("b", tenant="b")
    queue = queue_of(order, first, second)
    order.decoded([first, first])  # 4
    order.served(second, num_input=3)
    assert rids(queue) == ["b", "a"]
    order.served(second, num_input=2)
    assert rids(queue) == ["a", "b"]


def test_a_tenant_that_returns_has_no_credit_for_idle_time() -> None:
    order = RequestOrdering(Fair({}))
    busy = [request(f"a{i}", tenant="a") for i in range(6)]
    queue = queue_of(order, *busy)
    for each in busy[:5]:
        del queue[each.key]
        order.admitted(each, num_input=10)
    late = [request(f"b{i}", tenant="b") for i in range(2)]
    for each in late:
        queue[each.key] = each
    assert rids(queue) == ["a5", "b0", "b1"]  # b begins at 50, where a is, not at nothing


def test_after_an_empty_queue_the_tenant_that_left_last_sets_the_counter() -> None:
    counters = TokenCounters({})
    counters.arrived("a")
    counters.charge("a", 100)
    counters.left("a")
    counters.arrived("b")
    assert counters.value("b") == 100


def test_a_prompt_is_charged_once_however_often_it_is_retracted() -> None:
    order = RequestOrdering(Fair({}))
    again = request("a", tenant="a")
    queue = queue_of(order, again, request("b", tenant="b"))
    for _ in range(2):
        order.admitted(again, num_input=10)
    order.served(request("b", tenant="b"), num_input=15)
    assert rids(queue) == ["a", "b"]


def test_the_counter_of_an_idle_tenant_is_raised_when_it_returns() -> None:
    policy = Fair({})
    order = RequestOrdering(policy)
    mine = request("a0", tenant="a")
    queue = queue_of(order, mine, request("b0", tenant="b"))
    del queue[mine.key]
    order.served(request("b", tenant="b"), num_input=30)
    queue["a1", 0] = request("a1", tenant="a")
    assert policy.counters.value("a") == 30


def test_a_charged_prompt_does_not_move_its_tenant_back() -> None:
    order = RequestOrdering(Fair({}))
    paid = [request(f"a{i}", tenant="a", length=10) for i in range(2)]
    for each in paid:
        each.is_charged = True
    queue = queue_of(order, *paid, request("b0", tenant="b"))
    assert rids(queue) == ["a0", "a1", "b0"]


def test_idle_tenants_are_forgotten_in_the_end() -> None:
    counters = TokenCounters({})
    for number in range(25_000):
        counters.arrived(str(number))
        counters.charge(str(number), 1)
        counters.left(str(number))
    assert len(counters._values) <= 10_001


def test_a_request_cannot_leave_before_it_arrived() -> None:
    with pytest.raises(AssertionError, match="has no waiting request"):
        TokenCounters({}).left("a")


CLASSES = PriorityRules(class_weights={"high": 2.0, "low": 1.0}, default_class="low")


def test_classes_take_turns_in_proportion_to_their_weights() -> None:
    queue = queue_of(
        RequestOrdering(FirstComeFirstServed(), CLASSES),
        *[request(f"low{i}", klass="low") for i in range(3)],
        *[request(f"high{i}", klass="high") for i in range(4)],
    )
    # After one each low stands at 10 and high at 5; then high, high (10 and 15), low (10: it came first), ...
    assert rids(queue) == ["low0", "high0", "high1", "low1", "high2", "high3", "low2"]


def test_a_request_without_a_class_is_in_the_default_class() -> None:
    queue = queue_of(RequestOrdering(FirstComeFirstServed(), CLASSES), request("none"), request("low", klass="low"))
    assert rids(queue) == ["none", "low"]


def test_priorities_order_only_inside_a_class() -> None:
    rules = PriorityRules(is_enabled=True, class_weights={"x": 1.0, "y": 1.0}, default_class="x")
    order = RequestOrdering(FirstComeFirstServed(), rules)
    mild, strong, other = (
        request("mild", klass="x"),
        request("strong", klass="x", priority=50),
        request("other", klass="y", priority=-50),
    )
    assert rids(queue_of(order, mild, strong, other)) == ["strong", "other", "mild"]
    assert order.may_preempt(strong, mild, 0.0)
    assert not order.may_preempt(strong, other, 0.0)


def test_a_class_is_charged_under_every_policy() -> None:
    order = RequestOrdering(FirstComeFirstServed(), CLASSES)
    served = request("h", klass="high")
    queue = queue_of(order, request("low", klass="low"), request("high", klass="high"))
    order.decoded([served] * 20)
    order.admitted(served, num_input=1)
    assert rids(queue) == ["low", "high"]
    order.served(request("l", klass="low"), num_input=30)
    assert rids(queue) == ["high", "low"]


def test_a_new_priority_costs_a_waiting_tenant_or_class_none_of_its_turns() -> None:
    """A regression: it counted as a return to the queue, before which a tenant earns no credit."""
    for order in (RequestOrdering(Fair({})), RequestOrdering(FirstComeFirstServed(), CLASSES)):
        waiting = request("waiting", tenant="a", klass="high")
        queue = queue_of(order, waiting, request("other", tenant="b", klass="low"))
        order.served(request("served", tenant="b", klass="low"), num_input=30)
        queue.reprioritize(waiting, 0, "high")
        order.served(request("served", tenant="a", klass="high"), num_input=10)
        assert rids(queue) == ["waiting", "other"]


def test_a_step_is_charged_like_each_of_its_tokens() -> None:
    """Three requests of tenant a and one of tenant b; two of the four are of the high class."""
    rows = [request(f"r{i}", tenant=tenant, klass=klass) for i, (tenant, klass) in enumerate(
        [("a", "high"), ("a", "low"), ("b", "high"), ("a", "low")]
    )]  # fmt: skip
    at_once, one_by_one = Fair({"a": 2.0}), Fair({"a": 2.0})
    order = RequestOrdering(at_once, CLASSES)
    order.decoded(rows)
    for row in rows:
        one_by_one.served(row, num_output=1)
    assert at_once.counters.value("a") == one_by_one.counters.value("a") == 3.0
    assert at_once.counters.value("b") == one_by_one.counters.value("b") == 2.0
    assert order.retraction_rank(rows[0])[0] == -4.0 / CLASSES.class_weights["high"]
    assert order.retraction_rank(rows[1])[0] == -4.0 / CLASSES.class_weights["low"]


def test_without_fair_or_classes_nothing_is_charged() -> None:
    order = make_ordering(SchedulingOptions())
    assert not order.is_charging
    order.decoded([None])  # type: ignore[list-item]  # not even looked at


@settings(deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=60
    ),
    shares=st.fixed_dictionaries({name: st.sampled_from([1.0, 2.0, 5.0]) for name in "abc"}),
    num_rows=st.integers(1, 4),
)
def test_service_of_backlogged_tenants_stays_within_the_papers_bound(
    lengths: list[tuple[str, int, int]], shares: dict[str, float], num_rows: int
) -> None:
    """Theorem 4.4 of the paper: counters of backlogged tenants differ by at most U = max(w_p L_input, w_q M)."""
    policy = Fair(shares)
    order = RequestOrdering(policy)
    queue = queue_of(
        order, *[request(f"{i}", tenant=tenant, length=length) for i, (tenant, length, _) in enumerate(lengths)]
    )
    num_left = {(str(i), 0): outputs for i, (_, _, outputs) in enumerate(lengths)}
    most_in_memory = num_rows * max(length + outputs for _, length, outputs in lengths)
    bound = max(max(length for _, length, _ in lengths), 2 * most_in_memory)
    running: deque[Request] = deque()
    while queue or running:
        while queue and len(running) < num_rows:
            first = queue.pop((rids(queue)[0], 0))
            order.admitted(first, num_input=len(first.prompt))
            running.append(first)
            backlogged = {each.tenant for each in queue.values()}
            values = [policy.counters.value(tenant) for tenant in backlogged]
            assert max(values, default=0.0) - min(values, default=0.0) <= bound
        order.decoded(each for each in running if num_left[each.key] > 0)
        for each in list(running):
            num_left[each.key] -= 1
            if num_left[each.key] <= 0:
                running.remove(each)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"priority_classes": ("high",)}, "--priority-classes must be NAME:WEIGHT with a weight above 0, not 'high'"),
        ({"priority_classes": ("high:0",)}, "not 'high:0'"),
        ({"priority_classes": ("high:inf",)}, "not 'high:inf'"),
        ({"priority_classes": ("a:1", "a:2")}, "--priority-classes names a twice"),
        ({"default_priority_class": "a"}, "--default-priority-class a is not .*--priority-classes"),
        (
            {"priority_classes": ("a:1",), "default_priority_class": "b"},
            "--default-priority-class b is not .* a",
        ),
        ({"tenant_shares": ("a:1",)}, "--tenant-shares has no effect without --schedule-policy fair"),
        ({"schedule_policy": "fair", "tenant_shares": ("a:x",)}, "--tenant-shares must be NAME:WEIGHT"),
    ],
)
def test_an_invalid_option_is_refused_by_name(options: dict[str, object], complaint: str) -> None:
    for cls in (GatewayConfig, NodeConfig):
        with pytest.raises(ConfigError, match=complaint):
            cls(**options)


def test_weights_keep_their_order() -> None:
    config = NodeConfig(priority_classes=("high:8", "normal:3", "low:1.5"))
    assert list(config.class_weights.items()) == [("high", 8.0), ("normal", 3.0), ("low", 1.5)]
    assert config.default_class == config.priority_rules.default_class == "low"
    assert NodeConfig(priority_classes=("a:1", "b:2"), default_priority_class="b").default_class == "b"
    assert NodeConfig().default_class == ""
    assert NodeConfig(schedule_policy="fair", tenant_shares=("x:y:2",)).tenant_weights == {"x:y": 2.0}
