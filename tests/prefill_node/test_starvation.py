"""With ageing no policy starves a request; without it, several do. Each step takes a second and computes one prompt."""

import pytest
from support.scheduling.single_nodes import PrefillNode

from common.config.scheduling import POLICIES, PriorityRules
from common.request import Request
from common.sampling_params import SamplingParams

WARM = tuple(range(5_000, 5_040))
#: Policies that put the cold request of the test behind all others for as long as those keep coming.
STARVING = ("lpm", "dfs-weight", "short-first", "edf", "lof")
NUM_STEPS = 60


def steps_waited(policy: str, rate: float) -> int:
    """Steps until a cold prompt is computed, while in each step a prompt arrives that the policy prefers to it."""
    rules = PriorityRules(is_enabled=True, aging_per_s=rate)
    node = PrefillNode(num_pages=400, chunk=None, rules=rules, policy=policy, max_prefill_tokens=1)

    def submit(rid: str, prompt: tuple[int, ...], max_new: int, timeout_s: float) -> None:
        sampling = SamplingParams(max_new_tokens=max_new)
        node.scheduler.submit(Request(rid, 0, prompt, sampling, arrived_at=node.now, deadline_at=node.now + timeout_s))

    submit("first", WARM, 2, 50.0)
    node.step()
    submit("cold", tuple(range(9_000, 9_036)), 1, 500.0)
    for number in range(NUM_STEPS):
        submit(f"r{number}", (*WARM, number, number), 2, 50.0)
        node.step()
        if "cold" in node.done:
            return number
    return NUM_STEPS


@pytest.mark.parametrize("policy", POLICIES)
def test_ageing_lets_no_policy_starve_a_request(policy: str) -> None:
    """At a rate of 0.2 a request comes before whatever arrives five seconds later. That is five prompts, and one."""
    assert steps_waited(policy, 0.2) <= 6


@pytest.mark.parametrize("policy", STARVING)
def test_without_ageing_a_policy_may_starve_a_request(policy: str) -> None:
    assert steps_waited(policy, 0.0) == NUM_STEPS


def test_a_request_is_preempted_only_so_often_and_not_at_once_again() -> None:
    rules = PriorityRules(is_enabled=True, preemption_threshold=0, preemption_cooldown_s=3.0, max_preemptions=2)
    node = PrefillNode(slots=1, chunk=4, rules=rules)
    weak = node.submit("weak", 200, 0)
    node.step()
    preempted_at = []
    for number in range(30):
        if number % 2 == 0:
            node.submit(f"urgent {number}", 4, 1)
        before = weak.num_preempted
        node.step()
        preempted_at += [node.now] * (weak.num_preempted - before)
    assert len(preempted_at) == 2  # afterwards it keeps its slot to its end
    assert preempted_at[1] - preempted_at[0] >= 1 + 3  # a step of the other prompt, and the cooldown
