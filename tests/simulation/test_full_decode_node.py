"""A full decode node delays requests, and no timeout of the prefill node ends them meanwhile."""

import pytest
from support.simulation.simulated_service import NodeLimits, SimulatedService, prompt_of

from kv_transfer.send.table import EARLY_LEASE_S
from kv_transfer.send.tombstones import LEASE_S
from kv_transfer.states import RESUME_LEASE_S
from scripts.simulator.costs import Costs

#: A step takes two seconds.
SLOW = Costs(2.0, 0.001, 0.001, 0.0, 0.001, 0.001, 32_000.0)


@pytest.mark.parametrize("lacks", ["slots", "pages"])
def test_a_request_waits_for_a_full_decode_node_longer_than_every_lease(lacks: str) -> None:
    limits = NodeLimits(max_running=1 if lacks == "slots" else 4, prefill_running=4, decode_pages=70)
    service = SimulatedService(limits=limits, costs=SLOW, num_reserved_decode_tokens=250)
    long = 250 if lacks == "pages" else 200
    service.submit("long", prompt_of(8), long, timeout_s=10_000.0)
    for number in range(6):
        prompt = prompt_of(40, 20 + number)
        service.submit(f"r{number}", prompt, 4, at=5.0, timeout_s=10_000.0)
    service.run()
    waited_s = service.ended["long"].ended_at - 5.0
    assert waited_s > max(EARLY_LEASE_S, LEASE_S, RESUME_LEASE_S)
    for rid in service.asked:
        service.assert_exact_tokens(rid)
        assert service.ended[rid].error is None
    assert all(service.ended[f"r{number}"].ended_at > LEASE_S for number in range(1, 6))
    service.assert_all_is_released()
