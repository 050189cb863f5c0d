"""Start and end of a service: its processes start in any order and leave nothing behind, however they end."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from support.service.client import Client, prompt_of
from support.service.processes import ROOT, descendants, flags, free_port, spawn
from support.service.service import Service
from support.waiting import until

from scripts.chaos_harness.process_resources import ProcessResources

TIMEOUT_S, READY_TIMEOUT_S = 120.0, 180.0

# ---- one command ----------------------------------------------------------------------------------------------------


class Serve:
    """A running ``./scripts/serve``."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "serve.log"
        self.port = free_port()
        options = {"port": self.port, "max_total_tokens": 8192, "drain_timeout": 0.2}
        self.process = spawn([str(ROOT / "scripts" / "serve"), *flags(options)], self.log, start_new_session=True)

    def wait_until_ready(self) -> None:
        ends = time.monotonic() + READY_TIMEOUT_S
        while not re.search(rf"^ready http://127.0.0.1:{self.port}$", self.read_log(), re.MULTILINE):
            assert self.process.poll() is None, self.read_log()
            assert time.monotonic() < ends, self.read_log()
            time.sleep(0.02)

    def read_log(self) -> str:
        return self.log.read_text()

    def pids(self) -> dict[str, int]:
        """Return the ids of all its processes, by the first words of their command lines."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
        return {" ".join(word.decode() for word in words[pid][1:4]): pid for pid in pids}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as session:
            yield session

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[list[asyncio.Task[str]]]:
        """Start four long streams, and wait until all of them have begun."""
        async with self.client() as session:
            begun = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(self.stream(session, event)) for event in begun]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), TIMEOUT_S)
            yield streams

    async def stream(self, session: aiohttp.ClientSession, begun: asyncio.Event) -> str:
        """Return the last line of a long stream, up to its end or the break of the connection."""
        body = {"text": "ROMEO:", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
        last = b""
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post("/generate", json=body) as answer:
                async for line in answer.content:
                    begun.set()
                    last = line if line.strip() else last
        return last.decode()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    serve = Serve(tmp_path)
    try:
        serve.wait_until_ready()
        yield serve
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(serve.process.pid, signal.SIGKILL)
        serve.process.wait(60)
    assert "Traceback" not in serve.read_log(), serve.read_log()


def wait_until_released(resources: ProcessResources) -> None:
    """Wait until none of the recorded resources exists."""
    ends = time.monotonic() + TIMEOUT_S
    while left := resources.left():
        assert time.monotonic() < ends, left
        time.sleep(0.02)


async def test_sigterm_under_load_ends_every_process(serve: Serve) -> None:
    pids = serve.pids()
    assert len(pids) == 4, pids
    assert sum("serving.worker" in name for name in pids) == 2, pids
    resources = ProcessResources.of(list(pids.values()))
    ports = {port for port, _ in resources.tcp}
    assert serve.port in ports
    assert len(ports) == 7, "HTTP, control; control and metrics of each node; pages of the decode node"
    assert any(name.startswith("@baton-") for name in resources.unix)
    assert not resources.files, "named files outlive a killed process"
    async with serve.load() as streams:
        serve.process.send_signal(signal.SIGTERM)
        last_lines = await asyncio.wait_for(asyncio.gather(*streams), TIMEOUT_S)
    assert all(re.search(r'"code":"(shutting_down|node_lost)"', last) for last in last_lines), last_lines
    assert await asyncio.to_thread(serve.process.wait, TIMEOUT_S) == 0
    wait_until_released(resources)


@pytest.mark.slow  # test_sigterm_under_load_ends_every_process covers all but the signal
async def test_ctrl_c_under_load_ends_every_process(serve: Serve) -> None:
    resources = ProcessResources.of(list(serve.pids().values()))
    async with serve.load() as streams:
        os.killpg(serve.process.pid, signal.SIGINT)  # a terminal signals every process of the group
        await asyncio.wait_for(asyncio.gather(*streams), TIMEOUT_S)
    assert await asyncio.to_thread(serve.process.wait, TIMEOUT_S) == 0
    wait_until_released(resources)


async def test_no_process_outlives_a_killed_serve(serve: Serve) -> None:
    resources = ProcessResources.of(list(serve.pids().values()))
    async with serve.load() as streams:
        serve.process.kill()
        await asyncio.wait_for(asyncio.gather(*streams), TIMEOUT_S)
        serve.process.wait(60)
    wait_until_released(resources)


# ---- single processes -----------------------------------------------------------------------------------------------


async def test_nodes_wait_for_a_gateway_that_starts_late_or_is_replaced(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs")
    pids = {}
    try:
        service.start("decode-0", "prefill-0")
        ends = time.monotonic() + READY_TIMEOUT_S
        while service.log().count("node ready") < 2:
            assert time.monotonic() < ends, service.log()
            time.sleep(0.02)
        pids = {name: service.pid(name) for name in service.nodes}
        service.start("gateway")
        service.wait_until_ready()
        async with service.client() as client:
            await check(client)
        service.kill("gateway")
        time.sleep(0.5)
        service.start("gateway")
        service.wait_until_ready()
        async with service.client() as client:
            await check(client)
        resources = ProcessResources.of(list(pids.values()))
        for name in ("prefill-0", "decode-0", "gateway"):
            assert service.stop(name) == 0, name
        wait_until_released(resources)
    finally:
        service.close()


async def check(client: Client) -> None:
    assert (await client.generate(prompt_of(40, 1), 4))["meta_info"]["completion_tokens"] == 4
    await client.settled()


def test_a_second_signal_does_not_kill_a_gateway_that_has_stopped(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs", prefill=0, decode=0)
    try:
        service.start("gateway")
        service.wait_until_ready()
        gateway = service.processes.pop("gateway")
        gateway.send_signal(signal.SIGTERM)
        until(lambda: "stopped" in service.log())
        gateway.send_signal(signal.SIGINT)
        assert gateway.wait() == 0
    finally:
        service.close()


def test_a_node_with_another_page_layout_is_refused(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs", only={"decode-0": {"page_size": 24}})
    try:
        service.start("gateway", "prefill-0")
        service.wait_until_ready()
        service.start("decode-0")
        assert service.processes.pop("decode-0").wait(60) == 2
        assert "page layout of node decode-0" in service.log()
    finally:
        service.close()
