"""Serves an ASGI application over HTTP on uvicorn's protocol, from the sockets to the clean stop.

uvicorn's own ``Server`` is not used: it ends the process if a port is in use, takes the process's signals, and polls
ten times a second while it starts and stops.
"""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from common.errors import ConfigError
from gateway.http.http_connection import HttpConnection
from gateway.http.request_cycle import ConnectionOptions

#: How long connections may wait at a stop until their clients have read the last answers.
STOP_S = 1.0
BACKLOG = 1024
#: How long a TLS handshake may take.
HANDSHAKE_S = 10.0


class HttpServer:
    """Serves one ASGI application.

    Args:
        starts_app: the application starts and stops with this server; otherwise another server has started it.
    """

    def __init__(
        self, app: ASGIApp, options: ConnectionOptions, tls: ssl.SSLContext | None = None, *, starts_app: bool = True
    ) -> None:
        self._tls = tls
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            interface="asgi3",  # not guessed from the application
            ws="none",
            lifespan="on" if starts_app else "off",
            proxy_headers=False,
            access_log=False,
            log_config=None,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._config.load()
        self._options = options
        self._state = ServerState()
        self._lifespan = self._config.lifespan_class(self._config)
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int) -> None:
        """Start the application and listen.

        Raises OSError: the port cannot be bound; ConfigError: the application did not start.
        """
        await self.start_app()
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(self._new_connection, host, port, **self._limits()))

    async def start_app(self) -> None:
        """Raises ConfigError: the application did not start."""
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise ConfigError("the HTTP application did not start; the log says why")

    async def accept_from(self, listener: socket.socket) -> None:
        """Accept connections from a socket that listens already; it is closed with this server."""
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(self._new_connection, sock=listener, backlog=BACKLOG))
        else:
            self._servers.append(await loop.create_server(self._new_connection, sock=listener, **self._limits()))

    def _limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = {"ssl": self._tls, "backlog": BACKLOG}
        if self._tls is not None:
            # Connections end the shutdown themselves: this timeout does not regard whether a client still reads.
            limits |= {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": math.inf}
        return limits

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._lifespan.state, self._options)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port as bound first."""
        host, port = self._servers[0].sockets[0].getsockname()[:2]
        return host, port

    @property
    def connections(self) -> Sequence[HttpConnection]:
        return list(self._state.connections)  # type: ignore[arg-type]  # all made by ``_new_connection``

    @property
    def has_new_connections(self) -> bool:
        """Whether a client has been accepted and has not sent its first request yet."""
        return any(connection.cycle is None for connection in self.connections)

    @property
    def is_answering(self) -> bool:
        """Whether a request has come whose answer has not ended."""
        cycles = [connection.cycle for connection in self.connections]
        return any(cycle is not None and not cycle.response_complete for cycle in cycles)

    def close_listeners(self) -> None:
        """Accept no further connections."""
        for server in self._servers:
            server.close()

    async def stop(self) -> None:
        """Close all connections, each after the answer to its request in flight, and stop the application."""
        self.close_listeners()
        for connection in self.connections:
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._until_closed()
        for connection in self.connections:
            connection.transport.abort()
        await self._until_closed()
        await self._lifespan.shutdown()

    async def _until_closed(self) -> None:
        while self._state.connections or self._state.tasks:
            await asyncio.sleep(0.002)
