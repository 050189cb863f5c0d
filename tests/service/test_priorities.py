"""Priorities and fairness in a whole service: the order of service, and that no request starves."""

import asyncio
from collections.abc import Iterator

import pytest
from support.service.client import Client, Exchange, prompt_of, until
from support.service.service import Service, running

OPTIONS = {"enable_priority_scheduling": True, "schedule_policy": "fair"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A decode node with one slot, and a gateway that dispatches only one request at a time."""
    gateway = {**OPTIONS, "max_dispatch_ahead": 0, "tenant_header": True, "starvation_bound": 0.001}
    with running(
        tmp_path_factory.mktemp("urgency"),
        gateway_options=gateway,
        node_options={**OPTIONS, "max_running_requests": 1},
    ) as started:
        yield started


async def in_flight(client: Client) -> int:
    async with client.session.get("/server_info") as answer:
        return int((await answer.json())["num_in_flight"])


async def occupy(client: Client) -> Exchange:
    """Begin a request that keeps the only slot until it is aborted."""
    first = client.begin(prompt_of(20, 0), 3000, priority=1000)
    await first.has(1)
    return first


async def wait_for_num_in_flight(client: Client, count: int) -> None:
    async with asyncio.timeout(60):
        while await in_flight(client) < count:
            await asyncio.sleep(0.002)


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("priorities", [(1, 2, 3, 4), (4, 3, 2, 1)])
async def test_reversing_priorities_reverses_the_order_in_which_requests_end(
    service: Service, priorities: tuple[int, ...]
) -> None:
    async with service.client() as client:
        first = await occupy(client)
        exchanges = []
        for i, priority in enumerate(priorities):
            exchanges.append(client.begin(prompt_of(30, i + 1), 10, priority=priority))
            await wait_for_num_in_flight(client, i + 2)
        assert not first.ended_at
        await first.leave()
        await asyncio.gather(*(exchange.end() for exchange in exchanges))
        ended = sorted(exchanges, key=lambda exchange: exchange.ended_at)
        assert [priorities[exchanges.index(exchange)] for exchange in ended] == [4, 3, 2, 1]
        assert all(len(exchange.ids) == 10 for exchange in exchanges)
        await client.settled()


async def test_a_waiting_request_overtakes_after_its_priority_is_raised(service: Service) -> None:
    async with service.client() as client:
        first = await occupy(client)
        exchanges = {}
        for i, rid in enumerate(("a", "b")):
            exchanges[rid] = client.begin(prompt_of(30, i + 1), 10, priority=5, rid=rid)
            await wait_for_num_in_flight(client, i + 2)
        assert await client.post("/v1/requests/b/priority", {"priority": 6}) == (200, {"changed": 1})
        assert not first.ended_at
        await first.leave()
        await asyncio.gather(*(exchange.end() for exchange in exchanges.values()))
        assert exchanges["b"].ended_at < exchanges["a"].ended_at
        async with client.session.get("/v1/workers/gateway/decisions?limit=20") as answer:
            actions = [(one["rid"], one["action"]) for one in (await answer.json())["decisions"]]
        assert [one for one in actions if one[0] in "ab"] == [
            ("a", "wait"), ("b", "wait"), ("b", "reprioritize"), ("b", "send"), ("a", "send"),
        ]  # fmt: skip
        for node in ("prefill-0", "decode-0"):
            async with client.session.get(f"/v1/workers/{node}/decisions") as answer:
                assert "b" in {one["rid"] for one in (await answer.json())["decisions"]}, await answer.text()
        async with client.session.get("/metrics") as answer:
            text = await answer.text()
        assert 'baton_starved_total{class="",model="m"} ' in text
        await client.settled()


async def test_a_tenant_with_many_requests_does_not_starve_another(service: Service) -> None:
    async with service.client() as client:
        first = await occupy(client)
        ended: list[str] = []

        async def one(tenant: str, seed: int) -> None:
            body = {"input_ids": prompt_of(20, seed), "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
            async with client.session.post("/generate", json=body, headers={"x-baton-tenant": tenant}) as answer:
                assert answer.status == 200, await answer.text()
            ended.append(tenant)

        work = []
        for i, tenant in enumerate(["many"] * 8 + ["few"] * 2):
            work.append(asyncio.ensure_future(one(tenant, 100 + i)))
            await wait_for_num_in_flight(client, i + 2)
        assert not first.ended_at
        await first.leave()
        await until(lambda: len(ended) == 10, 60, "requests starve")
        await asyncio.gather(*work)
        assert ended == ["many", "few", "many", "few", *["many"] * 6]
        await client.settled()
