"""The load of tests with hosts: which broken connections it may try again, and which are failures."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.service.steady_load import Load

BODY = json.dumps({"choices": [{"text": "answer"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def answer(connection: socket.socket) -> None:
    connection.sendall(HEAD + BODY)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def close(connection: socket.socket) -> None:
    """Without an answer."""


def break_off(connection: socket.socket) -> None:
    connection.sendall(HEAD + BODY[:5])


@contextmanager
def gateway(*steps: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server whose connections end in these ways, one after the other."""

    def serve() -> None:
        for step in steps:
            connection, _ = listener.accept()
            with connection:
                received = b""
                while b'"temperature"' not in received:
                    received += connection.recv(65536)
                step(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_a_connection_that_is_reset_before_its_answer_is_tried_again() -> None:
    with gateway(reset, answer) as port:
        assert Load(["127.0.0.1"], port).ask(0, "key") == "answer"


@pytest.mark.parametrize("lost", [close, break_off])
def test_an_answer_that_breaks_off_is_a_failure_unless_gateways_are_lost(
    lost: Callable[[socket.socket], None],
) -> None:
    with gateway(lost) as port, pytest.raises(Exception, match=r"IncompleteRead|without response"):
        Load(["127.0.0.1"], port).ask(0, "key")
    with gateway(lost, answer) as port:
        assert Load(["127.0.0.1"], port, may_lose_gateways=True).ask(0, "key") == "answer"
