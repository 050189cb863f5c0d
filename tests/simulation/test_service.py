"""A whole service in virtual time: times computed by hand, then random loads, faults and policies."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.simulation.simulated_service import NodeLimits, SimulatedService, prompt_of

from common.config.scheduling import POLICIES
from common.config.shared import Role
from common.errors import ErrorCode


def test_times_of_a_lone_request_are_the_sum_of_its_parts() -> None:
    service = SimulatedService()
    service.submit("a", prompt_of(8), 3, at=5.0)
    service.run()
    answer = service.ended["a"]
    # The nodes get the request at 5.001. Prefill takes 10 + 8 ms for 8 tokens; the gateway gets the first token 1 ms
    # later. By then the grant has arrived, so both pages (1 ms each) are sent at once: they arrive at 5.021, the
    # writer is told at 5.022, and the confirmation arrives at 5.023. Two steps of one row follow, 11 ms each.
    assert answer.stamps_s == pytest.approx([5.020, 5.035, 5.046])
    assert answer.ended_at == pytest.approx(5.046)
    assert answer.timings["prefill_s"] == pytest.approx(0.018)
    service.assert_exact_tokens("a")
    service.assert_all_is_released()


def test_two_outputs_share_a_batch() -> None:
    service = SimulatedService()
    for number in range(2):
        service.submit(f"r{number}", prompt_of(4, number), 2)
    service.run()
    # The first request is alone in its step (10 + 4 ms from 1 ms on), because it arrived a moment earlier.
    first, second = (service.ended[f"r{number}"] for number in range(2))
    assert first.stamps_s[0] == pytest.approx(0.016)
    assert second.stamps_s[0] == pytest.approx(0.030)
    work = service.cluster.of("decode")[0].work
    assert (work["steps"], work["rows"]) == (2, 2)
    service.assert_all_is_released()


def test_a_run_is_deterministic() -> None:
    def history() -> list[tuple[str, list[float], list[int]]]:
        service = SimulatedService(
            2, 2, limits=NodeLimits(prefill_pages=20, decode_pages=14, max_running=3, chunk_tokens=8)
        )
        for number in range(30):
            service.submit(f"r{number}", prompt_of(1 + number * 7 % 40, number % 3), 1 + number % 9, at=number * 0.013)
        service.run(is_checked=False)
        return [(rid, answer.stamps_s, answer.ids) for rid, answer in service.ended.items()]

    assert history() == history()


def test_a_deadline_ends_a_request_at_its_instant() -> None:
    service = SimulatedService()
    service.submit("late", prompt_of(8), 200, timeout_s=2.0)
    service.run()
    answer = service.ended["late"]
    assert answer.error is not None
    assert answer.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert answer.ended_at == pytest.approx(2.0)
    service.assert_exact_tokens("late")
    service.assert_all_is_released()


def test_requests_beyond_the_queue_are_refused_at_once() -> None:
    service = SimulatedService(limits=NodeLimits(max_running=2), max_queued_requests=3)
    for number in range(8):
        service.submit(f"r{number}", prompt_of(8), 5)
    service.run()
    assert [error.code for error in service.refused.values()] == [ErrorCode.QUEUE_FULL] * 3
    assert len(service.ended) == 5
    service.assert_all_is_released()


def test_decode_nodes_compute_prompts_without_a_prefill_node() -> None:
    service = SimulatedService(0, 1, local_prefill="always")
    for number in range(6):
        service.submit(f"r{number}", prompt_of(20, number), 6)
    service.run()
    assert len(service.ended) == 6
    for rid in service.ended:
        service.assert_exact_tokens(rid)
    service.assert_all_is_released()


def test_pages_are_transmitted_one_after_the_other() -> None:
    service = SimulatedService(limits=NodeLimits(prefill_pages=200, decode_pages=200, chunk_tokens=None))
    for number in range(2):
        service.submit(f"r{number}", prompt_of(400, number), 2)
    service.run()
    first, second = (service.ended[f"r{number}"].stamps_s for number in range(2))
    # Each prompt has 100 pages of 1 ms. Those of the first are computed at 411 ms and sent at 511 ms; of the second,
    # 821 and 921.
    assert first[1] == pytest.approx(0.001 + 0.410 + 0.100 + 0.002 + 0.011 + 0.001, abs=1e-3)
    assert second[1] - first[1] == pytest.approx(0.410, abs=1e-3)


def test_a_prompt_with_granted_pages_overtakes_one_that_does_not_fit() -> None:
    """Found by the test below: A (8 of 11 pages) is computed and waits for the only row of its decode node, kept for
    B. B waits behind C, which comes first because of its longer output and does not fit beside A.
    """
    service = SimulatedService(
        1, 2, limits=NodeLimits(11, 14, chunk_tokens=8, max_running=1), schedule_policy="lof", max_skip_ahead=0,
        disable_radix_cache=True,
    )  # fmt: skip
    for number in range(10):
        is_long = number in (5, 9)  # A and C; B is the second short request
        length = {5: 29, 9: 13}.get(number, 1)
        service.submit(f"r{number}", prompt_of(length, 0), 2 if is_long else 1)
    service.run()
    assert len(service.ended) == 10
    for rid in service.ended:
        service.assert_exact_tokens(rid)
    service.assert_all_is_released()


# ---- random services ------------------------------------------------------------------------------------------------


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Random options of nodes and gateway that affect the order."""
    found: dict[str, Any] = {
        "schedule_policy": draw(st.sampled_from(POLICIES)),
        "max_skip_ahead": draw(st.sampled_from([0, 1, 8])),
        "stream_interval": draw(st.sampled_from([1, 1, 3])),
        "disable_radix_cache": draw(st.sampled_from([False, False, True])),
        "max_prefill_tokens": draw(st.sampled_from([16_384, 16_384, 1])),
        "local_prefill": draw(st.sampled_from(["never", "never", "auto", "always"])),
    }
    if found["local_prefill"] == "auto":
        found["local_prefill_threshold"] = 12
    if draw(st.booleans()):
        found |= {
            "enable_priority_scheduling": True,
            "default_priority_value": 0,
            "priority_scheduling_preemption_threshold": draw(st.sampled_from([0, 3, 10])),
            "priority_aging_per_second": draw(st.sampled_from([0.0, 10.0]))
            if found["schedule_policy"] == "fcfs"
            else 0.0,
        }
    if draw(st.sampled_from([False, False, True])):
        found["priority_classes"] = ("high:4", "low:1")
    return found


REQUEST = st.fixed_dictionaries(
    {
        "first": st.integers(0, 2),  # prompts with the same number share a prefix
        "length": st.integers(1, 40),
        "max_new": st.integers(1, 14),
        "at": st.floats(0.0, 0.5),
        "timeout_s": st.sampled_from([600.0, 600.0, 600.0, 0.3]),
        "priority": st.sampled_from([0, 0, 4, 20]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "is_high": st.booleans(),
    }
)
FAULT = st.tuples(st.floats(0.0, 0.6), st.sampled_from(["prefill", "decode", "abort"]), st.integers(0, 39))


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=24),
    faults=st.lists(FAULT, max_size=4),
    nodes=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pools=st.tuples(st.integers(11, 30), st.integers(14, 30)),
    max_running=st.integers(1, 4),
    given_options=options(),
)
def test_every_request_ends_and_every_page_is_released(
    requests: list[dict[str, Any]],
    faults: list[tuple[float, str, int]],
    nodes: tuple[int, int],
    pools: tuple[int, int],
    max_running: int,
    given_options: dict[str, Any],
) -> None:
    """``run`` also fails on a deadlock: when requests wait and only deadlines are pending."""
    num_prefill = 0 if given_options["local_prefill"] == "always" else nodes[0]
    limits = NodeLimits(*pools, chunk_tokens=8, max_running=max_running)
    service = SimulatedService(num_prefill, nodes[1], limits=limits, **given_options)
    for number, request in enumerate(requests):
        service.submit(
            f"r{number}",
            prompt_of(request["length"], request["first"]),
            request["max_new"],
            at=request["at"],
            timeout_s=request["timeout_s"],
            priority=request["priority"],
            tenant=request["tenant"],
            priority_class=("high" if request["is_high"] else "low") if "priority_classes" in given_options else "",
        )
    for at, what, number in faults:
        service.events.at(at, strike, service, what, number)
    service.run()
    for rid in service.ended:
        service.assert_exact_tokens(rid)
    service.assert_all_is_released()


def strike(service: SimulatedService, what: str, number: int) -> None:
    """Abort a request, or kill a node and start another."""
    if what == "abort":
        service.cluster.gateway.abort(f"r{number}")
        return
    role: Role = "prefill" if what == "prefill" else "decode"
    nodes = service.cluster.of(role)
    if nodes:
        service.cluster.kill(nodes[number % len(nodes)])
        service.cluster.start(role)
