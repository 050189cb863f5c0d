"""Gateways that come and go, found by the nodes through a real etcd."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.service.client import Client, prompt_of, until
from support.service.etcd import IS_INSTALLED, EtcdServer
from support.service.service import Service

from common.discovery.announcement import TTL_S

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


async def generate(client: Client, num_tokens: int, seed: int = 1) -> list[int]:
    body: dict[str, Any] = {
        "input_ids": prompt_of(40, seed=seed),
        "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0},
    }
    async with client.session.post("/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
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
