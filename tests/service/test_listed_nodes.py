"""Gateways that name their nodes, which know no gateway."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service.client import prompt_of, until
from support.service.processes import free_port
from support.service.service import Service

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    ports = {"prefill-0": free_port(), "decode-0": free_port()}
    service = Service(
        tmp_path / "logs",
        gateways=2,
        gateway_options={name.split("-")[0]: f"127.0.0.1:{port}" for name, port in ports.items()},
        node_options={"gateway": "listed"},
        only={name: {"data_port": port} for name, port in ports.items()},
    )
    yield service
    service.close()


async def test_gateways_come_and_go_while_the_nodes_that_they_list_run(service: Service) -> None:
    service.start("prefill-0", "decode-0", "gateway")
    service.wait_until_ready()
    async with service.client() as client:
        expected = (await client.generate(prompt_of(40, seed=1), 20))["output_ids"]
    service.start("gateway-1")
    service.wait_until_ready()
    assert service.stop("gateway", signal.SIGTERM) == 0
    await until(lambda: "is not announced any more" in service.log(), 60.0, "the nodes still dial the gateway")
    service.kill("decode-0")
    service.start("decode-0")
    service.wait_until_ready()
    async with service.client("gateway-1") as client:
        assert (await client.generate(prompt_of(40, seed=1), 20))["output_ids"] == expected
        await client.settled()
