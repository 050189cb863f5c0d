"""A node that is permitted and broken: whatever valid messages it sends, other nodes' requests are served."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gateway.fake_nodes import running
from support.wire.message_strategies import messages_of
from support.wire.raw_peers import raw_peer

from common.wire.messages import PROTOCOL_VERSION, FromNode, Header


@pytest.fixture
async def stack(folder: Path) -> AsyncIterator[Any]:
    async with running(folder, node_timeout=30.0) as made:
        await made.pair()
        yield made


def batches() -> list[list[bytes]]:
    """Bodies of messages that hypothesis has drawn: the same at every run."""
    found: list[list[bytes]] = []

    @settings(max_examples=30, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages=st.lists(messages_of(FromNode), min_size=1, max_size=10))
    def draw(messages: list[Any]) -> None:
        found.append([msgspec.msgpack.encode(message) for message in messages])

    draw()
    return found


async def test_random_messages_of_a_broken_node_change_nothing_for_others(
    stack: Any, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "abc", "max_tokens": 3}
    expected = await stack.post("/v1/completions", body)
    with caplog.at_level(logging.ERROR):
        for batch in batches():
            socket, me = raw_peer(context, stack.gateway.control_address)
            header = msgspec.msgpack.encode(Header(PROTOCOL_VERSION, me, ""))
            for message in batch:
                socket.send_multipart([header, message])
            socket.close(2_000)
            status, answer = await stack.post("/v1/completions", body)
            assert (status, answer["choices"]) == (expected[0], expected[1]["choices"])
        for _ in range(100):
            await asyncio.sleep(0.01)
    assert expected[0] == 200
    assert (await stack.get("/metrics"))[0] == (await stack.get("/v1/workers"))[0] == 200
    assert not [record.getMessage() for record in caplog.records]
