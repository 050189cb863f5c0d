"""A request is scheduled on a node only when its grammar is compiled there; no other request waits for that."""

from dataclasses import replace
from typing import Any

import pytest
from support.cluster.fake_engine import expected_output
from support.cluster.local_cluster import (
    Answer,
    LocalCluster,
    assert_all_pages_are_released,
    lose_gateway,
    prompt_of,
    sampling,
)
from support.simulation.simulated_service import COSTS, SimulatedService

from common.config.scheduling import PriorityRules
from common.errors import ErrorCode
from common.scheduling.grammar_queue import COMPILE_TIMEOUT_S
from common.wire.messages import Reprioritize

PAIRS = pytest.mark.parametrize("pair", [(0, 0), (None, 0)], ids=["both nodes", "decode node alone"])


def bound(max_new: int, grammar: str = "one") -> Any:
    return sampling(max_new, grammar=grammar)


def end(cluster: LocalCluster) -> None:
    """Run to the end; every page is free then and every grammar dropped."""
    cluster.run(2_000)
    cluster.settle()
    assert_all_pages_are_released(cluster)
    assert not any(member.grammars for member in cluster.members)


def assert_exact(answer: Answer, prompt: tuple[int, ...], num_tokens: int) -> None:
    assert answer.error is None
    assert answer.output == expected_output(prompt, num_tokens)


@PAIRS
def test_other_requests_go_on_while_a_grammar_is_compiled(pair: tuple[int | None, int]) -> None:
    cluster = LocalCluster(grammar_ticks=50)
    slow = cluster.submit("slow", prompt_of(20), bound(5), pair=pair)
    others = [cluster.submit(f"r{i}", prompt_of(20, i), sampling(5), pair=pair) for i in range(4)]
    while not all(other.is_over for other in others):
        cluster.step()
    assert not slow.tokens
    assert cluster.wire.num_ticks < 50
    end(cluster)
    assert cluster.wire.num_ticks > 50
    assert_exact(slow, prompt_of(20), 5)
    for i, other in enumerate(others):
        assert_exact(other, prompt_of(20, i), 5)


def test_requests_with_one_grammar_share_its_compilation_and_later_ones_do_not_wait() -> None:
    cluster = LocalCluster(grammar_ticks=30)
    cluster.submit("first", prompt_of(8), bound(40), pair=(None, 0))
    cluster.settle(20)
    second = cluster.submit("second", prompt_of(8, 1), bound(1), pair=(None, 0))
    cluster.settle(15)
    assert second.is_over, "it began with the first, after 30 ticks"
    third = cluster.submit("third", prompt_of(8, 2), bound(1), pair=(None, 0))
    cluster.settle(5)
    assert third.is_over
    end(cluster)


@PAIRS
def test_a_grammar_that_cannot_be_compiled_ends_its_requests_alone(pair: tuple[int | None, int]) -> None:
    cluster = LocalCluster(grammar_ticks=5)
    bad = [cluster.submit(f"bad {i}", prompt_of(20, i), bound(5, "bad"), pair=pair) for i in range(2)]
    good = cluster.submit("good", prompt_of(20), bound(5), pair=pair)
    end(cluster)
    for answer in bad:
        assert answer.error is not None
        assert (answer.error.code, answer.error.message) == (ErrorCode.INVALID_REQUEST, "bad cannot be compiled")
        assert not answer.tokens
    assert_exact(good, prompt_of(20), 5)


@PAIRS
def test_a_grammar_that_takes_too_long_ends_its_request_alone(pair: tuple[int | None, int]) -> None:
    cluster = LocalCluster(grammar_ticks=1_000_000)
    late = cluster.submit("late", prompt_of(20), bound(5), pair=pair)
    free = cluster.submit("free", prompt_of(20), sampling(5), pair=pair)
    cluster.settle(20)
    assert free.is_over and not late.is_over
    cluster.clock.advance(COMPILE_TIMEOUT_S)
    end(cluster)
    assert late.error is not None
    assert late.error.code is ErrorCode.INVALID_REQUEST
    assert late.error.message == "the grammar was not compiled within 10 s; simplify it"


@pytest.mark.parametrize("why", ["abort", "deadline", "gateway", "peer", "stop"])
def test_a_request_may_end_while_its_grammar_is_compiled(why: str) -> None:
    cluster = LocalCluster(grammar_ticks=100)
    answer = cluster.submit("r", prompt_of(20), bound(5), timeout_s=1.0)
    cluster.settle(5)
    assert [load.num_waiting for load in (member.role.load() for member in cluster.members)] == [1, 1]
    now = cluster.clock.now()
    if why == "abort":
        answer.finish = "aborted"
        cluster.abort("r")
    elif why == "deadline":
        cluster.clock.advance(8.0)
    elif why == "gateway":
        answer.finish = "lost"
        for member in cluster.members:
            lose_gateway(member.role, now)
    elif why == "peer":
        cluster.kill(cluster.prefill[0])
    else:
        for member in cluster.members:
            member.role.stop("the node is stopping", now)
    end(cluster)
    if why == "deadline":
        assert answer.error is not None and answer.error.code is ErrorCode.DEADLINE_EXCEEDED
    if why == "peer":
        assert answer.error is not None and answer.error.code is ErrorCode.NODE_LOST


def test_requests_that_wait_for_grammars_count_against_the_queue() -> None:
    cluster = LocalCluster(grammar_ticks=20, max_queued=2)
    answers = [cluster.submit(f"r{i}", prompt_of(20, i), bound(5)) for i in range(3)]
    end(cluster)
    assert [answer.error and answer.error.code for answer in answers] == [None, None, ErrorCode.QUEUE_FULL]


def test_a_retracted_request_never_waits_for_its_grammar_again() -> None:
    """The decode pool holds 32 tokens; each request needs 8 + 12. A grammar takes more ticks than all of the rest."""
    cluster = LocalCluster(page_size=4, decode_pages=8, reserved_tokens=0, resume_tokens=0, grammar_ticks=300)
    answers = [cluster.submit(f"r{i}", prompt_of(8, i), bound(12, f"grammar {i}")) for i in range(2)]
    cluster.run(600)
    assert cluster.counters(cluster.decode[0])["retractions"] > 0
    assert cluster.wire.num_ticks < 600
    for i, answer in enumerate(answers):
        assert_exact(answer, prompt_of(8, i), 12)
    end(cluster)


def test_an_urgent_request_preempts_only_when_its_grammar_is_compiled() -> None:
    """The decode pool holds 32 tokens, of which the first request needs 26; the urgent one needs 18."""
    rules = PriorityRules(is_enabled=True, preemption_threshold=0)
    cluster = LocalCluster(page_size=4, decode_pages=8, reserved_tokens=0, resume_tokens=0, rules=rules)
    weak = cluster.submit("weak", prompt_of(20), sampling(6))
    cluster.run_until("weak", 2)
    cluster.grammar_ticks = 2
    urgent = cluster.submit("urgent", prompt_of(16, 1), bound(2), priority=1)
    cluster.tell(cluster.decode[0], Reprioritize("urgent", 0, 9))
    cluster.step()
    assert cluster.counters(cluster.decode[0])["preemptions"] == 0
    end(cluster)
    assert cluster.counters(cluster.decode[0])["preemptions"] == 1
    assert_exact(weak, prompt_of(20), 6)
    assert_exact(urgent, prompt_of(16, 1), 2)


def test_a_simulated_node_takes_its_time_to_compile() -> None:
    """As ``test_times_of_a_lone_request_are_the_sum_of_its_parts``, 500 ms later; the other request is not later."""
    service = SimulatedService(costs=replace(COSTS, grammar_s=0.5))
    service.submit("bound", tuple(range(8)), 3, at=5.0, grammar="one")
    service.submit("free", tuple(range(8)), 3, at=5.0)
    service.run()
    assert service.ended["free"].stamps_s == pytest.approx([5.020, 5.035, 5.046])
    assert service.ended["bound"].stamps_s[0] > 5.5
    service.assert_exact_tokens("bound")
    service.assert_all_is_released()
