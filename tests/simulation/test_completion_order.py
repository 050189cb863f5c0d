"""Swapping two priorities swaps the order in which two otherwise equal requests end, at each point where they wait.

The requests differ only in their priorities, and ``a`` arrives first, so with equal priorities it ends first. Since the
more urgent request ends first whichever it is, the priorities decide. Each test runs with high values first and with
low values first, which the gateway negates.
"""

import pytest
from support.scheduling.single_nodes import DecodeNode, PrefillNode
from support.simulation.simulated_service import NodeLimits, SimulatedService

from common.config.scheduling import SchedulingOptions
from common.sampling_params import SamplingParams
from decode_node.request_state import Event
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.input.generate_request import GenerateRequest

Both = tuple[int, int]


def travelling(said: Both, *, low_first: bool = False) -> Both:
    """The priorities that nodes receive for those that the clients of a and b name."""
    options = SchedulingOptions(enable_priority_scheduling=True, schedule_low_priority_values_first=low_first)
    request = GenerateRequest("r", "r", (1,), SamplingParams(max_new_tokens=1))
    a, b = (PriorityResolver(options).assign([request], value, None)[0].priority for value in said)
    return a, b


#: Priorities of a and b, and the order in which they end.
CASES = [
    pytest.param(travelling((20, 1)), "ab", id="20-1"),
    pytest.param(travelling((1, 20)), "ba", id="1-20"),
    pytest.param(travelling((20, 1), low_first=True), "ba", id="20-1-low-first"),
    pytest.param(travelling((1, 20), low_first=True), "ab", id="1-20-low-first"),
    pytest.param(travelling((7, 7)), "ab", id="7-7"),
]


# ---- the gateway's queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_in_the_gateways_queue(priorities: Both, ends: str) -> None:
    """The nodes run one request at a time, so that only the gateway chooses."""
    service = SimulatedService(
        limits=NodeLimits(max_running=1),
        enable_priority_scheduling=True,
        default_priority_value=0,
        max_dispatch_ahead=0,
    )
    service.submit("busy", range(8), 6)
    for rid, priority in zip("ab", priorities, strict=True):
        service.submit(rid, range(ord(rid), ord(rid) + 8), 6, at=0.001, priority=priority)
    service.run()
    assert "".join(service.ended) == "busy" + ends


# ---- prefill nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_in_the_queue_of_a_prefill_node(priorities: Both, ends: str) -> None:
    node = PrefillNode(slots=1)
    for rid, priority in zip("ab", priorities, strict=True):
        node.submit(rid, 12, priority)
    assert "".join(node.run()) == ends


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_between_chunks_on_a_prefill_node(priorities: Both, ends: str) -> None:
    """a has computed a chunk when b arrives; both have slots and pages, so that only the next chunks are contended."""
    node = PrefillNode(slots=2)
    first, second = priorities
    node.submit("a", 64, first)
    assert node.step() == [("a", 8)]
    node.submit("b", 64, second)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_for_a_slot_of_a_prefill_node(priorities: Both, ends: str) -> None:
    node = PrefillNode(slots=1)
    first, second = priorities
    node.submit("a", 32, first)
    node.step()
    node.submit("b", 32, second)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == (ends == "ba")


# ---- decode nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_for_grants_of_pages(priorities: Both, ends: str) -> None:
    """There are rows for both and pages for one."""
    node = DecodeNode(num_pages=5, slots=4)
    for rid, priority in zip("ab", priorities, strict=True):
        node.submit(rid, 12, priority)
    assert node.grant() == [ends[0]]
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["retractions"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_which_received_prompt_joins_the_batch(priorities: Both, ends: str) -> None:
    """Both prompts have arrived when the only row becomes free."""
    node = DecodeNode(slots=1)
    node.run_in("busy", 8, 50, new=3)
    for rid, priority in zip("ab", priorities, strict=True):
        request = node.submit(rid, 8, priority)
        node.scheduler._reservations.reserve(request, spare_tokens=0)
        node.table.move(request, Event.GRANT)
    node.receive("a", "b")
    assert "".join(node.run()) == "busy" + ends
    assert node.scheduler.totals()["pauses"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_for_a_row_of_the_running_batch(priorities: Both, ends: str) -> None:
    """a runs when b becomes ready: a more urgent b pauses a; a less urgent b waits."""
    node = DecodeNode(slots=1)
    first, second = priorities
    node.run_in("a", 8, first, new=20)
    node.submit("b", 8, second, new=20)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["pauses"] == (ends == "ba")


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_the_order_inside_a_step(priorities: Both, ends: str) -> None:
    """a got its row first; both sample their last token in the same step."""
    node = DecodeNode(slots=2)
    node.run_in("a", 8, priorities[0], new=5)
    node.run_in("b", 8, priorities[1], new=4)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["pauses"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_between_chunks_on_a_decode_node(priorities: Both, ends: str) -> None:
    node = DecodeNode(slots=2)
    first, second = priorities
    node.submit("a", 64, first, new=1, is_local=True)
    node.step()
    node.submit("b", 64, second, new=1, is_local=True)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == 0


@pytest.mark.parametrize(("priorities", "ends"), CASES)
def test_priority_decides_whether_pages_go_to_a_new_request(priorities: Both, ends: str) -> None:
    """a holds pages that b needs: a is retracted for a more urgent b; a less urgent b waits."""
    node = DecodeNode(num_pages=8)
    first, second = priorities
    node.run_in("a", 16, first, new=8)
    node.submit("b", 16, second, new=8)
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["retractions"] == (ends == "ba")


@pytest.mark.parametrize(("priorities", "ends"), CASES[:4])
def test_priority_decides_when_the_batch_outgrows_the_pool(priorities: Both, ends: str) -> None:
    """Both run and one must be retracted, which then ends last."""
    node = DecodeNode(num_pages=10)
    for rid, priority in zip("ab", priorities, strict=True):
        node.submit(rid, 8, priority, new=24)
    node.grant()
    node.receive("a", "b")
    while not node.table.retracted:
        node.step()
    assert [key[0] for key in node.table.retracted] == [ends[1]]
    assert "".join(node.run()) == ends
    assert node.scheduler.totals()["preemptions"] == 0
