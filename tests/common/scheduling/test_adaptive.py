"""``adaptive`` chooses a policy by measurement, keeps it for a minimum time, and reports the reason."""

import itertools

import pytest
from support.cluster.local_cluster import LocalCluster
from support.simulation.simulated_service import NodeLimits, SimulatedService

from common.cache.prefix_watch import PrefixWatch
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.policies.adaptive import CHOICES, MIN_STAY_S, Adaptive
from common.scheduling.policies.factory import make_policy

NUMBERS = itertools.count()


def adaptive() -> Adaptive:
    return Adaptive({name: make_policy(name if name != "lpm" else "fcfs") for name in CHOICES})


def requests(count: int, *, deadline_at: float = 1e9, cached: int = 0) -> list[Request]:
    made = []
    for _ in range(count):
        request = Request(f"{next(NUMBERS)}", 0, tuple(range(100)), SamplingParams(), deadline_at=deadline_at)
        request.watch = PrefixWatch(b"")
        request.watch.num_tokens = cached
        made.append(request)
    return made


def serve(policy: Adaptive, some: list[Request]) -> None:
    for request in some:
        policy.left(request)


def test_adaptive_begins_with_fcfs() -> None:
    policy = adaptive()
    waiting = requests(3)
    assert list(policy.order(waiting, 0.0)) == waiting
    assert policy.choice == "fcfs"
    assert policy.reason == "few requests wait, little of them is cached, and deadlines are met"


def test_adaptive_follows_hrrn_while_the_queue_is_long() -> None:
    policy = adaptive()
    policy.order(requests(63), 0.0)
    assert policy.choice == "fcfs"
    policy.order(requests(64), 1.0)
    assert (policy.choice, policy.reason) == ("hrrn", "64 requests wait")
    policy.order(requests(16), 10.0)
    assert policy.choice == "hrrn"  # it would not be chosen now, but it is kept
    policy.order(requests(15), 20.0)
    assert policy.choice == "fcfs"
    assert policy.num_switches == 2


def test_a_choice_stands_for_a_minimum_time() -> None:
    policy = adaptive()
    policy.order(requests(64), 10.0)
    policy.order(requests(1), 10.0 + MIN_STAY_S - 0.01)
    assert policy.choice == "hrrn"
    policy.order(requests(1), 10.0 + MIN_STAY_S)
    assert policy.choice == "fcfs"


def test_adaptive_follows_lpm_while_prompts_are_cached() -> None:
    policy = adaptive()
    serve(policy, requests(15, cached=90))  # 0.9 * (1 - (63/64) ** 15) = 0.189
    policy.order([], 0.0)
    assert policy.choice == "fcfs"
    serve(policy, requests(2, cached=90))
    policy.order([], 0.0)
    assert (policy.choice, policy.reason) == ("lpm", "21.1% of the prompts' tokens were cached")
    serve(policy, requests(40))
    policy.order([], 5.0)
    assert policy.choice == "lpm"  # 11.3 %
    serve(policy, requests(10))
    policy.order([], 10.0)
    assert policy.choice == "fcfs"


def test_adaptive_follows_edf_first_while_deadlines_are_missed() -> None:
    policy = adaptive()
    late = requests(4, cached=90)
    serve(policy, late)
    policy.order([], 100.0)
    assert policy.choice == "fcfs"
    for request in late:
        policy.missed(request)
    policy.order(requests(64), 103.0)
    assert (policy.choice, policy.reason) == ("edf", "6.2% of the requests missed their deadlines")
    assert policy.why == "misses"
    assert policy.overtakes
    late, early = requests(1, deadline_at=300.0)[0], requests(1, deadline_at=200.0)[0]
    assert list(policy.order([late, early], 103.0)) == [early, late]
    serve(policy, requests(130))
    policy.order([], 110.0)
    assert policy.choice == "fcfs"
    assert not policy.overtakes


@pytest.mark.parametrize("count", [0, 1, 64])
def test_adaptive_loses_no_request(count: int) -> None:
    waiting = requests(count)
    assert set(map(id, adaptive().order(waiting, 0.0))) == set(map(id, waiting))


def test_a_node_logs_the_chosen_policy_and_the_reason() -> None:
    cluster = LocalCluster(policy="adaptive", max_running=1)
    for number in range(70):
        cluster.submit(f"r{number}", tuple(range(number * 50, number * 50 + 20)), SamplingParams(max_new_tokens=2))
    cluster.run()
    (prefill,) = cluster.prefill
    counters = cluster.counters(prefill)
    assert counters["adaptive_switches"] >= 1
    assert counters["adaptive_orders_hrrn"] > 10
    told = prefill.role._scheduler.decisions.last(1_000, 0.0)
    adapted = [decided for decided in told if decided.action == "adapt"]
    assert adapted[0].reason == "from fcfs to hrrn: 70 requests wait"


@pytest.mark.parametrize("lookahead", [0, 1_000])
def test_missed_deadlines_count_where_the_requests_waited(lookahead: int) -> None:
    """Every second request has too little time, in the gateway's queue or on the nodes."""
    service = SimulatedService(
        limits=NodeLimits(max_running=2), schedule_policy="adaptive", max_dispatch_ahead=lookahead
    )
    for number in range(60):
        timeout_s = 0.3 if number % 2 else 20.0
        service.submit(f"r{number}", range(7 * number, 7 * number + 20), 6, at=0.02 * number, timeout_s=timeout_s)
    service.run(is_checked=False)
    missed = sum(answer.error is not None for answer in service.ended.values())
    assert missed >= 10
    decode = service.cluster.nodes["decode-1........"]
    assert decode.role.counters()["adaptive_orders_edf"] > 10
    in_gateway = service.cluster.gateway.pool.queue.order.policy
    assert (in_gateway.totals()["adaptive_orders_edf"] > 10) == (lookahead == 0)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_other_policies_log_no_choice(policy: str) -> None:
    cluster = LocalCluster(policy=policy)
    cluster.submit("r", (1, 2, 3), SamplingParams(max_new_tokens=2))
    cluster.run()
    assert "adaptive_switches" not in cluster.counters(cluster.prefill[0])
    assert all(decided.action != "adapt" for decided in cluster.prefill[0].role._scheduler.decisions.last(99, 0.0))
