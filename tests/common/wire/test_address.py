"""Addresses that a process may dial."""

import errno
import socket

import pytest
import zmq

from common.errors import ConfigError
from common.wire.address import cannot_bind, host_and_port, zmq_endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:8001", ("::1", 8001)),
        ("fe80::1%eth0:8001", ("fe80::1%eth0", 8001)),
        ("gateway.example-1.org:65535", ("gateway.example-1.org", 65535)),
        ("my_host:1", ("my_host", 1)),
    ],
)
def test_names_and_addresses_with_a_port_are_taken(text: str, expected: tuple[str, int]) -> None:
    assert host_and_port(text, "--gateway") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:" + "1" * 5_000,
        "http://10.0.0.1:8001",
        "*:8001",
        "a b:80",
        "host:٨٠",
        "a/b:80",
        "[x]:1",
    ],
)
def test_what_no_socket_can_dial_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gateway must be HOST:PORT"):
        host_and_port(text, "--gateway")


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:8001", "my_host:1", "a.b-c:2"])
def test_zmq_dials_what_is_taken(text: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{text}")


def test_localhost_is_the_same_address_to_listen_at_and_to_dial() -> None:
    assert zmq_endpoint("localhost:8001") == "tcp://127.0.0.1:8001"
    assert zmq_endpoint("[::1]:*") == "tcp://[::1]:*"
    assert zmq_endpoint("gateway.lan:8001") == "tcp://gateway.lan:8001"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.EADDRINUSE, "error while attempting to bind on address ('::1', 80): in use"),
            "address already in use; choose another with --port",
        ),
        (OSError(errno.EACCES, "Permission denied"), "permission denied; choose another with --port"),
        (zmq.ZMQError(errno.EADDRNOTAVAIL), "cannot assign requested address; choose another with --host"),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known; choose another with --host",
        ),
    ],
)
def test_an_address_that_cannot_be_bound_names_the_flag_to_change(error: OSError | zmq.ZMQError, sentence: str) -> None:
    assert str(cannot_bind("--host", "::1", "--port", 80, error)) == f"cannot bind --host ::1 --port 80: {sentence}"
