"""Reversing two priorities reverses the order in which two like requests end: at each place where they meet, alone.

Everywhere the two are alike but for their priorities, and the one called ``a`` comes first. So with equal priorities it
ends first; and since the more urgent one ends first whichever of the two it is, it is the priorities that decide. Each
test runs with high values first and with low ones, turned round by the gateway's own rule for what clients say.
"""

import pytest
from support.lone_nodes import DecodeNode, PrefillNode
from support.simulated import Limits, Service

from common.config.scheduling import SchedulingOptions
from decode_node.request_state import Event
from gateway.requests.priority import PriorityResolver

Both = tuple[int, int]


def travelling(said: Both, *, low_first: bool = False) -> Both:
    """What nodes hear of what the clients of a and b say."""
    options = SchedulingOptions(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
    claims = PriorityResolver(options)
    return claims.resolve(said[0], None).priority, claims.resolve(said[1], None).priority


#: Priorities of a and of b, and who ends first.
CASES = [
    pytest.param(travelling((20, 1)), "ab", id="20-1"),
    pytest.param(travelling((1, 20)), "ba", id="1-20"),
    pytest.param(travelling((20, 1), low_first=True), "ba", id="20-1-low-first"),
    pytest.param(travelling((1, 20), low_first=True), "ab", id="1-20-low-first"),
    pytest.param(travelling((7, 7)), "ab", id="7-7"),
]


# ---- the gateway's queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_in_the_gateways_queue(priorities: Both, ends: str) -> None:
    """The nodes have one request at a time, so that nothing but the gateway can choose."""
    service = Service(
        limits=Limits(max_running=1), enable_priority_scheduling=True, default_priority_value=0, max_dispatch_ahead=0
    )
    service.ask("busy", range(8), 6)
    for rid, priority in zip("ab", priorities, strict=True):
        service.ask(rid, range(ord(rid), ord(rid) + 8), 6, at=0.001, priority=priority)
    service.run()
    assert "".join(service.ended) == "busy" + ends


# ---- prefill nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_in_the_queue_of_a_prefill_node(priorities: Both, ends: str) -> None:
    node = PrefillNode(slots=1)
    for rid, priority in zip("ab", priorities, strict=True):
        node.submit(rid, 12, priority)
    assert "".join(node.run()) == ends


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_between_the_chunks_of_a_prefill_node(priorities: Both, ends: str) -> None:
    """a has computed a chunk when b comes; both have slots and pages, so that only the next chunks are at stake."""
    node = PrefillNode(slots=2)
    first, second = priorities
    node.submit("a", 64, first)
    assert node.step() == [("a", 8)]
    node.submit("b", 64, second)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_for_the_slot_of_a_prefill_node(priorities: Both, ends: str) -> None:
    node = PrefillNode(slots=1)
    first, second = priorities
    node.submit("a", 32, first)
    node.step()
    node.submit("b", 32, second)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == (ends == "ba")


# ---- decode nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_for_grants_of_pages(priorities: Both, ends: str) -> None:
    """There are rows for both, and pages for one."""
    node = DecodeNode(num_pages=5, slots=4)
    for rid, priority in zip("ab", priorities, strict=True):
        node.submit(rid, 12, priority)
    assert node.grant() == [ends[0]]
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["retractions"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_when_received_prompts_are_admitted_to_the_batch(priorities: Both, ends: str) -> None:
    """Both are here with all their pages when the only row comes free."""
    node = DecodeNode(slots=1)
    node.run_in("busy", 8, 50, new=3)
    for rid, priority in zip("ab", priorities, strict=True):
        request = node.submit(rid, 8, priority)
        node.scheduler._reservations.reserve(request, spare_tokens=0)
        node.places.move(request, Event.GRANT)
    node.receive("a", "b")
    assert "".join(node.run()) == "busy" + ends
    assert node.scheduler.totals()["pauses"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_for_a_row_of_the_running_batch(priorities: Both, ends: str) -> None:
    """a runs when b is ready: with b more urgent a is paused; with a more urgent b waits."""
    node = DecodeNode(slots=1)
    first, second = priorities
    node.run_in("a", 8, first, new=20)
    node.submit("b", 8, second, new=20)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["pauses"] == (ends == "ba")


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_inside_a_step_of_the_running_batch(priorities: Both, ends: str) -> None:
    """a got its row first; both have their last tokens from one step."""
    node = DecodeNode(slots=2)
    node.run_in("a", 8, priorities[0], new=5)
    node.run_in("b", 8, priorities[1], new=4)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["pauses"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_between_chunks_of_prompts_computed_on_a_decode_node(priorities: Both, ends: str) -> None:
    node = DecodeNode(slots=2)
    first, second = priorities
    node.submit("a", 64, first, new=1, is_local=True)
    node.step()
    node.submit("b", 64, second, new=1, is_local=True)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_when_pages_go_to_a_newcomer(priorities: Both, ends: str) -> None:
    """a holds pages that b needs: with b more urgent a is retracted; with a more urgent b waits."""
    node = DecodeNode(num_pages=8)
    first, second = priorities
    node.run_in("a", 16, first, new=8)
    node.submit("b", 16, second, new=8)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["retractions"] == (ends == "ba")


@pytest.mark.parametrize(("priorities", "ends"), CASES[:4])
def test_when_the_batch_outgrows_the_pool(priorities: Both, ends: str) -> None:
    """Both run, and one has to give way: who is retracted ends last."""
    node = DecodeNode(num_pages=10)
    for rid, priority in zip("ab", priorities, strict=True):
        node.submit(rid, 8, priority, new=24)
    node.grant()
    node.receive("a", "b")
    while not node.places.retracted:
        node.step()
    assert [key[0] for key in node.places.retracted] == [ends[1]]
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == 0
