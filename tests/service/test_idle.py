"""A service that was idle for longer than every timeout serves the next request as the first."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from support.service.client import prompt_of
from support.service.service import Service

from gateway.server import HEADER_TIMEOUT_S
from kv_transfer.receive.connections import ANSWER_S, FIRST_ANSWER_S
from kv_transfer.receive.table import RECLAIM_S
from kv_transfer.send.table import EARLY_LEASE_S
from kv_transfer.states import RESUME_LEASE_S
from kv_transfer.transports.tcp.protocol import SILENCE_S

#: ZMQ closes connections that are silent for 30 s.
TIMEOUTS_S = (HEADER_TIMEOUT_S, ANSWER_S, FIRST_ANSWER_S, RECLAIM_S, EARLY_LEASE_S, RESUME_LEASE_S, SILENCE_S, 30.0)


@pytest.mark.slow
async def test_a_request_after_a_pause_longer_than_every_timeout_is_served(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for transport in ("shm", "tcp"):
            service = Service(tmp_path / transport, node_options={"transport": transport})
            stack.callback(service.close)
            service.start()
            service.wait_until_ready()
            clients.append(await stack.enter_async_context(service.client()))
        before = [await client.begin(prompt_of(20, 3), 8).end() for client in clients]
        idle = [await asyncio.open_connection("127.0.0.1", client.service.port) for client in clients]
        for _, writer in idle:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(max(TIMEOUTS_S) + 3.0)
        for reader, writer in idle:
            async with asyncio.timeout(60):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")  # and the connection is closed
            writer.close()
        for client, earlier in zip(clients, before, strict=True):
            after = await client.begin(prompt_of(20, 3), 8).end()
            assert (after.status, after.ids) == (200, earlier.ids)
            longer = await client.begin(prompt_of(40, 9), 8).end()  # pages are sent again
            assert (longer.status, len(longer.ids)) == (200, 8)
            await client.settled()
