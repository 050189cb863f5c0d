"""What one HTTP connection guarantees to any ASGI application, over raw sockets."""

import asyncio
import contextlib
import re
import socket
from dataclasses import replace

import pytest
from support.gateway.certificates import certificate
from support.gateway.raw_http import (
    ANY_HOST,
    answer_of,
    connected,
    echo_body,
    exchange,
    reply,
    say_path,
    serving,
    until_closed,
    wait_for_ever,
)

from common.errors import ConfigError
from gateway.http import http_connection, request_cycle
from gateway.http.access.tls import make_tls_context
from gateway.http.http_connection import MAX_HEADER_BYTES, MAX_PIPELINED
from gateway.http.http_server import HttpServer
from gateway.http.request_cycle import ConnectionOptions

__all__ = ["certificate"]

POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"


# ---- answers --------------------------------------------------------------------------------------------------------


async def test_a_connection_serves_several_requests_and_closes_when_asked():
    async with serving(say_path) as (app, server), connected(server) as (reader, writer):
        for i in range(3):
            writer.write(b"GET /%d?a=b HTTP/1.1\r\nHost: x\r\n\r\n" % i)
            status, headers, body = await answer_of(reader)
            assert (status, body) == (200, b"/%d?a=b" % i)
            assert "connection" not in headers
        writer.write(b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await answer_of(reader))[1]["connection"] == "close"
        assert await until_closed(reader) == b""
        await app.until(lambda: len(app.ended) == 4)
        assert app.ended[-1] == ("/last", 200)


async def test_every_answer_has_a_date_and_the_request_id_of_the_client_or_a_new_one():
    async with serving(say_path) as (_, server), connected(server) as (reader, writer):
        new = set()
        for sent, is_taken in (
            (b"mine", True), (b"!~", True), (b"x" * 128, True), (b"x" * 129, False), (b"a b", False), (b"\xe4", False),
            (b"", False),
        ):  # fmt: skip
            writer.write(b"GET / HTTP/1.1\r\nX-Request-ID: %b\r\n\r\n" % sent)
            _, headers, _ = await answer_of(reader)
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["date"])
            if is_taken:
                assert headers["x-request-id"] == sent.decode()
            else:
                assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
                new.add(headers["x-request-id"])
        assert len(new) == 4


async def test_pipelined_requests_are_answered_in_order():
    async with serving(echo_body) as (_, server), connected(server) as (reader, writer):
        bodies = [b"%d" % i * (i + 1) for i in range(10)]
        writer.write(b"".join(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies))
        assert [(await answer_of(reader))[2] for _ in bodies] == bodies


async def test_a_connection_ends_after_too_many_pipelined_requests():
    async with serving(say_path) as (_, server):
        answers = await exchange(server, b"GET /a HTTP/1.1\r\n\r\n" * 2_000)
        assert answers.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED + 1
        assert (await exchange(server, b"GET /b HTTP/1.1\r\nConnection: close\r\n\r\n")).endswith(b"/b?")


async def test_head_is_answered_like_get_without_the_body():
    async def get_only(app, scope, receive, send):
        assert scope["method"] == "GET"
        await reply(send, b"12345")

    async with serving(get_only) as (_, server), connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(b"HEAD / HTTP/1.1\r\n\r\n")
            assert b"content-length: 5\r\n" in await reader.readuntil(b"\r\n\r\n")


async def test_an_answer_without_a_length_is_chunked_or_for_http_1_0_ends_with_the_connection():
    async def two_parts(app, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async with serving(two_parts) as (_, server):
        answer = await exchange(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        answer = await exchange(server, b"GET / HTTP/1.0\r\n\r\n")
        assert answer.endswith(b"\r\n\r\nonetwo")
        assert b"chunked" not in answer


async def test_an_offer_of_another_protocol_is_ignored():
    """Java's client offers HTTP/2 in this way with its first request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQ\r\n"
    async with serving(echo_body) as (_, server), connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(POST + offer + b"Content-Length: 2\r\n\r\nhi")
            assert (await answer_of(reader))[2] == b"hi"
        writer.write(b"GET / HTTP/1.1\r\n" + offer + b"\r\n")
        assert (await answer_of(reader))[2] == b""


@pytest.mark.parametrize(("version", "connection"), [(b"1.1", b"Upgrade, close"), (b"1.0", b"Upgrade")])
async def test_an_offer_of_another_protocol_on_a_connection_that_is_to_close_is_ignored(version, connection):
    head = b"POST /p HTTP/%b\r\nHost: x\r\nConnection: %b\r\nUpgrade: h2c\r\n" % (version, connection)
    async with serving(echo_body) as (_, server):
        answer = await exchange(server, head + b"Content-Length: 2\r\n\r\nhi")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close" in answer
        assert answer.endswith(b"\r\n\r\nhi")


async def test_a_refused_head_request_is_answered_without_a_body():
    async with serving(say_path) as (_, server):
        answer = await exchange(server, b"HEAD / HTTP/1.1\r\nx: " + b"a" * (65 << 10) + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431")
        assert answer.endswith(b"\r\n\r\n")


async def test_a_failing_application_leaves_a_traceback_and_a_closed_connection(caplog):
    async def fails(app, scope, receive, send):
        raise LookupError("a bug")

    async with serving(fails) as (app, server):
        assert await exchange(server, b"GET /x HTTP/1.1\r\n\r\n") == b""
        assert app.ended == [("/x", 499)]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\n", b"a\0"])
async def test_a_header_with_a_line_break_is_never_sent(value, caplog):
    async def inject(app, scope, receive, send):
        await reply(send, headers=[(b"x-a", value)])

    async with serving(inject) as (_, server):
        assert await exchange(server, b"GET / HTTP/1.1\r\n\r\n") == b""
    assert "line break" in caplog.text


async def test_an_ipv6_address_is_served():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    async with serving(say_path, host="::1") as (_, server):
        assert server.address[0] == "::1"
        assert (await exchange(server, b"GET /six HTTP/1.1\r\nConnection: close\r\n\r\n")).endswith(b"/six?")


# ---- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_a_client_that_leaves_cancels_its_request(how):
    async with serving(wait_for_ever) as (app, server), connected(server) as (_, writer):
        writer.write(b"GET /gone HTTP/1.1\r\n\r\n")
        await app.until(lambda: app.seen)
        if how == "half":
            writer.write_eof()
        elif how == "reset":
            writer.transport.abort()
        else:
            writer.close()
        await app.until(lambda: app.cancelled)
        await app.until(lambda: app.ended)
        assert app.ended == [("/gone", 499)]
        await app.until(lambda: not server.connections)


async def test_a_request_that_arrives_together_with_the_end_of_its_connection_ends(caplog):
    async with serving(wait_for_ever) as (app, server), connected(server) as (reader, writer):
        writer.write(b"GET /gone HTTP/1.1\r\n\r\n" * 5)
        writer.write_eof()
        assert await until_closed(reader) == b""
        await app.until(lambda: not server.connections)
    assert caplog.text == ""


async def test_a_request_whose_client_leaves_before_the_application_begins_has_ended():
    async with serving(wait_for_ever) as (app, server), connected(server):
        await app.until(lambda: server.connections)
        (connection,) = server.connections
        connection.data_received(b"GET /gone HTTP/1.1\r\n\r\n")
        connection.eof_received()
        assert app.ended == [("/gone", 499)]
        await app.until(lambda: not server.connections)
    assert app.seen == []


async def test_work_after_an_answer_goes_on_when_the_client_leaves():
    done = asyncio.Event()

    async def answer_first(app, scope, receive, send):
        await reply(send)
        await app.until(lambda: not server.connections)
        done.set()

    async with serving(answer_first) as (app, server):
        async with connected(server) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await answer_of(reader)
        await asyncio.wait_for(done.wait(), 60)
        assert app.cancelled == []


async def test_an_application_that_listens_hears_of_the_end_of_its_answer():
    heard = []

    async def listen(app, scope, receive, send):
        await receive()
        await reply(send)
        heard.append(await receive())

    async with serving(listen) as (app, server), connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await answer_of(reader)
        await app.until(lambda: heard)
        assert heard == [{"type": "http.disconnect"}]


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"POST /p", b"GET / HTTP/1.1\r\nHost: x\r\nA"])
async def test_headers_that_arrive_too_slowly_end_the_connection(start):
    async with serving(say_path, header_timeout_s=0.3) as (app, server), connected(server) as (reader, writer):

        async def drip():
            with contextlib.suppress(ConnectionError):
                for byte in start or b"\r\n" * 100:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.01)

        dripping = asyncio.ensure_future(drip())
        assert await until_closed(reader) == b""
        await dripping
        assert app.seen == []


async def test_an_idle_connection_is_closed_after_the_time_for_headers():
    async def answer_impatiently(app, scope, receive, send):
        (connection,) = server.connections
        connection.options = replace(connection.options, header_timeout_s=0.1)
        await reply(send)

    async with serving(answer_impatiently) as (_, server), connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await answer_of(reader)
        assert await until_closed(reader) == b""


async def test_a_request_may_take_longer_than_its_headers_may():
    async def slow(app, scope, receive, send):
        await asyncio.sleep(1.5)
        await reply(send)

    async with serving(slow, header_timeout_s=1.0) as (_, server), connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await answer_of(reader))[0] == 200


@pytest.mark.parametrize("head", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
async def test_a_body_that_arrives_too_slowly_gets_408(head, monkeypatch):
    monkeypatch.setattr(http_connection, "LINGER_S", 0.1)
    async with serving(echo_body, body_timeout_s=0.2) as (_, server), connected(server) as (reader, writer):
        writer.write(POST + head)
        status, _, body = await answer_of(reader)
        assert (status, body) == (408, b"the body did not arrive within 0.2 s")
        assert await until_closed(reader) == b""


def tls_of(certificate):
    """What a server and its client need."""
    options = {"ssl": certificate.client_context, "server_hostname": "localhost"}
    return make_tls_context(str(certificate.cert), str(certificate.key)), options


async def endless(app, scope, receive, send):
    scope["state"].update(app.state)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})


@pytest.mark.parametrize("state", [{}, {request_cycle.RESPONSE_TIMEOUT: 0.3}])
async def test_a_client_that_does_not_read_is_disconnected(state, monkeypatch):
    monkeypatch.setattr(request_cycle, "STALL_S", 60.0 if state else 0.3)
    async with serving(endless) as (app, server), connected(server, limit=1 << 10) as (_, writer):
        app.state = state
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await app.until(lambda: app.ended)
        assert (app.cancelled, app.ended) == (["/"], [("/", 499)])
        await app.until(lambda: not server.connections)


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_whole_answer_that_is_not_read_ends_with_the_connection(has_tls, connection, certificate, monkeypatch):
    monkeypatch.setattr(http_connection, "STALL_S", 0.3)

    async def large(app, scope, receive, send):
        (connection,) = server.connections
        connection.options = replace(connection.options, header_timeout_s=0.3)
        await reply(send, b"x" * 50_000_000)

    tls, options = tls_of(certificate) if has_tls else (None, {})
    async with (
        serving(large, tls=tls) as (app, server),
        connected(server, limit=1 << 10, **options) as (_, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nConnection: %b\r\n\r\n" % connection)
        await app.until(lambda: app.ended)
        assert app.ended == [("/", 200)]
        await app.until(lambda: not server.connections)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
@pytest.mark.parametrize("has_tls", [False, True])
async def test_an_answer_that_is_read_slowly_is_sent_to_its_end(
    has_tls, connection, num_parts, certificate, monkeypatch
):
    part, piece = b"x" * 24_000_000, 4_000_000
    loop, later_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + later_s)

    async def large(app, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(num_parts):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    tls, options = tls_of(certificate) if has_tls else (None, {})
    async with (
        serving(large, tls=tls) as (app, server),
        connected(server, limit=1 << 10, **options) as (reader, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nConnection: %b\r\n\r\n" % connection)
        await reader.readuntil(b"\r\n\r\n")
        (held,) = server.connections
        num_pieces, num_buffered = num_parts * len(part) // piece, 3
        for _ in range(num_pieces - num_buffered):
            before = request_cycle.num_read(held.transport)
            async with asyncio.timeout(60):
                await reader.readexactly(piece)
            await app.until(lambda: request_cycle.num_read(held.transport) > before)  # noqa: B023
            later_s += 40.0  # of the 60 in which it must have read something
        await reader.readexactly(num_buffered * piece)
        await app.until(lambda: app.ended)
        assert app.ended == [("/", 200)]


# ---- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 3_000_000,
        b"GET /" + b"a" * 3_000_000,
    ],
    ids=["path", "one header", "many headers", "endless header", "endless path"],
)
async def test_headers_that_are_too_large_get_431(data):
    async with serving(say_path) as (app, server):
        answer = await exchange(server, data)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"message":"the request line and the headers exceed 65536 bytes"' in answer
        assert b"x-request-id: " in answer
        assert app.seen == []


async def test_headers_may_be_nearly_as_large_as_the_limit_and_arrive_in_pieces():
    async with serving(say_path) as (_, server), connected(server) as (reader, writer):
        for piece in (b"GET /a HTTP/1.1\r\nA: ", *[b"a" * 1000] * 60, b"\r\n\r\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        assert (await answer_of(reader))[0] == 200


async def test_an_endless_trailer_fails_the_request():
    async with serving(echo_body) as (app, server):
        answer = await exchange(
            server, POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nA: " + b"a" * 3_000_000
        )
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert [error.status for error in app.errors] == [400]


async def test_trailers_are_ignored():
    async with serving(echo_body) as (_, server), connected(server) as (reader, writer):
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Request-Id: t\r\n\r\n")
        assert (await answer_of(reader))[2] == b"a"
        writer.write(POST + b"Content-Length: 1\r\n\r\nb")
        assert (await answer_of(reader))[2] == b"b"


async def test_a_body_as_large_as_the_limit_is_taken_and_a_larger_one_gets_413():
    limit = 300_000
    async with serving(echo_body, max_body_bytes=limit) as (_, server), connected(server) as (reader, writer):
        chunk = b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000)
        for body, status in (
            (b"Content-Length: %d\r\n\r\n" % limit + b"x" * limit, 200),
            (b"Content-Length: %d\r\n\r\n" % (limit + 1) + b"x" * (limit + 1), 413),
            (b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3 + b"0\r\n\r\n", 200),
            (b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3 + b"1\r\nx\r\n0\r\n\r\n", 413),
            (b"Content-Length: 1\r\n\r\nx", 200),  # the rest of the refused body has been dropped
        ):
            writer.write(POST + body)
            assert (await answer_of(reader))[0] == status


async def test_a_length_over_the_limit_is_refused_before_the_client_is_told_to_continue():
    async with serving(echo_body) as (_, server):
        head = POST + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
        answer = await exchange(server, head)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer


async def test_a_client_that_waits_is_told_to_continue_when_the_body_is_read():
    async with serving(echo_body) as (_, server), connected(server) as (reader, writer):
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await answer_of(reader))[2] == b"hi"


async def test_a_client_of_http_1_0_is_not_told_to_continue():
    async with serving(echo_body) as (_, server), connected(server) as (reader, writer):
        writer.write(b"POST /p HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi")
        status, _, body = await answer_of(reader)
        assert (status, body) == (200, b"hi")


async def test_an_unread_body_is_dropped_and_a_slow_one_ends_the_connection(monkeypatch):
    monkeypatch.setattr(http_connection, "LINGER_S", 60.0)
    async with serving(say_path) as (_, server), connected(server) as (reader, writer):
        writer.write(POST + b"Content-Length: 500000\r\n\r\n")
        assert (await answer_of(reader))[0] == 200
        monkeypatch.setattr(http_connection, "LINGER_S", 0.1)
        writer.write(b"x" * 500_000 + POST + b"Content-Length: 9\r\n\r\n")
        assert (await answer_of(reader))[0] == 200
        assert await until_closed(reader) == b""


async def test_a_client_that_asks_to_close_reads_an_answer_that_comes_before_the_end_of_its_body():
    async with serving(say_path) as (_, server), connected(server) as (reader, writer):
        writer.write(POST + b"Connection: close\r\nContent-Length: 5000000\r\n\r\n")
        for _ in range(50):
            writer.write(b"x" * 100_000)
            await writer.drain()
        writer.write(b"GET /more HTTP/1.1\r\n\r\n")  # is not answered
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await until_closed(reader) == b""


# ---- what is not HTTP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
async def test_an_invalid_message_gets_400_and_the_end_of_the_connection(data):
    async with serving(say_path) as (app, server):
        answer = await exchange(server, data)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert b'{"error":{"message":"this is not a valid HTTP request"' in answer
        assert app.seen == []


async def test_garbage_behind_a_request_does_not_disturb_its_answer():
    async with serving(echo_body) as (_, server):
        answer = await exchange(server, POST + b"Content-Length: 2\r\n\r\nhi\x00\x01garbage\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"hi")


async def test_a_broken_body_fails_the_request():
    async with serving(echo_body) as (app, server):
        answer = await exchange(server, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nzz\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert "Transfer-Encoding is broken" in app.errors[0].message


# ---- stop -----------------------------------------------------------------------------------------------------------


async def test_a_stop_closes_idle_connections_and_lets_answers_end():
    go_on = asyncio.Event()

    async def answer_later(app, scope, receive, send):
        await go_on.wait()
        await reply(send)

    async with serving(answer_later) as (app, server), connected(server) as busy, connected(server) as idle:
        busy[1].write(b"GET /busy HTTP/1.1\r\n\r\n")
        await app.until(lambda: app.seen)
        stopping = asyncio.ensure_future(server.stop())
        assert await until_closed(idle[0]) == b""
        go_on.set()
        status, headers, _ = await answer_of(busy[0])
        assert (status, headers["connection"]) == (200, "close")
        await stopping
        server.stop = _noop


async def _noop():
    """Stand for ``stop`` after the server has stopped."""


async def test_a_stop_ends_connections_that_do_not_end_by_themselves(monkeypatch):
    monkeypatch.setattr("gateway.http.http_server.STOP_S", 0.2)
    async with serving(wait_for_ever) as (app, server), connected(server) as (reader, writer):
        writer.write(b"GET /x HTTP/1.1\r\n\r\n")
        await app.until(lambda: app.seen)
        await server.stop()
        assert app.cancelled == ["/x"]
        assert await until_closed(reader) == b""
        server.stop = _noop


async def test_an_application_that_cannot_start_is_reported():
    async def broken(scope, receive, send):
        raise LookupError("no start")

    options = ConnectionOptions(1.0, 1.0, 1024, lambda scope, status: None, ANY_HOST)
    with pytest.raises(ConfigError, match="did not start"):
        await HttpServer(broken, options).start("127.0.0.1", 0)


async def test_the_log_says_once_that_hardly_any_descriptor_is_left(caplog, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (8, 8))
    async with serving(say_path) as (_, server):
        for _ in range(3):
            await exchange(server, b"GET /a HTTP/1.0\r\n\r\n")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "of 8 descriptors are in use" in said[0], said
