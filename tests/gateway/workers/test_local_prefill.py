"""Decode nodes that compute prompts: their choice, and how such requests end, fail and are aborted."""

import asyncio
import contextlib

import pytest
from support.gateway.fake_nodes import echo, events, running, silent

from common.errors import ErrorCode


@pytest.fixture
async def stack(folder):
    """A gateway with a single decode node."""
    async with running(folder, local_prefill="always") as running_stack:
        await running_stack.node("decode")
        yield running_stack
        assert (await running_stack.get("/server_info"))[1]["num_in_flight"] == 0
        _, answer = await running_stack.get("/v1/workers")
        assert {worker["load_tokens"] for worker in answer["workers"]} <= {0}


BODY = {"prompt": "abc", "max_tokens": 4}


async def start_request(stack, body=BODY):
    (decode,) = stack.nodes
    call = asyncio.ensure_future(stack.client.post(stack.url + "/v1/completions", json=body))
    await decode.until(lambda: decode.generates)
    return call, next(iter(decode.generates))


async def test_a_decode_node_alone_serves(stack):
    assert (await stack.get("/ready"))[0] == 200
    status, answer = await stack.post("/v1/completions", {**BODY, "echo": True, "logprobs": 0})
    assert (status, answer["choices"][0]["text"]) == (200, "abcabca")
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, *[-0.5] * 4]
    (decode,) = stack.nodes
    (generate,) = decode.generates.values()
    assert generate.prefill is None
    assert generate.decode.incarnation == decode.incarnation
    assert decode.aborts == []


async def test_after_a_single_token_no_abort_is_sent(stack):
    for max_tokens in (0, 1):
        body = {"prompt": "a", "max_tokens": max_tokens, "echo": True}
        assert (await stack.post("/v1/completions", body))[0] == 200
    await stack.nodes[0].round_trip()
    assert stack.nodes[0].aborts == []


async def test_a_disconnect_aborts_it(stack):
    stack.nodes[0].on_generate = silent
    call, rid = await start_request(stack)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await stack.nodes[0].until(lambda: stack.nodes[0].aborts == [rid])


async def test_a_stop_string_aborts_it(stack):
    (decode,) = stack.nodes
    decode.on_generate = silent
    call, rid = await start_request(stack, {"prompt": "x", "max_tokens": 9, "stop": "A"})
    decode.tokens(rid, 0, (32,))
    async with await call as answer:
        assert (await answer.json())["choices"][0]["stop_reason"] == "A"
    await decode.until(lambda: decode.aborts == [rid])


async def test_its_failure_is_answered(stack):
    stack.nodes[0].on_generate = lambda node, generate: node.fail(generate.rid, ErrorCode.OUT_OF_PAGES)
    status, answer = await stack.post("/v1/completions", BODY)
    assert (status, answer["error"]["code"]) == (503, "out_of_pages")
    await stack.nodes[0].round_trip()
    assert stack.nodes[0].aborts == []


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_after_the_loss_of_the_decode_node_it_continues_on_another(stack, num_tokens):
    (decode,) = stack.nodes
    decode.on_generate = silent
    call, rid = await start_request(stack, {**BODY, "stream": True})
    for i in range(num_tokens):
        decode.tokens(rid, i, (64,))
    await decode.round_trip()
    await decode.kill()
    stack.nodes.remove(decode)
    while (await stack.get("/ready"))[0] != 503:
        await asyncio.sleep(0.01)
    other = await stack.node("decode")
    async with await call as answer:
        assert not [event for event in [event async for event in events(answer)] if "error" in event]
    generate = other.generates[rid]
    assert (generate.prefill, generate.output) == (None, (64,) * num_tokens)


async def test_without_a_decode_node_the_error_says_so(folder):
    async with running(folder, local_prefill="always") as stack:
        await stack.node("prefill")
        status, answer = await stack.post("/v1/completions", BODY)
        assert status == 503
        assert "no decode node is registered" in answer["error"]["message"]
        assert (await stack.get("/ready"))[0] == 503


async def test_auto_computes_short_prompts_on_the_decode_node(folder):
    async with running(folder, local_prefill="auto", local_prefill_threshold=100) as stack:
        prefill, decode = await stack.pair()
        for token, count in ((66, 99), (67, 100), (67, 150)):
            _, answer = await stack.post("/v1/completions", {"prompt": [token] * count, "max_tokens": 3})
            assert answer["usage"]["completion_tokens"] == 3
        given = [(len(generate.prompt), generate.prefill is None) for generate in decode.generates.values()]
        assert given == [(99, True), (100, False), (150, True)]  # 64 tokens of the last are cached
        assert len(prefill.generates) == 1
        _, text = await stack.get("/metrics")
        assert 'baton_local_prefills_total{model="tiny"} 2.0' in text


async def test_with_auto_local_requests_survive_the_loss_of_the_prefill_node(folder):
    async with running(folder, local_prefill="auto", local_prefill_threshold=64) as stack:
        prefill, decode = await stack.pair()
        decode.on_generate = silent
        call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}))
        await decode.until(lambda: decode.generates)
        await prefill.kill()
        stack.nodes.remove(prefill)
        while (await stack.get("/ready"))[0] == 200:
            await asyncio.sleep(0.01)
        echo(decode, next(iter(decode.generates.values())))
        assert (await call)[0] == 200


async def test_tokens_from_a_node_outside_the_pair_are_refused(folder):
    async with running(folder, local_prefill="auto", local_prefill_threshold=64) as stack:
        prefill, decode = await stack.pair()
        decode.on_generate = silent
        call = asyncio.ensure_future(stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}))
        rid = await decode.only_rid()
        prefill.tokens(rid, 0, (65,), finish="length")
        await prefill.until(lambda: prefill.aborts == [rid])
        assert not call.done()
        echo(decode, decode.generates[rid])
        assert (await call)[0] == 200
