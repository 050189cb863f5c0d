"""Requests whose gateway is killed are sent to the next one, and a gateway that goes on wrongly there is seen."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.chaos_harness import client
from scripts.chaos_harness.answers import Answer, Output, Verdict, as_seen, judge
from scripts.chaos_harness.client import Client
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.load import Load
from scripts.chaos_harness.service import Node
from scripts.chaos_harness.verdicts import Findings, Tally, broken_invariants
from scripts.chaos_harness.workload import distinct_requests, keyed

[COMPLETION, *_, NATIVE] = distinct_requests(12, 0, "m")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFERENCE = Answer({0: Output("abc", [1, 2, 3], finish="length")}, is_complete=True)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(token: int) -> bytes:
    choice = {"text": " abc"[token], "token_ids": [token], "finish_reason": "length" if token == 3 else None}
    return chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


END = [chunk(b"data: [DONE]\n\n"), chunk(b"")]


@asynccontextmanager
async def gateway(pieces: Sequence[bytes], heads: list[bytes], on_answer: Callable[[], None]) -> AsyncIterator[int]:
    """A server that answers every request with these pieces and closes the connection; yields its port.

    Args:
        heads: takes the head of each request.
        on_answer: called before a connection is closed.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        for piece in [HEAD, *pieces]:
            writer.write(piece)
            await writer.drain()
        on_answer()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def answered(first: Sequence[bytes], second: Sequence[bytes], *, is_killed: bool) -> tuple[Tally, list[bytes]]:
    """One request that the first gateway gets and the second one after it; returns the tally and the heads."""
    heads: list[bytes] = []
    nodes = [Node(f"gateway-{i}", [], {}, Path(), "gateway", is_registered=True) for i in range(2)]

    def kill() -> None:
        if is_killed:
            nodes[1].killed_at, nodes[1].is_registered = time.monotonic(), False

    async with AsyncExitStack() as stack:
        # The second in the list has the first turn.
        ports = [await stack.enter_async_context(gateway(second, heads, lambda: None))]
        ports += [await stack.enter_async_context(gateway(first, heads, kill))]
        clients = {node.name: Client("127.0.0.1", port) for node, port in zip(nodes, ports, strict=True)}
        tally = Tally()
        service: Any = SimpleNamespace(gateways=nodes, clients=clients)
        load = Load(ChaosConfig(requests=1), service, {0: REFERENCE}, tally, tell=lambda text: None)
        await load.run(iter([COMPLETION]))
        for client in clients.values():
            client.close()
    return tally, heads


BEGUN = [event(1), event(2)]
RETRIES = {
    "the whole answer": ([event(1), event(2), event(3), *END], Verdict.EQUAL),
    "only what was missing": ([event(3), *END], Verdict.WRONG),
    "a token twice": ([event(1), event(2), event(2), event(3), *END], Verdict.WRONG),
    "a token missing": ([event(1), event(3), *END], Verdict.WRONG),
    "no end": ([event(1), event(2)], Verdict.LOST),
}


@pytest.mark.parametrize("name", RETRIES)
async def test_the_answer_of_the_next_gateway_must_be_whole_and_exact(name: str) -> None:
    pieces, verdict = RETRIES[name]
    tally, heads = await answered(BEGUN, pieces, is_killed=True)
    assert dict(tally.verdicts) == {verdict: 1}
    assert tally.num_resent == 1
    assert bool(broken_invariants(tally, Findings())) is (verdict is not Verdict.EQUAL)
    keys = {line for head in heads for line in head.split(b"\r\n") if line.startswith(b"Idempotency-Key: ")}
    assert (len(heads), len(keys)) == (2, 1)


async def test_a_wrong_beginning_is_seen_although_the_gateway_was_killed() -> None:
    tally, heads = await answered([event(2)], RETRIES["the whole answer"][0], is_killed=True)
    assert dict(tally.verdicts) == {Verdict.WRONG: 1}
    assert len(heads) == 1


async def test_a_connection_that_a_living_gateway_drops_is_a_lost_request() -> None:
    tally, heads = await answered(BEGUN, RETRIES["the whole answer"][0], is_killed=False)
    assert dict(tally.verdicts) == {Verdict.LOST: 1}
    assert len(heads) == 1


@pytest.mark.parametrize(("max_idle_s", "verdict"), [(60.0, Verdict.LOST), (0.0, Verdict.EQUAL)])
async def test_a_request_is_lost_with_its_connection_even_if_that_was_used_before(
    max_idle_s: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway reads a second request on its first connection, and hangs up without an answer."""
    heads: list[bytes] = []
    num_connections, all_closed = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        all_closed.clear()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for is_lost in (False, True):
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                await reader.readexactly(len(COMPLETION.body))
                writer.writelines([] if is_lost else [HEAD, *RETRIES["the whole answer"][0]])
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        num_connections -= 1
        if not num_connections:
            all_closed.set()

    monkeypatch.setattr(client, "MAX_IDLE_S", max_idle_s)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        own = Client("127.0.0.1", server.sockets[0].getsockname()[1])
        first, second = [await own.send(COMPLETION, 60.0) for _ in range(2)]
        own.close()
        await asyncio.wait_for(all_closed.wait(), 60)
    assert [judge(one, REFERENCE)[0] for one in (first, second)] == [Verdict.EQUAL, verdict]
    assert len(heads) == 2


async def test_a_call_that_takes_too_long_leaves_no_connection() -> None:
    has_ended = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()  # returns at the end of the connection, whatever the client has sent by then
        has_ended.set()
        writer.close()

    async with await asyncio.start_server(wait, "127.0.0.1", 0) as server:
        client = Client("127.0.0.1", server.sockets[0].getsockname()[1])
        assert await client.call("GET", "/v1/workers", timeout_s=0.1) == (0, b"")
        await asyncio.wait_for(has_ended.wait(), 60)


def test_each_api_has_its_own_way_to_give_the_key() -> None:
    assert keyed(COMPLETION, "k") == (COMPLETION, "Idempotency-Key: k\r\n")
    request, headers = keyed(NATIVE, "k")
    assert (request.path, json.loads(request.body)["rid"], headers) == ("/generate", "k", "")


def test_a_pause_lasts_until_the_next_gateway_sends_a_token_that_the_client_did_not_have() -> None:
    killed = Answer(began_at=1.0, stamps=[1.5, 2.0], counts=[1, 2])
    down = Answer(began_at=2.5)
    retry = Answer(began_at=3.0, stamps=[3.1, 3.2, 3.3], counts=[1, 3, 4], is_complete=True)
    seen = as_seen([killed, down], retry)
    assert (seen.began_at, seen.stamps, seen.is_complete) == (1.0, [1.5, 2.0, 3.2, 3.3], True)
