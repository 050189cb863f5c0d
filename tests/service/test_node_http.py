"""The HTTP server of a real node: it speaks of that node alone, can be turned off, and refuses a port in use."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.service.client import Client
from support.service.processes import free_port
from support.service.service import Service, running


async def health(client: Client, address: str) -> tuple[int, dict[str, Any]]:
    async with client.session.get(f"http://{address}/health") as answer:
        return answer.status, await answer.json()


async def addresses(client: Client) -> dict[str, str]:
    return {name: row["http_address"] for name, row in (await client.workers()).items()}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    with running(tmp_path) as service:
        async with service.client() as client:
            yield client


async def test_a_node_stays_healthy_when_its_peer_and_its_gateway_die(client: Client) -> None:
    service, known = client.service, await addresses(client)
    await client.generate(range(10, 60), 4)  # forms the pair
    assert await health(client, known["decode-0"]) == (200, {
        "status": "ok", "problem": "", "name": "decode-0", "role": "decode", "model": "m", "is_registered": True,
        "waits_for": "", "turn_s": pytest.approx(0, abs=10), "step_s": 0.0,
    })  # fmt: skip
    service.kill("prefill-0")
    status, body = await health(client, known["decode-0"])
    assert (status, body["is_registered"]) == (200, True)
    with pytest.raises(aiohttp.ClientConnectionError):
        await health(client, known["prefill-0"])
    service.kill("gateway")
    while body["is_registered"]:
        status, body = await health(client, known["decode-0"])
        assert status == 200
        await asyncio.sleep(0.02)
    assert body["waits_for"].endswith(f"the gateway at 127.0.0.1:{service.control_port}")
    service.start("gateway")
    while not body["is_registered"]:
        status, body = await health(client, known["decode-0"])
        assert status == 200
        await asyncio.sleep(0.02)


async def test_metrics_go_on_without_a_gateway(client: Client) -> None:
    service, known = client.service, await addresses(client)
    await client.generate(range(10, 60), 4)
    await client.fresh()
    service.kill("gateway")
    async with client.session.get(f"http://{known['decode-0']}/metrics") as answer:
        text = await answer.text()
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 3.0' in text
    assert service.stop("decode-0") == 0


async def test_a_node_can_have_no_http_server(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path, only={"decode-0": {"http_port": "none"}, "prefill-0": {"http_port": port}}) as service:
        async with service.client() as client:
            assert await addresses(client) == {"decode-0": "", "prefill-0": f"127.0.0.1:{port}"}
            async with client.session.get("/v1/workers/targets") as answer:
                assert [group["targets"] for group in await answer.json()] == [[f"127.0.0.1:{port}"]]


def test_a_port_in_use_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    port = free_port()
    service = Service(tmp_path / "logs", only={"decode-0": {"http_port": port}, "prefill-0": {"http_port": port}})
    try:
        service.start("gateway", "decode-0")
        service.wait_until_ready()
        service.start("prefill-0")
        assert service.processes.pop("prefill-0").wait(60) == 2
        assert f"cannot bind --http-host 127.0.0.1 --http-port {port}: address already in use" in service.log()
    finally:
        service.close()
