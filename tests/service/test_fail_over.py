"""A service on two hosts whose data connections break while pages are under way: NIXL, then TCP, then NIXL again.

The connections are reset, or their packets are lost without an error, also where there is no other transport. The
hosts are network namespaces with boot ids of their own, so that the nodes share no memory.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.service.client import prompt_of
from support.service.hosts import make_hosts

from common.config.serve import ServeConfig
from kv_transfer.transports.broken_transports import MIN_REST_S
from kv_transfer.transports.silence import LOST
from scripts.chaos_harness.hosts import Link
from scripts.chaos_harness.service import ChaosService

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PREFILL, DECODE = "prefill-0", "decode-0"
NUM_NEW = 8


@pytest.fixture
def transport() -> str:
    return "auto"


@pytest.fixture
async def service(tmp_path: Path, transport: str) -> AsyncIterator[ChaosService]:
    hosts = make_hosts([PREFILL, DECODE], Link(delay_s=0.05, is_relayed=True))
    try:
        config = ServeConfig(
            served_model_name="m", prefill=1, decode=1, dtype="float32", device="cpu", threads=1, cluster_key="c" * 32,
            max_total_tokens=8192, chunked_prefill_size=64, transport=transport,
        )  # fmt: skip
        service = ChaosService(config, tmp_path, hosts=hosts)
        try:
            await service.start()
            yield service
            assert not service.tracebacks(), service.log_tail()
            assert await service.stop() == []
        finally:
            service.kill_all()
    finally:
        hosts.close()


def carriers(service: ChaosService) -> list[str]:
    """The transports by which pages have gone so far, in order."""
    return re.findall(rf"sending pages to decode node {DECODE} by (\w+)", service.nodes[PREFILL].log.read_text())


async def generate(service: ChaosService, seed: int) -> list[int]:
    body = {
        "input_ids": prompt_of(600, seed),
        "sampling_params": {"max_new_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0.0},
    }
    client = service.clients[service.gateway.name]
    status, answer = await client.call("POST", "/generate", json.dumps(body).encode(), timeout_s=300)
    assert status == 200, answer
    ids: list[int] = json.loads(answer)["output_ids"]
    return ids


async def generate_disturbed(service: ChaosService, disturb: Callable[[], object]) -> list[list[int]]:
    """Return the outputs of seeds 1 to 8, whose pages are under way when ``disturb`` is called."""
    under_way = [asyncio.create_task(generate(service, seed)) for seed in range(1, 9)]
    await asyncio.sleep(0.4)
    await asyncio.to_thread(disturb)
    return await asyncio.gather(*under_way)


async def generate_until_attached(service: ChaosService, count: int, seed: int) -> None:
    """Generate this seed and the next ones until the pair has attached so many times.

    Every page may have come before a disturbance, which a pair notices only with the next one.
    """
    last = seed + 100
    while len(carriers(service)) < count:
        assert seed < last, service.log_tail()
        await generate(service, seed)
        seed += 1


async def generate_again(service: ChaosService) -> list[list[int]]:
    """Generate seeds 1 to 8 again, with empty caches and nothing disturbed."""
    await service.clients[service.gateway.name].call("POST", "/flush_cache")
    return [await generate(service, seed) for seed in range(1, 9)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_transfers_go_on_by_tcp_when_nixl_breaks_and_the_pair_returns_to_it(service: ChaosService) -> None:
    hosts = service.hosts
    assert hosts is not None
    await generate(service, 0)
    assert carriers(service) == ["nixl"], service.log_tail()
    settings = service.nodes[DECODE].worker["register"]["nixl"]
    assert settings == {"backend": "UCX", "UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp"}
    data_port = service.nodes[PREFILL].data_port
    disturbed = await generate_disturbed(service, lambda: hosts.reset(DECODE, PREFILL, spared_port=data_port))
    await generate_until_attached(service, 2, seed=100)
    assert carriers(service)[:2] == ["nixl", "tcp"], service.log_tail()
    assert "broke: a transfer ended in an error" in service.nodes[PREFILL].log.read_text(), service.log_tail()
    await asyncio.sleep(MIN_REST_S)
    await generate_until_attached(service, 3, seed=300)
    assert carriers(service)[:3] == ["nixl", "tcp", "nixl"], service.log_tail()
    assert await generate_again(service) == disturbed


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("transport", "first", "said"), [("auto", "nixl", "are silent, and are shut down"), ("tcp", "tcp", LOST)]
)
async def test_transfers_go_on_by_tcp_when_packets_are_lost_silently(
    service: ChaosService, first: str, said: str
) -> None:
    hosts = service.hosts
    assert hosts is not None
    await generate(service, 0)
    assert carriers(service) == [first], service.log_tail()
    data_port = service.nodes[PREFILL].data_port
    disturbed = await generate_disturbed(service, lambda: hosts.silence(DECODE, PREFILL, spared_port=data_port))
    await generate_until_attached(service, 2, seed=100)
    assert carriers(service)[:2] == [first, "tcp"], service.log_tail()
    assert said in "".join(service.nodes[name].log.read_text() for name in (PREFILL, DECODE)), service.log_tail()
    assert await generate_again(service) == disturbed
