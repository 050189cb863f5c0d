"""A connection of the load tester on a fake transport, to which a test delivers bytes."""

import asyncio
from typing import Any

from scripts.load_tester.client.connection import Connection, Exchange


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.is_aborted = True


class FedConnection:
    """A connection that has sent a request; ``ended`` and ``lost`` record the calls to its owner."""

    def __init__(self) -> None:
        self.ended: list[Exchange] = []
        self.lost: list[Exchange | None] = []
        self.transport = FakeTransport()
        self.connection = Connection(self)
        self.connection.connection_made(self.transport)
        self.exchange = Exchange(None, b"POST", 0.0)
        self.connection.send(self.exchange)

    def on_response(self, connection: Connection, exchange: Exchange) -> None:
        self.ended.append(exchange)

    def on_lost(self, connection: Connection, exchange: Exchange | None) -> None:
        self.lost.append(exchange)

    def receive(self, data: bytes) -> None:
        """Deliver bytes from the server."""
        if not self.transport.is_aborted:
            self.connection.data_received(data)

    def hang_up(self) -> None:
        """Close the connection from the side of the server."""
        self.connection.connection_lost(None)
