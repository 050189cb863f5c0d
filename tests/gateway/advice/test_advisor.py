"""The advice: needs worked out by hand, holding, other gateways, and the sentences."""

import math

import msgspec
import pytest
from support.gateway.fake_nodes import make_register

from common.wire.messages import ClientLoad, Heartbeat, NodeCosts
from gateway.advice.advisor import AdviceSettings, Advisor, decode_need, prefill_need
from gateway.advice.load_meter import LoadMeter, Objectives
from gateway.advice.node_meter import NodeFigures, StepModel
from gateway.workers.registry import Worker

INF = math.inf


def prompts(rate=10.0):
    return ClientLoad(rate, rate * 1e3, rate * 1e6, 0.0)


def outputs(tokens_per_s):
    return ClientLoad(1.0, 0.0, 0.0, tokens_per_s)


#: A step of prompts takes 10 ms and 0.1 ms for each token; 2,000 tokens fit into one.
PREFILL = NodeFigures(2, 0.5, 0.0, 0.0, 0.0, 2_000.0, 100_000.0, 1e-4, StepModel(0.01, 1e-4, 5_000.0))
#: A step of outputs takes 10 ms and 1 ms for each; a node has 40 slots, and pages for 100,000 tokens.
DECODE = NodeFigures(2, 0.9, 0.0, 0.0, 1_000.0, 40.0, 100_000.0, 2e-4, StepModel(0.01, 0.001, 80.0))


def test_prefill_nodes_follow_from_tokens_in_full_steps_and_the_target_load():
    need = prefill_need(prompts(), PREFILL, INF, 0.7)  # 10,000 tokens/s at 0.105 ms
    assert (need.count, need.work) == (2, pytest.approx(1.05))
    assert need.reason == "1.05 nodes of work at 70% target load; 2 nodes are enough"
    assert prefill_need(prompts(7.0), PREFILL, INF, 0.75).reason == (
        "0.73 nodes of work at 75% target load; 1 node is enough"
    )


def test_what_is_computed_counts_if_it_is_more_than_what_arrives():
    busy = PREFILL.__class__(**{name: getattr(PREFILL, name) for name in PREFILL.__slots__} | {"computed_per_s": 2e4})
    assert prefill_need(prompts(1.0), busy, INF, 0.7).work == pytest.approx(2.1)


def test_an_objective_for_first_tokens_asks_for_more_than_the_work():
    # 0.63 nodes of work in pieces of 0.105 s. At one node, 63 % wait, and the wait falls off at 0.37 / 0.0525 s.
    need = prefill_need(prompts(6.0), PREFILL, 0.325, 0.7)
    late = 0.63 * math.exp(-0.37 * (0.325 - 0.125) / 0.0525)
    assert late == pytest.approx(0.154, abs=0.001)
    assert need.count == 2
    assert need.reason.endswith("1 node is enough for it, but 15% of first tokens would take longer than 0.325 s; "
                                "2 nodes are needed")  # fmt: skip
    assert prefill_need(prompts(6.0), PREFILL, 0.6, 0.7).count == 1


def test_an_objective_that_no_prompt_can_reach_asks_for_no_node():
    need = prefill_need(prompts(6.0), PREFILL, 0.1, 0.7)
    assert need.count == 1
    assert need.reason.endswith("; a prompt takes 0.12 s, and more nodes do not make it faster than 0.1 s")


def test_without_prompts_one_node_is_enough():
    assert prefill_need(ClientLoad(), PREFILL, 0.1, 0.7).count == 1
    assert decode_need(ClientLoad(), DECODE, 0.1, 0.7, 0.0).count == 1


def changed(figures, **changes):
    return NodeFigures(**{name: getattr(figures, name) for name in NodeFigures.__slots__} | changes)


@pytest.mark.parametrize(
    ("changes", "itl_s", "batch", "limit"),
    [
        ({}, INF, 28, "at most 40 (--max-running-requests), of which 28"),
        ({"held_per_output": 5_000.0}, INF, 14, "at most 20 (its pages, as an output holds 5000 tokens), of which 14"),
        ({}, 0.05, 21, "at most 30 (a larger step takes too long for 50 ms between tokens), of which 21"),
        ({"room_per_step": 256.0}, INF, 56, "at most 80 (larger batches have not been seen), of which 56"),
    ],
)
def test_decode_nodes_follow_from_the_largest_batch_and_what_bounds_it(changes, itl_s, batch, limit):
    need = decode_need(outputs(3_000.0), changed(DECODE, **changes), itl_s, 0.7, 0.0)
    work = 3_000 * (0.01 + 0.001 * batch) / batch
    assert (need.count, need.work) == (math.ceil(work), pytest.approx(work))
    assert limit in need.reason
    assert need.reason.endswith(f"{math.ceil(work)} nodes are enough")


def test_a_node_without_room_for_an_output_decodes_one_at_a_time():
    need = decode_need(outputs(50.0), changed(DECODE, held_per_output=200_000.0), INF, 0.7, 0.0)
    assert need.work == pytest.approx(50 * 0.011)


def test_prompts_on_decode_nodes_need_nodes_too():
    need = decode_need(outputs(700.0), DECODE, INF, 0.7, local_s=1.4)
    assert need.count == 3  # 0.95 for outputs, 2 for prompts
    assert "prompts keep 1.40 nodes busy besides" in need.reason
    assert decode_need(ClientLoad(), DECODE, INF, 0.7, local_s=1.5).count == 3


# ---- over time ------------------------------------------------------------------------------------------------------


class Service:
    """One gateway, whose nodes that compute prompts are busy as the test says, at 1 ms for a token."""

    def __init__(self, num_prefill=2, *, needs_prefill=True, hold_s=30.0):
        settings = AdviceSettings(10.0, hold_s, 0.5, Objectives())
        self.advisor = Advisor(settings, LoadMeter(10.0, Objectives()), needs_prefill=needs_prefill)
        self.workers = [Worker(f"p{i}" * 8, make_register("prefill", f"p{i}"), 1, 0.0) for i in range(num_prefill)]
        self.workers.append(Worker("d" * 16, make_register("decode", "d"), 1, 0.0))
        self.now, self.busy, self.other = 0.0, 0.0, ClientLoad()
        self._busy_s = 0.0
        self._computing = "prefill" if needs_prefill else "decode"

    def run(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self._busy_s += self.busy
            computed = 1_000.0 * self._busy_s
            counters = {"busy_seconds": self._busy_s, "steps": computed / 10, "prompt_tokens_computed": computed}
            for node in self.workers:
                load = self.other if node is self.workers[0] else ClientLoad()
                own = counters if node.register.role == self._computing else {}
                heartbeat = Heartbeat(0, 0, 64, 0, 0, own, costs=NodeCosts(0.01, 0.001), other_load=load)
                node.on_heartbeat(heartbeat, self.now)
            self.advisor.tick(self.workers, num_in_flight=0, num_waiting=0, now=self.now)
        return self.advisor.advice

    def advised(self, seconds):
        return [role.advised for role in self.run(seconds).roles]


def test_the_nodes_that_are_there_at_the_start_are_advised_until_less_was_needed_for_long():
    service = Service(3, hold_s=30.0)
    assert service.advised(1) == [3, 1]
    assert service.advised(38) == [3, 1]  # a window of 10 s and 30 s
    assert "; 3 are advised until fewer have been enough for 30 s" in service.advisor.advice.roles[0].reason
    assert service.advised(2) == [1, 1]
    assert service.advisor.advice.roles[0].needed == 1


def test_the_advice_rises_at_once_and_falls_late():
    service = Service(2, hold_s=30.0)
    assert service.advised(60) == [1, 1]
    service.busy = 0.9  # 1.8 nodes of work, of which each should take half
    assert service.advised(10) == [4, 1]
    service.busy = 0.0
    assert service.advised(25) == [4, 1]
    assert service.advisor.advice.roles[0].needed == 1
    assert service.advised(20) == [1, 1]


def test_a_draining_node_does_not_count():
    service = Service(2)
    service.run(1)
    service.workers[1].is_draining = True
    assert service.run(1).roles[0].num_nodes == 1


def test_the_load_of_other_gateways_is_added_as_the_node_says_that_knows_of_most():
    service = Service(1)
    service.busy, service.other = 0.1, ClientLoad(5.0, 2_000.0, 1e6, 50.0)
    advice = service.run(60)
    assert advice.load == service.other
    assert service.advisor.load == ClientLoad()  # which the nodes pass on
    assert [role.advised for role in advice.roles] == [4, 1]  # 2,000 tokens/s at 1 ms


def test_decode_nodes_that_compute_all_prompts_need_no_prefill_nodes():
    service = Service(0, needs_prefill=False)
    service.busy, service.other = 0.1, ClientLoad(5.0, 2_000.0, 1e6, 0.0)
    assert service.advised(60) == [0, 4]


def test_a_gateway_without_nodes_gives_advice_too():
    service = Service(0)
    service.workers.clear()
    assert service.advised(3) == [1, 1]
    assert msgspec.json.encode(service.advisor.advice)


def test_first_tokens_are_no_work_of_decode_nodes():
    service = Service(1)
    service.busy, service.other = 0.1, ClientLoad(2_500.0, 5_000.0, 1e4, 2_500.0)  # one token for each request
    decode = service.run(60).roles[1]
    assert (decode.role, decode.needed) == ("decode", 1)
    assert "no outputs are decoded" in decode.reason


def test_a_load_without_requests_needs_no_division():
    service = Service(1)
    service.busy, service.other = 0.1, ClientLoad(0.0, 2_000.0, 1e6, 50.0)
    assert service.run(60).roles[0].needed >= 1
