"""Requests whose clients are slow to read: they give up slot and, if needed, pages, and go on with the same tokens."""

import pytest
from support.scheduling.single_nodes import DecodeNode as Node

from common.config.scheduling import PriorityRules
from decode_node.request_state import State

OFF = PriorityRules()


def hold(node: Node, *rids: str) -> None:
    for rid in rids:
        node.scheduler.set_paused((rid, 0), is_paused=True)


def let_go(node: Node, *rids: str) -> None:
    for rid in rids:
        node.scheduler.set_paused((rid, 0), is_paused=False)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_held_request_gives_its_slot_to_others_and_keeps_its_pages(is_local: bool) -> None:
    node = Node(slots=1, rules=OFF)
    slow = node.submit("slow", 8, new=20, is_local=is_local)
    node.grant()
    if not is_local:
        node.receive("slow")
    node.step()
    node.step()
    hold(node, "slow")
    node.submit("quick", 8, new=3)
    node.grant()
    node.receive("quick")
    assert node.step() == ["quick"]
    assert node.state("slow") is State.PAUSED
    assert slow.pages
    before = len(slow.output)
    while node.step():
        pass
    assert node.done == ["quick"]
    assert len(slow.output) == before
    let_go(node, "slow")
    assert node.step() == ["slow"]
    assert node.run() == ["quick", "slow"]
    assert len(slow.output) == 20
    assert node.scheduler.totals()["retractions"] == 0


def test_a_request_that_is_held_before_it_runs_gets_no_slot() -> None:
    node = Node(slots=1, rules=OFF)
    node.submit("slow", 8, new=3)
    node.submit("quick", 8, new=3)
    node.grant()
    node.receive("slow")
    hold(node, "slow")
    node.grant()
    node.receive("quick")
    assert node.step() == ["quick"]
    assert node.state("slow") is State.READY
    let_go(node, "slow")
    assert node.run() == ["quick", "slow"]


def test_held_requests_do_not_count_as_waiting_for_slots() -> None:
    node = Node(slots=2, rules=OFF)
    for rid in ("slow", "slower"):
        node.submit(rid, 8, new=3)
    node.grant()
    hold(node, "slow", "slower")
    node.receive("slow", "slower")
    node.submit("quick", 8, new=3)
    assert node.grant() == ["quick"]


def test_a_held_request_loses_its_pages_to_the_first_in_the_queue() -> None:
    node = Node(num_pages=8, rules=OFF)
    slow = node.run_in("slow", 20, new=12)
    hold(node, "slow")
    node.step()
    node.submit("quick", 20, new=4)
    node.submit("next", 20, new=4)
    node.grant()
    assert node.granted == ["slow"]
    node.step()
    assert node.granted == ["slow", "quick"]
    assert node.state("slow") is State.RETRACTED
    node.run_until_idle()
    assert node.done == ["quick", "next"]
    assert node.state("slow") is State.RETRACTED, "it asks for no pages while it is held"
    let_go(node, "slow")
    assert node.run() == ["quick", "next", "slow"]
    assert len(slow.output) == 12


@pytest.mark.parametrize("resume_tokens", [None, 0], ids=["here", "on the prefill node"])
def test_a_retracted_request_that_fills_the_pool_takes_the_pages_of_a_held_one(resume_tokens: int | None) -> None:
    node = Node(num_pages=8, rules=OFF, resume_tokens=resume_tokens)
    node.connected.add("prefill")
    full = node.run_in("full", 20, new=13)
    while full.num_tokens < 32:
        node.step()
    hold(node, "full")
    node.submit("slow", 8, new=9)
    node.step()
    assert node.state("full") is State.RETRACTED
    node.receive("slow")
    node.step()
    hold(node, "slow")
    let_go(node, "full")
    node.step()
    assert node.state("slow") is State.RETRACTED
    node.run_until_idle()
    assert node.done == ["full"]


def test_a_local_prompt_takes_the_page_of_a_held_one_that_it_must_compute_again() -> None:
    """All of its pages are cached, but it needs the logits of the last token."""
    node = Node(num_pages=10, chunk=64, rules=OFF)
    node.submit("held", 32, new=12, is_local=True, first=0)
    node.step()
    node.step()
    hold(node, "held")
    node.step()
    node.submit("same", 32, new=2, is_local=True, first=0)
    node.run_until_idle()
    assert node.done == ["same"]
    assert node.state("held") is State.RETRACTED


@pytest.mark.parametrize("num_pages", range(7, 12))
def test_a_local_prompt_takes_the_pages_that_its_admission_needs(num_pages: int) -> None:
    node = Node(num_pages=num_pages, chunk=64, rules=OFF)
    for rid in ("held 0", "held 1", "held 2"):
        node.submit(rid, 4, new=6, is_local=True)
        node.step()
    node.step()
    node.step()
    hold(node, "held 0", "held 1", "held 2")
    node.step()
    node.submit("quick", 3, new=2, is_local=True)
    node.run_until_idle()
    assert node.done == ["quick"]


def test_a_held_request_keeps_its_pages_if_they_do_not_suffice() -> None:
    node = Node(num_pages=12, rules=OFF)
    node.run_in("running", 24, new=8)
    node.run_in("slow", 8, new=12)
    hold(node, "slow")
    node.submit("large", 32, new=4)
    node.step()
    assert node.state("slow") is State.PAUSED
    let_go(node, "slow")
    assert sorted(node.run()) == ["large", "running", "slow"]


def test_a_held_request_is_retracted_first_if_the_batch_outgrows_the_pool() -> None:
    node = Node(num_pages=9, rules=OFF)
    slow = node.run_in("slow", 12, new=20)
    for _ in range(3):
        node.step()  # it has the longest output, and would be retracted last
    hold(node, "slow")
    quick = node.run_in("quick", 12, new=22)
    node.run_until_idle()
    assert node.done == ["quick"]
    assert len(quick.output) == 22
    assert node.state("slow") is State.RETRACTED
    let_go(node, "slow")
    assert node.run() == ["quick", "slow"]
    assert len(slow.output) == 20


def test_a_lone_held_request_that_is_let_go_goes_on_though_a_more_urgent_one_came_and_went() -> None:
    node = Node(slots=1)
    node.run_in("slow", 8, 0, new=9)
    hold(node, "slow")
    node.run_in("urgent", 8, 9, new=3)
    node.run_until_idle()
    let_go(node, "slow")
    assert node.run() == ["urgent", "slow"]


def test_a_held_request_that_waits_takes_no_pages_from_others() -> None:
    node = Node(num_pages=12)
    node.run_in("running", 24, 0, new=8)
    node.submit("urgent", 32, 20, new=4)
    hold(node, "urgent")
    assert node.step() == ["running"]
    let_go(node, "urgent")
    assert node.step() == []
    assert node.state("running") is State.RETRACTED


@pytest.mark.parametrize("is_local", [False, True])
def test_a_held_request_that_waits_first_keeps_no_pages_and_no_slot_from_others(is_local: bool) -> None:
    node = Node(num_pages=8, slots=1, rules=OFF)
    node.run_in("slow", 20, new=12)
    hold(node, "slow")
    for rid in ("slower", "slowest", "last"):  # more than may be skipped
        node.submit(rid, 20, new=4, is_local=is_local)
        hold(node, rid)
    node.submit("quick", 20, new=4)
    node.run_until_idle()
    assert node.done == ["quick"]
    assert node.state("slow") is State.RETRACTED
    let_go(node, "slow", "slower", "slowest", "last")
    assert sorted(node.run()) == ["last", "quick", "slow", "slower", "slowest"]


def test_a_held_request_does_not_begin_to_be_computed_here() -> None:
    node = Node()
    node.run_in("running", 8, new=9)
    node.submit("slow", 8, 20, new=3, is_local=True)
    hold(node, "slow")
    assert (node.step(), node.chunks) == (["running"], [])
    assert node.state("slow") is State.WAITING
    let_go(node, "slow")
    assert sorted(node.run()) == ["running", "slow"]


def test_a_held_request_can_be_aborted() -> None:
    node = Node(rules=OFF)
    for rid in ("paused", "retracted"):
        node.run_in(rid, 8, new=20)
    hold(node, "paused", "retracted")
    node.step()
    for rid in ("paused", "retracted"):
        node.scheduler.abort((rid, 0))
    node.check()
    assert not node.table.held
    let_go(node, "paused")  # it has ended
