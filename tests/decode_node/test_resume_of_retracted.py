"""A retracted request resumes from the cache, by local computation, or from a prefill node."""

import pytest
from support.cluster.fake_engine import expected_output
from support.cluster.local_cluster import LocalCluster, assert_all_pages_are_released, prompt_of, sampling
from support.scheduling.single_nodes import PAGE
from support.scheduling.single_nodes import DecodeNode as Node

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.config.shared import SMALL_MODEL
from common.request import Request
from common.wire.messages import RESUMED, Grant, Message, PrefillNodes
from decode_node.request_state import State


def lose_all(node: Node, rid: str) -> Request:
    """Retract a running request and evict its KV from the cache."""
    request = node.table.running[rid, 0]
    node.scheduler._preemptor.retract(request, node.now, "for the test")
    node.cache.clear()
    return request


def test_a_long_uncached_part_is_fetched_from_the_prefill_node() -> None:
    node = Node(resume_tokens=30)  # 31 tokens are missing
    node.connected.add("prefill")
    request = node.run_in("a", 30, new=9)
    lose_all(node, "a")
    num_output = len(request.output)
    assert node.step() == [], "the missing part was computed locally"
    assert node.grant() == ["a"]
    assert node.scheduler._reservations.by_key[request.key].num_pages == -(-(30 + num_output - 1) // PAGE)
    node.receive("a")
    assert len(request.output) == num_output, "the token sampled by the prefill node was counted as new"
    assert request.num_computed == request.num_tokens - 1
    assert node.run() == ["a"]
    assert len(request.output) == 9


def test_no_request_loses_pages_to_one_whose_transfer_just_fits() -> None:
    node = Node(num_pages=8, resume_tokens=8)
    node.connected.add("prefill")
    request = node.run_in("a", 16, new=20)
    while request.num_tokens < 24:
        node.step()
    node.run_in("another", 4, new=20)  # it has two pages
    lose_all(node, "a")
    assert request.num_decodable == 6 * PAGE
    assert not node.scheduler._queue.lacks_pages(request)
    assert node.grant() == ["a"]


@pytest.mark.parametrize(("resume_tokens", "can_resume"), [(None, True), (31, True), (8, False)])
def test_a_short_part_or_one_without_a_prefill_node_is_computed_locally(
    resume_tokens: int | None, can_resume: bool
) -> None:
    node = Node(resume_tokens=resume_tokens)
    node.connected |= {"prefill"} if can_resume else set()
    node.run_in("a", 30, new=9)
    lose_all(node, "a")
    assert node.grant() == []
    assert node.step() == []
    assert node.state("a") is State.EXTENDING
    assert node.run() == ["a"]


def test_pages_are_granted_once_the_prefill_node_is_connected_again() -> None:
    """Nothing else changes between the attempt without a connection and the one with it."""
    node = Node(num_pages=8, slots=4, rules=PriorityRules(), resume_tokens=0)
    node.connected.add("prefill")
    for rid in ("a", "b"):
        node.submit(rid, 12, new=20)
    node.grant()
    node.receive("a", "b")
    while not node.table.retracted:
        node.step()
    ((retracted, _),) = node.table.retracted
    node.submit("waiting", 20, new=4)
    node.grant()
    node.connected.clear()
    ((running, _),) = node.table.running
    node.scheduler.abort((running, 0))
    assert node.grant() == []
    node.connected.add("prefill")
    assert node.grant() == [retracted]


def test_a_cached_part_is_not_fetched_again() -> None:
    node = Node(resume_tokens=8)
    node.connected.add("prefill")
    request = node.run_in("a", 30, new=9)
    node.scheduler._preemptor.retract(request, node.now, "for the test")
    assert node.grant() == []
    node.step()
    assert node.state("a") in (State.EXTENDING, State.RUNNING)


def test_a_part_refused_by_the_prefill_node_is_computed_locally() -> None:
    node = Node(resume_tokens=8)
    node.connected.add("prefill")
    request = node.run_in("a", 30, new=9)
    lose_all(node, "a")
    node.grant()
    reserved = node.scheduler._reservations.by_key[request.key].pages
    node.scheduler.not_received(("a", 0), node.now)
    node.allocator.free(reserved, Owner.GRANT)  # the receiver frees them after the fence
    node.check()
    assert node.grant() == []
    assert node.run() == ["a"]
    assert len(request.output) == 9


@pytest.mark.parametrize("is_cached", [True, False])
def test_prompt_logprobs_are_whole_although_the_prompt_was_retracted_half_computed(is_cached: bool) -> None:
    """A regression: those of the first chunks came twice."""
    cluster = LocalCluster(
        SMALL_MODEL, chunk_tokens=8, max_running=1, is_cached=is_cached,
        rules=PriorityRules(is_enabled=True, preemption_threshold=0),
    )  # fmt: skip
    params = sampling(2, prompt_logprobs_from=1, logprobs=2)
    undisturbed = cluster.submit("a", prompt_of(25), params, pair=(None, 0))
    cluster.run()
    answer = cluster.submit("b", prompt_of(25), params, pair=(None, 0))
    cluster.step()
    cluster.submit("urgent", prompt_of(9, 1), sampling(2), pair=(None, 0), priority=9)
    cluster.run()
    assert cluster.counters(cluster.decode[0])["retractions"] == 1
    assert len(answer.prompt_logprobs) == 24
    assert answer.prompt_logprobs == undisturbed.prompt_logprobs
    cluster.close()


def test_a_prefill_node_forgets_what_a_connection_that_broke_before_the_grant_had_asked_for() -> None:
    cluster = LocalCluster(page_size=4, decode_pages=8, reserved_tokens=0, resume_tokens=0)
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    answers = [cluster.submit(rid, prompt_of(8, first), sampling(20)) for first, rid in enumerate("ab")]
    hear, lost = prefill.role.on_peer, []

    def on_peer(peer: str, message: Message, now: float) -> None:
        if isinstance(message, Grant) and message.attempt >= RESUMED:
            lost.append(message)
        else:
            hear(peer, message, now)

    prefill.role.on_peer = on_peer
    while not lost:
        cluster.step()
    decode.role.on_gateway(PrefillNodes((prefill.peer,)), cluster.clock.now())
    decode.role.peer_lost(prefill.name, cluster.clock.now())  # which the prefill node does not notice
    cluster.clock.advance(1.0)
    cluster.run(300)
    assert [answer.output for answer in answers] == [expected_output(prompt_of(8, first), 20) for first in range(2)]
    cluster.settle()
    assert_all_pages_are_released(cluster)


def test_a_long_request_that_is_resumed_here_shares_steps_with_shorter_ones() -> None:
    node = Node(num_pages=400, chunk=16, resume_tokens=64)
    long = node.run_in("long", 400, new=50)
    node.scheduler._preemptor.retract(long, node.now, "for lack of pages")
    node.cache.clear()
    node.step()
    node.submit("short", 8, new=2, is_local=True)
    node.step()
    assert node.chunks == [("short", 8), ("long", 8)]
