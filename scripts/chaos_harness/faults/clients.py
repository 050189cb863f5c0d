"""Clients that harm: they send nonsense, do not read, send too much, or vanish in the middle of an answer."""

import asyncio
import contextlib
import random

from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Fault, Site
from scripts.chaos_harness.service import Node

NUM_CLIENTS = 4  # of each kind
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
ENDLESS = b'{"prompt": "king", "max_tokens": 300, "ignore_eos": true, "stream": true}'


class HostileClients(Fault):
    """Half requests, garbage, bodies that are too large, and readers that stop reading."""

    name = "hostile"
    roles = ()

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (1.0, 4.0)

    async def inject(self, site: Site, node: Node) -> str:
        drawn = random.Random()
        port = site.service.gateway.port
        for data in (POST + b"400\r\n\r\n" + b'{"prompt": "half', POST + b"%d\r\n\r\n" % (1 << 40), b"GET / HTT"):
            self._tasks += [asyncio.create_task(_stay(port, data)) for _ in range(NUM_CLIENTS)]
        for _ in range(NUM_CLIENTS):
            self._tasks.append(asyncio.create_task(_stay(port, drawn.randbytes(4096))))
            self._tasks.append(asyncio.create_task(_stay(port, POST + b"%d\r\n\r\n" % len(ENDLESS) + ENDLESS)))
        return f"{len(self._tasks)} hostile clients"

    async def undo(self, site: Site, node: Node) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _stay(port: int, data: bytes) -> None:
    """Send these bytes, and then keep the connection open without reading."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        try:
            writer.write(data)
            await asyncio.sleep(3600.0)
        finally:
            writer.transport.abort()


class VanishingClients(Fault):
    """Clients close their connections in the middle of an answer."""

    name = "vanish"
    roles = ()

    async def inject(self, site: Site, node: Node) -> str:
        client = site.service.clients[site.service.gateway.name]
        requests = random.sample(list(site.requests), min(2 * NUM_CLIENTS, len(site.requests)))
        left = await asyncio.gather(*(client.leave(request, random.uniform(0.02, 0.6)) for request in requests))
        return f"{sum(left)} of {len(left)} clients have vanished"
