"""The gateway over TLS: real clients, streams, clients that vanish or stall, and certificates that cannot be used."""

import asyncio
import contextlib
import os
import socket
import ssl

import aiohttp
import httpx2
import openai
import pytest
from support.gateway.certificates import certificate, make_certificate
from support.gateway.fake_nodes import running

from common.config.gateway import GatewayConfig
from common.errors import ConfigError
from gateway.http.access.tls import make_tls_context

__all__ = ["certificate"]

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "ab", "max_tokens": 5}


@pytest.fixture
async def stack(folder, certificate):
    async with running(folder, **certificate.options) as running_stack:
        await running_stack.pair()
        yield running_stack


@contextlib.asynccontextmanager
async def connected(stack, certificate, **options):
    host, port = (None, None) if "sock" in options else stack.gateway._http.address
    values = {"ssl": certificate.client_context, "server_hostname": "localhost", **options}
    reader, writer = await asyncio.open_connection(host, port, **values)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_openais_client_streams_over_tls(stack, certificate):
    assert stack.url.startswith("https://127.0.0.1:")
    http = httpx2.AsyncClient(verify=certificate.client_context)
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0, http_client=http) as client:
        whole = await client.completions.create(model="tiny", **BODY)
        stream = await client.completions.create(model="tiny", stream=True, **BODY)
        pieces = [event.choices[0].text async for event in stream]
    assert "".join(pieces) == whole.choices[0].text == "ababa"


async def test_a_client_without_the_certificate_is_not_served(stack):
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.ConnectError, match="certificate verify failed"):
            await client.get(stack.url + "/health")


async def test_plain_http_and_old_versions_of_tls_are_refused(stack, certificate):
    with pytest.raises(aiohttp.ClientError):
        await stack.client.get(stack.url.replace("https", "http") + "/health")
    old = certificate.client_context
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        async with connected(stack, certificate, ssl=old):
            pass
    async with stack.client.get(stack.url + "/health", ssl=certificate.client_context) as answer:
        assert answer.status == 200


async def test_a_client_that_says_nothing_is_closed(folder, certificate, monkeypatch):
    monkeypatch.setattr("gateway.http.http_server.HANDSHAKE_S", 0.2)
    async with running(folder, **certificate.options) as stack:
        host, port = stack.gateway._http.address
        reader, writer = await asyncio.open_connection(host, port)  # no handshake at all
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    monkeypatch.setattr("gateway.http.http_server.HANDSHAKE_S", 60.0)
    async with running(folder, **certificate.options, options={"header_timeout_s": 0.2}) as stack:
        async with connected(stack, certificate) as (reader, _):  # no request after it
            assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.parametrize("how", ["abort", "close", "half"])
async def test_a_client_that_vanishes_ends_its_stream(stack, certificate, how):
    stack.silence()
    prefill = stack.nodes[0]
    raw = socket.create_connection(stack.gateway._http.address)
    async with connected(stack, certificate, sock=raw) as (reader, writer):
        body = b'{"prompt": "a", "max_tokens": 9, "stream": true}'
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (COMPLETIONS.encode(), len(body)) + body)
        rid = await prefill.only_rid()
        prefill.tokens(rid, 0, (65,))
        assert b"200 OK" in await reader.readuntil(b"data: ")
        if how == "abort":
            writer.transport.abort()
        elif how == "close":
            writer.close()
        else:
            raw.shutdown(socket.SHUT_WR)  # without TLS's own goodbye
        await prefill.until(lambda: rid in prefill.aborts)


async def test_a_client_that_does_not_read_is_disconnected(folder, certificate, monkeypatch):
    monkeypatch.setattr("gateway.http.streaming.STALL_S", 0.2)
    async with running(folder, **certificate.options) as stack:
        await stack.silent_pair(context_length=500_000, num_pages=40_000)
        prefill, decode = stack.nodes
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(stack.gateway._http.address)
        async with connected(stack, certificate, sock=raw, limit=1 << 10) as (_, writer):
            body = b'{"text": "a", "stream": true, "deadline_ms": 1000, "sampling_params": {"max_new_tokens": 450000}}'
            writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.transport.pause_reading()
            rid = await prefill.only_rid()
            prefill.tokens(rid, 0, (65,))
            for i in range(60):
                decode.tokens(rid, 1 + 1000 * i, (65,) * 1000)
            await prefill.until(lambda: rid in prefill.aborts)


async def test_a_message_that_is_no_http_gets_the_envelope_over_tls(stack, certificate, monkeypatch):
    monkeypatch.setattr("gateway.http.http_connection.LINGER_S", 0.2)
    async with connected(stack, certificate) as (reader, writer):
        writer.write(b"nonsense\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"invalid_request"' in answer


async def test_a_stop_ends_connections_over_tls(folder, certificate):
    async with running(folder, **certificate.options) as stack:
        async with connected(stack, certificate) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b'"ok"}')
            await stack.gateway.stop()
            assert await asyncio.wait_for(reader.read(), 60) == b""
        stack.gateway.stop = _noop


async def _noop():
    pass


# ---- certificates that cannot be used ------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "lacking"), [("tls_cert", "--tls-key"), ("tls_key", "--tls-cert")])
def test_a_certificate_needs_its_key_and_a_key_its_certificate(given, lacking):
    with pytest.raises(ConfigError, match=f"needs {lacking} too"):
        GatewayConfig(**{given: "x.pem"})


def test_files_that_cannot_be_used_are_refused_with_their_flags(certificate, tmp_path):
    cert, key = str(certificate.cert), str(certificate.key)
    with pytest.raises(ConfigError, match=r"--tls-cert .*none.pem cannot be read: No such file"):
        make_tls_context(str(tmp_path / "none.pem"), key)
    with pytest.raises(ConfigError, match=r"--tls-key .*none.pem cannot be read: No such file"):
        make_tls_context(cert, str(tmp_path / "none.pem"))
    (tmp_path / "text.pem").write_text("text")
    with pytest.raises(ConfigError, match="both must be PEM and belong together"):
        make_tls_context(str(tmp_path / "text.pem"), key)
    other = make_certificate(tmp_path)
    with pytest.raises(ConfigError, match="key values mismatch; both must be PEM"):
        make_tls_context(cert, str(other.key))


def test_a_named_pipe_is_refused_and_a_pipe_of_the_shell_is_read(certificate, tmp_path):
    os.mkfifo(tmp_path / "key.pem")
    with pytest.raises(ConfigError, match=r"--tls-key .*/key\.pem is a named pipe; name a regular file"):
        make_tls_context(str(certificate.cert), str(tmp_path / "key.pem"))
    read, write = os.pipe()
    os.write(write, certificate.key.read_bytes())
    os.close(write)
    make_tls_context(str(certificate.cert), f"/dev/fd/{read}")
    os.close(read)


def test_an_encrypted_key_is_refused(tmp_path):
    made = make_certificate(tmp_path, "-passout", "pass:secret")
    with pytest.raises(ConfigError, match="--tls-key is encrypted; give a key without a password"):
        make_tls_context(str(made.cert), str(made.key))


def test_a_key_that_others_can_read_is_warned_of(certificate, caplog):
    make_tls_context(str(certificate.cert), str(certificate.key))
    assert not caplog.text
    certificate.key.chmod(0o644)
    make_tls_context(str(certificate.cert), str(certificate.key))
    certificate.key.chmod(0o600)
    assert "can be read or changed by other users" in caplog.text
