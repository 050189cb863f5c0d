"""A gateway that stops, and one that takes the place of another."""

import asyncio
import time

from support.fake_nodes import BODY, FakeNode, error_of, events, folder, running, silent, under_way

__all__ = ["folder"]


async def test_nodes_that_were_there_before_the_gateway_work_once_it_is_back(folder):
    async with running(folder) as first:
        port = int(first.gateway.control_address.rpartition(":")[2])
        nodes = [FakeNode(first.gateway.control_address, role, role) for role in ("prefill", "decode")]
        for node in nodes:
            await node.registered()
    async with running(folder, control_port=port) as second:
        second.nodes = nodes
        while (await second.get("/ready"))[0] != 200:
            await asyncio.sleep(0.02)
        assert (await second.post("/v1/completions", BODY))[0] == 200


async def test_stopping_ends_what_is_under_way_with_an_error_and_tells_the_nodes(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        prefill.on_generate = decode.on_generate = silent
        plain, plain_rid = await under_way(stack)
        stream, stream_rid = await under_way(stack, {**BODY, "stream": True})
        prefill.tokens(stream_rid, 0, (65,))
        answer = await stream
        arriving = events(answer)
        await anext(arriving)
        started_at = time.monotonic()
        stopping = asyncio.ensure_future(stack.gateway.stop())
        assert await error_of(plain) == (503, "shutting_down")
        assert (await anext(arriving))["error"]["code"] == "shutting_down"
        await stopping
        assert time.monotonic() - started_at < 15.0
        await prefill.until(lambda: {plain_rid, stream_rid} <= set(prefill.aborts))
        stack.gateway.stop = _noop
        answer.close()


async def _noop():
    """It has stopped already."""


async def test_while_stopping_what_can_finish_finishes(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.pair()
        prefill.on_generate = decode.on_generate = silent
        call, rid = await under_way(stack)
        stopping = asyncio.ensure_future(stack.gateway.stop())
        await asyncio.sleep(0.1)
        prefill.tokens(rid, 0, (65,), finish="length")
        async with await call as answer:
            assert answer.status == 200
        await stopping
        stack.gateway.stop = _noop
