"""Other gateways, each in front of a mock SGLang worker, and the raw server that shows the limit."""

import asyncio
import contextlib
import importlib.util
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping

from common.config.shared import SMALL_MODEL_NAME
from scripts.benchmarks.services.gateways.client import Advance, Connection, Gateway, Load, is_answering
from scripts.benchmarks.services.gateways.mock_worker import MockWorker
from scripts.benchmarks.services.gateways.processes import START_S, StartError, pinned_process
from scripts.benchmarks.services.gateways.raw_server import ADVANCE
from scripts.serving.serve import free_port

#: Routers by name, which is also the name of their program. Both have the command line of SGLang's router.
ROUTERS = ("smg", "sglang-router")
PROXY = "fastapi-proxy"
PROXY_NEEDS = ("fastapi", "uvicorn", "aiohttp")
PROBE = Load("probe", "/v1/completions", {"model": SMALL_MODEL_NAME, "prompt": "a", "max_tokens": 1}, 1)


def installed_peers(programs: Mapping[str, str]) -> dict[str, list[str]]:
    """The first words of the command of each peer that is installed.

    Args:
        programs: paths of routers by name; others are looked up in PATH.
    """
    found = {name: shutil.which(programs.get(name, name)) for name in ROUTERS}
    commands = {name: [program, "launch"] for name, program in found.items() if program}
    if all(importlib.util.find_spec(name) for name in PROXY_NEEDS):
        commands[PROXY] = [sys.executable, "-m", "scripts.benchmarks.services.gateways.fastapi_proxy"]
    return commands


@contextlib.asynccontextmanager
async def peer(name: str, command: list[str], cores: set[int]) -> AsyncIterator[Gateway]:
    """Run a peer with one mock worker behind it. Raises StartError."""
    worker = MockWorker()
    url = await worker.start()
    port, metrics_port = (free_port("127.0.0.1", 0, "--port") for _ in range(2))
    if name in ROUTERS:
        words = [
            *command, "--worker-urls", url, "--host=127.0.0.1", f"--port={port}", "--policy=round_robin",
            f"--prometheus-port={metrics_port}", "--log-level=error",
        ]  # fmt: skip
    else:
        words = [*command, str(port), url]
    try:
        async with pinned_process(words, cores) as process:
            gateway = Gateway(name, process.pid, port, worker)
            await _until_it_answers(gateway, process)
            yield gateway
    finally:
        worker.close()


@contextlib.asynccontextmanager
async def raw_server(cores: set[int]) -> AsyncIterator[Gateway]:
    port = free_port("127.0.0.1", 0, "--port")
    async with pinned_process(
        [sys.executable, "-m", "scripts.benchmarks.services.gateways.raw_server", str(port)], cores
    ) as p:
        gateway = Gateway("raw uvloop", p.pid, port, RawStreams())
        await _until_it_answers(gateway, p)
        yield gateway


class RawStreams:
    """The upstream of the raw server, whose chunks the client itself asks for."""

    def stream(self, is_streaming: bool) -> None:
        pass

    async def begun(self) -> Advance:
        def advance(connection: Connection) -> None:
            connection.send(ADVANCE)

        return advance


async def _until_it_answers(gateway: Gateway, process: asyncio.subprocess.Process) -> None:
    until = time.monotonic() + START_S
    while not await is_answering(gateway, PROBE):
        if process.returncode is not None or time.monotonic() > until:
            assert process.stderr is not None
            said = (await process.stderr.read(3000)).decode() if process.returncode is not None else ""
            raise StartError(f"{gateway.name} does not answer; leave it out, or look at what it said:\n{said}")
        await asyncio.sleep(0.1)
