"""How NIXL's writer knocks at a reader's door: whoever is on this host lets it in or turns it away, and is watched."""

import os
import secrets
import select
import socket
from collections.abc import Iterator

import pytest
from kv_fakes import GEOMETRY

from common.messages import Connect
from kv_transfer.transports import nixl_attach
from kv_transfer.transports.base import to_message
from kv_transfer.transports.nixl_attach import knock
from kv_transfer.transports.nixl_route import Endpoint, Route

TOKEN = "5" * 64


@pytest.fixture
def name() -> str:
    return f"baton-{secrets.token_hex(16)}"


@pytest.fixture
def route(name: str) -> Iterator[Route]:
    connect = Connect("decode-0", "model", 1, to_message(GEOMETRY), 8, "nixl", "")
    route = Route("d" * 32, connect, Endpoint("", 0, 0, f"{name}:{TOKEN}"), 10.0)
    yield route
    if route.door is not None:
        route.door.close()
    if route.pidfd >= 0:
        os.close(route.pidfd)


@pytest.fixture
def listener(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(0)
        yield listener


def test_a_reader_on_this_host_gets_the_token_and_is_watched(route: Route, listener: socket.socket) -> None:
    assert knock(route) is True
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(64).hex() == TOKEN
    assert select.select([route.pidfd], [], [], 0)[0] == []
    assert route.is_reader_dead is False


def test_a_reader_on_another_host_is_neither_asked_nor_watched(route: Route) -> None:
    assert knock(route) is True
    assert (route.door, route.pidfd) == (None, -1)


def test_being_turned_away_is_no_sign_of_another_host(
    route: Route, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader may close before the writer has had a second look at it."""
    plain = nixl_attach.peer_pidfd

    def late(door: socket.socket) -> int:
        listener.accept()[0].close()
        return plain(door)

    monkeypatch.setattr(nixl_attach, "peer_pidfd", late)
    with pytest.raises(ConnectionError, match="another token or user"):
        knock(route)
    assert (route.door, route.pidfd) == (None, -1)


def test_a_crowd_at_the_door_is_waited_out(route: Route, name: str, listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(f"\0{name}")
        assert knock(route) is False
        listener.accept()[0].close()
        assert knock(route) is True
    assert route.door is not None
