"""A node's HTTP server against raw sockets: answers, limits of size, number and time, and a clean stop."""

import contextlib
import errno
import os
import socket
import threading
import time

import h11
import pytest
from support.waiting import until
from support.wire.mutated_http import mutated

from common.errors import ConfigError
from common.node.monitoring import http_server
from common.node.monitoring.http_server import Answer, HttpServer, address_of, listen

REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
#: Requests that mutations damage.
SEEDS = (
    REQUEST, b"GET /health?verbose=1 HTTP/1.0\r\n\r\n", b"HEAD /health HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
    b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", REQUEST + REQUEST,
    b"PUT /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
)  # fmt: skip


@pytest.fixture
def server():
    listener = listen("127.0.0.1", 0)
    running = HttpServer(listener, {"/health": lambda: Answer(200, "application/json", b"{}"), "/bug": lambda: 1 / 0})
    yield listener.getsockname()
    running.close()


def exchange(address, data):
    """All bytes of the answer to ``data``, up to the end of the connection."""
    with socket.create_connection(address, timeout=60) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := client.recv(65_536):
                answer += more
        return answer


def send_slowly(client):
    """Send a request line without an end."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        client.send(b"G")
        time.sleep(0.02)


def status(answer):
    return int(answer.split(b" ", 2)[1])


def test_a_get_of_a_known_path_is_answered_and_the_connection_closed(server):
    head, _, body = exchange(server, REQUEST + REQUEST).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert {b"content-type: application/json", b"content-length: 2", b"connection: close"} <= set(head.split(b"\r\n"))
    assert body == b"{}"  # a second request on the connection gets no answer
    assert b"server:" not in head.lower()


def test_a_query_is_ignored_and_http_1_0_is_served(server):
    assert status(exchange(server, b"GET /health?x=1 HTTP/1.0\r\n\r\n")) == 200


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /../health HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /%2568ealth HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        (b"DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"PUT /else HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # without a host
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n", 500),
    ],
)
def test_everything_else_is_refused(server, data, expected):
    answer = exchange(server, data)
    assert status(answer) == expected
    assert b"Traceback" not in answer
    assert b"ZeroDivision" not in answer
    assert status(exchange(server, REQUEST)) == 200


@pytest.mark.parametrize("first", range(0, 1_000, 250))
def test_mutated_requests_get_a_whole_answer_or_the_end_of_the_connection(server, first, caplog):
    for seed in range(first, first + 250):
        data = mutated(seed, SEEDS)
        answer = exchange(server, data)
        if answer:
            client = h11.Connection(h11.CLIENT)
            method = data.lstrip().partition(b" ")[0]
            client.send(h11.Request(method="HEAD" if method == b"HEAD" else "GET", target="/", headers=[("host", "x")]))
            client.receive_data(answer)
            response = client.next_event()
            assert response.status_code in (200, 400, 404, 405, 431, 501), (seed, data, answer)
            assert type(client.next_event()) in (h11.Data, h11.EndOfMessage), (seed, data, answer)
            assert (b"connection", b"close") in response.headers
    assert not caplog.records
    assert status(exchange(server, REQUEST)) == 200


def test_a_head_request_has_no_body(server):
    head, _, body = exchange(server, b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405")
    assert body == b""


def test_a_client_that_sends_byte_by_byte_is_cut_off(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(http_server, "EXCHANGE_S", 0.3)
        with socket.create_connection(server, timeout=60) as client:
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                send_slowly(client)
    assert status(exchange(server, REQUEST)) == 200


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_server, "EXCHANGE_S", 0.3)
    listener, asked = listen("127.0.0.1", 0), []
    answer = Answer(200, "text/plain", bytes(64 << 20))
    running = HttpServer(listener, {"/health": lambda: asked.append(1) or answer})
    address = listener.getsockname()
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(REQUEST)
        until(lambda: asked and not running._num_connections)
        received = 0
        with contextlib.suppress(ConnectionError):
            while more := client.recv(1 << 20):
                received += len(more)
        assert received < 64 << 20
    running.close()


def test_idle_connections_are_bounded_and_make_room_in_time(server, monkeypatch):
    monkeypatch.setattr(http_server, "EXCHANGE_S", 8.0)  # longer than it takes to open all connections
    idle = [socket.create_connection(server, timeout=60) for _ in range(http_server.MAX_CONNECTIONS)]
    until(lambda: not exchange(server, REQUEST))  # while not all of them are accepted, a further one may be served
    assert status(until(lambda: exchange(server, REQUEST))) == 200
    for client in idle:
        client.close()


def test_many_clients_at_once_are_served_or_closed_and_leave_nothing(server):
    results = []
    threads = [threading.Thread(target=lambda: results.append(exchange(server, REQUEST))) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 100
    assert {status(answer) for answer in results if answer} == {200}
    assert status(exchange(server, REQUEST)) == 200


def test_the_stop_closes_the_port_the_connections_and_every_descriptor():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before, num_threads = descriptors(), threading.active_count()
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    running = HttpServer(listener, {})
    assert status(exchange(address, REQUEST)) == 404  # it serves by now
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(b"GET /")
        running.close()
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=60)
    assert threading.active_count() <= num_threads  # fewer, if one of an earlier test has ended meanwhile
    assert descriptors() <= before


def test_connections_that_cannot_be_accepted_are_reported_once(caplog):
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    running = HttpServer(listener, {})
    assert status(exchange(address, REQUEST)) == 404  # it serves by now
    full = OSError(errno.EMFILE, "Too many open files")
    for _ in range(1_000):
        context = {"message": "socket.accept() out of system resource", "exception": full, "socket": None}
        running._loop.call_soon_threadsafe(running._loop.call_exception_handler, context)
    running.close()
    assert caplog.messages == [
        "no further connection can be accepted until others end: Too many open files; raise ulimit -n"
    ]


def test_a_port_in_use_is_named():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot bind --http-host 127.0.0.1 --http-port {port}: address already"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "10.0.0.7"), ("::1", "[::1]"), ("::", "10.0.0.7")]
)
def test_the_address_is_one_that_clients_can_use(host, expected):
    with listen(host, 0) as listener:
        assert address_of(listener, "10.0.0.7") == f"{expected}:{listener.getsockname()[1]}"
