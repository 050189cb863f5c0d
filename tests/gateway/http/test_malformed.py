"""Messages that are no valid requests: each gets an error in the envelope, or the end of the connection."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.fake_nodes import running
from support.wire.mutated_http import mutated

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
BODY = b'{"prompt": "ab", "max_tokens": 2}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
SEEDS = (
    WHOLE, CHUNKED, WHOLE.replace(b"2}", b'2, "stream": true}').replace(b"h: 33", b"h: 49"),
    b"GET /v1/models/tiny?a=%20 HTTP/1.1\r\n" + HOST + b"Accept: */*\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n", b"POST /flush_cache HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\n\r\n",
    b"DELETE /v1/responses/resp_1 HTTP/1.1\r\n" + HOST + b"X-Request-ID: a\r\n\r\n", WHOLE + CHUNKED,
    WHOLE.replace(HOST, HOST + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n"),
)  # fmt: skip


@pytest.fixture
async def stack(folder):
    async with running(folder, options={"header_timeout_s": 1.0, "body_timeout_s": 1.0}) as running_stack:
        await running_stack.pair()
        yield running_stack


async def exchange(stack, data):
    """All that the gateway sends until it ends the connection, which this side keeps open."""
    reader, writer = await asyncio.open_connection(*stack.gateway._http.address)
    received = b""
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(60):
                while piece := await reader.read(1 << 16):
                    received += piece
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return received


def answers_of(received):
    """Status, headers and body of each answer that is not a stream."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        assert status.startswith(b"HTTP/1.1 "), received[:200]
        if b"transfer-encoding" in headers or status.split()[1] == b"100":
            body, _, rest = rest.partition(b"0\r\n\r\n") if b"transfer-encoding" in headers else (b"", b"", rest)
        else:
            length = int(headers.get(b"content-length", b"0"))
            body, rest = rest[:length], rest[length:]
        found.append((int(status.split()[1]), headers, body))
        received = rest
    return found


def check(received):
    """Every error is in the envelope; nothing names software, and no answer is a failure of the gateway."""
    for status, headers, body in answers_of(received):
        assert status < 500, body
        assert b"server" not in headers
        assert b"Traceback" not in body
        if status >= 400:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert headers[b"x-request-id"]


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # a TLS handshake
        (b"GET / HTTP/9.9\r\n" + HOST + b"\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"G\0T / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: b\0c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A\0: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b" folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: " + b"b" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 1e3\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\na\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\na\r\n", 400),
        (POST + b"Content-Length: 3\r\n\r\n{\xff}", 400),
        (POST + b'Content-Length: 17\r\n\r\n{"prompt": "\xff\xfe"} ', 400),
        (POST + b'Content-Length: 22\r\n\r\n{"prompt": "\\ud800ab"}', 400),
        (POST + b"Content-Length: 9\r\n\r\nshort", 408),
        (POST + b"Content-Length: 99999999\r\n\r\n", 413),
        (POST + b"Content-Type: text/plain; charset=\xff\r\nContent-Length: 2\r\n\r\n{}", 415),
        (POST + b"Origin: http://\xff\r\nContent-Length: 2\r\n\r\n{}", 403),
        (b"GET /v1/models/%ff%zz%00 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"GET /v1/workers/gateway/decisions?limit=%ff&%zz HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET http://evil.example/health HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        (b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (b"CONNECT evil.example:80 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    ],
)  # fmt: skip
async def test_each_kind_of_broken_message_has_its_status_in_the_envelope(stack, monkeypatch, data, status):
    monkeypatch.setattr("gateway.http.http_connection.LINGER_S", 0.2)
    received = await exchange(stack, data)
    check(received)
    assert [answer[0] for answer in answers_of(received)][:1] == [status], received


@given(st.integers(0, 1 << 32))
@settings(max_examples=20)
def test_a_mutation_is_the_same_for_the_same_seed(seed):
    assert mutated(seed, SEEDS) == mutated(seed, SEEDS)


@pytest.mark.slow
async def test_mutated_requests_get_an_envelope_or_the_end_of_the_connection(stack, caplog, monkeypatch):
    monkeypatch.setattr("gateway.http.http_connection.LINGER_S", 0.2)
    for first in range(0, 2000, 200):
        seeds = range(first, first + 200)
        received = await asyncio.gather(*(exchange(stack, mutated(seed, SEEDS)) for seed in seeds))
        for seed, data in zip(seeds, received, strict=True):
            try:
                check(data)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {mutated(seed, SEEDS)!r}") from error
    assert "Traceback" not in caplog.text
    assert (await stack.post("/v1/completions", {"prompt": "ab", "max_tokens": 2}))[0] == 200
    assert (await stack.get("/server_info"))[1]["num_in_flight"] == 0
