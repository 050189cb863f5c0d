"""Broken, slow and oversized HTTP is answered or dropped, and the service continues."""

import asyncio
import contextlib
import gzip
import io
import json
from urllib.parse import urlsplit

import pytest
from support.gateway.fake_nodes import running


@pytest.fixture
async def stack(stack):
    yield stack
    status, _ = await stack.post("/v1/completions", {"prompt": "still there", "max_tokens": 1})
    assert status == 200


async def test_paths_methods_and_content_types(stack):
    for method, path, kind, status in (
        ("POST", "/nothing", "application/json", 404),
        ("GET", "/v1/completions", "application/json", 405),
        ("DELETE", "/health", "application/json", 405),
        ("POST", "/v1/completions", "text/plain", 415),
        ("POST", "/v1/completions", "application/x-www-form-urlencoded", 415),
        ("POST", "/v1/completions", "application/json; charset=utf-8", 200),
    ):
        data = json.dumps({"prompt": "a", "max_tokens": 1})
        headers = {"Content-Type": kind}
        async with stack.client.request(method, stack.url + path, data=data, headers=headers) as answer:
            assert answer.status == status
            body = await answer.json()
            assert status == 200 or body["error"]["message"]
            assert (status == 405) == ("Allow" in answer.headers)


async def test_a_compressed_body_is_refused_by_its_encoding(stack):
    data = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for encoding, body, status in (("identity", data, 200), ("gzip", gzip.compress(data), 415), ("\xff", data, 415)):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        async with stack.client.post(stack.url + "/v1/completions", data=io.BytesIO(body), headers=headers) as answer:
            assert answer.status == status
            assert status == 200 or "Content-Encoding" in (await answer.json())["error"]["message"]


async def test_large_bodies_are_refused_without_reading_them_to_the_end(folder):
    async with running(folder, max_body_bytes=1 << 20) as stack:
        await stack.pair()
        data = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
        for body in (io.BytesIO(data), pieces(data)):
            headers = {"Content-Type": "application/json"}
            async with stack.client.post(stack.url + "/v1/completions", data=body, headers=headers) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "body_too_large"
        assert (await stack.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200


async def pieces(data):
    for start in range(0, len(data), 1 << 16):
        yield data[start : start + (1 << 16)]


async def raw(stack, data, enough=None):
    """The server's answer to these bytes, until it closes the connection or has sent ``enough``."""
    address = urlsplit(stack.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(data)
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while (enough is None or enough not in answer) and (piece := await reader.read(1 << 16)):
                answer += piece
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


async def test_a_body_that_stops_arriving_gets_408(folder):
    async with running(folder, options={"body_timeout_s": 0.2}) as stack:
        await stack.pair()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        answer = await raw(stack, head, enough=b"body did not arrive")
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_connection_whose_headers_stop_arriving_is_closed(folder):
    async with running(folder, options={"header_timeout_s": 0.3}) as stack:
        assert await raw(stack, b"POST /v1/completions HTTP/1.1\r\nHost") == b""


async def test_broken_http_gets_a_client_error(stack):
    for data in (
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ):
        answer = await raw(stack, data)
        assert answer.startswith(b"HTTP/1.") and answer.split()[1].startswith(b"4"), (data[:40], answer[:100])


async def test_expect_100_continue_is_answered(stack):
    body = b'{"prompt":"a","max_tokens":1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    answer = await raw(stack, head + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize("num_before", [0, -5])
async def test_a_client_that_was_accepted_before_a_stop_gets_its_answer(folder, monkeypatch, num_before):
    """Also if only part of its request has come by then."""
    monkeypatch.setattr("gateway.server.FIRST_REQUEST_S", 60.0)
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with running(folder) as stack:
        await stack.pair()
        address, server = urlsplit(stack.url), stack.gateway._http
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(data[:num_before])
        while not (server.is_answering if num_before else server.has_new_connections):
            await asyncio.sleep(0.005)
        stop = asyncio.create_task(stack.gateway.stop(60.0))
        while server._servers[0].is_serving():
            await asyncio.sleep(0.005)
        writer.write(data[num_before:])
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await stop
        stack.gateway.stop = _noop


async def _noop():
    pass
