"""A connection of the load test with a known other end: fed by hand as a transport does, or receiving in C."""

import asyncio
import socket
from contextlib import AbstractContextManager
from typing import Any

import pytest

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.courier import Courier, find_library

#: In C, and nobody waits for the end: nothing is looked at before ``catch_up``.
on_every_path = pytest.mark.parametrize("path", ["Python", "C", "C, later"])


class Wire(asyncio.Transport):
    def __init__(self, near: socket.socket) -> None:
        super().__init__({"socket": near})
        self.is_aborted = False
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


class Line(AbstractContextManager["Line"]):
    """One connection with a request sent; ``ended`` and ``lost`` are what it told its owner.

    Args:
        path: one of the three.
        courier: to receive with, instead of one of its own.
        pair: both ends, instead of a socket pair.
    """

    def __init__(
        self, path: str, courier: Courier | None = None, pair: tuple[socket.socket, socket.socket] | None = None
    ) -> None:
        self.ended: list[Exchange] = []
        self.lost: list[Exchange | None] = []
        self.errors: list[Exception | None] = []
        self.courier = courier
        if path != "Python" and courier is None:
            if not find_library():
                pytest.skip("no C compiler here")
            self.courier = Courier(find_library())
        self._is_own = courier is None
        self.near, self.far = pair or socket.socketpair()
        self.near.setblocking(False)
        self.far.settimeout(10)
        self.wire = Wire(self.near)
        self.connection = Connection(self, self.courier)
        self.connection.connection_made(self.wire)
        self.connection.hand_over()
        self.exchange = Exchange(None, b"POST", 0.0, is_awaited=path != "C, later")
        self.connection.send(self.exchange)

    def on_response(self, connection: Connection, exchange: Exchange) -> None:
        self.ended.append(exchange)

    def on_lost(self, connection: Connection, exchange: Exchange | None, error: Exception | None) -> None:
        self.lost.append(exchange)
        self.errors.append(error)

    def receive(self, data: bytes) -> None:
        """The other end sends this; in C, only what has to be looked at is."""
        if self.courier is None:
            if not self.wire.is_aborted:
                self.connection.data_received(data)
            return
        self.far.sendall(data)
        while self.courier.wait(0.0):
            self.courier.deliver()

    def catch_up(self) -> None:
        if self.courier:
            self.courier.catch_up()

    def hang_up(self) -> None:
        if self.courier is None:
            self.connection.connection_lost(None)
            return
        self.far.close()
        assert self.courier.wait(0.0)
        self.courier.deliver()

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        if self.courier and self._is_own:
            self.courier.close()
        self.near.close()
        self.far.close()
