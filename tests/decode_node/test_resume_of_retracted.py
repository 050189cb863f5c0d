"""A retracted request comes back from the cache, by computing here, or from a prefill node."""

import pytest
from support.scheduling.single_nodes import PAGE
from support.scheduling.single_nodes import DecodeNode as Node

from common.cache.page_allocator import Owner
from common.request import Request
from decode_node.request_state import State


def lose_all(node: Node, rid: str) -> Request:
    """Retract a running request, and its KV goes from the cache too."""
    request = node.table.running[rid, 0]
    node.scheduler._preemptor.retract(request, node.now, "for the test")
    node.cache.clear()
    return request


def test_a_long_uncached_part_comes_again_from_the_prefill_node() -> None:
    node = Node(resume_tokens=30)  # it lacks 31
    node.connected.add("prefill")
    request = node.run_in("a", 30, new=9)
    lose_all(node, "a")
    num_output = len(request.output)
    assert node.step() == [], "it is not computed here"
    assert node.grant() == ["a"]
    assert node.scheduler._reservations.by_key[request.key].num_pages == -(-(30 + num_output - 1) // PAGE)
    node.receive("a")
    assert len(request.output) == num_output, "the token sampled there is not a new one"
    assert request.num_computed == request.num_tokens - 1
    assert node.run() == ["a"]
    assert len(request.output) == 9


@pytest.mark.parametrize(("resume_tokens", "can_resume"), [(None, True), (31, True), (8, False)])
def test_a_short_part_or_one_without_a_prefill_node_is_computed_here(
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


def test_a_cached_part_is_not_fetched_again() -> None:
    node = Node(resume_tokens=8)
    node.connected.add("prefill")
    request = node.run_in("a", 30, new=9)
    node.scheduler._preemptor.retract(request, node.now, "for the test")
    assert node.grant() == []
    node.step()
    assert node.state("a") in (State.EXTENDING, State.RUNNING)


def test_a_part_that_the_prefill_node_does_not_compute_is_computed_here() -> None:
    node = Node(resume_tokens=8)
    node.connected.add("prefill")
    request = node.run_in("a", 30, new=9)
    lose_all(node, "a")
    node.grant()
    reserved = node.scheduler._reservations.by_key[request.key].pages
    node.scheduler.not_received(("a", 0), node.now)
    node.allocator.free(reserved, Owner.GRANT)  # as the receiver does after the fence
    node.check()
    assert node.grant() == []
    assert node.run() == ["a"]
    assert len(request.output) == 9
