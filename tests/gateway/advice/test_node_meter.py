"""What the gateway measures of nodes by their heartbeats, worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway.fake_nodes import make_register

from common.wire.messages import Heartbeat, NodeCosts
from gateway.advice.node_meter import NodeMeter, StepFit
from gateway.workers.registry import Worker


def node(role="prefill", name="n", **changes):
    return Worker(name * 16, make_register(role, name, **changes), 1, 0.0)


def beat(worker, at, *, running=0, free=64, gauges=None, costs=None, **counters):
    heartbeat = Heartbeat(0, running, free, 0, 0, counters, gauges or {}, costs=costs or NodeCosts())
    worker.on_heartbeat(heartbeat, at)
    return worker


def test_a_line_is_found_through_steps_of_different_sizes():
    fit = StepFit()
    for size in (10.0, 20.0, 30.0, 20.0):
        fit.add(size, 0.005 + 0.001 * size)
    model = fit.model()
    assert (model.fixed_s, model.each_s) == (pytest.approx(0.005), pytest.approx(0.001))
    assert 60.0 < model.largest < 80.0  # twice the mean and two standard deviations


def test_of_steps_that_are_alike_every_token_has_its_share():
    fit = StepFit()
    for _ in range(5):
        fit.add(10.0, 0.02)
    model = fit.model()
    assert (model.fixed_s, model.each_s, model.largest) == pytest.approx((0.0, 0.002, 20.0), abs=1e-5)


@given(st.lists(st.tuples(st.floats(1.0, 1e4), st.floats(1e-5, 10.0)), min_size=1, max_size=30))
def test_a_larger_step_takes_no_less_and_no_more_than_its_share(points):
    fit = StepFit()
    for size, seconds in points:
        fit.add(size, seconds)
    model = fit.model()
    assert model.fixed_s >= -1e-9 and model.each_s >= 0.0
    once, double = model.seconds(model.largest), model.seconds(2 * model.largest)
    assert once <= double <= 2 * once + 1e-9


def test_nothing_is_known_before_two_heartbeats():
    meter = NodeMeter("prefill", 10.0)
    figures = meter.sample([beat(node(), 1.0, busy_seconds=50.0, steps=9.0)], 1.0)
    assert (figures.num_nodes, figures.busy_share, figures.steps) == (1, 0.0, None)


def test_prefill_nodes_are_measured_together():
    meter, first, second = NodeMeter("prefill", 10.0), node(name="a"), node(name="b")
    meter.sample([beat(first, 0.0), beat(second, 0.0)], 0.0)
    beat(first, 2.0, busy_seconds=1.0, steps=10.0, prompt_tokens_computed=1_000.0, budget_tokens=20_480.0)
    beat(second, 2.0, busy_seconds=0.2, steps=2.0, prompt_tokens_computed=400.0, budget_tokens=4_096.0)
    figures = meter.sample([first, second], 2.0)
    assert figures.busy_share == pytest.approx(1.2 / 4)
    assert figures.computed_per_s == pytest.approx(1_400 / 2)
    assert figures.room_per_step == pytest.approx(2_048.0)
    assert figures.capacity_tokens == 64 * 16
    assert figures.steps.largest == pytest.approx(500.0, rel=0.01)  # as of steps with 100 and 200 tokens


def test_a_heartbeat_counts_once_and_leaves_with_the_window():
    meter, worker = NodeMeter("prefill", 5.0), node()
    meter.sample([beat(worker, 0.0)], 0.0)
    beat(worker, 1.0, busy_seconds=1.0, steps=1.0, prompt_tokens_computed=10.0)
    assert meter.sample([worker], 1.0).busy_share == 1.0
    assert meter.sample([worker], 2.0).computed_per_s == pytest.approx(5.0)
    assert meter.sample([worker], 7.0).busy_share == 0.0
    assert meter.sample([worker], 7.0).steps is not None


def test_a_node_that_comes_or_goes_does_not_change_what_the_others_have_computed():
    meter, first, second = NodeMeter("decode", 60.0), node("decode", name="a"), node("decode", name="b")
    for at in range(11):
        nodes = [beat(first, at, prompt_tokens_computed=1_000.0 * at, output_tokens=100.0 * at)]
        if at >= 9:
            nodes.append(beat(second, at, prompt_tokens_computed=0.0, output_tokens=0.0))
        figures = meter.sample(nodes, at)
    assert (figures.computed_per_s, figures.sampled_per_s) == pytest.approx((1_000.0, 100.0))
    assert meter.sample([second], 11.0).computed_per_s == pytest.approx(10_000 / 11)


def test_a_decode_node_is_measured_by_its_outputs_and_their_pages():
    meter, worker = NodeMeter("decode", 10.0), node("decode", max_running=8)
    meter.sample([beat(worker, 0.0)], 0.0)
    gauges = {"evictable_pages": 10.0, "transfers_by_receiving_by_shm": 1.0}
    beat(worker, 1.0, running=5, free=22, gauges=gauges, busy_seconds=0.8, steps=40.0, output_tokens=160.0)  # fmt: skip
    figures = meter.sample([worker], 1.0)
    assert figures.held_per_output == (64 - 22 - 10) * 16 / 4
    assert (figures.sampled_per_s, figures.room_per_step) == (160.0, 8.0)
    assert figures.steps.seconds(4) == pytest.approx(0.02)


def test_prompts_that_a_decode_node_computes_do_not_lengthen_the_steps_of_its_outputs():
    meter, worker, costs = NodeMeter("decode", 10.0), node("decode"), NodeCosts(0.02, 0.001)
    meter.sample([beat(worker, 0.0, costs=costs)], 0.0)
    beat(worker, 1.0, costs=costs, busy_seconds=0.9, steps=40.0, output_tokens=160.0, prompt_tokens_computed=100.0)
    figures = meter.sample([worker], 1.0)
    assert figures.steps.seconds(4) == pytest.approx(0.8 / 40)
    assert (figures.computed_per_s, figures.prompt_token_s) == (100.0, 0.001)


def test_the_size_of_a_node_is_remembered_when_the_last_one_is_gone():
    meter = NodeMeter("decode", 10.0)
    meter.sample([node("decode", max_running=8)], 0.0)
    figures = meter.sample([], 1.0)
    assert (figures.num_nodes, figures.capacity_tokens, figures.room_per_step) == (0, 64 * 16, 8.0)


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), 1e300, -1e300])
def test_a_figure_that_cannot_be_is_left_out_and_forgotten(strange):
    meter, worker = NodeMeter("prefill", 10.0), node()
    meter.sample([beat(worker, 0.0)], 0.0)
    meter.sample([beat(worker, 1.0, busy_seconds=strange, steps=strange, prompt_tokens_computed=strange)], 1.0)
    meter.sample([beat(worker, 2.0, busy_seconds=0.0, steps=0.0, prompt_tokens_computed=0.0)], 2.0)
    counters = {"busy_seconds": 0.5, "steps": 5.0, "prompt_tokens_computed": 500.0}
    figures = meter.sample([beat(worker, 3.0, **counters)], 3.0)
    assert 0.0 < figures.busy_share < 1.0
    assert figures.steps is not None and 0.0 < figures.steps.seconds(100) < 1.0
