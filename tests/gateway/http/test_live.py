"""``GET /v1/live``: the last minute, also at the first request."""

import asyncio

import pytest
from support.gateway.fake_nodes import MODEL, running


@pytest.fixture
async def stack(folder):
    async with running(folder) as running_stack:
        yield running_stack


async def sampled(stack, condition):
    """The first answer for which the condition holds."""
    while True:
        _, answer = await stack.get("/v1/live")
        if condition(answer):
            return answer
        await asyncio.sleep(0.05)


async def test_requests_and_tokens_appear_in_the_samples(stack):
    await stack.pair()
    await sampled(stack, lambda answer: answer["samples"])
    assert (await stack.post("/v1/completions", {"prompt": "abc", "max_tokens": 5, "n": 2}))[0] == 200

    def totals(answer):
        names = ("requests_per_s", "tokens_per_s")
        return [sum(sample[name] for sample in answer["samples"]) for name in names]

    answer = await sampled(stack, lambda answer: totals(answer)[0] > 0)
    # Each sample is divided by its own length, which is a second and the delay of the event loop.
    num_requests, num_tokens = totals(answer)
    assert num_tokens / num_requests == pytest.approx(5, rel=0.01)
    last = answer["samples"][-1]
    assert 0 < last["ttft_p50_s"] <= last["ttft_p99_s"]
    assert last["inter_token_p50_s"] <= last["inter_token_p99_s"]


async def test_models_queues_and_errors_are_listed(folder):
    async with running(folder, priority_classes=("high:8", "low:1"), max_dispatch_ahead=0) as stack:
        _, answer = await stack.get("/v1/live")
        assert answer["models"] == [
            {"name": MODEL, "is_ready": False, "has_chat_template": True, "context_length": None}
        ]
        await stack.silent_pair(max_running=1)
        calls = [
            asyncio.ensure_future(stack.post("/generate", {"text": "a", "rid": rid, "priority_class": name}))
            for rid, name in (("first", "low"), ("second", "low"))
        ]
        answer = await sampled(stack, lambda answer: any(queue["waiting"] for queue in answer["queues"]))
        assert [(queue["priority_class"], queue["waiting"], queue["policy"]) for queue in answer["queues"]] == [
            ("high", 0, "fcfs"),
            ("low", 1, "fcfs"),
        ]
        assert answer["queues"][0]["oldest_wait_s"] is None
        assert answer["queues"][1]["oldest_wait_s"] >= 0
        assert answer["models"][0]["context_length"] == 512
        await stack.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*calls)
        answer = await sampled(stack, lambda answer: answer["errors"])
        assert answer["errors"] == [{"code": "aborted", "total": 2, "last_minute": 2}]


async def test_the_last_minute_needs_a_key_where_there_are_keys(folder):
    async with running(folder, api_key="secret-key") as stack:
        assert (await stack.get("/v1/live"))[0] == 401
        assert (await stack.get("/v1/live", Authorization="Bearer secret-key"))[0] == 200
