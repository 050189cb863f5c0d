"""A service's first and last seconds, and the quiet ones between: it starts in any order, idles cheaply, and leaves
nothing behind, however it ends.
"""

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
from support.processes import ROOT, ProcessResources, cpu_seconds, descendants, flags, free_port, spawn
from support.service import Service
from support.service_client import Client, prompt_of

IDLE_SHARE = 0.02  # of a core
WATCHED_S = 4.0


def shares_of_a_core(pids: dict[str, int], seconds: float = WATCHED_S) -> dict[str, float]:
    """Processor time that each uses while nothing is asked of it."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return {name: (cpu_seconds(pid) - before[name]) / passed for name, pid in pids.items()}


def assert_idle(pids: dict[str, int], seconds: float = WATCHED_S) -> None:
    busy = {name: f"{share:.1%}" for name, share in shares_of_a_core(pids, seconds).items() if share >= IDLE_SHARE}
    assert not busy


# ---- one command ----------------------------------------------------------------------------------------------------


class Serve:
    """``./scripts/serve`` as a user starts it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "serve.log"
        self.port = free_port()
        options = {"port": self.port, "max_total_tokens": 8192}
        self.process = spawn([str(ROOT / "scripts" / "serve"), *flags(options)], self.log, start_new_session=True)

    def wait_until_ready(self) -> None:
        ends = time.monotonic() + 90
        while not re.search(rf"^ready http://127.0.0.1:{self.port}$", self.said(), re.MULTILINE):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < ends, self.said()
            time.sleep(0.02)

    def said(self) -> str:
        return self.log.read_text()

    def pids(self) -> dict[str, int]:
        """Of all its processes by what they run."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
        return {" ".join(word.decode() for word in words[pid][1:4]): pid for pid in pids}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as session:
            yield session

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[list[asyncio.Task[str]]]:
        """Four long streams, under way."""
        async with self.client() as session:
            streams = [asyncio.create_task(self.stream(session)) for _ in range(4)]
            await asyncio.sleep(0.3)
            yield streams

    async def stream(self, session: aiohttp.ClientSession) -> str:
        """Everything that a long stream says until it ends or breaks."""
        body = {"text": "ROMEO:", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
        said = b""
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post("/generate", json=body) as answer:
                async for line in answer.content:
                    said = line if line.strip() else said
        return said.decode()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    serve = Serve(tmp_path)
    try:
        serve.wait_until_ready()
        yield serve
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(serve.process.pid, signal.SIGKILL)
        serve.process.wait(10)
    assert "Traceback" not in serve.said(), serve.said()


def wait_for_nothing(traces: ProcessResources, until_s: float) -> None:
    """Until nothing is left of what was there."""
    while left := traces.left():
        assert time.monotonic() < until_s, left
        time.sleep(0.02)


async def test_sigterm_under_load_ends_every_process(serve: Serve) -> None:
    pids = serve.pids()
    assert len(pids) == 4, pids
    assert sum("_node" in name for name in pids) == 2, pids
    assert_idle(pids)
    traces = ProcessResources.of(list(pids.values()))
    assert serve.port in traces.tcp
    assert len(traces.tcp) == 4, "HTTP, control, and where each node is reached"
    assert any(name.startswith("@baton-") for name in traces.unix)
    assert not traces.files, "only what has no name dies with its process"
    async with serve.load() as streams:
        asked_at = time.monotonic()
        serve.process.send_signal(signal.SIGTERM)
        said = await asyncio.wait_for(asyncio.gather(*streams), 5)
    assert all(re.search(r'"code":"(shutting_down|node_lost)"', last) for last in said), said
    assert await asyncio.to_thread(serve.process.wait, 5) == 0
    wait_for_nothing(traces, asked_at + 5)


async def test_ctrl_c_under_load_ends_every_process(serve: Serve) -> None:
    traces = ProcessResources.of(list(serve.pids().values()))
    async with serve.load() as streams:
        asked_at = time.monotonic()
        os.killpg(serve.process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        await asyncio.wait_for(asyncio.gather(*streams), 5)
    assert await asyncio.to_thread(serve.process.wait, 5) == 0
    wait_for_nothing(traces, asked_at + 5)


async def test_no_process_outlives_a_killed_serve(serve: Serve) -> None:
    traces = ProcessResources.of(list(serve.pids().values()))
    async with serve.load() as streams:
        asked_at = time.monotonic()
        serve.process.kill()
        await asyncio.wait_for(asyncio.gather(*streams), 5)
        serve.process.wait(5)
    wait_for_nothing(traces, asked_at + 5)


# ---- processes of one's own -----------------------------------------------------------------------------------------


async def test_nodes_wait_for_a_gateway_that_starts_late_or_is_replaced(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs", is_forked=False)
    pids = {}
    try:
        service.start("decode-0", "prefill-0")
        ends = time.monotonic() + 60
        while service.log().count("node ready") < 2:
            assert time.monotonic() < ends, service.log()
            time.sleep(0.02)
        pids = {name: service.pid(name) for name in service.nodes}
        assert_idle(pids, 2.0)
        began = time.monotonic()
        service.start("gateway")
        service.wait_until_ready(15)
        assert time.monotonic() - began < 10
        async with service.client() as client:
            await check(client)
        service.kill("gateway")
        time.sleep(0.5)
        assert_idle(pids, 2.0)
        service.start("gateway")
        service.wait_until_ready(15)
        async with service.client() as client:
            await check(client)
        traces = ProcessResources.of(list(pids.values()))
        for name in ("prefill-0", "decode-0", "gateway"):
            status, took_s = service.stop(name)
            assert (status, took_s < 5) == (0, True), (name, status, took_s)
        assert not traces.left()
    finally:
        service.close()


async def check(client: Client) -> None:
    assert (await client.generate(prompt_of(40, 1), 4))["meta_info"]["completion_tokens"] == 4
    await client.settled()


def test_a_node_with_another_page_layout_is_refused(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs", is_forked=False, only={"decode-0": {"page_size": 24}})
    try:
        service.start("gateway", "prefill-0")
        service.wait_until_ready()
        service.start("decode-0")
        assert service.processes.pop("decode-0").wait(60) == 2
        assert "page layout of node decode-0" in service.log()
    finally:
        service.close()


def test_a_gateway_refuses_a_port_in_use(tmp_path: Path) -> None:
    service = Service(tmp_path / "logs", is_forked=False)
    try:
        service.start("gateway")
        service.wait_until_ready()
        taken = service.processes.pop("gateway")
        service.start("gateway")
        assert service.processes.pop("gateway").wait(60) == 2
        taken.kill()
        taken.wait(10)
    finally:
        service.close()
