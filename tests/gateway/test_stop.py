"""A gateway that stops, and one that replaces another."""

import asyncio

from support.gateway.fake_nodes import BODY, FakeNode, error_of, events, running, start_request


async def test_nodes_register_again_with_a_restarted_gateway(folder):
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


async def test_a_stop_ends_requests_in_flight_and_aborts_them_on_the_nodes(folder):
    async with running(folder) as stack:
        prefill, _ = await stack.silent_pair()
        plain, plain_rid = await start_request(stack)
        stream, stream_rid = await start_request(stack, {**BODY, "stream": True})
        prefill.tokens(stream_rid, 0, (65,))
        answer = await stream
        arriving = events(answer)
        await anext(arriving)
        stopping = asyncio.ensure_future(stack.gateway.stop())
        assert await error_of(plain) == (503, "shutting_down")
        assert (await anext(arriving))["error"]["code"] == "shutting_down"
        await stopping
        await prefill.until(lambda: {plain_rid, stream_rid} <= set(prefill.aborts))
        stack.gateway.stop = _noop
        answer.close()


async def _noop():
    """Stand for ``stop`` after the gateway has stopped."""


async def test_requests_may_finish_while_the_gateway_stops(folder):
    async with running(folder) as stack:
        prefill, _ = await stack.silent_pair()
        call, rid = await start_request(stack)
        stopping = asyncio.ensure_future(stack.gateway.stop())
        await asyncio.sleep(0.1)
        prefill.tokens(rid, 0, (65,), finish="length")
        async with await call as answer:
            assert answer.status == 200
        await stopping
        stack.gateway.stop = _noop
