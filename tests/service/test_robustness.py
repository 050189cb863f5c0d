"""Bad input, overload, and garbage on every port are refused or dropped and counted, and the service continues."""

import asyncio
import io
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from support.service.client import Client, prompt_of
from support.service.processes import resident_bytes
from support.service.service import Service, running
from support.wire.raw_peers import raw_peer

from common.wire.messages import PROTOCOL_VERSION, Abort, Grant, Header, Heartbeat, Message, Ping, Tokens
from common.wire.process_id import new_incarnation
from scripts.chaos_harness.process_resources import num_descriptors

OPTIONS = {"chunked_prefill_size": 64, "max_total_tokens": 3000}
OK = {"model": "m", "prompt": "To be", "max_tokens": 2}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hark"}], "max_tokens": 2}
NATIVE = {"text": "To be", "sampling_params": {"max_new_tokens": 2}}
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("robust"), node_options=OPTIONS) as service:
        yield service


# ---- bad input ------------------------------------------------------------------------------------------------------

#: Path, body, the field that the error must name, and the status.
BAD: list[tuple[str, Any, str, int]] = [
    (COMPLETIONS, {**OK, "model": "another"}, "model", 404),
    (COMPLETIONS, {**OK, "model": 7}, "model", 400),
    (COMPLETIONS, {"model": "m"}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": ""}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": []}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": [[]]}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": ["To be", 5]}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": {"a": 1}}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": [-1]}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": [1024]}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": [10**30]}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": [1.5]}, "prompt", 400),
    (COMPLETIONS, {**OK, "prompt": [5] * 4096}, "prompt", 400),  # as long as the context
    (COMPLETIONS, {**OK, "prompt": [5] * 3500}, "prompt", 400),  # larger than the pools
    (COMPLETIONS, {**OK, "prompt": "word " * 200_000}, "prompt", 400),
    (COMPLETIONS, {**OK, "max_tokens": -1}, "max_tokens", 400),
    (COMPLETIONS, {**OK, "max_tokens": 0}, "max_tokens", 400),
    (COMPLETIONS, {**OK, "max_tokens": 10**12}, "max_tokens", 400),
    (COMPLETIONS, {**OK, "max_tokens": 4095}, "max_tokens", 400),
    (COMPLETIONS, {**OK, "max_tokens": "7"}, "max_tokens", 400),
    (COMPLETIONS, {**OK, "min_tokens": 3}, "min_tokens", 400),
    (COMPLETIONS, {**OK, "temperature": -0.1}, "temperature", 400),
    (COMPLETIONS, {**OK, "temperature": "hot"}, "temperature", 400),
    (COMPLETIONS, b'{"model": "m", "prompt": "To be", "temperature": NaN}', "temperature", 400),
    (COMPLETIONS, b'{"model": "m", "prompt": "To be", "temperature": Infinity}', "temperature", 400),
    (COMPLETIONS, b'{"model": "m", "prompt": "To be", "temperature": 1e999}', "temperature", 400),
    (COMPLETIONS, {**OK, "top_p": -0.01}, "top_p", 400),
    (COMPLETIONS, {**OK, "top_p": 1.01}, "top_p", 400),
    (COMPLETIONS, {**OK, "top_k": -2}, "top_k", 400),
    (COMPLETIONS, {**OK, "min_p": 2}, "min_p", 400),
    (COMPLETIONS, {**OK, "seed": 2**70}, "seed", 400),
    (COMPLETIONS, {**OK, "stop": ["x"] * 99}, "stop", 400),
    (COMPLETIONS, {**OK, "stop_token_ids": [5000]}, "stop_token_ids", 400),
    (COMPLETIONS, {**OK, "logprobs": 99}, "logprobs", 400),
    (COMPLETIONS, {**OK, "deadline_ms": -5}, "deadline_ms", 400),
    (COMPLETIONS, {**OK, "deadline_ms": 0}, "deadline_ms", 400),
    (COMPLETIONS, {**OK, "priority": "high"}, "priority", 400),
    (COMPLETIONS, {**OK, "cache_salt": 5}, "cache_salt", 400),
    (COMPLETIONS, {**OK, "n": 0}, "n", 400),
    (COMPLETIONS, {**OK, "n": 2, "best_of": 3}, "best_of", 400),
    (COMPLETIONS, {**OK, "logit_bias": {"1024": 1}}, "logit_bias", 400),
    (COMPLETIONS, {**OK, "wibble": 1}, "wibble", 400),
    (CHATS, {**CHAT, "messages": []}, "messages", 400),
    (CHATS, {**CHAT, "messages": [{"role": "bard", "content": "x"}]}, "messages.role", 400),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages.content", 400),
    (CHATS, {**CHAT, "messages": "Hark"}, "messages", 400),
    (CHATS, {**CHAT, "max_completion_tokens": -4}, "max_completion_tokens", 400),
    (CHATS, {**CHAT, "tools": [{}]}, "tools.function", 400),
    (CHATS, {**CHAT, "chat_template_kwargs": 3}, "chat_template_kwargs", 400),
    (GENERATE, {"sampling_params": {}}, "text", 400),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text", 400),
    (GENERATE, {"input_ids": []}, "input_ids", 400),
    (GENERATE, {"input_ids": [[1], []]}, "input_ids", 400),
    (GENERATE, {"input_ids": ["a"]}, "input_ids", 400),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -3}}, "sampling_params.max_new_tokens", 400),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a(b"}}, "sampling_params.regex", 400),
    (GENERATE, {"text": "a", "rid": ""}, "rid", 400),
    (GENERATE, {"text": ["a", "b"], "rid": ["x", "x"]}, "rid", 400),
    ("/detokenize", {"tokens": ["a"]}, "tokens", 400),
    ("/abort_request", {}, "rid", 400),
]
#: Bodies that are not valid JSON or too large, so that the error names no field.
BROKEN: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b'{"model": "m", "prompt": "\xff\xfe"}', 400),
    (b"\xff" * 100, 400),
    (b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 413),
    (b'{"user": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b', "prompt": "x"}', 400),
    (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413),
]


async def refused(client: Client, path: str, body: Any, status: int) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"Content-Type": "application/json"}
    async with client.session.post(path, data=io.BytesIO(data), headers=headers) as answer:
        error: dict[str, Any] = (await answer.json())["error"]
        assert answer.status == status, (path, data[:100], error)
    assert error["message"] and error["code"] and error["type"]
    return error


async def test_bad_input_is_refused_with_the_name_of_its_field(service: Service) -> None:
    async with service.client() as client:
        before = await client.settled()
        for path, body, field, status in BAD:
            error = await refused(client, path, body, status)
            assert error["param"] is not None, (path, str(body)[:100], error)
            assert re.sub(r"\[\d*\]", "", error["param"]) == field, (path, str(body)[:100], error)
            assert field.split(".")[-1] in error["message"]
        for body, status in BROKEN:
            await refused(client, COMPLETIONS, body, status)
        assert {name: counters["requests"] for name, counters in (await client.settled()).items()} == {
            name: counters["requests"] for name, counters in before.items()
        }, "a bad request reached a node"
        for path, body in ((COMPLETIONS, OK), (CHATS, CHAT), (GENERATE, NATIVE)):
            assert (await client.post(path, body))[0] == 200


async def test_bad_input_does_not_disturb_a_running_stream(service: Service) -> None:
    async with service.client() as client:
        expected = (await client.generate(prompt_of(20, 3), 300))["output_ids"]
        exchange = client.begin(prompt_of(20, 3), 300)
        for path, body, _, status in BAD[:20]:
            await refused(client, path, body, status)
        await exchange.end()
        assert list(exchange.ids) == expected


async def test_connections_that_do_not_speak_http_are_closed(service: Service) -> None:
    async with service.client() as client:
        for data in (b"\0" * 50, b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"\x16\x03\x01" * 9):
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(data)
            await asyncio.wait_for(reader.read(), 60)
            writer.close()
            await writer.wait_closed()
        for method, path, status in (("GET", "/generate", 405), ("POST", "/nothing", 404), ("PUT", "/v1/models", 405)):
            async with client.session.request(method, path) as answer:
                assert answer.status == status
        await client.generate("To be", 2)


# ---- overload -------------------------------------------------------------------------------------------------------


async def test_a_burst_over_the_queue_limit_gets_429_with_retry_after(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bounds = {"max_queued_requests": 4}
    nodes = {**bounds, "max_running_requests": 2}
    with running(tmp_path_factory.mktemp("burst"), gateway_options=bounds, node_options=nodes) as service:
        async with service.client() as client:
            exchanges = [client.begin(prompt_of(30, i), 250) for i in range(40)]
            await asyncio.gather(*(exchange.end() for exchange in exchanges))
            served = [exchange for exchange in exchanges if exchange.status == 200 and exchange.error is None]
            full = [exchange for exchange in exchanges if exchange.status == 429]
            assert len(served) + len(full) == 40, [(exchange.status, exchange.error) for exchange in exchanges]
            assert len(served) >= 4 and full
            for exchange in full:
                assert exchange.code == "queue_full"
                assert 1 <= int(exchange.headers["Retry-After"]) <= 60
            await client.settled()
            await client.generate(prompt_of(30, 99), 4)


async def test_requests_that_nodes_refuse_for_their_own_queue_limit_are_sent_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    nodes = {"max_queued_requests": 3, "max_running_requests": 2}
    with running(tmp_path_factory.mktemp("bound"), node_options=nodes) as service:
        async with service.client() as client:
            exchanges = [client.begin(prompt_of(30, i), 60) for i in range(40)]
            await asyncio.gather(*(exchange.end() for exchange in exchanges))
            assert {exchange.code for exchange in exchanges} == {""}
            await client.settled()
            counters = await client.counters()
            assert sum(node["interrupted_requests"] for node in counters.values()) > 0, "none was refused"


# ---- garbage --------------------------------------------------------------------------------------------------------


def data_port(row: dict[str, Any]) -> int:
    return int(row["register"]["address"].rpartition(":")[2])


def throw_bytes(port: int, seed: int) -> None:
    """Send random bytes, a broken ZMTP greeting, and a greeting followed by random bytes, each on a new connection."""
    drawn = random.Random(seed)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    for data in (
        drawn.randbytes(1000),
        b"\xff" * 64,
        greeting,
        greeting + drawn.randbytes(500),
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(data)


def encoded(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def garbage(me: str) -> list[list[bytes]]:
    """Return frames that a mailbox must drop: undecodable, of another version, or with a wrong sender or target."""
    ping = encoded(Ping())

    def header(version: int = PROTOCOL_VERSION, sender: str = me, target: str = "") -> bytes:
        return msgspec.msgpack.encode(Header(version, sender, target))

    return [
        [b""],
        [b"\xc1"],
        [b"one", b"two", b"three"],
        [header(), b"\xc1\xc1"],
        [header(), b""],
        [header(), msgspec.msgpack.encode({"type": "unheard-of"})],
        [header(), msgspec.msgpack.encode({"type": "ping", "extra": 1})],
        [header(), b"\x91" * 100_000],  # nested deep
        [header(version=PROTOCOL_VERSION + 1), ping],
        [header(version=0), ping],
        [header(sender=new_incarnation()), ping],
        [header(target=new_incarnation()), ping],
        [random.Random(5).randbytes(40), ping],
    ]


NUM_COUNTED = 13
STRAY: dict[str, list[Message]] = {  # well formed, from an unknown sender
    "gateway": [
        Heartbeat(0, 0, 0, 0, 0, {}),
        Abort("r", 0),
        Tokens("r", 0, 0, (1,)),
    ],
    "prefill": [Grant("r", 0, 1, 0, (1, 2)), Abort("r", 0)],
}


async def throw_frames(port: int, strays: list[Message], server: bytes = b"") -> None:
    """Send garbage and stray messages over ZMQ with the key of a node; ``server`` as in ``raw_peer``."""
    context = zmq.asyncio.Context()
    socket_, me = raw_peer(context, f"127.0.0.1:{port}", server=server)
    socket_.set(zmq.LINGER, 60_000)
    for frames in garbage(me):
        await socket_.send_multipart(frames)
    for stray in strays:
        await socket_.send_multipart([msgspec.msgpack.encode(Header(PROTOCOL_VERSION, me, "")), encoded(stray)])
    await asyncio.sleep(0.2)
    huge, _ = raw_peer(context, f"127.0.0.1:{port}", server=server)
    huge.set(zmq.LINGER, 0)
    await huge.send(b"x" * (17 << 20))  # over the limit of a frame: the connection is closed
    await asyncio.sleep(0.2)
    huge.close()
    socket_.close()
    await asyncio.to_thread(context.term)


async def dropped_by_gateway(client: Client) -> float:
    async with client.session.get("/metrics") as answer:
        rows = re.findall(r"^baton_control_messages_dropped_total\{.*\} (\S+)$", await answer.text(), re.MULTILINE)
    return sum(map(float, rows))


async def test_garbage_on_the_control_port_is_counted_and_dropped(service: Service) -> None:
    async with service.client() as client:
        expected = (await client.generate(prompt_of(20, 3), 200))["output_ids"]
        exchange = client.begin(prompt_of(20, 3), 200)
        before = await dropped_by_gateway(client)
        await throw_frames(service.control_port, STRAY["gateway"])
        async with asyncio.timeout(60):
            while await dropped_by_gateway(client) - before < NUM_COUNTED + 1:  # a node sends no Abort
                await asyncio.sleep(0.02)
        assert await dropped_by_gateway(client) - before == NUM_COUNTED + 1
        throw_bytes(service.control_port, 1)  # some of it parses as frames of ZMTP 1.0
        await exchange.end()
        assert list(exchange.ids) == expected
        assert set(await client.fresh()) == set(service.nodes)
        await client.settled()


async def test_garbage_on_a_prefill_nodes_data_port_is_counted_and_dropped(service: Service) -> None:
    async with service.client() as client:
        row = (await client.fresh())["prefill-0"]
        expected = (await client.generate(prompt_of(20, 3), 200))["output_ids"]
        exchange = client.begin(prompt_of(20, 3), 200)

        async def dropped() -> float:
            return (await client.counters())["prefill-0"]["dropped_messages"]

        before = await dropped()
        await throw_frames(data_port(row), STRAY["prefill"], bytes.fromhex(row["register"]["public_key"]))
        async with asyncio.timeout(60):
            while await dropped() - before < NUM_COUNTED + 1:  # a decode node sends no Abort
                await asyncio.sleep(0.02)
        assert await dropped() - before == NUM_COUNTED + 1
        throw_bytes(data_port(row), 2)
        await exchange.end()
        assert list(exchange.ids) == expected
        assert await client.generate(prompt_of(900, 4), 4)
        await client.settled()


def flood(port: int, count: int) -> None:
    """Open connections that never finish a handshake, 300 at most at once."""
    held: list[socket.socket] = []
    for number in range(count):
        held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        held[-1].sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47) if number % 2 else b"x" * 200)
        if len(held) > 300:
            held.pop(0).close()
    for connection in held:
        connection.close()


@pytest.mark.slow
async def test_a_flood_of_connections_of_a_stranger_leaves_nothing_behind(service: Service) -> None:
    async with service.client() as client:
        expected = (await client.generate(prompt_of(20, 3), 300))["output_ids"]
        await asyncio.to_thread(flood, service.control_port, 100)
        memory, descriptors = resident_bytes(service.pid("gateway")), num_descriptors(service.pid("gateway"))
        exchange = client.begin(prompt_of(20, 3), 300)
        await asyncio.to_thread(flood, service.control_port, 2_000)
        await exchange.end()
        assert list(exchange.ids) == expected
        async with asyncio.timeout(60):
            while num_descriptors(service.pid("gateway")) > descriptors:
                await asyncio.sleep(0.05)
        assert resident_bytes(service.pid("gateway")) - memory < 32 << 20
        assert {row["starts"] for row in (await client.fresh()).values()} == {1}
        await client.settled()
