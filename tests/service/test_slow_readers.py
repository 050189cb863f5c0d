"""Clients that stop reading their streams do not keep others from being served, and lose nothing."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from support.service.client import prompt_of
from support.service.service import running

#: Log-probabilities make events large, so that few of them fill the buffers of a connection.
BODY = {"stream": True, "max_tokens": 600, "logprobs": 20, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
async def test_readers_that_stop_leave_the_decode_slots_to_others(tmp_path: Path) -> None:
    options = {"gateway_options": {"max_unread_tokens": 20}, "node_options": {"max_running_requests": 2}}
    with running(tmp_path, **options) as service:
        async with service.client() as client:
            slow = [await stalled_stream(service.port, prompt_of(20, number)) for number in range(2)]
            async with asyncio.timeout(240):
                while (await client.counters())["decode-0"]["pauses"] < 2:
                    await asyncio.sleep(0.1)
            quick = [client.begin(prompt_of(20, 10 + number), 20) for number in range(4)]
            for exchange in quick:
                assert len((await exchange.end()).ids) == 20
            for number, (reader, writer) in enumerate(slow):
                events = await rest(reader)
                writer.close()
                assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == BODY["max_tokens"]
                whole = await client.generate(prompt_of(20, number), 600, temperature=0)
                assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
            await client.settled()


async def stalled_stream(port, prompt):
    """A connection with small buffers, which has sent a request and reads nothing yet."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 10)
    body = json.dumps({**BODY, "prompt": list(prompt)}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    return reader, writer


async def rest(reader):
    """The events of a chunked answer."""
    data = b""
    async with asyncio.timeout(240):
        while not data.endswith(b"0\r\n\r\n"):
            data += await reader.read(1 << 16)
    _, _, body = data.partition(b"\r\n\r\n")
    whole = b""
    while (size := int(body.split(b"\r\n", 1)[0], 16)) > 0:
        _, _, body = body.partition(b"\r\n")
        whole, body = whole + body[:size], body[size + 2 :]
    return [json.loads(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: {")]
