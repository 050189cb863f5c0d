"""Gateways that come and go, found by the nodes through a real etcd."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.service.client import Client, prompt_of, until
from support.service.etcd import IS_INSTALLED, EtcdServer
from support.service.service import Service

from common.discovery.announcement import TTL_S

#: Many times as long as an announcement stands, and longer than a node waits for anything.
OUTAGE_S = 6 * TTL_S

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_INSTALLED, reason="needs etcd (Debian: etcd-server)")]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def service(tmp_path: Path, etcd: EtcdServer) -> Iterator[Service]:
    options = {"etcd": etcd.url}
    service = Service(tmp_path / "logs", gateways=2, gateway_options=options, node_options=options)
    yield service
    service.close()


class NotTaken(Exception):
    """A gateway has no nodes yet."""


async def generate(client: Client, num_tokens: int, seed: int = 1, key: str = "") -> list[int]:
    body: dict[str, Any] = {
        "input_ids": prompt_of(40, seed=seed),
        "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0},
    }
    headers = {"Idempotency-Key": key} if key else {}
    async with client.session.post("/generate", json=body, headers=headers) as answer:
        content = await answer.text()
        if answer.status == 503 and '"no_route"' in content:
            raise NotTaken(content)
        assert answer.status == 200, content
        ids: list[int] = (await answer.json())["output_ids"]
        return ids


async def test_nodes_serve_every_gateway_that_is_announced(service: Service) -> None:
    service.start("prefill-0", "decode-0", "gateway")
    service.wait_until_ready()
    async with service.client() as client:
        expected = await generate(client, 20)
    service.start("gateway-1")
    service.wait_until_ready()
    async with service.client() as first, service.client("gateway-1") as second:
        assert await asyncio.gather(generate(first, 20), generate(second, 20)) == [expected, expected]
    assert service.stop("gateway", signal.SIGTERM) == 0
    await until(lambda: "is not announced any more" in service.log(), 60.0, "the nodes still dial the gateway")
    async with service.client("gateway-1") as second:
        assert await generate(second, 20) == expected
        await second.settled()


async def test_requests_and_nodes_do_not_notice_that_etcd_is_away(service: Service, etcd: EtcdServer) -> None:
    service.start("prefill-0", "decode-0", "gateway")
    service.wait_until_ready()
    async with service.client() as client:
        expected = await generate(client, 20)
        running = asyncio.create_task(generate(client, 4_000, seed=2))
        etcd.kill()
        await asyncio.sleep(TTL_S + 3)  # the announcement would have ended
        assert await generate(client, 20) == expected
        etcd.start()
        service.start("gateway-1")  # it is found by nodes that have lost etcd for a time
        service.wait_until_ready()
        async with service.client("gateway-1") as second:
            assert await generate(second, 20) == expected
        assert len(await running) == 4_000
        await client.settled()


async def generate_anywhere(clients: list[Client], num_tokens: int, seed: int, key: str) -> list[int]:
    """Ask one gateway after the other, with the same key, until one answers, as a client behind a balancer does."""
    for client in clients:
        with contextlib.suppress(aiohttp.ClientError, NotTaken):
            return await generate(client, num_tokens, seed, key)
    raise AssertionError("no gateway answers")


async def test_a_gateway_dies_while_etcd_is_away_for_long_and_no_request_is_lost(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    options = {"etcd": etcd.url}
    service = Service(tmp_path / "logs", gateways=3, gateway_options=options, node_options=options)
    is_over = False

    async def keep_asking(clients: list[Client], seed: int) -> int:
        """A steady, small load; returns the number of requests."""
        expected = await generate_anywhere(clients, 20, seed, f"{seed}-0")
        count = 1
        while not is_over:
            await asyncio.sleep(0.5)
            assert await generate_anywhere(clients, 20, seed, f"{seed}-{count}") == expected
            count += 1
        return count

    try:
        service.start("prefill-0", "decode-0", *service.gateways)
        service.wait_until_ready()
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(service.client(name)) for name in service.gateways]
            turned = [clients[number:] + clients[:number] for number in range(3)]
            loads = [asyncio.create_task(keep_asking(turned[number], 10 + number)) for number in range(3)]
            etcd.kill()
            etcd_away_at = time.monotonic()
            await asyncio.sleep(2 * TTL_S)  # no gateway is announced any more
            long = [asyncio.create_task(generate_anywhere(turned[n], 2_000, 20 + n, f"long-{n}")) for n in range(3)]
            before = (await clients[1].counters())["decode-0"]["output_tokens"]
            while (await clients[1].counters())["decode-0"]["output_tokens"] < before + 300:
                await asyncio.sleep(0.1)
            assert not long[0].done()
            service.kill("gateway")
            assert [len(ids) for ids in await asyncio.gather(*long)] == [2_000] * 3
            service.start("gateway")  # nodes still dial its address
            service.wait_until_ready()
            await generate(clients[0], 20)
            await asyncio.sleep(max(0.0, etcd_away_at + OUTAGE_S - time.monotonic()))
            service.kill("gateway-1")
            etcd.start()
            service.start("gateway-1")
            service.wait_until_ready()
            is_over = True
            for count in await asyncio.gather(*loads):
                assert count > 10
            for client in clients:
                await client.settled()
    finally:
        service.close()
