"""Which TCP connections count as silent, by what the kernel says of them."""

import contextlib
import socket
import time
from dataclasses import replace

import pytest

from kv_transfer.transports.nixl.agent import is_of_agent
from kv_transfer.transports.silence import ConnectionInfo, has_silent, is_silent, is_waiting, shut_silent

LOST = ConnectionInfo(
    host="10.0.0.2",
    port=4001,
    own_port=50000,
    num_retransmissions=2,
    is_waiting=True,
    unacknowledged_s=0.9,
    unheard_s=0.9,
)
ANSWERING = replace(LOST, port=8002, num_retransmissions=0, is_waiting=False, unacknowledged_s=0.2, unheard_s=0.2)


def metadata(host: str, port: int) -> bytes:
    return b"Conns|" + socket.inet_aton(host) + b"\xcf" + port.to_bytes(2, "big") + b"|"


def test_a_connection_is_silent_while_its_host_answers_over_another_one() -> None:
    assert is_silent(LOST, [ANSWERING], 0.9)
    assert is_silent(LOST, [replace(LOST, port=8003), ANSWERING], 0.9)


@pytest.mark.parametrize(
    "alive",
    [
        replace(LOST, is_waiting=False),
        replace(LOST, num_retransmissions=1),
        replace(LOST, unacknowledged_s=0.7),
        replace(LOST, unacknowledged_s=0.1),
    ],
    ids=["nothing was sent", "one packet was lost", "a short while", "a slow reader that acknowledges"],
)
def test_a_connection_that_may_be_slow_is_not_silent(alive: ConnectionInfo) -> None:
    assert not is_silent(alive, [ANSWERING], 9.0)


def test_a_host_that_answers_nowhere_is_left_to_the_control_plane() -> None:
    assert not is_silent(replace(LOST, unacknowledged_s=60.0), [replace(ANSWERING, unheard_s=59.8)], 60.0)


def test_a_host_to_which_packets_wait_in_a_long_queue_does_not_count_as_answering() -> None:
    waiting = replace(ANSWERING, is_waiting=True, num_retransmissions=1)
    assert not is_silent(LOST, [waiting], 0.9)
    assert is_silent(LOST, [waiting, replace(ANSWERING, port=8003)], 0.9)


def test_a_connection_that_was_idle_before_is_silent_only_since_the_write_began() -> None:
    assert not is_silent(replace(LOST, unacknowledged_s=20.7), [ANSWERING], 0.7)


def test_without_another_connection_the_silence_must_be_longer() -> None:
    assert not is_silent(replace(LOST, unacknowledged_s=2.9), [], 9.0)
    assert is_silent(replace(LOST, unacknowledged_s=3.0), [], 3.0)


def test_connections_of_ucx_are_known_by_the_metadata_of_the_end_that_was_dialled() -> None:
    reader, own = metadata("10.0.0.2", 4001), metadata("10.0.0.1", 4000)
    assert is_of_agent(LOST, reader, own)
    assert is_of_agent(replace(LOST, port=50001, own_port=4000), reader, own)
    assert not is_of_agent(ANSWERING, reader, own)
    assert not is_of_agent(replace(LOST, host="10.0.0.3"), reader, own)


def test_a_reader_that_does_not_read_keeps_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        accepted, _ = server.accept()
        with accepted:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            time.sleep(1.2)
            assert shut_silent(lambda info: info.port == server.getsockname()[1], 9.0) == 0
            assert not has_silent([sock], 9.0) and not is_waiting(sock)
            accepted.setblocking(True)
            assert accepted.recv(1 << 16)
            sock.setblocking(True)
            sock.sendall(b"more")
