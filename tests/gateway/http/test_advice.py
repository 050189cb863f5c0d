"""``GET /v1/advice`` and its metric, and what the gateway tells nodes of its load."""

import asyncio

import pytest
from support.gateway.fake_nodes import MODEL, running

from common.wire.messages import ClientLoad, Heartbeat, HeartbeatAck


@pytest.fixture
async def stack(folder):
    async with running(folder, slo_ttft_ms=500.0, advice_utilization=0.5, node_timeout=60.0) as running_stack:
        yield running_stack


async def advised(stack, condition):
    """The first advice for the model for which a condition holds."""
    async with asyncio.timeout(60):
        return await _first(stack, condition)


async def _first(stack, condition):
    while True:
        _, answer = await stack.get("/v1/advice")
        (model,) = answer["models"]
        if condition(model):
            return answer
        await asyncio.sleep(0.05)


async def test_the_objectives_are_those_of_requests_without_their_own(stack):
    await stack.pair()
    for given, ttft_s in (({}, 0.5), ({"slo_ttft_ms": 250, "slo_itl_ms": 40}, 0.25)):
        assert (await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **given}))[0] == 200
        sent = list(stack.nodes[0].generates.values())[-1]
        assert (sent.slo_ttft_s, sent.slo_itl_s) == (ttft_s, 0.04 if given else 0.0)


async def test_the_nodes_that_are_there_are_advised_at_the_start(stack):
    await stack.pair()
    await stack.node("decode", "more")
    answer = await advised(stack, lambda model: [role["nodes"] for role in model["roles"]] == [1, 2])
    assert (answer["hold_s"], answer["utilization"]) == (300.0, 0.5)
    (model,) = answer["models"]
    assert (model["model"], model["slo_ttft_ms"], model["slo_itl_ms"]) == (MODEL, 500.0, None)
    assert [(role["role"], role["advised"], role["needed"]) for role in model["roles"]] == [
        ("prefill", 1, 1),
        ("decode", 2, 1),
    ]
    _, text = await stack.get("/metrics")
    assert f'baton_advised_nodes{{model="{MODEL}",role="decode"}} 2.0' in text


async def test_requests_appear_in_the_load_and_nodes_are_told_of_it(stack):
    prefill, _ = await stack.pair()
    await advised(stack, lambda model: model["window_s"] > 0)
    assert (await stack.post("/v1/completions", {"prompt": "abcdef", "max_tokens": 5}))[0] == 200
    # The load may have been measured while the request was in flight; output tokens count once it has ended.
    answer = await advised(stack, lambda model: model["load"]["output_tokens_per_s"] > 0)
    load = answer["models"][0]["load"]
    assert load["output_tokens_per_s"] == pytest.approx(5 * load["requests_per_s"], abs=0.1)
    prefill.beat()
    await prefill.until(lambda: any(isinstance(one, HeartbeatAck) and one.load.requests for one in prefill.received))


async def test_the_load_of_other_gateways_comes_with_heartbeats(stack):
    prefill, _ = await stack.pair()
    prefill.is_beating = False
    prefill.send(Heartbeat(0, 0, 64, 0, 0, {}, other_load=ClientLoad(7.0, 70.0, 700.0, 14.0)))
    answer = await advised(stack, lambda model: model["load"]["requests_per_s"] > 0)
    assert answer["models"][0]["load"] == {
        "requests_per_s": 7.0,
        "prompt_tokens_per_s": 70.0,
        "output_tokens_per_s": 14.0,
    }


async def test_advice_needs_a_key_where_there_are_keys(folder):
    async with running(folder, api_key="secret-key") as stack:
        assert (await stack.get("/v1/advice"))[0] == 401
        assert (await stack.get("/v1/advice", Authorization="Bearer secret-key"))[0] == 200
