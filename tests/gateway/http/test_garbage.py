"""Ended requests and closed connections are freed at once: what waits for the garbage collector may be gigabytes."""

import asyncio
import gc
from collections import Counter

import aiohttp
import pytest
from support.gateway.fake_nodes import running

PATH = "/v1/completions"
BODY = {"prompt": "Hi", "max_tokens": 3}
REQUESTS = {
    "whole": (PATH, BODY),
    "stream": (PATH, {**BODY, "stream": True}),
    "several outputs": (PATH, {**BODY, "n": 3}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    "rid": ("/generate", {"text": "Hi", "rid": "one", "sampling_params": {"max_new_tokens": 3}}),
    "refused": (PATH, {**BODY, "max_tokens": -1}),
    "unknown path": ("/v2/completions", BODY),
}


async def garbage_of(ask) -> Counter[str]:
    """The types of the gateway's objects that only the garbage collector frees after ``ask``."""
    await ask()  # what is made once for all requests
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await ask()
        gc.collect()
        return Counter(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("gateway."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.slow(sample=0.3)
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_on_a_connection_of_its_own_leaves_no_garbage(folder, name):
    path, body = REQUESTS[name]
    async with running(folder, max_idempotent_results=1) as stack:
        await stack.pair()

        async def ask():
            for number in range(3):
                named = {**body, "rid": f"{id(ask)}-{number}"} if "rid" in body else body
                async with aiohttp.ClientSession() as client:
                    async with client.post(stack.url + path, json=named) as answer:
                        await answer.read()
            await stack.get("/health")

        assert not await garbage_of(ask)


@pytest.mark.slow
async def test_a_client_that_leaves_before_its_answer_leaves_no_garbage(folder):
    async with running(folder) as stack:
        prefill, _ = await stack.silent_pair()

        async def ask():
            known = set(prefill.generates)
            async with aiohttp.ClientSession() as client:
                call = asyncio.ensure_future(client.post(stack.url + PATH, json={**BODY, "stream": True}))
                await prefill.until(lambda: set(prefill.generates) - known)
                (rid,) = set(prefill.generates) - known
                call.cancel()
                await prefill.until(lambda: rid in prefill.aborts)

        assert not await garbage_of(ask)
